"""The style "linear_loss": loss and gradients of the ordinary plan, and no tensor as large as the logits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from hyper_parallel.core.placement_types import Replicate, Shard
from tests.conformance.groups import on_groups
from tests.harness import run_distributed, this_rank
from tests.tensor_parallel.small_models import build, gradient_error, own_part, tokens, value

VOCAB, LENGTH = 11, 7
CLOSE = 1e-12
FORMS = ("flat", "sliced", "none", "flattened")


def plan_of(sequence: bool, head: Any) -> dict[str, Any]:
    """Of the model Tiny."""
    from hyper_parallel import RowwiseParallel, SequenceParallel

    mlp = {"layers.*.mlp.gate": "colwise", "layers.*.mlp.up": "colwise"}
    if not sequence:
        return {"embed": "embedding_rowwise", **mlp, "layers.*.mlp.down": "rowwise", "head": head}
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "layers.*.norm": SequenceParallel(),
        **mlp,
        "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "head": head,
    }


def loss_of(adapter: Any, logits: Any, labels: np.ndarray, form: str) -> Any:
    """The ways in which models write their loss."""
    if form == "sliced":
        logits, labels = logits[..., :-1, :].contiguous(), labels[:, 1:]
    target = adapter.tensor(labels.reshape(-1), "int32" if on_mindspore() else "int64")
    if form == "flattened":
        return adapter.cross_entropy(logits.flatten(start_dim=0, end_dim=1).double(), target)
    if form == "none":
        return loss_with(logits.reshape(-1, VOCAB), target, reduction="none")
    return adapter.cross_entropy(logits.float().double().view((-1, logits.shape[-1])), target)


def on_mindspore() -> bool:
    from hyper_parallel import get_platform

    return bool(get_platform().name == "mindspore")


def loss_with(logits: Any, target: Any, **options: Any) -> Any:
    if on_mindspore():
        from mindspore import ops

        return ops.cross_entropy(logits, target, **options)
    import torch

    return torch.nn.CrossEntropyLoss(**options)(logits, target)


def beside(form: str, tied: bool, sequence: bool) -> tuple[float, float, str]:
    from hyper_parallel import parallelize_module
    from hyper_parallel.loss_parallel import loss_parallel
    from tests.tensor_parallel.adapters import this_adapter
    from tests.tensor_parallel.model_steps import beside_one_device, worst_gradient

    adapter = this_adapter()
    random = np.random.default_rng(0)
    ids = adapter.tensor(random.integers(0, VOCAB, (2, LENGTH)), "int64")
    labels = random.integers(0, VOCAB, (2, LENGTH))
    labels[0, 2] = -100
    upstream = random.standard_normal(2 * LENGTH) if form == "none" else 1.5

    def loss(model: Any, ids: Any) -> Any:
        with loss_parallel():
            return loss_of(adapter, model(ids), labels, form)

    one, own, named = beside_one_device(
        lambda: adapter.module("Tiny", False, tied),
        lambda model: parallelize_module(model, adapter.mesh["tp"], plan_of(sequence, "linear_loss")),
        [ids],
        upstream,
        loss,
    )
    return float(np.abs(own.value - one.value).max()), *worst_gradient(one, own, named)


@pytest.mark.contract("T4", "G1")
@on_groups(1, 2, 4)
@pytest.mark.parametrize(
    ("form", "tied", "sequence"),
    [(f, False, s) for f in FORMS for s in (False, True)] + [("flat", True, False), ("flat", True, True)],
)
def test_beside_one_device(form: str, tied: bool, sequence: bool, platform: str, world_size: int) -> None:
    close = 1e-6 if form == "flat" or form == "sliced" else CLOSE  # one device's logits are rounded by float()
    if platform == "mindspore" and sequence:
        close = 1e-6  # its CPU kernel sums the gradients of a LayerNorm's parameters in float32
    for loss, gradient, where in run_distributed(
        beside, form, tied, sequence, platform=platform, world_size=world_size, timeout=60
    ):
        assert loss < close and gradient < close, where


def refusals() -> dict[str, str]:
    from hyper_parallel import HyperParallelError, LinearLossParallel, parallelize_module
    from hyper_parallel.loss_parallel import loss_parallel
    from tests.tensor_parallel.adapters import this_adapter

    adapter = this_adapter()
    model = adapter.module("linear", 6, VOCAB)
    x = adapter.tensor(np.random.default_rng(1).standard_normal((2, 3, 6)))
    expected = adapter.array(model(x))
    parallelize_module(model, adapter.mesh, LinearLossParallel(chunk_size=2))
    logits, found = model(x), {}
    flat, target = logits.view(-1, VOCAB), adapter.tensor(np.zeros(6), "int64")
    assert logits.shape == (2, 3, VOCAB) and logits.ndim == 3 and logits[:, -1].shape == (2, VOCAB)
    assert not hasattr(logits, "full_tensor")
    weights = adapter.tensor(np.ones(VOCAB))
    if on_mindspore():
        from mindspore import mint, nn, ops

        ways = [ops.cross_entropy, mint.nn.functional.cross_entropy, mint.nn.CrossEntropyLoss(), nn.CrossEntropyLoss()]
        with loss_parallel():
            losses = [float(way(flat.float(), target).to_local()) for way in ways]
        assert max(losses) == min(losses)
    cases: dict[str, Any] = {
        "outside": lambda: adapter.cross_entropy(flat, target),
        "sum": lambda: logits + 1,
        "method": lambda: logits.argmax(-1),
        "classes": lambda: logits[..., :2],
        "shape": lambda: logits.view(6, VOCAB, 1),
        "smoothing": lambda: loss_with(flat, target, label_smoothing=0.1),
        "log-probabilities": lambda: log_softmax(flat),
        "weights": lambda: loss_with(flat, target, weight=weights),
        "class dim": lambda: adapter.cross_entropy(logits, target.reshape(2, 3)),
        "target": lambda: adapter.cross_entropy(flat, target + 99),
    }
    for name, case in cases.items():
        try:
            with nullcontext() if name == "outside" else loss_parallel():
                case()
        except (HyperParallelError, IndexError) as error:
            found[name] = str(error)
        except TypeError:
            assert name == "log-probabilities" and on_mindspore()
        else:
            raise AssertionError(f"{name} was not refused")
    whole = logits.materialize()
    np.testing.assert_allclose(adapter.array(whole.full_tensor()), expected, atol=1e-12)
    return found


def log_softmax(logits: Any) -> Any:
    if on_mindspore():
        from mindspore import ops

        return ops.log_softmax(logits, -1)
    import torch

    return torch.log_softmax(logits, -1)


@pytest.mark.contract("E1")
@on_groups(2)
def test_what_is_refused(platform: str, world_size: int) -> None:
    for found in run_distributed(refusals, platform=platform, world_size=world_size):
        assert "outside loss_parallel()" in found["outside"] and "materialize()" in found["outside"]
        functions = ["log-probabilities"] if platform == "torch" else []  # MindSpore's do not ask
        for name in ["sum", "method", "classes", "shape", *functions]:
            assert "not computed" in found[name] and "materialize()" in found[name]
        assert "label_smoothing=0.1" in found["smoothing"] and "class weights" in found["weights"]
        assert "class dim" in found["class dim"] and "out of bounds" in found["target"]


def largest(head: str) -> tuple[int, int]:
    """The most elements of a tensor that is made in forward and backward, and those of this rank's logits."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from hyper_parallel import loss_parallel, parallelize_module
    from tests.tensor_parallel.torch_workers import tp_mesh

    class Sizes(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(x, torch.Tensor):
                    self.most = max(self.most, x.numel())
            return result

    model = torch.nn.Linear(8, 1024)
    parallelize_module(model, tp_mesh(), {"": head})
    with Sizes() as sizes, loss_parallel():
        logits = model(torch.ones(512, 8, requires_grad=True))
        torch.nn.functional.cross_entropy(logits, torch.arange(512)).backward()
    return sizes.most, 512 * 1024 // torch.distributed.get_world_size()


@pytest.mark.platform("torch")
def test_the_logits_are_never_there() -> None:
    for most, logits in run_distributed(largest, "linear_loss", world_size=2):
        assert most <= logits // 8
    for most, logits in run_distributed(largest, "colwise_loss_parallel", world_size=2):
        assert most == logits  # what is measured


def llama(tied: bool, sequence: bool, own_plan: bool) -> tuple[float, float, str, float]:
    from hyper_parallel import ParallelismConfig, parallelize_module
    from hyper_parallel.loss_parallel import loss_parallel
    from hyper_parallel.tensor_parallel.auto_plan import auto_plan
    from tests.tensor_parallel.torch_workers import tp_mesh

    reference, model, ids = build("llama", tied=tied), build("llama", tied=tied), tokens(length=9)
    expected = reference(ids, labels=ids)
    expected.loss.backward()
    if own_plan:
        plan = {**auto_plan(model, ParallelismConfig(), sequence_parallel=sequence), "lm_head": "linear_loss"}
        parallelize_module(model, tp_mesh(), plan)
    else:
        parallelize_module(model, tp_mesh(), sequence_parallel=sequence, head="linear_loss")
    with loss_parallel():
        out = model(ids, labels=ids)
    out.loss.backward()
    logits = float((out.logits.materialize().full_tensor() - expected.logits).abs().max())
    loss = abs(value(out.loss) - float(expected.loss)) / float(expected.loss)
    return loss, *gradient_error(reference, model, this_rank()), logits


@pytest.mark.contract("T4")
@pytest.mark.platform("torch")
@pytest.mark.parametrize(
    ("tied", "sequence", "own_plan"),
    [(False, False, True), (True, False, True), (False, True, False), (True, True, False)],
)
def test_unmodified_llama(tied: bool, sequence: bool, own_plan: bool) -> None:
    pytest.importorskip("transformers")
    for loss, gradient, where, logits in run_distributed(llama, tied, sequence, own_plan, world_size=2, timeout=120.0):
        assert loss < 1e-5 and gradient < 1e-5 and logits < 1e-9, where  # transformers computes the loss in fp32


def with_data_parallel(how: str) -> float:
    """2 x 2 ranks: the worst error of a gradient after DDP or FSDP2 over the other mesh dim."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from hyper_parallel import get_platform, init_device_mesh, parallelize_module
    from hyper_parallel.loss_parallel import loss_parallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row, column = mesh.coordinate
    reference, model, ids = build("llama", tied=True), build("llama", tied=True), tokens(batch=4)
    reference(ids, labels=ids).loss.backward()
    parallelize_module(model, mesh, head="linear_loss")
    parts = [own_part(p.grad, q, column) for p, q in zip(reference.parameters(), model.parameters())]
    if how == "ddp":
        outer = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp").handle)
    else:
        outer = fully_shard(model, mesh=get_platform().native_mesh(mesh)["dp"])
    own = ids[2 * row : 2 * row + 2]
    with loss_parallel():
        outer(own, labels=own).loss.backward()
    grads = [p.grad.full_tensor() if how == "fsdp2" else p.grad for p in model.parameters()]
    return max(float((a - b).abs().amax() / b.abs().amax().clamp(min=1e-3)) for a, b in zip(grads, parts))


@pytest.mark.platform("torch")
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_with_data_parallel(how: str) -> None:
    pytest.importorskip("transformers")
    assert max(run_distributed(with_data_parallel, how, world_size=4, timeout=120.0)) < 1e-5

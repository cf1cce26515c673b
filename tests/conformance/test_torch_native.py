"""PyTorch's own DTensors and parallel styles in the context: existing code changes one import."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import numpy as np
import pytest

from tests.harness import run_distributed, this_world_size

on_torch = pytest.mark.parametrize(
    ("platform", "world_size"), [pytest.param("torch", size, id=f"torch-{size}") for size in (2, 3)]
)


@pytest.mark.contract("G1", "G5", "P2")
@on_torch
@pytest.mark.parametrize("loss_as", ["function", "module", "decomposed"])
@pytest.mark.parametrize("plain_target", [True, False])
def test_colwise_parallel_output(platform: str, world_size: int, loss_as: str, plain_target: bool) -> None:
    """``ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)``: weight and input gradients are those of
    one process, and the vocabulary may be uneven."""
    run_distributed(colwise, loss_as, plain_target, platform=platform, world_size=world_size)


def colwise(loss_as: str, plain_target: bool) -> None:
    """In a worker."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from hyper_parallel.loss_parallel import loss_parallel

    torch.manual_seed(0)
    vocabulary = 13
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, vocabulary))
    single = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, vocabulary))
    single.load_state_dict(model.state_dict())
    tokens = torch.randn(2, 3, 8)
    labels = torch.randint(vocabulary, (2, 3))
    labels[0, 1] = -100
    mesh = init_device_mesh("cpu", (this_world_size(),))
    parallelize_module(model[1], mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))

    def loss_of(logits: Any, target: Any) -> Any:
        logits, target = logits.flatten(0, 1).float(), target.flatten(0, 1)
        if loss_as == "function":
            return F.cross_entropy(logits, target)
        if loss_as == "module":
            return torch.nn.CrossEntropyLoss()(logits, target)
        return F.nll_loss(F.log_softmax(logits, -1), target)

    target = labels if plain_target else distribute_tensor(labels, mesh, [Replicate()])
    with loss_parallel():
        loss = loss_of(model(tokens), target)
        assert isinstance(loss, DTensor) and loss.placements == (Replicate(),)
        loss.backward()
    expected = loss_of(single(tokens), labels)
    expected.backward()
    torch.testing.assert_close(loss.to_local(), expected, rtol=1e-5, atol=0.0)
    assert abs(loss.item() - expected.item()) < 1e-5
    for parameter, wanted in zip(model.parameters(), single.parameters()):
        grad = parameter.grad
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(full, wanted.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.contract("G3", "L3", "TRAP5")
@on_torch
def test_hook_is_gone(platform: str, world_size: int) -> None:
    """After the context, also by an exception, PyTorch's DTensors take PyTorch's path again."""
    run_distributed(hook_is_gone, platform=platform, world_size=world_size)


def native_logits() -> tuple[Any, Any, Any]:
    """In a worker: logits of PyTorch, their target, and the loss of one process."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (this_world_size(),))
    rng = np.random.default_rng(0)
    whole = torch.tensor(rng.standard_normal((4, 12)), dtype=torch.float32)
    target = torch.tensor([0, 11, 5, 3])
    return distribute_tensor(whole, mesh, [Shard(1)]), target, F.cross_entropy(whole, target)


def hook_is_gone() -> None:
    """In a worker."""
    import torch.nn.functional as F
    from torch.distributed.tensor import DTensor
    from torch.overrides import _get_current_function_mode_stack

    from hyper_parallel.loss_parallel import loss_parallel

    logits, target, expected = native_logits()
    assert not _get_current_function_mode_stack()
    with loss_parallel():
        assert len(_get_current_function_mode_stack()) == 1
        loss = F.cross_entropy(logits, target)
        assert isinstance(loss, DTensor) and abs(loss.item() - expected.item()) < 1e-5
    with pytest.raises(KeyError), loss_parallel(), loss_parallel():
        raise KeyError
    assert not _get_current_function_mode_stack()


@pytest.mark.contract("I2", "L3")
@on_torch
def test_copied_context_in_a_thread(platform: str, world_size: int) -> None:
    """PyTorch's modes belong to a thread: in another one, a copy of the context leaves PyTorch's DTensors to PyTorch,
    which computes the same number or refuses."""
    run_distributed(copied_context, platform=platform, world_size=world_size)


def copied_context() -> None:
    """In a worker."""
    import torch.nn.functional as F
    from torch.distributed.tensor import Replicate, distribute_tensor

    from hyper_parallel.loss_parallel import loss_parallel

    logits, target, expected = native_logits()
    target = distribute_tensor(target, logits.device_mesh, [Replicate()])
    found: list[Any] = []
    with loss_parallel():
        copy = contextvars.copy_context()
        thread = threading.Thread(
            target=copy.run, args=(lambda: found.append(_value(F.cross_entropy(logits, target))),)
        )
        thread.start()
        thread.join()
    assert abs(found[0] - expected.item()) < 1e-5, (found, expected)


def _value(loss: Any) -> float:
    from torch.distributed.tensor import DTensor

    return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


@pytest.mark.contract("E1", "E2", "TRAP4", "TRAP8")
@on_torch
@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ("smoothing", "LossParallelUnsupportedError", "label_smoothing=0.1"),
        ("probabilities", "LossParallelUnsupportedError", "class probabilities are not supported"),
        ("out of range", "IndexError", "Target 12 is out of bounds for 12 classes"),
        ("shard dim", "LossParallelLayoutError", "S(0)@"),
        ("sharded target", "LossParallelLayoutError", "the target has"),
        ("disagreement", "LossParallelLayoutError", "disagree"),
    ],
)
def test_errors(platform: str, world_size: int, wrong: str, error: str, says: str) -> None:
    """The same errors as for our DTensors, on every rank."""
    raised = run_distributed(native_error, wrong, platform=platform, world_size=world_size, expect_error=True)
    assert len(set(raised)) == 1
    assert raised[0].type == error and says in raised[0].message, raised[0]


def native_error(wrong: str) -> None:
    """In a worker."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.tensor import Shard, distribute_tensor

    from hyper_parallel.loss_parallel import loss_parallel
    from tests.harness import this_rank

    logits, target, _ = native_logits()
    options: dict[str, Any] = {}
    if wrong == "smoothing":
        options["label_smoothing"] = 0.1
    elif wrong == "probabilities":
        target = torch.full((4, 12), 1 / 12)
    elif wrong == "out of range":
        target[2] = 12
    elif wrong == "shard dim":
        logits = logits.redistribute(placements=[Shard(0)])
    elif wrong == "sharded target":
        target = distribute_tensor(target, logits.device_mesh, [Shard(0)])
    elif this_rank() == 1:
        options["reduction"] = "sum"
    with loss_parallel():
        F.cross_entropy(logits, target, **options)


@pytest.mark.contract("P1")
@on_torch
def test_replicated(platform: str, world_size: int) -> None:
    """Replicated native logits, with plain labels too, and plain logits beside a native target."""
    run_distributed(replicated, platform=platform, world_size=world_size)


def replicated() -> None:
    """In a worker."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.tensor import Replicate, distribute_tensor

    from hyper_parallel.loss_parallel import loss_parallel

    logits, target, expected = native_logits()
    whole = logits.full_tensor()
    target_r = distribute_tensor(target, logits.device_mesh, [Replicate()])
    with loss_parallel():
        for x, y in ((logits.redistribute(placements=[Replicate()]), target), (whole, target_r), (whole, target)):
            assert abs(_value(F.cross_entropy(x, y)) - expected.item()) < 1e-6
        both = F.cross_entropy(logits.redistribute(placements=[Replicate()]), target_r)
        assert abs(_value(both) - expected.item()) < 1e-6
        smoothed = F.cross_entropy(whole, target, label_smoothing=0.1)
    torch.testing.assert_close(smoothed, F.cross_entropy(whole, target, label_smoothing=0.1))


@pytest.mark.contract("G3")
@on_torch
def test_mesh_can_still_be_copied(platform: str, world_size: int) -> None:
    """What the library remembers on PyTorch's mesh stays out of its copies and pickles."""
    run_distributed(mesh_copies, platform=platform, world_size=world_size)


def mesh_copies() -> None:
    """In a worker."""
    import copy
    import io
    import pickle

    import torch
    import torch.nn.functional as F

    from hyper_parallel.loss_parallel import loss_parallel

    logits, target, expected = native_logits()
    for _ in range(2):
        mesh = copy.deepcopy(logits.device_mesh)
        assert mesh == logits.device_mesh == pickle.loads(pickle.dumps(logits.device_mesh))
        copy.deepcopy(logits._spec)
        torch.save(logits, io.BytesIO())
        with loss_parallel(mesh):
            assert abs(_value(F.cross_entropy(logits, target)) - expected.item()) < 1e-5

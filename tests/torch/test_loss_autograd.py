"""How the PyTorch loss kernels behave as autograd nodes: what they send, keep, write and refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel.loss_parallel import reference
from hyper_parallel.platform.call_check import HEADER_LENGTH
from hyper_parallel.platform.loss_kernels import LossOptions
from tests.torch.loss_calls import class_shard, kernels, local_logits, numpy64, run

pytestmark = pytest.mark.platform("torch")

COUNT, CLASSES = 64, 12


def problem() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(COUNT, CLASSES)), rng.integers(0, CLASSES, COUNT)


def call(x: Any, target: np.ndarray, **options: Any) -> Any:
    """The summed loss of class-sharded logits; in a worker."""
    import torch

    weight = torch.ones(CLASSES) if options.pop("weighted", False) else None
    shard = class_shard(CLASSES)
    return kernels().cross_entropy(x, 1, torch.tensor(target), shard, weight, LossOptions(**options))[0].sum()


# -- what is sent ----------------------------------------------------------------------------------------


def count_collectives(kind: str, options: dict[str, Any]) -> list[list[tuple[str, int]]]:
    """(name, bytes sent) of every collective forward, then backward."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[tuple[str, int]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                sent = args[1] if "gather" in func.__name__ else args[0]
                sent = sent[0] if isinstance(sent, (list, tuple)) else sent
                seen.append((func.__name__.split(".")[0].strip("_"), sent.nbytes))
            return func(*args, **(kwargs or {}))

    logits, target = problem()
    x = local_logits(logits, 1, "float32")
    with Watch():
        if kind == "cross_entropy":
            loss = call(x, target, **options)
        else:
            shard = class_shard(CLASSES)
            loss = kernels().log_softmax(x, 1, shard, **options)
            if kind == "nll_loss":
                loss = kernels().nll_loss(loss, 1, torch.tensor(target), shard, None, LossOptions(**options))[
                    0
                ]
            loss = loss.sum()
        forward = list(seen)
        seen.clear()
        loss.backward()
    return [forward, list(seen)]


HEADER = 8 * HEADER_LENGTH


@pytest.mark.contract("G2", "K3")
@pytest.mark.parametrize(
    "options, forward",
    [
        ({"validate": False}, [12 * COUNT]),
        ({"validate": True}, [HEADER, 12 * COUNT]),
        ({}, [HEADER, 12 * COUNT]),  # CPU: validated
        ({"validate": False, "weighted": True, "z_loss": 0.1}, [12 * COUNT]),
        ({"validate": False, "label_smoothing": 0.1}, [16 * COUNT + 4]),
    ],
)
def test_cross_entropy_sends_statistics_forward_and_nothing_backward(
    options: Any, forward: list[int]
) -> None:
    for sent, sent_backward in run(count_collectives, "cross_entropy", options):
        assert [size for _, size in sent] == forward
        assert all("gather" in name for name, _ in sent)
        assert sent_backward == []


@pytest.mark.contract("G2", "K1")
def test_the_decomposed_route_sends_statistics() -> None:
    for sent, sent_backward in run(count_collectives, "log_softmax", {"validate": False}):
        assert [size for _, size in sent] == [8 * COUNT]
        assert [size for _, size in sent_backward] == [4 * COUNT]
    for sent, sent_backward in run(count_collectives, "nll_loss", {"validate": False}):
        assert [size for _, size in sent] == [8 * COUNT, 4 * COUNT]
        assert [size for _, size in sent_backward] == [4 * COUNT]  # log_softmax's; the NLL adds none


# -- what is kept ----------------------------------------------------------------------------------------


def bytes_kept(dtype: str, options: dict[str, Any]) -> tuple[int, int]:
    """Bytes kept for backward: in the logits' memory, and elsewhere."""
    import torch

    logits, target = problem()
    x = local_logits(logits, 1, dtype)
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        call(x, target, **options)
    alias = [t for t in kept if t.data_ptr() == x.data_ptr()]
    return sum(t.nbytes for t in alias), sum(t.nbytes for t in kept if t.data_ptr() != x.data_ptr())


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.1}])
def test_at_most_16_bytes_a_token_are_kept(dtype: str, options: dict[str, Any]) -> None:
    for alias, more in run(bytes_kept, dtype, options):
        assert alias == COUNT * CLASSES // 2 * {"float32": 4, "bfloat16": 2}[dtype]
        assert more <= 16 * COUNT


def largest_fp32_tensor() -> float:
    """The largest fp32 storage that bf16 logits lead to, as a part of these logits in fp32."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(t, torch.Tensor) and t.dtype == torch.float32:
                    largest = max(largest, t.untyped_storage().nbytes())
            return out

    rows, classes = 512, 16384
    x = torch.zeros(rows, classes, dtype=torch.bfloat16, requires_grad=True)
    shard = class_shard(classes * 2)
    target = torch.arange(rows)
    with Watch():
        kernels().cross_entropy(x, 1, target, shard, None, LossOptions())[0].sum().backward()
    return largest / (rows * classes * 4)


def test_no_fp32_copy_of_a_half_precision_shard_exists() -> None:
    for largest in run(largest_fp32_tensor):
        assert largest < 0.1


# -- backward, again and later ---------------------------------------------------------------------------


def backward_variants() -> dict[str, np.ndarray]:
    """Gradients taken in several ways, all of which should be the same."""
    import torch
    from torch.utils.checkpoint import checkpoint

    logits, target = problem()
    grads = {}

    def fresh() -> Any:
        return local_logits(logits, 1, "float32")

    x = fresh()
    call(x, target).backward()
    grads["plain"] = numpy64(x.grad)

    x = fresh()
    loss = call(x, target)
    loss.backward(retain_graph=True)
    x.grad = None
    loss.backward()
    grads["second time"] = numpy64(x.grad)

    x = fresh()
    for _ in range(2):
        (call(x, target) / 2).backward()
    grads["accumulated"] = numpy64(x.grad)

    for reentrant in (True, False):
        x = fresh()
        checkpoint(lambda y: call(y * 1.0, target), x, use_reentrant=reentrant).backward()
        grads[f"checkpoint, reentrant={reentrant}"] = numpy64(x.grad)

    x = fresh()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kernels().log_softmax(x.bfloat16(), 1, class_shard(CLASSES)).dtype == torch.float32
        call(x, target, weighted=True).backward()
    grads["under autocast"] = numpy64(x.grad)

    x = fresh()
    call(x * 1.0, target, inplace=True).backward()
    grads["in place"] = numpy64(x.grad)

    x = fresh()
    (grads_with_graph,) = torch.autograd.grad(call(x, target), x, create_graph=True)
    grads["create_graph"] = numpy64(grads_with_graph)

    x = local_logits(np.repeat(logits[:1], COUNT, 0), 1, "float32")
    call(x[:1].expand(COUNT, -1), target, inplace=True).backward()
    expanded = numpy64(x.grad)[0]
    x = local_logits(np.repeat(logits[:1], COUNT, 0), 1, "float32")
    call(x, target).backward()
    np.testing.assert_allclose(expanded, numpy64(x.grad).sum(0), rtol=1e-5, atol=1e-5)
    return grads


@pytest.mark.contract("G1")
def test_the_same_gradient_however_it_is_taken() -> None:
    logits, target = problem()
    ranks = run(backward_variants)
    expected = reference.cross_entropy([logits], 1, target).grads[0]
    for name in ranks[0]:
        np.testing.assert_allclose(
            np.concatenate([r[name] for r in ranks], 1), expected, rtol=2e-6, atol=2e-6, err_msg=name
        )


def losses_without_graph() -> list[Any]:
    """Loss, and whether it has a graph, where none is wanted."""
    import torch

    logits, target = problem()
    out = []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            loss = call(local_logits(logits, 1, "float32"), target)
            log_probs = kernels().log_softmax(local_logits(logits, 1, "float32"), 1, class_shard(CLASSES))
            out.append((float(loss), loss.requires_grad, log_probs.requires_grad))
    return out


def test_no_grad_and_inference_mode() -> None:
    logits, target = problem()
    for loss, *graphs in sum(run(losses_without_graph), []):
        assert loss == pytest.approx(reference.cross_entropy([logits], 1, target).loss.sum(), rel=1e-6)
        assert graphs == [False, False]


def refusals() -> dict[str, str]:
    """The messages of what cannot be done."""
    import torch

    logits, target = problem()
    messages = {}

    def note(name: str, function: Any) -> None:
        try:
            function()
        except RuntimeError as error:
            messages[name] = str(error)

    for name in ("cross_entropy", "log_softmax", "nll_loss"):
        x = local_logits(logits, 1, "float32")
        shard = class_shard(CLASSES)
        scale = torch.ones((), requires_grad=True)
        if name == "cross_entropy":
            out = call(x, target)
        else:
            out = kernels().log_softmax(x, 1, shard)
            if name == "nll_loss":
                out = out.detach().requires_grad_()
                x = out
                out = kernels().nll_loss(out, 1, torch.tensor(target), shard, None, LossOptions())[0]
        (grad,) = torch.autograd.grad((out * out * scale).sum(), x, create_graph=True)
        note(f"{name} twice", lambda grad=grad: grad.pow(2).sum().backward())  # type: ignore[misc]

    x = local_logits(logits, 1, "float32")
    loss = call(x * 1.0, target, inplace=True)
    loss.backward(retain_graph=True)
    note("in place, again", loss.backward)

    x = local_logits(logits, 1, "float32")
    loss = call(torch.tanh(x), target, inplace=True)  # tanh keeps its result for backward
    note("in place, kept elsewhere", loss.backward)

    y = local_logits(logits, 1, "float32") * 1.0
    loss = call(y, target)
    y.mul_(2)
    note("logits modified before backward", loss.backward)
    return messages


def test_what_cannot_be_done_says_so() -> None:
    for messages in run(refusals):
        for name in ("cross_entropy", "log_softmax", "nll_loss"):
            assert f"the class-sharded {name} cannot be differentiated twice" in messages[f"{name} twice"]
        assert "has overwritten the logits" in messages["in place, again"]
        assert "modified by an inplace operation" in messages["in place, kept elsewhere"]
        assert "modified by an inplace operation" in messages["logits modified before backward"]

"""Logits that nobody else holds give their memory to their gradient; whoever holds them sees nothing of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from hyper_parallel.platform.torch import _loss_gradients, _sole_holder  # noqa: E402
from tests.harness import run_distributed  # noqa: E402

pytestmark = pytest.mark.platform("torch")

TOKENS, CLASSES = 6, 10
TARGET = torch.arange(TOKENS)


def source() -> Any:
    values = torch.randn(TOKENS, CLASSES, generator=torch.Generator().manual_seed(0))
    return values.requires_grad_()


def loss_of(logits: Any) -> Any:
    from hyper_parallel import vocab_parallel_cross_entropy

    return vocab_parallel_cross_entropy(logits, TARGET[: len(logits)], None)


def reused(step: Callable[[], Any]) -> list[bool]:
    """For each backward of the loss in ``step``: whether the gradient took the memory of the logits."""
    found: list[bool] = []
    real = _loss_gradients.cross_entropy_grad

    def spy(grad_loss: Any, logits: Any, *args: Any) -> Any:
        out = real(grad_loss, logits, *args)
        found.append(out.data_ptr() == logits.data_ptr())
        return out

    with patch("hyper_parallel.platform.torch._loss_forward.cross_entropy_grad", spy):
        step()
    return found


def gradient(logits_of: Callable[[Any], Any]) -> Any:
    """By PyTorch alone."""
    x = source()
    logits = logits_of(x)
    torch.nn.functional.cross_entropy(logits, TARGET[: len(logits)]).backward()
    return x.grad


PRODUCERS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "computed": (lambda x: x * 2, True),
    "a view of what is computed": (lambda x: (x * 2)[1:], True),
    "columns of what is computed": (lambda x: (x * 2)[:, ::2][:5], True),
    "classes first": (lambda x: (x * 2).t().contiguous().t(), True),
    "a leaf": (lambda x: x, False),
    "a view of a leaf": (lambda x: x[1:], False),
    "kept by who made it": (lambda x: torch.tanh(x), False),
    "expanded": (lambda x: (x * 2)[:1].expand(TOKENS, CLASSES), False),
    "overlapping": (lambda x: (x * 2).reshape(-1).unfold(0, CLASSES, 3)[:TOKENS], False),
}


@pytest.mark.contract("K3")
@pytest.mark.parametrize("name", PRODUCERS)
def test_by_how_the_logits_come(name: str) -> None:
    logits_of, taken = PRODUCERS[name]
    x = source()
    assert reused(lambda: loss_of(logits_of(x)).backward()) == [taken]
    torch.testing.assert_close(x.grad, gradient(logits_of))


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "a variable": lambda logits: logits,
    "a detached alias": lambda logits: logits.detach(),
    "a view": lambda logits: logits[1:],
    "its storage": lambda logits: torch.empty(0).set_(logits.untyped_storage()).view(logits.shape),
    "NumPy": lambda logits: torch.from_numpy(logits.detach().numpy()),
    "DLPack": lambda logits: torch.from_dlpack(logits.detach()),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_who_holds_the_logits_keeps_their_values(name: str) -> None:
    x = source()
    logits = x * 2
    held, loss = HOLDERS[name](logits), loss_of(logits)
    values = held.detach().clone()
    del logits
    assert reused(loss.backward) == [False]
    torch.testing.assert_close(held.detach(), values, rtol=0, atol=0)
    torch.testing.assert_close(x.grad, gradient(lambda x: x * 2))


@pytest.mark.parametrize("first", [False, True])
def test_other_nodes_that_need_the_logits(first: bool) -> None:
    """The engine runs the later node first: only then is the loss alone with them."""
    x = source()

    def loss() -> Any:
        logits = x * 2
        if first:
            return loss_of(logits) + logits.pow(2).sum()
        square = logits.pow(2).sum()
        return loss_of(logits) + square

    assert reused(lambda: loss().backward()) == [first]
    torch.testing.assert_close(x.grad, gradient(lambda x: x * 2) + 8 * x.detach())


def test_a_kept_graph_keeps_its_logits() -> None:
    x = source()
    loss = loss_of(x * 2)
    assert reused(lambda: (loss.backward(retain_graph=True), loss.backward())) == [False, True]
    torch.testing.assert_close(x.grad, 2 * gradient(lambda x: x * 2))
    (grad,) = torch.autograd.grad(loss_of(x * 2), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(grad.pow(2).sum(), x)


def test_saved_tensors_that_somebody_looks_at() -> None:
    seen: list[Any] = []
    x = source()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t):
        loss = loss_of(x * 2)
    values = [t.clone() for t in seen]
    assert reused(loss.backward) == [False]
    assert all(torch.equal(t, v) for t, v in zip(seen, values))

    loss = loss_of(x * 2)
    saved = loss.grad_fn
    while saved is not None and "CrossEntropy" not in type(saved).__name__:
        saved = next((f for f, _ in saved.next_functions if f is not None), None)
    kept = saved.saved_tensors[0]
    values = [kept.clone()]
    assert reused(loss.backward) == [False]
    assert torch.equal(kept, values[0])


def test_the_loss_keeps_no_reference_to_the_logits_themselves() -> None:
    logits = source() * 2
    gone = weakref.ref(logits)
    loss = loss_of(logits)
    del logits
    assert gone() is None
    assert loss.requires_grad


def test_without_the_counts_nothing_is_reused() -> None:
    x = source()
    with patch.object(_sole_holder, "_users_of_storage", None):
        assert reused(lambda: loss_of(x * 2).backward()) == [False]


@pytest.mark.contract("G1")
def test_every_entry() -> None:
    assert run_distributed(entries, platform="torch", world_size=2) == [[True] * 3] * 2


def entries() -> list[bool]:
    """In a worker: by name, in the context on our DTensor and on PyTorch's."""
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.tensor import DTensor as Native
    from torch.distributed.tensor import Shard as NativeShard

    from hyper_parallel import DTensor, Shard, init_device_mesh, loss_parallel, vocab_parallel_cross_entropy

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    native = dist.device_mesh.init_device_mesh("cpu", (2,))

    def context(logits: Any) -> Any:
        with loss_parallel():
            return F.cross_entropy(logits, TARGET).to_local()

    x, found, grads = source(), [], []
    for loss in (
        lambda: vocab_parallel_cross_entropy(x * 2, TARGET, mesh["tp"], num_classes=2 * CLASSES),
        lambda: context(DTensor.from_local(x * 2, mesh, [Shard(1)])),
        lambda: context(Native.from_local(x * 2, native, [NativeShard(1)], run_check=False)),
    ):
        found += reused(lambda loss=loss: loss().backward())  # type: ignore[misc]
        grads.append(x.grad)
        x.grad = None
    assert all(torch.equal(g, grads[0]) for g in grads)
    return found

"""Which of PyTorch's tensors the compiled kernels take: whatever has no memory of its own goes to the operators."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hyper_parallel.platform.native import rows as native

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
tree_map_only = pytest.importorskip("torch.utils._pytree", reason="PyTorch is not installed").tree_map_only


class Wrapper(torch.Tensor):
    """Computes with another tensor, and has no memory."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held):  # type: ignore[no-untyped-def]
        self = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, strides=held.stride())
        self.held = held
        return self

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        args, kwargs = tree_map_only(cls, lambda x: x.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, function(*args, **kwargs))


def test_only_tensors_whose_memory_holds_their_values() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hyper_parallel.platform.torch._loss_compiled import takes

    with FakeTensorMode():
        fake = torch.ones(3, 5)
    plain = torch.ones(3, 5)
    wrapper = Wrapper(plain)
    assert takes(plain) and takes(torch.nn.Parameter(plain)) and takes(plain.bfloat16())
    for other in (fake, wrapper, torch._efficientzerotensor((3, 5)), torch._neg_view(plain), plain.to_sparse()):
        assert not takes(other), type(other)


def test_no_more_threads_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows are computed all the same, and each once."""
    started = []

    def start(self: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(self)
        original(self)

    original = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    done = np.zeros(8, int)

    def run(first: int, rows: int) -> None:
        done[first : first + rows] += 1

    native._in_threads(run, native.Matrix(0, 0, 8, 1 << 20, "float32"), 4)
    np.testing.assert_array_equal(done, 1)


def test_an_interrupt_waits_for_the_other_threads() -> None:
    """They still write to memory that the caller is about to let go of."""
    begun, done = threading.Event(), threading.Event()

    def run(first: int, rows: int) -> None:
        if first == 0:
            begun.wait(10)
            raise KeyboardInterrupt
        begun.set()
        threading.Event().wait(0.3)
        done.set()

    with pytest.raises(KeyboardInterrupt):
        native._in_threads(run, native.Matrix(0, 0, 2, 1 << 20, "float32"), 2)
    assert done.is_set()


def test_an_upstream_gradient_without_memory_of_its_own() -> None:
    from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
    from hyper_parallel.platform.torch.loss_kernels import TorchLossKernels

    logits = torch.randn(3, 7, requires_grad=True)
    target = torch.tensor([1, 6, 0])
    shard = ClassShard(start=0, stop=7, num_classes=7, group=None)
    loss = TorchLossKernels().token_outputs(logits, 1, target, shard, None, LossOptions()).loss
    (grad,) = torch.autograd.grad(loss, logits, Wrapper(torch.ones(3)))
    (want,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, target, reduction="sum"), logits)
    torch.testing.assert_close(grad.held if isinstance(grad, Wrapper) else grad, want)

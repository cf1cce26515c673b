"""The Triton kernels against float64, run by the interpreter on CPU; a script, as importing chooses the interpreter."""

from __future__ import annotations

import itertools
import math

import torch

from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
from hyper_parallel.platform.torch import _loss_fused
from hyper_parallel.platform.torch._loss_forward import distributed_nll_loss_forward, fused_nll_log_softmax_backward

# Triton's interpreter truncates to bf16, where a device rounds to nearest: an error of up to 2^-7, not 2^-8.
_ROUNDING = {torch.float64: 1e-15, torch.float32: 6e-7, torch.bfloat16: 2**-7, torch.float16: 2**-11}


def check(logits: torch.Tensor, dim: int, inplace: bool) -> None:
    """Loss and gradient of one call; one token is ignored, one has infinite logits besides."""
    classes = logits.shape[dim]
    tokens = logits.shape[:dim] + logits.shape[dim + 1 :]
    target = torch.arange(math.prod(tokens)).reshape(tokens) % classes
    target.view(-1)[0] = -100
    logits.movedim(dim, -1)[(0,) * len(tokens)] = math.nan
    exact = logits.double().movedim(dim, -1).reshape(-1, classes).clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, target.view(-1), reduction="none")
    upstream = torch.linspace(0.5, 2.0, expected.numel(), dtype=torch.float64)
    expected.backward(upstream)
    assert _loss_fused.fused_kernels(dim, logits) is not None
    loss, _, state = distributed_nll_loss_forward(
        logits, dim, target, ClassShard(0, classes, classes), None, LossOptions(inplace=inplace)
    )
    gradient = fused_nll_log_softmax_backward(upstream.to(loss.dtype), logits, dim, state)
    assert (gradient.data_ptr() == logits.data_ptr()) == inplace
    near = {"rtol": 1e-5, "atol": 1e-5} if logits.dtype != torch.float64 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(loss.view(-1).double(), expected.detach(), **near)
    rounding = _ROUNDING[logits.dtype]
    want = exact.grad
    assert want is not None
    want[0] = 0.0
    error = (gradient.movedim(dim, -1).reshape(-1, classes).double() - want).abs()
    smallest = 2.0**-24 if logits.dtype == torch.float16 else 1e-12
    assert bool((error <= 1.5 * rounding * want.abs() + smallest + 1e-6 * (rounding < 1e-5)).all()), float(error.max())


def main() -> None:
    torch.manual_seed(0)
    shapes = [((3, 5), 1), ((4, 1), 1), ((2, 3, 4097), 2), ((5, 8192), 1), ((7,), 0)]
    for (shape, dim), dtype, inplace in itertools.product(shapes, _ROUNDING, (False, True)):
        check((3 * torch.randn(shape)).to(dtype), dim, inplace)
    wide = torch.randn(4, 300)  # rows further apart than they are long
    check(wide[:, :200], 1, inplace=False)
    check(wide[:, 7:200], 1, inplace=True)
    far = torch.randn(3, 50) + torch.tensor([[1e4], [-1e4], [0.0]])
    far[:, 10:20] = -math.inf
    check(far, 1, inplace=False)
    assert _loss_fused.fused_kernels(0, torch.randn(5, 3)) is None  # classes apart: PyTorch's own kernels
    empty = torch.randn(3, 0)
    _, _, state = distributed_nll_loss_forward(
        empty, 1, torch.full((3,), -100), ClassShard(0, 0, 0), None, LossOptions()
    )
    assert fused_nll_log_softmax_backward(torch.ones(3), empty, 1, state).shape == (3, 0)
    print("all right")


if __name__ == "__main__":
    main()

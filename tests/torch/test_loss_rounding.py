"""Gradients in half precision are the exact ones rounded once, also of a whole vocabulary."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions  # noqa: E402
from tests.harness import run_distributed  # noqa: E402

_TOKENS, _CLASSES = 8, 131072


@pytest.mark.platform("torch")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_error_is_that_of_rounding(dtype: str, inplace: bool) -> None:
    """At most 1.5 times the error of rounding the float64 gradient: on average, and in the worst element."""
    for errors, ideal in run_distributed(gradient_errors, dtype, inplace, platform="torch", world_size=2):
        for found, unavoidable in zip(errors, ideal, strict=True):
            assert 0 < found <= 1.5 * unavoidable


def gradient_errors(dtype_name: str, inplace: bool) -> tuple[tuple[float, float], tuple[float, float]]:
    """In a worker: mean and largest error of the gradient, and of the exact gradient's rounding."""
    import torch.distributed as dist

    from hyper_parallel.platform import get_platform
    from hyper_parallel.platform.platform import Group

    dtype, rank, width = getattr(torch, dtype_name), dist.get_rank(), _CLASSES // 2
    full = (4 * torch.randn(_TOKENS, _CLASSES, generator=torch.Generator().manual_seed(0))).to(dtype)
    target = torch.arange(_TOKENS) * (_CLASSES // _TOKENS) + 5
    exact = full.double().requires_grad_()
    scale = 1024.0  # as loss scaling does it: fp16 has few numbers near 0
    (scale * torch.nn.functional.cross_entropy(exact, target, reduction="sum")).backward()
    assert exact.grad is not None
    wanted = exact.grad[:, rank * width : (rank + 1) * width]

    source = full[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    logits = source.clone()
    ranges = ((0, width), (width, 2 * width))
    shard = ClassShard(*ranges[rank], _CLASSES, Group((0, 1), dist.group.WORLD, rank), ranges)
    kernels = get_platform("torch").loss_kernels
    loss, _ = kernels.cross_entropy(logits, 1, target, shard, None, LossOptions(inplace=inplace))
    loss.backward(torch.full_like(loss, scale))
    assert source.grad is not None and source.grad.dtype == dtype

    def errors(x: torch.Tensor) -> tuple[float, float]:
        error = (x.double() - wanted).abs()
        return float(error.mean()), float(error.max())

    return errors(source.grad), errors(wanted.to(dtype))

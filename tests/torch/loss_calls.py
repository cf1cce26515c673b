"""Tests of the loss kernels: full arrays go to the workers, each rank's results come back, all NumPy."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np

from hyper_parallel.core.shard_spec import chunk_ranges
from hyper_parallel.platform.loss_kernels import ClassShard, LossOptions
from tests.harness import run_distributed, this_rank, this_world_size

# fp32 statistics of a handful of classes: a few roundings of numbers of size 10
CLOSE = {"float64": {"rtol": 1e-12, "atol": 1e-13}, "float32": {"rtol": 2e-6, "atol": 2e-6}}


def run(function: Any, *args: Any, world_size: int = 2, **kwargs: Any) -> list[Any]:
    return run_distributed(function, *args, platform="torch", world_size=world_size, **kwargs)


def whole(ranks: list[dict[str, np.ndarray]], key: str, axis: int) -> np.ndarray:
    return np.concatenate([rank[key] for rank in ranks], axis)


def same_everywhere(ranks: list[dict[str, np.ndarray]], *keys: str) -> None:
    """Bitwise: a loss that differs between ranks lets their parameters drift apart."""
    for rank in ranks[1:]:
        for key in keys:
            np.testing.assert_array_equal(rank[key], ranks[0][key])


def tokens(
    seed: int, shape: tuple[int, ...], axis: int, classes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, targets (some ignored) and an upstream gradient."""
    rng = np.random.default_rng(seed)
    token_shape = shape[:axis] + shape[axis + 1 :]
    target = rng.integers(0, classes, token_shape)
    target = np.where(rng.random(token_shape) < 0.25, -100, target)
    return rng.normal(size=shape) * 4, np.asarray(target), np.asarray(rng.normal(size=token_shape))


# -- in the workers ------------------------------------------------------------------------------------


def class_shard(num_classes: int) -> ClassShard:
    """This rank's classes in the group of all workers."""
    import torch.distributed as dist

    from hyper_parallel.platform import Group

    rank, size = this_rank(), this_world_size()
    group = Group(tuple(range(size)), dist.group.WORLD, rank)
    return ClassShard(*chunk_ranges(num_classes, size)[rank], num_classes, group)


def local_logits(full: np.ndarray, axis: int, dtype: str, contiguous: bool = True) -> Any:
    """This rank's logits, a leaf; or a strided view of something larger."""
    import torch

    shard = class_shard(full.shape[axis])
    piece = np.take(full, range(shard.start, shard.stop), axis)
    x = torch.tensor(piece).to(getattr(torch, dtype))
    if not contiguous:
        larger = torch.full([2 * size + 1 for size in x.shape], 7.0, dtype=x.dtype)
        view = larger[tuple(slice(0, 2 * size, 2) for size in x.shape)]
        x = view.copy_(x)
    return x.detach().requires_grad_()


def numpy64(x: Any) -> np.ndarray:
    """The values in float64, whatever the dtype."""
    return x.detach().double().numpy().copy()


def kernels() -> Any:
    """The kernels of this worker's platform."""
    from hyper_parallel.platform import get_platform

    return get_platform("torch").loss_kernels


def cross_entropy(
    full: np.ndarray,
    axis: int,
    target: np.ndarray,
    *,
    dtype: str = "float32",
    weight: np.ndarray | None = None,
    upstream: np.ndarray | float = 1.0,
    contiguous: bool = True,
    largest_gather: int = 8,
    **options: Any,
) -> dict[str, np.ndarray]:
    """K2 and K3: ``logits`` as the rank had them, ``loss``, ``token_weight`` and ``grad``."""
    import torch

    from hyper_parallel.platform import loss_statistics

    x = local_logits(full, axis, dtype, contiguous)
    before = numpy64(x)
    labels = torch.tensor(target)
    labels_before = labels.clone()
    weights = None if weight is None else torch.tensor(weight)
    with patch.multiple(loss_statistics, _LARGEST_GATHER=largest_gather, _SMALL_GATHER=0):
        loss, token_weight = kernels().cross_entropy(
            x, axis, labels, class_shard(full.shape[axis]), weights, LossOptions(**options)
        )
    loss.backward(torch.tensor(np.broadcast_to(upstream, loss.shape).copy()).to(loss.dtype))
    assert np.array_equal(numpy64(x), before, equal_nan=True), "the logits were changed"
    assert torch.equal(labels, labels_before), "the target was changed"
    assert x.grad.dtype == x.dtype and x.grad.shape == x.shape
    assert loss.dtype == token_weight.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert loss.shape == token_weight.shape == labels.shape
    return {
        "logits": before,
        "loss": numpy64(loss),
        "token_weight": numpy64(token_weight),
        "grad": numpy64(x.grad),
    }


def log_softmax(
    full: np.ndarray, axis: int, upstream: np.ndarray, *, dtype: str = "float32", out: str | None = None
) -> dict[str, np.ndarray]:
    """K1 alone: ``log_probs`` and the ``grad`` of any function of them."""
    import torch

    x = local_logits(full, axis, dtype)
    shard = class_shard(full.shape[axis])
    log_probs = kernels().log_softmax(x, axis, shard, dtype=None if out is None else getattr(torch, out))
    piece = np.take(upstream, range(shard.start, shard.stop), axis)
    log_probs.backward(torch.tensor(piece).to(log_probs.dtype))
    return {"dtype": str(log_probs.dtype), "log_probs": numpy64(log_probs), "grad": numpy64(x.grad)}


def decomposed(
    full: np.ndarray,
    axis: int,
    target: np.ndarray,
    *,
    weight: np.ndarray | None = None,
    dtype: str = "float32",
) -> dict[str, np.ndarray]:
    """K1, then the NLL of its result."""
    import torch

    x = local_logits(full, axis, dtype)
    shard = class_shard(full.shape[axis])
    weights = None if weight is None else torch.tensor(weight)
    log_probs = kernels().log_softmax(x, axis, shard)
    loss, token_weight = kernels().nll_loss(
        log_probs, axis, torch.tensor(target), shard, weights, LossOptions()
    )
    loss.sum().backward()
    return {"loss": numpy64(loss), "token_weight": numpy64(token_weight), "grad": numpy64(x.grad)}

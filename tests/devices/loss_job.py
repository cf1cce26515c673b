"""One rank of a job on any device: the loss in the context, gradients and collectives, against NumPy in float64.

    python -m tests.devices.loss_job DEVICE
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hyper_parallel import DTensor, Shard, get_platform, init_device_mesh, loss_parallel
from hyper_parallel.platform.training import load_training_tools
from hyper_parallel.tensor_parallel.regions import reduce_from_tp_region

TOKENS, CLASSES = 37, 1003
ROUNDING = {"float32": 1e-5, "bfloat16": 2.0**-8}


def expected(logits: np.ndarray, target: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean loss over the tokens that count, and its gradient."""
    kept = target != -100
    shifted = logits - logits.max(1, keepdims=True)
    probabilities = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    rows = np.arange(len(target))[kept]
    loss = -np.log(probabilities[rows, target[kept]]).mean()
    probabilities[rows, target[kept]] -= 1
    return float(loss), probabilities * kept[:, None] / kept.sum()


def loss_and_gradient(local: np.ndarray, target: np.ndarray, dtype: str, mesh: Any) -> tuple[float, np.ndarray]:
    """The same of class-sharded logits, by the framework's own cross-entropy in the context."""
    if get_platform().name == "torch":
        import torch
        import torch.nn.functional as F

        x = torch.tensor(local, dtype=getattr(torch, dtype), device=mesh.device_type, requires_grad=True)
        labels = torch.tensor(target, device=mesh.device_type)
        logits = DTensor.from_local(x, mesh, [Shard(1)], shape=(TOKENS, CLASSES))
        with loss_parallel():
            loss = F.cross_entropy(logits, labels).full_tensor()
        loss.backward()
        return float(loss.detach()), x.grad.double().cpu().numpy()  # type: ignore[union-attr]
    import mindspore
    from mindspore import Tensor, ops

    def forward(x: Tensor) -> Tensor:
        logits = DTensor.from_local(x, mesh, [Shard(1)], shape=(TOKENS, CLASSES))
        with loss_parallel():
            return ops.cross_entropy(logits, Tensor(target, mindspore.int32)).full_tensor()

    loss, grad = mindspore.value_and_grad(forward)(Tensor(local, getattr(mindspore, dtype)))
    return float(loss), grad.astype(mindspore.float32).asnumpy().astype(np.float64)


def main(device: str) -> None:
    """Raises AssertionError for a number that is not right."""
    platform = get_platform()
    platform.ensure_initialized(device)
    ranks = platform.world_size()
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("tp",))
    rng = np.random.default_rng(0)
    target = rng.integers(0, CLASSES, TOKENS)
    target[::5] = -100
    width = -(-CLASSES // ranks)
    own = slice(platform.rank() * width, (platform.rank() + 1) * width)
    for dtype, rounding in ROUNDING.items():
        logits = (rng.normal(size=(TOKENS, CLASSES)) * 4).astype(np.float32)
        if dtype == "bfloat16":  # values that it can hold
            logits = (logits.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        loss, gradient = expected(logits.astype(np.float64), target)
        found, found_gradient = loss_and_gradient(logits[:, own], target, dtype, mesh)
        assert abs(found - loss) <= 1e-5 * loss, (dtype, found, loss)
        error = np.abs(found_gradient - gradient[:, own])
        assert (error <= rounding * np.abs(gradient[:, own]) + 1e-8).all(), (dtype, error.max())
    like = platform.from_numpy(np.zeros(1, np.float32))
    total = reduce_from_tp_region(platform.from_numpy(np.ones(3, np.float32), like), mesh)
    assert (platform.to_numpy(total) == ranks).all()
    print(f"{platform.name} {platform.version} on {ranks} x {device}: right")


if __name__ == "__main__":
    main(sys.argv[1])
    load_training_tools().close()

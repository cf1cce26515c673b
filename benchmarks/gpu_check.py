"""What needs a GPU, in one run: ``python -m benchmarks.gpu_check`` (a minute on one device).

Checks loss and gradient of the Triton kernels and of PyTorch's own against float64, then measures time, peak memory and
distance from the limit beside ``F.cross_entropy``. With several devices, start it by torchrun: the classes are shared.
``--device cpu`` with ``TRITON_INTERPRET=1`` in the environment tries the script itself, on small problems.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hyper_parallel import vocab_parallel_cross_entropy
from hyper_parallel.platform.torch import _loss_fused

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Check and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = parser.parse_args(arguments).device
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device found; --device cpu tries the script")
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if size > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    group = dist.group.WORLD if size > 1 else None
    say: Callable[[str], None] = print if rank == 0 else lambda text: None
    say(f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, PyTorch {torch.__version__}, {size} ranks")

    shape = (64, 4100 * size) if device == "cuda" else (5, 300 * size)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for fused in (True, False):
            with _kernels(fused):
                _check(device, dtype, shape, rank, size, group)
            say(f"{str(dtype):16s} {'Triton' if fused else 'PyTorch':8s} kernels agree with float64")

    shape = (8192, 128256 // size * size) if device == "cuda" else (8, 512 * size)
    for dtype in (torch.bfloat16, torch.float32):
        _measure(device, dtype, shape, rank, size, group, say)
    if size > 1:
        dist.destroy_process_group()


@contextmanager
def _kernels(fused: bool) -> Iterator[None]:
    if fused:
        if _loss_fused._load() is None:
            sys.exit("Triton is not installed")
        yield
    else:
        with patch.object(_loss_fused, "_load", return_value=None):
            yield


def _check(
    device: str, dtype: torch.dtype, shape: tuple[int, int], rank: int, size: int, group: dist.ProcessGroup | None
) -> None:
    generator = torch.Generator(device).manual_seed(0)
    full = (4 * torch.randn(shape, device=device, generator=generator)).to(dtype)
    target = torch.randint(shape[1], shape[:1], device=device, generator=generator)
    target[0] = -100
    exact = full.double().requires_grad_()
    expected = F.cross_entropy(exact, target)
    expected.backward()
    part = slice(rank * shape[1] // size, (rank + 1) * shape[1] // size)
    local = full[:, part].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(local, target, group, num_classes=shape[1])
    loss.backward()
    assert exact.grad is not None and local.grad is not None
    torch.testing.assert_close(loss.detach().double(), expected.detach(), rtol=2e-6, atol=0.0)
    # the interpreter truncates where a device rounds
    rounding = {torch.float32: 2e-6, torch.float64: 1e-12}.get(dtype, torch.finfo(dtype).eps)
    smallest = 2.0**-24 if dtype == torch.float16 else 1e-9
    torch.testing.assert_close(local.grad.double(), exact.grad[:, part], rtol=rounding, atol=smallest)


def _measure(
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    rank: int,
    size: int,
    group: dist.ProcessGroup | None,
    say: Callable[[str], None],
) -> None:
    logits = torch.randn(shape[0], shape[1] // size, device=device).to(dtype)
    target = torch.randint(shape[1], shape[:1], device=device, generator=torch.Generator(device).manual_seed(1))
    out = torch.empty_like(logits)
    copy, _ = _timed(device, partial(out.copy_, logits))
    del out
    limit = 1.5 * copy  # a copy reads and writes; the loss reads twice and writes once
    say(f"\n{dtype}, {shape[0]} tokens x {shape[1]} classes: copy {1e3 * copy:.2f} ms, limit {1e3 * limit:.2f} ms")

    def ours() -> None:
        x = logits.detach().requires_grad_()
        vocab_parallel_cross_entropy(x, target, group, num_classes=shape[1]).backward()

    def plain() -> None:
        x = logits.detach().requires_grad_()
        F.cross_entropy(x.float(), target.clamp(max=x.shape[1] - 1)).backward()

    for name, fused, step in (
        ("Triton", True, ours),
        ("PyTorch's kernels", False, ours),
        ("F.cross_entropy, this rank's classes only", True, plain),
    ):
        with _kernels(fused):
            seconds, peak = _timed(device, step)
        share = peak / (logits.numel() * logits.element_size())
        say(f"  {name:44s} {1e3 * seconds:8.2f} ms  {seconds / limit:5.2f} x limit  peak {share:.2f} x logits")


def _timed(device: str, step: Callable[[], object], repetitions: int = 10) -> tuple[float, int]:
    """Median seconds, and the peak of memory beyond what was there (CUDA only)."""
    seconds, peak = [], 0
    for i in range(repetitions + 2):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
            peak = max(peak, torch.cuda.max_memory_allocated() - before)
        if i >= 2:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), peak


if __name__ == "__main__":
    main()

"""Gradients of large logits ask for huge pages, by every entry; small ones cost no system call."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from hyper_parallel.platform.torch import _huge_pages  # noqa: E402
from tests.harness import run_distributed  # noqa: E402

BARE = {"reports_free_pages": lambda: False}  # not in a virtual machine that gives free memory back

pytestmark = [
    pytest.mark.platform("torch"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="huge pages are asked for on Linux only"),
]


def test_whole_pages_of_large_tensors() -> None:
    asked: list[tuple[int, int, int]] = []
    with patch.multiple(
        _huge_pages, _advise=lambda: lambda *arguments: asked.append(arguments), _PLENTY=0, **BARE
    ):
        small = _huge_pages.empty_like(torch.empty(1000))
        assert small.shape == (1000,) and asked == []
        large = _huge_pages.empty_like(torch.empty(4 << 20, dtype=torch.bfloat16).view(4, -1).t())
    assert large.shape == (1 << 20, 4) and large.stride() == (1, 1 << 20)
    ((start, length, advice),) = asked
    assert start % mmap.PAGESIZE == length % mmap.PAGESIZE == 0 and advice == mmap.MADV_HUGEPAGE
    assert large.data_ptr() <= start and start + length <= large.data_ptr() + large.nbytes


def test_not_in_fragmented_memory(tmp_path: Path) -> None:
    """10 blocks of 2 MiB and 3 of 4 MiB are free: enough for four times 8 MiB, not for four times 16."""
    free = tmp_path / "buddyinfo"
    free.write_text("Node 0, zone   Normal  9000 800 70 60 50 40 30 20 10 10 3\n")
    asked: list[tuple[int, int, int]] = []
    with patch.multiple(
        _huge_pages, _advise=lambda: lambda *arguments: asked.append(arguments), _FREE_BLOCKS=free, **BARE
    ):
        assert _huge_pages.free_huge_pages() == (10 * 2 + 3 * 4) << 20
        _huge_pages.empty_like(torch.empty(4 << 20))
        assert asked == []
        _huge_pages.empty_like(torch.empty(2 << 20))
        assert len(asked) == 1
        free.unlink()
        _huge_pages.empty_like(torch.empty(2 << 20))
        assert len(asked) == 1


@pytest.mark.parametrize(
    ("kind", "features", "reports"),
    [("0x0005", "0110010100", True), ("0x0005", "0110000100", False), ("0x0001", "0110010100", False)],
)
def test_not_where_free_memory_goes_back_to_the_host(
    tmp_path: Path, kind: str, features: str, reports: bool
) -> None:
    device = tmp_path / "virtio0"
    device.mkdir()
    (tmp_path / "virtio1").mkdir()  # one that tells nothing
    (device / "device").write_text(f"{kind}\n")
    (device / "features").write_text(f"{features}\n")
    asked: list[tuple[int, int, int]] = []
    with (
        patch.multiple(_huge_pages, _advise=lambda: lambda *a: asked.append(a), _PLENTY=0, _VIRTIO=tmp_path),
        patch.object(_huge_pages, "reports_free_pages", _huge_pages.reports_free_pages.__wrapped__),
    ):
        assert _huge_pages.reports_free_pages() == reports
        _huge_pages.empty_like(torch.empty(4 << 20))
    assert len(asked) == (0 if reports else 1)


def test_the_call_is_taken() -> None:
    """The arguments are right: what the system refuses, it refuses for want of huge pages only."""
    with patch.multiple(_huge_pages, _PLENTY=0, **BARE):
        found = _huge_pages.empty_like(torch.empty(4 << 20)).fill_(1.0)
    assert float(found.sum()) == 4 << 20


@pytest.mark.parametrize("entry", ["context", "native context", "functional"])
def test_every_entry_asks(entry: str) -> None:
    assert run_distributed(advised, entry, platform="torch", world_size=2) == [1, 1]


def advised(entry: str) -> int:
    """In a worker: how often the backward pass of 16 MiB of logits asks."""
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.tensor import DTensor as Native
    from torch.distributed.tensor import Shard as NativeShard

    from hyper_parallel import DTensor, Shard, init_device_mesh, loss_parallel, vocab_parallel_cross_entropy

    local, target = torch.randn(64, 1 << 16).requires_grad_(), torch.arange(64)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    asked: list[Any] = []
    with patch.multiple(
        _huge_pages, _advise=lambda: lambda *arguments: asked.append(arguments), _PLENTY=0, **BARE
    ):
        if entry == "functional":
            loss = vocab_parallel_cross_entropy(local, target, mesh["tp"], num_classes=2 << 16)
        elif entry == "context":
            with loss_parallel():
                loss = F.cross_entropy(DTensor.from_local(local, mesh, [Shard(1)]), target).to_local()
        else:
            native = dist.device_mesh.init_device_mesh("cpu", (2,))
            with loss_parallel():
                logits = Native.from_local(local, native, [NativeShard(1)], run_check=False)
                loss = F.cross_entropy(logits, target).to_local()
        loss.backward()
    return len(asked)

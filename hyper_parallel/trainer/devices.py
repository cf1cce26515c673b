"""Whether there are as many devices as a job needs, asked before any worker starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from hyper_parallel.trainer.command_line import UsageError

__all__ = ["check_devices"]

_COUNT: Mapping[tuple[str, str], str] = {
    ("torch", "cuda"): "import torch; print(torch.cuda.device_count())",
    ("mindspore", "npu"): (
        "from mindspore.device_context import ascend; print(ascend.device_count() if ascend.is_available() else 0)"
    ),
}
"""For a backend and a device type, a program that prints how many there are."""

_SECONDS = 120.0


def check_devices(backend: str, device: str, nproc: int) -> None:
    """Each local process needs a device of its own, but for the CPU. The framework is asked in a process of its own,
    as the one that starts the workers loads none.

    Raises:
        UsageError: there are fewer devices than processes.
    """
    program = _COUNT.get((backend, device))
    if program is None:
        return
    found = _count(program)
    if found < nproc:
        raise UsageError(
            f"device {device!r}: {backend} sees {found} here, and nproc ({nproc}) processes need one each; "
            "use --device cpu" + (f", or --nproc {found} with degrees that fit" if found else "")
        )


def _count(program: str) -> int:
    """What the program prints last; 0 where it fails."""
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=_SECONDS)
        return int(done.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0

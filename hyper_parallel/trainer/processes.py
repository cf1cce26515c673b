"""Whether as many processes start as the degrees of parallelism need."""

from __future__ import annotations

from hyper_parallel.config import ParallelismConfig
from hyper_parallel.trainer.command_line import UsageError

__all__ = ["check_processes"]


def check_processes(degrees: ParallelismConfig, nproc: int) -> None:
    """Compare the product of the degrees with the number of processes.

    Raises:
        UsageError: they differ; the message names the options that would make them fit.
    """
    dp, tp = degrees.data_parallel_degree, degrees.tensor_parallel_degree
    if dp * tp == nproc:
        return
    ways = [f"--nproc {dp * tp}"]
    if nproc % tp == 0:
        ways.append(f"--parallelism.data-parallel-degree {nproc // tp}")
    if nproc % dp == 0:
        ways.append(f"--parallelism.tensor-parallel-degree {nproc // dp}")
    raise UsageError(
        f"data_parallel_degree ({dp}) * tensor_parallel_degree ({tp}) = {dp * tp} must equal nproc ({nproc}): set "
        + ", or ".join(ways)
    )

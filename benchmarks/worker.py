"""One rank of a measurement: join the group, run the suite, let rank 0 write the result."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    backend, suite, options, result = sys.argv[1:5]
    if backend == "scheduler":
        _serve()
        return
    _join(backend)
    outcome = importlib.import_module(f"benchmarks.{suite}").run(json.loads(options))
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(outcome))
    if backend == "torch":
        import torch.distributed as dist

        dist.destroy_process_group()


def _join(backend: str) -> None:
    if backend == "torch":
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    else:
        import mindspore
        from mindspore import communication

        mindspore.set_device("CPU")
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
        communication.init()


def _serve() -> None:
    """MindSpore's scheduler: it lives until the ranks are done and it is stopped."""
    from mindspore import communication

    communication.init()
    while True:
        time.sleep(1.0)


if __name__ == "__main__":
    main()

"""``loss_parallel`` is a package and a context manager: every way to import it gives what its reader expects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.groups import on_groups

_ROOT = Path(__file__).parents[2]

_SCRIPT = """
import sys

FORMS = [
    "from hyper_parallel import loss_parallel; manager = loss_parallel",
    "from hyper_parallel.loss_parallel import loss_parallel; manager = loss_parallel",
    "import hyper_parallel; manager = hyper_parallel.loss_parallel",
    "import hyper_parallel.loss_parallel as m; manager = m",
    "import hyper_parallel.loss_parallel as m; manager = m.loss_parallel",
    "import hyper_parallel.loss_parallel; manager = hyper_parallel.loss_parallel.loss_parallel",
    "from hyper_parallel import loss_parallel as lp; manager = lp.loss_parallel",
    "from hyper_parallel.loss_parallel.context import loss_parallel; manager = loss_parallel",
    "from hyper_parallel import *; manager = loss_parallel",
    "import importlib; manager = importlib.import_module('hyper_parallel.loss_parallel')",
]

import hyper_parallel
assert not {"torch", "mindspore"} & set(sys.modules), "importing the package loads a framework"
assert hyper_parallel.ParallelismConfig().loss_parallel_enabled is False
assert not {"torch", "mindspore"} & set(sys.modules), "the configuration loads a framework"

orders = [FORMS[i:] + FORMS[:i] for i in range(0, len(FORMS), 2)] + [FORMS[::-1]]
for order in orders:
    for name in [name for name in sys.modules if name.partition(".")[0] == "hyper_parallel"]:
        del sys.modules[name]
    managers = []
    for form in order:
        names = {}
        exec(form, names)
        managers.append(names["manager"])
    from hyper_parallel import is_loss_parallel_active
    for form, manager in zip(order, managers):
        assert not is_loss_parallel_active()
        for arguments in ((), (None, False)):
            with manager(*arguments):
                assert is_loss_parallel_active(), (form, order)
        with manager(mesh=None, strict=True):
            assert is_loss_parallel_active(), (form, order)
        assert not is_loss_parallel_active(), (form, order)
    import hyper_parallel.loss_parallel as package
    assert package.is_loss_parallel_active is is_loss_parallel_active
    assert package.LossParallelLayoutError is sys.modules["hyper_parallel"].LossParallelLayoutError
    assert issubclass(package.LossParallelLayoutError, ValueError)
    assert issubclass(package.LossParallelUnsupportedError, NotImplementedError)
    assert package.__name__ == "hyper_parallel.loss_parallel" and package.__path__

import inspect, hyper_parallel
parameters = inspect.signature(hyper_parallel.loss_parallel).parameters
assert list(parameters) == ["mesh", "strict"], parameters
assert sorted(set(hyper_parallel.__all__) - set(dir(hyper_parallel))) == []
for name in hyper_parallel.__all__:
    getattr(hyper_parallel, name)
"""


@pytest.mark.contract("L1", "G3", "E1", "E2")
@on_groups(1)
def test_every_form_in_any_order(platform: str, world_size: int) -> None:
    """In a fresh interpreter; before it is needed, no framework is loaded."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env |= {"HYPER_PARALLEL_PLATFORM": platform, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

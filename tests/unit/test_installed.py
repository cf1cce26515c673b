"""Which backend a process gets: with both frameworks installed, one of them, or none. Each case is a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOTH = ("torch", "mindspore")

HIDE = """
import sys
from importlib.machinery import PathFinder
hidden = {hidden!r}
class Others(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path[:] = [Others if finder is PathFinder else finder for finder in sys.meta_path]
import hyper_parallel
assert not {{"torch", "mindspore"}} & set(sys.modules)
from hyper_parallel import PlatformError, get_platform
"""


def run(code: str, *, installed: tuple[str, ...] = BOTH, variable: str | None = None) -> str:
    """What ``code`` prints where only the ``installed`` frameworks can be found."""
    if any(find_spec(name) is None for name in installed):
        pytest.skip(f"needs {' and '.join(installed)} installed")
    environment = {k: v for k, v in os.environ.items() if k != "HYPER_PARALLEL_PLATFORM"}
    if variable is not None:
        environment["HYPER_PARALLEL_PLATFORM"] = variable
    script = HIDE.format(hidden=tuple(name for name in BOTH if name not in installed)) + code
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def refusal(call: str, *, installed: tuple[str, ...] = BOTH, variable: str | None = None) -> str:
    """The message of the PlatformError that ``call`` raises."""
    code = f"try:\n    {call}\nexcept PlatformError as error:\n    print(error)\nelse:\n    print('no error')"
    return run(code, installed=installed, variable=variable)


def test_none() -> None:
    assert refusal("get_platform()", installed=()) == (
        "neither PyTorch nor MindSpore is installed; install PyTorch with: pip install 'hyper_parallel[torch]' "
        "(in a checkout: pip install -c constraints.txt '.[torch]'); MindSpore with 'mindspore' in the place of 'torch'"
    )


@pytest.mark.parametrize("name", BOTH)
def test_one(name: str) -> None:
    assert run("print(get_platform().name)", installed=(name,)) == name


@pytest.mark.parametrize("name", BOTH)
def test_the_other_one(name: str) -> None:
    other = next(b for b in BOTH if b != name)
    hint = (
        f"but {other} is not installed; install it with: pip install 'hyper_parallel[{other}]' "
        f"(in a checkout: pip install -c constraints.txt '.[{other}]')"
    )
    asked = refusal(f"get_platform({other!r})", installed=(name,))
    assert asked == f"the {other!r} backend was asked for (by argument) {hint}"
    asked = refusal("get_platform()", installed=(name,), variable=other)
    assert asked == f"the {other!r} backend was asked for (by HYPER_PARALLEL_PLATFORM) {hint}"


@pytest.mark.parametrize(
    ("call", "variable", "expected"),
    [
        ("get_platform()", None, "torch"),
        ("get_platform()", "mindspore", "mindspore"),
        ("get_platform('torch')", "mindspore", "torch"),
        ("get_platform('mindspore'), get_platform()", "torch", "mindspore"),
        ("__import__('mindspore'), get_platform()", None, "mindspore"),
    ],
)
def test_both(call: str, variable: str | None, expected: str) -> None:
    """An argument comes before the variable, that before what is imported, that before what is installed."""
    assert run(f"{call}; print(get_platform().name)", variable=variable) == expected


def test_one_platform_a_process() -> None:
    assert refusal("get_platform('torch'); get_platform('mindspore')") == (
        "this process already uses the 'torch' backend and cannot change to 'mindspore'; "
        "start another process for the second one"
    )


def test_an_unknown_one() -> None:
    found = refusal("get_platform('jax')")
    assert found == "unknown backend 'jax' (by argument); expected one of ('torch', 'mindspore')"
    assert "unknown backend 'tf' (by HYPER_PARALLEL_PLATFORM)" in refusal("get_platform()", variable="tf")


@pytest.mark.parametrize("name", BOTH)
def test_a_command_uses_the_one_that_is_installed(name: str) -> None:
    code = "from hyper_parallel.trainer.options import TrainOptions; print(TrainOptions().backend)"
    assert run(code, installed=(name,)) == name

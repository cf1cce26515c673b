"""Adding operators: the decorator, the tables and the environment variables; signatures and their binding."""

from __future__ import annotations

import os
import subprocess
import sys
from inspect import Signature
from pathlib import Path
from types import SimpleNamespace

import pytest

from hyper_parallel.core.shard import parallel_ops_register
from hyper_parallel.core.shard._binding import bind_arguments
from hyper_parallel.core.shard._recipe import is_inplace
from hyper_parallel.core.shard.parallel_ops_register import parse_signature

PREAMBLE = """
import torch
from hyper_parallel import DTensor, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpPlan
from hyper_parallel.core.shard.parallel_ops_register import find_op, register_distributed_op
mesh = init_device_mesh("cpu", (1,))
x = distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)])
"""

FAMILY = """
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpPlan
from hyper_parallel.core.shard.parallel_ops_register import register_distributed_op

@register_distributed_op("doubled")
class Doubled(DistributedOp):
    signature = "input"

    def plan(self, call):
        factor = call.options.get("factor", 2)
        return OpPlan(call.args["input"].layout, run=lambda op_call, input: op_call(input) * factor)

@register_distributed_op("special_i1")
class Bessel(DistributedOp):
    def plan(self, call):
        return OpPlan(call.args["input"].layout)
"""


def script(
    body: str, tmp_path: Path, *, yaml: str | None = None, python: str | None = None, folder: str | None = None
) -> subprocess.Popen[str]:
    """A process of its own, since the tables are read once."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HYPER_PARALLEL_OPS")}
    env |= {"HYPER_PARALLEL_PLATFORM": "torch", "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    for variable, suffix, text in (
        ("HYPER_PARALLEL_OPS_YAML_DIR", "yaml", yaml),
        ("HYPER_PARALLEL_OPS_PYTHON_PATH", "py", python),
    ):
        if text is not None:
            (tmp_path / suffix).mkdir(parents=True)
            (tmp_path / suffix / f"mine.{suffix}").write_text(text)
            env[variable] = str(tmp_path / suffix)
    if folder is not None:
        env["HYPER_PARALLEL_OPS_YAML_DIR"] = folder
    for name in ("RANK", "WORLD_SIZE"):
        env.pop(name, None)
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + body], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


GOOD = """
assert torch.equal(x.square().to_local(), torch.full((2, 3), 3.0))      # the user's table wins
assert torch.equal(x.erfinv().to_local(), torch.special.erfinv(torch.ones(2, 3)) * 2)
assert find_op("torch", "special_i1").options == {} and find_op("torch", "special_i0e") is None
assert isinstance(torch.special.i1(x), DTensor)

try:
    register_distributed_op("doubled")(type("Other", (DistributedOp,), {}))
except ValueError as error:
    assert "'doubled' is registered already" in str(error) and "elementwise" in str(error)
else:
    raise AssertionError
try:
    register_distributed_op("not_a_family")(dict)
except TypeError as error:
    assert "subclass of DistributedOp" in str(error)
else:
    raise AssertionError

@register_distributed_op("special_i0e")     # later on, for an operator that no table names
class Later(DistributedOp):
    signature = "input"
    def plan(self, call):
        return OpPlan(call.args["input"].layout)

assert torch.special.i0e(x).placements == (Shard(0),)
"""

# the second call fails as the first did
USE = """
for _ in range(2):
    try:
        x.softmax(1)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError("not refused")
"""

BAD = {
    "sin: {family: sine_family}": "names family 'sine_family'; registered are",
    "sin: elementwise": "needs a mapping with 'family'",
    "sin: {family: mine, color: red}": "has unknown keys ['color']",
    "[sin]": "expected a mapping from operator name to entry",
    'sin: {family: mine, signature: "input, dim=f()"}': "cannot read the operator signature",
}


@pytest.mark.platform("torch")
@pytest.mark.contract("G4")
def test_users_own_files(tmp_path: Path) -> None:
    table = "square: {family: doubled, options: {factor: 3}}\nerfinv: {family: doubled, signature: input}\n"
    processes = [(script(GOOD, tmp_path / "good", yaml=table, python=FAMILY), 0, "")]
    unknown = "sin: {family: sine_family}"
    processes.append((script(USE, tmp_path / "table", yaml=unknown), 2, BAD[unknown]))
    processes.append((script(USE, tmp_path / "folder", folder="/nowhere"), 2, "names /nowhere, which is not a folder"))
    try:
        for process, times, message in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
            assert output.count(message) == times or not times, output
    finally:
        for process, _, _ in processes:
            process.kill()


def test_bad_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_ops_register, "_families", {"mine": SimpleNamespace(signature="input")})
    for text, message in BAD.items():
        with pytest.raises(ValueError) as caught:
            parallel_ops_register._read_table(text, "my.yaml", override=True)
        assert message in str(caught.value)


def test_signatures() -> None:
    signature = parse_signature("input, dim=None, *rest, keepdim=False, **kwargs")
    assert isinstance(signature, Signature) and str(signature) == "(input, dim=None, *rest, keepdim=False, **kwargs)"
    for text in ("input, dim=list()", "input,, dim", "1"):
        with pytest.raises(ValueError, match="cannot read the operator signature"):
            parse_signature(text)


def test_binding() -> None:
    signature = parse_signature("input, dim=None, keepdim=False, *, dtype=None")
    assert bind_arguments(signature, "sum", ("x", 1), {}) == (
        {"input": "x", "dim": 1, "keepdim": False, "dtype": None},
        {"input": 0, "dim": 1},
    )
    bound, places = bind_arguments(signature, "sum", (), {"x": "x", "axis": 0, "keepdims": True})
    assert bound == {"input": "x", "dim": 0, "keepdim": True, "dtype": None}
    assert places == {"input": "x", "dim": "axis", "keepdim": "keepdims"}
    bound, places = bind_arguments(parse_signature("input, *shape"), "view", ("x", 2, 3), {})
    assert bound == {"input": "x", "shape": (2, 3)} and places == {"input": 0, "shape": ("*", 1)}
    with pytest.raises(TypeError, match="has no argument 'colour'"):
        bind_arguments(signature, "sum", ("x",), {"colour": 1})
    with pytest.raises(TypeError, match="got 'dim' twice"):
        bind_arguments(signature, "sum", ("x", 1), {"axis": 1})
    with pytest.raises(TypeError, match="found 4 positional"):
        bind_arguments(signature, "sum", ("x", 1, True, 3), {})
    with pytest.raises(TypeError, match=r"lacks \['input'\]"):
        bind_arguments(signature, "sum", (), {})


def test_inplace_names() -> None:
    assert is_inplace("add_") and is_inplace("setitem")
    assert not is_inplace("add") and not is_inplace("__add__") and not is_inplace("_foreach_add_")

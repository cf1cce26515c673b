"""Which family serves which operator: YAML tables, ``register_distributed_op`` and the user's own files."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import yaml

from hyper_parallel.core.shard.distributed_op import DistributedOp

__all__ = ["OpEntry", "find_op", "parse_signature", "register_distributed_op", "registered_ops"]

_YAML_VARIABLE = "HYPER_PARALLEL_OPS_YAML_DIR"
_PYTHON_VARIABLE = "HYPER_PARALLEL_OPS_PYTHON_PATH"


@dataclass(frozen=True)
class OpEntry:
    """One operator: its family, its signature, and what the family needs to know of it."""

    name: str
    family: DistributedOp
    signature: Signature
    options: Mapping[str, Any] = field(default_factory=dict)


_families: dict[str, DistributedOp] = {}
_operators: dict[str, OpEntry] = {}
_loaded: dict[str, Exception | None] = {}
"""Backends whose tables were read, and what went wrong: a broken table fails every time, not only the first."""


def register_distributed_op(name: str) -> Callable[[type[DistributedOp]], type[DistributedOp]]:
    """Class decorator: register a family under ``name``.

    The name can be used as ``family:`` in a YAML table. An operator of the same name that no table mentions is served
    by the family at once, with the family's own ``signature``.

    Raises:
        ValueError: the name is taken; the registered names are listed.

    Example:
        >>> @register_distributed_op("my_gelu")                       # doctest: +SKIP
        ... class MyGelu(DistributedOp):
        ...     def plan(self, call):
        ...         return OpPlan(call.args["input"].layout)
    """

    def register(cls: type[DistributedOp]) -> type[DistributedOp]:
        if name in _families:
            raise ValueError(f"distributed op {name!r} is registered already; registered are {sorted(_families)}")
        if not (isinstance(cls, type) and issubclass(cls, DistributedOp)):
            raise TypeError(f"register_distributed_op takes a subclass of DistributedOp, found {cls!r}")
        _families[name] = cls()
        return cls

    return register


def registered_ops(platform_name: str) -> dict[str, OpEntry]:
    """Every operator that a table names for this backend."""
    _load(platform_name)
    return dict(_operators)


def find_op(platform_name: str, name: str) -> OpEntry | None:
    """The entry of an operator, or None. An in-place operator (``add_``) is served by the entry of ``add``."""
    _load(platform_name)
    entry = _operators.get(name)
    if entry is None and name in _families:
        family = _families[name]
        entry = _operators[name] = OpEntry(name, family, parse_signature(family.signature))
    if entry is None and name.endswith("_") and not name.startswith("_"):
        return find_op(platform_name, name[:-1])
    return entry


def parse_signature(text: str) -> Signature:
    """``"input, dim=None, *, keepdim=False"`` as a Signature; defaults are literals, nothing is evaluated."""
    try:
        args = ast.parse(f"def f({text}): pass").body[0].args  # type: ignore[attr-defined]
        parameters: list[Parameter] = []
        defaults = [Parameter.empty] * (len(args.args) - len(args.defaults)) + [
            ast.literal_eval(d) for d in args.defaults
        ]
        for a, default in zip(args.args, defaults, strict=True):
            parameters.append(Parameter(a.arg, Parameter.POSITIONAL_OR_KEYWORD, default=default))
        if args.vararg:
            parameters.append(Parameter(args.vararg.arg, Parameter.VAR_POSITIONAL))
        for a, node in zip(args.kwonlyargs, args.kw_defaults, strict=True):
            value = Parameter.empty if node is None else ast.literal_eval(node)
            parameters.append(Parameter(a.arg, Parameter.KEYWORD_ONLY, default=value))
        if args.kwarg:
            parameters.append(Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD))
        return Signature(parameters)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"cannot read the operator signature {text!r}: {error}") from error


def _load(platform_name: str) -> None:
    if platform_name in _loaded:
        error = _loaded[platform_name]
        if error is not None:
            raise error
        return
    _loaded[platform_name] = None
    try:
        _read_everything(platform_name)
    except Exception as error:
        _loaded[platform_name] = error
        raise


def _read_everything(platform_name: str) -> None:
    package = resources.files("hyper_parallel.core.shard.ops")
    for module in sorted(p.name for p in package.iterdir() if p.name.endswith(".py") and p.name != "__init__.py"):
        importlib.import_module(f"hyper_parallel.core.shard.ops.{module[:-3]}")
    for table in sorted((package / "yaml" / platform_name).iterdir(), key=lambda p: p.name):
        if table.name.endswith(".yaml"):
            _read_table(table.read_text(encoding="utf-8"), f"the built-in table {table.name}", override=False)
    _load_user_files()


def _load_user_files() -> None:
    """Run the user's Python files, then read his tables. Both variables name folders, joined by the path separator."""
    for folder in _folders(_PYTHON_VARIABLE):
        for file in sorted(folder.glob("*.py")):
            module_name = f"hyper_parallel_user_ops_{file.stem}"
            spec = importlib.util.spec_from_file_location(module_name, file)
            if spec is None or spec.loader is None:
                raise ImportError(f"{_PYTHON_VARIABLE}: cannot import {file}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module
            spec.loader.exec_module(module)
    for folder in _folders(_YAML_VARIABLE):
        for file in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
            _read_table(file.read_text(encoding="utf-8"), str(file), override=True)


def _folders(variable: str) -> list[Path]:
    folders = [Path(p) for p in os.environ.get(variable, "").split(os.pathsep) if p]
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"{variable} names {folder}, which is not a folder")
    return folders


def _read_table(text: str, source: str, *, override: bool) -> None:
    table = yaml.safe_load(text) or {}
    if not isinstance(table, dict):
        raise ValueError(f"{source}: expected a mapping from operator name to entry, found {type(table).__name__}")
    for name, raw in table.items():
        if not isinstance(raw, dict) or not isinstance(raw.get("family"), str):
            raise ValueError(f"{source}: operator {name!r} needs a mapping with 'family', found {raw!r}")
        if raw["family"] not in _families:
            raise ValueError(
                f"{source}: operator {name!r} names family {raw['family']!r}; registered are {sorted(_families)}"
            )
        unknown = set(raw) - {"family", "signature", "options"}
        if unknown:
            raise ValueError(f"{source}: operator {name!r} has unknown keys {sorted(unknown)}")
        if name in _operators and not override:
            raise ValueError(f"{source}: operator {name!r} is in another built-in table already")
        family = _families[raw["family"]]
        signature = parse_signature(raw.get("signature", family.signature))
        _operators[name] = OpEntry(name, family, signature, dict(raw.get("options") or {}))

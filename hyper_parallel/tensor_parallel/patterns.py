"""Name patterns of plans: which modules each names, and what was probably meant where one names none."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from hyper_parallel.errors import ParallelPlanError

__all__ = ["generic", "match_patterns", "names_anything"]


def generic(name: str) -> str:
    """The name with its numbers replaced: ``layers.3.mlp`` is ``layers.*.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def match_patterns(
    patterns: Sequence[str],
    names: Sequence[str],
    prefixes: Sequence[str],
    parameter_names: Sequence[str],
    candidates: Sequence[str],
) -> Mapping[str, tuple[str, ...]]:
    """The module names that each pattern names.

    A pattern is a dotted name whose parts may have ``*`` (and ``?``, ``[0-3]``), each for one part of a
    name. Where it names nothing from the top it is tried below each of ``prefixes``: plans of base models
    serve models with a head.

    Raises:
        ParallelPlanError: a pattern that names nothing (with near matches), or two that name the same module.

    Example:
        >>> names = ["", "model", "model.layers", "model.layers.0"]
        >>> match_patterns(["layers.*"], names, ["model"], [], [])
        {'layers.*': ('model.layers.0',)}
    """
    found: dict[str, tuple[str, ...]] = {}
    owner: dict[str, str] = {}
    for pattern in patterns:
        matched: tuple[str, ...] = ()
        for prefix in ("", *prefixes):
            full = f"{prefix}.{pattern}" if prefix and pattern else pattern
            matched = tuple(name for name in names if _matches(name, full))
            if matched:
                break
        if not matched:
            raise ParallelPlanError(_nothing(pattern, names, prefixes, parameter_names, candidates))
        for name in matched:
            if name in owner:
                raise ParallelPlanError(f"patterns {owner[name]!r} and {pattern!r} both name {name!r}")
            owner[name] = pattern
        found[pattern] = matched
    return found


def names_anything(pattern: str, names: Sequence[str], prefixes: Sequence[str]) -> bool:
    """Whether ``pattern`` names one of ``names``, from the top or below one of ``prefixes``."""
    return any(_matches(name, f"{p}.{pattern}" if p else pattern) for name in names for p in ("", *prefixes))


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(p, w) for p, w in zip(parts, wanted))


def _nothing(
    pattern: str,
    names: Sequence[str],
    prefixes: Sequence[str],
    parameter_names: Sequence[str],
    candidates: Sequence[str],
) -> str:
    if names_anything(pattern, parameter_names, prefixes):
        return f"pattern {pattern!r} names a parameter; expected a module, its parameters are cut with it"
    known = sorted({generic(name) for name in names if name})
    near = difflib.get_close_matches(generic(pattern), known, n=3, cutoff=0.6)
    near += [k for k in known if k.endswith("." + pattern.rsplit(".", 1)[-1]) and k not in near][:3]
    meant = f"; near matches: {', '.join(near)}" if near else ""
    left = ", ".join(sorted({generic(name) for name in candidates})) or "none"
    return f"pattern {pattern!r} names no module{meant}; linear layers and embeddings of the model: {left}"

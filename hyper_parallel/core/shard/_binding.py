"""Arguments of a call by the names of the operator's signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

__all__ = ["bind_arguments"]

_ALIASES = {
    "axis": "dim", "axes": "dim", "dims": "dim", "keepdims": "keepdim", "self": "input", "x": "input", "size": "shape"
}  # fmt: skip
"""Spellings that frameworks accept for one argument."""


def bind_arguments(
    signature: Signature, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments by name, and where each stands in the call: a position, ``("*", start)`` or a keyword."""
    bound: dict[str, Any] = {}
    locations: dict[str, Any] = {}
    position = 0
    for p in signature.parameters.values():
        if p.kind is Parameter.VAR_POSITIONAL:
            bound[p.name], locations[p.name] = tuple(args[position:]), ("*", position)
            position = len(args)
        elif p.kind is Parameter.POSITIONAL_OR_KEYWORD and position < len(args):
            bound[p.name], locations[p.name] = args[position], position
            position += 1
        elif p.kind is not Parameter.VAR_KEYWORD and p.default is not Parameter.empty:
            bound[p.name] = p.default
    open_ended = any(p.kind is Parameter.VAR_KEYWORD for p in signature.parameters.values())
    for key, value in kwargs.items():
        canonical = key if key in signature.parameters else _ALIASES.get(key, key)
        if canonical not in signature.parameters and not open_ended:
            raise TypeError(f"{name}() has no argument {key!r} in its distributed rule; expected {signature}")
        if canonical in locations and isinstance(locations[canonical], int):
            raise TypeError(f"{name}() got {canonical!r} twice")
        bound[canonical], locations[canonical] = value, key
    if position < len(args):
        raise TypeError(f"{name}() takes {signature}, found {len(args)} positional arguments")
    missing = [
        p.name
        for p in signature.parameters.values()
        if p.name not in bound and p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    ]
    if missing:
        raise TypeError(f"{name}() lacks {missing}; expected {signature}")
    return bound, locations

"""From the command line and a YAML file to typed options: command line before file before defaults."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import tyro
import yaml

from hyper_parallel.trainer.options import TrainOptions
from hyper_parallel.trainer.output_folder import with_open_output

__all__ = ["UsageError", "parse_options", "parse_train_options", "read_options_file"]

Options = TypeVar("Options")


class UsageError(ValueError):
    """The user asked for something that cannot be; the message is all there is to say."""


def parse_train_options(arguments: Sequence[str]) -> TrainOptions:
    """:func:`parse_options` of the command ``train``."""
    return parse_options(TrainOptions, "train", arguments)


def parse_options(
    kind: type[Options], command: str, arguments: Sequence[str], defaults: Options | None = None
) -> Options:
    """``[config.yaml] [--section.option value ...]`` as options of a command; what neither names comes from
    ``defaults``, or is the default of its kind.

    Raises:
        UsageError: the file cannot be used.
        SystemExit: 0 after ``--help``; 2 for an option that does not exist (with near matches) or a value
            that does not fit.
    """
    rest, defaults = list(arguments), kind() if defaults is None else defaults
    if rest and not rest[0].startswith("-"):
        defaults = read_options_file(Path(rest.pop(0)), kind, defaults)
    return tyro.cli(
        kind,
        args=rest,
        default=with_open_output(defaults),
        prog=f"hyper-parallel {command}",
        description=f"{kind.__doc__} Options may also come from a YAML file as the first argument.",
    )


def read_options_file(
    path: Path,
    kind: type[Options] = TrainOptions,  # type: ignore[assignment]
    defaults: Options | None = None,
) -> Options:
    """Options from a YAML file whose nested mappings are the sections; what it does not name, as in ``defaults``.

    Raises:
        UsageError: the file cannot be read, names an option twice, one that does not exist (near matches are given), or
            gives null to one that needs a value.
        SystemExit: 2 for a value that does not fit.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # safe, as its base class is
    except IsADirectoryError:
        raise UsageError(
            f"{path} is a folder; expected a YAML file of options. A checkpoint, or the folder of a run, goes to "
            "train as --checkpoint.resume, to eval as --weights or in this place"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read options from {path}: {error}") from None
    content = {} if content is None else content
    if not isinstance(content, Mapping):
        raise UsageError(f"{path} holds a {type(content).__name__}; expected a mapping of options")
    known = dict(_option_names(kind()))
    arguments: list[str] = []
    named: set[str] = set()
    for name, value in _flatten(content):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"options are {', '.join(known)}"
            raise UsageError(f"{path}: unknown option {name!r}; {hint}")
        if name in named:
            raise UsageError(f"{path}: {name!r} is there twice")
        if value is None and not known[name]:
            raise UsageError(f"{path}: {name} is null; expected a value, or leave it out")
        named.add(name)
        arguments += _as_arguments(name, value)
    default = with_open_output(kind() if defaults is None else defaults)
    return tyro.cli(kind, args=arguments, default=default, prog=str(path), add_help=False)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML's own loader takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.YAMLError(f"{key.value!r} is there twice, in line {key.start_mark.line + 1}")
                seen.add(key.value)
        content: dict[Any, Any] = super().construct_mapping(node, deep)
        return content


def _option_names(options: Any, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Each option, and whether it may be None."""
    hints = get_type_hints(type(options))
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            yield from _option_names(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, type(None) in get_args(hints[field.name])


def _flatten(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _as_arguments(name: str, value: Any) -> list[str]:
    """The same on a command line."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        section, _, last = flag[2:].rpartition(".")
        return [flag if value else f"--{section}.no-{last}" if section else f"--no-{last}"]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    text = str(value)
    return [flag, os.path.expanduser(text) if text.startswith("~/") else text]  # as a shell does

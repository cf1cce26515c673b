"""The ``hyper-parallel`` command. It loads no framework: local workers are processes of their own."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

__all__ = ["main"]

_COMMANDS = {
    "train": "hyper_parallel.trainer.train_command",
    "doctor": "hyper_parallel.trainer.doctor",
}

_USAGE = """\
usage: hyper-parallel COMMAND [options]

commands:
  train    train a small Llama on text, with the last layer and its loss shared between ranks
  doctor   say what is installed, and let local workers try a collective

hyper-parallel COMMAND --help shows the options of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 (it failed), 2 (wrong usage), or 128 + a signal's number."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else 2
    name = arguments.pop(0)
    if name not in _COMMANDS:
        near = difflib.get_close_matches(name, _COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"commands are {', '.join(_COMMANDS)}"
        print(f"hyper-parallel: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    try:
        command = importlib.import_module(_COMMANDS[name])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("hyper_parallel"):
            raise
        print(
            f"hyper-parallel {name} needs the package {error.name!r}; "
            "install it with: pip install 'hyper_parallel[train]'",
            file=sys.stderr,
        )
        return 1
    status: int = command.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())

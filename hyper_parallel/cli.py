"""The ``hyper-parallel`` command. It loads no framework: local workers are processes of their own."""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Sequence

import hyper_parallel
from hyper_parallel.errors import how_to_install

__all__ = ["main"]

_COMMANDS = {
    "train": ("train_command", "train a small Llama on text, with the last layer and its loss shared between ranks"),
    "compare": ("compare_command", "train, train the same with one process, and say how far apart the two are"),
    "eval": ("eval_command", "find the loss of a checkpoint, or of a Hugging Face folder, on text"),
    "export": ("export_command", "write the weights of a checkpoint as a Hugging Face folder"),
    "matrix": ("matrix_command", "what is supported, and which of it runs with what is installed here"),
    "doctor": ("doctor", "say what is installed, and let local workers try a collective"),
}
"""Name -> its module in ``hyper_parallel.trainer``, and one line on it."""


def _usage() -> str:
    lines = [f"  {name:<9}{text}" for name, (_, text) in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: hyper-parallel COMMAND [config.yaml] [options]",
            "       hyper-parallel --version",
            "",
            "commands:",
            *lines,
            "",
            "hyper-parallel COMMAND --help shows the options of a command; the folder examples/ of the project has",
            "options files to begin with.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 (it failed), 2 (wrong usage), or 128 + a signal's number."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    name = arguments.pop(0)
    if name in ("-V", "--version"):
        print(f"hyper_parallel {hyper_parallel.__version__}")
        return 0
    if name not in _COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        near = difflib.get_close_matches(name, [*_COMMANDS, "--version", "--help"], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"commands are {', '.join(_COMMANDS)}"
        print(f"hyper-parallel: unknown {kind} {name!r}; {hint}", file=sys.stderr)
        return 2
    try:
        command = importlib.import_module(f"hyper_parallel.trainer.{_COMMANDS[name][0]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("hyper_parallel"):
            raise
        print(
            f"hyper-parallel {name} needs the package {error.name!r}; install it with: {how_to_install('train')}",
            file=sys.stderr,
        )
        return 1
    try:
        status: int = command.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads this, as `head` does, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


if __name__ == "__main__":
    sys.exit(main())

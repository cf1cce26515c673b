"""Where checkpoints are, under which name one counts, and what is removed.

::

    <folder>/step_000200/                 whole: it got this name by one rename, when every rank had written its part
    <folder>/.step_000300.1f0c.part/      being written, or left by a job that was killed; never read
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from hyper_parallel.errors import CheckpointError
from hyper_parallel.trainer.checkpoint_manifest import MANIFEST_FILE

__all__ = [
    "Place",
    "flush_folder",
    "list_steps",
    "make_draft",
    "prune",
    "publish",
    "remove_leftovers",
    "step_name",
]

_STEP = re.compile(r"step_(\d{6,})")
_UNFINISHED = ".part"


def step_name(step: int) -> str:
    """The name of a checkpoint's folder.

    Example:
        >>> step_name(123)
        'step_000123'
    """
    return f"step_{step:06d}"


def list_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, ascending; none where there is no such folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from None
    found = (_STEP.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in found if match and step_name(int(match[1])) == match[0])


class Place:
    """A checkpoint seen from a path that a user gave, as two numbers that one rank finds and all understand.

    Args:
        path: a checkpoint, a folder of checkpoints, or the folder of a run.
        folder: the name of the folder of checkpoints in that of a run.
    """

    NOWHERE = (-1, -1)

    def __init__(self, path: Path, folder: str) -> None:
        self._path, self._folder = path, folder

    def find(self) -> tuple[int, int]:
        """The checkpoint itself, else the last one in the folder; ``NOWHERE`` when there is none."""
        if (self._path / MANIFEST_FILE).is_file() or _STEP.fullmatch(self._path.name):
            return (0, 0) if self._path.is_dir() else self.NOWHERE
        for kind, base in ((1, self._path), (2, self._path / self._folder)):
            if steps := list_steps(base):
                return kind, steps[-1]
        return self.NOWHERE

    def at(self, found: tuple[int, int]) -> Path:
        """The checkpoint that :meth:`find` has found."""
        kind, step = found
        bases = (self._path, self._path / step_name(step), self._path / self._folder / step_name(step))
        return bases[kind]

    def locate(self) -> Path:
        """Find it, for a process alone.

        Raises:
            CheckpointError: there is none.
        """
        found = self.find()
        if found == self.NOWHERE:
            raise CheckpointError(self.nothing())
        return self.at(found)

    def nothing(self) -> str:
        """What to say when there is none."""
        return (
            f"no checkpoint at {self._path}: expected a folder with {MANIFEST_FILE}, or folders such as "
            f"{step_name(100)} in it or in its {self._folder}, which training writes with --checkpoint.enable"
        )


def make_draft(folder: Path, step: int, save_id: str) -> Path:
    """A new folder beside the checkpoints, to write the next one into. Raises OSError."""
    draft = folder / f".{step_name(step)}.{save_id}{_UNFINISHED}"
    draft.mkdir(parents=True)
    return draft


def publish(draft: Path, folder: Path, step: int) -> Path:
    """Make a draft a checkpoint, at once and for good. Raises OSError."""
    final = folder / step_name(step)
    flush_folder(draft)
    draft.rename(final)
    flush_folder(folder)
    return final


def prune(folder: Path, keep: int) -> None:
    """Remove all but the last ``keep`` checkpoints. One that is half removed is no checkpoint any more."""
    for step in list_steps(folder)[:-keep]:
        old = folder / step_name(step)
        dying = folder / f".{old.name}.old{_UNFINISHED}"
        shutil.rmtree(dying, ignore_errors=True)
        old.rename(dying)
        shutil.rmtree(dying)


def remove_leftovers(folder: Path) -> None:
    """Remove what jobs that were killed have left half written or half removed. Raises OSError."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith(".step_") and path.name.endswith(_UNFINISHED):
                shutil.rmtree(path)


def flush_folder(folder: Path) -> None:
    """Have the names in it on the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

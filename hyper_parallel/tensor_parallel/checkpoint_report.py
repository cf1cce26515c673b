"""What was found when a checkpoint met a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CheckpointReport", "LoadReport"]

_SHOWN = 10


@dataclass(frozen=True)
class CheckpointReport:
    """Everything that does not fit, and everything that was left out.

    Attributes:
        path: the checkpoint.
        missing: names in the model that no file has.
        unexpected: keys that the model has not.
        mis_shaped: name, shape found, shape expected.
        mis_typed: name, dtype found, dtype expected: integers for floats, or floats that need scales.
        conflicting: keys that are one parameter in the model and have different values in the files.
        uncovered: name, number of elements that no rank's part covers.
        unset: buffers and kept parameters that would be left without values.
        stale: safetensors files that the index does not name.
        duplicated: keys that are in the files more than once, in words.
        ignored: keys that were left out on purpose.
        kept: names that keep the values they have.
    """

    path: str
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mis_shaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    mis_typed: tuple[tuple[str, str, str], ...] = ()
    conflicting: tuple[str, ...] = ()
    uncovered: tuple[tuple[str, int], ...] = ()
    unset: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    duplicated: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def problems(self) -> list[str]:
        """One line for each kind of mismatch; the checkpoint can be loaded when there are none."""
        return _lines(
            ("in no file", self.missing),
            ("not in the model", self.unexpected),
            ("of another shape", [f"{n} is {found}, expected {expected}" for n, found, expected in self.mis_shaped]),
            ("of another kind", [f"{n} is {found}, expected {expected}" for n, found, expected in self.mis_typed]),
            ("one parameter here, different values in the files", self.conflicting),
            ("covered by no rank", [f"{count} elements of {n}" for n, count in self.uncovered]),
            ("left without values", self.unset),
        )

    @property
    def notes(self) -> list[str]:
        """One line for each kind of thing that was left out."""
        return _lines(
            ("files that the checkpoint does not name (not read)", self.stale),
            ("more than once in the files", self.duplicated),
            ("left out", self.ignored),
            ("kept as they were", self.kept),
        )

    def __str__(self) -> str:
        return "\n".join([f"checkpoint {self.path}", *(f"  {line}" for line in (*self.problems, *self.notes))])


@dataclass(frozen=True)
class LoadReport:
    """The outcome of :func:`load_hf_checkpoint`; ``print`` it.

    Attributes:
        report: what was left out.
        tensors: number of tensors read.
        file_bytes: bytes of these tensors in the files.
        header_bytes: bytes of headers, which every rank reads.
        bytes_read: for each rank, bytes of tensors read from the files.
    """

    report: CheckpointReport
    tensors: int
    file_bytes: int
    header_bytes: int
    bytes_read: tuple[int, ...]

    def __str__(self) -> str:
        ranks = ", ".join(f"rank {rank}: {count:,}" for rank, count in enumerate(self.bytes_read))
        return (
            f"{self.report}\n  {self.tensors} tensors of {self.file_bytes:,} bytes; read by {ranks} "
            f"(and {self.header_bytes:,} of headers)"
        )


def _lines(*kinds: tuple[str, Sequence[str]]) -> list[str]:
    return [f"{kind}: {_list(items)}" for kind, items in kinds if items]


def _list(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more

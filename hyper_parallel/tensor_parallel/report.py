"""What a plan did to a model: which rule met which modules, what each rank holds, what stays whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["PlanReport", "ReportedParameter", "ReportedRule"]


@dataclass(frozen=True)
class ReportedParameter:
    """A parameter: its whole shape, this rank's, and the bytes that each rank holds."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    rank_bytes: tuple[int, ...]
    tied_to: str | None = None


@dataclass(frozen=True)
class ReportedRule:
    """A pattern of the plan, its style, the modules it met, and their parameters (tied ones where they come
    first).
    """

    pattern: str
    style: str
    modules: tuple[str, ...]
    parameters: tuple[ReportedParameter, ...]

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Bytes of all parameters on each rank."""
        return _add(p.rank_bytes for p in self.parameters if p.tied_to is None)


@dataclass(frozen=True)
class PlanReport:
    """The outcome of :func:`parallelize_module`; ``print`` it.

    Attributes:
        ranks: number of tensor-parallel ranks.
        rank: this one.
        rules: in the plan's order, then what was added to it.
        whole: parameters that no rule cuts, held by every rank.
        unsharded_linears: linear layers and embeddings that no rule names.
    """

    ranks: int
    rank: int
    rules: tuple[ReportedRule, ...]
    whole: tuple[ReportedParameter, ...]
    unsharded_linears: tuple[str, ...] = field(default=())

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Bytes of parameters on each rank."""
        zero = (0,) * self.ranks
        return _add([zero, *(r.rank_bytes or zero for r in self.rules), *(p.rank_bytes for p in self.whole)])

    @property
    def shared_view(self) -> str:
        """What all ranks must see alike, one line for each rule and parameter."""
        lines = [f"{rule.pattern}: {rule.style} for {', '.join(rule.modules)}" for rule in self.rules]
        parameters = [p for rule in self.rules for p in rule.parameters] + list(self.whole)
        return "\n".join(lines + [f"{p.name}: {p.shape}, bytes {p.rank_bytes}" for p in parameters])

    def __str__(self) -> str:
        lines = [f"tensor parallel over {self.ranks} ranks (shapes of rank {self.rank}, largest bytes a rank)"]
        for rule in self.rules:
            count = f"{len(rule.modules)} module{'s' if len(rule.modules) != 1 else ''}"
            lines.append(f"{rule.pattern or '(the model)'}: {rule.style}, {count}, {_most(rule.rank_bytes)}")
            for name, shapes in _alike(rule.parameters):
                lines.append(f"    {name}: {shapes}")
        lines.append(f"whole on every rank: {_most(_add(p.rank_bytes for p in self.whole))}")
        for name, shapes in _alike(self.whole):
            lines.append(f"    {name}: {shapes}")
        if self.unsharded_linears:
            lines.append(f"linear layers and embeddings left whole: {', '.join(self.unsharded_linears)}")
        lines.append(f"in all: {_most(self.rank_bytes)}")
        return "\n".join(lines)


def _alike(parameters: Sequence[ReportedParameter]) -> list[tuple[str, str]]:
    """One line for parameters that differ only in the numbers in their names."""
    lines: dict[tuple[str, str], int] = {}
    for p in parameters:
        name = ".".join("*" if part.isdigit() else part for part in p.name.split("."))
        tied = f", tied to {p.tied_to}" if p.tied_to else ""
        shapes = f"{p.shape} -> {p.local_shape}{tied}" if p.shape != p.local_shape else f"{p.shape}{tied}"
        lines[name, shapes] = lines.get((name, shapes), 0) + 1
    return [(name, f"{shapes}{f' x {n}' if n > 1 else ''}") for (name, shapes), n in lines.items()]


def _add(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows))


def _most(rank_bytes: Sequence[int]) -> str:
    size = float(max(rank_bytes, default=0))
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"

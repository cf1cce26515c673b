"""The rule shared by operators with several tensors: dims that belong together must be cut together.

Each operand names its dims with labels. A mesh dim may shard one label: operands that have the label are sharded over
it (a replicated one is sliced), operands without it stay whole. The output follows: it is sharded over the label if it
has it, else the label was summed over and the output is Partial.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.shard._recipe import is_inplace
from hyper_parallel.core.shard.distributed_op import DistributedOp, OpCall, Path, TensorArg

__all__ = ["Alignment", "Label", "align", "align_added", "argument", "broadcast_labels"]

Label = Hashable | None
"""A name for a dim; None: a dim that has to be whole."""

PartialRule = Literal["reduce", "add", "multiply"]
"""What becomes of Partial operands where nothing is sharded.

``reduce``: they are reduced first. ``add``: the operator is linear in all tensors jointly, so replicated ones become
Partial too (zeros but on one rank). ``multiply``: linear in each tensor, so one stays Partial and the rest is whole.
"""


@dataclass(frozen=True)
class Alignment:
    """For each mesh dim, the label it shards and whether the operands are left Partial; and where operands go first."""

    labels: tuple[Label, ...]
    partial: tuple[bool, ...]
    inputs: Mapping[Path, Layout]

    def output(self, call: OpCall, labels: Sequence[Label], shape: Sequence[int]) -> Layout:
        """The layout of an output with these dims."""
        placements: list[Placement] = []
        for label, partial in zip(self.labels, self.partial, strict=True):
            if label is None:
                placements.append(Partial() if partial else Replicate())
            else:
                placements.append(Shard(labels.index(label)) if label in labels else Partial())
        return Layout(call.mesh, placements, shape)


def argument(call: OpCall, path: Path) -> TensorArg:
    """The tensor at a path."""
    found: TensorArg = call.args[path] if isinstance(path, str) else call.args[path[0]][path[1]]
    return found


def broadcast_labels(arg: TensorArg, shape: Sequence[int]) -> list[Label]:
    """Labels of an operand that is broadcast to ``shape``: positions there; None for sizes of 1 that need no cut."""
    sharded = {p.dim for p in arg.layout.placements if isinstance(p, Shard)}
    labels: list[Label] = []
    for i, size in enumerate(arg.shape):
        position = len(shape) - len(arg.shape) + i
        same = position >= 0 and size == shape[position]
        labels.append(position if same and (size > 1 or i in sharded) else None)
    return labels


def align(
    op: DistributedOp, call: OpCall, operands: Mapping[Path, Sequence[Label]], partial: PartialRule = "reduce"
) -> Alignment:
    """Find one label for each mesh dim.

    Raises:
        UnsupportedOperatorError: two labels on one mesh dim, a sharded dim that must be whole, or a plain tensor that
            would have to be cut.
    """
    args = {path: argument(call, path) for path in operands}
    placements = {path: list(arg.layout.placements) for path, arg in args.items()}
    labels: list[Label] = []
    kept: list[bool] = []
    for m in range(call.mesh.ndim):
        label = _sharded_label(op, call, operands, args, m)
        labels.append(label)
        for path, own in operands.items():
            before = args[path].layout.placements[m]
            if label is not None and label in own and not before.is_shard():
                if args[path].plain:
                    raise _refuse_plain(op, call, path, m)
                placements[path][m] = Shard(list(own).index(label))
            elif before.is_partial() and (label is not None or partial == "reduce" or before != Partial()):
                placements[path][m] = Replicate()
        kept.append(label is None and _keep_partial(call, placements, m, partial))
    inputs = {path: args[path].layout.replace(p) for path, p in placements.items()}
    return Alignment(tuple(labels), tuple(kept), inputs)


def align_added(op: DistributedOp, call: OpCall, path: Path, labels: Sequence[Label], output: Layout) -> Layout:
    """Where a tensor goes that is added to a result with layout ``output``; labels are positions in the result."""
    arg = argument(call, path)
    placements: list[Placement] = []
    for m, (own, out) in enumerate(zip(arg.layout.placements, output.placements, strict=True)):
        target: Placement = Replicate()
        if isinstance(out, Shard) and out.dim in labels:
            target = Shard(list(labels).index(out.dim))
            if arg.plain:
                raise _refuse_plain(op, call, path, m)
        elif out.is_partial() and not own.is_shard():
            target = Partial()
        if own.is_shard() and own != target:
            raise op.refuse(call, f"{path} is {own}@{call.mesh.dim_labels[m]}, but the result there is {out}")
        placements.append(target)
    return arg.layout.replace(placements)


def _sharded_label(
    op: DistributedOp,
    call: OpCall,
    operands: Mapping[Path, Sequence[Label]],
    args: Mapping[Path, TensorArg],
    m: int,
) -> Label:
    """The one label that mesh dim ``m`` shards, or None."""
    name = call.mesh.dim_labels[m]
    found: dict[Label, Path] = {}
    for path, own in operands.items():
        placement = args[path].layout.placements[m]
        if isinstance(placement, Shard):
            label = own[placement.dim]
            if label is None:
                raise op.refuse(call, f"dim {placement.dim} of {_text(path)} is sharded over {name}, but must be whole")
            if list(own).count(label) > 1:
                raise op.refuse(call, f"dim {placement.dim} of {_text(path)} is sharded and used twice")
            found[label] = path
    if len(found) > 1:
        raise op.refuse(call, f"mesh dim {name} shards dims that do not belong together")
    return next(iter(found), None)


def _keep_partial(
    call: OpCall, placements: Mapping[Path, list[Placement]], m: int, partial: PartialRule
) -> bool:
    """Decide about Partial operands on a mesh dim that shards nothing; whether the result is Partial."""
    paths = [path for path, p in placements.items() if p[m].is_partial()]
    if not paths:
        return False
    first = next(iter(placements))
    if is_inplace(call.name) and first not in paths:  # what is written to stays as it is
        partial = "reduce"
    if partial == "reduce":
        for path in paths:
            placements[path][m] = Replicate()
        return False
    for path in placements:
        if partial == "add":
            placements[path][m] = Partial()
        elif path != paths[0]:
            placements[path][m] = Replicate()
    return True


def _refuse_plain(op: DistributedOp, call: OpCall, path: Path, m: int) -> Exception:
    return op.refuse(
        call,
        f"{_text(path)} is a plain tensor, and it is ambiguous whether it is whole or this rank's part over mesh dim "
        f"{call.mesh.dim_labels[m]}; use distribute_tensor or DTensor.from_local",
    )


def _text(path: Path) -> str:
    return path if isinstance(path, str) else f"{path[0]}[{path[1]}]"

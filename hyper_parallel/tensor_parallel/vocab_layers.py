"""The two ends of a language model whose vocabulary the ranks share: the embedding and the last layer."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.placement_types import Replicate, Shard
from hyper_parallel.errors import ParallelPlanError
from hyper_parallel.tensor_parallel.groups import resolve_mesh
from hyper_parallel.tensor_parallel.initialize import Normal
from hyper_parallel.tensor_parallel.layers import SharedLayer, linear_cuts, linear_initializers
from hyper_parallel.tensor_parallel.rules import ColumnRule, VocabRule
from hyper_parallel.tensor_parallel.shard_loader import ParallelRule, rule_spec

__all__ = ["VocabParallelEmbedding", "VocabParallelHead"]


class VocabParallelEmbedding(SharedLayer):
    """Rows of a table ``[num_embeddings, embedding_dim]``, each on one rank: ``torch.chunk`` pieces, uneven
    ones too.

    ::

        ids [4, 1] of 5 rows      rank 0 (rows 0 .. 2): [ 0, w1]      rank 1 (rows 3 .. 4): [w4,  0]
        sum: [w4, w1]

    Placements: ids R -> y R. Forward: one all-reduce, and on CPU an all-gather of 16 bytes before it. Backward: no
        collective.

    Args:
        num_embeddings: rows of all ranks together.
        embedding_dim: row length.
        padding_idx: this row gets no gradient, on the rank that holds it; initially zero.
        group: the ranks: ``mesh["tp"]``, a :class:`Group` or the framework's process group.
        sequence_parallel: reduce-scatter the output over ``sequence_dim`` instead (backward: all-gather).
        sequence_dim: the dim to shard then.
        dtype, device: of the table.

    Called with integer ids of any shape, equal on all ranks; gives ``[*ids.shape, embedding_dim]``. On CPU the ranks
    make sure of it first: an id outside the table on any of them is an IndexError on all, ids that are no integers a
    TypeError, other shapes or dtypes a ValueError. On accelerators ids are not looked at.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: Any,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        dtype: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx {padding_idx} is not a row of a table of {num_embeddings}")
        padding = None if padding_idx is None else padding_idx % num_embeddings
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding
        mesh = resolve_mesh(group)
        shape = (num_embeddings, embedding_dim)
        rule = VocabRule(
            mesh=mesh,
            cuts={"weight": rule_spec(ParallelRule("vocab_embed"), ".weight", shape, mesh.size())},
            output=Shard(sequence_dim) if sequence_parallel else Replicate(),
            padding_idx=padding,
        )
        self._share(rule, {"weight": Normal(1.0)}, dtype, device)

    def _adjust(self, name: str, values: Any) -> None:
        start, stop = self.rule.cuts[name].ranges[self.group.rank][0]
        if self.padding_idx is not None and start <= self.padding_idx < stop:
            values[self.padding_idx - start] = 0


class VocabParallelHead(SharedLayer):
    """The last layer: hidden states to logits whose classes are sharded, ready for ``loss_parallel()``.

    Placements: x R -> logits S(-1), a DTensor of global shape ``[..., num_embeddings]``. Forward: no
        collective.
    Backward: the gradient of x is all-reduced.

    Args:
        in_features: width of the hidden states.
        num_embeddings: number of classes; need not be divisible.
        bias: whether to add one.
        group: the ranks; ``mesh["tp"]`` makes the logits lie on that mesh.
        tied_to: share this embedding's weight: one parameter with one gradient.
        gather_output: give the whole logits as a plain tensor instead.
        sequence_parallel, sequence_dim, dtype, device: as in :class:`ColumnParallelLinear`.

    Raises:
        ParallelPlanError: the embedding has other sizes or lies on other ranks.
    """

    def __init__(
        self,
        in_features: int,
        num_embeddings: int,
        bias: bool = False,
        *,
        group: Any,
        tied_to: VocabParallelEmbedding | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        dtype: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = in_features, num_embeddings, None
        mesh = resolve_mesh(group)
        rule = ColumnRule(
            mesh=mesh,
            cuts=linear_cuts("column", (num_embeddings, in_features), bias, mesh),
            input=Shard(sequence_dim) if sequence_parallel else Replicate(),
            output=Replicate() if gather_output else Shard(-1),
            use_local=gather_output,
            out_features=num_embeddings,
        )
        initializers = linear_initializers(in_features, bias)
        if tied_to is not None:
            found = tied_to.rule.cuts["weight"]
            if found != rule.cuts["weight"] or tied_to.group.ranks != rule.group.ranks:
                raise ParallelPlanError(
                    f"a head of {num_embeddings} x {in_features} on ranks {rule.group.ranks} cannot share "
                    f"the weight of an embedding of shape {found.shape} on ranks {tied_to.group.ranks}"
                )
            del initializers["weight"]
        shared = {} if tied_to is None else {"weight": tied_to.weight}
        self._share(rule, initializers, dtype, device, shared)

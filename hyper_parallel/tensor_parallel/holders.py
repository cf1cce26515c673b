"""Which ranks hold a model together, each a part of it: what savers deal files out over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform import Group
from hyper_parallel.tensor_parallel.byte_runs import ByteRuns, owned_runs
from hyper_parallel.tensor_parallel.model_tensors import ModelTensor, common_group
from hyper_parallel.tensor_parallel.save_plan import item_bytes

__all__ = ["Holders", "Place", "place_of"]

_NOTHING = ByteRuns(*(np.empty(0, np.int64),) * 3)


@dataclass(frozen=True)
class Holders:
    """Ranks that have the whole model between them.

    Attributes:
        group: these ranks.
        places: for each of them its index among the tensor-parallel ranks, and among the data-parallel ones that FSDP2
            shards over (0 without it).
        replica: which of several such groups this is.
        replicas: how many there are; each has the whole model.
    """

    group: Group
    places: tuple[tuple[int, int], ...]
    replica: int
    replicas: int

    def owned_runs(self, tensor: ModelTensor, rank: int) -> ByteRuns:
        """What of a tensor the ``rank``-th of them writes: sorted by its place in the file, each byte of the whole on
        one of them.
        """
        place, data_place = self.places[rank]
        size = item_bytes(tensor)
        runs = owned_runs(tensor.spec, place, size)
        if tensor.piece is not None:
            return runs.of_part(*tensor.byte_range(place, data_place, size))
        return runs if data_place == 0 else _NOTHING


@dataclass(frozen=True)
class Place:
    """What a rank knows of this by itself.

    Attributes:
        own: the tensor-parallel ranks.
        data: the ranks that FSDP2 shards over; None: it does not.
    """

    own: Group
    data: Group | None

    def code(self, ranks: Group) -> int:
        """To be gathered over ``ranks``, all that take part: see :meth:`holders`."""
        if self.data is None:
            return self.own.ranks[0] * ranks.size
        return ranks.ranks[0] * ranks.size + self.own.rank * self.data.size + self.data.rank

    def holders(self, codes: Sequence[int], ranks: Group) -> Holders:
        """From everybody's codes.

        Raises:
            CheckpointError: the same on all ranks: FSDP2 has not sharded the model over all of them.
        """
        if self.data is None:
            firsts = sorted({code // ranks.size for code in codes})
            places = tuple((index, 0) for index in range(self.own.size))
            return Holders(self.own, places, firsts.index(self.own.ranks[0]), len(firsts))
        indices = [code % ranks.size for code in codes]
        expected = self.own.size * self.data.size
        if sorted(indices) != list(range(expected)):
            raise CheckpointError(
                f"FSDP2 has sharded the model over {self.data.size} data-parallel * {self.own.size} tensor-parallel "
                f"ranks; expected all of the {ranks.size} ranks that save it to hold one part each"
            )
        return Holders(ranks, tuple(divmod(index, self.data.size) for index in indices), 0, 1)


def place_of(tensors: Sequence[ModelTensor]) -> Place:
    """Of this rank.

    Raises:
        CheckpointError: parts of the model are cut over different ranks.
    """
    groups = {t.piece.group.ranks: t.piece.group for t in tensors if t.piece is not None}
    if len(groups) > 1:
        first, second = list(groups)[:2]
        raise CheckpointError(f"parameters are sharded over different ranks: {first} and {second}; expected one group")
    return Place(common_group(tensors), next(iter(groups.values()), None))

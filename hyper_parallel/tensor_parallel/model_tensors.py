"""The tensors of a parallelised model, as checkpoints see them: each once, with all its names and its cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hyper_parallel.core.shard_spec import ShardSpec, chunk_ranges
from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.modules import Module, get_module_backend
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.platform.weights import Slot, get_weight_backend
from hyper_parallel.tensor_parallel.byte_runs import ByteRuns, spec_runs
from hyper_parallel.tensor_parallel.data_shards import DataPiece, data_piece

__all__ = [
    "ModelTensor",
    "common_group",
    "device_of",
    "every_rank",
    "local_buffer_names",
    "model_tensors",
    "whereabouts",
]


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """A parameter, or a persistent buffer.

    Attributes:
        names: all names it has in the model, several for tied weights; the first one is used in files.
        slots: the modules that hold it.
        tensor: this rank's part; may have no memory yet. Where the framework has sharded it once more (FSDP2), its own
            distributed tensor.
        spec: how tensor parallelism cuts the whole.
        rank: this rank's index among those that it is cut over.
        group: these ranks; None when it is whole.
        dtype: as NumPy spells it.
        piece: what of tensor parallelism's part this data-parallel rank holds; None: all of it.
    """

    names: tuple[str, ...]
    slots: tuple[Slot, ...]
    tensor: Tensor
    spec: ShardSpec
    rank: int
    group: Group | None
    dtype: str
    piece: DataPiece | None = None

    @property
    def name(self) -> str:
        """The first one."""
        return self.names[0]

    @property
    def has_memory(self) -> bool:
        """Whether it has values."""
        return get_module_backend().has_memory(self.tensor)

    @property
    def cut(self) -> str:
        """How it is cut, in words that are the same on all ranks."""
        return str(self.spec) + ("" if self.piece is None else f", over {self.piece.group.size} data-parallel ranks")

    def runs(self, item_bytes: int) -> ByteRuns:
        """Where the bytes of this rank's part lie in a file, in its own order."""
        runs = spec_runs(self.spec, self.rank, item_bytes)
        if self.piece is None:
            return runs
        return runs.of_part(*self.byte_range(self.rank, self.piece.group.rank, item_bytes))

    def byte_range(self, rank: int, data_rank: int, item_bytes: int) -> tuple[int, int]:
        """Of what tensor-parallel rank ``rank`` has, the bytes that ``data_rank`` of its data-parallel ranks holds."""
        assert self.piece is not None
        rows, *inner = self.spec.local_shape(rank)
        start, stop = chunk_ranges(rows, self.piece.group.size)[data_rank]
        row_bytes = math.prod(inner) * item_bytes
        return start * row_bytes, stop * row_bytes


def model_tensors(model: Module) -> list[ModelTensor]:
    """In the order of the modules. No collective. What FSDP2 has gathered for a forward is given up before.

    Raises:
        CheckpointError: a parameter whose marks do not fit each other, or one that another library has sharded
            otherwise than FSDP2 does.
    """
    get_weight_backend().reshard(model)
    names: dict[int, list[str]] = {}
    slots: dict[int, list[Slot]] = {}
    tensors: dict[int, Tensor] = {}
    for name, slot, tensor in _named_tensors(model):
        tensors[id(tensor)] = tensor
        names.setdefault(id(tensor), []).append(name)
        slots.setdefault(id(tensor), []).append(slot)
    return [_describe(tuple(names[key]), tuple(slots[key]), tensor) for key, tensor in tensors.items()]


def local_buffer_names(model: Module) -> frozenset[str]:
    """Buffers that the model computes itself; a file may have them, nobody reads them."""
    backend = get_weight_backend()
    return frozenset(
        f"{name}.{own}" if name else own
        for name, module in get_module_backend().named_modules(model)
        for own, buffer in backend.own_buffers(module).items()
        if not buffer.persistent
    )


def common_group(tensors: Sequence[ModelTensor]) -> Group:
    """The ranks that the model is cut over; this rank alone when nothing is cut.

    Raises:
        CheckpointError: parts of the model are cut over different ranks.
    """
    groups = {t.group.ranks: t.group for t in tensors if t.group is not None}
    if len(groups) > 1:
        first, second = list(groups)[:2]
        raise CheckpointError(f"parameters are cut over different ranks: {first} and {second}; expected one group")
    return next(iter(groups.values()), Group((get_platform().rank(),), None, 0))


def every_rank() -> Group:
    """All ranks of the job. No collective on PyTorch; creates the group on a backend that needs one."""
    platform = get_platform()
    return platform.create_group([tuple(range(platform.world_size()))])


def device_of(model: Module) -> str:
    """Where the model is, or where the mesh is that it was parallelised over; ``"cpu"`` when nothing says."""
    modules = [module for _, module in get_module_backend().named_modules(model)]
    for module in modules:
        for parameter in get_module_backend().own_parameters(module).values():
            if get_module_backend().has_memory(parameter):
                return get_platform().device_type(parameter)
    for module in modules:
        for rule in get_module_backend().rules(module):
            mesh = getattr(rule, "mesh", None)
            if mesh is not None:
                return str(mesh.device_type)
    return "cpu"


def whereabouts(model: Module, device: str | None = None) -> tuple[str, Tensor, Exception | None]:
    """The device that a call works on, and a tensor there; or what is wrong with its arguments, which is not raised
    here, as the other ranks must hear of it, from the host then.
    """
    backend = get_weight_backend()
    try:
        if not get_module_backend().is_module(model):
            raise CheckpointError(f"expected a module, found {type(model).__name__}")
        device_type = device or device_of(model)
        return device_type, backend.empty_on(device_type), None
    except Exception as error:
        return "cpu", backend.empty_on("cpu"), error


def _named_tensors(model: Module) -> Iterator[tuple[str, Slot, Tensor]]:
    for name, module in get_module_backend().named_modules(model):
        own = dict(get_module_backend().own_parameters(module))
        own |= {k: b.tensor for k, b in get_weight_backend().own_buffers(module).items() if b.persistent}
        for own_name, tensor in own.items():
            yield f"{name}.{own_name}" if name else own_name, (module, own_name), tensor


def _describe(names: tuple[str, ...], slots: tuple[Slot, ...], tensor: Tensor) -> ModelTensor:
    platform = get_platform()
    try:
        piece = data_piece(tensor)
    except ValueError as error:
        raise CheckpointError(f"{names[0]}: {error}") from None
    if piece is not None and piece.dim != 0:
        raise CheckpointError(f"{names[0]} is sharded on dim {piece.dim} over data-parallel ranks; expected dim 0")
    if piece is not None and not get_module_backend().has_memory(tensor):
        raise CheckpointError(
            f"{names[0]} was sharded over data-parallel ranks before it had memory; give it some first "
            "(materialize, load_hf_checkpoint, or model.to_empty)"
        )
    spec, group = getattr(tensor, "_shard_spec", None), getattr(tensor, "_shard_group", None)
    shape = platform.shape(tensor)
    if spec is None:
        spec, group = ShardSpec.replicated(shape, 1), None
    elif not isinstance(group, Group) or group.size != spec.num_ranks:
        ranks = group.ranks if isinstance(group, Group) else group
        raise CheckpointError(f"{names[0]} is cut over {spec.num_ranks} ranks, but its group is {ranks}")
    rank = 0 if group is None else group.rank
    if shape != spec.local_shape(rank):
        raise CheckpointError(f"{names[0]} has shape {shape}, but its cut gives rank {rank} {spec.local_shape(rank)}")
    return ModelTensor(names, slots, tensor, spec, rank, group, platform.dtype_name(tensor), piece)

"""MindSpore's cells and parameters behind the ModuleBackend interface."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common import dtype as mstype

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.errors import PlatformError
from hyper_parallel.platform.mindspore import _gradient_norms, _host
from hyper_parallel.platform.mindspore.custom_grad import linear_map
from hyper_parallel.platform.mindspore.deferred import deferred_parameter, is_deferred, is_deferring, replace_value
from hyper_parallel.platform.mindspore.dtensor import as_local
from hyper_parallel.platform.mindspore.embedding import Embedding
from hyper_parallel.platform.mindspore.module_rules import RuledModule, add_rule, call_with, recomputes, rules_of
from hyper_parallel.platform.mindspore.shared_linear import linear, shared_linear
from hyper_parallel.platform.mindspore.weights import fill
from hyper_parallel.platform.modules import ForwardRule, LayerFacts, ModuleBackend
from hyper_parallel.platform.platform import Group

__all__ = ["MindSporeModuleBackend", "create_module_backend"]


def create_module_backend() -> ModuleBackend:
    """Build it."""
    return MindSporeModuleBackend()


class _CellBase(RuledModule, nn.Cell):
    """Takes rules as it is, without a change of class; its construct is its first rule."""

    def extend_repr(self) -> str:
        """MindSpore's name for what the layers of this library call ``extra_repr``."""
        return str(self.extra_repr()) if hasattr(self, "extra_repr") else ""


class MindSporeModuleBackend(ModuleBackend):
    """``mindspore.nn`` and ``mindspore.mint.nn``."""

    module_base = _CellBase

    # -- looking at modules ----------------------------------------------------------------------------------

    def is_module(self, x: Any) -> bool:
        return isinstance(x, nn.Cell)

    def named_modules(self, module: nn.Cell) -> list[tuple[str, nn.Cell]]:
        return list(module.cells_and_names())

    def own_parameters(self, module: nn.Cell) -> dict[str, Parameter]:
        return {name: p for name, p in module._params.items() if p is not None}

    def describe(self, module: nn.Cell) -> LayerFacts:
        kind = type(module)
        name, construct = kind.__name__, kind.construct
        late = "recompute() (call it after parallelize_module)" if recomputes(module) else None
        if isinstance(module, nn.Dense) and construct is nn.Dense.construct:
            activation = None if module.activation is None else f"activation={type(module.activation).__name__}"
            return LayerFacts(
                "linear",
                name,
                module.in_channels,
                module.out_channels,
                has_bias=module.bias is not None,
                refusal=activation or late,
            )
        if isinstance(module, mint.nn.Linear) and construct is mint.nn.Linear.construct:
            return LayerFacts(
                "linear",
                name,
                module.in_features,
                module.out_features,
                has_bias=module.bias is not None,
                refusal=late,
            )
        if isinstance(module, nn.Embedding) and construct is nn.Embedding.construct:
            return LayerFacts(
                "embedding",
                name,
                module.vocab_size,
                module.embedding_size,
                padding_idx=None,  # nn.Embedding zeroes that row at first and then trains it like the others
                weight="embedding_table",
                refusal=late,
            )
        if isinstance(module, mint.nn.Embedding) and construct in (mint.nn.Embedding.construct, Embedding.construct):
            padding = module.padding_idx
            return LayerFacts(
                "embedding",
                name,
                module.num_embeddings,
                module.embedding_dim,
                padding_idx=None if padding is None else padding % module.num_embeddings,
                refusal=_why_not_shared(module) or late,
            )
        return LayerFacts("other", name)

    def has_memory(self, parameter: Parameter) -> bool:
        return not is_deferred(parameter)

    def element_size(self, parameter: Parameter) -> int:
        return int(parameter.itemsize)

    # -- changing them ---------------------------------------------------------------------------------------

    def cut_parameter(self, parameter: Parameter, spec: ShardSpec, rank: int) -> None:
        if spec.dim is None:
            return
        if is_deferred(parameter):
            replace_value(parameter, spec.local_shape(rank))
            return
        host = _host.to_bits(parameter)
        own = np.concatenate([host[index] for index in spec.slices(rank)], spec.dim)  # a copy, also of one part
        replace_value(parameter, _host.to_tensor(own, _host.bits_dtype(parameter)))

    def new_parameter(self, shape: Sequence[int], dtype: Any, device: Any) -> Parameter:
        own = str(mindspore.get_context("device_target"))
        wanted = {"cpu": "CPU", "npu": "Ascend", "cuda": "GPU"}.get(device, device)
        if wanted not in (None, own):
            raise ValueError(f"device={device!r}, but this MindSpore process computes on {own}; leave device out")
        if is_deferring():
            return deferred_parameter(shape, dtype or mindspore.float32)
        kind = np.dtype(mstype._dtype_to_nptype(dtype or mindspore.float32))
        bits = np.uint16 if kind == _host.BFLOAT16 else kind
        return Parameter(_host.to_tensor(np.zeros(tuple(shape), bits), kind))

    def fill_parameter(self, parameter: Parameter, values: Any) -> None:
        fill(parameter, values)

    def add_rule(self, module: nn.Cell, rule: ForwardRule, name: str = "") -> None:  # parameters know their names
        add_rule(module, rule)

    def rules(self, module: nn.Cell) -> tuple[ForwardRule, ...]:
        return rules_of(module)

    def call_with(
        self,
        module: nn.Cell,
        forward: Callable[..., Any],
        tensors: Mapping[str, Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        return call_with(module, forward, tensors, args, kwargs)

    # -- computing -------------------------------------------------------------------------------------------

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        return linear(x, weight.swapaxes(0, 1) if transposed else weight, bias)

    def shared_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, group: Group
    ) -> Tensor:
        return shared_linear(x, weight.swapaxes(0, 1) if transposed else weight, bias, group)

    def change_count(self, x: Tensor) -> int | None:
        # Tensor._version misses assignments; a checksum costs little beside the collective that it may save
        return zlib.crc32(_host.to_bits(as_local(x)).tobytes()) if _host.on_cpu() else None

    def lookup(self, ids: Tensor, table: Tensor, start: int, padding_idx: int | None) -> Tensor:
        rows, width = table.shape
        if not str(ids.dtype).startswith(("Int", "UInt")):
            raise TypeError(f"the ids of an embedding are {ids.dtype}; expected an integer dtype")
        if rows == 0 or width == 0 or ids.size == 0:  # nothing to look up, but the graph still leads to the table
            shape, whole = (*ids.shape, width), tuple(table.shape)
            return linear_map(table, lambda t: ops.zeros(shape, t.dtype), lambda g: ops.zeros(whole, g.dtype))
        if ids.dtype not in (mindspore.int32, mindspore.int64):  # a narrow one would wrap around
            ids = ids.astype(mindspore.int64)
        local = ids - start
        elsewhere = ops.logical_or(local < 0, local >= rows)
        found = ops.gather(table, ops.masked_fill(local, elsewhere, 0), 0)
        dropped = elsewhere if padding_idx is None else ops.logical_or(elsewhere, local == padding_idx)
        return linear_map(found, _zeroing(elsewhere), _zeroing(dropped), _zeroing(dropped))

    def scaled(self, x: Tensor, scale: Any) -> Tensor:
        return x * (scale.astype(x.dtype) if isinstance(scale, Tensor) else scale)

    def id_range(self, ids: Tensor) -> tuple[int, int] | None:
        if ids.size == 0 or not _host.on_cpu():
            return None
        host = _host.to_host(ids)
        return int(host.min()), int(host.max())

    # -- gradients -------------------------------------------------------------------------------------------

    def gradient(self, parameter: Parameter) -> Tensor | None:
        raise PlatformError(
            "MindSpore keeps no gradients on parameters; pass them, one for each parameter: gradients=grads, as "
            "mindspore.value_and_grad gives them"
        )

    def parameter_name(self, parameter: Parameter) -> str:
        return str(parameter.name)

    def power_sum(self, tensors: Sequence[Tensor], order: float, like: Tensor) -> Tensor:
        return _gradient_norms.power_sum(tensors, order, like)

    def root(self, x: Tensor, order: float) -> Tensor:
        return _gradient_norms.root(x, order)

    def clip_factor(self, norm: Tensor, max_norm: float) -> Tensor:
        return _gradient_norms.clip_factor(norm, max_norm)

    def scale_gradients(self, gradients: Sequence[Tensor], factor: Tensor) -> None:
        _gradient_norms.scale(gradients, factor)


def _zeroing(mask: Tensor) -> Callable[[Tensor], Tensor]:
    """Rows become zero where the mask says so."""
    rows = mask.expand_dims(-1)
    return lambda x: ops.where(rows, ops.zeros_like(x), x)  # masked_fill rounds float64 to float32


def _why_not_shared(module: nn.Cell) -> str | None:
    """Options that look at all ids of a batch, or at rows that are not looked up here."""
    if module.max_norm is not None:
        return f"max_norm={module.max_norm}"
    return "scale_grad_by_freq=True" if module.scale_grad_by_freq else None

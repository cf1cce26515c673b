"""PyTorch's modules and parameters behind the ModuleBackend interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel.core.shard_spec import ShardSpec
from hyper_parallel.platform.modules import ForwardRule, LayerFacts, ModuleBackend
from hyper_parallel.platform.platform import Group
from hyper_parallel.platform.torch.module_rules import RuledModule, add_rule, call_with, rules_of
from hyper_parallel.platform.torch.shared_linear import shared_linear

__all__ = ["TorchModuleBackend", "create_module_backend"]


def create_module_backend() -> ModuleBackend:
    """Build it."""
    return TorchModuleBackend()


class _ModuleBase(RuledModule, nn.Module):
    """Takes rules as it is, without a change of class; its forward is its first rule."""


class TorchModuleBackend(ModuleBackend):
    """``torch.nn``."""

    module_base = _ModuleBase

    # -- looking at modules ----------------------------------------------------------------------------------

    def is_module(self, x: Any) -> bool:
        return isinstance(x, nn.Module)

    def named_modules(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        return list(module.named_modules())

    def own_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        return {name: p for name, p in module._parameters.items() if p is not None}

    def describe(self, module: nn.Module) -> LayerFacts:
        kind = type(module)
        name, forward = _own_class(kind).__name__, kind.forward
        if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
            return LayerFacts(
                "linear", name, module.in_features, module.out_features, has_bias=module.bias is not None
            )
        scale = _scale_of(kind)
        if isinstance(module, nn.Embedding) and (forward is nn.Embedding.forward or scale):
            return LayerFacts(
                "embedding",
                name,
                module.num_embeddings,
                module.embedding_dim,
                padding_idx=module.padding_idx,
                scale=scale,
                refusal=_why_not_shared(module),
            )
        if _is_conv1d(kind):
            rows, columns = module.weight.shape  # type: ignore[misc]
            return LayerFacts("linear", name, rows, columns, transposed=True, has_bias=True)
        return LayerFacts("other", name)

    def has_memory(self, parameter: nn.Parameter) -> bool:
        return not parameter.is_meta

    def element_size(self, parameter: nn.Parameter) -> int:
        return parameter.element_size()

    # -- changing them ---------------------------------------------------------------------------------------

    def cut_parameter(self, parameter: nn.Parameter, spec: ShardSpec, rank: int) -> None:
        if spec.dim is None:
            return
        with torch.no_grad():
            parts = [parameter.data[index] for index in spec.slices(rank)]
            parameter.data = torch.cat(parts, spec.dim)  # a copy, also of one part: the whole can be freed
        parameter.grad = None

    def new_parameter(self, shape: Sequence[int], dtype: Any, device: Any) -> nn.Parameter:
        return nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device=device))

    def fill_parameter(self, parameter: nn.Parameter, values: Any) -> None:
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values))

    def add_rule(self, module: nn.Module, rule: ForwardRule, name: str = "") -> None:
        add_rule(module, rule, name)

    def rules(self, module: nn.Module) -> tuple[ForwardRule, ...]:
        return rules_of(module)

    def call_with(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        tensors: Mapping[str, torch.Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        return call_with(module, forward, tensors, args, kwargs)

    # -- computing -------------------------------------------------------------------------------------------

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
    ) -> torch.Tensor:
        return F.linear(x, weight.t() if transposed else weight, bias)

    def shared_linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool, group: Group
    ) -> torch.Tensor:
        return shared_linear(x, weight.t() if transposed else weight, bias, group)

    def change_count(self, x: torch.Tensor) -> int | None:
        return None if x.is_inference() else x._version

    def lookup(
        self, ids: torch.Tensor, table: torch.Tensor, start: int, padding_idx: int | None
    ) -> torch.Tensor:
        rows = table.shape[0]
        if rows == 0:  # nothing to look up, but the graph still leads to the table
            return table.sum() + table.new_zeros((*ids.shape, table.shape[1]))
        local = ids - start
        elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), table, padding_idx)
        return found.masked_fill(elsewhere.unsqueeze(-1), 0)

    def scaled(self, x: torch.Tensor, scale: Any) -> torch.Tensor:
        return x * (scale.to(x.dtype) if isinstance(scale, torch.Tensor) else scale)

    def id_range(self, ids: torch.Tensor) -> tuple[int, int] | None:
        if ids.numel() == 0 or ids.device.type != "cpu":
            return None
        low, high = ids.aminmax()
        return int(low), int(high)

    # -- gradients -------------------------------------------------------------------------------------------

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return parameter.grad

    def parameter_name(self, parameter: nn.Parameter) -> None:
        return None

    def power_sum(self, tensors: Sequence[torch.Tensor], order: float, like: torch.Tensor) -> torch.Tensor:
        wide = torch.float64 if any(t.dtype == torch.float64 for t in (like, *tensors)) else torch.float32
        found = [t.detach() for t in tensors if t.numel()]
        norms = [n.to(like.device) for n in torch._foreach_norm(found, order, dtype=wide)] if found else []
        if not norms:
            return torch.zeros((), dtype=wide, device=like.device)
        stacked = torch.stack(norms)
        return stacked.amax() if order == float("inf") else stacked.pow(order).sum()

    def root(self, x: torch.Tensor, order: float) -> torch.Tensor:
        return x ** (1.0 / order)

    def clip_factor(self, norm: torch.Tensor, max_norm: float) -> torch.Tensor:
        return (max_norm / (norm + 1e-6)).clamp(max=1.0)

    def scale_gradients(self, gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for grad in gradients:
            by_device.setdefault(grad.device, []).append(grad)
        with torch.no_grad():
            for device, grads in by_device.items():
                torch._foreach_mul_(grads, factor.to(device))


def _why_not_shared(module: nn.Embedding) -> str | None:
    """Options that look at all ids of a batch, or at rows that are not looked up here."""
    if module.max_norm is not None:
        return f"max_norm={module.max_norm}"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq=True"
    return "sparse=True" if module.sparse else None


def _scale_of(kind: type) -> str | None:
    """Embeddings of transformers whose forward is ``super().forward(ids) * self.embed_scale``."""
    named = kind.__name__.endswith("ScaledWordEmbedding") and kind.__module__.startswith("transformers.")
    return "embed_scale" if named else None


def _own_class(kind: type) -> type:
    """The class of the model's own code: FSDP2 puts one of its own before it."""
    return kind.__mro__[2] if kind.__mro__[1].__name__ == "FSDPModule" else kind


def _is_conv1d(kind: type) -> bool:
    """GPT-2's linear layer in transformers, whose weight is ``[in, out]``."""
    return any(c.__name__ == "Conv1D" and c.__module__.startswith("transformers.") for c in kind.__mro__)

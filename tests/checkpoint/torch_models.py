"""Models for PyTorch workers: whole ones, and the same built without memory and shared between all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import ParallelismConfig
from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.models.llama.torch import LlamaForCausalLM
from hyper_parallel.tensor_parallel.plan import parallelize_module
from tests.checkpoint.own_model import own_config
from tests.tensor_parallel.torch_workers import tp_mesh

SIZES = {"num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def without_memory() -> torch.device:
    """A context: parameters created inside have no memory."""
    return torch.device("meta")


def build(kind: str) -> Any:
    """An untrained whole model, where the default device says."""
    if kind.startswith("own"):
        return LlamaForCausalLM(own_config(kind))
    import transformers

    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=251, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        return transformers.GPT2LMHeadModel(config)
    name = {"llama": "Llama", "qwen2": "Qwen2", "phi3": "Phi3"}[kind]
    # at tp = 4 ranks outnumber the key and value heads
    options = {**SIZES, "vocab_size": 251, "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 64}
    config = getattr(transformers, f"{name}Config")(**options, tie_word_embeddings=kind == "llama")
    return getattr(transformers, f"{name}ForCausalLM")(config)


def whole(kind: str, seed: int = 0, dtype: str = "float32") -> Any:
    """With random weights, biases and norms too, the same on every rank."""
    model = build(kind).to(getattr(torch, dtype)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.empty(parameter.shape).normal_(0, 0.1, generator=generator)
            parameter.copy_(values + 1 if parameter.dim() == 1 else values)
    return model


def sharded(kind: str, dtype: str = "float32", meta: bool = True, mesh: Any = None) -> Any:
    """Without memory (or with any values), parallelised over all ranks; gives whole logits."""
    with torch.device("meta" if meta else "cpu"):
        model = build(kind).to(getattr(torch, dtype)).eval()
    return parallelize_module(model, mesh or tp_mesh(), config=ParallelismConfig(disable_loss_parallel=True))


def large(config: LlamaConfig) -> Any:
    """Without memory, shared between all ranks."""
    with without_memory():
        model = LlamaForCausalLM(config)
    return parallelize_module(model, tp_mesh())


def logits(model: Any) -> np.ndarray:
    ids = torch.arange(20).reshape(2, 10) * 11 % 251
    with torch.no_grad():
        out = model(ids)
    return np.asarray(getattr(out, "logits", out).float())


def named_parameters(model: Any) -> dict[str, nn.Parameter]:
    """By their dotted names in the model; a tied one once."""
    return dict(model.named_parameters())


def has_memory(parameter: nn.Parameter) -> bool:
    return not parameter.is_meta


def num_bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


def values(parameter: Any) -> np.ndarray:
    """bfloat16 as float32."""
    return np.array(parameter.detach().float())


def dtype_name(parameter: nn.Parameter) -> str:
    return str(parameter.dtype).removeprefix("torch.")


def transpose_memory(model: Any) -> None:
    """The same values in another order in memory."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
            assert not parameter.is_contiguous()


def head(model: Any) -> nn.Parameter:
    return model.lm_head.weight


def embedding(model: Any) -> nn.Parameter:
    return model.get_parameter(next(iter(named_parameters(model))))


def parts(model: Any) -> dict[str, np.ndarray]:
    """What this rank holds (bfloat16 as float32)."""
    return {name: values(p) for name, p in model.named_parameters()}


def expected_parts(reference: Any, model: Any) -> dict[str, np.ndarray]:
    """What the cuts of `model` give this rank of `reference`'s parameters."""
    whole_ones = dict(reference.named_parameters())
    found = {}
    for name, parameter in model.named_parameters():
        full = whole_ones[name].detach().float().numpy()
        spec = getattr(parameter, "_shard_spec", None)
        if spec is not None and spec.dim is not None:
            full = np.concatenate([full[i] for i in spec.slices(parameter._shard_group.rank)], spec.dim)
        found[name] = full
    return found


def all_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    """Bit by bit: memory that nobody has filled may hold NaN."""
    return found.keys() == expected.keys() and all(found[k].tobytes() == expected[k].tobytes() for k in expected)


def on_rank_0(action: Any) -> None:
    """Rank 0 does it, the others wait."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def sequence(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def unknown_draws() -> nn.Module:
    """A parameter, ``strange``, that is drawn as nobody knows."""

    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.strange = nn.Parameter(torch.empty(4))

    with without_memory():
        return Strange()

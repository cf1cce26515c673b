"""Calls that give each message of docs/guide/troubleshooting.md, where two PyTorch ranks can; they run there."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.docs import messages


def tp() -> Any:
    return messages.mesh()["tp"]


def rank() -> int:
    return int(tp().get_local_rank())


def model() -> Any:
    from collections import OrderedDict

    from torch import nn

    return nn.Sequential(OrderedDict(up=nn.Linear(4, 8), down=nn.Linear(8, 4)))


def plan(mapping: Any, module: Any = None) -> Any:
    from hyper_parallel import parallelize_module

    return parallelize_module(model() if module is None else module, tp(), mapping)


def heads() -> None:
    from torch import nn

    attention = nn.Module()
    attention.q_proj, attention.num_heads = nn.Linear(6, 6), 3
    plan({"q_proj": "colwise"}, attention)


def mixed_heads() -> None:
    from torch import nn

    attention = nn.Module()
    attention.query_key_value, attention.num_heads, attention.num_kv_heads = nn.Linear(4, 12), 4, 1
    plan({"query_key_value": "colwise"}, attention)


def alibi() -> None:
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(4, 4)

        def forward(self, x: Any, alibi: Any) -> Any:
            return self.q_proj(x) + alibi

    plan({"q_proj": "colwise"}, Attention())


def gated(plan_of_block: dict[str, str]) -> None:
    from torch import nn

    outer = nn.ModuleDict({"mlp": nn.ModuleDict({name: nn.Linear(8, 8) for name in ("gate", "up", "down")})})
    plan({f"mlp.{name}": kind for name, kind in plan_of_block.items()}, outer)


def no_layout() -> None:
    from hyper_parallel import ColwiseParallel

    ColwiseParallel(input_layouts="Shard(1)")  # type: ignore[arg-type]


def between() -> None:
    from torch import nn

    block = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    outer = nn.Sequential(block)
    plan({"0.0": "colwise", "0.2": "rowwise"}, outer)


def twice() -> None:
    plan({"up": "colwise"}, plan({"up": "colwise"}))


def whole_features() -> None:
    import torch

    from hyper_parallel import RowParallelLinear

    RowParallelLinear(8, 4, group=tp())(torch.ones(2, 8))


def part_of_features() -> None:
    import torch

    plan({"up": "colwise"})(torch.ones(2, 4))


def on_a_sequence(shape: tuple[int, ...], dim: int = 1) -> None:
    import torch

    from hyper_parallel import ColwiseParallel, Shard

    plan({"up": ColwiseParallel(input_layouts=Shard(dim))}).up(torch.ones(shape))


def large_id() -> None:
    import torch

    from hyper_parallel import VocabParallelEmbedding

    VocabParallelEmbedding(8, 4, group=tp())(torch.tensor([8]))


def used_empty() -> None:
    import torch

    with torch.device("meta"):
        empty = model()
    plan({"up": "colwise"}, empty)(torch.ones(2, 4))


def plain_beside() -> None:
    import torch

    messages.logits() * torch.ones(4, 6)


def along_shards() -> None:
    messages.logits().cumsum(1)


def mesh_too_large() -> None:
    from hyper_parallel import init_device_mesh

    init_device_mesh("cpu", (3,))


def two_dims() -> None:
    from hyper_parallel import init_device_mesh, parallelize_module

    parallelize_module(model(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")), {"up": "colwise"})


def saved_in_parts() -> None:
    from torch import nn

    class Saved(nn.Sequential):
        def save_pretrained(self, path: str) -> None:
            raise AssertionError(path)

    plan({"0": "colwise"}, Saved(nn.Linear(4, 8))).save_pretrained("never")


def infinite_norm() -> None:
    import torch

    from hyper_parallel import clip_grad_norm_

    shared = plan({"up": "colwise"})
    for parameter in shared.parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    clip_grad_norm_(shared.parameters(), 1.0, error_if_nonfinite=True)


def folder(name: str) -> Path:
    path = Path(name)  # the ranks of a group share a working directory
    path.mkdir(exist_ok=True)
    return path


def other_keys() -> None:
    from collections import OrderedDict

    from torch import nn

    from hyper_parallel import load_hf_checkpoint, save_hf_checkpoint

    save_hf_checkpoint(plan({"up": "colwise"}), folder("keys"), overwrite=True)
    other = nn.Sequential(OrderedDict(first=nn.Linear(4, 8), down=nn.Linear(8, 4)))
    load_hf_checkpoint(plan({"first": "colwise"}, other), folder("keys"))


def nothing_there() -> None:
    from hyper_parallel import load_hf_checkpoint

    load_hf_checkpoint(plan({"up": "colwise"}), folder("nothing"))


def pickled() -> None:
    from hyper_parallel import load_hf_checkpoint

    (folder("pickled") / "pytorch_model.bin").write_bytes(b"")
    load_hf_checkpoint(plan({"up": "colwise"}), folder("pickled"))


def cut_short() -> None:
    from hyper_parallel import load_hf_checkpoint

    header = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (folder("short") / "model.safetensors").write_bytes(struct.pack("<Q", 1000) + header)
    load_hf_checkpoint(plan({"up": "colwise"}), folder("short"))


def saved_twice() -> None:
    from hyper_parallel import save_hf_checkpoint

    save_hf_checkpoint(plan({"up": "colwise"}), folder("twice"), overwrite=True)
    save_hf_checkpoint(plan({"up": "colwise"}), folder("twice"))


def without_memory() -> Any:
    import torch

    with torch.device("meta"):
        return plan({"up": "colwise"}, model())


def not_initialised() -> None:
    import torch

    from hyper_parallel import materialize

    whole = without_memory()
    whole.extra = torch.nn.Parameter(torch.empty(3, device="meta"))
    materialize(whole)


def saved_empty() -> None:
    from hyper_parallel import save_hf_checkpoint

    save_hf_checkpoint(without_memory(), folder("empty"), overwrite=True)


def backend(name: str) -> None:
    from hyper_parallel import get_platform

    get_platform(name)


def unknown_backend() -> None:
    from hyper_parallel.trainer.launch_environment import plan_processes

    plan_processes("pytorch", 2, 5000)


def odd_batch() -> None:
    from hyper_parallel import ParallelismConfig
    from hyper_parallel.trainer import TrainOptions

    TrainOptions(parallelism=ParallelismConfig(data_parallel_degree=3))


def compiled_mindspore() -> None:
    from hyper_parallel.trainer import TrainingOptions, TrainOptions

    TrainOptions(backend="mindspore", training=TrainingOptions(compile=True))


def other_batches() -> None:
    import numpy as np

    from hyper_parallel.trainer.data import Batch
    from hyper_parallel.trainer.same_batch import check_same_batch

    own = np.full((2, 3), rank())
    check_same_batch(Batch(own, own), messages.mesh())


CALLS: dict[str, Callable[[], None]] = {
    "names no module": lambda: plan({"upp": "colwise"}),
    "names a parameter": lambda: plan({"up.weight": "colwise"}),
    "both name": lambda: plan({"up": "colwise", "u*": "colwise"}),
    "expected a ParallelStyle or one of the kinds": lambda: plan({"up": "columnwise"}),
    "is not supported (mixture-of-experts layers)": lambda: plan({"up": "moe_tp_experts"}),
    "no plan is known for": lambda: plan("auto"),
    "attention heads cannot be shared by": heads,
    "inside one projection cannot be shared by": mixed_heads,
    "its heads cannot be shared between ranks": alibi,
    "works on them together": lambda: gated({"gate": "colwise"}),
    "takes all of them": lambda: gated({"gate": "colwise", "up": "colwise"}),
    "takes a rank's part of the features, and": lambda: gated({"down": "rowwise"}),
    "expected Shard(dim)": no_layout,
    "among features that are sharded; give it a rule": between,
    "is already shared between ranks": twice,
    "have different models or plans": lambda: plan({"up": ["colwise", "rowwise"][rank()]}),
    "takes a module, found": lambda: plan("auto", [model()]),
    "as a column-parallel layer before it gives": whole_features,
    "may give each rank its part of them": part_of_features,
    "of a plain tensor is sharded unevenly": lambda: on_a_sequence((2, 3 - rank(), 4)),
    "the ranks hold different tensors": lambda: on_a_sequence((2 + rank(), 3, 4)),
    "for an activation of shape": lambda: on_a_sequence((2, 3, 4), 7),
    "in an embedding of": large_id,
    "is ambiguous whether it is whole": plain_beside,
    "must be whole": along_shards,
    "must use all": mesh_too_large,
    "expected a 1-D mesh or one with a dim named 'tp'": two_dims,
    "has no values yet": used_empty,
    "would write this rank's parts as if": saved_in_parts,
    "of the gradients is": infinite_norm,
    "does not fit the model": other_keys,
    "holds no checkpoint": nothing_there,
    "pickled weights are not read": pickled,
    "already holds": saved_twice,
    "would be left without values": not_initialised,
    "has no values": saved_empty,
    "is cut short": cut_short,
    "cannot change to": lambda: backend("mindspore"),
    "unknown backend": unknown_backend,
    "must be a multiple of data_parallel_degree": odd_batch,
    "not there on mindspore": compiled_mindspore,
    "must read the same batch": other_batches,
}


def run_all() -> dict[str, str]:
    """The message that each call gives on this rank."""
    return messages.run_all(CALLS)

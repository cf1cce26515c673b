"""A model and a loss of one's own in the trainer: ordinary code for one device, and a plan that shares it.

Run it on one process, on two that share the layers, or on four, of which two share the batch:

    python examples/train_own_model.py
    torchrun --nproc-per-node 2 examples/train_own_model.py
    torchrun --nproc-per-node 4 examples/train_own_model.py
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel import ColwiseParallel, ParallelismConfig, Shard
from hyper_parallel.trainer import OptimizerOptions, TrainingOptions, TrainOptions, train

CLASSES, WIDTH = 259, 64


class Block(nn.Module):
    """Looks at the mean of all tokens so far, and adds what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(2 * WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        places = torch.arange(1, y.shape[1] + 1, device=y.device, dtype=y.dtype)
        before = y.cumsum(1) / places[:, None]
        return x + self.down(F.gelu(self.up(torch.cat((y, before), -1))))


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


PLAN = {
    "embedding": "embedding_rowwise",
    "blocks.*.norm": "replicate",  # its input is whole on every rank
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "last": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}


def later_tokens_count_more(logits: Tensor, labels: Tensor, global_valid_tokens: int) -> Tensor:
    """The logits are class-sharded; the losses of the tokens are whole, and ordinary arithmetic goes on."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    weights = torch.linspace(0.5, 1.5, labels.shape[1], device=labels.device).repeat(labels.shape[0])
    return (losses * weights).sum() / global_valid_tokens


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    tensor_parallel = min(ranks, 2)
    options = TrainOptions(
        data=Path(__file__).parent,
        output=Path("outputs/own_model"),
        steps=60,
        parallelism=ParallelismConfig(ranks // tensor_parallel, tensor_parallel),
        training=TrainingOptions(batch_size=8, sequence_length=64),
        optimizer=OptimizerOptions(lr=5e-3, warmup_steps=5),
    )
    summary = train(options, model=OwnModel, plan=PLAN, loss=later_tokens_count_more)
    if os.environ.get("RANK", "0") == "0":
        print(summary.describe())


if __name__ == "__main__":
    main()

"""A MindSpore model and a loss of one's own in the trainer: ordinary code for one device, and a plan that shares it.

Run it on one process, or on two that share the layers (GLOG_v=3 keeps MindSpore to its errors):

    python examples/train_own_model_mindspore.py
    GLOG_v=3 msrun --worker_num 2 --local_worker_num 2 --join True examples/train_own_model_mindspore.py
"""

import argparse
import os
from pathlib import Path

import mindspore as ms
from mindspore import Tensor, nn, ops

from hyper_parallel import ColwiseParallel, ParallelismConfig, Shard
from hyper_parallel.trainer import OptimizerOptions, TrainingOptions, TrainOptions, train

CLASSES, WIDTH = 259, 64


class Block(nn.Cell):
    """Looks at the mean of all tokens so far, and adds what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((WIDTH,))
        self.up = nn.Dense(2 * WIDTH, 4 * WIDTH)
        self.down = nn.Dense(4 * WIDTH, WIDTH)

    def construct(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        places = ops.arange(1, y.shape[1] + 1).astype(y.dtype)
        before = ops.cumsum(y, 1) / places[:, None]
        return x + self.down(ops.gelu(self.up(ops.cat((y, before), -1))))


class OwnModel(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.CellList([Block() for _ in range(2)])
        self.last = nn.Dense(WIDTH, CLASSES, has_bias=False)

    def construct(self, tokens: Tensor) -> Tensor:
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
    losses = ops.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1).astype(ms.int32), reduction="none")
    weights = ops.tile(ops.linspace(0.5, 1.5, labels.shape[1]), (labels.shape[0],))
    return (losses * weights).sum() / global_valid_tokens


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    options = TrainOptions(
        data=Path(__file__).parent,
        output=Path("outputs/own_model"),
        steps=40,
        backend="mindspore",
        parallelism=ParallelismConfig(tensor_parallel_degree=int(os.environ.get("MS_WORKER_NUM", "1"))),
        training=TrainingOptions(batch_size=8, sequence_length=64),
        optimizer=OptimizerOptions(lr=5e-3, warmup_steps=5),
    )
    summary = train(options, model=OwnModel, plan=PLAN, loss=later_tokens_count_more)
    if os.environ.get("RANK_ID", "0") == "0":
        print(summary.describe())


if __name__ == "__main__":
    main()

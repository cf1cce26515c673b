"""The rows of the comparison table, and what a trap program gets and gives. Needs no framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["OURS", "OURS_NATIVE", "THEIRS", "TRAPS", "Api", "Case", "Outcome", "Phase", "Trap"]

THEIRS, OURS, OURS_NATIVE = "torch", "hyper_parallel", "hyper_parallel on torch's DTensor"
"""The libraries that run the programs."""


@dataclass(frozen=True)
class Api:
    """The names a user imports. ``is_on`` tells whether loss parallel is in force for the calling thread."""

    loss_parallel: Callable[[], Any]
    init_device_mesh: Callable[..., Any]
    distribute_tensor: Callable[..., Any]
    shard: Callable[[int], Any]
    replicate: Callable[[], Any]
    is_on: Callable[[Any], bool]


@dataclass(frozen=True)
class Outcome:
    """What a program, or one rank of it, came to.

    ``kind`` is a key of the phrase table. ``raised`` and ``message`` belong to an exception; ``phase`` says where
    it came, ``"forward"`` or ``"backward"``.
    """

    kind: str
    raised: str = ""
    message: str = ""
    phase: str = ""


class Phase:
    """Where a program is; read when it raises."""

    current = "forward"


@dataclass(frozen=True)
class Case:
    """One program of :mod:`tools.trap_cases`, by name. ``label`` (English, Chinese) tells a trap's cases apart."""

    program: str
    label: tuple[str, str] = ("", "")
    ranks: int = 2


@dataclass(frozen=True)
class Trap:
    """One row of the table: a title (English, Chinese) and its programs."""

    title: tuple[str, str]
    cases: Sequence[Case]


TRAPS: tuple[Trap, ...] = (
    Trap(
        ("`log_softmax` without `nll_loss` behind it", "单独使用 `log_softmax`（其后没有 `nll_loss`）"),
        [Case("log_softmax_alone")],
    ),
    Trap(("`weight` with ignored tokens", "`weight` 与被忽略的 token 同时出现"), [Case("weight_and_ignored")]),
    Trap(("fewer classes than ranks", "类别数少于 rank 数"), [Case("fewer_classes_than_ranks")]),
    Trap(("a target outside `[0, C)`", "target 超出 `[0, C)`"), [Case("target_out_of_range")]),
    Trap(
        ("reach of the context", "上下文的作用范围"),
        [
            Case("exception_inside", ("after an exception", "异常之后")),
            Case("nested", ("nested", "嵌套")),
            Case("other_thread", ("another thread", "其他线程")),
        ],
    ),
    Trap(
        ("`log_softmax` over a dim that is not sharded", "沿未切分的维做 `log_softmax`"),
        [Case("log_softmax_of_another_dim")],
    ),
    Trap(
        ("one token without a batch, or no token", "没有 batch 维，或没有 token"),
        [
            Case("one_dimension", ("`(C,)`", "`(C,)`")),
            Case("empty_batch", ("`(0, C)`", "`(0, C)`")),
            Case("no_position", ("`(N, C, 0)`", "`(N, C, 0)`")),
        ],
    ),
    Trap(
        ("options that loss parallel refuses", "不支持的选项"),
        [
            Case("label_smoothing", ("smoothing", "label smoothing")),
            Case("probabilities", ("probability targets", "概率 target")),
        ],
    ),
    Trap(
        ("`mean` with tokens sharded too (dp × tp)", "token 也被切分时的 `mean`（dp × tp）"),
        [Case("mean_on_two_dims", ranks=4)],
    ),
    Trap(("`backward()` after the context", "离开上下文后再 `backward()`"), [Case("backward_after")]),
    Trap(
        (
            "fp32 logits after the loss (Megatron-LM overwrites them)",
            "计算损失后的 fp32 logits（Megatron-LM 会改写）",
        ),
        [Case("logits_afterwards")],
    ),
    Trap(("logits `(N, C, d1, d2)`", "logits 形状 `(N, C, d1, d2)`"), [Case("two_spatial_dims")]),
)
"""In the order of the table."""

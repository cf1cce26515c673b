"""The traps that loss-parallel implementations fall into, as small programs that every rank of a group runs.

A program gets an :class:`Api`, the names that a user would import; nothing else differs between the libraries.
It returns an :class:`Outcome`, or raises what the library raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch  # noqa: TID251 - the comparison is about PyTorch
import torch.nn.functional as F  # noqa: TID251, N812

__all__ = ["TRAPS", "Api", "Case", "Outcome", "Phase", "Trap"]

TOLERANCE = 1e-5
"""Relative to the largest element of the single-process result, which is computed in float64."""


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
    """One program. ``label`` (English, Chinese) tells the cases of one trap apart."""

    run: Callable[[Api], Outcome]
    label: tuple[str, str] = ("", "")
    ranks: int = 2


@dataclass(frozen=True)
class Trap:
    """One row of the table: a title (English, Chinese) and its programs."""

    title: tuple[str, str]
    cases: Sequence[Case]


def _logits(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """NaN equals NaN, as where every token is ignored."""
    if found.shape != expected.shape:
        return False
    bound = TOLERANCE * max(1.0, float(expected.nan_to_num().abs().max()) if expected.numel() else 0.0)
    return torch.allclose(found.double(), expected, rtol=0, atol=bound, equal_nan=True)


def _compare(loss: Any, gradient: Any, expected_loss: torch.Tensor, expected_gradient: torch.Tensor) -> Outcome:
    right_loss = _close(loss.full_tensor().detach(), expected_loss.detach())
    right_gradient = _close(gradient.full_tensor(), expected_gradient)
    if right_loss and right_gradient:
        return Outcome("right")
    return Outcome("wrong gradient" if right_loss else "wrong loss" if right_gradient else "wrong both")


def _loss(
    api: Api,
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    class_dim: int = 1,
    backward_inside: bool = True,
    **options: Any,
) -> Outcome:
    """``F.cross_entropy`` on class-sharded logits beside the single-process one."""
    exact = logits.double().requires_grad_()
    weight = options.get("weight")
    expected = F.cross_entropy(exact, target, **(options if weight is None else {**options, "weight": weight.double()}))
    expected.sum().backward()
    assert exact.grad is not None

    mesh = api.init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    sharded = api.distribute_tensor(logits, mesh, [api.shard(class_dim)]).requires_grad_()
    with api.loss_parallel():
        loss = F.cross_entropy(sharded, target, **options)
        if backward_inside:
            Phase.current = "backward"
            loss.sum().backward()
    Phase.current = "backward"
    if not backward_inside:
        loss.sum().backward()
    return _compare(loss, sharded.grad, expected, exact.grad)


def _log_softmax(api: Api, dim: int) -> Outcome:
    """``log_softmax`` over ``dim`` of class-sharded logits, used by something else than NLL."""
    logits, factors = _logits(4, 8), torch.arange(32.0).reshape(4, 8)
    exact = logits.double().requires_grad_()
    expected = F.log_softmax(exact, dim)
    expected.backward(factors.double())
    assert exact.grad is not None
    mesh = api.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = api.distribute_tensor(logits, mesh, [api.shard(1)]).requires_grad_()
    upstream = api.distribute_tensor(factors, mesh, [api.shard(1)]).to_local()
    with api.loss_parallel():
        result: Any = F.log_softmax(sharded, dim)
        Phase.current = "backward"
        result.to_local().backward(upstream)
    return _compare(result, sharded.grad, expected, exact.grad)


def log_softmax_alone(api: Api) -> Outcome:
    """``log_softmax`` of the classes, without NLL behind it."""
    return _log_softmax(api, 1)


def weight_and_ignored(api: Api) -> Outcome:
    """Class weights and ignored tokens together."""
    return _loss(api, _logits(4, 8), torch.tensor([1, -100, 3, 7]), weight=torch.linspace(0.5, 2.0, 8))


def fewer_classes_than_ranks(api: Api) -> Outcome:
    """One class, two ranks."""
    return _loss(api, _logits(4, 1), torch.zeros(4, dtype=torch.int64))


def target_out_of_range(api: Api) -> Outcome:
    """A target that is no class."""
    mesh = api.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = api.distribute_tensor(_logits(4, 8), mesh, [api.shard(1)])
    with api.loss_parallel():
        losses: Any = F.cross_entropy(sharded, torch.tensor([1, 2, 3, 99]), reduction="none")
    return Outcome("silent zero" if float(losses.full_tensor()[3]) == 0.0 else "silent value")


def exception_inside(api: Api) -> Outcome:
    """An exception leaves the context."""
    mesh = api.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    try:
        with api.loss_parallel():
            raise ArithmeticError
    except ArithmeticError:
        pass
    return Outcome("still on" if api.is_on(mesh) else "off")


def nested(api: Api) -> Outcome:
    """One context inside another."""
    mesh = api.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with api.loss_parallel():
        with api.loss_parallel():
            pass
        outer = api.is_on(mesh)
    return Outcome("outer back" if outer and not api.is_on(mesh) else "outer lost")


def other_thread(api: Api) -> Outcome:
    """A thread that did not enter the context."""
    mesh = api.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    seen: list[bool] = []
    with api.loss_parallel():
        thread = threading.Thread(target=lambda: seen.append(api.is_on(mesh)))
        thread.start()
        thread.join()
    return Outcome("seen" if seen[0] else "not seen")


def log_softmax_of_another_dim(api: Api) -> Outcome:
    """``log_softmax`` over a dim that nobody shards."""
    return _log_softmax(api, 0)


def one_dimension(api: Api) -> Outcome:
    """Logits of shape ``(C,)``."""
    return _loss(api, _logits(8), torch.tensor(3), class_dim=0)


def empty_batch(api: Api) -> Outcome:
    """No token at all; the sum is 0."""
    return _loss(api, _logits(0, 8), torch.zeros(0, dtype=torch.int64), reduction="sum")


def no_position(api: Api) -> Outcome:
    """No token in a batch of some, in three dims."""
    return _loss(api, _logits(2, 8, 0), torch.zeros(2, 0, dtype=torch.int64), reduction="sum")


def label_smoothing(api: Api) -> Outcome:
    """Refused by design in both libraries; what counts is how."""
    return _loss(api, _logits(4, 8), torch.tensor([1, 2, 3, 7]), label_smoothing=0.1)


def probabilities(api: Api) -> Outcome:
    """A target of class probabilities."""
    return _loss(api, _logits(4, 8), torch.full((4, 8), 1 / 8))


def mean_on_two_dims(api: Api) -> Outcome:
    """Tokens sharded over ``dp``, classes over ``tp``; ranks have unequal numbers of valid tokens."""
    logits, target = _logits(6, 8), torch.tensor([1, -100, -100, 5, 6, 7])
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, target)
    expected.backward()
    assert exact.grad is not None
    mesh = api.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sharded = api.distribute_tensor(logits, mesh, [api.shard(0), api.shard(1)]).requires_grad_()
    labels = api.distribute_tensor(target, mesh, [api.shard(0), api.replicate()])
    with api.loss_parallel():
        loss = F.cross_entropy(sharded, labels)
        Phase.current = "backward"
        loss.backward()
    return _compare(loss, sharded.grad, expected, exact.grad)


def backward_after(api: Api) -> Outcome:
    """``backward()`` after the context was left."""
    return _loss(api, _logits(4, 8), torch.tensor([1, 2, 3, 7]), backward_inside=False)


def logits_afterwards(api: Api) -> Outcome:
    """Whether the loss or its backward changes fp32 logits, which other terms may use as well."""
    mesh = api.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = api.distribute_tensor(_logits(4, 8), mesh, [api.shard(1)]).requires_grad_()
    before = sharded.to_local().detach().clone()
    with api.loss_parallel():
        F.cross_entropy(sharded, torch.tensor([1, 2, 3, 7])).backward()
    return Outcome("unchanged" if torch.equal(sharded.to_local().detach(), before) else "changed")


def two_spatial_dims(api: Api) -> Outcome:
    """Logits of shape ``(N, C, d1, d2)``."""
    target = torch.arange(24).reshape(2, 3, 4) % 8
    return _loss(api, _logits(2, 8, 3, 4), target)


TRAPS: tuple[Trap, ...] = (
    Trap(
        ("`log_softmax` without `nll_loss` behind it", "单独使用 `log_softmax`（其后没有 `nll_loss`）"),
        [Case(log_softmax_alone)],
    ),
    Trap(("`weight` with ignored tokens", "`weight` 与被忽略的 token 同时出现"), [Case(weight_and_ignored)]),
    Trap(("fewer classes than ranks", "类别数少于 rank 数"), [Case(fewer_classes_than_ranks)]),
    Trap(("a target outside `[0, C)`", "target 超出 `[0, C)`"), [Case(target_out_of_range)]),
    Trap(
        ("reach of the context", "上下文的作用范围"),
        [
            Case(exception_inside, ("after an exception", "异常之后")),
            Case(nested, ("nested", "嵌套")),
            Case(other_thread, ("another thread", "其他线程")),
        ],
    ),
    Trap(
        ("`log_softmax` over a dim that is not sharded", "沿未切分的维做 `log_softmax`"),
        [Case(log_softmax_of_another_dim)],
    ),
    Trap(
        ("one token without a batch, or no token", "没有 batch 维，或没有 token"),
        [
            Case(one_dimension, ("`(C,)`", "`(C,)`")),
            Case(empty_batch, ("`(0, C)`", "`(0, C)`")),
            Case(no_position, ("`(N, C, 0)`", "`(N, C, 0)`")),
        ],
    ),
    Trap(
        ("options that loss parallel refuses", "不支持的选项"),
        [
            Case(label_smoothing, ("smoothing", "label smoothing")),
            Case(probabilities, ("probability targets", "概率 target")),
        ],
    ),
    Trap(
        ("`mean` with tokens sharded too (dp × tp)", "token 也被切分时的 `mean`（dp × tp）"),
        [Case(mean_on_two_dims, ranks=4)],
    ),
    Trap(("`backward()` after the context", "离开上下文后再 `backward()`"), [Case(backward_after)]),
    Trap(
        (
            "fp32 logits after the loss (Megatron-LM overwrites them)",
            "计算损失后的 fp32 logits（Megatron-LM 会改写）",
        ),
        [Case(logits_afterwards)],
    ),
    Trap(("logits `(N, C, d1, d2)`", "logits 形状 `(N, C, d1, d2)`"), [Case(two_spatial_dims)]),
)
"""In the order of the table."""

"""The traps that loss-parallel implementations fall into, as small programs that every rank of a group runs.

A program gets an :class:`Api`, the names that a user would import; nothing else differs between the libraries.
It returns an :class:`Outcome`, or raises what the library raised. :mod:`tools.traps` lists them.
"""

from __future__ import annotations

import threading
from typing import Any

import torch  # noqa: TID251 - the comparison is about PyTorch
import torch.nn.functional as F  # noqa: TID251, N812

from tools.traps import Api, Outcome, Phase

__all__ = [
    "backward_after",
    "empty_batch",
    "exception_inside",
    "fewer_classes_than_ranks",
    "label_smoothing",
    "log_softmax_alone",
    "log_softmax_of_another_dim",
    "logits_afterwards",
    "mean_on_two_dims",
    "nested",
    "no_position",
    "one_dimension",
    "other_thread",
    "probabilities",
    "target_out_of_range",
    "two_spatial_dims",
    "weight_and_ignored",
]

TOLERANCE = 1e-5
"""Relative to the largest element of the single-process result, which is computed in float64."""


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

"""What the workers run for test_dtensor: gradients, writing in place, optimizers, recomputation."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from hyper_parallel.core.dtensor import DTensor, distribute_tensor
from hyper_parallel.core.placement_types import Replicate, Shard
from hyper_parallel.errors import UnsupportedOperatorError
from tests.core.op_checks import close, mesh_of, normal
from tests.core.raising import raises


def gradients(size: int) -> None:
    """backward, grad, hooks, autograd.grad: as of a plain tensor, with layouts."""
    mesh = mesh_of((size,))
    full, weight = normal(4, 3), normal(4, 3, seed=1)
    x = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
    w = distribute_tensor(weight, mesh, [Shard(0)])
    seen: list[torch.Tensor] = []
    x.register_hook(lambda g: seen.append(g))
    y = x * w
    y.retain_grad()
    assert not y.is_leaf and x.is_leaf and y.grad_fn is not None and x.grad is None
    y.sum().backward()
    assert len(seen) == 1 and type(seen[0]) is torch.Tensor and seen[0].shape == x.to_local().shape
    assert isinstance(x.grad, DTensor) and x.grad.placements == (Shard(0),)
    close(x.grad.full_tensor(), weight, "grad")
    close(y.grad.full_tensor(), torch.ones_like(full), "retain_grad")
    x.grad.zero_()
    assert not x.grad.to_local().any()
    x.grad = None
    assert x.grad is None
    x.grad = w
    assert x.grad.to_local().data_ptr() == w.to_local().data_ptr()
    del x.grad
    assert x.grad is None
    whole = w.redistribute(placements=[Replicate()])
    if size > 1:
        raises(ValueError, "a gradient of", lambda: setattr(x, "grad", whole))
        raises(ValueError, "a gradient of", lambda: (x * 2).backward(whole))
    (x * 2).backward(w)
    close(x.grad.full_tensor(), 2 * weight, "backward(gradient)")
    # of a Partial: the whole gradient on every rank
    x.grad = None
    seed = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    (x * w).sum(0).backward(distribute_tensor(seed, mesh, [Replicate()]))
    close(x.grad.full_tensor(), weight * seed, "backward of a Partial")
    x.grad = None
    (x * w).sum(0).backward(seed)
    close(x.grad.full_tensor(), weight * seed, "backward with a plain tensor")
    r = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
    z = torch.zeros(2, requires_grad=True)
    gx, gr, gz = torch.autograd.grad((x * r).sum(), [x, r, z], allow_unused=True)
    close(gx.full_tensor(), weight, "autograd.grad of a shard")
    assert gr.placements == (Replicate(),) and gz is None
    close(gr.to_local(), full, "autograd.grad of a replicated tensor")
    (g,) = torch.autograd.grad(x * w, x, grad_outputs=w)
    close(g.full_tensor(), weight**2, "autograd.grad with grad_outputs")
    (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (g,) = torch.autograd.grad(g.sum(), x)
    close(g.full_tensor(), 6 * full, "second derivative")
    x.grad = None
    torch.autograd.backward([(x * w).sum(), (x * w).sum()])
    close(x.grad.full_tensor(), 2 * weight, "autograd.backward")
    with torch.no_grad():
        assert not (x * w).requires_grad
    with torch.inference_mode():
        assert torch.equal((x * 2).to_local(), x.detach().to_local() * 2)
    assert (x.detach() * 2).requires_grad is False
    x.requires_grad_(False)
    assert not x.requires_grad


def writing(size: int) -> None:
    """In place: the same object, the same memory, the same layout."""
    mesh = mesh_of((size,))
    full = normal(4, 3)
    x = distribute_tensor(full, mesh, [Shard(0)])
    memory = x.data_ptr()
    same = x
    x += 1
    assert x is same and x.mul_(2) is x and x.data_ptr() == memory
    x[:, 1] = 0
    full = (full + 1) * 2
    full[:, 1] = 0
    close(x.full_tensor(), full, "in place")
    x.data = distribute_tensor(full, mesh, [Shard(0)])
    assert x.data_ptr() != memory or x.to_local().numel() == 0
    if size > 1:
        raises(UnsupportedOperatorError, "same layout", lambda: setattr(x, "data", torch.zeros(4, 3)))
        raises(UnsupportedOperatorError, "in place needs", lambda: x.redistribute(placements=[Replicate()]).add_(x))
        raises(UnsupportedOperatorError, "in place needs", lambda: x.t_())
        raises(UnsupportedOperatorError, "out=", lambda: torch.add(x, x, out=x))
    view = x.view(2, 2, 3) if size <= 2 else x.unsqueeze(0)
    view.zero_()
    assert not x.to_local().any()


def optimizers(size: int) -> None:
    """SGD and AdamW on DTensor parameters: the steps of one device."""
    mesh = mesh_of((size,))
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.1),
    ):
        single = [normal(4, 3).requires_grad_(), normal(3, seed=1).requires_grad_()]
        several = [
            torch.nn.Parameter(distribute_tensor(single[0].detach(), mesh, [Shard(0)])),
            torch.nn.Parameter(distribute_tensor(single[1].detach(), mesh, [Replicate()])),
        ]
        for parameters in (single, several):
            optimizer = make(parameters)
            for _ in range(3):
                optimizer.zero_grad()
                ((parameters[0] * parameters[1]) ** 2).sum().backward()
                optimizer.step()
        for p, q in zip(several, single):
            close(p.full_tensor(), q, "after three steps")


def recomputation(size: int) -> None:
    """Activation checkpointing runs operators, and draws the same masks, inside backward."""
    mesh = mesh_of((size,))
    w = distribute_tensor(normal(6, 4), mesh, [Shard(0)]).requires_grad_()
    x = distribute_tensor(normal(3, 4, seed=1), mesh, [Replicate()]).requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(F.linear(x, w)), 0.5)

    torch.manual_seed(1)
    expected = torch.autograd.grad((block(x) ** 2).sum(), [x, w])
    for reentrant in (False, True):
        x.grad = w.grad = None
        torch.manual_seed(1)
        (checkpoint(block, x, use_reentrant=reentrant) ** 2).sum().backward()
        for leaf, grad in zip((x, w), expected):
            assert torch.equal(leaf.grad.to_local(), grad.to_local()), f"use_reentrant={reentrant}"

"""What the workers run for test_dtensor."""

from __future__ import annotations

import copy
import pickle

import torch
import torch.nn.functional as F  # noqa: N812

from hyper_parallel.core.dtensor import DTensor, dispatcher, distribute_tensor
from hyper_parallel.core.placement_types import Partial, Replicate, Shard
from hyper_parallel.core.state import SkipDTensorDispatch, changed_state
from hyper_parallel.errors import UnsupportedOperatorError
from tests.core.op_checks import close, mesh_of, normal
from tests.core.raising import raises


def making(size: int) -> None:
    """from_local, distribute_tensor, to_local, full_tensor: what they take, share and refuse."""
    mesh = mesh_of((size,))
    rank = mesh.get_local_rank()
    local = torch.zeros(2, 3)
    d = DTensor.from_local(local, mesh, [Shard(-1)])
    assert tuple(d.shape) == (2, 3 * size) and d.placements == (Shard(1),) and d.device_mesh == mesh
    assert d.data_ptr() == local.data_ptr() == d.to_local().data_ptr()
    assert type(local) is torch.Tensor and type(d.to_local()) is torch.Tensor
    full = normal(5, 7)
    d = distribute_tensor(full, mesh, [Shard(0)])
    assert tuple(d.shape) == (5, 7) and torch.equal(d.full_tensor(), full)
    assert torch.equal(d.to_local(), (*full.chunk(size), *[full[:0]] * size)[rank])
    assert d.requires_grad is False and d.dtype == torch.float64 and d.device.type == "cpu"
    raises(TypeError, "takes a plain torch tensor", lambda: DTensor.from_local(d, mesh, [Shard(0)]))
    raises(TypeError, "takes a plain torch tensor", lambda: distribute_tensor(d, mesh, [Shard(0)]))
    raises(TypeError, "takes a plain torch tensor", lambda: DTensor.from_local([1.0], mesh, [Shard(0)]))
    raises(ValueError, "local tensor has shape", lambda: DTensor.from_local(local, mesh, [Shard(0)], shape=(99, 3)))
    raises(ValueError, "placements", lambda: DTensor.from_local(local, mesh, []))
    raises(TypeError, "as placement", lambda: DTensor.from_local(local, mesh, ["S"]))  # type: ignore[list-item]
    raises(IndexError, "shards a dim", lambda: DTensor.from_local(local, mesh, [Shard(2)]))
    # the gradient of a whole tensor is whole
    leaf = full.clone().requires_grad_()
    weight = normal(5, 7, seed=1)
    (distribute_tensor(leaf, mesh, [Shard(1)]) * distribute_tensor(weight, mesh, [Shard(1)])).sum().backward()
    close(leaf.grad, weight, "distribute_tensor")  # type: ignore[arg-type]
    # from_local and to_local are on the graph
    local = torch.ones(2, 3, requires_grad=True)
    DTensor.from_local(local, mesh, [Shard(0)]).to_local().sum().backward()
    assert torch.equal(local.grad, torch.ones(2, 3))  # type: ignore[arg-type]
    # each rank uses its own part of a replicated tensor
    whole = DTensor.from_local(torch.ones(3), mesh, [Replicate()]).requires_grad_()
    (whole.to_local(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    assert torch.equal(whole.grad.to_local(), torch.full((3,), size * (size + 1) / 2))
    raises(ValueError, "grad_placements", lambda: whole.to_local(grad_placements=[Shard(0)]))
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    raises(ValueError, "grad_placements", lambda: sharded.to_local(grad_placements=[Partial()]))


def python_protocol(size: int) -> None:
    """repr, len, iteration, copies, pickling, questions about the shape."""
    mesh = mesh_of((size,))
    full = normal(3, 4)
    d = distribute_tensor(full, mesh, [Shard(1)])
    assert repr(d).startswith("DTensor(shape=(3, 4), float64, S(1)@a, mesh (a=") and str(d) == repr(d) == f"{d}"
    assert len(d) == 3 and d.size() == torch.Size((3, 4)) == d.shape and d.size(-1) == 4 and d.size(dim=0) == 3
    assert isinstance(d.size(), torch.Size) and isinstance(d.shape, torch.Size)
    assert d.dim() == d.ndim == 2 and d.numel() == 12 == d.nelement()
    rows = list(d)
    assert len(rows) == 3 and all(torch.equal(r.full_tensor(), full[i]) for i, r in enumerate(rows))
    a, b, c = d
    assert torch.equal(c.full_tensor(), full[2])
    scalar = d.sum()
    raises(TypeError, "0-d", lambda: len(scalar))
    raises(TypeError, "0-d", lambda: list(scalar))
    raises(TypeError, "cannot be pickled", lambda: pickle.dumps(d))
    leaf = distribute_tensor(full, mesh, [Shard(1)]).requires_grad_()
    shallow = copy.copy(leaf)
    assert shallow is not leaf and shallow.global_layout == leaf.global_layout
    assert shallow.to_local().data_ptr() == leaf.to_local().data_ptr()
    copied = copy.deepcopy(leaf)
    assert copied.requires_grad and copied.is_leaf and copied.global_layout == leaf.global_layout
    assert copied.data_ptr() != leaf.data_ptr() or leaf.to_local().numel() == 0
    assert copy.deepcopy(d).requires_grad is False
    assert {d: 1}[d] == 1 and (d is d) and hash(d) == id(d)
    parameter = torch.nn.Parameter(d)
    assert isinstance(parameter, DTensor) and isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
    (parameter * 2).sum().backward()
    close(parameter.grad.full_tensor(), torch.full_like(full, 2.0), "parameter")


def values(size: int) -> None:
    """Values on the host are the global ones, or refused."""
    mesh = mesh_of((size,))
    full = normal(4, 3).abs()
    d = distribute_tensor(full, mesh, [Shard(0)])
    total = d.sum()
    assert total.placements == (Partial(),)
    expected = full.sum().item()
    close(torch.tensor(total.item()), torch.tensor(expected), "item")
    assert abs(float(total) - expected) < 1e-9 and int(total) == int(expected) and bool(total) is True
    assert f"{total:.3f}" == f"{expected:.3f}" and total.tolist() == total.item()
    assert abs(complex(total).real - expected) < 1e-9
    assert range(10)[distribute_tensor(torch.tensor(3), mesh, [Replicate()])] == 3
    partial = d.sum(0)
    close(torch.from_numpy(partial.numpy()), full.sum(0), "numpy of a Partial")
    whole = d.redistribute(placements=[Replicate()])
    assert whole.numpy().shape == (4, 3) and whole.tolist() == full.tolist()
    if size > 1:
        for call in (d.numpy, d.tolist, d.item, lambda: bool(d), lambda: float(d)):
            raises(UnsupportedOperatorError, "full_tensor()", call)
    leaf = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
    assert abs(leaf.sum().item() - expected) < 1e-9 and bool(leaf.sum() > 1e9) is False
    raises(RuntimeError, "requires grad", leaf.sum(0).numpy)
    if leaf.sum() > 0:
        return
    raise AssertionError("a Partial in a condition was not reduced")


def skipping(size: int) -> None:
    """Inside SkipDTensorDispatch everything is local."""
    mesh = mesh_of((size,))
    d = distribute_tensor(normal(4, 6), mesh, [Shard(1)])
    with SkipDTensorDispatch():
        y = d + 1
        assert type(y) is torch.Tensor and y.shape == d.shape == d.size()
        assert d.reshape(-1).numel() == d.to_local().numel()
    assert isinstance(d + 1, DTensor) and tuple(d.shape) == (4, 6)


def errors(size: int) -> None:
    """What has no rule says so, on every rank, and names the way out."""
    mesh, line = mesh_of((2, 2)), mesh_of((4,))
    d = distribute_tensor(normal(4, 4), mesh, [Shard(0), Replicate()])
    message = raises(UnsupportedOperatorError, "'inverse' has no distributed rule", lambda: d.inverse())
    assert "S(0)@a" in message and "HYPER_PARALLEL_OPS_YAML_DIR" in message and "register_distributed_op" in message
    message = raises(UnsupportedOperatorError, "cumsum", lambda: d.cumsum(0))
    assert "shape (4, 4), S(0)@a, R@b on mesh (a=2, b=2)" in message
    other = distribute_tensor(normal(4, 4), line, [Shard(0)])
    raises(UnsupportedOperatorError, "two meshes", lambda: d + other)
    raises(IndexError, "out of range", lambda: d.sum(2))
    raises(ValueError, "broadcast", lambda: d + torch.zeros(3))
    raises(ValueError, "invalid for 16 elements", lambda: d.view(3, -1))
    message = raises(UnsupportedOperatorError, "ambiguous", lambda: d + torch.zeros(4, 4, dtype=torch.float64))
    assert "distribute_tensor or DTensor.from_local" in message
    # an inner cut would have to be gathered before the outer one
    inner = distribute_tensor(normal(4, 4), mesh, [Replicate(), Shard(0)])
    raises(UnsupportedOperatorError, "would have to gather", lambda: d + inner)
    raises(UnsupportedOperatorError, "mesh dim a shards dims", lambda: d + d.t())
    raises(UnsupportedOperatorError, "masks", lambda: d[torch.zeros(4, dtype=torch.bool)])
    # replicated tensors need no rule
    whole = distribute_tensor(torch.eye(4), mesh, [Replicate(), Replicate()])
    inverse = whole.inverse()
    assert isinstance(inverse, DTensor) and inverse.placements == (Replicate(), Replicate())
    values, vectors = torch.linalg.eigh(whole)
    assert isinstance(values, DTensor) and isinstance(vectors, DTensor)
    assert isinstance(whole + torch.zeros(4, 4), DTensor)
    # indices outside the table fail everywhere, as on one device
    table = distribute_tensor(normal(5, 2), line, [Shard(0)])
    for bad in (5, -1, 99):
        raises(IndexError, "out of range", lambda bad=bad: F.embedding(torch.tensor([0, bad]), table))


def cache(size: int) -> None:
    """Entries depend on layout, dtype, other arguments and the loss-parallel state, not on values."""
    mesh = mesh_of((size,))
    dispatcher.cache.clear()
    x, y = (distribute_tensor(normal(4, 4, seed=s), mesh, [Shard(0)]) for s in (0, 1))
    x + y, y + x
    assert (dispatcher.cache.misses, dispatcher.cache.hits) == (1, 1)
    with changed_state(loss_parallel=True):
        x + y
    assert len(dispatcher.cache.keys()) == 2
    with changed_state(loss_parallel=True, strict=False):
        x + y
    assert len(dispatcher.cache.keys()) == 3
    x.float() + y.float()
    x + 1, x + 1.0, x + True
    x + distribute_tensor(normal(4, 4), mesh, [Replicate()])
    assert len(dispatcher.cache.keys()) == 9
    before = dispatcher.cache.hits
    x + 1, x + 1.0, x + True
    assert dispatcher.cache.hits == before + 3
    # integers first, then floats that need a gradient
    scale = DTensor.from_local(torch.ones(4, dtype=torch.int64), mesh, [Replicate()])
    x * scale
    scale = scale.double().requires_grad_()
    (x * scale).sum().backward()
    close(scale.grad.to_local(), normal(4, 4).sum(0), "gradient after an integer of the same layout")
    for size_ in range(1, 6000):
        x[:, : size_ % 4]
        dispatcher.cache.put(size_, dispatcher.cache.get(dispatcher.cache.keys()[-1]))  # type: ignore[arg-type]
    assert len(dispatcher.cache.keys()) <= 4096
    dispatcher.cache.clear()


def one_rank_mesh_dims(size: int) -> None:
    """A shard over a mesh dim of one rank is the whole: nothing is refused for it."""
    mesh = mesh_of((1, size))
    full = normal(3, 4, 5)
    d = distribute_tensor(full, mesh, [Shard(1), Replicate()])
    assert torch.equal(d.view(-1).to_local(), full.view(-1))
    close(d.softmax(1).to_local(), full.softmax(1), "softmax")
    assert torch.equal(d[:, 1].to_local(), full[:, 1])
    d = distribute_tensor(full, mesh, [Shard(1), Shard(0)])
    close(d.softmax(1).full_tensor(), full.softmax(1), "softmax")
    x = distribute_tensor(full, mesh, [Shard(1), Replicate()]).requires_grad_()
    x.cumsum(1).sum().backward()
    assert x.grad.placements == (Shard(1), Replicate())

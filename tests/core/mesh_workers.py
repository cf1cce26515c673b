"""What the workers run for test_mesh: meshes, layouts, and the framework's own."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
import torch.distributed.tensor as native
from torch.distributed.device_mesh import init_device_mesh as init_native_mesh

from hyper_parallel.core.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor import DTensor, distribute_tensor
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.native import from_native, to_native
from hyper_parallel.core.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.platform import Group
from tests.core.op_checks import close, mesh_of
from tests.core.raising import raises


def meshes() -> None:
    """Names, slices, groups, values."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = divmod(rank, 2)
    assert mesh.shape == (2, 2) and mesh.ndim == 2 and mesh.size() == 4 and mesh.size("tp") == mesh.size(1) == 2
    assert mesh.coordinate == (dp, tp) and mesh.get_coordinate() == [dp, tp]
    assert mesh.get_local_rank("dp") == dp and mesh.get_local_rank(-1) == tp
    assert mesh.get_group("tp").ranks == (2 * dp, 2 * dp + 1) and mesh.get_group("dp").ranks == (tp, tp + 2)
    line = mesh["tp"]
    assert line.mesh.tolist() == [2 * dp, 2 * dp + 1] and line.mesh_dim_names == ("tp",)
    assert line.get_group() is mesh.get_group("tp") and mesh["dp", "tp"] == mesh and mesh["tp"] == line
    turned = mesh["tp", "dp"]
    assert turned.mesh.tolist() == [[0, 2], [1, 3]] and turned.get_group("dp") is mesh.get_group("dp")
    assert turned.coordinate == (tp, dp) and turned != mesh
    assert hash(line) == hash(mesh["tp"]) and mesh != init_device_mesh("cpu", (2, 2))
    assert mesh.describe() == "mesh (dp=2, tp=2)" and "mesh_dim_names=('dp', 'tp')" in repr(mesh)
    raises(KeyError, "no mesh dim 'pp'", lambda: mesh["pp"])
    raises(ValueError, "repeat", lambda: mesh["tp", "tp"])
    raises(IndexError, "out of range", lambda: mesh.size(2))
    raises(ValueError, "needs a mesh dim", mesh.get_group)
    raises(ValueError, "3 * 2 = 6 must use all 4 processes", lambda: init_device_mesh("cpu", (3, 2)))
    raises(ValueError, "must use all", lambda: init_device_mesh("cpu", ()))
    raises(ValueError, "2 distinct names", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "a")))
    raises(ValueError, "must be distinct", lambda: DeviceMesh("cpu", [0, 1, 1]))
    raises(ValueError, "names ranks [7]", lambda: DeviceMesh("cpu", [0, 7]))
    raises(ValueError, "at least one", lambda: DeviceMesh("cpu", []))
    part = DeviceMesh("cpu", [0, 1])
    if rank < 2:
        assert part.get_local_rank() == rank
        d = distribute_tensor(torch.arange(4.0), part, [Shard(0)])
        assert d.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]
    else:
        assert part.get_coordinate() is None
        raises(ValueError, "is not part of", part.get_group)
    raises(ValueError, "must ascend", lambda: DeviceMesh("cpu", [[3, 1], [2, 0]]))
    columns = DeviceMesh("cpu", [[0, 2], [1, 3]])
    full = torch.arange(12.0).reshape(4, 3)
    d = distribute_tensor(full, columns, [Shard(0), Shard(1)])
    assert torch.equal(d.full_tensor(), full)
    a, b = columns.coordinate
    assert torch.equal(d.to_local(), full.chunk(2, 0)[a].chunk(2, 1)[b])


def adopted() -> None:
    """Meshes from what exists create no group."""
    theirs = init_native_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    created = dist.distributed_c10d._world.group_count
    mesh = DeviceMesh.from_native(theirs)
    assert mesh.shape == (2, 2) and mesh.mesh_dim_names == ("dp", "tp") and mesh.device_type == "cpu"
    assert mesh.get_group("tp").handle is theirs.get_group("tp") and mesh.coordinate == tuple(theirs.get_coordinate())
    line = DeviceMesh.from_group(theirs.get_group("dp"), "cpu", mesh_dim_names=("dp",))
    assert line.get_group().ranks == mesh.get_group("dp").ranks
    again = DeviceMesh.from_group(line.get_group(), "cpu")
    assert again.get_group() is line.get_group()
    full = torch.arange(10.0).reshape(5, 2)
    for m in (mesh["tp"], line, again, DeviceMesh.from_native(theirs["tp"])):
        assert torch.equal(distribute_tensor(full, m, [Shard(0)]).full_tensor(), full)
    assert dist.distributed_c10d._world.group_count == created
    raises(TypeError, "expected a torch.distributed DeviceMesh", lambda: DeviceMesh.from_native(mesh))
    raises(TypeError, "process group", lambda: DeviceMesh.from_group("tp", "cpu"))


def native_tensors() -> None:
    """Our DTensor from and to PyTorch's: the same memory, the same graph."""
    theirs = init_native_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for placements in (
        [native.Shard(0), native.Shard(1)],
        [native.Replicate(), native.Shard(0)],
        [native.Shard(1), native.Replicate()],
        [native.Replicate(), native.Replicate()],
    ):
        x = native.distribute_tensor(full, theirs, placements).requires_grad_()
        ours = from_native(x)
        assert isinstance(ours, DTensor) and ours.shape == x.shape
        assert ours.data_ptr() == x.to_local().data_ptr() and ours.device_mesh == DeviceMesh.from_native(theirs)
        assert torch.equal(ours.full_tensor(), full)
        back = to_native(ours)
        assert back.to_local().data_ptr() == ours.data_ptr() and back.shape == x.shape
        assert back.placements == x.placements and back.device_mesh == theirs
        assert torch.equal(back.full_tensor(), full)
        (ours * 2).sum().backward()
        close(x.grad.full_tensor(), torch.full_like(full, 2.0), "gradient into PyTorch's DTensor")
        leaf = distribute_tensor(full, ours.device_mesh, ours.placements).requires_grad_()
        (to_native(leaf) * 3).sum().full_tensor().backward()
        close(leaf.grad.full_tensor(), torch.full_like(full, 3.0), "gradient out of PyTorch's DTensor")
    terms = from_native(native.DTensor.from_local(full, theirs, [native.Partial("max"), native.Replicate()]))
    assert terms.placements == (Partial("max"), Replicate())
    assert to_native(terms).placements == (native.Partial("max"), native.Replicate())
    ours = mesh_of((4,))
    uneven = to_native(distribute_tensor(full, ours, [Shard(0)]))
    assert tuple(uneven.shape) == (5, 6) and torch.equal(uneven.full_tensor(), full)
    assert to_native(distribute_tensor(full, ours, [Shard(0)])).device_mesh is uneven.device_mesh
    raises(TypeError, "expected a torch.distributed.tensor.DTensor", lambda: from_native(full))
    raises(TypeError, "takes a hyper_parallel DTensor", lambda: to_native(full))
    raises(ValueError, "no counterpart", lambda: from_native(
        native.DTensor.from_local(full, theirs, [native.Partial("avg"), native.Replicate()])
    ))


def layouts() -> None:
    """Local ranges against torch.chunk, for meshes that need no processes."""
    for shape in ((1,), (3,), (4,), (2, 3), (2, 2, 2)):
        mesh = _imaginary_mesh(shape)
        for size in ((5, 4), (1, 6), (0, 3), (8, 8)):
            full = torch.arange(size[0] * size[1]).reshape(size)
            single: list[Placement] = [Shard(0), Shard(1), Replicate(), Partial()]
            for placements in itertools.product(single, repeat=mesh.ndim):
                _check_layout(Layout(mesh, placements, size), full)
    mesh = _imaginary_mesh((2, 3))
    layout = Layout(mesh, [Shard(-1), Replicate()], (4, 10))
    assert layout.placements == (Shard(1), Replicate()) and layout == Layout(mesh, [Shard(1), Replicate()], (4, 10))
    assert hash(layout) == hash(layout.replace()) and layout != layout.replace(shape=(4, 11))
    assert layout.describe() == "shape (4, 10), S(1)@x, R@y on mesh (x=2, y=3)" and "S(1)@x" in repr(layout)
    assert layout.chunk_sizes(0) == (5, 5) and not layout.is_replicated and not layout.has_partial
    raises(ValueError, "does not shard", lambda: layout.chunk_sizes(1))
    assert Layout(mesh, [Partial(), Shard(0)], (4,)).gradient_layout.placements == (Replicate(), Shard(0))
    assert Layout.from_tensor_map(mesh, [None, (0, 1)], (4, 10)).placements == (Shard(1), Shard(1))
    raises(ValueError, "ascending", lambda: Layout.from_tensor_map(mesh, [(1, 0)], (4,)))
    raises(ValueError, "it can shard one", lambda: Layout.from_tensor_map(mesh, [0, 0], (4, 4)))
    raises(ValueError, "1 placements", lambda: Layout(mesh, [Shard(0)], (4,)))
    raises(TypeError, "as placement", lambda: Layout(mesh, [0, 1], (4,)))  # type: ignore[list-item]
    raises(TypeError, "expected a list", lambda: Layout(mesh, Shard(0), (4,)))  # type: ignore[arg-type]
    raises(TypeError, "found 'tp' of builtins", lambda: Layout("tp", [Shard(0)], (4,)))  # type: ignore[arg-type]
    raises(IndexError, "does not have", lambda: Layout(mesh, [Shard(1), Replicate()], (4,)))
    raises(ValueError, "two kinds", lambda: Layout(mesh, [Partial(), Partial("max")], (4,)))
    raises(ValueError, "must be one of", lambda: Partial("avg"))
    raises(TypeError, "takes an integer", lambda: Shard(1.0))  # type: ignore[arg-type]
    raises(TypeError, "takes an integer", lambda: Shard(True))
    assert [str(p) for p in (Shard(0), Replicate(), Partial(), Partial("max"))] == ["S(0)", "R", "P", "P(max)"]


def _imaginary_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    ranks = torch.arange(int(torch.tensor(shape).prod())).reshape(shape).numpy()
    groups = [Group((0,), None, 0) for _ in shape]  # never used
    return DeviceMesh("cpu", ranks, mesh_dim_names=("x", "y", "z")[: len(shape)], groups=groups)


def _check_layout(layout: Layout, full: torch.Tensor) -> None:
    mesh = layout.mesh
    count = torch.zeros_like(full)
    for rank in mesh.mesh.ravel().tolist():
        expected = full
        for m, p in enumerate(layout.placements):
            if isinstance(p, Shard):
                pieces = expected.chunk(mesh.shape[m], p.dim)
                empty = expected.narrow(p.dim, 0, 0)
                expected = [*pieces, *[empty] * mesh.shape[m]][mesh.coordinate_of(rank)[m]]
        part = tuple(slice(*r) for r in layout.local_ranges(rank))
        assert full[part].shape == expected.shape and torch.equal(full[part], expected), (layout, rank)
        count[part] += 1
    replicas = 1
    for n, p in zip(mesh.shape, layout.placements):
        replicas *= 1 if p.is_shard() else n
    assert torch.equal(count, torch.full_like(count, replicas)), layout
    again = Layout.from_tensor_map(mesh, layout.tensor_map, layout.shape)
    assert again == layout.gradient_layout

"""MindSpore alone: gradients at every number of ranks, its layers' options, recomputation, in-place gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.harness import run_distributed, this_rank, this_world_size
from tests.tensor_parallel.arrays import pieces, values

pytestmark = pytest.mark.platform("mindspore")


def sums_and_gathers() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Every way in which a value crosses ranks, and the gradient of ``sum(w y)``: what is found, what is right."""
    from hyper_parallel import DTensor, Partial, Replicate, Shard
    from hyper_parallel.tensor_parallel import regions
    from tests.tensor_parallel.adapters import this_adapter

    adapter, ranks, rank = this_adapter(), this_world_size(), this_rank()
    mesh = adapter.mesh
    x, w = values(4, 4), values(4, 4, seed=1)
    own_w, own_x = pieces(w, 1, ranks)[rank], pieces(x, 1, ranks)[rank]

    def moved(before: Any, after: Any) -> Any:
        return lambda t: DTensor.from_local(t, mesh, [before]).redistribute(mesh, [after]).to_local()

    cases = {
        # name: (function, input, upstream, right gradient); a Partial input is one term of P equal ones
        "copy": (lambda t: regions.copy_to_tp_region(t, mesh), x, w / ranks, w),
        "reduce": (lambda t: regions.reduce_from_tp_region(t, mesh), x, w, w),
        "gather": (lambda t: regions.gather_from_tp_region(t, mesh, 1), own_x, w, own_w),
        "scatter": (lambda t: regions.scatter_to_tp_region(t, mesh, 1), x, own_w, w),
        "gather sequence": (lambda t: regions.gather_from_sequence_region(t, mesh, 1), own_x, w / ranks, own_w),
        "reduce-scatter": (lambda t: regions.reduce_scatter_to_sequence_region(t, mesh, 1), x, own_w, w),
        "R to S": (moved(Replicate(), Shard(1)), x, own_w, w),
        "S to R": (moved(Shard(1), Replicate()), own_x, w, own_w),
        "S to S": (moved(Shard(1), Shard(0)), own_x, pieces(w, 0, ranks)[rank], own_w),
        "P to R": (moved(Partial(), Replicate()), x, w, w),
        "P to S": (moved(Partial(), Shard(1)), x, own_w, w),
    }
    found = {}
    for name, (function, given, upstream, right) in cases.items():
        result = adapter.differentiate(function, [adapter.tensor(given)], upstream=upstream)
        found[name] = (result.inputs[0], right)
    return found


@pytest.mark.contract("TRAP13")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_no_gradient_is_multiplied_by_the_ranks(world_size: int) -> None:
    """``ops.AllReduce`` differentiates to another one, which gives P times the gradient."""
    for found in run_distributed(sums_and_gathers, platform="mindspore", world_size=world_size):
        for name, (gradient, right) in found.items():
            np.testing.assert_allclose(gradient, right, rtol=1e-12, err_msg=name)


def training(steps: int) -> tuple[float, float]:
    """A tied model with MindSpore's optimizer, clipped, beside one device: worst errors of losses and weights."""
    import mindspore

    from hyper_parallel import DTensor, clip_grad_norm_, loss_parallel, parallelize_module
    from tests.tensor_parallel.adapters import this_adapter
    from tests.tensor_parallel.parts import own_part

    adapter = this_adapter()
    ids = adapter.tensor(np.random.default_rng(0).integers(0, 11, (2, 5)), "int64")
    target = adapter.tensor(np.random.default_rng(1).integers(0, 11, 10), "int64")
    plan = {"embed": "embedding_rowwise", "layers.*.mlp.gate": "colwise", "layers.*.mlp.up": "colwise",
            "layers.*.mlp.down": "rowwise", "head": "colwise_loss_parallel"}  # fmt: skip
    losses, weights = [], []
    for shared in (False, True):
        model = adapter.module("Tiny", False, True)
        for parameter in model.trainable_params():
            parameter.set_dtype(mindspore.float32)  # what MindSpore's optimizers take
        if shared:
            parallelize_module(model, adapter.mesh, plan)
        parameters = model.trainable_params()
        optimizer = mindspore.nn.SGD(parameters, 0.5)

        def loss(ids: Any, model: Any = model) -> Any:
            with loss_parallel():
                value = adapter.cross_entropy(adapter.flat(model(ids)), target)
                return value.full_tensor() if isinstance(value, DTensor) else value

        step = mindspore.value_and_grad(loss, None, parameters)
        own = []
        for _ in range(steps):
            value, grads = step(ids)
            clip_grad_norm_(parameters, 0.3, gradients=grads)
            optimizer(grads)
            own.append(float(value))
        losses.append(own)
        weights.append([(adapter.array(p), getattr(p, "_shard_spec", None)) for p in parameters])
    worst = 0.0
    for (whole, _), (part, spec) in zip(*weights):
        worst = max(worst, *np.abs(own_part(whole, spec) - part).ravel())
    return float(np.abs(np.subtract(*losses)).max()), worst


@pytest.mark.contract("TRAP13")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_as_on_one_device(world_size: int) -> None:
    for losses, weights in run_distributed(training, 4, platform="mindspore", world_size=world_size, timeout=60.0):
        assert losses < 1e-5 and weights < 1e-5


def options(case: str) -> None:
    from mindspore import mint, nn

    from hyper_parallel import parallelize_module
    from hyper_parallel.tensor_parallel.styles import ColwiseParallel, RowwiseParallel
    from tests.tensor_parallel.adapters import this_adapter

    layer, style = {
        "activation": (nn.Dense(4, 6, activation="relu"), ColwiseParallel()),
        "frequency": (mint.nn.Embedding(5, 4, scale_grad_by_freq=True), RowwiseParallel()),
        "recompute": (nn.Dense(4, 6), ColwiseParallel()),
    }[case]
    if case == "recompute":
        layer.recompute()
    parallelize_module(layer, this_adapter().mesh, style)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("activation", "Dense with activation=ReLU is not supported"),
        ("frequency", "EmbeddingExt with scale_grad_by_freq=True is not supported"),
        ("recompute", "call it after parallelize_module"),
    ],
)
def test_options_that_are_refused(case: str, text: str) -> None:
    for error in run_distributed(options, case, platform="mindspore", world_size=2, expect_error=True):
        assert error.type == "ParallelPlanError" and text in error.message


def recomputed(use_reentrant: bool) -> tuple[float, str]:
    from hyper_parallel import parallelize_module
    from tests.tensor_parallel.adapters import this_adapter
    from tests.tensor_parallel.model_steps import beside_one_device, worst_gradient

    adapter = this_adapter()
    plan = {"layers.*.mlp.gate": "colwise", "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}

    def share(model: Any) -> None:
        parallelize_module(model, adapter.mesh, plan)
        for layer in model.layers:
            layer.recompute(use_reentrant=use_reentrant)

    ids = adapter.tensor(np.array([[1, 2, 3]]), "int64")
    return worst_gradient(*beside_one_device(lambda: adapter.module("Tiny"), share, [ids]))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_layers(use_reentrant: bool) -> None:
    for worst, where in run_distributed(recomputed, use_reentrant, platform="mindspore", world_size=2):
        assert worst < 1e-12, where


def one_of_two_layers() -> list[np.ndarray]:
    """How far the gradient of one input is from the right one, in three passes through one of two layers."""
    import mindspore
    from mindspore import Tensor, nn, ops

    from hyper_parallel.tensor_parallel.plan import parallelize_module
    from tests.tensor_parallel.adapters import this_adapter

    mindspore.set_seed(0)  # the same model on all ranks
    model = nn.CellList([nn.Dense(4, 6), nn.Dense(4, 6)])
    right = model[0].weight.asnumpy().sum(0)
    parallelize_module(model, this_adapter().mesh["tp"], {"0": "colwise", "1": "colwise"})
    x = Tensor(np.ones((1, 4), np.float32))
    gradient = mindspore.grad(lambda x: ops.sum(model[0](x)))
    return [gradient(x).asnumpy()[0] - right for _ in range(3)]


def test_layers_side_by_side_of_which_one_is_used() -> None:
    """What the first pass made of the input for both belongs to its graph, which is gone with its backward."""
    for found in run_distributed(one_of_two_layers, platform="mindspore", world_size=2):
        np.testing.assert_allclose(found, np.zeros((3, 4)), atol=1e-5)


def steps_without_some_layers(deferred: bool) -> dict[str, Any]:
    """One layer of five is used: shapes, the norm, and how far MindSpore's optimizer and the trainer's move weights."""
    from contextlib import nullcontext

    import mindspore
    from mindspore import Tensor, nn, ops

    from hyper_parallel import clip_grad_norm_, materialize, parallelize_module
    from hyper_parallel.platform.mindspore.deferred import deferred_parameters
    from hyper_parallel.platform.training import load_training_tools
    from tests.tensor_parallel.adapters import this_adapter

    with deferred_parameters() if deferred else nullcontext():
        used, column, row, table = nn.Dense(4, 6, has_bias=False), nn.Dense(4, 6), nn.Dense(6, 4), nn.Embedding(7, 4)
        model = nn.CellList([used, column, row, table])
    plan = {"0": "colwise", "1": "colwise", "2": "rowwise", "3": "embedding_rowwise"}
    parallelize_module(model, this_adapter().mesh["tp"], plan)
    materialize(model, seed=1)
    parameters = list(model.trainable_params())
    before = [p.asnumpy().copy() for p in parameters]
    x = Tensor(np.ones((1, 4), np.float32))

    def loss(x: Any, *_: Any) -> Any:
        return ops.sum(used(x))

    _, gradients = mindspore.value_and_grad(loss, None, parameters)(x)
    shapes = [(tuple(g.shape), tuple(p.shape)) for g, p in zip(gradients, parameters)]
    norm = float(clip_grad_norm_(parameters, 1.0, gradients=gradients))
    nn.AdamWeightDecay(parameters, 0.5)(gradients)
    learner = load_training_tools().learner(model, {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0})
    learner.accumulate(loss, x, x)
    learner.update(0.5)
    moved = [float(np.abs(p.asnumpy() - b).max()) for p, b in zip(parameters, before)]
    return {"shapes": shapes, "norm": norm, "moved": moved}


@pytest.mark.parametrize("deferred", [False, True], ids=["with memory", "deferred"])
def test_layers_that_were_not_used(deferred: bool) -> None:
    """MindSpore gives them zeros, of the shape of this rank's part; their weights stay as they are."""
    for found in run_distributed(steps_without_some_layers, deferred, platform="mindspore", world_size=2):
        for gradient, parameter in found["shapes"]:
            assert gradient == parameter
        assert found["norm"] == pytest.approx(np.sqrt(24), rel=1e-6)
        first, *others = found["moved"]
        assert first > 0.5 and set(others) == {0.0} and len(others) == 5


def scaled_in_place() -> list[np.ndarray]:
    """Two gradients that MindSpore gives as one memory, one that is a view, and what they were made of."""
    import mindspore
    from mindspore import Parameter, Tensor, ops

    from hyper_parallel.platform.modules import get_module_backend

    a, b = (Parameter(Tensor(np.ones(4, np.float32)), name=name) for name in "ab")
    weight = Parameter(Tensor(np.ones((2, 4), np.float32)), name="weight")
    x = Tensor(np.arange(4, dtype=np.float32).reshape(1, 4))
    grads = mindspore.grad(lambda x: ops.sum(ops.dense(x * (a + b), weight)), None, [a, b, weight])(x)
    assert grads[0].data_ptr() == grads[1].data_ptr() and not grads[2].is_contiguous()
    get_module_backend().scale_gradients(grads, Tensor(np.float32(0.5)))
    return [*(g.asnumpy() for g in grads), x.asnumpy(), a.asnumpy(), weight.asnumpy()]


def test_gradients_are_scaled_in_place() -> None:
    """They often share memory, and are views; each is scaled once, and nothing else is."""
    ((a, b, weight, x, value, own),) = run_distributed(scaled_in_place, platform="mindspore", world_size=1)
    np.testing.assert_array_equal(a, [0, 1, 2, 3])
    np.testing.assert_array_equal(b, [0, 1, 2, 3])
    np.testing.assert_array_equal(weight, [[0, 1, 2, 3]] * 2)
    np.testing.assert_array_equal(x, [[0, 1, 2, 3]])
    assert (value == 1).all() and (own == 1).all()


def parameter_kinds() -> list[Any]:
    from mindspore import float16, nn

    from hyper_parallel.core.shard_spec import ShardSpec
    from hyper_parallel.platform.modules import get_module_backend

    backend = get_module_backend()
    half = backend.new_parameter((2, 3), float16, None)
    backend.fill_parameter(half, np.full((2, 3), 0.5))
    layer = nn.Dense(4, 5)
    weight, whole = layer.weight, layer.weight.asnumpy()
    backend.cut_parameter(weight, ShardSpec.chunk((5, 4), 1, 2), 1)
    backend.fill_parameter(layer.bias, np.arange(5.0))
    same = layer.weight is weight and weight.name == "weight" and weight.requires_grad
    return [half.asnumpy(), str(half.dtype), same, np.array_equal(weight.asnumpy(), whole[:, 2:]), layer.bias.asnumpy()]


def test_parameters() -> None:
    ((half, dtype, same, cut, bias),) = run_distributed(parameter_kinds, platform="mindspore", world_size=1)
    assert (half == 0.5).all() and dtype == "Float16" and same and cut
    np.testing.assert_array_equal(bias, np.arange(5))

"""In the workers: functions that are routed to the dispatcher go on as before for everybody else."""

from __future__ import annotations

import inspect
import threading
import time
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.ops import cross_entropy as captured
from mindspore.ops.function import nn_func

ORIGINAL_SIGNATURES = {name: inspect.signature(getattr(nn_func, name)) for name in ("cross_entropy", "nll_loss")}
ORIGINAL_SOURCE = inspect.getsource(nn_func.cross_entropy)

from hyper_parallel import DTensor, LossParallelLayoutError, Shard, distribute_tensor, get_platform  # noqa: E402
from hyper_parallel.loss_parallel import loss_parallel  # noqa: E402
from hyper_parallel.platform.mindspore import _replaced_body  # noqa: E402
from tests.mindspore.op_checks import mesh_of  # noqa: E402

LOGITS = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
LABELS = np.array([0, 7, -100, 3], np.int32)


def expected() -> float:
    log_probs = LOGITS - np.log(np.exp(LOGITS).sum(1, keepdims=True))
    kept = LABELS != -100
    return float(-log_probs[np.arange(4)[kept], LABELS[kept]].mean())


def sharded() -> DTensor:
    return distribute_tensor(Tensor(LOGITS), mesh_of((get_platform().world_size(),)), [Shard(1)])


def faces() -> None:
    """Name, signature, source, documentation and identity are the original's; routing twice changes nothing."""
    assert captured is ops.cross_entropy is mindspore.ops.functional.cross_entropy is nn_func.cross_entropy
    assert mint.nn.functional.cross_entropy is nn_func.cross_entropy_ext
    for name, signature in ORIGINAL_SIGNATURES.items():
        function = getattr(nn_func, name)
        assert inspect.signature(function) == signature and function.__name__ == name and function.__doc__
    assert inspect.getsource(nn_func.cross_entropy) == ORIGINAL_SOURCE
    code = nn_func.cross_entropy.__code__
    _replaced_body.route(nn_func.cross_entropy, lambda original, args, kwargs: None)
    assert nn_func.cross_entropy.__code__ is code and captured(Tensor(LOGITS), Tensor(LABELS)) is not None


@mindspore.jit
def compiled_loss(logits: Any, labels: Any) -> Any:
    return ops.cross_entropy(logits, labels)


class LossNetwork(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()

    def construct(self, logits: Any, labels: Any) -> Any:
        return self.loss(logits, labels)


def compilation() -> None:
    """Compiled for the first time after routing, in and out of the context: the loss of plain tensors as it was."""
    logits, labels = Tensor(LOGITS), Tensor(LABELS)
    with loss_parallel():
        inside = compiled_loss(logits, labels)
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
        try:
            network, cell = LossNetwork()(logits, labels), nn.CrossEntropyLoss()(logits, labels)
        finally:
            mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
        value, grad = mindspore.value_and_grad(compiled_loss)(logits, labels)
    for loss in (inside, compiled_loss(logits, labels), network, cell, value):
        np.testing.assert_allclose(loss.asnumpy(), expected(), rtol=1e-5)
    assert grad.shape == logits.shape


def outside() -> None:
    """After the context, and in a thread beside it, class-sharded logits are an error that names the layout."""
    entries = (
        lambda: ops.cross_entropy(sharded(), Tensor(LABELS)),
        lambda: captured(sharded(), Tensor(LABELS)),
        lambda: mint.nn.functional.cross_entropy(sharded(), Tensor(LABELS)),
        lambda: nn.CrossEntropyLoss()(sharded(), Tensor(LABELS)),
        lambda: mint.nn.CrossEntropyLoss()(sharded(), Tensor(LABELS)),
        lambda: ops.nll_loss(sharded(), Tensor(LABELS)),
    )

    def all_refused(found: list[bool]) -> None:
        for entry in entries:
            try:
                entry()
            except LossParallelLayoutError as error:
                found.append("S(1)" in str(error) and "expected" in str(error))
            else:
                found.append(False)

    with loss_parallel():
        for entry in entries[:5]:
            np.testing.assert_allclose(entry().to_local().asnumpy(), expected(), rtol=1e-5)
    here: list[bool] = []
    all_refused(here)
    assert here == [True] * 6
    beside: list[bool] = []
    with loss_parallel():
        thread = threading.Thread(target=all_refused, args=(beside,))
        thread.start()
        thread.join()
    assert beside == [True] * 6


def overhead() -> float:
    """Seconds that the detour adds to a call, and to making a tensor, with ordinary arguments."""
    logits, labels = Tensor(LOGITS), Tensor(LABELS)

    def nothing(input: Any, target: Any) -> None:
        return None

    def routed(input: Any, target: Any) -> None:
        return None

    from hyper_parallel.platform.mindspore.dtensor import TensorBase
    from hyper_parallel.platform.mindspore.tensor_hooks import _dispatch_as

    _replaced_body.route(routed, _dispatch_as("cross_entropy", TensorBase))

    def per_call(function: Any) -> float:
        best = 1.0
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(2000):
                function(logits, labels)
            best = min(best, (time.perf_counter() - start) / 2000)
        return best

    return per_call(routed) - per_call(nothing)


def misspelt() -> list[str]:
    """One rank misspells an argument: both hear of it, and their next call is right."""
    heard = []
    with loss_parallel():
        for options in ({"bogus": 1} if get_platform().rank() == 1 else {}, {}):
            try:
                value = ops.cross_entropy(sharded(), Tensor(LABELS), **options)
            except TypeError as error:
                heard.append(str(error))
            else:
                heard.append(f"{float(value.to_local()) - expected():.5f}")
    return heard


def shared_layers_in_graph_mode() -> str:
    from hyper_parallel import UnsupportedOperatorError, parallelize_module

    network = nn.SequentialCell(nn.Dense(4, 6), nn.ReLU())
    parallelize_module(network, mesh_of((get_platform().world_size(),)), {"0": "colwise"})
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    try:
        network(Tensor(np.ones((2, 4), np.float32)))
    except UnsupportedOperatorError as error:
        return str(error)
    finally:
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    return "no error"

"""What a training job needs of MindSpore: AdamW as it is written down, sums of gradients, a way on after errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.harness import run_distributed

pytestmark = pytest.mark.platform("mindspore")
OPTIONS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def small_model() -> tuple[Any, Any]:
    """A layer, and a loss of it whose gradients are easy to state."""
    from mindspore import Parameter, Tensor, nn

    class Scaled(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            values = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
            self.matrix = Parameter(Tensor(values), name="matrix")
            self.vector = Parameter(Tensor(np.ones(4, np.float32)), name="vector")

    model = Scaled()
    return model, lambda tokens, labels: (model.matrix * tokens).sum() + (model.vector * labels).sum()


def draw(step: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(step + 1)
    return random.standard_normal((3, 4)).astype(np.float32), random.standard_normal(4).astype(np.float32)


def learn(steps: int, rates: list[float]) -> list[np.ndarray]:
    """Parameters and moments after some steps, each of two accumulated parts."""
    from mindspore import Tensor

    from hyper_parallel.platform.training import load_training_tools

    model, loss = small_model()
    learner = load_training_tools().learner(model, OPTIONS)
    for step in range(steps):
        for part in (0.5, 0.5):
            learner.accumulate(loss, *(Tensor(a * np.float32(part)) for a in draw(step)))
        learner.map_gradients(lambda flat: flat * 2)
        assert [g.shape for g in learner.gradients()] == [(3, 4), (4,)]
        learner.update(rates[step])
        assert learner.gradients() == [None, None]
    assert learner.updates == steps
    return [p.asnumpy() for p in (*learner.parameters, *learner.moments()["exp_avg"], *learner.moments()["exp_avg_sq"])]


def test_adamw_is_the_one_of_the_paper() -> None:
    steps, rates = 12, [0.0, *np.linspace(1e-3, 1e-2, 11).tolist()]
    found = run_distributed(learn, steps, rates, platform="mindspore", world_size=1)[0]
    start = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    for index, (value, decay) in enumerate(((start.astype(np.float64), 0.1), (np.ones(4), 0.0))):
        first, second = np.zeros_like(value), np.zeros_like(value)
        for step in range(steps):
            gradient = 2 * draw(step)[index].astype(np.float64)
            first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
            m, v = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.95 ** (step + 1))
            value = value - rates[step] * (m / (np.sqrt(v) + 1e-8) + decay * value)
        np.testing.assert_allclose(found[index], value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[2 + index], first, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[4 + index], second, rtol=1e-5, atol=1e-6)


def fail_and_go_on() -> tuple[str, float, list[int]]:
    from mindspore import Tensor

    from hyper_parallel.platform.training import load_training_tools

    model, loss = small_model()
    learner = load_training_tools().learner(model, OPTIONS)

    def failing(tokens: Any, labels: Any) -> Any:
        loss(tokens, labels)
        raise RuntimeError("no such luck")

    inputs = [Tensor(a) for a in draw(0)]
    try:
        learner.accumulate(failing, *inputs)
        message = ""
    except RuntimeError as error:
        message = str(error)
    value = float(learner.accumulate(loss, *inputs))
    return message, value, [int(i) for i in Tensor([5, 6, 7])]


def test_after_an_error_training_goes_on() -> None:
    message, value, numbers = run_distributed(fail_and_go_on, platform="mindspore", world_size=1)[0]
    tokens, labels = draw(0)
    start = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    assert message == "no such luck" and numbers == [5, 6, 7]
    assert value == pytest.approx(float((start * tokens).sum() + labels.sum()), rel=1e-5)


def draw_twice() -> tuple[list[int], list[int], str]:
    from hyper_parallel.platform import get_platform
    from hyper_parallel.platform.training import load_training_tools

    tools = load_training_tools()
    tools.seed(3, "cpu")
    state = tools.rng_state("cpu")
    first = [get_platform().draw_seed() for _ in range(3)]
    tools.set_rng_state(state, "cpu")
    second = [get_platform().draw_seed() for _ in range(3)]
    try:
        tools.set_rng_state({"torch": ""}, "cpu")
    except ValueError as error:
        return first, second, str(error)
    return first, second, ""


def test_random_states_come_back() -> None:
    first, second, message = run_distributed(draw_twice, platform="mindspore", world_size=1)[0]
    assert first == second and len(set(first)) == 3
    assert message == "random states of ['torch']; expected those of ['mindspore']"

"""What is recorded of a model's own initialisation while it is built: MindSpore's initializers as distributions."""

from __future__ import annotations

import math
from typing import Any

from mindspore.common import initializer as init

from hyper_parallel.platform.weights import Draw

__all__ = ["describe_initializer"]

_GAINS = {"relu": math.sqrt(2.0), "tanh": 5.0 / 3, "sigmoid": 1.0, "linear": 1.0}
"""He et al., arXiv 1502.01852, and what MindSpore multiplies the other activations with."""


def describe_initializer(initializer: Any, shape: tuple[int, ...]) -> Draw | str:
    """How a whole parameter of this shape is drawn; in words what cannot be drawn so.

    Example:
        >>> describe_initializer(HeUniform(math.sqrt(5)), (64, 16))                              # doctest: +SKIP
        Draw(kind='uniform', numbers=(-0.25, 0.25), zero_rows=())
    """
    kind = type(initializer)
    if kind is init.Zero:
        return Draw("constant", (0.0,))
    if kind is init.One:
        return Draw("constant", (1.0,))
    if kind is init.Constant and isinstance(initializer.value, (int, float)):
        return Draw("constant", (float(initializer.value),))
    if kind is init.Normal:
        return Draw("normal", (float(initializer.mean), float(initializer.sigma)))
    if kind is init.Uniform:
        return _uniform(initializer.scale)
    if len(shape) > 1 and kind in (init.XavierNormal, init.XavierUniform, init.HeNormal, init.HeUniform):
        std = _scaled(initializer, shape)
        if std is not None:
            normal = kind in (init.XavierNormal, init.HeNormal)
            return Draw("normal", (0.0, std)) if normal else _uniform(math.sqrt(3.0) * std)
    return f"it is initialised by {kind.__name__}"


def _scaled(initializer: Any, shape: tuple[int, ...]) -> float | None:
    """The standard deviation, from the number of inputs and outputs."""
    inner = math.prod(shape[2:])
    fan_in, fan_out = shape[1] * inner, shape[0] * inner
    if isinstance(initializer, (init.XavierNormal, init.XavierUniform)):
        return float(initializer.gain * math.sqrt(2.0 / (fan_in + fan_out)))
    if initializer.nonlinearity == "leaky_relu":
        slope = 0.01 if initializer.negative_slope is None else initializer.negative_slope
        gain: float | None = math.sqrt(2.0 / (1 + slope**2))
    else:
        gain = _GAINS.get(initializer.nonlinearity)
    fan = fan_in if initializer.mode.lower() == "fan_in" else fan_out
    return None if gain is None else gain / math.sqrt(fan)


def _uniform(bound: float) -> Draw:
    return Draw("uniform", (-float(bound), float(bound)))

"""In workers: a model that a plan shares out, beside the same model on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.tensor_parallel.adapters import this_adapter
from tests.tensor_parallel.parts import Differentiated, own_part

__all__ = ["beside_one_device", "worst_gradient"]


def beside_one_device(
    make: Callable[[], Any],
    share: Callable[[Any], Any],
    inputs: Sequence[Any],
    upstream: Any = 1.0,
    call: Callable[[Any, Any], Any] | None = None,
) -> tuple[Differentiated, Differentiated, dict[str, Any]]:
    """``call(model, input)`` of a model of ``make``, and of another one that ``share`` has shared out.

    Returns:
        What one device gives, what this rank gives, and the shared model's parameters by name.
    """
    adapter = this_adapter()
    run = call or (lambda model, x: model(x))
    found = []
    for change in (lambda model: None, share):
        model = make()
        change(model)
        named = adapter.named_parameters(model)
        found.append(
            adapter.differentiate(lambda *xs, m=model: run(m, *xs), inputs, list(named.values()), upstream)
        )
    return found[0], found[1], named


def worst_gradient(one: Differentiated, own: Differentiated, named: dict[str, Any]) -> tuple[float, str]:
    """The largest error of a gradient, relative to the largest element of the whole one, and where."""
    worst, where = 0.0, ""
    for name, (whole, _), (part, spec) in zip(named, one.parameters, own.parameters, strict=True):
        expected = own_part(whole, spec)
        assert expected.shape == part.shape, name
        error = float(np.abs(expected - part).max()) / float(np.abs(whole).max()) if part.size else 0.0
        if not error <= worst:
            worst, where = error, name
    return worst, where

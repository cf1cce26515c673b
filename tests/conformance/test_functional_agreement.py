"""Functions called by name: what one rank finds wrong, or says differently, is one error on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conformance.adapters import this_adapter
from tests.conformance.groups import on_groups, on_offers
from tests.conformance.loss_calls import mesh_of
from tests.harness import run_distributed, this_rank, this_world_size

LAYOUT, UNSUPPORTED = "LossParallelLayoutError", "LossParallelUnsupportedError"

LOSS: dict[str, tuple[dict[str, Any], str, str]] = {
    "chunks of another size": ({"classes": 9, "both": True}, LAYOUT, "on rank 0 of the class group, "),
    "reduction": ({"reduction": "foo"}, "ValueError", "on rank 1 of the class group, reduction is 'foo'"),
    "reduction on both": ({"reduction": "foo", "both": True}, "ValueError", "reduction is 'foo'; expected"),
    "another reduction": ({"reduction": "sum"}, LAYOUT, "reduction differs between the ranks"),
    "num_classes": ({"classes": 7, "width": 3}, LAYOUT, "the number of classes (num_classes) differs between"),
    "num_classes on one rank": ({"classes": None}, LAYOUT, "(num_classes) differs between the ranks"),
    "negative num_classes": ({"classes": -1}, "ValueError", "num_classes is -1; expected 0 or more"),
    "num_classes that is no number": ({"classes": "8"}, "TypeError", "'str' object"),
    "number of tokens": ({"tokens": 3}, LAYOUT, "differs between the ranks of the class group: (3,) on rank 1"),
    "label_smoothing": ({"label_smoothing": 2.0}, "ValueError", "on rank 1 of the class group, label_smoothing is 2.0"),
    "z_loss": ({"z_loss": "a lot"}, "TypeError", "on rank 1 of the class group, "),
    "target": ({"target": [0, 8]}, "IndexError", "on rank 1 of the class group, Target 8 is out of bounds"),
    "another target": ({"target": [0, 2]}, LAYOUT, "the digest of the target's values differs"),
    "no target": ({"target": None}, "TypeError", "on rank 1 of the class group, target must be a tensor, found"),
    "probabilities": ({"floating": True}, UNSUPPORTED, "class probabilities are not supported"),
}
"""What the last rank does, or both; type and text of the error on both ranks."""

LARGEST: dict[str, tuple[dict[str, Any], str, str]] = {
    name: LOSS[name] for name in ("chunks of another size", "num_classes", "negative num_classes", "number of tokens")
} | {
    "k": ({"k": 2}, LAYOUT, "k differs between the ranks of the class group: 2 on rank 1, 1 on rank 0"),
    "large k": ({"k": 9}, "ValueError", "on rank 1 of the class group, vocab_parallel_topk: found k=9 and 8 classes"),
}
FUNCTIONS = ("vocab_parallel_cross_entropy", "linear_cross_entropy", "vocab_parallel_topk")


def cases_of(function: str) -> dict[str, tuple[dict[str, Any], str, str]]:
    if function == "vocab_parallel_topk":
        return LARGEST
    cases = dict(LOSS)
    if function == "linear_cross_entropy":
        cases["chunk_size"] = ({"chunk_size": 1}, LAYOUT, "chunk_size differs between the ranks")
        cases["probabilities"] = ({"floating": True}, "TypeError", "expected floating ones and an integer target")
    return cases


@pytest.mark.contract("E1", "P1")
@on_offers({"torch": FUNCTIONS, "mindspore": FUNCTIONS}, "function", 2)
def test_errors(platform: str, world_size: int, function: str) -> None:
    """Each of them, and then a call that is right."""
    cases = cases_of(function)
    first, *others = run_distributed(refused, function, platform=platform, world_size=world_size, timeout=60)
    assert all(found == first for found in others)
    for name, (_, error, text) in cases.items():
        assert first[name][0] == error and text in first[name][1], (name, first[name])


def refused(function: str) -> dict[str, tuple[str, str]]:
    """In a worker: types and texts of the errors."""
    found = {}
    for name, (change, _, _) in cases_of(function).items():
        options = dict(change)
        mine = options.pop("both", False) or this_rank() == this_world_size() - 1
        with pytest.raises(Exception) as raised:
            call(function, **(options if mine else {}))
        found[name] = (type(raised.value).__name__, str(raised.value))
        call(function)
    return found


def call(
    function: str,
    classes: Any = 8,
    width: int = 4,
    tokens: int = 2,
    target: Any = (0, 1),
    floating: bool = False,
    k: int = 1,
    **options: Any,
) -> Any:
    """By default it is right, at two ranks."""
    import hyper_parallel

    adapter, group = this_adapter(), mesh_of((this_world_size(),), ("tp",))["tp"]
    labels = None if target is None else adapter.tensor(np.resize(target, tokens), "float32" if floating else "int64")
    options |= {"num_classes": classes}
    if function == "linear_cross_entropy":
        hidden, weight = (adapter.tensor(np.ones((n, 3)), "float32") for n in (tokens, width))
        return hyper_parallel.linear_cross_entropy(hidden, weight, labels, group, **options)
    logits = adapter.tensor(np.zeros((tokens, width)), "float32")
    if function == "vocab_parallel_topk":
        return hyper_parallel.vocab_parallel_topk(logits, k, group, **options)
    return hyper_parallel.vocab_parallel_cross_entropy(logits, labels, group, **options)


@pytest.mark.contract("G2")
@on_groups(2)
def test_what_the_agreement_sends(platform: str, world_size: int) -> None:
    """24 bytes, in the place of asking for the classes; without it 8 where these are not said, else nothing."""
    for found in run_distributed(headers, platform=platform, world_size=world_size):
        for function, sent in found.items():
            assert sent == {(8, None): [24], (None, None): [24], (8, False): [], (None, False): [8]}, function


def headers() -> dict[str, dict[tuple[int | None, bool | None], list[int]]]:
    """In a worker: bytes of the collectives before those of the function itself."""
    adapter = this_adapter()
    found: dict[str, dict[tuple[int | None, bool | None], list[int]]] = {}
    for function in FUNCTIONS:
        for classes in (8, None):
            for validate in (None, False):
                with adapter.record_collectives() as sent:
                    call(function, classes=classes, validate=validate)
                own = 2 if function == "vocab_parallel_topk" else 1
                found.setdefault(function, {})[classes, validate] = [c.bytes for c in sent[:-own]]
    return found

"""Activation checkpointing runs a layer again in backward, and only there; the loss by parts keeps no part's logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel.models.llama.config import LlamaConfig
from tests.harness import run_distributed

CONFIG = LlamaConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)


class Counting:
    """A rule that counts how often its module runs."""

    def __init__(self) -> None:
        from hyper_parallel.platform import Group

        self.cuts: dict[str, Any] = {}
        self.group, self.calls = Group((0,), None, 0), 0

    def __call__(self, module: Any, forward: Callable[..., Any], *args: Any) -> Any:
        self.calls += 1
        return forward(*args)


def calls_of(checkpoint: str, chunks: int) -> tuple[list[int], list[np.ndarray]]:
    """In a worker: how often an inner layer and the last one have run after forward and backward, and after a forward
    without gradients; and the gradients.
    """
    from hyper_parallel.models.llama import build_llama
    from hyper_parallel.platform import get_platform
    from hyper_parallel.platform.modules import get_module_backend
    from hyper_parallel.platform.training import ModelSettings, load_training_tools
    from hyper_parallel.tensor_parallel.initialize import Constant, Normal
    from hyper_parallel.tensor_parallel.materialize import materialize
    from hyper_parallel.trainer.loss import ChunkedCrossEntropyLoss, CrossEntropyLoss, loss_of_model

    platform, tools, rules = get_platform(), load_training_tools(), (Counting(), Counting())
    model = tools.build(lambda: build_llama(CONFIG))
    materialize(model, seed=0, initial={"*": Normal(0.1), "*norm.weight": Constant(1.0)}, device="cpu")
    for module, rule in zip((model.model.layers[1].mlp, model.lm_head), rules, strict=True):
        get_module_backend().add_rule(module, rule)
    loss: Any = CrossEntropyLoss()
    if chunks > 1:
        loss = ChunkedCrossEntropyLoss(chunks)
        loss.attach(model)
    options = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    learner = tools.learner(model, options, ModelSettings(activation_checkpoint=checkpoint))
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 7))
    tokens, labels = (tools.to_device(part, "cpu") for part in (ids[:, :-1], ids[:, 1:]))
    learner.accumulate(lambda x, y: loss_of_model(learner.model, loss, (x,), y, 12), tokens, labels)
    seen = [rule.calls for rule in rules]
    gradients = [platform.to_numpy(g) for g in learner.gradients() if g is not None]
    with tools.evaluating(model):
        loss_of_model(learner.model, loss, (tokens,), labels, 12)
    return [*seen, *(rule.calls for rule in rules)], gradients


@pytest.mark.parametrize("platform", ["torch", "mindspore"])
def test_layers_run_again_in_backward_alone(platform: str) -> None:
    plain, expected = run_distributed(calls_of, "none", 1, platform=platform, world_size=1)[0]
    assert plain == [1, 1, 2, 2]
    calls, found = run_distributed(calls_of, "full", 3, platform=platform, world_size=1)[0]
    assert calls == [2, 6, 3, 9]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)

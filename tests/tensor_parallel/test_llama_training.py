"""Twenty steps of one small Llama from Hugging Face files: every degree on both platforms ends where transformers does.

The vocabulary (251) is divisible by no degree, at tp = 4 the ranks outnumber the key and value heads, labels are left
out at random, and gradients are clipped in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ParallelismConfig,
    clip_grad_norm_,
    get_train_context,
    init_device_mesh,
    load_hf_checkpoint,
    parallelize_module,
    save_hf_checkpoint,
)
from hyper_parallel.models.llama import LlamaConfig, build_llama
from hyper_parallel.platform.training import load_training_tools
from hyper_parallel.trainer.loss import CrossEntropyLoss
from tests.harness import run_distributed

SIZES = {
    "vocab_size": 251,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
}
VARIANTS = {
    "plain": ("plain", False),
    "sequence parallel": ("plain", True),
    "tied": ("tied", False),
    "tied, sequence parallel": ("tied", True),
    "biases": ("biases", False),
    "biases, sequence parallel": ("biases", True),
}
DEGREES = [("torch", 1), ("torch", 2), ("torch", 4), ("mindspore", 1), ("mindspore", 2)]
# one rank has no sequence to share
CASES = [(*degree, v) for degree in DEGREES for v, (_, shared) in VARIANTS.items() if not shared or degree[1] > 1]
STEPS, LR, MAX_NORM = 20, 3e-3, 0.7
# The eps: with 1e-8 AdamW turns the rounding of a gradient that is almost zero into whole steps.
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}


@dataclass(frozen=True)
class Course:
    """What a run went through, and the weights that it ended with."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, np.ndarray]


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels ``[4, 16]``; some labels do not count."""
    random = np.random.default_rng(step)
    ids = random.integers(0, 251, (4, 17))
    tokens, labels = ids[:, :-1].copy(), ids[:, 1:].copy()
    labels[random.random(labels.shape) < 0.2] = -100
    return tokens, labels


def read(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Course]]:
    """For each model its files, and the course that PyTorch and transformers take alone."""
    pytest.importorskip("torch", reason="PyTorch, which goes ahead, is not installed")
    pytest.importorskip("transformers", reason="transformers, which goes ahead, is not installed")
    return {name: reference(tmp_path_factory.mktemp("model"), options) for name, options in MODELS.items()}


def reference(folder: Path, options: dict[str, Any]) -> tuple[Path, Course]:
    import torch
    import torch.nn.functional as F
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options, pad_token_id=None))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.1)
    model.save_pretrained(folder / "first")
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    adamw = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=LR, **ADAMW)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, labels = (torch.from_numpy(a) for a in batch(step))
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
        adamw.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        adamw.step()
        losses.append(loss.item())
    model.save_pretrained(folder / "last")
    return folder / "first", Course(losses, norms, read(folder / "last"))


def train(source: str, target: str, tp: int, sequence_parallel: bool) -> tuple[list[float], list[float]]:
    """In a worker of the harness."""
    tools = load_training_tools()
    mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    config = ParallelismConfig(tensor_parallel_degree=tp)
    model = tools.build(lambda: build_llama(LlamaConfig.from_hf(source)))
    if tp > 1:
        parallelize_module(model, mesh["tp"], "auto", config=config, sequence_parallel=sequence_parallel)
    load_hf_checkpoint(model, source)
    learner = tools.learner(model, ADAMW)
    context = get_train_context(config.loss_parallel_enabled, config)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, labels = batch(step)
        valid = int((labels != -100).sum())
        with context():
            loss = learner.accumulate(
                lambda t, y, valid=valid: CrossEntropyLoss()(model(t), y, valid),
                tools.to_device(tokens, "cpu"),
                tools.to_device(labels, "cpu"),
            )
        norm = clip_grad_norm_(learner.parameters, MAX_NORM, gradients=learner.gradients())
        learner.update(LR)
        losses.append(float(loss))
        norms.append(float(norm))
    save_hf_checkpoint(model, target)
    return losses, norms


@pytest.mark.contract("G1", "T1", "T2", "T3", "T4", "S4")
@pytest.mark.parametrize(("platform", "world_size", "variant"), CASES)
def test_twenty_steps_end_where_one_device_ends(
    platform: str, world_size: int, variant: str, references: dict[str, tuple[Path, Course]], tmp_path: Path
) -> None:
    model, sequence_parallel = VARIANTS[variant]
    source, expected = references[model]
    target = tmp_path / "last"
    found = run_distributed(
        train, str(source), str(target), world_size, sequence_parallel, platform=platform, world_size=world_size,
        timeout=60,
    )  # fmt: skip
    assert all(own == found[0] for own in found)
    losses, norms = found[0]
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-4)
    np.testing.assert_allclose(norms, expected.norms, rtol=1e-4)
    assert min(norms) > MAX_NORM
    weights = read(target)
    assert weights.keys() == expected.weights.keys()
    for name, whole in expected.weights.items():
        assert weights[name].shape == whole.shape, name
        assert np.abs(weights[name] - whole).max() < 1e-4 * np.abs(whole).max(), name


def sums_of_a_step(source: str) -> tuple[int, list[bool]]:
    """In a MindSpore worker: how many activations and gradients of them are summed; and whether changes are seen."""
    from mindspore import Tensor, ops

    from hyper_parallel.platform.mindspore import _emulated_collectives as emulated
    from hyper_parallel.platform.modules import get_module_backend

    tools = load_training_tools()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = tools.build(lambda: build_llama(LlamaConfig.from_hf(source)))
    parallelize_module(model, mesh["tp"], "auto")
    load_hf_checkpoint(model, source)
    original, shapes = emulated.all_reduce, []

    def counting(x: Any, op: str, group: Any) -> Any:
        shapes.append(x.shape)
        return original(x, op, group)

    emulated.all_reduce = counting
    try:
        with get_train_context(True)():
            tools.learner(model, ADAMW).accumulate(
                lambda t, y: CrossEntropyLoss()(model(t), y), *(tools.to_device(a, "cpu") for a in batch(0))
            )
    finally:
        emulated.all_reduce = original
    x = Tensor(np.ones((2, 3), np.float32)) * 1
    numbers = [get_module_backend().change_count(x)]
    for change in (lambda: x.__setitem__(0, 5.0), lambda: ops.assign(x, x * 2), lambda: x.assign_value(x * 2)):
        change()
        numbers.append(get_module_backend().change_count(x))
    return shapes.count((4, 16, 32)), [a != b for a, b in zip(numbers, numbers[1:], strict=False)]


@pytest.mark.platform("mindspore")
def test_layers_side_by_side_sum_their_gradient_once(references: dict[str, tuple[Path, Course]]) -> None:
    source = str(references["plain"][0])
    count, seen = run_distributed(sums_of_a_step, source, platform="mindspore", world_size=2, timeout=60)[0]
    # the embedding; two a layer forward (attention, feed-forward) and two backward (query, key and value; gate and up);
    # and the last layer's backward
    assert count == 1 + 2 * 2 + 2 * 2 + 1
    assert seen == [True, True, True]

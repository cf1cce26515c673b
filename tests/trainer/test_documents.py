"""Several documents in a row: each as if it were alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.models.llama.config import LlamaConfig
from tests.harness import run_distributed
from tests.trainer.small_jobs import train

LENGTHS = [[5, 1, 7, 3], [16], [1, 15], [4, 4, 4, 4]]
CONFIG = LlamaConfig(
    vocab_size=67,
    hidden_size=48,
    intermediate_size=88,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=16,
)


def positions() -> np.ndarray:
    return np.stack([np.concatenate([np.arange(n) for n in row]) for row in LENGTHS])


@pytest.mark.platform("torch")
def test_each_document_has_the_logits_and_gradients_that_it_has_alone() -> None:
    import torch

    from hyper_parallel.models.llama.torch import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(67, (4, 16))
    weights = torch.randn(4, 16, 67, dtype=torch.float64)

    together = model(tokens, torch.from_numpy(positions()))
    (together * weights).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    parts = []
    for row, lengths in enumerate(LENGTHS):
        for part, weight in zip(tokens[row].split(lengths), weights[row].split(lengths), strict=True):
            logits = model(part[None])[0]
            (logits * weight).sum().backward()
            parts.append(logits.detach())
    torch.testing.assert_close(together.detach().reshape(-1, 67), torch.cat(parts))
    for ours, alone in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(ours, alone.grad)


def mindspore_numbers(tokens: np.ndarray, weights: np.ndarray) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """In a worker of the harness: logits and gradients, of the rows and of each document alone."""
    import mindspore
    from mindspore import Tensor

    from hyper_parallel.models.llama.mindspore import LlamaForCausalLM

    model = LlamaForCausalLM(CONFIG)
    random = np.random.default_rng(0)
    parameters = list(model.trainable_params())
    for parameter in parameters:
        parameter.set_data(Tensor(random.normal(0, 0.3, parameter.shape).astype(np.float32)))

    def run(ids: np.ndarray, weight: np.ndarray, *places: Tensor) -> tuple[np.ndarray, list[np.ndarray]]:
        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            logits = model(x, *places)
            return (logits * Tensor(weight)).sum(), logits

        (_, logits), gradients = mindspore.value_and_grad(forward, None, parameters, has_aux=True)(Tensor(ids))
        return logits.asnumpy(), [g.asnumpy() for g in gradients]

    together = run(tokens, weights, Tensor(positions()))
    parts = []
    for row, lengths in enumerate(LENGTHS):
        cuts = np.cumsum(lengths)[:-1]
        for part, weight in zip(np.split(tokens[row], cuts), np.split(weights[row], cuts), strict=True):
            parts.append(run(part[None], weight[None]))
    logits = np.concatenate([part[0] for part, _ in parts]).reshape(together[0].shape)
    return [together, (logits, [sum(g) for g in zip(*(gradients for _, gradients in parts), strict=True)])]


@pytest.mark.platform("mindspore")
def test_on_mindspore_too() -> None:
    random = np.random.default_rng(1)
    tokens, weights = random.integers(0, 67, (4, 16)), random.normal(size=(4, 16, 67)).astype(np.float32)
    together, alone = run_distributed(
        mindspore_numbers, tokens, weights, platform="mindspore", world_size=1, timeout=60
    )[0]  # fmt: skip
    np.testing.assert_allclose(together[0], alone[0], rtol=1e-5, atol=1e-5 * np.abs(alone[0]).max())
    for ours, expected in zip(together[1], alone[1], strict=True):
        assert np.abs(ours - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.platform("torch")
def test_they_are_told_apart_as_transformers_does() -> None:
    import torch
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM as TheirModel

    from hyper_parallel.models.llama.torch import LlamaForCausalLM

    torch.manual_seed(0)
    theirs = TheirModel(TheirConfig(**CONFIG.to_hf())).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.2)
    ours = LlamaForCausalLM(CONFIG)
    ours.load_state_dict(theirs.state_dict())
    tokens, places = torch.randint(67, (4, 16)), torch.from_numpy(positions())
    expected = theirs(tokens, position_ids=places, use_cache=False).logits
    torch.testing.assert_close(ours(tokens, places), expected, rtol=1e-5, atol=1e-5)
    assert (ours(tokens) - expected).abs().max() > 0.01  # they would see each other without


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Documents that are shorter than a window."""
    folder = tmp_path / "text"
    folder.mkdir()
    lines = [f'{{"text": "line {i} has {i % 7} apples and {i % 5} pears"}}\n' for i in range(60)]
    (folder / "lines.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.platform("torch")
def test_training_with_masks_gives_the_same_on_four_ranks_as_on_one(text: Path) -> None:
    alone = train(text, 1, 1, "--text.document-masks")
    found = train(text, 2, 2, "--text.document-masks", "--training.gradient-accumulation", "2")
    for name in ("loss", "grad_norm"):
        assert found[name] == pytest.approx(alone[name], abs=1e-5), name
    without = train(text, 1, 1)
    assert abs(without["loss"][4] - alone["loss"][4]) > 1e-4

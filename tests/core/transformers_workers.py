"""What the workers run for test_transformers."""

from __future__ import annotations

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from hyper_parallel import DTensor, distribute_tensor, loss_parallel
from hyper_parallel.core.placement_types import Placement, Replicate, Shard
from tests.core.op_checks import close, mesh_of

VOCAB = 11


def causal_lm_loss(mesh_shape: tuple[int, ...], dtype: str) -> None:
    """The loss of transformers, unmodified, on class-sharded logits (batch sharded over the other mesh dim)."""
    mesh = mesh_of(mesh_shape)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((4, 5, VOCAB), generator=generator).to(getattr(torch, dtype))
    labels = torch.randint(0, VOCAB, (4, 5), generator=generator)
    labels[0, 2:] = -100
    placements: list[Placement] = [Shard(-1)] if mesh.ndim == 1 else [Shard(0), Shard(-1)]
    label_placements: list[Placement] = [Replicate() if p == Shard(-1) else p for p in placements]
    for count in (None, torch.tensor(7)):
        expected_logits = logits.clone().requires_grad_()
        expected = ForCausalLMLoss(expected_logits, labels, VOCAB, num_items_in_batch=count)
        expected.backward()
        ours = distribute_tensor(logits, mesh, placements).requires_grad_()
        our_labels = labels if mesh.ndim == 1 else distribute_tensor(labels, mesh, label_placements)
        with loss_parallel():
            loss = ForCausalLMLoss(ours, our_labels, VOCAB, num_items_in_batch=count)
            loss.backward()
        assert isinstance(loss, DTensor) and loss.global_layout.is_replicated
        assert abs(loss.item() - expected.item()) <= 1e-5 * abs(expected.item())
        grad, expected_grad = ours.grad.full_tensor(), expected_logits.grad
        assert grad.dtype == logits.dtype
        if dtype == "float64":
            close(grad, expected_grad, "gradient")
        else:
            torch.testing.assert_close(grad, expected_grad)

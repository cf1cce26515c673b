"""The bytes that any implementation of the loss must move."""

from __future__ import annotations

__all__ = ["least_bytes"]


def least_bytes(logits_bytes: int) -> dict[str, int]:
    """The forward has to read the logits; the backward reads them again and writes the gradient."""
    return {"forward": logits_bytes, "backward": 2 * logits_bytes, "both": 3 * logits_bytes}

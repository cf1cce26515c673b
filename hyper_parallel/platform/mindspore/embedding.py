"""An embedding that runs on every device."""

from __future__ import annotations

from mindspore import Tensor, mint, ops

__all__ = ["Embedding"]


class Embedding(mint.nn.Embedding):
    """``mint.nn.Embedding``, by an operator that the CPU backend has as well.

    Of that class's options it takes none beyond the sizes and the dtype.

    Example:
        >>> Embedding(10, 3)(Tensor([[1, 7]])).shape
        (1, 2, 3)
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, dtype: object = None) -> None:
        super().__init__(num_embeddings, embedding_dim, dtype=dtype)

    def construct(self, input: Tensor) -> Tensor:
        """Ids of any shape to ``[*ids.shape, embedding_dim]``."""
        return ops.gather(self.weight, input, 0)

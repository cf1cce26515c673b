"""Losses of a training job: from logits, or from hidden states without ever holding all logits.

They sum over the tokens at hand and divide by the number of valid tokens of the whole batch, so that the losses and
gradients of its parts, on whatever rank and in whatever order, add up to those of the batch's mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.dtensor import DTensor
from hyper_parallel.core.native import from_native
from hyper_parallel.core.shard_spec import ShardSpec, chunk_ranges
from hyper_parallel.loss_parallel import TrainContext
from hyper_parallel.platform import Group, get_platform
from hyper_parallel.platform.modules import Module, get_module_backend
from hyper_parallel.platform.platform import Tensor
from hyper_parallel.platform.training import load_training_tools
from hyper_parallel.tensor_parallel.auto_plan import head_name
from hyper_parallel.trainer.data import IGNORE_INDEX

__all__ = ["ChunkedCrossEntropyLoss", "CrossEntropyLoss", "HeadLoss", "LossFunction", "loss_of_model"]

LossFunction = Callable[[Any, Any, int], Any]
"""``(logits, labels, global_valid_tokens) -> loss``, summed over the tokens at hand and divided by the last one."""


class CrossEntropyLoss:
    """Cross-entropy of logits ``[batch, length, classes]``: class-sharded DTensors inside ``loss_parallel()``, whole
    ones, or plain tensors.

    Called with the logits, int64 labels ``[batch, length]`` (-100: no loss) and the number of valid tokens that the sum
    is divided by (None: it is not). Gives a plain scalar in at least float32, the same on all ranks that share the
    tokens. Collectives: those of the loss.

    Example:
        >>> loss = CrossEntropyLoss()(model(tokens), labels, global_valid_tokens=4096)         # doctest: +SKIP
    """

    def __call__(self, logits: Any, labels: Any, global_valid_tokens: int | None = None) -> Tensor:
        loss = plain_scalar(load_training_tools().cross_entropy_sum(logits, labels, IGNORE_INDEX))
        return loss if global_valid_tokens is None else loss / max(global_valid_tokens, 1)


class HeadLoss(ABC):
    """A loss that takes the place of a model's last layer, so that it sees hidden states in the place of logits.

    After :meth:`attach` the model gives its loss wherever :meth:`expecting` says the labels, and logits as before
    elsewhere. All of it happens inside the model's own forward, so whatever is wrapped round the model stays right.
    """

    def __init__(self) -> None:
        self._rule: _HeadRule | None = None

    def attach(self, model: Module) -> None:
        """Take the place of the last layer. After :func:`parallelize_module`, before DDP or FSDP.

        Raises:
            ValueError: the model has no last layer that is known as such.
        """
        name = head_name(model)
        if name is None:
            raise ValueError(
                f"{type(model).__name__} has no last layer to put {type(self).__name__} in the place of: expected "
                "get_output_embeddings(), or a module named 'lm_head'"
            )
        self._rule = _HeadRule(self)
        get_module_backend().add_rule(dict(get_module_backend().named_modules(model))[name], self._rule)

    @contextmanager
    def expecting(self, labels: Any, global_valid_tokens: int) -> Iterator[None]:
        """Inside it the model, called once with the tokens of these labels, gives the loss."""
        if self._rule is None:
            raise ValueError(f"{type(self).__name__} was not attached to a model")
        self._rule.labels = labels, global_valid_tokens
        try:
            yield
        finally:
            self._rule.labels = None

    @abstractmethod
    def __call__(
        self,
        head: Module,
        forward: Callable[..., Any],
        hidden: Any,
        labels: Any,
        global_valid_tokens: int | None = None,
    ) -> Tensor:
        """The loss.

        Args:
            head: the last layer.
            forward: from hidden states to logits, as it was before.
            hidden: ``[batch, length, width]``.
            labels: ``[batch, length]``.
            global_valid_tokens: what the sum is divided by.
        """


class ChunkedCrossEntropyLoss(HeadLoss):
    """Last layer and cross-entropy for one part of the sequence after another.

    No more than one part's logits exist at a time: backward computes them again, at the cost of one more product with
    the last layer. Collectives: those of the last layer and the loss, for each part.

    Args:
        num_chunks: parts of the sequence.
        context: what the loss runs in, also in backward: the train context.
    """

    def __init__(self, num_chunks: int = 8, context: TrainContext = nullcontext) -> None:
        super().__init__()
        if num_chunks < 1:
            raise ValueError(f"num_chunks must be at least 1, found {num_chunks}")
        self._num_chunks, self._context, self._loss = num_chunks, context, CrossEntropyLoss()

    def __call__(
        self,
        head: Module,
        forward: Callable[..., Any],
        hidden: Any,
        labels: Any,
        global_valid_tokens: int | None = None,
    ) -> Tensor:
        platform, tools = get_platform(), load_training_tools()
        whole = whole_sequence(hidden)

        def part(x: Tensor, y: Tensor) -> Tensor:
            with self._context():  # backward may run in another thread
                return self._loss(forward(x), y, global_valid_tokens)

        total = None
        for start, stop in chunk_ranges(platform.shape(labels)[1], self._num_chunks):
            if stop == start:
                continue
            x, y = (platform.narrow(t, 1, start, stop - start) for t in (whole, labels))
            loss = tools.recomputed(part, head, x, y)
            total = loss if total is None else total + loss
        return total


def loss_of_model(
    model: Module, loss: LossFunction | HeadLoss, inputs: Sequence[Any], labels: Any, global_valid_tokens: int
) -> Tensor:
    """Forward on ``inputs`` and loss: a plain scalar on the model's graph. Understands models that give an object with
    ``logits``.
    """
    if isinstance(loss, HeadLoss):
        with loss.expecting(labels, global_valid_tokens):
            return plain_scalar(_logits_of(model(*inputs)))
    return plain_scalar(loss(_logits_of(model(*inputs)), labels, global_valid_tokens))


def plain_scalar(loss: Any) -> Tensor:
    """A loss as an ordinary tensor; sums that ranks hold parts of are completed."""
    if not isinstance(loss, DTensor) and get_platform().is_native_dtensor(loss):
        loss = from_native(loss)
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def whole_sequence(hidden: Any) -> Tensor:
    """Hidden states as every rank of a tensor-parallel group has them, gathered where the sequence is sharded."""
    return hidden.full_tensor() if isinstance(hidden, DTensor) else hidden


def _logits_of(output: Any) -> Any:
    return getattr(output, "logits", output)


@dataclass(eq=False)
class _HeadRule:
    """In the place of the last layer's forward, when there are labels."""

    loss: HeadLoss
    labels: tuple[Any, int] | None = None
    cuts: Mapping[str, ShardSpec] = field(default_factory=dict)

    @property
    def group(self) -> Group:
        return Group((get_platform().rank(),), None, 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> _HeadRule:
        return self

    def __call__(self, module: Module, forward: Callable[..., Any], hidden: Any) -> Any:
        if self.labels is None:
            return forward(hidden)
        labels, valid = self.labels
        return self.loss(module, forward, hidden, labels, valid)

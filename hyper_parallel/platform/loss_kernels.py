"""What a backend's loss kernels compute (K1-K3): mathematics, shapes, dtypes and collectives.

Logits ``x`` of V classes are cut along the class dim over the ranks of the class group. Per token, with
target y, smoothing e and z-loss factor z:

    m    = max_c x_c
    lse  = m + log sum_c exp(x_c - m)
    p_c  = exp(x_c - lse)
    nll  = lse - x_y
    loss = (1-e) w_y nll + e/V sum_c w_c (lse - x_c) + z lse^2

    d loss / d x_c = A p_c - B [c = y] - e/V w_c
    A = (1-e) w_y + e/V sum_c w_c + 2 z lse
    B = (1-e) w_y

Beside the loss, ``log p_y = -nll`` and the entropy ``H = lse - sum_c p_c x_c``:

    d log p_y / d x_c = [c = y] - p_c
    d H / d x_c = -p_c (log p_c + H)

A rank needs from the others only numbers per token, so nothing of size ``[tokens, classes]`` is ever sent,
and the backward pass sends nothing at all.

Every number is kept relative to m: ``nll`` and ``p`` stay exact when all logits are shifted by a large
constant, which a difference of two rounded log-sum-exps would not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform.call_check import CallFacts, find_error
from hyper_parallel.platform.kernel_arguments import ClassShard, LossOptions, Tensor, TokenOutputs
from hyper_parallel.platform.loss_facts import FactReader

if TYPE_CHECKING:
    from hyper_parallel.platform.platform import Group

__all__ = ["ClassShard", "LossKernels", "LossOptions", "Tensor", "TokenOutputs"]


class LossKernels(ABC):
    """Differentiable class-sharded log-softmax and cross-entropy on plain local tensors.

    ``local_logits`` has any shape, its dim ``dim`` (0 or more) holding this rank's classes, possibly none; it
    need not be contiguous and is never modified (but see ``LossOptions.inplace``). ``target`` is the same on
    all ranks, of the shape without the class dim, of any integer dtype. ``weight`` holds all V class weights
    on every rank.

    Statistics and results per token are fp32, or fp64 for fp64 logits. Gradients have the dtype of the logits
    and are rounded once. Beyond an alias of the logits at most 16 bytes a token are kept for backward (fp64: 28); 4
    more with log-probabilities, 16 more with the entropy (fp64: 8 and 32). Differentiating twice raises. Methods raise
    the same exception on all ranks of the group, or return on all of them.
    """

    _facts: FactReader
    """Reads the backend's tensors for the checks."""

    # -- the operations --------------------------------------------------------------------------------------

    @abstractmethod
    def log_softmax(
        self,
        local_logits: Tensor,
        dim: int,
        shard: ClassShard,
        *,
        dtype: Any = None,
        validate: bool | None = None,
    ) -> Tensor:
        """K1: ``x_c - lse`` of the local classes, differentiable on its own.

        The gradient is ``g_c - p_c sum_c' g_c'`` with the sum over the classes of all ranks, whatever uses
        the result.

        Args:
            dtype: dtype of the result; by default the logits'. (No copy of the logits is made for it.)
            validate: as in :class:`LossOptions`.
        Collectives:
            The exchange of statistics (8 bytes a token) forward, one all-reduce (4 bytes a token) backward.
        """

    @abstractmethod
    def token_outputs(
        self,
        local_logits: Tensor,
        dim: int,
        target: Tensor,
        shard: ClassShard,
        weight: Tensor | None,
        options: LossOptions,
    ) -> TokenOutputs:
        """K2 and K3: loss and weight ``w_y`` of each token, both of ``target``'s shape, 0 where ignored.

        ``w_y`` is the weight of the target's class, 1 without weights. The loss is multiplied by ``w_y``
        already, so PyTorch's mean is ``loss.sum() / token_weight.sum()``, over the tokens of all ranks. The
        second result is not differentiable. With ``options.log_probs`` and ``options.entropy`` come the
        log-probability of the target and the entropy, both differentiable, None otherwise.

        Collectives:
            Forward the exchange of statistics: 8 bytes a token, 16 with smoothing (see ``ClassShard.ranges``). Before
            it, when validating, an all-gather of a header of fixed size. Backward none.
        Raises:
            What :meth:`check_call` returns.
        """

    def cross_entropy(
        self,
        local_logits: Tensor,
        dim: int,
        target: Tensor,
        shard: ClassShard,
        weight: Tensor | None,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor]:
        """Loss and weight of each token: the first two of :meth:`token_outputs`."""
        loss, token_weight, _, _ = self.token_outputs(local_logits, dim, target, shard, weight, options)
        return loss, token_weight

    @abstractmethod
    def nll_loss(
        self,
        local_log_probs: Tensor,
        dim: int,
        target: Tensor,
        shard: ClassShard,
        weight: Tensor | None,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor]:
        """``-w_y log p_y`` of each token and ``w_y``, from the log-probabilities of :meth:`log_softmax`.

        The results are those of :meth:`cross_entropy`, and so are the errors. Smoothing, z-loss and
        ``inplace`` do not apply to it.

        Collectives:
            Forward one all-reduce of 4 bytes a token, after the header when validating. Backward none.
        """

    # -- the same without autograd ---------------------------------------------------------------------------

    @abstractmethod
    def distributed_log_softmax(
        self, local_logits: Tensor, dim: int, shard: ClassShard, dtype: Any = None
    ) -> tuple[Tensor, Tensor]:
        """K1's forward: the local log-probabilities, and per token the sum of ``p_c`` over the local classes.

        ``softmax(local_logits)`` times this sum are the local probabilities: all that a backward needs.
        """

    @abstractmethod
    def distributed_nll_loss_forward(
        self,
        local_logits: Tensor,
        dim: int,
        target: Tensor,
        shard: ClassShard,
        weight: Tensor | None,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor, Any]:
        """K2's forward: loss and weight of each token, and what K3 needs of each token."""

    @abstractmethod
    def fused_nll_log_softmax_backward(
        self,
        grad_loss: Tensor,
        local_logits: Tensor,
        dim: int,
        state: Any,
        grad_log_prob: Tensor | None = None,
        grad_entropy: Tensor | None = None,
    ) -> Tensor:
        """K3: the gradient of the local logits, without a collective; ``state`` is K2's third result."""

    # -- agreement -------------------------------------------------------------------------------------------

    @abstractmethod
    def validates_by_default(self, local_logits: Tensor) -> bool:
        """Whether looking at values costs nothing extra on the device of ``local_logits``."""

    def check_call(
        self,
        local_logits: Tensor,
        dim: int,
        target: Tensor | None,
        shard: ClassShard,
        weight: Tensor | None = None,
        options: LossOptions | None = None,
        *,
        kind: str = "cross_entropy",
    ) -> Exception | None:
        """What is wrong with a call, found out by all ranks together: the same answer on each.

        One all-gather of a header of fixed size over the class group, before anything else runs. A caller
        that also has to agree with ranks outside the class group calls this itself, and the kernel with
        ``validate=False``.

        Args:
            kind: the method about to be called, for messages; ``target`` is None for ``"log_softmax"``.
        Returns:
            None when all is well; else a LossParallelLayoutError (shapes, devices, class ranges, arguments
            that differ between ranks), LossParallelUnsupportedError (targets or options that the kernels
            refuse), TypeError (a dtype), ValueError (an option out of range) or IndexError (a target outside
            ``[0, V)``), to be raised.
        """
        facts = self.facts_of(local_logits, dim, target, shard, weight, options or LossOptions(), kind=kind)
        if shard.group is None or shard.group.size == 1:
            return find_error([facts])
        headers = self._exchange_headers(facts.encode(), shard.group, local_logits)
        return find_error([CallFacts.decode(header) for header in headers])

    def facts_of(
        self,
        local_logits: Tensor,
        dim: int,
        target: Tensor | None,
        shard: ClassShard,
        weight: Tensor | None,
        options: LossOptions,
        *,
        kind: str = "cross_entropy",
        read_values: bool = True,
    ) -> CallFacts:
        """What this rank sees of a call. Values are worth reading only where the shapes are right."""
        facts = self._facts.describe(kind, local_logits, dim, target, shard, weight, options)
        if read_values and facts.local_problem() is None:
            facts = self._facts.read_values(facts, target, weight)
        return facts

    def target_values(self, target: Tensor, num_classes: int, ignore_index: int) -> tuple[int, int, int]:
        """A digest of a target's values, how many are neither a class nor ``ignore_index``, and the first of these."""
        return self._facts.target_values(target, num_classes, ignore_index)

    def _ensure_valid(
        self,
        kind: str,
        local_logits: Tensor,
        dim: int,
        target: Tensor | None,
        shard: ClassShard,
        weight: Tensor | None,
        options: LossOptions,
    ) -> None:
        """Raise what is wrong; unvalidated, what this rank's shapes and dtypes show, without a collective."""
        validate = self.validates_by_default(local_logits) if options.validate is None else options.validate
        if validate:
            error = self.check_call(local_logits, dim, target, shard, weight, options, kind=kind)
        else:
            error = self._facts.describe(kind, local_logits, dim, target, shard, weight, options).local_problem()
        if error is not None:
            raise error

    @abstractmethod
    def _exchange_headers(self, header: Sequence[int], group: Group, like: Tensor) -> list[list[int]]:
        """All-gather a list of int64 values; one list a rank, in group order."""

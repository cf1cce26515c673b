"""The class-sharded loss called by name, on plain local tensors: more options than the context takes.

Formulas: :mod:`hyper_parallel.platform.loss_kernels`. ``group`` is always the ranks that share the classes: a
process group, a :class:`Group`, or a mesh dim ``mesh["tp"]``; None: this rank holds all classes.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.loss_parallel.functional_checks import group_of, settle_cross_entropy
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.functional import get_loss_functions
from hyper_parallel.platform.loss_kernels import LossOptions
from hyper_parallel.platform.platform import Tensor

__all__ = ["vocab_parallel_cross_entropy"]

_platform, _functions = get_platform(), get_loss_functions()  # not looked up inside what a compiler traces


@get_platform().uncaptured
def vocab_parallel_cross_entropy(
    local_logits: Tensor,
    target: Tensor,
    group: Any,
    *,
    num_classes: int | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    inplace: bool = False,
    validate: bool | None = None,
    return_log_probs: bool = False,
    return_entropy: bool = False,
    overlap_blocks: int = 1,
) -> Any:
    """Cross-entropy of logits whose last dim is cut over ``group``, equal to ``F.cross_entropy`` on all of them.

    Works under ``torch.compile(fullgraph=True)``.

    Args:
        local_logits: ``[..., V_local]``, any floating dtype: this rank's classes, cut as ``torch.chunk`` does (trailing
            ranks may hold fewer, or none).
        target: ``[...]``, integers, equal on all ranks of the group: class numbers among all V.
        group: the ranks that share the classes; None: this one alone.
        num_classes: V. None: found out from the header of ``validate``; without it by an all-gather of 8 bytes a rank
            before anything else, which makes an accelerator wait; say it where speed matters.
        weight: ``[V]``, weights of all classes on every rank; not differentiable.
        ignore_index: tokens with this target count nothing, and their gradient is exactly 0.
        reduction: ``"mean"`` (over the weights of this call's tokens, NaN of none), ``"sum"``, or ``"none"``.
        label_smoothing: e of ``(1-e) w_y (lse - x_y) + e/V sum_c w_c (lse - x_c)``, as PyTorch has it.
        z_loss: adds ``z_loss * lse^2`` to each token's loss (arXiv 2204.02311); with ``"mean"``, and class weights, it
            is divided by the sum of the weights like the rest.
        inplace: the gradient takes the memory of the logits, which must be computed ones, whoever still holds them.
            Their values are lost in backward. No effect under ``torch.compile``. (Without it PyTorch's eager backward
            takes that memory where nobody else holds it.)
        validate: agree with the other ranks on the arguments and look at the targets first: whatever one rank finds
            wrong, or says differently, is the same error on every rank. False: each rank looks at its own shapes and
            options, and where it alone raises the others wait for it; a target outside ``[0, V)`` gives NaN for its
            token (loss, log-probability and gradient). None: as the context does it, True on CPU only.
        return_log_probs: also give ``log p_y`` of each token, without weights and smoothing; 0 where ignored.
        return_entropy: also give the entropy ``-sum_c p_c log p_c`` of each token; 0 where ignored.
        overlap_blocks: cut the tokens into this many blocks, equal on all ranks, and send what is to be sent of each
            while the next one is computed on. Worth trying where waiting for the network shows; see
            docs/guide/communication.md. No effect in MindSpore on CPU, where no collective is asynchronous.

    Returns:
        The loss (fp32, fp64 for fp64 logits): a scalar, or ``[...]`` with ``"none"``. With ``return_log_probs`` or
        ``return_entropy`` a tuple ``(loss, log_probs, entropy)`` of what was asked for, in this order; all of these are
        differentiable.

    Collectives:
        Forward one all-gather of 8 bytes a token (12 on accelerators, 4 more with smoothing, 4 more with the entropy;
        groups of more than 8 with much to send: two all-reduces). Before it, validating, one of a header of 24 bytes a
        rank; else, without ``num_classes``, one of 8;
        with ``overlap_blocks`` as many all-gathers, of a block each (as many all-reduces of maxima, then one).
        Backward none.

    Raises:
        LossParallelLayoutError: shapes that do not fit, classes not cut as ``torch.chunk`` does.
        LossParallelUnsupportedError: class probabilities as target, a weight that requires a gradient.
        IndexError: a target that is no class, if validating.
        TypeError, ValueError: dtypes, option values.

    Example:
        >>> import torch
        >>> from hyper_parallel import init_device_mesh, vocab_parallel_cross_entropy
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> logits = torch.tensor([[2.0, 0.0, 0.0]], requires_grad=True)
        >>> loss = vocab_parallel_cross_entropy(logits, torch.tensor([0]), mesh["tp"], label_smoothing=0.1)
        >>> round(loss.item(), 4)
        0.3731
    """
    options = LossOptions(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        inplace=inplace,
        validate=validate,
        log_probs=return_log_probs,
        entropy=return_entropy,
        overlap_blocks=overlap_blocks,
        reduction=reduction,
    )
    found = _functions.token_outputs(
        local_logits, target, weight, group_of(group), num_classes, options, settle_cross_entropy
    )
    loss = found.loss
    if reduction != "none":
        loss = _platform.sum_tokens(loss)
        if reduction == "mean":
            loss = _platform.divide(loss, _platform.sum_tokens(found.token_weight))
    if not (return_log_probs or return_entropy):
        return loss
    more = (found.log_prob if return_log_probs else None, found.entropy if return_entropy else None)
    return (loss, *(x for x in more if x is not None))

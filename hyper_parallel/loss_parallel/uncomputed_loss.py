"""The framework's cross-entropy of logits that are not computed: last layer and loss in one."""

from __future__ import annotations

from hyper_parallel.core.dtensor import DTensor
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Replicate, Shard
from hyper_parallel.core.state import State
from hyper_parallel.errors import LossParallelLayoutError, LossParallelUnsupportedError
from hyper_parallel.loss_parallel.agreed import agreed
from hyper_parallel.loss_parallel.inputs import LossInputs, prepare
from hyper_parallel.loss_parallel.uncomputed import UncomputedLogits
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import LossArguments, Tensor

__all__ = ["uncomputed_cross_entropy"]


def uncomputed_cross_entropy(call: LossArguments, state: State) -> DTensor:
    """``cross_entropy(logits, ...)`` by :func:`linear_cross_entropy`; the result lies as that of class-sharded logits.

    Raises:
        LossParallelLayoutError: outside ``loss_parallel()``, or a target or class dim that does not fit.
        LossParallelUnsupportedError: class weights, label smoothing, probability targets.
        IndexError: a target outside ``[0, C)``.
    """
    from hyper_parallel.loss_parallel.linear import linear_cross_entropy  # loads the kernels

    platform, logits = get_platform(), call.input
    assert isinstance(logits, UncomputedLogits)
    if not state.loss_parallel:
        raise LossParallelLayoutError(
            f"{call.kind} outside loss_parallel(), of the logits of a 'linear_loss' layer, which are not computed: "
            f"found {logits}. Enter loss_parallel(), or compute them with materialize()"
        )

    def make() -> LossInputs:
        if call.weight is not None:
            raise LossParallelUnsupportedError(
                "class weights go with logits that are computed: give the last layer 'colwise_loss_parallel', or call "
                "the loss on materialize()"
            )
        return prepare(call, mesh=state.mesh, may_gather=False)

    inputs = agreed(call, logits.hidden, make)
    assert inputs is not None
    layout, layer = logits.hidden_layout, logits.layer
    placement = layout.placements[0]
    dim = placement.dim if isinstance(placement, Shard) else None
    loss = linear_cross_entropy(
        logits.hidden,
        layer.weight,
        platform.reshape(inputs.target, layout.shape[:-1]),
        layout.mesh.get_group(),
        bias=layer.bias,
        num_classes=layer.num_classes,
        ignore_index=call.ignore_index,
        reduction=call.reduction,
        chunk_size=layer.chunk_size,
        sequence_parallel=dim is not None,
        sequence_dim=dim or 0,
        validate=False,  # agreed above
    )
    result = Layout(layout.mesh, [Replicate()], ())
    if call.reduction == "none":
        loss, result = platform.reshape(loss, inputs.token_layout.shape), inputs.token_layout
    dtensor: DTensor = platform.as_dtensor(DTensor, _in_dtype_of(loss, logits.probe), result)
    return dtensor


def _in_dtype_of(loss: Tensor, probe: Tensor) -> Tensor:
    """In the dtype that the loss of logits of ``probe``'s dtype has."""
    platform = get_platform()
    wide = platform.dtype_name(probe) == "float64"
    if platform.dtype_name(loss) == ("float64" if wide else "float32"):
        return loss
    return loss.to(probe.dtype if wide else probe.float().dtype)

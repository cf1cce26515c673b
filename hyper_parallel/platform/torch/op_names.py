"""PyTorch's operators by name: the many spellings of one operator share one name in the tables."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

__all__ = ["LOCAL_OP_NAMES", "LOSS_OP_NAMES", "get_op_name"]

_SAME = {
    "__add__": "add", "__radd__": "add", "__iadd__": "add_",
    "__sub__": "sub", "__isub__": "sub_", "__rsub__": "rsub", "subtract": "sub",
    "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul_", "multiply": "mul",
    "__truediv__": "div", "__itruediv__": "div_", "__rtruediv__": "rdiv", "__rdiv__": "rdiv",
    "__div__": "div", "__idiv__": "div_",
    "true_divide": "div", "divide": "div",
    "__floordiv__": "floor_divide", "__ifloordiv__": "floor_divide_", "__rfloordiv__": "rfloor_divide",
    "__mod__": "remainder", "__imod__": "remainder_", "__rmod__": "rremainder",
    "__pow__": "pow", "__ipow__": "pow_", "__rpow__": "rpow",
    "__matmul__": "matmul", "__rmatmul__": "rmatmul",
    "__neg__": "neg", "negative": "neg", "__abs__": "abs", "absolute": "abs", "__invert__": "bitwise_not",
    "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne",
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor",
    "__rand__": "bitwise_and", "__ror__": "bitwise_or", "__rxor__": "bitwise_xor",
    "__iand__": "bitwise_and_", "__ior__": "bitwise_or_", "__ixor__": "bitwise_xor_",
    "__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift", "__pos__": "positive",
    "__getitem__": "getitem", "__setitem__": "setitem", "__len__": "len",
    "concat": "cat", "concatenate": "cat", "swapaxes": "transpose", "swapdims": "transpose",
    "_softmax": "softmax", "_log_softmax": "log_softmax",
    "special_softmax": "softmax", "special_log_softmax": "log_softmax",
    "dropout1d": "feature_dropout", "dropout2d": "feature_dropout", "dropout3d": "feature_dropout",
}

LOSS_OP_NAMES = {
    "cross_entropy": "cross_entropy",
    "log_softmax": "log_softmax",
    "nll_loss": "nll_loss",
}
"""Operators that loss parallel takes over, and what each means. ``F.cross_entropy`` and ``CrossEntropyLoss`` reach the
dispatcher as one function; ``log_softmax`` and ``nll_loss`` are its decomposition, also when called on their own."""

LOCAL_OP_NAMES = frozenset(
    {
        "requires_grad", "requires_grad_", "is_leaf", "grad_fn", "retain_grad", "retains_grad", "backward",
        "register_hook", "register_post_accumulate_grad_hook", "_backward_hooks", "_post_accumulate_grad_hooks",
        "output_nr", "_version", "is_inference", "_is_view", "_base",
        "dtype", "device", "get_device", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized",
        "is_mkldnn", "is_nested", "is_xla", "is_mps", "is_xpu", "is_mtia", "is_maia", "is_vulkan", "is_ipu", "is_ort",
        "is_complex", "is_floating_point", "is_signed", "is_conj", "is_neg", "is_sparse_csr",
        "element_size", "itemsize", "is_contiguous", "is_pinned", "is_shared",
        "data_ptr", "untyped_storage", "_typed_storage", "names", "has_names", "grad_dtype",
    }
)
"""Autograd plumbing and questions about dtype, device and memory: answered by the local tensor as it is."""


@lru_cache(maxsize=4096)
def get_op_name(op_call: Any) -> str:
    """One name for all spellings: ``torch.add``, ``Tensor.add`` and ``+`` are ``"add"``.

    Property reads arrive as ``torch.Tensor.T.__get__`` and are named after the property.
    """
    name = getattr(op_call, "__name__", None) or str(op_call)
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(op_call.__self__, "__name__", name)
    packet = getattr(op_call, "overloadpacket", None)  # torch.ops.aten.x.default
    if packet is not None:
        name = packet.__name__
    return _SAME.get(name, name)

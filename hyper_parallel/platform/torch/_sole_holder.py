"""Whether autograd alone holds a tensor's memory, so that a gradient may be written there unseen.

Logits are as large as their gradient, and in most training steps nobody looks at them again once the loss is known:
``F.cross_entropy(model(x), y)`` drops them on return. PyTorch's compiler reuses such memory within its graphs under the
name of donated buffers; here it is counted, at the moment of backward, who else holds it.
"""

from __future__ import annotations

import sys

import torch

__all__ = ["is_sole_holder", "on_the_graph_of", "to_be_saved"]

# Without one of these nothing is known of other holders, and nothing is reused.
_users_of_storage = getattr(torch._C, "_storage_Use_Count", None)
_is_graph_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
_saved_tensor_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def on_the_graph_of(x: torch.Tensor, dim: int) -> torch.Tensor:
    """An empty tensor that depends on ``x`` and does not hold its memory, as every view would; else ``x`` itself."""
    return x.narrow(dim, 0, 0).clone() if torch.is_grad_enabled() and x.requires_grad else x


def to_be_saved(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """What a node should save for backward in place of its input, and whether :func:`is_sole_holder` applies to it.

    It is a tensor of its own on the same memory: what else holds ``x``, other nodes of the graph too, then counts as
    one more user of the memory. Saved-tensor hooks (offloading, recomputation) may keep what they are given, so where
    some are set the answer is no.
    """
    if type(x) is not torch.Tensor or torch.compiler.is_compiling():
        return x, False
    if _users_of_storage is None or _is_graph_kept is None or _saved_tensor_hooks is None:
        return x, False
    return (x.detach(), True) if _saved_tensor_hooks(False) is None else (x, False)


def is_sole_holder(x: torch.Tensor) -> bool:
    """To be asked in backward, of a saved tensor that one local variable of the caller holds.

    False also where the graph is kept for another backward, which will want the values again.
    """
    if _users_of_storage is None or _is_graph_kept is None or _is_graph_kept():
        return False
    storage = x.untyped_storage()
    # The memory: x and the object just made. x: autograd, the caller's variable, the parameter, getrefcount's own.
    return bool(_users_of_storage(storage._cdata) == 2 and sys.getrefcount(x) <= 4)

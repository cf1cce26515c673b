"""The context that turns loss parallel on, and the factory that trainers use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from hyper_parallel.config import ParallelismConfig
from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.state import changed_state, current_state
from hyper_parallel.platform import get_platform

__all__ = ["TrainContext", "get_train_context", "is_loss_parallel_active", "loss_parallel"]


class TrainContext(Protocol):
    """What a trainer and its validator share: each call gives a fresh context manager."""

    def __call__(self) -> AbstractContextManager[None]: ...


@contextmanager
def loss_parallel(mesh: Any = None, strict: bool | None = None) -> Iterator[None]:
    """Inside it, cross-entropy of logits sharded over the classes is the single-device loss, without a gather.

    Takes over ``F.cross_entropy`` / ``CrossEntropyLoss`` (and ``log_softmax``, ``nll_loss``) for DTensors whose class
    dim is sharded on one mesh dim; everything else runs as before. Nests: inner settings win, outer ones come back.
    Only the thread (and context) that enters sees it. ``backward()`` may run inside or outside: the graph node owns all
    it needs.

    Args:
        mesh: the 1-D mesh whose ranks share the classes, ours or the framework's. None: read from the logits.
        strict: True: logits that do not lie as expected are an error. False: a warning, and the classes are gathered.
            None: ``ParallelismConfig.loss_parallel_strict_mesh`` of the surrounding train context, else True.

    Raises:
        TypeError: ``mesh`` is not a mesh.
        ValueError: ``mesh`` has more than one dim.

    Differs from ``torch.distributed.tensor.parallel.loss_parallel``: the two arguments, nesting, threads, exceptions,
    class weights with ignored tokens, uneven and empty shards, N-D meshes.

    Example:
        >>> with loss_parallel():                                # doctest: +SKIP
        ...     loss = F.cross_entropy(logits, labels)
        ...     loss.backward()
    """
    checked = _check_mesh(mesh)
    config = current_state().config
    if config.disable_loss_parallel:
        yield
        return
    resolved = config.loss_parallel_strict_mesh if strict is None else bool(strict)
    with ExitStack() as stack:
        stack.enter_context(changed_state(loss_parallel=True, strict=resolved, mesh=checked))
        stack.enter_context(_native_hook())
        yield


def is_loss_parallel_active() -> bool:
    """Whether the running code is inside ``loss_parallel()``, in this thread and context."""
    return current_state().loss_parallel


def get_train_context(enable_loss_parallel: bool, config: ParallelismConfig | None = None) -> TrainContext:
    """What to put around forward, loss and backward; the same one serves training and validation.

    Args:
        enable_loss_parallel: usually ``config.loss_parallel_enabled``.
        config: the root of ``strict`` and of the fallback inside the context; also when loss parallel is off, so that
            ``loss_parallel_fallback_on_layout_error`` works there.

    Example:
        >>> train_context = get_train_context(config.loss_parallel_enabled, config)      # doctest: +SKIP
        >>> with train_context():                                                       # doctest: +SKIP
        ...     loss_fn(model(tokens), labels).backward()
    """

    @contextmanager
    def train_context() -> Iterator[None]:
        with ExitStack() as stack:
            if config is not None:
                stack.enter_context(changed_state(config=config))
            if enable_loss_parallel:
                stack.enter_context(loss_parallel())
            yield

    return train_context


def _check_mesh(mesh: Any) -> DeviceMesh | None:
    if mesh is None or isinstance(mesh, DeviceMesh):
        checked: DeviceMesh | None = mesh
    else:
        try:
            checked = DeviceMesh.from_native(mesh)
        except TypeError:
            found = type(mesh).__name__
            raise TypeError(
                f"loss_parallel(mesh=...) takes a DeviceMesh, hyper_parallel's or the framework's, found {found}"
            ) from None
    if checked is not None and checked.ndim != 1:
        raise ValueError(
            "loss_parallel(mesh=...) takes the 1-D mesh of the ranks that share the classes, found "
            f"{checked.describe()}; pass a sub-mesh such as mesh['tp']"
        )
    return checked


def _native_hook() -> AbstractContextManager[Any]:
    from hyper_parallel.loss_parallel.dispatch import intercept_native

    intercept: Callable[..., Any] = intercept_native
    return get_platform().loss_parallel_hook(intercept)

"""Which operators loss parallel takes over, by the platform's operator names."""

from __future__ import annotations

from collections.abc import Iterator, Set

from hyper_parallel.platform import get_platform

__all__ = ["LOSS_PARALLEL_OP_NAMES", "loss_kind", "register_loss_parallel_op_names"]

_KINDS = ("cross_entropy", "log_softmax", "nll_loss")
_registered: dict[str, str] = {}


class _OpNames(Set[str]):
    """The platform's names and the registered ones; a live, read-only set."""

    def __contains__(self, name: object) -> bool:
        return name in get_platform().loss_op_names or name in _registered

    def __iter__(self) -> Iterator[str]:
        yield from sorted({*get_platform().loss_op_names, *_registered})

    def __len__(self) -> int:
        return len({*get_platform().loss_op_names, *_registered})

    def __repr__(self) -> str:
        return f"LOSS_PARALLEL_OP_NAMES({list(self)})"


LOSS_PARALLEL_OP_NAMES: Set[str] = _OpNames()
"""Names, as ``platform.get_op_name`` gives them, of the operators that ``loss_parallel()`` takes over."""


def register_loss_parallel_op_names(*names: str, kind: str = "cross_entropy") -> None:
    """Let loss parallel take over further operators.

    Args:
        names: operator names as ``platform.get_op_name`` gives them.
        kind: what they compute: ``"cross_entropy"``, ``"log_softmax"`` or ``"nll_loss"``; their arguments must be
            those of the framework's function of that name.

    Raises:
        ValueError: an unknown kind, or a name that means something else already.

    Example:
        >>> register_loss_parallel_op_names("my_cross_entropy")
        >>> "my_cross_entropy" in LOSS_PARALLEL_OP_NAMES
        True
    """
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {_KINDS}, found {kind!r}")
    for name in names:
        known = get_platform().loss_op_names.get(name, _registered.get(name))
        if known is not None and known != kind:
            raise ValueError(f"operator {name!r} is registered as {known!r}; found {kind!r}")
    _registered.update(dict.fromkeys(names, kind))


def loss_kind(name: str) -> str | None:
    """What an operator name means to loss parallel; None: nothing."""
    return get_platform().loss_op_names.get(name) or _registered.get(name)

"""``save_pretrained`` of a model that is shared between ranks is an error: it would write one rank's parts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

from hyper_parallel.platform.modules import Module, get_module_backend

__all__ = ["refuse_save_pretrained"]

_METHOD = "save_pretrained"


def refuse_save_pretrained(model: Module, cut: Iterable[Module], ranks: int) -> None:
    """Put an error in the place of the method of ``model``, and of the modules in it, that hold a module of ``cut``.

    An attribute of the instance: the class, and other models of it, are left as they are. It is made of top-level
    functions and words, so that the model can still be copied and pickled.
    """
    shared = {id(module) for module in cut}
    backend = get_module_backend()
    for _, module in backend.named_modules(model):
        if callable(getattr(module, _METHOD, None)) and any(
            id(inner) in shared for _, inner in backend.named_modules(module)
        ):
            setattr(module, _METHOD, partial(_refuse, type(module).__name__, ranks))


def _refuse(name: str, ranks: int, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        f"{name}.{_METHOD} would write this rank's parts as if they were the whole model, which parallelize_module "
        f"shared between {ranks} ranks. Call save_hf_checkpoint(model, path) on every rank instead: it writes whole "
        "tensors, which transformers load"
    )

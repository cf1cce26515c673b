"""On which platforms and numbers of ranks a conformance test runs, and what each platform offers to be tried."""

from __future__ import annotations

import pytest

_SIZES = {"torch": (1, 2, 3, 4, 5, 8), "mindspore": (1, 2, 4)}
"""Ranks that a group of the platform may have. A platform is listed once it has a file in ``adapters``."""

_USUAL_SIZES = (1, 2, 3, 4)

ENTRIES = {
    "torch": (
        "function",
        "module",
        "decomposed",
        "decomposed_methods",
        "decomposed_modules",
        "native_function",
        "native_module",
        "native_decomposed",
    ),
    "mindspore": (
        "function",
        "mint_function",
        "captured_function",
        "captured_mint_function",
        "module",
        "mint_module",
        "decomposed",
        "decomposed_mint",
        "decomposed_modules",
    ),
}
"""Ways a user writes the loss, by the names that the platform's adapter gives them."""

OUR_ENTRIES = {
    platform: tuple(entry for entry in entries if not entry.startswith("native"))
    for platform, entries in ENTRIES.items()
}
"""Those that take the library's own DTensors."""

NATIVE_ENTRIES = {
    platform: tuple(entry for entry in entries if entry.startswith("native")) for platform, entries in ENTRIES.items()
}
"""Those that take the framework's own distributed tensors, where it has any."""

FLOATS = {
    "torch": ("float32", "float64", "bfloat16", "float16"),
    "mindspore": ("float32", "float64", "bfloat16", "float16"),
}
HALVES = {
    platform: tuple(dtype for dtype in dtypes if dtype in ("bfloat16", "float16"))
    for platform, dtypes in FLOATS.items()
}

TARGET_DTYPES = {
    "torch": ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"),
    "mindspore": ("int64", "int32", "int16", "int8", "uint8"),
}


def on_groups(*sizes: int) -> pytest.MarkDecorator:
    """Parametrise ``platform`` and ``world_size``: every platform, with those of ``sizes`` (1 to 4) that it has."""
    wanted = sizes or _USUAL_SIZES
    return pytest.mark.parametrize(
        ("platform", "world_size"),
        [
            pytest.param(platform, size, id=f"{platform}-{size}")
            for platform, possible in _SIZES.items()
            for size in wanted
            if size in possible
        ],
    )


def on_offers(offers: dict[str, tuple[str, ...]], name: str, *sizes: int) -> pytest.MarkDecorator:
    """As :func:`on_groups`, with a third parameter ``name``: each of what the platform offers, if anything."""
    wanted = sizes or _USUAL_SIZES
    return pytest.mark.parametrize(
        ("platform", "world_size", name),
        [
            pytest.param(platform, size, offer, id=f"{platform}-{size}-{offer}")
            for platform, possible in _SIZES.items()
            for size in wanted
            if size in possible
            for offer in offers.get(platform, ())
        ],
    )

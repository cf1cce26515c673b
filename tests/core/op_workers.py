"""What the workers run for test_ops."""

from __future__ import annotations

from tests.core.op_cases import ALL
from tests.core.op_checks import check, mesh_of


def check_theme(theme: str, mesh_shape: tuple[int, ...]) -> dict[str, dict[str, int]]:
    """Every case of a theme; counts by case."""
    mesh = mesh_of(mesh_shape)
    return {name: dict(check(case, name, mesh)) for name, case in ALL[theme].items()}

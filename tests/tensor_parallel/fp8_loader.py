"""A loader kind in a user's own file: registered by importing it, nothing else is touched."""

from __future__ import annotations

from hyper_parallel.tensor_parallel.shard_loader import (
    DimShardLoader,
    ParallelRule,
    ShardLoader,
    register_loader,
)


@register_loader("column_fp8")
def column_fp8(rule: ParallelRule, suffix: str) -> ShardLoader:
    """Cut as a column-parallel layer."""
    return DimShardLoader(0)

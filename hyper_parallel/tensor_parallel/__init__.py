"""Tensor parallelism: layers, plans, weights."""

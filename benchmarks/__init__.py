"""Measurements beside other libraries: ``python -m benchmarks --help`` from the repository root."""

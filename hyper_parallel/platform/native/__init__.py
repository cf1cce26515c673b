"""Compiled arithmetic for CPUs, the same for both backends; what is not compiled is computed with their operators."""

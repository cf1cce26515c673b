"""Operator dispatch: from a framework call on DTensors to a call on local tensors."""

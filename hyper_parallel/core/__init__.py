"""Meshes, layouts, DTensors and operator dispatch; independent of the framework."""

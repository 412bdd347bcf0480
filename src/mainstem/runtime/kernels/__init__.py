"""Layers of a model by kernels of our own; recorded steps of a GPU."""

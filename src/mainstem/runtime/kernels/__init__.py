"""Layers of a model by kernels of our own, each proven against the code that it replaces; recorded steps of a GPU."""

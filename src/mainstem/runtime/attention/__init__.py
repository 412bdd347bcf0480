"""Attention over pages and over the tree of a batch, on a CPU and on a GPU."""

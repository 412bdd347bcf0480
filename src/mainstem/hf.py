"""Mainstem under transformers: `hf.cached(model)` makes `model.generate()` find and keep prefixes by itself."""

from mainstem.integrations.transformers import Cached, GenerateStats, cached

__all__ = ["Cached", "GenerateStats", "cached"]

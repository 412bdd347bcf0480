"""Tiny random models that take images: those that the benchmark of models runs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/ is not part of the package

from bench.tiny_vision import CONTEXT, FAMILIES, picture, save, template, tokenizer

__all__ = ["CONTEXT", "FAMILIES", "picture", "save", "template", "tokenizer"]

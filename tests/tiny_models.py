"""Tiny random models of many architectures: those that the benchmark of models runs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/ is not part of the package

from bench.tiny_models import CONTEXT, FAMILIES, HYBRIDS, STEPPED, VOCAB, WINDOWED, loaded, tiny

__all__ = ["CONTEXT", "FAMILIES", "HYBRIDS", "STEPPED", "VOCAB", "WINDOWED", "loaded", "tiny"]

"""Prompts that share prefixes, a slow cache of them, and a model whose costs fit a page, for tests of replays."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from mainstem.replay.plan.costs import Layer, ModelShape
from mainstem.replay.plan.hardware import Device

Path = tuple[int, ...]

# One layer: 8 numbers a token in bf16 are 16 bytes; 100 parameters; no cost of attention; logits of 2 x 4 x 5 FLOPs.
SHAPE = ModelShape("tiny", (Layer(kv_numbers=8, parameters=100, active_parameters=100),), 4, 5, tied=True)
# 240 bytes hold the weights, 2 x 120 bytes; 640 are left for KV: 4 blocks of 10 tokens.
DEVICE = Device("toy", 880.0, 1e12, 1000.0, None, 160.0, "made up", 100.0, 2.0)
BLOCK = 160  # bytes


def prefixes(path: Path) -> list[Path]:
    """Returns the paths that end at each block of this one."""
    return [path[: i + 1] for i in range(len(path))]


def named(path: Path) -> list[int]:
    """Returns a name for each block, which covers those before it."""
    return [hash(prefix) % 2**62 for prefix in prefixes(path)]


def some_paths(seed: int, requests: int) -> list[Path]:
    """Returns prompts that share prefixes; some extend earlier ones, and some come again."""
    choose = random.Random(seed)
    paths: list[Path] = []
    for _ in range(requests):
        begin = choose.choice(paths)[: choose.randrange(8)] if paths and choose.random() < 0.6 else ()
        path = begin + tuple(choose.randrange(3) for _ in range(choose.randrange(1, 6)))
        paths.append(choose.choice(paths) if paths and choose.random() < 0.2 else path)
    return paths


class Lru:
    """Blocks under names that cover those before them, the least recently used first; of one request, the deepest."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: OrderedDict[Hashable, None] = OrderedDict()

    def found(self, names: Sequence[Hashable]) -> int:
        return next((i for i, name in enumerate(names) if name not in self.held), len(names))

    def serve(self, names: Sequence[Hashable]) -> None:
        for name in reversed(names):
            self.held[name] = None
            self.held.move_to_end(name)
        while len(self.held) > self.capacity:
            self.held.popitem(last=False)

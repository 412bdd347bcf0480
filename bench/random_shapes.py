"""Compares a policy with lru on random workloads: shapes flooded, scanned, renewed and in turns, and random sessions.

    python -m bench.random_shapes gittins --seeds 0:300

Searches for the workload on which the policy loses most. Equal seeds give equal workloads.
"""

from __future__ import annotations

import argparse
import math
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from bench import shapes
from mainstem.replay.generate import Agents, Chat, Documents, Prompts, Tenants, Workload, generate
from mainstem.replay.simulate.sweep import replay
from mainstem.replay.trace import Trace

CAPACITIES = (1, 5, 25, 50)  # percent of the distinct blocks


class Cell(NamedTuple):
    """A policy relative to lru, in percentage points of block hit rate."""

    gain: float
    seed: int
    percent: int
    capacity_blocks: int
    lru: float
    workload: str


class Draw:
    """Random settings, and a description of what was drawn."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng([77, seed])
        self.words: list[str] = []

    def between(self, low: float, high: float) -> float:
        """Draws a log-uniform number."""
        return float(np.exp(self.rng.uniform(np.log(low), np.log(high))))

    def say(self, words: str) -> None:
        self.words.append(words)


def plain(draw: Draw, requests: int) -> shapes.Items:
    """Draws items requested in a loop, by popularity, by recency, or twice."""
    rng = draw.rng
    kind = rng.choice(["loop", "popular", "recent", "twice"], p=[0.25, 0.3, 0.3, 0.15])
    if kind == "loop":
        items = int(draw.between(20, max(21, requests / 2)))
        draw.say(f"loop {items}")
        return shapes.loop(requests, items)
    if kind == "popular":
        items, zipf = int(draw.between(50, requests)), round(rng.uniform(0.3, 1.3), 2)
        draw.say(f"popular {items} zipf {zipf}")
        return shapes.popular(rng, requests, items, zipf)
    if kind == "recent":
        new = round(draw.between(0.05, 0.6), 2)
        draw.say(f"recent {new}")
        return shapes.recent(rng, requests, new)
    gap = int(draw.between(20, requests / 4))
    draw.say(f"twice {gap}")
    return shapes.twice(requests, gap)


def disturbed(draw: Draw, wanted: shapes.Items) -> shapes.Items:
    """Adds new items between them, scans over them, or replaces them periodically; or changes nothing."""
    rng, requests = draw.rng, len(wanted)
    kind = rng.choice(["", "flooded", "scanned", "renewed"], p=[0.5, 0.2, 0.15, 0.15])
    if kind == "flooded":
        share = round(rng.uniform(0.05, 0.8), 2)
        draw.say(f"flooded {share}")
        return shapes.flooded(rng, wanted, share)
    if kind == "scanned":
        every = int(rng.integers(requests // 40, requests // 3))
        length = int(every * rng.uniform(0.05, 0.7)) + 1
        draw.say(f"scanned {every} {length}")
        return shapes.scanned(wanted, every, length)
    if kind == "renewed":
        every = int(rng.integers(requests // 40, requests // 2))
        draw.say(f"renewed {every}")
        return shapes.renewed(wanted, every)
    return wanted


def sessions(draw: Draw) -> Workload:
    """Draws a workload of the generator with random settings."""
    between, uniform = draw.between, draw.rng.uniform
    kind = draw.rng.choice(["chat", "agents", "documents", "prompts", "tenants"])
    drift = between(100, 5000) if draw.rng.random() < 0.4 else math.inf
    made: Workload
    if kind == "chat":
        made = Chat(
            turns=between(1.2, 15),
            think_s=between(5, 1500),
            think_sigma=uniform(0, 2),
            question_tokens=between(20, 800),
            answer_tokens=between(50, 1000),
            prompts=int(between(1, 200)),
            prompt_tokens=between(50, 5000),
        )
    elif kind == "agents":
        made = Agents(
            burst=between(1, 8),
            steps=between(3, 40),
            tool_s=between(1, 200),
            tool_sigma=uniform(0.2, 2),
            prompts=int(between(1, 50)),
        )
    elif kind == "documents":
        made = Documents(
            documents=int(between(20, 20000)),
            zipf=uniform(0.3, 1.3),
            questions=between(1, 8),
            think_s=between(5, 600),
            drift_s=drift,
        )
    elif kind == "prompts":
        made = Prompts(
            prompts=int(between(2, 2000)),
            zipf=uniform(0.3, 1.4),
            drift_s=drift,
            prompt_tokens=between(300, 8000),
        )
    else:
        made = Tenants(
            prompts=int(between(5, 3000)),
            zipf=uniform(0.3, 1.3),
            turns=between(1, 6),
            drift_s=drift,
        )
    draw.say(str(made))
    return made


def workload(seed: int) -> tuple[Trace, str]:
    """Returns a trace of 15,000 to 300,000 block accesses, and its description."""
    draw = Draw(seed)
    rng = draw.rng
    accesses = int(draw.between(15_000, 300_000))
    if rng.random() < 0.3:
        kind = sessions(draw)
        block = int(rng.choice([32, 128, 512]))
        per_request = len(generate(kind, 300, seed=seed, block_size=block).whole.blocks) / 300
        requests = max(100, int(accesses / per_request))
        return generate(kind, requests, seed=seed, block_size=block), f"blocks of {block}: {draw.words[0]}"
    mean = float(rng.choice([1, 1.5, 3, 6, 20]))
    requests = max(400, int(accesses / mean))
    parts = int(rng.choice([1, 2, 2, 3]))
    wanted = disturbed(draw, plain(draw, requests // parts))
    for _ in range(parts - 1):
        draw.say("|")
        other = disturbed(draw, plain(draw, requests // parts))
        every = requests // parts if rng.random() < 0.3 else int(draw.between(requests / 200, requests / parts))
        if parts == 3 or len(wanted) == len(other):
            wanted = shapes.in_turns(wanted, other, every)
        else:
            wanted = np.concatenate([wanted, other + int(wanted.max()) + 1])
        draw.say(f"every {every}")
    return shapes.as_trace(wanted, mean_blocks=mean, seed=seed), f"{mean} blocks each: {' '.join(draw.words)}"


def cells(policy: str, seed: int) -> list[Cell]:
    """Returns the cells of the policy at each capacity of a workload."""
    trace, words = workload(seed)
    found = []
    for percent in CAPACITIES:
        capacity = trace.distinct_blocks * percent // 100
        if capacity < 8:
            continue
        lru, own = (100 * replay(trace, name, capacity).block_hit_rate for name in ("lru", policy))
        found.append(Cell(own - lru, seed, percent, capacity, lru, words))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy")
    parser.add_argument("--seeds", default="0:300", help="FIRST:END")
    parser.add_argument("--show", type=int, default=10, help="number of worst cells to show")
    asked = parser.parse_args()
    first, end = map(int, asked.seeds.split(":"))
    with ThreadPoolExecutor(2) as pool:
        found = sorted(
            cell for some in pool.map(lambda seed: cells(asked.policy, seed), range(first, end)) for cell in some
        )
    for cell in found[: asked.show]:
        print(
            f"{cell.gain:+.3f}  seed {cell.seed}, {cell.percent} % ({cell.capacity_blocks:,} blocks), "
            f"lru {cell.lru:.1f} %: {cell.workload}"
        )
    gains = [cell.gain for cell in found]
    print(
        f"{len(gains):,} cells: worst {min(gains):+.3f}, below -0.3: {sum(gain < -0.3 for gain in gains)}, "
        f"mean {sum(gains) / len(gains):+.2f} points"
    )


if __name__ == "__main__":
    main()

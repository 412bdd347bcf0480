"""What one tenant learns of another: nothing, but that the cache is full.

An attacker guesses what a victim has asked, asks it itself, and looks at the time to its first token and at its cached
tokens. Time is counted in steps of the real scheduler, which takes few tokens a step, so that each page that need not
be computed shows. Room is not contended for: that the cache is full is no secret.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from rigs.ghost import VOCAB
from rigs.scheduler import PAGE, Bench

from mainstem.cache.quotas import Quota, Quotas, Share
from mainstem.runtime.hints.public import PublicPrefixes

PROBES = 500  # of each class
LENGTH = 6 * PAGE
PUBLIC = [7] * (3 * PAGE)
Probe = Callable[[Bench, Sequence[int]], float]


def area(hits: Sequence[float], misses: Sequence[float]) -> tuple[float, float]:
    """Returns the area under the ROC curve, and the upper end of its interval of 95 % (Hanley and McNeil 1982)."""
    left, right = np.array(hits)[:, None], np.array(misses)[None, :]
    a = float((left > right).mean() + (left == right).mean() / 2)
    a = max(a, 1 - a)
    q1, q2, n, m = a / (2 - a), 2 * a * a / (1 + a), len(hits), len(misses)
    variance = (a * (1 - a) + (n - 1) * (q1 - a * a) + (m - 1) * (q2 - a * a)) / (n * m)
    return a, a + 1.96 * math.sqrt(max(variance, 0.0))


def first_token_steps(bench: Bench, id: str) -> float:
    """Runs until a request has its first token; returns the steps."""
    began = bench.now_s
    while not any(delta.tokens for delta in bench.deltas[id]):
        bench.step()
    return bench.now_s - began


def attack(
    attacker: str, *, public: bool, load: bool = True
) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Probes prompts that the victim asked, and others; returns (steps to the first token, cached tokens) of each."""
    rng = random.Random(3)
    bench = Bench(20_000, token_budget=PAGE, draft_tokens=0)
    bench.check = lambda: None  # type: ignore[method-assign]  # a full check of 20,000 pages each step
    quota = Quota(Share(maximum=0.4))
    bench.cache.tenants.set_quotas(Quotas({"victim": quota, "attacker": quota}))
    shared = PublicPrefixes(bench.cache, bench.ghost.copy_page)
    if public:
        bench.one(PUBLIC)
        bench.cache.retention.pin(PUBLIC)
        shared.add(PUBLIC)
    begin = PUBLIC if public else []

    def ask(tokens: Sequence[int], namespace: str) -> str:
        request = [*begin, *tokens]
        shared.adopt(bench.encoded(request), namespace)
        return bench.add(request, namespace=namespace, max_tokens=1, ignore_eos=True)

    found: tuple[list[tuple[float, ...]], list[tuple[float, ...]]] = ([], [])
    prompts = [[rng.randrange(1, VOCAB - 1) for _ in range(LENGTH)] for _ in range(2 * PROBES)]
    for prompt in prompts[:PROBES]:
        ask(prompt, "victim")
        bench.run()
    for at in rng.sample(range(2 * PROBES), 2 * PROBES):
        if load and rng.random() < 0.3:  # others are served beside the probe
            ask([rng.randrange(1, VOCAB - 1) for _ in range(rng.randint(1, LENGTH))], "somebody else")
        id = ask(prompts[at], attacker)
        steps = first_token_steps(bench, id)
        bench.run()
        found[at >= PROBES].append((steps, bench.hit(id)))
    return found


@pytest.mark.parametrize("public", [False, True], ids=["all apart", "a public prefix"])
def test_an_attacker_cannot_tell_what_another_tenant_has_asked(public: bool) -> None:
    asked, others = attack("attacker", public=public)
    for observed in (0, 1):  # steps, and cached tokens
        _, upper = area([each[observed] for each in asked], [each[observed] for each in others])
        assert upper <= 0.55
    begin = len(PUBLIC) if public else 0  # and what random prompts have in common: less than a page
    assert all(begin <= cached < begin + PAGE for _, cached in [*asked, *others])


def test_the_same_attack_succeeds_within_a_tenant() -> None:
    asked, others = attack("victim", public=False)
    assert area([-steps for steps, _ in asked], [-steps for steps, _ in others])[0] >= 0.9
    assert area([cached for _, cached in asked], [cached for _, cached in others])[0] >= 0.99

"""Public prefixes: computed once, copied into the namespace of each tenant whose prompts begin with one."""

from __future__ import annotations

import numpy as np
import pytest
from rigs.scheduler import PAGE, Bench

from mainstem.cache.components import Full, State
from mainstem.cache.namespaces import Namespace
from mainstem.runtime.hints.public import PublicPrefixes

PUBLIC = list(range(1, 1 + 3 * PAGE))
TENANTS = ["a", "b"]


def ready(bench: Bench) -> PublicPrefixes:
    """Computes and declares the prefix."""
    bench.one(PUBLIC)
    bench.cache.retention.pin(PUBLIC)
    shared = PublicPrefixes(bench.cache, bench.ghost.copy_page)
    assert shared.add([*PUBLIC, 9]) == len(PUBLIC)
    return shared


def ask(bench: Bench, shared: PublicPrefixes, tokens: list[int], namespace: str | None) -> tuple[str, int]:
    """Returns the request, and the tokens that were copied for it."""
    copied = shared.adopt(bench.encoded(tokens), namespace)
    id = bench.add(tokens, namespace=namespace, max_tokens=2, ignore_eos=True)
    bench.run()
    return id, copied


def test_each_tenant_hits_a_public_prefix_at_its_first_request() -> None:
    bench = Bench()
    shared = ready(bench)
    before = bench.cache.stats().leases
    for at, tenant in enumerate(TENANTS):
        id, copied = ask(bench, shared, [*PUBLIC, 20 + at, 21], tenant)
        assert bench.hit(id) == copied == len(PUBLIC)
        _, copied = ask(bench, shared, [*PUBLIC, 20 + at, 30], tenant)
        assert copied == 0  # it is there
    after = bench.cache.stats().leases
    assert after.queried - before.queried == 4 * (len(PUBLIC) + 2)  # a copy is no query
    tables = [bench.cache.tree.match(PUBLIC, tenant).page_ids.tolist() for tenant in (None, *TENANTS)]
    assert len({page for table in tables for page in table}) == 9  # no page is in two namespaces
    bench.cache.retention.clear()
    bench.run_and_flush()


def test_nothing_is_copied_that_is_not_public_whole_and_begun_with() -> None:
    bench = Bench()
    shared = ready(bench)
    for tokens in ([2, *PUBLIC], PUBLIC[:-1], [*PUBLIC[:-1], 30, 31]):
        assert shared.adopt(bench.encoded(tokens), "a") == 0
    assert shared.adopt(bench.encoded([*PUBLIC, 20]), None) == 0
    bench.cache.retention.clear()
    bench.cache.flush()
    assert shared.adopt(bench.encoded([*PUBLIC, 20]), "a") == 0  # it is gone
    bench.check_at_rest()


def test_the_longest_prefix_counts_and_what_is_there_is_not_copied_again() -> None:
    bench = Bench()
    shared = ready(bench)
    longer = [*PUBLIC, *range(20, 20 + PAGE)]
    bench.one(longer)
    assert shared.add(longer) == 4 * PAGE
    ask(bench, shared, [*PUBLIC, 30], "a")
    assert shared.adopt(bench.encoded([*longer, 31]), "a") == PAGE
    bench.run_and_flush()


def test_an_adapter_has_public_prefixes_of_its_own() -> None:
    bench = Bench()
    shared = ready(bench)
    tenant = Namespace(adapter="l", tenant="t")
    assert shared.adopt(bench.encoded([*PUBLIC, 20]), tenant) == 0
    own = bench.cache.lease([*PUBLIC, 1], Namespace(adapter="l"))
    own.reserve(len(PUBLIC))
    own.finish(len(PUBLIC))
    assert shared.adopt(bench.encoded([*PUBLIC, 20]), tenant) == len(PUBLIC)
    bench.check_at_rest()


def test_without_room_the_prefix_is_computed() -> None:
    bench = Bench(8)
    shared = ready(bench)
    with bench.cache.lease(np.arange(5 * PAGE), "b") as running:
        running.reserve(5 * PAGE)
        assert shared.adopt(bench.encoded([*PUBLIC, 20]), "a") == 0
    bench.cache.check()


def test_models_with_states_compute_it_for_each_tenant(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench({Full(): 64, State(): 24})
    shared = PublicPrefixes(bench.cache, bench.ghost.copy_page)
    shared.add(PUBLIC)
    assert "computed for each tenant" in caplog.text
    bench.one(PUBLIC)
    assert shared.adopt(bench.encoded([*PUBLIC, 20]), "a") == 0

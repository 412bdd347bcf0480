"""Makes the parts of an engine from its model and settings: the publisher of events, the cache, the scheduler."""

from __future__ import annotations

import logging
import random as random_module
from collections.abc import Callable, Mapping
from dataclasses import replace

from mainstem.cache.components import Component, by_name
from mainstem.cache.keys import TokenKeys, TypedKeys
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.events.publisher import Publisher
from mainstem.runtime.audit.auditor import Auditor, chunk_pages, own_pages
from mainstem.runtime.audit.prefix_audit import Means
from mainstem.runtime.memory.pools import build_cache
from mainstem.runtime.models.adapters import name_of
from mainstem.runtime.models.flops import flops_of
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.models.runner import ModelRunner
from mainstem.runtime.schedule.scheduler import Scheduler
from mainstem.settings.engine import EngineConfig
from mainstem.storage.base import Backend

log = logging.getLogger(__name__)


def make_publisher(loaded: LoadedModel, config: EngineConfig) -> Publisher | None:
    """Makes the publisher of events, on rank 0."""
    where = config.events
    if where.kv_events is None or loaded.ranks.rank > 0:
        return None
    if config.tiers.storage_secret is None:
        log.warning("KV events have no secret: their readers can guess salts")
    publisher = Publisher(where.kv_events, where.kv_events_replay, where.kv_events_keys, adapter_name=name_of)
    log.info("KV events at %s%s", publisher.endpoint, f", replays at {publisher.replay}" if publisher.replay else "")
    return publisher


def make_cache(
    loaded: LoadedModel,
    config: EngineConfig,
    model: ModelRunner,
    sizes: Mapping[Component, int],
    clock: Callable[[], float],
    publisher: Publisher | None,
    backend: Backend | None = None,
) -> PrefixCache:
    """Makes the cache over a runner's pools, perhaps with an opened store. If it fails, it closes the publisher."""
    keys = TokenKeys(model.vocab_size) if model.vision is None else TypedKeys(model.vocab_size)
    try:
        put = None if publisher is None else publisher.put
        cache = build_cache(loaded, config, model.memory, keys, sizes, clock, put, backend)
    except BaseException:
        if publisher is not None:
            publisher.close()
        raise
    if publisher is not None:
        assert cache.events is not None
        publisher.state = cache.events.state
    return cache


def audit_pages(config: EngineConfig, sizes: Mapping[Component, int]) -> dict[str, int]:
    """Returns how many pages or slots of each component audits have for themselves, beside those of the cache."""
    chunk = chunk_pages(config.token_budget, config.page_size)
    audits = config.audit_share > 0
    return {name: audits * own_pages(row, chunk, config.page_size) for name, row in by_name(sizes).items()}


def make_auditor(
    config: EngineConfig, model: ModelRunner, cache: PrefixCache, random: random_module.Random
) -> Auditor | None:
    """Makes the auditor of an engine; None: the settings want none, or the model is not exact, which the log says.

    Args:
        model: has pages for audits after those of the cache, see `audit_pages`.
    """
    if not config.audit_share:
        return None
    if model.inexact is not None:
        log.warning(
            "the cache is not audited, though --audit-share is given: the model is not exact: %s", model.inexact
        )
        return None
    planes = model.memory.planes
    own = [range(pool.total, each.pages) for pool, each in zip(cache.pools.values(), planes, strict=True)]
    chunk = chunk_pages(config.token_budget, config.page_size)
    draws = random_module.Random(random.getrandbits(64))
    return Auditor(Means(cache, model.forward, planes, own, chunk), config.audit_share, draws)


def make_scheduler(
    loaded: LoadedModel,
    config: EngineConfig,
    model: ModelRunner,
    cache: PrefixCache,
    clock: Callable[[], float],
    random: random_module.Random,
    auditor: Auditor | None = None,
) -> Scheduler:
    """Makes the scheduler of an engine. It drafts nothing where that would keep a step from being repeated."""
    if model.records_steps and config.draft_tokens:
        log.info("%s: decode steps are recorded, so nothing is drafted", loaded.name)
        config = replace(config, draft_tokens=0)
    context, ends = loaded.max_context, _eos_tokens(loaded)
    return Scheduler(
        cache,
        model,
        loaded.tokenizer,
        config,
        max_context=context,
        eos=ends,
        clock=clock,
        random=random,
        ranks=loaded.ranks,
        flops=flops_of(loaded.model),
        auditor=auditor,
        scores=model.memory.scores,
    )


def _eos_tokens(loaded: LoadedModel) -> frozenset[int]:
    """Returns the end tokens of the model's generation settings and of its tokenizer."""
    own = loaded.model.generation_config.eos_token_id if loaded.model.generation_config is not None else None
    ends = set(own) if isinstance(own, list) else {own}
    ends.add(loaded.tokenizer.eos_token_id)
    return frozenset(int(token) for token in ends if token is not None)

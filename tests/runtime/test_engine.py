from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from machine import eventually, patience
from rigs.ghost import EOS, VOCAB, Ghost, GhostTokenizer, complete, prompt
from transformers import PreTrainedModel

from bench.tiny_models import loaded as tiny_loaded
from bench.tiny_models import tiny
from mainstem.cache.keys import TokenKeys
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.cache.retention import Kept
from mainstem.errors import BadArgument, BadTokens, EngineClosed, EngineFull, RequestTooLong
from mainstem.runtime.engine import Engine
from mainstem.runtime.engine_core import EngineCore
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.request import Request
from mainstem.runtime.schedule.meter import Totals
from mainstem.runtime.schedule.scheduler import Scheduler
from mainstem.runtime.segments import Segment
from mainstem.runtime.stream import Stream
from mainstem.settings.engine import EngineConfig, EventConfig, HostSize, SamplingParams, TierConfig
from mainstem.storage import open_backend

WAIT_S = patience(20)


class Gate(Ghost):
    """A ghost whose forwards a test can stop."""

    adapters = SimpleNamespace(names=())
    vision = None
    records_steps = False
    inexact, computation = None, ()
    arithmetic = ""

    @property
    def memory(self) -> Any:
        return self

    def __init__(self, loaded: LoadedModel, pages: Mapping[str, int], page_size: int, *how: Any) -> None:
        super().__init__(pages["full"], page_size)
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.threads: set[int] = set()

    def forward(self, segments: Any) -> torch.Tensor:
        self.entered.set()
        self.threads.add(threading.get_ident())
        assert self.open.wait(WAIT_S)
        return super().forward(segments)


GATE: Any = Gate  # in place of a model's runner


@functools.cache
def _llama() -> PreTrainedModel:
    """A model of which only the shape and the end tokens matter: ghosts compute in its place."""
    model = tiny("llama", eos_token_id=EOS)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [EOS]
    return model


def _loaded(max_context: int = 256, model: PreTrainedModel | None = None) -> LoadedModel:
    tokenizer: Any = GhostTokenizer()
    return LoadedModel(model or _llama(), tokenizer, "ghost", torch.float32, max_context)


class Rig:
    """An engine over a gate that the test can reach."""

    def __init__(self, **config: Any) -> None:
        gates: list[Gate] = []

        def runner(*given: Any) -> Any:
            gates.append(Gate(*given))
            return gates[0]

        settings = EngineConfig(**{"pages": 64, "page_size": 4, **config})
        self.engine = Engine(_loaded(), settings, runner=runner, random=random.Random(0))
        self.gate = gates[0]

    def submit(self, seed: int = 1, length: int = 8, on_progress: Any = None, **params: Any) -> Stream:
        return self.engine.submit(request(seed, length, **params), on_progress=on_progress)


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**config: Any) -> Rig:
        rigs.append(Rig(**config))
        return rigs[-1]

    yield make
    for made in rigs:
        made.gate.open.set()
        made.engine.close()


def request(seed: int = 1, length: int = 8, **params: Any) -> Request:
    return Request(np.array(prompt(seed, length)), SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **params}))


# Output


@pytest.mark.parametrize("records", [False, True])
def test_nothing_is_drafted_where_steps_are_recorded(
    records: bool, rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second answer could be drafted from the first, which the cache has."""
    monkeypatch.setattr(Gate, "records_steps", records)
    with caplog.at_level("INFO"):
        made = rig()
    first, second = (made.submit(seed=3, max_tokens=24).result(timeout_s=WAIT_S) for _ in range(2))
    assert first.tokens == second.tokens
    assert (made.engine.stats().totals.drafted_tokens == 0) == records
    assert ("nothing is drafted" in caplog.text) == records


def test_a_stream_gives_the_whole_output_however_it_is_read(rig: Callable[..., Rig]) -> None:
    stream = rig().submit(seed=3, max_tokens=9)
    tokens, text, reason = complete(request(3, max_tokens=9))
    deltas = list(stream)
    assert tuple(token for delta in deltas for token in delta.tokens) == tokens
    assert "".join(delta.text for delta in deltas) == text
    assert [delta.finish_reason for delta in deltas] == [None] * 8 + [reason]
    assert list(stream) == deltas, "it can be read again"
    result = stream.result()
    assert (result.tokens, result.text, result.finish_reason) == (tokens, text, reason)
    assert result.usage == deltas[-1].usage


def test_a_stream_is_read_in_an_event_loop(rig: Callable[..., Rig]) -> None:
    made = rig()

    async def read(seed: int) -> tuple[int, ...]:
        stream = made.submit(seed=seed, max_tokens=30)
        return tuple([token async for delta in stream for token in delta.tokens])

    async def main() -> list[tuple[int, ...]]:
        return await asyncio.wait_for(asyncio.gather(*map(read, range(12))), WAIT_S)

    assert asyncio.run(main()) == [complete(request(seed, max_tokens=30))[0] for seed in range(12)]


def test_leaving_a_stream_early_does_not_end_the_request(rig: Callable[..., Rig]) -> None:
    made = rig()

    async def leave() -> Stream:
        stream = made.submit(max_tokens=40)
        async for _ in stream:
            break
        return stream

    stream = asyncio.run(leave())
    for _ in stream:
        break
    assert stream.result(WAIT_S).finish_reason == "length"


def test_a_closed_event_loop_affects_no_other_reader(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.gate.open.clear()
    stream = made.submit()
    loop = asyncio.new_event_loop()
    reader = aiter(stream)
    with pytest.raises(TimeoutError):
        loop.run_until_complete(asyncio.wait_for(_shielded(reader, loop), 0.02))
    loop.close()
    made.gate.open.set()
    assert stream.result(WAIT_S).tokens == complete(request())[0]
    assert made.submit(seed=2).result(WAIT_S).tokens == complete(request(2))[0]


async def _shielded(reader: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Waits for an event so that the reader keeps waiting when the waiter is cancelled."""
    await asyncio.shield(loop.create_task(anext(reader)))


def test_many_threads_submit_cancel_flush_and_read_at_once(rig: Callable[..., Rig]) -> None:
    made = rig(pages=24, token_budget=7, max_running=5)
    failures: list[BaseException] = []

    def client(number: int) -> None:
        rng = random.Random(number)
        try:
            for turn in range(12):
                seed, length = rng.randrange(6), rng.randint(1, 30)
                stream = made.submit(seed, length, max_tokens=8)
                if rng.random() < 0.2:
                    stream.cancel()
                if rng.random() < 0.1:
                    made.engine.flush()
                result = stream.result(WAIT_S)
                tokens = complete(request(seed, length, max_tokens=8))[0]
                assert result.tokens == tokens[: len(result.tokens)], turn
                assert result.finish_reason == "cancelled" or result.tokens == tokens
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not failures
    stats = made.engine.stats()
    assert (stats.running, stats.waiting, stats.totals.requests) == (0, 0, 96)
    assert stats.totals.cached_tokens > 0
    made.engine.flush()
    assert made.engine.stats().cache.pool.free == 24
    assert len(made.gate.threads) == 1 and threading.get_ident() not in made.gate.threads


def test_generate_takes_text_and_tokens_and_keeps_their_order(rig: Callable[..., Rig]) -> None:
    made = rig(max_waiting=2, max_running=2)
    prompts = ["ABCD", [3, 4, 5], *(prompt(i, 5) for i in range(10))]
    params = SamplingParams(max_tokens=4)
    results = made.engine.generate(prompts, params)
    tokens = [np.array(GhostTokenizer().encode(p) if isinstance(p, str) else p) for p in prompts]
    assert [r.tokens for r in results] == [complete(Request(t, params))[0] for t in tokens]


def test_generate_runs_nothing_if_one_prompt_can_not_run(rig: Callable[..., Rig]) -> None:
    made = rig()
    with pytest.raises(RequestTooLong):
        made.engine.generate([[1, 2], [1] * 300], SamplingParams(max_tokens=4))
    with pytest.raises(BadTokens):
        made.engine.generate([[1, 2], [VOCAB]], SamplingParams(max_tokens=4))
    assert made.engine.stats().totals.requests == 0


def test_generate_gives_up_its_own_when_others_fill_the_queue(rig: Callable[..., Rig]) -> None:
    made = rig(max_waiting=1, max_running=1)
    made.gate.open.clear()
    running = made.submit(1)
    assert made.gate.entered.wait(WAIT_S)
    waiting = made.submit(2)
    with pytest.raises(EngineFull):
        made.engine.generate([[1, 2]], SamplingParams(max_tokens=2))
    made.gate.open.set()
    assert running.result(WAIT_S).finish_reason == waiting.result(WAIT_S).finish_reason == "length"


def test_progress_of_the_prompt_is_reported(rig: Callable[..., Rig]) -> None:
    seen: list[tuple[int, int]] = []
    rig(token_budget=8).submit(length=20, on_progress=lambda done, total: seen.append((done, total))).result(WAIT_S)
    assert seen == [(0, 20), (8, 20), (16, 20), (20, 20)]


def test_a_progress_callback_that_fails_is_not_called_again_and_ends_no_request(rig: Callable[..., Rig]) -> None:
    calls = itertools.count()

    def on_progress(done: int, total: int) -> None:
        next(calls)
        raise ValueError("a bug of the caller")

    stream = rig(token_budget=2).submit(on_progress=on_progress)
    assert stream.result(WAIT_S).finish_reason == "length"
    assert next(calls) == 1


# Statistics


def test_stats_flush_and_tree_describe_the_cache(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.submit(1, 16, max_tokens=1).result(WAIT_S)
    made.submit(1, 16, max_tokens=1).result(WAIT_S)
    stats = made.engine.stats()
    totals = stats.totals
    assert (totals.requests, totals.prompt_tokens, totals.cached_tokens, totals.generated_tokens) == (2, 32, 15, 2)
    assert (stats.running, stats.waiting, totals.preemptions, stats.cache.pool.cached) == (0, 0, 0, 4)
    assert made.engine.tree()
    assert made.engine.flush() == 4
    assert made.engine.stats().cache.pool.cached == 0
    assert made.engine.flush() == 0


def test_stats_know_of_a_flush_as_soon_as_it_returns(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.submit(1, 16, max_tokens=1).result(WAIT_S)
    step, go_on = made.engine._core.scheduler.step, threading.Event()
    made.engine._core.scheduler.step = lambda: step() if go_on.wait(WAIT_S) else []  # type: ignore[method-assign]
    assert made.engine.flush() == 4
    assert made.engine.stats().cache.pool.cached == 0
    go_on.set()


def test_the_times_are_the_clocks() -> None:
    ticks = itertools.count()
    engine = Engine(_loaded(), EngineConfig(pages=8), clock=lambda: float(next(ticks)), runner=GATE)
    with engine:
        used = engine.submit(request()).result(WAIT_S).usage
    with pytest.raises(EngineClosed):
        engine.submit(request())  # the with block has closed it
    assert 0 < used.queue_s < used.ttft_s < used.duration_s
    assert all(value.is_integer() for value in (used.queue_s, used.ttft_s, used.duration_s))


def test_it_sleeps_while_there_is_nothing_to_do(rig: Callable[..., Rig]) -> None:
    made = rig()
    steps = itertools.count()
    step = made.engine._core.scheduler.step

    def counted(now_s: float) -> Any:
        next(steps)
        return step(now_s)

    made.engine._core.scheduler.step = counted  # type: ignore[method-assign]
    made.submit(max_tokens=2).result(WAIT_S)
    time.sleep(0.05)
    assert next(steps) <= 4


def test_what_is_queued_is_counted_step_by_step() -> None:
    ticks, seen, gates = itertools.count(), [], []

    class Watched(Gate):
        def forward(self, segments: Any) -> torch.Tensor:
            if gates:
                seen.append(engine.queued)
            return super().forward(segments)

    config = EngineConfig(pages=64, page_size=4, max_running=1, token_budget=4)
    runner: Any = lambda *given: gates.append(Watched(*given)) or gates[0]  # noqa: E731
    with Engine(_loaded(), config, clock=lambda: float(next(ticks)), runner=runner) as engine:
        gates[0].open.clear()
        streams = [engine.submit(request(1, 8, max_tokens=1))]
        assert gates[0].entered.wait(WAIT_S)
        streams += [engine.submit(request(seed, length, max_tokens=1)) for seed, length in ((2, 12), (3, 16))]
        gates[0].open.set()
        for stream in streams:
            stream.result(WAIT_S)
        eventually(lambda: engine.queued == 0)
    assert seen == [0, 4, *range(28, 0, -4)]


def test_the_pool_is_sized_from_bytes(caplog: pytest.LogCaptureFixture) -> None:
    model = _llama()
    page = 2 * 3 * 8 * 2 * 16 * 4  # k and v, layers, positions, heads, numbers per head, bytes
    config = EngineConfig(kv_bytes=5 * page + 1, page_size=8)
    with Engine(_loaded(model=model), config, runner=GATE) as engine:
        assert engine.pages == 5
        assert engine.max_context == 40, "no request can have more than the pool"
    assert "ghost: a request has at most 40 tokens" in caplog.text and "of the model's 256" in caplog.text
    caplog.clear()
    with Engine(_loaded(40, model), config, runner=GATE) as engine:
        assert engine.max_context == 40
    assert "at most" not in caplog.text, "the pool holds what the model takes"
    with pytest.raises(BadArgument, match=f"kv_bytes.*{page}"):
        Engine(_loaded(model=model), EngineConfig(kv_bytes=page - 1, page_size=8), runner=GATE)


def test_the_engine_shows_what_it_runs(rig: Callable[..., Rig]) -> None:
    engine = rig(pages=1000).engine
    assert (engine.name, engine.dtype, engine.pages, engine.max_context) == ("ghost", torch.float32, 1000, 256)
    assert engine.config.page_size == 4 and isinstance(engine.tokenizer, GhostTokenizer)


def test_the_engine_reports_the_stages_of_its_start(tmp_path: Path) -> None:
    storage = f"file:{tmp_path}/kv?capacity=1MiB"
    for tiers, expected in (
        (TierConfig(), ["test"]),
        (TierConfig(HostSize(host_ratio=1.0)), ["test", "tiers"]),
        (TierConfig(HostSize(host_ratio=1.0), storage=storage), ["test", "tiers", "measure"]),
    ):
        stages: list[tuple[str, int, int]] = []
        loaded = replace(tiny_loaded(tiny("llama")), tokenizer=SimpleNamespace(get_vocab=dict, eos_token_id=EOS))
        with Engine(loaded, EngineConfig(pages=8, tiers=tiers), progress=lambda *stage, to=stages: to.append(stage)):
            assert stages == [(stage, done, 1) for stage in expected for done in (0, 1)]


def test_an_engine_logs_why_it_finds_nothing_of_what_another_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = TierConfig(HostSize(host_ratio=1.0), storage=f"file:{tmp_path}/kv?capacity=1MiB")
    loaded = replace(tiny_loaded(tiny("llama")), tokenizer=SimpleNamespace(get_vocab=dict, eos_token_id=EOS))
    for page_size in (8, 16, 16):
        Engine(loaded, EngineConfig(pages=8, page_size=page_size, tiers=tiers)).close()
    (line,) = [text for text in caplog.messages if "not found" in text]
    assert line.endswith("page size 8, here 16")


@pytest.mark.parametrize(
    "field", ["pages", "kv_bytes", "page_size", "token_budget", "max_running", "max_waiting", "age_limit_s"]
)
def test_a_bad_setting_is_named(field: str) -> None:
    for value in (-1, True, "3", None)[: 3 if field == "pages" else 4]:
        with pytest.raises(BadArgument, match=f"^{field} = "):
            EngineConfig(**{field: value})


def test_a_policy_that_does_not_exist_is_refused_before_there_is_a_model() -> None:
    for policy in ("oldest-first", "slru:0", "no_such_module:Rule"):
        with pytest.raises(BadArgument, match=r"^policy = "):
            EngineConfig(pages=8, policy=policy)


def test_an_engine_that_cannot_be_made_leaves_no_store_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise BadArgument("policy", "oldest-first", "another")

    monkeypatch.setattr("mainstem.runtime.memory.pools.PrefixCache", refuse)
    spec = f"file:{tmp_path}/kv?capacity=1MiB"
    tiers = TierConfig(HostSize(host_ratio=1.0), storage=spec)
    loaded = replace(tiny_loaded(tiny("llama")), tokenizer=SimpleNamespace(get_vocab=dict))
    with pytest.raises(BadArgument, match="policy"):
        Engine(loaded, EngineConfig(pages=8, tiers=tiers))
    open_backend(spec).close()  # its lock was released


# Refusals and ends


def test_what_can_not_run_is_refused_in_the_callers_thread(rig: Callable[..., Rig]) -> None:
    made = rig()
    with pytest.raises(RequestTooLong, match="256"):
        made.submit(length=250, max_tokens=7)
    with pytest.raises(BadTokens):
        made.engine.submit(Request(np.array([1, VOCAB]), SamplingParams(max_tokens=2)))
    assert made.engine.stats().totals.requests == 0


def test_a_prompt_is_encoded_once_from_submit_to_its_end(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []

    class Counting(TokenKeys):
        def encode(self, tokens: Any) -> bytes:
            encoded.append(len(tokens))
            return super().encode(tokens)

    monkeypatch.setattr("mainstem.runtime.assembly.TokenKeys", Counting)
    made = rig()
    assert made.submit(length=20, max_tokens=4).result(WAIT_S).finish_reason == "length"
    assert encoded == [20]
    made.engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=2))
    assert encoded == [20, 3, 2]


def test_no_more_wait_than_allowed(rig: Callable[..., Rig]) -> None:
    made = rig(max_running=1, max_waiting=2)
    made.gate.open.clear()
    streams = [made.submit(0)]
    assert made.gate.entered.wait(WAIT_S)
    streams += [made.submit(1), made.submit(2)]
    with pytest.raises(EngineFull, match="as many requests wait as max_waiting allows: 2"):
        made.submit(3)
    made.gate.open.set()
    assert [s.result(WAIT_S).finish_reason for s in streams] == ["length"] * 3
    assert made.submit(3).result(WAIT_S).finish_reason == "length"


def test_a_request_is_cancelled_from_outside_running_or_waiting(rig: Callable[..., Rig]) -> None:
    made = rig(max_running=1)
    made.gate.open.clear()
    running, waiting, other = made.submit(1, max_tokens=40), made.submit(2), made.submit(3)
    assert made.gate.entered.wait(WAIT_S)
    running.cancel()
    waiting.cancel()
    made.gate.open.set()
    assert running.result(WAIT_S).finish_reason == waiting.result(WAIT_S).finish_reason == "cancelled"
    assert other.result(WAIT_S).tokens == complete(request(3))[0]
    running.cancel()
    assert made.engine.stats().cache.pool.private == 0


def test_waiting_for_a_result_can_time_out(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.gate.open.clear()
    stream = made.submit()
    with pytest.raises(TimeoutError, match=stream.id):
        stream.result(timeout_s=0.01)
    made.gate.open.set()
    assert stream.result(WAIT_S).finish_reason == "length"


def test_a_crash_of_the_loop_reaches_every_stream_and_every_later_call(rig: Callable[..., Rig]) -> None:
    made = rig(max_running=1)
    made.gate.open.clear()
    streams = [made.submit(i, max_tokens=40) for i in range(3)]
    assert made.gate.entered.wait(WAIT_S)
    asked: list[object] = []

    def ask() -> None:
        with pytest.raises(EngineClosed) as caught:
            made.engine.flush()
        asked.append(caught.value.__cause__)

    def fail(core: EngineCore) -> None:
        raise MemoryError("the loop itself")

    made.engine._loop._put(fail)
    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: made.engine._loop._commands.qsize() >= 2)
    made.gate.open.set()
    for read in (list, lambda stream: stream.result(WAIT_S), _read_in_a_loop):
        for stream in streams:
            with pytest.raises(EngineClosed, match="the loop itself") as caught:
                read(stream)
            assert isinstance(caught.value.__cause__, MemoryError)
    asking.join(WAIT_S)
    assert isinstance(asked[0], MemoryError)
    for call in (made.submit, made.engine.flush, made.engine.tree):
        with pytest.raises(EngineClosed, match="the loop itself"):
            call()
    assert made.engine.drain(WAIT_S)
    assert made.engine.stats().totals.requests == 3
    made.engine.close()


@pytest.mark.parametrize("made_of", [np.array, list])
def test_a_removed_prefix_is_computed_again(rig: Callable[..., Rig], made_of: Callable[[Any], Any]) -> None:
    made = rig()
    asked = request(length=9)

    def cached() -> int:
        return made.engine.submit(asked).result(WAIT_S).usage.cached_tokens

    assert [cached(), cached()] == [0, 8]
    assert made.engine.remove(made_of(asked.tokens[:8])) > 0
    assert [cached(), cached()] == [4, 8]
    assert made.engine.remove(made_of(asked.tokens[:0])) > 0
    assert cached() == 0


def test_a_prefix_that_cannot_be_read_is_its_callers_error_alone(rig: Callable[..., Rig]) -> None:
    class Unreadable(list[int]):
        def __len__(self) -> int:
            raise ZeroDivisionError

    made = rig()
    for tokens, error in (([-1], BadTokens), (3, BadTokens), (np.eye(2), BadTokens), (Unreadable(), ZeroDivisionError)):
        with pytest.raises(error):
            made.engine.remove(tokens)
    assert made.submit().result(WAIT_S).finish_reason == "length"


def test_advice_is_applied_on_the_engines_thread_and_by_its_clock(rig: Callable[..., Rig]) -> None:
    made = rig(pages=128, max_retain_s=100.0)
    asked = request(length=17)
    engine = made.engine
    assert engine.advise("pin", asked.tokens) == Kept(0, 0)
    engine.submit(asked).result(WAIT_S)
    assert engine.advise("retain", asked.tokens.tolist(), ttl_s=100.0) == Kept(16, 16)
    assert engine.advise("pin", asked.tokens) == Kept(16, 16)
    assert engine.stats().cache.retention.pinned == 1
    engine._loop._clock = lambda: 1e9
    assert made.submit(2).result(WAIT_S).finish_reason == "length"
    assert engine.advise("unpin", asked.tokens) == Kept(16, 16)  # the time has passed meanwhile
    assert engine.stats().cache.retention.prefixes == 0
    assert engine.advise("pin", asked.tokens, "another") == Kept(0, 0)
    for tokens, error in (([-1], BadTokens), ([], BadTokens), (3, BadTokens)):
        with pytest.raises(error):
            engine.advise("pin", tokens)  # type: ignore[arg-type]
    for action, ttl_s in (("retain", None), ("retain", 101.0), ("pin", 1.0)):
        with pytest.raises(BadArgument, match="ttl_s"):
            engine.advise(action, asked.tokens, ttl_s=ttl_s)  # type: ignore[arg-type]


def test_what_is_retained_leaves_room_for_the_longest_request(rig: Callable[..., Rig]) -> None:
    made = rig(pages=64, retain_share=1.0)  # one context
    made.submit(1, 16, max_tokens=1).result(WAIT_S)
    assert made.engine.advise("pin", request(1, 16).tokens) == Kept(0, 12 + 4)
    made.engine.close()
    other = rig(pages=80, retain_share=1.0)
    other.submit(1, 100, max_tokens=1).result(WAIT_S)
    assert other.engine.advise("pin", request(1, 100).tokens).positions == 16 * 4
    assert other.submit(2, 250, max_tokens=6).result(WAIT_S).finish_reason == "length"


def test_an_interrupt_in_the_loop_is_a_crash_too(rig: Callable[..., Rig]) -> None:
    made = rig()
    assert made.engine.failure is None

    def forward(segments: list[Segment]) -> torch.Tensor:
        raise KeyboardInterrupt("pulled the plug")

    made.gate.forward = forward  # type: ignore[method-assign]
    with pytest.raises(EngineClosed, match="pulled the plug"):
        made.submit().result(WAIT_S)
    assert isinstance(made.engine.failure, KeyboardInterrupt)


def _read_in_a_loop(stream: Stream) -> None:
    async def read() -> None:
        async for _ in stream:
            pass

    asyncio.run(asyncio.wait_for(read(), WAIT_S))


def test_draining_takes_nothing_new_and_ends_what_runs(rig: Callable[..., Rig]) -> None:
    made = rig()
    made.gate.open.clear()
    streams = [made.submit(i) for i in range(3)]
    assert not made.engine.drain(timeout_s=0.01)
    with pytest.raises(EngineClosed, match="drain"):
        made.submit()
    made.gate.open.set()
    assert made.engine.drain(WAIT_S)
    assert [s.result(0).finish_reason for s in streams] == ["length"] * 3
    assert made.engine.flush() > 0, "it is drained, not closed"


def test_closing_cancels_what_runs_and_what_waits(rig: Callable[..., Rig]) -> None:
    made = rig(max_running=1)
    made.gate.open.clear()
    streams = [made.submit(i, max_tokens=40) for i in range(3)]
    assert made.gate.entered.wait(WAIT_S)
    threading.Timer(0.02, made.gate.open.set).start()
    made.engine.close()
    assert [s.result(0).finish_reason for s in streams] == ["cancelled"] * 3
    assert not made.engine._loop._thread.is_alive()
    assert made.engine.stats().cache.pool.private == 0
    for call in (made.submit, made.engine.flush, made.engine.tree):
        with pytest.raises(EngineClosed, match="closed"):
            call()
    streams[0].cancel()
    made.engine.close()


def test_a_prompt_that_cannot_be_decoded_is_an_error_of_its_own(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rig()

    def fails(*args: object, **kwargs: object) -> str:
        raise IndexError("no such token")

    with monkeypatch.context() as patch:
        patch.setattr(GhostTokenizer, "decode", fails)
        completion = made.submit().result(WAIT_S)
    assert completion.finish_reason == "error"
    assert made.submit().result(WAIT_S).finish_reason == "length"


def test_events_are_published_to_the_end_though_nothing_happens_any_more(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[bool] = []

    def deliver(cache: PrefixCache) -> bool:
        """Needs ten calls for all that there is."""
        steps.append(len(steps) < 9)
        return steps[-1]

    monkeypatch.setattr(PrefixCache, "deliver_events", deliver)
    engine = rig(events=EventConfig(kv_events="tcp://127.0.0.1:0")).engine
    engine.tree()  # one round of its loop, which then has nothing to do
    eventually(lambda: len(steps) >= 10)


def test_events_are_published_though_the_publisher_lagged_when_the_last_request_ended(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mainstem.events.publisher._QUEUED", 0)
    engine = rig(events=EventConfig(kv_events="tcp://127.0.0.1:0")).engine
    engine.submit(request()).result(WAIT_S)
    engine.tree()  # after the step that ended it
    assert engine.stats().events.published == 0  # type: ignore[union-attr]
    monkeypatch.setattr("mainstem.events.publisher._QUEUED", 1)
    eventually(lambda: engine.stats().events.published > 0)  # type: ignore[union-attr]


def test_asking_for_the_counts_ends_no_lease(rig: Callable[..., Rig]) -> None:
    """Another thread asks, at any time: what is dropped is ended by the engine's, at the same point on every rank."""
    engine = rig().engine
    lease = engine._core.cache.lease(prompt(1, 8))
    with pytest.warns(ResourceWarning):
        del lease
    assert [engine.stats().cache.leases.open for _ in range(2)] == [1, 1]
    assert engine._core.cache.stats().leases.open == 0


def test_counts_are_copied_as_they_are_at_one_moment() -> None:
    """Else what the device had, a difference, could go back, which a scraper takes for a restart."""
    totals = Totals()

    def meanwhile(*_: object) -> Any:
        totals.cached_tokens += 1
        totals.host_tokens += 1
        return meanwhile

    tracing = sys.gettrace()
    sys.settrace(meanwhile)
    try:
        copy = totals.copy()
    finally:
        sys.settrace(tracing)
    assert totals.host_tokens > 1
    assert copy.device_tokens == 0


@pytest.mark.usefixtures("little_garbage")
def test_a_request_that_has_ended_holds_no_memory(rig: Callable[..., Rig]) -> None:
    made, asked = rig(), request()
    tokens = weakref.ref(asked.tokens)
    gc.collect()
    gc.disable()  # it runs too seldom for prompts, masks and images
    try:
        made.engine.submit(asked).result(WAIT_S)
        del asked
        made.engine.tree()  # the next round of its loop
        assert tokens() is None
    finally:
        gc.enable()


def test_a_request_that_is_admitted_while_the_counts_are_read_is_among_them(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an engine with work looks idle."""
    admitted = iter([False, True])
    monkeypatch.setattr(Scheduler, "waiting", property(lambda scheduler: int(not next(admitted))))
    monkeypatch.setattr(Scheduler, "running", property(lambda scheduler: int(next(admitted))))
    stats = rig().engine.stats()
    assert stats.running + stats.waiting > 0

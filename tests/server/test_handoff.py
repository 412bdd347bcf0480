"""Two engines over sockets: what one has on its host the other one reads, and answers are as if it had computed it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from machine import eventually, patience
from rigs.greedy import Greedy, ask, family_of_prompts, pair_of, same
from rigs.letters import Letters
from rigs.peers import FakePeer
from rigs.servers import free_port

from bench.tiny_models import HYBRIDS, VOCAB, WINDOWED
from mainstem.cache.namespaces import Namespace
from mainstem.errors import BackendUnavailable, BadArgument
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.request import Completion, Request
from mainstem.settings.engine import EngineConfig, PeerConfig, PrefetchPolicy, SamplingParams, StorageConfig, TierConfig
from mainstem.share import Share
from mainstem.tiers.host.shelf import Shelf

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deadline]
pytest.importorskip("blake3", reason="blake3 is not installed")

NEW = 6
PROMPTS = family_of_prompts(VOCAB, 40, [20, 13, 6], 1)
SECRET = b"a secret of the tests"
A_PEER = PeerConfig(peers=("a:1",))
WAITS = StorageConfig(prefetch="wait_complete", prefetch_min_tokens=4)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma3_text": ("gemma3_text", {**WINDOWED["gemma3_text"], "sliding_window": 8}),  # full attention and a window
    "lfm2": ("lfm2", HYBRIDS["lfm2"]),  # full attention and states
}


class Named(Letters):
    """Its vocabulary is part of the identity."""

    def get_vocab(self) -> dict[str, int]:
        return {chr(token): token for token in range(VOCAB)}


def engine(
    made: LoadedModel,
    role: str = "both",
    secret: bytes | None = SECRET,
    storage: str | None = None,
    limits: StorageConfig = WAITS,
    **peers: Any,
) -> Engine:
    """An engine with `peers` as in `PeerConfig`."""
    tiers = TierConfig(limits=limits, peers=PeerConfig(**peers), storage_secret=secret, storage=storage)
    states = 40 if made.name in HYBRIDS else None
    config = EngineConfig(
        pages=200, page_size=4, token_budget=16, state_slots=states, role=role, tiers=tiers, checkpoint_tokens=16
    )  # type: ignore[call-overload]
    return Engine(replace(made, tokenizer=Named()), config, random=random.Random(0))


@contextmanager
def two(made: LoadedModel, listens: dict[str, Any] | None = None, **reads: Any) -> Iterator[tuple[Engine, Engine]]:
    """An engine that computes prompts, and one that reads what the first has."""
    where = f"127.0.0.1:{free_port()}"
    share = {"peer_share": 1.0, **(listens or {})}
    with ExitStack() as stack:
        first = stack.enter_context(engine(made, "prefill", peer_listen=where, **share))
        options = {"peers": (where,), "peer_timeout_s": patience(5), **reads}
        yield first, stack.enter_context(engine(made, "decode", **options))


def warm(engine: Engine, *prompts: list[int], namespace: Namespace | None = None) -> list[Completion]:
    """Computes prompts alone."""
    params = SamplingParams(max_tokens=0)
    streams = [engine.submit(Request(prompt, params, namespace=namespace)) for prompt in prompts]
    return [stream.result(timeout_s=patience(60)) for stream in streams]


def answered(engine: Engine, expected: list[Greedy]) -> list[int]:
    """Asks all prompts one after the other, checks the answers, and returns how many tokens came from others."""
    read = []
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        (completion,) = ask(engine, [prompt], NEW)
        same(completion, answer)
        read.append(completion.usage.storage_tokens)
    return read


def faults(engine: Engine) -> dict[str, int]:
    tiers = engine.stats().tiers
    assert tiers is not None
    return {cause: count for cause, count in tiers.faults.items() if cause != "absent"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_one_has_computed_the_other_reads(kind: str) -> None:
    made, greedy = pair_of(*KINDS[kind])
    expected = [greedy(prompt, NEW) for prompt in PROMPTS]
    with two(made) as (first, second):
        assert [completion.usage.completion_tokens for completion in warm(first, *PROMPTS)] == [0] * 3
        read = answered(second, expected)
        assert read[0] >= (len(PROMPTS[0]) - 1) // 4 * 4 - (16 if kind == "lfm2" else 0)
        assert sum(read) < sum(map(len, PROMPTS))  # what it has it does not read again
        assert not faults(second)
        warm(first, PROMPTS[0])  # counts are those after the last step
        given, taken = (each.stats().tiers for each in (first, second))
        assert given is not None and taken is not None
        assert given.peer_requests["answered"] > 0 and given.peer_given_bytes > 1000 and not taken.peer_faults
        assert answered(second, expected) == [0] * 3  # it has a tree of its own


def test_an_answer_of_the_role_prefill_ends_once_others_can_read_its_prompt() -> None:
    made, greedy = pair_of("llama", {})
    with two(made) as (first, second):
        for seed in range(10):
            (prompt,) = family_of_prompts(VOCAB, 30, [7], seed)
            warm(first, prompt)
            (completion,) = ask(second, [prompt], 2)
            assert completion.usage.storage_tokens == 36
            same(completion, greedy(prompt, 2))


@pytest.mark.parametrize("policy", ["best_effort", "timeout"])
def test_answers_are_equal_however_long_a_request_waits(policy: PrefetchPolicy) -> None:
    made, greedy = pair_of("llama", {})
    limits = StorageConfig(prefetch=policy, prefetch_min_tokens=4)
    with two(made, limits=limits) as (first, second):
        warm(first, *PROMPTS)
        for completion, prompt in zip(ask(second, PROMPTS, NEW), PROMPTS, strict=True):  # all at once
            same(completion, greedy(prompt, NEW))
        assert not faults(second)


def test_answers_of_the_role_prefill_are_those_of_any_engine() -> None:
    made, greedy = pair_of("llama", {})
    with two(made) as (first, _):
        for completion, prompt in zip(ask(first, PROMPTS, NEW), PROMPTS, strict=True):
            same(completion, greedy(prompt, NEW))
        stream = first.submit(Request(PROMPTS[0], SamplingParams(max_tokens=50)))
        stream.cancel()
        assert stream.result(timeout_s=patience(30)).finish_reason


def test_namespaces_stay_apart() -> None:
    made, greedy = pair_of("llama", {})
    with two(made) as (first, second):
        warm(first, PROMPTS[0], namespace=Namespace(salt="a tenant"))
        (completion,) = ask(second, PROMPTS[:1], NEW)
        assert completion.usage.storage_tokens == 0
        same(completion, greedy(PROMPTS[0], NEW))


def test_another_model_is_given_nothing() -> None:
    made, greedy = pair_of("llama", {})
    other, _ = pair_of("llama", {"rope_theta": 5e3})
    where = f"127.0.0.1:{free_port()}"
    with engine(other, "prefill", peer_listen=where) as first, engine(made, "decode", peers=(where,)) as second:
        warm(first, *PROMPTS)
        assert answered(second, [greedy(prompt, NEW) for prompt in PROMPTS]) == [0] * 3


def test_a_peer_that_dies_means_computing_here() -> None:
    made, greedy = pair_of("llama", {})
    expected = [greedy(prompt, NEW) for prompt in PROMPTS]
    with two(made) as (first, second):
        warm(first, PROMPTS[0])
        same(ask(second, PROMPTS[:1], NEW)[0], expected[0])
        first.close()
        assert answered(second, expected) == [0] * 3
    where = f"127.0.0.1:{free_port()}"  # nobody was ever there
    with engine(made, "decode", peers=(where,)) as alone:
        assert answered(alone, expected) == [0] * 3


def evict(first: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    first.flush()


def be_busy(first: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Share, "allows", lambda self: False)


def alter(first: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Shelf.copy

    def altered(self: Shelf, key: bytes, length: int) -> bytearray | None:
        value = whole(self, key, length)
        if value is not None:
            value[-5] ^= 1
        return value

    monkeypatch.setattr(Shelf, "copy", altered)


@pytest.mark.parametrize("harm", [evict, be_busy, alter])
def test_what_is_not_given_or_arrives_altered_is_computed_here(
    harm: Callable[[Engine, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, greedy = pair_of("llama", {})
    with two(made) as (first, second):
        warm(first, *PROMPTS)
        harm(first, monkeypatch)
        assert answered(second, [greedy(prompt, NEW) for prompt in PROMPTS]) == [0] * 3
        assert faults(second).keys() == ({"altered"} if harm is alter else set())


def test_a_peer_that_never_answers_is_left_alone_after_a_while() -> None:
    made, greedy = pair_of("llama", {})
    with (
        closing(FakePeer(lambda parts: None)) as silent,
        engine(made, "decode", peers=(silent.address,), peer_timeout_s=0.05) as alone,
    ):
        assert answered(alone, [greedy(prompt, NEW) for prompt in PROMPTS]) == [0] * 3
        tiers = alone.stats().tiers
        assert tiers is not None and tiers.peer_faults == {"timeout": silent.asked}
        assert silent.asked == 3  # its breaker is open


def test_a_wrong_secret_is_one_clear_line_and_nothing_is_half_started() -> None:
    made, _ = pair_of("llama", {})
    where, own = (f"127.0.0.1:{free_port()}" for _ in range(2))
    with engine(made, "prefill", peer_listen=where):
        for _ in range(2):  # the second time its own address is free again
            with pytest.raises(BackendUnavailable, match="another secret"):
                engine(made, secret=b"another secret of 16", peers=(where,), peer_listen=own)


def test_an_address_that_is_taken_is_one_clear_line() -> None:
    made, _ = pair_of("llama", {})
    where = f"127.0.0.1:{free_port()}"
    with engine(made, peer_listen=where), pytest.raises(BadArgument, match="peer_listen"):
        engine(made, peer_listen=where, peers=(f"127.0.0.1:{free_port()}",))
    with engine(made, peer_listen=where):  # and free once the engine has ended
        pass


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: PeerConfig(peers=("somewhere",)), "peers"),
        (lambda: PeerConfig(peers=("dns:7100",)), "peers"),  # no name, and not a host that is called dns
        (lambda: PeerConfig(peer_listen="1.2.3.4"), "peer_listen"),
        (lambda: PeerConfig(peer_share=0.5), "peer_share"),
        (lambda: PeerConfig(peer_timeout_s=3), "peer_timeout_s"),
        (lambda: TierConfig(peers=PeerConfig(peer_listen="0.0.0.0:7100")), "peer_listen"),
        (
            lambda: TierConfig(storage="memory:", storage_codec="int8", peers=PeerConfig(peers=("a:1",))),
            "storage_codec",
        ),
        (lambda: EngineConfig(role="prefill"), "role"),
        (lambda: EngineConfig(role="decode"), "role"),
        (lambda: EngineConfig(tp=2, tiers=TierConfig(peers=A_PEER)), "tp"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_a_model_is_loaded(made: Any, name: str) -> None:
    with pytest.raises(BadArgument) as caught:
        made()
    assert caught.value.name == name


def test_beyond_this_machine_it_listens_with_a_secret() -> None:
    TierConfig(peers=PeerConfig(peer_listen="0.0.0.0:7100"), storage_secret=SECRET)


def test_both_read_from_each_other() -> None:
    made, greedy = pair_of("llama", {})
    ports = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with (
        engine(made, peer_listen=ports[0], peers=(ports[1],), peer_share=1.0) as first,
        engine(made, peer_listen=ports[1], peers=(ports[0],), peer_share=1.0) as second,
    ):
        for one, other, prompt in (
            (first, second, PROMPTS[0]),
            (second, first, family_of_prompts(VOCAB, 44, [9], 5)[0]),
        ):
            warm(one, prompt)
            eventually(lambda one=one: not _busy(one))  # type: ignore[misc]
            (completion,) = ask(other, [prompt], NEW)
            same(completion, greedy(prompt, NEW))
            assert completion.usage.storage_tokens >= (len(prompt) - 1) // 4 * 4


def _busy(engine: Engine) -> bool:
    tiers = engine.stats().tiers
    return tiers is None or bool(tiers.under_way)

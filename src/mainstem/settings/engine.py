"""The settings of an engine and its requests: the model, pools, steps, tiers, sampling."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mainstem.cache.policies import find_policy
from mainstem.errors import BadArgument
from mainstem.settings.fields import (
    INT32_MAX,
    INT64_MAX,
    SECRET,
    Range,
    Settings,
    instance,
    integer,
    number,
    one_of,
    seconds,
    secret_bytes,
    setting,
    switch,
    texts,
)
from mainstem.units import SIZE

MAX_LOGPROBS = 20
SEEDS = 2**64  # number of different seeds
SECRET_BYTES = 16  # the least length of a secret

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int4"]
Codec = Literal["none", "int8", "fp8"]
PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]
KVCacheDtype = Literal["auto", "int8", "fp8"]
GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]
Role = Literal["both", "prefill", "decode"]
WritePolicy = Literal["write_through", "write_through_selective", "write_back"]


@dataclass(frozen=True)
class ModelConfig(Settings):
    """How a model is loaded.

    Args:
        dtype: Number format of weights and KV. auto: bfloat16 on GPUs, and on CPUs with AVX2 or AVX-512; else float32.
        max_context: Maximum number of tokens of a request, prompt and answer together; 1 or more. Default: what the
            model's configuration says. Required if it says nothing, as that of Mamba.
        quantization: Weights of the decoder's linear layers as they are (none), or in 4 and 8 bits (int4): quicker for
            few requests with AVX-512, and less precise unless the file has 4 bits. On CPUs only, without --tp. See
            docs/serving.md.
        threads: Number of threads that compute in each process; 1 or more. Default: one for each core, which the
            processes of --tp share.
    """

    dtype: Dtype = setting("auto", one_of(Dtype))
    max_context: int | None = setting(None, integer(1), alias="--max-model-len")
    quantization: Quantization = setting("none", one_of(Quantization))
    threads: int | None = setting(None, integer(1, 4096))


_ID = integer(0)
_TOKENS = Range("token ids", lambda value: isinstance(value, tuple) and all(map(_ID.holds, value)))
_WORDS = Range(
    "sequences of at least one token id",
    lambda value: isinstance(value, tuple) and all(word and _TOKENS.holds(word) for word in value),
)
_BIAS = number(-1e6, 1e6)


def _are_biases(value: object) -> bool:
    if not isinstance(value, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        return False
    tokens = [token for token, _ in value]
    return len({*tokens}) == len(tokens) and _TOKENS.holds((*tokens,)) and all(_BIAS.holds(bias) for _, bias in value)


_BIASES = Range("pairs of a token id and a number, up to 1,000,000; each token once", _are_biases)


@dataclass(frozen=True)
class Grammar(Settings):
    """The form that an answer must have; see `mainstem.runtime.sampling.grammars`.

    Args:
        kind: What `text` is. json_object: any JSON object. json_schema: a JSON schema. regex: a regular expression of
            the whole answer. choice: a JSON list of the possible answers. lark: a context-free grammar, as llguidance
            reads it, or as GBNF.
        text: The grammar; empty for json_object.
    """

    kind: GrammarKind = setting("json_object", one_of(GrammarKind), flag=False)
    text: str = setting("", instance(str, "a string"), flag=False)


@dataclass(frozen=True)
class SamplingParams(Settings):
    """How the tokens of one request are chosen, and when they end.

    Args:
        max_tokens: Maximum number of tokens to generate; 0 or more.
        temperature: 0 always takes the most likely token; higher values vary more. 0 or more.
        top_p: Choose among the most likely tokens that together have this probability. Above 0, up to 1.
        top_k: Choose among the k most likely tokens; 0 turns this off.
        min_p: Exclude tokens less likely than this fraction of the most likely one. 0 to 1.
        seed: Make sampling repeatable: 64 bits; -1 is the same as all of them. Default: a new one each time.
        stop: Text that ends the answer. Repeat it for several texts.
        ignore_eos: Continue after the model's end-of-sequence tokens.
        logprobs: None: none; k: each token's log-probability and the k best alternatives, 0 to 20.
        prompt_logprobs: The same for the tokens of the prompt. Its KV is then computed, not taken from the cache, but
            for what is before `logprob_start`, and what has kept scores.
        logprob_start: The place of the first token of the prompt that has a log-probability. At place 0 none has one.
        embedding: Return the mean of the prompt's last hidden states, too. Its KV is then computed, not taken from the
            cache, and nothing is generated: `max_tokens` is 0.
        min_tokens: Minimum number of tokens before the answer may end by itself; at most `max_tokens`.
        stop_token_ids: Tokens that end the answer, and are no part of its text.
        presence_penalty: Subtracted from the logits of tokens that the answer has; -2 to 2.
        frequency_penalty: The same for each time that the answer has the token; -2 to 2.
        repetition_penalty: Logits of tokens that the prompt or the answer has are divided by it, or multiplied where
            they are negative. 0.01 to 100.
        logit_bias: Tokens, and what is added to their logits; each token once.
        allowed_token_ids: The only tokens that may be generated; None: all.
        bad_words: Sequences of tokens that are never completed.
        skip_special_tokens: Leave special tokens out of the text.
        hidden_tokens: Tokens that have no text, special or not.
        include_stop_str_in_output: Show the stop text, or the token of `stop_token_ids`, that ended the answer.
        grammar: The form of the answer. It ends where the grammar can go no further; before, it may end only where
            the grammar is complete, even at `min_tokens`.

    `max_tokens` = 0 computes the prompt alone, so that it is cached. A seed gives the same tokens in any batch. `top_p`
    keeps tokens as likely as the last one, too.
    """

    max_tokens: int = setting(256, integer(0))
    temperature: float = setting(0.0, number(0))
    top_p: float = setting(1.0, number(0, 1, above=True))
    top_k: int = setting(0, integer(0))
    min_p: float = setting(0.0, number(0, 1))
    seed: int | None = setting(None, integer(-SEEDS // 2, SEEDS - 1))
    stop: tuple[str, ...] = setting((), texts("a tuple of non-empty strings", bool))
    ignore_eos: bool = setting(False, switch(), flag=False)
    logprobs: int | None = setting(None, integer(0, MAX_LOGPROBS), flag=False)
    prompt_logprobs: int | None = setting(None, integer(0, MAX_LOGPROBS), flag=False)
    logprob_start: int = setting(0, integer(0), flag=False)
    embedding: bool = setting(False, switch(), flag=False)
    min_tokens: int = setting(0, integer(0), flag=False)
    stop_token_ids: tuple[int, ...] = setting((), _TOKENS, flag=False)
    presence_penalty: float = setting(0.0, number(-2, 2), flag=False)
    frequency_penalty: float = setting(0.0, number(-2, 2), flag=False)
    repetition_penalty: float = setting(1.0, number(0.01, 100), flag=False)
    logit_bias: tuple[tuple[int, float], ...] = setting((), _BIASES, flag=False)
    allowed_token_ids: tuple[int, ...] | None = setting(
        None, Range("token ids, at least one", lambda value: bool(value) and _TOKENS.holds(value)), flag=False
    )
    bad_words: tuple[tuple[int, ...], ...] = setting((), _WORDS, flag=False)
    skip_special_tokens: bool = setting(True, switch(), flag=False)
    hidden_tokens: frozenset[int] = setting(frozenset(), instance(frozenset, "a frozenset of token ids"), flag=False)
    include_stop_str_in_output: bool = setting(False, switch(), flag=False)
    grammar: Grammar | None = setting(None, instance(Grammar, "a Grammar"), flag=False)

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        if self.min_tokens > self.max_tokens:
            raise BadArgument("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        if self.embedding and self.max_tokens:
            raise BadArgument("max_tokens", self.max_tokens, "0 with embedding")
        if self.grammar is not None and self.allowed_token_ids is not None:
            raise BadArgument("allowed_token_ids", self.allowed_token_ids, "None with a grammar, which says the same")

    @property
    def reads_from(self) -> int | None:
        """The first position of the prompt that they ask something about, so that it has to be computed; None: none."""
        return 0 if self.embedding else None if self.prompt_logprobs is None else self.first_scored - 1

    @property
    def first_scored(self) -> int:
        """The place of the first token of the prompt that has a log-probability."""
        return max(self.logprob_start, 1)

    @property
    def shapes_logits(self) -> bool:
        """Whether they change logits before a token is sampled."""
        return self.weighs_logits or self.grammar is not None or bool(self.bad_words or self.min_tokens)

    @property
    def weighs_logits(self) -> bool:
        """Whether they add to logits, or multiply them, by vectors over the vocabulary."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.logit_bias or self.allowed_token_ids is not None)


@dataclass(frozen=True)
class Shares(Settings):
    """How memory is divided among the pools: KV pages, window pages, recurrent states.

    Args:
        kv_bytes: Memory for KV pages and recurrent states, cached and in use: bytes, or a size such as 500MB or 2GiB.
        window_ratio: Pages of the longest window for each page of full attention; above 0. Shorter windows of the same
            model have as many fewer.
        state_share: Share of the memory for recurrent states; KV has the rest. Above 0 and below 1.
        pages: Pages of the first pool, in place of `kv_bytes`; the others follow from the ratio and the slots.
        state_slots: Recurrent states, in place of `state_share`.
    """

    kv_bytes: int = setting(1 << 30, integer(1, INT64_MAX), unit=SIZE)
    window_ratio: float = setting(0.5, number(0, above=True))
    state_share: float = setting(0.5, number(0, 1, above=True, below=True))
    pages: int | None = setting(None, integer(1), flag=False)
    state_slots: int | None = setting(None, integer(1), flag=False)


@dataclass(frozen=True)
class Limits(Settings):
    """The bounds of a scheduler's step.

    Args:
        checkpoint_tokens: Approximate number of prompt tokens between checkpoints of a recurrent state.
            Checkpoints are kept while slots are free. 0 keeps them only at marks and where prompts part and end.
        states_per_path: Maximum number of checkpoints along one sequence; 1 or more.
        token_budget: Maximum number of prompt tokens per step, over all requests; 1 or more.
        draft_tokens: Maximum number of draft tokens that a step verifies (speculative decoding), over all requests.
            Drafts do not change the answer. 0 turns them off, as do CUDA graphs.
        max_running: Maximum number of requests that run at the same time; 1 or more.
        batch_share: Part of the steps in which requests of batches compute also while others wait or run, if they have
            a slot and pages. Up to 1; 0: they wait for all others.
        age_limit_s: A request that has waited longer is overtaken only by older, preempted or higher-priority ones.
        prefetch_sessions: Part of the device's pages for sessions that are expected back soon: their pages are loaded
            from the host and storage before their next turn comes. Up to 1; 0 turns this off.
        anchor_share: Part of each pool that a tenant keeps for prefixes that several of its sessions begin with, up to
            --retain-share, which bounds both together. With --tenants, of the largest part that it may have.
            0 turns this off.
        explain: Explain why tokens of a prompt were computed instead of found: in answers that ask for it, at
            /v1/cache/explain, and in metrics.
    """

    checkpoint_tokens: int = setting(1024, integer(0))
    states_per_path: int = setting(16, integer(1))
    token_budget: int = setting(512, integer(1))
    draft_tokens: int = setting(7, integer(0))
    max_running: int = setting(16, integer(1))
    batch_share: float = setting(0.0, number(0, 1))
    age_limit_s: float = setting(
        30.0, Range("a number, 0 or more", lambda value: value == math.inf or number(0).holds(value)), flag=False
    )
    prefetch_sessions: float = setting(0.0, number(0, 1))
    anchor_share: float = setting(0.05, number(0, 1))
    explain: bool = setting(False, switch())


@dataclass(frozen=True)
class HostSize(Settings):
    """The size of host memory: at most one is given. Without any, the host has as many pages as the device.

    Args:
        host_bytes: Size of the host tier: bytes, or a size such as 8GiB.
            Without --host-bytes, --host-ratio and --host-fraction: none, or the device's size with --storage.
        host_ratio: Size of the host tier, as a multiple of the device's pages.
        host_fraction: Size of the host tier, as a part of the memory that is free at startup; up to 1.
    """

    host_bytes: int | None = setting(None, integer(1, INT64_MAX), unit=SIZE)
    host_ratio: float | None = setting(None, number(0, above=True))
    host_fraction: float | None = setting(None, number(0, 1, above=True))

    def __post_init__(self) -> None:
        """Checks every field, and that only one is given."""
        super().__post_init__()
        given = [name for name in ("host_bytes", "host_ratio", "host_fraction") if getattr(self, name) is not None]
        if len(given) > 1:
            raise BadArgument("host size", " and ".join(given), "one of host_bytes, host_ratio, host_fraction")


@dataclass(frozen=True)
class HostPolicy(Settings):
    """The host tier: which pages go there and come back.

    Args:
        write_policy: When pages are backed up to the host.
            write_through: once computed. write_through_selective: after --write-hits hits. write_back: when evicted.
        write_hits: Hits before write_through_selective backs up a page; 1 or more.
        load_min_tokens: Minimum number of tokens to load from the host while it is unknown what loading and computing
            take; fewer are computed. 1 or more.
    """

    write_policy: WritePolicy = setting("write_through", one_of(WritePolicy))
    write_hits: int = setting(2, integer(1))
    load_min_tokens: int = setting(32, integer(1))


@dataclass(frozen=True)
class StorageConfig(Settings):
    """Limits and policies of a store.

    Args:
        prefetch: How long a request waits for storage.
            best_effort: not at all. wait_complete: until all is read. timeout: no longer than computing would take;
            where all layers have full attention, it computes meanwhile.
        prefetch_min_tokens: Minimum number of tokens to read from storage, with --prefetch wait_complete or while it is
            unknown what reading and computing take; fewer are computed. 0 or more.
        prefetch_timeout_s: Seconds that --prefetch timeout waits, plus 0.01 per page, while the cost of computing is
            unknown; 0 or more.
        prefetch_timeout_per_page_s: Seconds of that for each page that was found.
        prefetch_host_share: Fraction of the host's pages that prefetches under way may hold.
        max_prefetches: Limit of prefetches at once; further ones are skipped.
        batch_pages: Pages per call.
        batches: Calls of one prefetch at once.
        call_timeout_s: Deadline of a call, the wait for a worker included; above 0.
        queue_pages: Pages that may wait to be written; a write that does not fit is dropped unless the queue is empty.
        writes: Write calls at once.
        breaker_failures: Consecutive failed calls that open the breaker.
        breaker_cooldown_s: How long the breaker stays open before one call is tried.
    """

    prefetch: PrefetchPolicy = setting("timeout", one_of(PrefetchPolicy))
    prefetch_min_tokens: int = setting(256, integer(0))
    prefetch_timeout_s: float = setting(0.1, seconds())
    prefetch_timeout_per_page_s: float = setting(0.01, seconds(), flag=False)
    prefetch_host_share: float = setting(0.5, number(0, 1, above=True), flag=False)
    max_prefetches: int = setting(64, integer(1), flag=False)
    batch_pages: int = setting(32, integer(1), flag=False)
    batches: int = setting(4, integer(1), flag=False)
    call_timeout_s: float = setting(5.0, seconds(above=True), flag=False)
    queue_pages: int = setting(1024, integer(1), flag=False)
    writes: int = setting(2, integer(1), flag=False)
    breaker_failures: int = setting(3, integer(1), flag=False)
    breaker_cooldown_s: float = setting(5.0, seconds(), flag=False)


@dataclass(frozen=True, kw_only=True)
class StorageSecret(Settings):
    """The secret of a store.

    Args:
        storage_secret: Secret that seals stored pages: at least 16 characters, the same for all servers of a store.

    Without a secret, stored pages are safe from damage, not from forgery.
    """

    storage_secret: bytes | None = setting(None, secret_bytes(SECRET_BYTES), unit=SECRET, secret=True)


_LOOPBACK = re.compile(r"127\.\d+\.\d+\.\d+|localhost|\[::1\]")
_PEER = r"(?P<host>[\w.-]+|\[[\da-fA-F:]+\]):(?P<port>\d{1,5})"
_ADDRESS = r"tcp://(?P<host>[\w.-]+|\*|\[[\da-fA-F:]+\]):(?P<port>\d{1,5})"


def _address(words: str, pattern: str) -> Range:
    """A text of a pattern with a port."""

    def holds(value: object) -> bool:
        match = re.fullmatch(pattern, value) if isinstance(value, str) else None
        return match is not None and int(match["port"]) < 1 << 16

    return Range(words, holds)


_PEERS = _address("HOST:PORT, such as 10.0.0.2:7100", f"(dns:)?+{_PEER}")


@dataclass(frozen=True)
class PeerConfig(Settings):
    """Reads out of the host tiers of other engines; by default none. See docs/fleet.md.

    Args:
        peer_listen: HOST:PORT at which other engines read pages out of the host tier. Any engine with the storage
            secret may read them; without a secret the address must be on this machine.
        peers: HOST:PORT of another engine. Pages in its host tier are read rather than computed, as from storage.
            dns:HOST:PORT: all addresses of the name, except this machine's. Repeat it for several.
        peer_share: Largest part of the time that may be spent for other engines; up to 1.
        peer_bytes: Size of the pages that may be on their way to other engines at once: bytes, or a size such as 64MiB.
        peer_timeout_s: Seconds that an answer of another engine may take; above 0.
        peers_later: Whether more engines are named while this one runs.
    """

    peer_listen: str | None = setting(None, _address("HOST:PORT, such as 127.0.0.1:7100", _PEER))
    peers: tuple[str, ...] = setting((), texts(*_PEERS))
    peer_share: float = setting(0.1, number(0, 1, above=True))
    peer_bytes: int = setting(64 << 20, integer(1, INT64_MAX), unit=SIZE)
    peer_timeout_s: float = setting(1.0, seconds(above=True))
    peers_later: bool = setting(False, switch(), flag=False)

    def __post_init__(self) -> None:
        """Checks every field, and that none is without effect."""
        super().__post_init__()
        reads = bool(self.peers) or self.peers_later
        gives = self.peer_listen is not None
        for needs, there, names in (
            ("peer_listen", gives, ("peer_share", "peer_bytes")),
            ("peers", reads, ("peer_timeout_s",)),
        ):
            for name in names:
                if not there and getattr(self, name) != getattr(PeerConfig, name):
                    raise BadArgument(name, getattr(self, name), f"left out without {needs}")

    @property
    def exist(self) -> bool:
        """Whether there are any peers."""
        return self.peer_listen is not None or bool(self.peers) or self.peers_later


_CODECS = one_of(Codec)


def _is_codec(value: str) -> bool:
    return _CODECS.holds(value) or Path(value).is_file()


@dataclass(frozen=True)
class TierConfig(StorageSecret):
    """The tiers below the device; by default there are none.

    Args:
        size: The size of the host tier.
        host: The pages that go to the host.
        storage: Store that keeps pages beyond the host, such as file:/var/cache/mainstem?capacity=8GiB,
            redis://127.0.0.1:6379/0, or package.module:Class of your own. See docs/storage.md.
        storage_codec: Encoding of stored pages: unchanged (none), 8 bits per number (int8, fp8), or the file of a
            calibration (mainstem calibrate), about 3 bits. All but none lose precision.
        limits: How long requests wait for storage, and the limits of storage.
        peers: Other engines whose host tiers are read.
        warm: Prefetch the hottest stored prefixes into the host tier at startup.
    """

    size: HostSize = HostSize()
    host: HostPolicy = HostPolicy()
    storage: str | None = setting(None, instance(str, "a spec, see mainstem.storage.open_backend"))
    storage_codec: str = setting("none", Range(f"{_CODECS.words}, or a calibration's file", _is_codec))
    limits: StorageConfig = StorageConfig()
    peers: PeerConfig = PeerConfig()
    warm: bool = setting(False, switch())

    def __post_init__(self) -> None:
        """Checks every field, and that none is without effect."""
        super().__post_init__()
        if self.storage is None:
            self.refuse("storage")
            if not self.peers.exist:
                self.limits.refuse("storage")
        if not self.exist:
            self.host.refuse("a host tier")
        if self.peers.exist and self.storage_codec != "none":
            raise BadArgument("storage_codec", self.storage_codec, "none with peers, who read pages as they are")
        listen = self.peers.peer_listen
        if listen and self.storage_secret is None and not _LOOPBACK.fullmatch(listen.rpartition(":")[0]):
            raise BadArgument("peer_listen", listen, "on 127.0.0.1, localhost or [::1] without a storage secret")

    @property
    def exist(self) -> bool:
        """Whether there are any."""
        return self.storage is not None or self.size != HostSize() or self.peers.exist


_EVENTS = _address("tcp://HOST:PORT, such as tcp://127.0.0.1:5557", _ADDRESS)


@dataclass(frozen=True)
class EventConfig(Settings):
    """The publication of the cache's contents, for routers; by default none. See docs/events.md.

    Args:
        kv_events: Address to publish KV events on, such as tcp://127.0.0.1:5557.
            Events hold the tokens of prompts, so an address beyond this machine needs --kv-events-keys.
        kv_events_replay: Address where routers ask for events that they missed.
        kv_events_keys: Folder of CURVE keys: server.key_secret, and the public key of each router as NAME.key.
    """

    kv_events: str | None = setting(None, _EVENTS)
    kv_events_replay: str | None = setting(None, _EVENTS)
    kv_events_keys: Path | None = setting(
        None, Range("a folder", lambda path: isinstance(path, Path) and path.is_dir())
    )

    def __post_init__(self) -> None:
        """Checks every field, that none is without effect, and that nobody else can read prompts."""
        super().__post_init__()
        if self.kv_events is None:
            self.refuse("--kv-events")
        for name in ("kv_events", "kv_events_replay"):
            match = re.fullmatch(_ADDRESS, getattr(self, name) or "")
            if match and self.kv_events_keys is None and not _LOOPBACK.fullmatch(match["host"]):
                raise BadArgument(name, match[0], "on 127.0.0.1, localhost or [::1] without --kv-events-keys")


@dataclass(frozen=True)
class EngineConfig(Limits, Shares):
    """The settings of an engine, besides those of its pools (`Shares`) and of its steps (`Limits`).

    Args:
        tp: Processes that serve the model together, each with an equal part of its heads (tensor parallelism); 1 or
            more. Memory sizes are those of each process. With --storage, the spec of a store that only one process can
            open contains {rank}.
        page_size: Tokens per page, the unit of allocation and sharing; 1 or more.
        kv_cache_dtype: Number format of the keys and values in pages, on the device, the host and in storage.
            auto: that of the model. int8, fp8: 8 bits, so that about twice as many pages fit, with a loss. An answer
            may then differ a little when its prompt is found, even in float32. See docs/serving.md, Exactness.
        cuda_graphs: Record decode steps as CUDA graphs, and replay each with one launch.
            --no-cuda-graphs launches every kernel.
        exact: Refuse a model where a hit may change a bit. On a GPU, other kernels then compute, more slowly, so that
            none does; on a CPU what can be exact always is. See docs/arithmetic.md.
        keep_scores: Keep how likely each token of a prompt was beside its page, once a request has asked for that, with
            so many of the likeliest tokens, 0 to 20: 8 bytes a token, and 8 more for each of those. Later requests
            find it as they find the page. Default: it is computed each time. See docs/scoring.md.
        max_waiting: Maximum number of waiting requests; more are refused with status 429. 1 or more.
        policy: Eviction policy: lru, slru, slru:3, arc, gittins and others, or package.module:Class of your own.
            See docs/policies.md.
        cache: Reuse cached prefixes. --no-cache computes every prompt in full.
        retain_share: Fraction of each pool that one tenant may pin, or retain for a time; up to 1. 0: nothing.
            With --tenants, of the largest part that it may have.
        max_retain_s: Longest time, in seconds, that a request may retain a prefix for; above 0.
        overwrite_freed: Overwrite pages and states with zeros when they become free, on the device and on the host.
        audit_share: Part of the prompt tokens found in the cache that are computed again while there is nothing else to
            do, to compare their pages bit for bit with those of every tier, up to 1. 0 turns this off. See
            docs/arithmetic.md.
        role: The part of a request that is computed here. prefill: prompts, whose pages other engines read at
            --peer-listen; an answer ends once they can. decode: answers; prompts are read from --peers as far as these
            have them, and computed otherwise. both: all.
        tiers: The host tier and storage.
        events: Where the cache publishes what it holds.
    """

    tp: int = setting(1, integer(1, INT32_MAX))
    page_size: int = setting(16, integer(1))
    kv_cache_dtype: KVCacheDtype = setting("auto", one_of(KVCacheDtype))
    cuda_graphs: bool = setting(True, switch())
    exact: bool = setting(False, switch())
    keep_scores: int | None = setting(None, integer(0, MAX_LOGPROBS))
    max_waiting: int = setting(1024, integer(1, INT32_MAX))
    policy: str = setting("lru")  # `find_policy` checks it
    cache: bool = setting(True, switch())
    retain_share: float = setting(0.25, number(0, 1))
    max_retain_s: float = setting(86400.0, seconds(above=True))
    overwrite_freed: bool = setting(False, switch())
    audit_share: float = setting(0.0, number(0, 1))
    role: Role = setting("both", one_of(Role))
    tiers: TierConfig = TierConfig()
    events: EventConfig = EventConfig()

    def __post_init__(self) -> None:
        """Checks every field before a model is loaded."""
        super().__post_init__()
        find_policy(self.policy)
        if self.tiers.exist and not self.cache:
            raise BadArgument("cache", self.cache, "True if there is a host tier or storage")
        if self.prefetch_sessions and not self.tiers.exist:
            raise BadArgument("prefetch_sessions", self.prefetch_sessions, "0 without a host tier and storage")
        if self.audit_share:
            self._check_audits()
        if self.exact and self.tp > 1:
            raise BadArgument("exact", self.exact, "False if tp > 1: divided layers are not exact")
        if self.kv_cache_dtype != "auto" and self.tiers.storage_codec != "none":
            allowed = f"none with kv_cache_dtype {self.kv_cache_dtype}: pages have 8 bits, and are stored as they are"
            raise BadArgument("storage_codec", self.tiers.storage_codec, allowed)
        if self.keep_scores is not None and self.tiers.storage_codec != "none":
            allowed = "none with keep_scores: log-probabilities are stored as they are"
            raise BadArgument("storage_codec", self.tiers.storage_codec, allowed)
        peers = self.tiers.peers
        if self.role == "prefill" and peers.peer_listen is None:
            raise BadArgument("role", self.role, "both or decode without peer_listen: nobody could read its pages")
        if self.role == "prefill" and self.tiers.host.write_policy != "write_through":
            raise BadArgument("write_policy", self.tiers.host.write_policy, "write_through with the role prefill")
        if self.role == "decode" and not peers.peers:
            raise BadArgument("role", self.role, "both or prefill without peers: nobody would compute its prompts")
        if self.tp > 1 and peers.exist:
            raise BadArgument("tp", self.tp, "1 with peers: each process has a part of a page, and peers read one")
        if self.tp > 1 and self.tiers.size.host_fraction is not None:
            raise BadArgument(
                "host_fraction", self.tiers.size.host_fraction, "None if tp > 1: the ranks' pages are equal"
            )

    def _check_audits(self) -> None:
        if not self.cache:
            raise BadArgument("audit_share", self.audit_share, "0 without the cache")
        if self.tp > 1:
            raise BadArgument("audit_share", self.audit_share, "0 if tp > 1: divided layers are not exact")
        if self.tiers.storage_codec != "none":
            allowed = f"0 with storage_codec {self.tiers.storage_codec}, which changes what it stores"
            raise BadArgument("audit_share", self.audit_share, allowed)

"""`cached(model)`: transformers' own `generate()` starts after the prefixes that are cached, and keeps what it adds.

    generate()      transformers prepares the inputs and an empty cache
    first forward   before: fill the cache with the hit, and drop its columns from the inputs
                    after: keep the prompt
    forward ...     one token for each row; what a pool needs on the way is kept
    the end         keep the answer, finish the leases

Two hooks of the model's forward do this, during a call of `generate` and on its thread only. All decisions are made on
what the first forward is given, so whatever is not known here runs as it would without the cache, and is counted.

    row      [ padding | position 0, 1, ... ]      column = padding + position; a forward starts all rows at one column

This module knows transformers, and what the runtime knows of its caches. It has no scheduler and no engine.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from mainstem.cache.keys import TokenKeys
from mainstem.cache.namespaces import Namespace
from mainstem.cache.prefix_cache import CacheStats, Lease
from mainstem.errors import BadArgument, BadTokens, OutOfPages, UnsupportedModel
from mainstem.runtime.attention.paged import TOLERANCE
from mainstem.runtime.memory.pools import build_cache
from mainstem.runtime.memory.tiers import end_tiers
from mainstem.runtime.models.cache_copies import Place, copies_of
from mainstem.runtime.models.loading import LoadedModel, trained_context
from mainstem.runtime.models.weights import Weights
from mainstem.runtime.schedule.checkpoints import plan_checkpoints
from mainstem.runtime.text.cuts import common_tokens
from mainstem.settings.engine import EngineConfig
from mainstem.tiers.controller import TierStats
from mainstem.tiers.prefetch.prefetch import Prefetch

log = logging.getLogger(__name__)

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
_CACHES = ("past_key_values", "cache_params")

# The arguments that a first forward may be given; any other may change what the model keeps of a token.
_INPUTS = {"input_ids", "attention_mask", "position_ids", *_CACHES, "use_cache", "logits_to_keep", "return_dict"}

_SLICED = ("input_ids", "position_ids")

_WAIT_S = 0.001  # between two looks whether storage has answered
_LONGEST = 1 << 20  # positions of a row of a model that names no limit


@dataclass(frozen=True, slots=True)
class GenerateStats:
    """The counts of a cached model.

    Args:
        calls: calls of `generate`.
        passed: those that ran without the cache, by reason.
        prompts, prompt_tokens: rows of the others, and their tokens without padding.
        cached_tokens: tokens of those that were not computed.
        unkept: rows of which a part was not kept, because no page was free.
        cache: counts of the cache.
        tiers: of the host tier and storage, if there are any.
    """

    calls: int
    passed: Mapping[str, int]
    prompts: int
    prompt_tokens: int
    cached_tokens: int
    unkept: int
    cache: CacheStats
    tiers: TierStats | None


def cached(model: Any, config: EngineConfig = EngineConfig()) -> Cached:
    """Makes `model.generate()` find and keep prefixes by itself, until the returned object is closed.

    Args:
        model: a causal model of transformers, or PEFT's around one, on one device.
        config: sizes, policy and tiers; what concerns a scheduler has no effect.

    Raises:
        UnsupportedModel: the model keeps more than its tokens decide, or where nothing else can read it.
        BadArgument: the model is none of transformers or is cached already, `tp` is not 1, or a size is invalid.
        BackendUnavailable: the store cannot be opened.
    """
    return Cached(model, config)


class Cached:
    """A prefix cache under a model's `generate()`. A context manager; callable from any thread.

    `generate` takes one more argument, `namespace`: a `Namespace` or a str. Only calls in the same namespace share.

    Args:
        model, config: see `cached`.
        clock: monotonic, in seconds.
        sleep: waits for a number of seconds while storage answers.
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig = EngineConfig(),
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._model: Any = _plain_model(model)
        loaded = _loaded(self._model, config)
        self._config, self._clock, self._sleep = config, clock, sleep
        self._max_context = loaded.max_context
        self._weights = Weights(self._model)
        with torch.inference_mode(False), torch.no_grad():
            self._copies, sizes, self._undo = copies_of(loaded, config)
            try:
                self._cache = build_cache(loaded, config, self._copies.pools, TokenKeys(), sizes, clock)
            except BaseException:
                self._undo()
                raise
        self._tiers = self._cache.tiers
        if self._tiers is not None:
            self._tiers.enter_identity()
            if config.tiers.warm:
                self._tiers.warm()
        self._lock = threading.RLock()  # guards everything below but `_here`, and all that has to do with leases
        self._idle = threading.Condition(self._lock)
        self._counts: Counter[str] = Counter()
        self._passed: Counter[str] = Counter()
        self._running = 0
        self._closed = False
        self._here = _Here()
        self._former = vars(self._model).get("generate")
        self._generate: Callable[..., Any] = self._model.generate
        self._hooks = (
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            self._model.register_forward_hook(self._after, with_kwargs=True),
        )
        self._model.generate = self._wrapped()
        _WITH_CACHE.add(self._model)

    # ------------------------------------------------------------ what users call

    def stats(self) -> GenerateStats:
        """Returns the counts."""
        with self._lock:
            return GenerateStats(
                calls=self._counts["calls"],
                passed=dict(self._passed),
                prompts=self._counts["prompts"],
                prompt_tokens=self._counts["prompt_tokens"],
                cached_tokens=self._counts["cached_tokens"],
                unkept=self._counts["unkept"],
                cache=self._cache.stats(),
                tiers=None if self._tiers is None else self._tiers.stats(),
            )

    def flush(self) -> int:
        """Evicts every prefix that no call uses, from device and host; returns the number of device pages freed."""
        with self._lock:
            return self._cache.flush()

    def check(self) -> None:
        """Verifies the cache and its pools; slow.

        Raises:
            CorruptTree: names the rule that is broken.
        """
        with self._lock:
            self._cache.check()

    def drain(self, timeout_s: float) -> bool:
        """Waits until what was computed is on the host and in storage; returns whether it is. Other calls wait."""
        with self._lock:
            return self._tiers is None or self._tiers.drain(timeout_s)

    def close(self) -> None:
        """Leaves the model as it was, and ends the tiers once calls on other threads have ended; a second does nothing.

        Pending pages are written to storage first.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True  # calls that begin now run without the cache
            mine = self._here.call is not None
            self._idle.wait_for(lambda: self._running == mine)
            for hook in self._hooks:
                hook.remove()
            if self._former is None:
                del self._model.generate
            else:
                self._model.generate = self._former
            self._undo()
            _WITH_CACHE.discard(self._model)
            if self._tiers is not None:
                end_tiers(self._tiers)

    def __enter__(self) -> Self:
        """The cache."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the cache."""
        self.close()

    def __reduce__(self) -> str:
        """Refuses to copy: a copy of the model would call the original."""
        raise TypeError("a model with a prefix cache cannot be copied or pickled: close the cache first")

    # ------------------------------------------------------------ a call of generate()

    def _wrapped(self) -> Callable[..., Any]:
        @functools.wraps(self._generate)
        def generate(*args: Any, namespace: Namespace | str | None = None, **options: Any) -> Any:
            return self._call(_Call(_namespace(namespace)), args, options)

        return generate

    def _call(self, call: _Call, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self._here.call is not None:  # transformers drafts with the model itself
            with self._suspended():
                return self._generate(*args, **options)
        with self._lock:
            if self._closed:
                return self._generate(*args, **options)
            self._running += 1
            self._counts["calls"] += 1
        self._here.call = call
        try:
            self._look_at(call, args, options)
            result = self._generate(*args, **options)
            if call.cache is not None:
                self._keep_answers(call, result)
            return result
        finally:
            self._here.call = None
            self._end(call)

    def _look_at(self, call: _Call, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Passes a call whose way of generating is not known, or does not allow a hit."""
        arguments = inspect.signature(self._generate).bind(*args, **options).arguments
        others = arguments.get("kwargs", {})
        config, _ = self._model._prepare_generation_config(arguments.get("generation_config"), **others)
        mode = config.get_generation_mode(arguments.get("assistant_model"))
        call.assisted = mode == GenerationMode.ASSISTED_GENERATION
        drafts_itself = getattr(config, "assistant_early_exit", None) or getattr(config, "use_mtp", None)
        reasons = {
            "the model is in training mode": self._model.training,
            "past_key_values": any(others.get(name) is not None for name in _CACHES),
            "custom_generate": arguments.get("custom_generate") is not None,
            f"{mode.value}": mode not in _MODES,
            "the model drafts for itself": drafts_itself,
            "prefill_chunk_size": config.prefill_chunk_size,
            "autocast": torch.is_autocast_enabled(self._model.device.type),
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), None):
            self._pass(call, reason)

    def _pass(self, call: _Call, reason: str) -> None:
        """Lets a call run without the cache."""
        call.passed = True
        with self._lock:
            self._passed[reason] += 1
            if self._passed[reason] == 1:
                log.warning("generate() runs without the prefix cache: %s", reason)

    def _end(self, call: _Call) -> None:
        with self._lock:
            for row in call.rows:
                if row.lease is not None:
                    row.lease.finish(row.kept)
            self._cache.poll(self._clock())
            self._running -= 1
            self._idle.notify_all()

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        """Lets the hooks ignore forwards and calls of `generate` inside the `with` block."""
        call, self._here.call = self._here.call, _Call(Namespace(), passed=True)
        try:
            yield
        finally:
            self._here.call = call

    # ------------------------------------------------------------ the hooks

    def _before(self, _: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        call = self._here.call
        if call is None or call.passed or call.cache is not None:
            return None
        try:
            prompt = self._prompt(call, args, inputs)
            with self._suspended():
                columns = self._start(call, *prompt)
        except _Passed as reason:
            self._pass(call, str(reason))
            return None
        rest = {name: inputs[name][..., columns:] for name in _SLICED if inputs.get(name) is not None}
        return args, {**inputs, **rest}

    def _after(self, _: Any, args: tuple[Any, ...], inputs: dict[str, Any], output: Any) -> None:
        call = self._here.call
        if call is None or call.cache is None or _cache_of(inputs) is not call.cache:
            return
        if not call.columns:
            call.columns = call.width
            for index, row in enumerate(call.rows):
                self._keep(call.cache, index, row, len(row.tokens), row.pad, state=True)
        elif not call.assisted:  # there, the next forward decides which tokens stay
            call.steps.append(inputs["input_ids"])
            call.columns += inputs["input_ids"].shape[1]
            self._keep_states(call)
        if not call.assisted and self._copies.recorded(call.cache) > self._config.token_budget:
            self._keep_steps(call)
            self._copies.forget(call.cache)

    # ------------------------------------------------------------ the first forward

    def _prompt(
        self, call: _Call, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, DynamicCache, list[_Row]]:
        """Returns the ids of a first forward, [rows, columns], its empty cache, and its rows without their padding.

        Raises:
            _Passed: its inputs are not all known.
        """
        names = (name for name, value in inputs.items() if value is not None and value is not False)
        unknown = [name for name in names if name not in _INPUTS]
        tokens, cache, keep = inputs.get("input_ids"), _cache_of(inputs), inputs.get("logits_to_keep")
        if args or unknown or tokens is None or tokens.dim() != 2:
            raise _Passed(f"inputs: {', '.join(sorted(unknown)) or 'not only input_ids'}")
        if cache is None:
            raise _Passed("use_cache=False")
        if type(cache) is not DynamicCache or cache.offloading or not self._copies.fits(cache):
            raise _Passed(f"a cache of another kind: {type(cache).__name__}")
        if call.assisted and type(keep) is not int:
            raise _Passed("an assistant, and a model that computes all logits")
        ahead = max(keep - 1, 0) if type(keep) is int else 0  # tokens that an assistant drafted
        ids = tokens[:, : tokens.shape[1] - ahead]
        pads = _padding(inputs.get("attention_mask"), tuple(tokens.shape))
        if not _are_counted(inputs.get("position_ids"), pads, tokens.shape[1]):
            raise _Passed("position_ids")
        rows = [_Row(part[pad:], pad) for part, pad in zip(ids.cpu().numpy().astype(np.int32), pads, strict=True)]
        if not all(0 < len(row.tokens) <= self._max_context for row in rows):
            raise _Passed("a prompt longer than the model's context")
        return ids, cache, rows

    def _start(self, call: _Call, ids: torch.Tensor, cache: DynamicCache, rows: list[_Row]) -> int:
        """Fills the cache with what there is of the prompts, and returns its columns."""
        width = ids.shape[1]
        name = self._weights.name_in(call.namespace)
        if name is None:
            raise _Passed("rows with adapters of their own")
        wanted = self._prefetch(rows, name)
        call.rows, call.width = rows, width
        try:
            alone = self._pays_alone(rows, width, name)
            for index, row in enumerate(rows):
                self._lease(row, name)
                if alone:
                    own = ids[index : index + 1, row.pad :]
                    self._advance(self._copies.new_cache(), row, own, [*self._checkpoints(row), own.shape[1] - 1], 0)
        except (OutOfPages, BadTokens) as error:
            raise _Passed(f"{type(error).__name__} at the start") from error
        finally:
            with self._lock:
                for prefetch in wanted:
                    prefetch.revoke()
        call.cache = cache
        self._copies.record(cache)
        columns = self._copies.common([(row.pad, row.kept) for row in rows], width)
        with self._lock:
            self._counts["prompts"] += len(rows)
            self._counts["prompt_tokens"] += sum(len(row.tokens) for row in rows)
            self._counts["cached_tokens"] += sum(min(row.hit, max(0, columns - row.pad)) for row in rows)
        if columns:
            self._copies.fill(cache, [row.place for row in rows], columns)
        elif self._copies.has_states and any(row.pad for row in rows):
            for row in rows:
                row.full = True  # its state has seen the padding
        if len(rows) == 1 and not alone and not rows[0].pad:
            columns = self._advance(cache, rows[0], ids, self._checkpoints(rows[0]), columns)
        return columns

    def _pays_alone(self, rows: Sequence[_Row], width: int, name: Namespace) -> bool:
        """Returns whether rows should be computed one by one, so that each hits what those before it have computed."""
        shortest = min(len(row.tokens) for row in rows)
        if len(rows) == 1 or (self._copies.has_states and shortest == 1):
            return self._copies.has_states and rows[0].pad > 0 and shortest > 1
        with self._lock:
            hits = [self._cache.peek(row.tokens, name) for row in rows]
        alone = 0
        for index, row in enumerate(rows):
            shared = max((common_tokens(row.tokens[:-1], other.tokens) for other in rows[:index]), default=0)
            alone += len(row.tokens) - max(hits[index], shared // self._cache.page_size * self._cache.page_size)
        start = self._copies.common([(row.pad, hit) for row, hit in zip(rows, hits, strict=True)], width)
        return 2 * alone <= len(rows) * (width - start)

    def _prefetch(self, rows: Sequence[_Row], name: Namespace) -> list[Prefetch]:
        """Waits for what storage has of the prompts."""
        if self._tiers is None:
            return []
        with self._lock:
            self._cache.poll(self._clock())
            wanted = [self._tiers.prefetch(row.tokens, name) for row in rows]
            prefetches = [prefetch for prefetch in wanted if prefetch is not None]
            waiting = any(prefetch.waiting for prefetch in prefetches)
        while waiting:
            self._sleep(_WAIT_S)
            with self._lock:
                self._cache.poll(self._clock())
                waiting = any(prefetch.waiting for prefetch in prefetches)
        return prefetches

    def _lease(self, row: _Row, name: Namespace) -> None:
        with self._lock:
            row.lease = self._cache.lease(row.tokens, name)
            if self._tiers is not None and (load := self._tiers.load(row.lease)) is not None:
                load.wait()
            row.hit = row.kept = row.lease.hit

    def _checkpoints(self, row: _Row) -> list[int]:
        """Returns where the state of a prompt is kept."""
        if not self._copies.has_states or row.lease is None or not self._cache.enabled:
            return []
        planned = plan_checkpoints(
            row.lease.hit,
            max(row.lease.reach, row.lease.hit),  # what was loaded is no reach
            len(row.tokens),
            self._cache.page_size,
            interval=self._config.checkpoint_tokens,
            limit=self._config.states_per_path,
        )
        return list(planned)

    def _advance(self, cache: DynamicCache, row: _Row, ids: torch.Tensor, ends: Sequence[int], begin: int) -> int:
        """Computes a row in a cache of its own up to each of some ends, and keeps it; returns where it is then.

        Args:
            cache: fresh, or what `begin` positions left.
            row: without padding in this cache.
            ids: of the row, [1, positions].
            ends: ascending.
            begin: positions that the cache has; a fresh one is filled with what is kept of the row.
        """
        if not begin and row.kept:
            begin = row.kept
            self._copies.fill(cache, [row.place._replace(pad=0)], begin)
        for end in ends:
            if end > begin:
                self._copies.run(cache, ids[:, begin:end], begin)
                self._keep(cache, 0, row, end, 0, state=True)
                begin = end
        return begin

    # ------------------------------------------------------------ keeping

    def _keep(self, cache: DynamicCache, index: int, row: _Row, upto: int, pad: int, *, state: bool = False) -> None:
        """Keeps a row up to a position, as far as there are pages; `state`: the cache's states are at this position."""
        upto = min(upto, self._max_context)
        with self._lock:
            if row.full or row.lease is None or not self._cache.enabled:
                return
            try:
                row.lease.reserve(max(0, upto - row.lease.reserved))
                if state and self._copies.has_states:
                    self._copies.store_state(cache, index, row.lease.state)
                    if upto % self._cache.page_size == 0 and upto > row.kept:
                        row.lease.checkpoint(upto)
                while row.kept < upto and not row.full:
                    end = min(row.kept + self._config.token_budget, upto)
                    row.lease.slide(self._copies.slides_from(row.kept), end)
                    row.full = not self._copies.write(cache, index, row.place._replace(pad=pad), row.kept, end)
                    if not row.full:
                        row.lease.publish(end)
                        row.kept = end
            except OutOfPages:
                row.full = True
                self._counts["unkept"] += 1

    def _keep_states(self, call: _Call) -> None:
        """Copies the states of rows that are at a page boundary."""
        due = [not (call.columns - row.pad) % self._cache.page_size for row in call.rows]
        if not self._copies.has_states or call.cache is None or not any(due):
            return
        self._learn(call)
        for index, row in enumerate(call.rows):
            position = len(row.tokens)
            if not due[index] or row.full or row.lease is None or position > self._max_context:
                continue
            with self._lock:
                try:
                    row.lease.reserve(max(0, position - row.lease.reserved))
                    self._copies.store_state(call.cache, index, row.lease.state)
                    row.lease.checkpoint(position)
                except OutOfPages:
                    row.full = True
                    self._counts["unkept"] += 1

    def _learn(self, call: _Call) -> None:
        """Appends the tokens of the steps to their rows."""
        if not call.steps:
            return
        tokens = torch.cat(call.steps, 1).cpu().numpy().astype(np.int32)
        call.steps.clear()
        for row, more in zip(call.rows, tokens, strict=True):
            row.tokens = np.concatenate([row.tokens, more])
            with self._lock:
                if row.lease is not None and not row.full:
                    row.lease.append(more)

    def _keep_steps(self, call: _Call) -> None:
        """Keeps what the steps have computed."""
        self._learn(call)
        for index, row in enumerate(call.rows):
            upto = len(row.tokens) if len(call.rows) == 1 else max(_end_of_text(row.tokens), row.kept)
            if call.cache is not None:
                self._keep(call.cache, index, row, upto, row.pad)

    def _keep_answers(self, call: _Call, result: Any) -> None:
        """Keeps what the forwards after the first one have computed, and leaves the cache as transformers would."""
        assert call.cache is not None
        if not call.assisted:
            self._keep_steps(call)
            self._copies.restore(call.cache)
        elif self._copies.whole:
            sequences = result if isinstance(result, torch.Tensor) else result.sequences
            call.steps.append(sequences[:, call.width : call.cache.get_seq_length()])
            self._keep_steps(call)


# ---------------------------------------------------------------- what a call is made of


class _Passed(Exception):
    """The call runs without the cache; the message says why."""


@dataclass(slots=True)
class _Row:
    """One sequence of a call.

    Args:
        tokens: those whose KV is computed or will be, without padding.
        pad: columns of padding before them.
        lease: on the prompt.
        hit: positions that were there.
        kept: positions in pages.
        full: no more is kept.
    """

    tokens: NDArray[np.int32]
    pad: int
    lease: Lease | None = None
    hit: int = 0
    kept: int = 0
    full: bool = False

    @property
    def place(self) -> Place:
        """The places of its pages now."""
        assert self.lease is not None
        return Place(self.pad, self.lease.tables, self.lease.state)


@dataclass(slots=True)
class _Call:
    """One call of `generate`.

    Args:
        namespace: of its rows.
        assisted: another model drafts tokens.
        passed: it runs without the cache.
        cache: that of its forwards, once it has begun.
        rows: its sequences.
        width: columns of the prompts.
        columns: columns that are computed.
        steps: the ids of forwards after the first that no row has yet.
    """

    namespace: Namespace
    assisted: bool = False
    passed: bool = False
    cache: DynamicCache | None = None
    rows: list[_Row] = field(default_factory=list)
    width: int = 0
    columns: int = 0
    steps: list[torch.Tensor] = field(default_factory=list)


class _Here(threading.local):
    """The call that runs on this thread."""

    call: _Call | None = None


def _cache_of(inputs: Mapping[str, Any]) -> Any:
    return next((cache for name in _CACHES if (cache := inputs.get(name)) is not None), None)


def _padding(mask: torch.Tensor | None, shape: tuple[int, int]) -> list[int]:
    """Returns the columns of padding before each row of [rows, columns]; raises `_Passed` for other masks."""
    if mask is None:
        return [0] * shape[0]
    if tuple(mask.shape) != shape:
        raise _Passed("attention_mask")
    seen = mask.cpu().numpy() != 0
    pads = shape[1] - seen.sum(1)
    if not np.array_equal(seen, np.arange(shape[1]) >= pads[:, None]):
        raise _Passed("attention_mask")
    return [int(pad) for pad in pads]


def _are_counted(positions: torch.Tensor | None, pads: Sequence[int], width: int) -> bool:
    """Returns whether positions [..., rows or 1, width] are 0, 1, ... after the padding of each row."""
    if positions is None:
        return not any(pads)
    counted = np.arange(width) - np.array(pads)[:, None]
    if positions.shape[-1] != width:
        return False
    return bool(((positions.cpu().numpy() == counted) | (counted < 0)).all())


def _end_of_text(tokens: NDArray[np.int32]) -> int:
    """Returns the length without what ends a row that is shorter than others: all but one of its equal last tokens."""
    different = np.flatnonzero(tokens != tokens[-1])
    return int(different[-1]) + 2 if different.size else 1


def _namespace(given: Namespace | str | None) -> Namespace:
    if isinstance(given, Namespace):
        return given
    if given is not None and not isinstance(given, str):
        raise BadArgument("namespace", given, "a Namespace, a str or None")
    return Namespace(salt=given)


# ---------------------------------------------------------------- the model


_WITH_CACHE: WeakSet[PreTrainedModel] = WeakSet()


def _plain_model(model: Any) -> Any:
    """Returns the model of transformers, without PEFT's around it."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel) or not inner.can_generate():
        raise BadArgument("model", type(model).__name__, "a model of transformers that generates")
    if inner.training:
        raise BadArgument("model", "in training mode", "in evaluation mode: call model.eval()")
    if inner in _WITH_CACHE:
        raise BadArgument("model", type(inner).__name__, "a model without a prefix cache: close its cache first")
    return inner


def _loaded(model: PreTrainedModel, config: EngineConfig) -> LoadedModel:
    """Describes a model to the runtime. Its tokenizer has no effect: keys are tokens."""
    if config.tp != 1:
        raise BadArgument("tp", config.tp, "1")
    if config.kv_cache_dtype != "auto":
        allowed = "auto: the model computes with a cache of transformers, in its own dtype"
        raise BadArgument("kv_cache_dtype", config.kv_cache_dtype, allowed)
    name = str(model.config.model_type)
    devices = {str(weight.device) for weight in model.parameters()}
    if len(devices) > 1 or "meta" in devices or any(isinstance(weight, DTensor) for weight in model.parameters()):
        raise UnsupportedModel(f"{name}: its weights are on {', '.join(sorted(devices))}; they must be on one device")
    if model.dtype not in TOLERANCE:
        raise UnsupportedModel(f"{name}: its dtype is {model.dtype}, not one of {', '.join(map(str, TOLERANCE))}")
    tokenizer: Any = None
    return LoadedModel(model, tokenizer, name, model.dtype, trained_context(model.config) or _LONGEST)

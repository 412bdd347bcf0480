"""An engine without a model, for tests of the layers above it: same interface, scripted answers, simulated time.

The tokenizer has one token per byte. The answer to a prompt is `answer(prompt)`, one token per step. The cache is a
list of the prompts seen, shared within a namespace, hit in whole pages.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from jinja2 import TemplateError

from mainstem.cache.explain import Stretch, Stretches
from mainstem.cache.prefix_cache import CacheStats, PoolStats
from mainstem.cache.quotas import Quotas
from mainstem.cache.retention import Kept, RetentionStats
from mainstem.cache.tree import Survey, Tree
from mainstem.errors import BadArgument, BadTokens, EngineClosed, EngineFull, RequestTooLong
from mainstem.runtime.engine_core import EngineStats
from mainstem.runtime.memory.shares import OwnerUsage
from mainstem.runtime.request import Completion, Delta, Prefix, Request, TokenLogprob, Usage
from mainstem.runtime.sampling.grammars import Grammars
from mainstem.runtime.schedule.meter import Totals
from mainstem.runtime.schedule.timeline import Phase
from mainstem.runtime.text.vision import VisionStats
from mainstem.settings.engine import EngineConfig, SamplingParams


class FakeTokenizer:
    """One token per byte, 0 .. 255."""

    chat_template = "a template"
    all_special_ids: Sequence[int] = ()

    def __len__(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte for byte in range(128)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False, **options: object) -> str:
        return bytes(int(token) for token in tokens).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        hint: str = "",
    ) -> str:
        assert not tokenize
        for i, message in enumerate(messages):
            if message["role"] == "system" and i > 0:
                raise TemplateError("a system message comes first")
        answer = "<assistant>" if add_generation_prompt else ""
        text = hint + "".join(f"<{message['role']}>{message['content']}\n" for message in messages) + answer
        return text.removesuffix("\n") if continue_final_message else text


class FakeCounters(SimpleNamespace):
    """Counters as the core returns them, with the values that a test wants."""

    def as_dict(self) -> dict[str, int]:
        return vars(self)


def cache_stats(queried: int, hit: int) -> CacheStats:
    leases: Any = FakeCounters(queried=queried, hit=hit, checkpoints=5, checkpoints_missed=2)
    tree: Any = FakeCounters(evicted_pages=7)
    pools = {"full": PoolStats(100, 60, 30, 10, 8), "state": PoolStats(9, 2, 4, 3, 1)}
    retention = RetentionStats(
        3, 1, 2, 1, 4, 6, {"full": 5, "state": 2}, {"full": 7, "state": 0}, {"full": 25, "state": 2}
    )
    return CacheStats(leases, tree, pools, retention)


def embedding(tokens: Sequence[int]) -> np.ndarray:
    """What stands for the embedding of a prompt: float32 [4], of length 1."""
    found = np.array([len(tokens), sum(tokens), tokens[0], -tokens[-1]], np.float64)
    return (found / np.linalg.norm(found)).astype(np.float32)


class FakeStream:
    """A scripted stream. `cancelled` records that it was cancelled before its end."""

    def __init__(self, engine: FakeEngine, request: Request, cached: int) -> None:
        self.id = f"fake-{len(engine.streams)}"
        self.request = request
        self.cancelled = False
        self.ended = False
        self._engine = engine
        self._cached = cached

    def cancel(self) -> None:
        if not self.ended:
            self.cancelled = True

    def __iter__(self) -> Iterator[Delta]:
        for delta in self._deltas():
            time.sleep(self._engine.step_s)
            yield delta

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for delta in self._deltas():
            await asyncio.sleep(self._engine.step_s)
            yield delta

    def result(self, timeout_s: float | None = None) -> Completion:
        deltas = list(self)
        assert deltas[-1].finish_reason
        assert deltas[-1].usage
        return Completion(
            "".join(delta.text for delta in deltas),
            tuple(token for delta in deltas for token in delta.tokens),
            tuple(entry for delta in deltas for entry in delta.logprobs),
            deltas[-1].finish_reason,
            deltas[-1].usage,
        )

    def _deltas(self) -> Iterator[Delta]:
        params = self.request.params
        prompt = self._engine.tokenizer.decode(self.request.tokens)
        if prompt.endswith("crash!"):
            self.ended = True
            raise EngineClosed("a secret of the engine")
        if prompt.endswith("fail!"):
            yield self._last("error", 0, error="a secret of the engine")
            return
        answer, said = self._engine.answer_to(self.request).encode(), bytes(self.request.said.tolist())
        answer = said + answer[len(said) :]
        cut, stop = self._end(answer)
        made = 0
        if params.prompt_logprobs is not None and len(self.request.tokens) > params.first_scored:
            yield Delta("", prompt_logprobs=self._prompt_logprobs(params.prompt_logprobs))
        if params.embedding:
            yield Delta("", embedding=embedding(self.request.tokens.tolist()))
        for token in answer[: min(cut, params.max_tokens)]:
            if self.cancelled or self._engine.closed:
                yield self._last("cancelled", made)
                return
            made += 1
            yield Delta(chr(token), (token,), self._logprobs(token) if made > len(said) else ())
        if stop is None and params.max_tokens <= cut:
            yield self._last("length", made)
        else:
            yield self._last("stop", made, stop=stop)

    def _end(self, answer: bytes) -> tuple[int, str | None]:
        """Returns after how many tokens an answer ends, and by which stop text."""
        params = self.request.params
        if self.request.content is None or not params.stop:
            found = ((answer.find(text.encode()), text) for text in params.stop if text.encode() in answer)
            cut, stop = min(found, default=(len(answer), None))
            return (cut, stop) if cut < params.max_tokens else (len(answer), None)
        content = self.request.content()
        for made, token in enumerate(answer[: params.max_tokens], 1):
            content.feed(chr(token))
            if content.stop is not None:
                return made, content.stop
        content.close(len(answer) >= params.max_tokens)
        return len(answer), content.stop

    def _logprobs(self, token: int) -> tuple[TokenLogprob, ...]:
        best = self.request.params.logprobs
        if best is None:
            return ()
        top = tuple((65 + i, -float(i) if i < 2 else float("-inf")) for i in range(best))
        return (TokenLogprob(token, -0.5, top),)

    def _prompt_logprobs(self, best: int) -> tuple[TokenLogprob, ...]:
        tokens = self.request.tokens.tolist()
        top = tuple((65 + i, -float(i)) for i in range(best))
        first = self.request.params.first_scored
        return tuple(TokenLogprob(token, -float(at), top, rank=at + 1) for at, token in [*enumerate(tokens)][first:])

    def _last(self, reason: str, made: int, error: str | None = None, stop: str | None = None) -> Delta:
        self.ended = True
        engine, request = self._engine, self.request
        explanation = engine.stretches(request, self._cached) if engine.config.explain else None
        times = (0.001, 0.02, 0.04)
        usage = Usage(
            len(request.tokens), self._cached, made, *times, prefixes=self._prefixes(), phases=engine.phases,
            explanation=explanation, weight_versions=engine.weight_versions,
        )  # fmt: skip
        return Delta("", (), (), reason, usage, error, stop)

    def _prefixes(self) -> tuple[tuple[Prefix, Kept], ...]:
        """Whole pages are cached; those for which a time is given are retained, up to the engine's bound."""
        size, most = self._engine.config.page_size, self._engine.most_retained
        found = [(each, each.end // size * size) for each in self.request.hints.prefixes]
        return tuple((each, Kept(min(whole, most) if each.retain_s else 0, whole)) for each, whole in found)


class FakeEngine:
    """Args:
    answer: the text that follows a prompt.
    step_s: seconds per token.
    max_waiting: limit of streams open at a time.
    """

    name = "fake"
    vision: Any = None
    has_states = False
    exact = "no: it is a fake"
    embedding_size = 4
    dtype = "float32"
    pages = 100

    def __init__(
        self,
        answer: Callable[[str], str] = lambda prompt: "Hello, world.",
        *,
        step_s: float = 0.0,
        max_context: int = 4096,
        max_waiting: int = 64,
    ) -> None:
        self.answer = answer
        self.step_s = step_s
        self.max_context = max_context
        self.max_waiting = max_waiting
        self.tokenizer = FakeTokenizer()
        self.grammars = Grammars(self.tokenizer, 256)
        self.config = EngineConfig()
        self.streams: list[FakeStream] = []
        self.failure: BaseException | None = None
        self.closed = False
        self.draining = False
        self.images: VisionStats | None = None
        self.missed: dict[str, int] = {}
        self.adapters: tuple[str, ...] = ()
        self.updates: list[tuple[str, str, int]] = []
        self.weight_versions: tuple[tuple[int, int], ...] = ((0, 0),)
        self.adapter_paths: dict[str, str] = {}
        self.removed: list[tuple[list[int], Any]] = []
        self.advised: list[tuple[str, list[int], Any, float | None]] = []
        self.kept = Kept(16, 32)  # what comes of any advice
        self.most_retained = 1 << 20  # tokens of a prefix that a request marks
        self.tier_bytes: tuple[int, ...] = (1000, 4000)
        self.quotas = Quotas()
        self.used: dict[bytes, OwnerUsage] = {}
        self.published: list[list[int]] = []
        self._seen: dict[str, list[np.ndarray]] = {}
        self.shown = Tree(page_size=16, tiers=2)  # what `survey` describes
        self.surveyed: list[int] = []
        self.why: dict[int, Stretch] = {}  # how what is missed from a position on is explained, by the position
        self.phases: tuple[Phase, ...] = ()
        self._lock = threading.Lock()

    def submit(self, request: Request, *, on_progress: Callable[[int, int], None] | None = None) -> FakeStream:
        if self.closed or self.draining:
            raise EngineClosed("closed")
        if request.tokens.max() > 255:
            raise BadTokens(f"token {request.tokens.max()}: must be 0 .. 255")
        if len(request.tokens) + request.params.max_tokens > self.max_context:
            raise RequestTooLong("prompt", len(request.tokens), self.max_context, answer=request.params.max_tokens)
        if len(self.running()) >= self.max_waiting:
            raise EngineFull(f"as many requests wait as max_waiting allows: {self.max_waiting}")
        with self._lock:
            stream = FakeStream(self, request, self._look_up(request))
            self.streams.append(stream)
        if on_progress:
            on_progress(len(request.tokens), len(request.tokens))
        return stream

    def answer_to(self, request: Request) -> str:
        """Returns the text that follows a request."""
        return self.answer(self.tokenizer.decode(request.tokens))

    def running(self) -> list[FakeStream]:
        return [stream for stream in self.streams if not stream.ended and not stream.cancelled]

    def stats(self) -> EngineStats:
        ended = [stream for stream in self.streams if stream.ended]
        asked = sum(len(stream.request.tokens) for stream in ended)
        hit = sum(stream._cached for stream in ended)
        return EngineStats(
            running=len(self.running()),
            waiting=0,
            adapters=len(self.adapters),
            totals=Totals(len(self.streams), prompt_tokens=asked, cached_tokens=hit, missed=self.missed),
            cache=cache_stats(asked, hit),
            compiled_grammars=self.grammars.compiled,
            exact=False,
            vision=self.images,
        )

    def stretches(self, request: Request, cached: int) -> Stretches:
        end = len(request.tokens)
        found = [Stretch(0, cached, "device")] if cached else []
        why = self.why.get(cached, Stretch(cached, end, cause="never_seen"))
        return (*found, replace(why, begin=cached, end=end))

    def explain(self, request: Request, *, distances: bool = False) -> Stretches:
        seen = self._seen.get(repr(request.namespace), [])
        best = max((_common(tokens, request.tokens[:-1]) for tokens in seen), default=0)
        return self.stretches(request, best - best % self.config.page_size)

    def flush(self) -> int:
        pages = sum(len(tokens) // self.config.page_size for seen in self._seen.values() for tokens in seen)
        self._seen.clear()
        return pages

    def remove(self, tokens: Any, namespace: Any = None) -> int:
        self.removed.append((list(tokens), namespace))
        return 1

    def advise(
        self,
        action: str,
        tokens: Any,
        namespace: Any = None,
        *,
        ttl_s: float | None = None,
        **next_use: float,
    ) -> Kept:
        self.advised.append((action, list(tokens), namespace, next_use or ttl_s))
        return self.kept

    def set_quotas(self, quotas: Quotas) -> None:
        self.quotas = quotas

    def usage(self) -> dict[bytes, OwnerUsage]:
        return self.used

    def publish_prefix(self, tokens: Any) -> int:
        self.published.append(list(tokens))
        return len(tokens)

    def load_adapter(self, name: str, path: str | Path) -> None:
        if not Path(path).is_dir():
            raise BadArgument("path", str(path), "a folder")
        self.adapter_paths[name] = str(path)
        self.adapters = tuple(self.adapter_paths)

    def unload_adapter(self, name: str) -> None:
        if name not in self.adapter_paths:
            raise BadArgument("adapter", name, "a loaded one")
        del self.adapter_paths[name]
        self.adapters = tuple(self.adapter_paths)

    def update_weights(self, weights: Any, *, mode: str = "strict", lag: int = 0) -> int:
        if not Path(weights).is_dir():
            raise BadArgument("weights", str(weights), "a folder that is there")
        self.updates.append((str(weights), mode, lag))
        return len(self.updates)

    def tree(self) -> str:
        return "".join(f"{name}: {len(seen)} prompts\n" for name, seen in self._seen.items()) or "(empty)\n"

    def survey(self, first: int, count: int) -> Survey:
        self.surveyed.append(count)
        return self.shown.survey(first, count)

    def generate(self, prompts: Sequence[str], params: SamplingParams) -> list[Completion]:
        requests = [Request(np.array(self.tokenizer.encode(prompt), dtype=np.int32), params) for prompt in prompts]
        return [self.submit(request).result() for request in requests]

    def drain(self, timeout_s: float) -> bool:
        self.draining = True
        deadline = time.monotonic() + timeout_s
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.running()

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _look_up(self, request: Request) -> int:
        seen = self._seen.setdefault(repr(request.namespace), [])
        best = max((_common(tokens, request.tokens[:-1]) for tokens in seen), default=0)
        seen.append(request.tokens)
        return best - best % self.config.page_size


def _common(left: np.ndarray, right: np.ndarray) -> int:
    n = min(len(left), len(right))
    differ = np.flatnonzero(left[:n] != right[:n])
    return int(differ[0]) if len(differ) else n

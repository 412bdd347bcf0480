"""Computes the next turn of a chat while nothing else runs, where a template changes what the model said.

Templates drop what a model thought before it answered, or trim what it said. The next turn then has other text, and so
no KV after the prompt of the last one. When an answer has ended and nobody waits, its conversation is rendered as the
client will send it back, up to where the user's next text begins, and computed as a prompt without an answer, at the
lowest priority. The next turn finds it.

    answered          | prompt | <think> ... </think> answer |
    next turn         | prompt | answer | head of the user's message | text of the user ...
                               '------- computed here -------'
    after a call      | prompt | call | head of the result | result ...
                               '- computed here -'

A request that comes ends it; pages that were computed by then stay in the cache.

Turns that do not come take a share of the time at most: a next turn costs what it took, and gets that back if it comes.
Its cost is multiplied by how many of the latest ones were begun for each that came, so a server whose clients do not
come back soon does next to nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import EngineClosed, MainstemError
from mainstem.metric import Metric, each
from mainstem.runtime.request import LOWEST_PRIORITY, Delta, Request, Usage
from mainstem.runtime.text.cuts import common_tokens
from mainstem.runtime.text.prompts import Prompts
from mainstem.server.apis.conversation import call
from mainstem.server.kept.answers import Turn
from mainstem.server.parsing.output import Arguments, Call, NoCall, OutputParser, PlainText, Text
from mainstem.server.run import Watcher
from mainstem.settings.engine import SamplingParams
from mainstem.share import Share

if TYPE_CHECKING:
    from mainstem.runtime.engine import Engine
    from mainstem.runtime.stream import Stream

log = logging.getLogger(__name__)

Outcome = Literal["started", "unchanged", "skipped", "over_share"]
_LATEST = 64
"""Next turns that may still come: one before them counts as computed in vain."""
_SAVED_UP_S = 600.0
"""Time whose share may be spent at once, so that a night without requests is not made up for."""


@dataclass(slots=True)
class TurnStats:
    """Counts of next turns since the start.

    Args:
        started: begun.
        unchanged: not begun, because they begin with the answer as it is, or differ by less than a page.
        skipped: not begun, because other requests ran or waited, or because they do not fit.
        over_share: not begun, because those in vain have taken their share of the time.
        used, unused: of those begun, the prompts that came and begin so, and those for which none came in time.
        cached_tokens, computed_tokens: prompt tokens of those begun, which the engine counts as those of any prompt.
    """

    started: int = 0
    unchanged: int = 0
    skipped: int = 0
    over_share: int = 0
    used: int = 0
    unused: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0

    METRICS: ClassVar = (
        Metric("mainstem_precomputed_turns", "Next turns that could be computed, by outcome",
            each("{}", "started", "unchanged", "skipped", "over_share", "used", "unused"), ("outcome",)),
        Metric("mainstem_precomputed_turns_tokens", "Prompt tokens of next turns, also counted as those of prompts",
            each("{}_tokens", "cached", "computed"), ("kind",)),
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class _Ahead:
    """A next turn that was begun.

    Args:
        request: computes it.
        stream: of that request.
        used: whether a prompt came that begins so.
        cost_s: what it took of the share; 0 while it is computed.
    """

    request: Request
    stream: Stream = field(repr=False)
    used: bool = False
    cost_s: float = 0.0


class Precompute:
    """Computes next turns. Any thread may call it; the work is done on a thread of its own.

    Args:
        engine: computes them.
        prompts: of the model.
        share: of the time that those in vain may take, above 0, up to 1.
        said: returns a message of the assistant as the chat template takes it; see `Dialect.said`.
        clock: returns seconds, monotonic.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        share: float,
        said: Callable[[Mapping[str, Any]], dict[str, Any] | None] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._prompts, self._said, self._clock = engine, prompts, said, clock
        self._worker = ThreadPoolExecutor(1, "mainstem-precompute")
        self._lock = threading.Lock()  # guards all below
        self._share = Share(share, share * _SAVED_UP_S, clock)
        self._arrivals = 0
        self._stream: Stream | None = None
        self._stats = TurnStats()
        self._latest: deque[_Ahead] = deque()

    def watchers(self, turn: Turn, request: Request, parser: Callable[[], OutputParser] = PlainText) -> list[Watcher]:
        """Returns the watchers of a chat's only answer; none for other requests.

        Args:
            turn: of the request.
            request: whose answer it is.
            parser: makes the parser of replies, which finds the text that a client sends back.
        """
        self._count_used(request)
        if turn.messages is None or turn.template is None or not turn.template.generation_prompt:
            return []

        def answered(finish: str, usage: Usage | None, deltas: Sequence[Delta]) -> None:
            if finish in ("stop", "length"):
                self._worker.submit(self._run, turn, request, deltas, parser())

        return [Watcher(answered)]

    def give_way(self) -> None:
        """Stops computing, because a request comes."""
        with self._lock:
            self._arrivals += 1
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    def _count_used(self, request: Request) -> None:
        """Counts the next turns that a request begins with, and gives back what they cost."""
        with self._lock:
            for ahead in self._latest:
                if not ahead.used and _begins_with(request, ahead.request):
                    ahead.used = True
                    self._stats.used += 1
                    self._share.spend(-ahead.cost_s)

    def stats(self) -> TurnStats:
        """Returns the counts."""
        with self._lock:
            return replace(self._stats)

    def _run(self, turn: Turn, request: Request, answer: Sequence[Delta], parser: OutputParser) -> None:
        begun_s = self._clock()
        with self._lock:
            arrivals = self._arrivals
        made: _Ahead | Outcome
        try:
            made = self._begin(turn, request, answer, parser, arrivals)
        except MainstemError as error:
            log.debug("a next turn is not computed: %s", error)
            made = "skipped"
        except Exception:  # e.g. of a template
            log.exception("a next turn cannot be computed")
            made = "skipped"
        with self._lock:
            outcome = "started" if isinstance(made, _Ahead) else made
            setattr(self._stats, outcome, getattr(self._stats, outcome) + 1)
        if isinstance(made, _Ahead):
            self._finish(made, begun_s)
        else:
            with self._lock:
                self._share.spend(self._clock() - begun_s)

    def _begin(
        self, turn: Turn, request: Request, answer: Sequence[Delta], parser: OutputParser, arrivals: int
    ) -> _Ahead | Outcome:
        stats = self._engine.stats()
        if stats.running or stats.waiting:
            return "skipped"
        with self._lock:
            if not self._share.allows():
                return "over_share"
        tokens = self._next(turn, _client_message(answer, parser))
        known = np.concatenate([request.tokens, *(np.asarray(delta.tokens, np.int32) for delta in answer)])
        if tokens is None:
            return "unchanged"
        same = common_tokens(tokens, known)
        if same >= len(known) - 1 or len(tokens) - same < self._engine.config.page_size:  # the last is often an end
            return "unchanged"
        following = Request(tokens, SamplingParams(max_tokens=0), request.namespace, LOWEST_PRIORITY)
        ahead = _Ahead(following, self._engine.submit(following))
        with self._lock:
            came = self._arrivals > arrivals
            if not came:
                self._stream = ahead.stream
                self._latest.append(ahead)
            if len(self._latest) > _LATEST:
                self._stats.unused += not self._latest.popleft().used
        if came:
            ahead.stream.cancel()
            return "skipped"
        return ahead

    def _finish(self, ahead: _Ahead, begun_s: float) -> None:
        """Waits for the end of a next turn, and charges what it took."""
        try:
            usage = ahead.stream.result().usage
        except EngineClosed:
            return
        with self._lock:
            self._stats.cached_tokens += usage.cached_tokens
            self._stats.computed_tokens += usage.prompt_tokens - usage.cached_tokens
            if not ahead.used:
                begun_for_each = len(self._latest) / (1 + sum(each.used for each in self._latest))
                ahead.cost_s = (self._clock() - begun_s) * begun_for_each
                self._share.spend(ahead.cost_s)

    def _next(self, turn: Turn, answer: Mapping[str, Any]) -> NDArray[np.int32] | None:
        """Returns the next turn up to the text of the user, or of the first result of a tool, if it is known."""
        said = self._said(answer)
        if turn.messages is None or turn.template is None or said is None:
            return None
        calls = said.get("tool_calls")
        following = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls else {"role": "user"}
        rendered = self._prompts.before_next([*turn.messages, said], turn.template, following)
        return None if rendered is None else turn.tokenize(rendered)


def _client_message(answer: Sequence[Delta], parser: OutputParser) -> dict[str, Any]:
    """Returns an answer as its client sends it back: its text and its calls, without thoughts."""
    texts, calls = list[str](), dict[int, Call]()
    arguments: defaultdict[int, list[str]] = defaultdict(list)
    for piece in [*parser.feed("".join(delta.text for delta in answer)), *parser.close()]:
        match piece:
            case Text():
                texts.append(piece.text)
            case Call():
                calls[piece.number] = piece
            case Arguments():
                arguments[piece.number].append(piece.text)
            case NoCall():
                del calls[piece.number]
    if not calls:
        return {"role": "assistant", "content": "".join(texts)}
    made = [call(each.id, each.name, "".join(arguments[at]), custom=each.custom) for at, each in calls.items()]
    return {"role": "assistant", "content": "".join(texts) or None, "tool_calls": made}


def _begins_with(request: Request, computed: Request) -> bool:
    """Returns whether a request begins with a next turn that was computed."""
    length = len(computed.tokens)
    same = request.namespace == computed.namespace and len(request.tokens) >= length
    return same and np.array_equal(request.tokens[:length], computed.tokens)

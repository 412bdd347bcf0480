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
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import MainstemError
from mainstem.metric import Metric, each
from mainstem.runtime.request import LOWEST_PRIORITY, Delta, Request, Usage
from mainstem.runtime.text.cuts import common_tokens
from mainstem.runtime.text.prompts import Prompts
from mainstem.server.apis.conversation import call
from mainstem.server.kept.answers import Turn
from mainstem.server.parsing.output import Arguments, Call, NoCall, OutputParser, PlainText, Text
from mainstem.server.run import Watcher
from mainstem.settings.engine import SamplingParams

if TYPE_CHECKING:
    from mainstem.runtime.engine import Engine
    from mainstem.runtime.stream import Stream

log = logging.getLogger(__name__)

Outcome = Literal["started", "unchanged", "skipped"]
_MOST_WAITING = 64
"""Next turns that may still come: one that is older counts as computed in vain."""


@dataclass(slots=True)
class TurnStats:
    """Counts of next turns since the start.

    Args:
        started: begun.
        unchanged: not begun, because they begin with the answer as it is, or differ by less than a page.
        skipped: not begun, because other requests ran or waited, or because they do not fit.
        used, unused: of those begun, the prompts that came and begin so, and those for which none came in time.
    """

    started: int = 0
    unchanged: int = 0
    skipped: int = 0
    used: int = 0
    unused: int = 0

    METRICS: ClassVar = (
        Metric("mainstem_precomputed_turns", "Next turns that could be computed, by outcome",
            each("{}", "started", "unchanged", "skipped", "used", "unused"), ("outcome",)),
    )  # fmt: skip


class Precompute:
    """Computes next turns. Any thread may call it; the work is done on a thread of its own.

    Args:
        engine: computes them.
        prompts: of the model.
        said: returns a message of the assistant as the chat template takes it; see `Dialect.said`.
    """

    def __init__(
        self, engine: Engine, prompts: Prompts, said: Callable[[Mapping[str, Any]], dict[str, Any] | None] = dict
    ) -> None:
        self._engine, self._prompts, self._said = engine, prompts, said
        self._worker = ThreadPoolExecutor(1, "mainstem-precompute")
        self._lock = threading.Lock()  # guards all below
        self._arrivals = 0
        self._stream: Stream | None = None
        self._stats = TurnStats()
        self._waiting: deque[Request] = deque()  # the next turns that were computed, and did not come yet

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
        """Counts the next turns that a request begins with."""
        with self._lock:
            for computed in [each for each in self._waiting if _begins_with(request, each)]:
                self._waiting.remove(computed)
                self._stats.used += 1

    def stats(self) -> TurnStats:
        """Returns the counts."""
        with self._lock:
            return replace(self._stats)

    def _run(self, turn: Turn, request: Request, answer: Sequence[Delta], parser: OutputParser) -> None:
        with self._lock:
            arrivals = self._arrivals
        try:
            outcome = self._compute(turn, request, answer, parser, arrivals)
        except MainstemError as error:
            log.debug("a next turn is not computed: %s", error)
            outcome = "skipped"
        except Exception:  # e.g. of a template
            log.exception("a next turn cannot be computed")
            outcome = "skipped"
        with self._lock:
            setattr(self._stats, outcome, getattr(self._stats, outcome) + 1)

    def _compute(
        self, turn: Turn, request: Request, answer: Sequence[Delta], parser: OutputParser, arrivals: int
    ) -> Outcome:
        stats = self._engine.stats()
        if stats.running or stats.waiting:
            return "skipped"
        tokens = self._next(turn, _client_message(answer, parser))
        known = np.concatenate([request.tokens, *(np.asarray(delta.tokens, np.int32) for delta in answer)])
        if tokens is None:
            return "unchanged"
        same = common_tokens(tokens, known)
        if same >= len(known) - 1 or len(tokens) - same < self._engine.config.page_size:  # the last is often an end
            return "unchanged"
        params = SamplingParams(max_tokens=0)
        following = Request(tokens, params, request.namespace, LOWEST_PRIORITY)
        stream = self._engine.submit(following)
        with self._lock:
            came = self._arrivals > arrivals
            self._stream = None if came else stream
            if not came:
                self._waiting.append(following)
            if len(self._waiting) > _MOST_WAITING:
                self._waiting.popleft()
                self._stats.unused += 1
        if came:
            stream.cancel()
            return "skipped"
        return "started"

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

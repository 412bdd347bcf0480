"""Synthetic workloads with explicit parameters: generated traces of requests, reproducible by seed.

A workload is a frozen dataclass whose fields are all its parameters; `WORKLOADS` lists them by name. Sessions arrive by
a Poisson process, and each has one or more requests. A prompt joins up to three contents. Each content is an endless
text, of which the prompt takes a given number of tokens:

    chat, agents, tenants    | system prompt | the conversation so far      |
    documents                | system prompt | document       | question    |
    prompts                  | system prompt | question                     |
    best-of-n                | system prompt | problem                      |

Two prompts share blocks as long as their contents and the lengths of these agree. The name of a block is a hash of its
prompt up to the block's end, so a block always has the same parent.

Lengths and pauses are log-normal, given by median and sigma, because people and tools produce many small values and few
large ones. Numbers of turns are geometric, given by their mean. No session is running when a trace begins. The defaults
are plausible round numbers for each kind of use, and claim nothing more: set what you know of your traffic.

Equal seeds give equal traces with equal versions of NumPy, whose streams may change (NEP 19). Knows no caches.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BadArgument, check_integer
from mainstem.replay.trace import GOLDEN, Batch, Int64s, Trace, Uint64s, mix

Floats = NDArray[np.float64]

BLOCK_SIZE = 64
"""Default tokens per block: small enough that a turn of a chat adds a block."""

_BATCH_BLOCKS = 1 << 20
_MAX_LENGTH = 2**30  # so that no sum of lengths overflows
_SESSIONS_MARGIN = 1.5  # sessions of the first draw, relative to the mean

# Minimum and maximum of a field, by the end of its name.
_RANGES = {
    "per_s": (1e-6, 1e6),
    "tokens": (1, 10**8),
    "sigma": (0, 5),
    "zipf": (0, 10),
    "drift_s": (1e-3, math.inf),
    "_s": (0, 1e9),
}
_COUNTS = (1, 10**6)


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests as columns, before their blocks are named.

    Args:
        time_s: [n] arrival in seconds.
        contents: [n, k] the text in each place of the prompt.
        lengths: [n, k] its tokens.
        output_tokens: [n] tokens of the answer.
        tenant, kind: [n] indices; 0 is none.
        chat, turn: [n] as in `Batch`.
    """

    time_s: Floats
    contents: Uint64s
    lengths: Int64s
    output_tokens: Int64s
    tenant: Int64s
    kind: Int64s
    chat: Int64s
    turn: Int64s

    def __len__(self) -> int:
        return len(self.time_s)

    def take(self, order: Any) -> Requests:
        """Returns the requests with these indices, or in this slice, in this order."""
        return Requests(*(getattr(self, column.name)[order] for column in fields(self)))

    def first(self, count: int) -> Requests:
        """Returns the earliest requests, ordered by time."""
        return self.take(np.argsort(self.time_s, kind="stable")[:count])


class _Sessions:
    """When sessions begin and how many requests each has. One row per request, grouped by session.

    Attributes:
        start_s: [sessions] when each begins.
        owner: [n] the session of a request.
        turn: [n] from 1.
        first: [n] whether the request is the first of its session.
    """

    def __init__(self, start_s: Floats, sizes: Int64s) -> None:
        self.start_s = start_s
        self.owner = np.repeat(np.arange(len(sizes)), sizes)
        self._begin = np.cumsum(sizes) - sizes
        self.turn: Int64s = np.arange(len(self.owner)) - self._begin[self.owner] + 1
        self.first = self.turn == 1

    def __len__(self) -> int:
        return len(self.owner)

    def sums(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns [n] the running sum of the values within each session."""
        total = np.cumsum(values)
        before = (total - values)[self._begin]
        summed: NDArray[Any] = total - before[self.owner]
        return summed

    def times(self, pauses_s: Floats) -> Floats:
        """Returns [n] when each request arrives, given the pause before it; first requests have no pause."""
        times: Floats = self.start_s[self.owner] + self.sums(np.where(self.first, 0.0, pauses_s))
        return times


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Base of all workloads.

    Args:
        rate_per_s: sessions that begin per second, on average.

    Raises:
        BadArgument: a parameter is outside its range.
    """

    rate_per_s: float = 1.0

    kind: ClassVar[str]

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names of tenants. The first is "", no tenant."""
        return ("",)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of kinds of requests. The first is "", no kind."""
        return ("", self.kind)

    @property
    def in_full(self) -> Workload:
        """The workload with every parameter at its effective value."""
        return self

    @property
    def stated(self) -> str:
        """The kind, and every parameter as `--set` takes it, as a trace's notes state them."""
        values = (f"{each.name}={getattr(self, each.name):.15g}" for each in fields(self))
        return f"{self.kind} with {', '.join(values)}"

    @abstractmethod
    def requests(self, seed: np.random.SeedSequence, count: int) -> Requests:
        """Returns the earliest requests of endless sessions, ordered by time."""


@dataclass(frozen=True, kw_only=True)
class _Pure(Workload):
    """Sessions of one kind.

    Args:
        context_tokens: maximum length of a prompt. A conversation ends before it; other prompts are cut.
    """

    context_tokens: int = 131072

    _each: ClassVar[str] = ""  # the parameter that says how many requests a session has; without one it is 1

    def __post_init__(self) -> None:
        for parameter in fields(self):
            _check_range(parameter.name, getattr(self, parameter.name), whole=parameter.type == "int")

    def requests(self, seed: np.random.SeedSequence, count: int) -> Requests:
        """See `Workload.requests`."""
        sessions = math.ceil(_SESSIONS_MARGIN * count / getattr(self, self._each, 1.0))
        while True:
            sessions = min(sessions, count)  # each has at least one request, so more sessions cannot matter
            drawn = self._draw(np.random.default_rng(seed), sessions)
            # Requests before the start of the last session are complete.
            complete = drawn.time_s < drawn.time_s[drawn.turn == 1].max()
            if sessions == count or complete.sum() >= count:
                return drawn.first(count)
            sessions *= 2

    @abstractmethod
    def _draw(self, rng: np.random.Generator, sessions: int) -> Requests:
        """Draws all requests of this many sessions, grouped by session and in order."""

    def _starts(self, rng: np.random.Generator, sessions: int, burst: float = 1.0) -> Floats:
        """Draws [sessions] when they begin: `burst` at a time on average, at the workload's rate."""
        groups = np.repeat(np.arange(sessions), rng.geometric(1 / burst, sessions))[:sessions]
        times: Floats = np.cumsum(rng.exponential(burst / self.rate_per_s, sessions))[groups]
        return times


def _check_range(name: str, value: float, *, whole: bool = False) -> None:
    low, high = next((limits for end, limits in _RANGES.items() if name.endswith(end)), _COUNTS)
    types = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, types) or not low <= value <= high:
        raise BadArgument(name, value, f"a {'whole ' if whole else ''}number from {low:g} to {high:g}")


# --- drawing ------------------------------------------------------------------------------------------------------


def _lengths(rng: np.random.Generator, median: float | Floats, sigma: float, size: int) -> Int64s:
    """Draws [size] tokens, 1 or more."""
    return np.ceil(np.minimum(_log_normal(rng, median, sigma, size), _MAX_LENGTH)).astype(np.int64)


def _log_normal(rng: np.random.Generator, median: float | Floats, sigma: float, size: int) -> Floats:
    drawn: Floats = median * np.exp(sigma * rng.standard_normal(size))
    return drawn


def _texts(rng: np.random.Generator, index: Int64s) -> Uint64s:
    """Draws [n] names of contents, distinct from those of every other call."""
    return mix(rng.integers(2**64, dtype=np.uint64) + index.astype(np.uint64) * GOLDEN)


def _popular(rng: np.random.Generator, time_s: Floats, items: int, zipf: float, drift_s: float) -> Int64s:
    """Draws [n] the item requested at each time. By Zipf's law, the k-th rank has a weight of 1 / k ** zipf.

    An item holds a rank for `drift_s`, then another item takes it. Ranks change one after another, not together.
    Without drift, item k has rank k.
    """
    chances = np.cumsum(np.arange(1, items + 1, dtype=np.float64) ** -zipf)
    rank = np.minimum(np.searchsorted(chances, rng.random(len(time_s)) * chances[-1], side="right"), items - 1)
    phase = rng.random(items)[rank]
    step = rng.integers(1, max(items, 2), items)[rank]
    held: Int64s = (rank + np.floor(time_s / drift_s + phase).astype(np.int64) * step) % items
    return held


def _requests(
    sessions: _Sessions,
    time_s: Floats,
    places: Sequence[tuple[Uint64s, Int64s]],
    output_tokens: Int64s,
    *,
    tenant: Int64s | None = None,
    chats: bool = False,
) -> Requests:
    n = len(sessions)
    return Requests(
        time_s=time_s,
        contents=np.stack([content for content, _ in places], axis=1),
        lengths=np.stack([length for _, length in places], axis=1),
        output_tokens=output_tokens,
        tenant=np.zeros(n, np.int64) if tenant is None else tenant,
        kind=np.ones(n, np.int64),
        chat=sessions.owner if chats else np.full(n, -1),
        turn=sessions.turn,
    )


# --- workloads ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Conversations(_Pure):
    """Sessions in which every prompt is the previous one, its answer, and new tokens.

    Args:
        prompt_tokens: median length of a system prompt.
        prompt_sigma: sigma of these lengths.
        zipf: exponent of the popularity of system prompts; 0: all equally popular.
        drift_s: how long a system prompt keeps its rank; infinite: forever.
        length_sigma: sigma of the lengths of questions and answers, or of results and calls.
    """

    prompt_tokens: float = 500.0
    prompt_sigma: float = 0.5
    zipf: float = 1.0
    drift_s: float = math.inf
    length_sigma: float = 1.0

    def _converse(
        self, rng: np.random.Generator, sessions: _Sessions, time_s: Floats, prompts: int, new: Int64s, answers: Int64s
    ) -> tuple[Requests, Int64s]:
        """Returns the requests, and the index of the system prompt of each."""
        chosen = _popular(rng, sessions.start_s, prompts, self.zipf, self.drift_s)[sessions.owner]
        prompt = _lengths(rng, self.prompt_tokens, self.prompt_sigma, prompts)[chosen]
        prompt = np.minimum(prompt, self.context_tokens)
        so_far = sessions.sums(new + answers) - answers
        places = [(_texts(rng, chosen), prompt), (_texts(rng, sessions.owner), so_far)]
        requests = _requests(sessions, time_s, places, answers, chats=True)
        requests.lengths[sessions.first, 1] = np.minimum(so_far, self.context_tokens - prompt)[sessions.first]
        fits = sessions.first | (prompt + so_far <= self.context_tokens)
        return requests.take(fits), chosen[fits]


@dataclass(frozen=True, kw_only=True)
class Chat(_Conversations):
    """People who talk to an assistant, turn by turn; each turn repeats the whole conversation so far.

    Args:
        rate_per_s: chats that begin per second.
        turns: questions per chat, on average; geometric.
        think_s: median time between questions, for reading the answer and typing the next question.
        think_sigma: sigma of that time; at 1, one pause in ten is longer than 3.6 medians.
        question_tokens: median length: a few sentences.
        answer_tokens: median length: a few paragraphs.
        prompts: system prompts of the service: a few versions and languages.
    """

    kind, _each = "chat", "turns"
    turns: float = 5.0
    think_s: float = 30.0
    think_sigma: float = 1.0
    question_tokens: float = 80.0
    answer_tokens: float = 250.0
    prompts: int = 4

    def _draw(self, rng: np.random.Generator, sessions: int) -> Requests:
        return self._talk(rng, sessions, self.prompts)[0]

    def _talk(self, rng: np.random.Generator, count: int, prompts: int) -> tuple[Requests, Int64s]:
        sessions = _Sessions(self._starts(rng, count), rng.geometric(1 / self.turns, count))
        n = len(sessions)
        time_s = sessions.times(_log_normal(rng, self.think_s, self.think_sigma, n))
        questions = _lengths(rng, self.question_tokens, self.length_sigma, n)
        answers = _lengths(rng, self.answer_tokens, self.length_sigma, n)
        return self._converse(rng, sessions, time_s, prompts, questions, answers)


@dataclass(frozen=True, kw_only=True)
class Tenants(Chat):
    """Chats with the assistants of many tenants, each with its own system prompt; a few tenants are popular.

    Args:
        rate_per_s: chats that begin per second.
        prompts: tenants.
        prompt_tokens: longer than for a general assistant, because of a tenant's instructions and examples.
        turns: fewer than in general chats, as with a shop's support.
        zipf: 1 is Zipf's law proper: the second tenant has half as many chats as the first.
    """

    kind = "tenants"
    prompts: int = 100
    prompt_tokens: float = 1500.0
    prompt_sigma: float = 0.8
    turns: float = 3.0

    @property
    def tenants(self) -> tuple[str, ...]:
        """See `Workload.tenants`."""
        return ("", *(f"tenant {number}" for number in range(1, int(self.prompts) + 1)))

    def _draw(self, rng: np.random.Generator, sessions: int) -> Requests:
        requests, chosen = self._talk(rng, sessions, self.prompts)
        return replace(requests, tenant=chosen + 1)


@dataclass(frozen=True, kw_only=True)
class Agents(_Conversations):
    """Programs that work on a task by calling tools: long contexts that grow step by step at short intervals.

    Args:
        rate_per_s: tasks that begin per second; each is many requests.
        burst: tasks that begin together, on average, because a program starts several; geometric.
        steps: requests per task, on average; geometric.
        tool_s: median time between requests, for generating the call and running the tool.
        tool_sigma: sigma of that time; tests and searches take far longer than reading a file.
        task_tokens: median length of the task.
        result_tokens: median length of a tool's result.
        call_tokens: median length of an answer, which is mostly a call.
        prompts: kinds of agent, each with its own system prompt.
        prompt_tokens: median length of the instructions and the descriptions of all tools.
        length_sigma: sigma of the lengths of results and calls; these vary more than in chats.
    """

    kind, _each = "agents", "steps"
    rate_per_s: float = 0.2
    burst: float = 3.0
    steps: float = 20.0
    tool_s: float = 4.0
    tool_sigma: float = 1.0
    task_tokens: float = 400.0
    result_tokens: float = 500.0
    call_tokens: float = 120.0
    prompts: int = 3
    prompt_tokens: float = 6000.0
    length_sigma: float = 1.2

    def _draw(self, rng: np.random.Generator, sessions: int) -> Requests:
        tasks = _Sessions(self._starts(rng, sessions, self.burst), rng.geometric(1 / self.steps, sessions))
        n = len(tasks)
        time_s = tasks.times(_log_normal(rng, self.tool_s, self.tool_sigma, n))
        median = np.where(tasks.first, self.task_tokens, self.result_tokens)
        results = _lengths(rng, median, self.length_sigma, n)
        calls = _lengths(rng, self.call_tokens, self.length_sigma, n)
        return self._converse(rng, tasks, time_s, self.prompts, results, calls)[0]


@dataclass(frozen=True, kw_only=True)
class Documents(_Pure):
    """Questions about documents, some of them popular; every prompt repeats the whole document before the question.

    Args:
        rate_per_s: visits per second; in a visit, a user opens a document and asks about it.
        documents: number of documents.
        zipf: exponent of their popularity; somewhat lower than for words.
        drift_s: how long a document keeps its rank; infinite: forever.
        document_tokens: median length: about ten printed pages.
        document_sigma: sigma of these lengths.
        questions: questions per visit, on average; geometric.
        think_s: median time between questions.
        think_sigma: sigma of that time.
        question_tokens: median length.
        answer_tokens: median length.
        length_sigma: sigma of the lengths of questions and answers.
        prompt_tokens: length of the one system prompt.
    """

    kind, _each = "documents", "questions"
    rate_per_s: float = 0.5
    documents: int = 500
    zipf: float = 0.8
    drift_s: float = math.inf
    document_tokens: float = 6000.0
    document_sigma: float = 1.0
    questions: float = 4.0
    think_s: float = 20.0
    think_sigma: float = 1.0
    question_tokens: float = 50.0
    answer_tokens: float = 200.0
    length_sigma: float = 0.8
    prompt_tokens: int = 200

    def _draw(self, rng: np.random.Generator, sessions: int) -> Requests:
        visits = _Sessions(self._starts(rng, sessions), rng.geometric(1 / self.questions, sessions))
        n = len(visits)
        time_s = visits.times(_log_normal(rng, self.think_s, self.think_sigma, n))
        opened = _popular(rng, visits.start_s, self.documents, self.zipf, self.drift_s)[visits.owner]
        prompt = np.full(n, min(self.prompt_tokens, self.context_tokens), np.int64)
        question = np.minimum(_lengths(rng, self.question_tokens, self.length_sigma, n), self.context_tokens - prompt)
        document = _lengths(rng, self.document_tokens, self.document_sigma, self.documents)[opened]
        places = [
            (_texts(rng, np.zeros(n, np.int64)), prompt),
            (_texts(rng, opened), np.minimum(document, self.context_tokens - prompt - question)),
            (_texts(rng, np.arange(n)), question),
        ]
        return _requests(visits, time_s, places, _lengths(rng, self.answer_tokens, self.length_sigma, n))


@dataclass(frozen=True, kw_only=True)
class Prompts(_Pure):
    """A few long system prompts with many users, each of whom asks once.

    Args:
        rate_per_s: requests per second.
        prompts: number of system prompts.
        zipf: exponent of their popularity.
        drift_s: how long a system prompt keeps its rank; infinite: forever.
        prompt_tokens: median length: instructions with examples.
        prompt_sigma: sigma of these lengths.
        question_tokens: median length.
        answer_tokens: median length.
        length_sigma: sigma of the lengths of questions and answers.
    """

    kind = "prompts"
    rate_per_s: float = 2.0
    prompts: int = 5
    zipf: float = 1.0
    drift_s: float = math.inf
    prompt_tokens: float = 4000.0
    prompt_sigma: float = 0.5
    question_tokens: float = 150.0
    answer_tokens: float = 200.0
    length_sigma: float = 1.0

    def _draw(self, rng: np.random.Generator, sessions: int) -> Requests:
        users = _Sessions(self._starts(rng, sessions), np.ones(sessions, np.int64))
        chosen = _popular(rng, users.start_s, self.prompts, self.zipf, self.drift_s)
        prompt = _lengths(rng, self.prompt_tokens, self.prompt_sigma, self.prompts)[chosen]
        prompt = np.minimum(prompt, self.context_tokens)
        question = _lengths(rng, self.question_tokens, self.length_sigma, sessions)
        places = [
            (_texts(rng, chosen), prompt),
            (_texts(rng, users.owner), np.minimum(question, self.context_tokens - prompt)),
        ]
        return _requests(users, users.start_s, places, _lengths(rng, self.answer_tokens, self.length_sigma, sessions))


@dataclass(frozen=True, kw_only=True)
class BestOfN(_Pure):
    """Problems with several answers sampled at once: equal prompts arrive together, and never again.

    Args:
        rate_per_s: problems per second.
        samples: answers per problem.
        prompt_tokens: length of the one system prompt.
        problem_tokens: median length.
        answer_tokens: median length: reasoning step by step.
        length_sigma: sigma of the lengths of problems and answers.
    """

    kind, _each = "best-of-n", "samples"
    rate_per_s: float = 0.5
    samples: int = 8
    prompt_tokens: int = 200
    problem_tokens: float = 600.0
    answer_tokens: float = 600.0
    length_sigma: float = 0.8

    def _draw(self, rng: np.random.Generator, sessions: int) -> Requests:
        problems = _Sessions(self._starts(rng, sessions), np.full(sessions, self.samples, np.int64))
        n = len(problems)
        prompt = np.full(n, min(self.prompt_tokens, self.context_tokens), np.int64)
        problem = _lengths(rng, self.problem_tokens, self.length_sigma, sessions)[problems.owner]
        places = [
            (_texts(rng, np.zeros(n, np.int64)), prompt),
            (_texts(rng, problems.owner), np.minimum(problem, self.context_tokens - prompt)),
        ]
        time_s = problems.start_s[problems.owner]
        return _requests(problems, time_s, places, _lengths(rng, self.answer_tokens, self.length_sigma, n))


@dataclass(frozen=True, kw_only=True)
class Mix(Workload):
    """Several workloads at the same time.

    Args:
        rate_per_s: sessions that begin per second over all parts; the rates of the parts are ignored.
        parts: workloads, each with its weight among the sessions.

    Raises:
        BadArgument: there are no parts, or a weight is not above 0.
    """

    kind = "mix"
    parts: tuple[tuple[Workload, float], ...]

    def __post_init__(self) -> None:
        _check_range("rate_per_s", self.rate_per_s)
        if not self.parts:
            raise BadArgument("parts", self.parts, "at least one workload")
        for part, weight in self.parts:
            if not 0 < weight < math.inf:
                raise BadArgument(part.kind, weight, "a weight above 0")

    @property
    def tenants(self) -> tuple[str, ...]:
        """See `Workload.tenants`."""
        return ("", *(name for part, _ in self.parts for name in part.tenants[1:]))

    @property
    def kinds(self) -> tuple[str, ...]:
        """See `Workload.kinds`."""
        return ("", *(name for part, _ in self.parts for name in part.kinds[1:]))

    @property
    def in_full(self) -> Mix:
        """See `Workload.in_full`: each part with its share of the rate."""
        total = sum(weight for _, weight in self.parts)
        shares = [(part, weight, self.rate_per_s * weight / total) for part, weight in self.parts]
        return replace(
            self, parts=tuple((replace(part, rate_per_s=rate).in_full, weight) for part, weight, rate in shares)
        )

    @property
    def stated(self) -> str:
        """See `Workload.stated`."""
        kinds = ",".join(f"{part.kind}={weight:.15g}" for part, weight in self.parts)
        return f"{kinds} with rate_per_s={self.rate_per_s:.15g}: {'; '.join(part.stated for part, _ in self.parts)}"

    def requests(self, seed: np.random.SeedSequence, count: int) -> Requests:
        """See `Workload.requests`."""
        drawn: list[Requests] = []
        tenants = kinds = chats = 0
        for (part, _), own in zip(self.in_full.parts, seed.spawn(len(self.parts)), strict=True):
            drawn.append(_numbered_from(part.requests(own, count), tenants, kinds, chats))
            tenants, kinds = tenants + len(part.tenants) - 1, kinds + len(part.kinds) - 1
            chats = max(chats, int(drawn[-1].chat.max()) + 1)
        return _joined(drawn).first(count)


def _numbered_from(requests: Requests, tenant: int, kind: int, chat: int) -> Requests:
    """Shifts indices past those of the previous parts; "none" stays as it is."""
    return replace(
        requests,
        tenant=np.where(requests.tenant > 0, requests.tenant + tenant, 0),
        kind=np.where(requests.kind > 0, requests.kind + kind, 0),
        chat=np.where(requests.chat >= 0, requests.chat + chat, -1),
    )


def _joined(parts: Sequence[Requests]) -> Requests:
    wide = max(part.lengths.shape[1] for part in parts)

    def column(part: Requests, name: str) -> NDArray[Any]:
        values: NDArray[Any] = getattr(part, name)
        return np.pad(values, ((0, 0), (0, wide - values.shape[1]))) if values.ndim == 2 else values

    return Requests(*(np.concatenate([column(part, each.name) for part in parts]) for each in fields(Requests)))


WORKLOADS: Mapping[str, type[Workload]] = {
    workload.kind: workload for workload in (Chat, Agents, Documents, Prompts, BestOfN, Tenants)
}


def parse_workload(text: str, settings: Mapping[str, str]) -> Workload:
    """Parses a workload.

    Args:
        text: a name of `WORKLOADS`, or several with weights: "chat=3,agents=1".
        settings: parameters by name, as text. In a mix, "chat.turns" is a part's parameter, "rate_per_s" the mix's.

    Raises:
        BadArgument: a name is unknown, or a value is invalid.
    """
    weights = [each.partition("=") for each in text.split(",")]
    names = [name.strip() for name, _, _ in weights]
    if "=" not in text and len(names) == 1:
        return _set(_known(names[0]), settings)
    if len(set(names)) < len(names):
        raise BadArgument("kind", text, "names that differ")
    parts = []
    for name, _, weight in weights:
        own = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith(f"{name.strip()}.")}
        parts.append((_set(_known(name.strip()), own), _number("weight", weight or "1")))
    whole = {key: value for key, value in settings.items() if key.partition(".")[0] not in names}
    for key in whole:
        if key != "rate_per_s":
            raise BadArgument("set", key, f"rate_per_s, or a parameter of {', '.join(names)}, such as {names[0]}.zipf")
    return Mix(parts=tuple(parts), **{key: _number(key, value) for key, value in whole.items()})


def _known(name: str) -> type[Workload]:
    if name not in WORKLOADS:
        raise BadArgument("kind", name, f"one of {', '.join(WORKLOADS)}, or several with weights: chat=3,agents=1")
    return WORKLOADS[name]


def _set(workload: type[Workload], settings: Mapping[str, str]) -> Workload:
    known = {parameter.name: parameter.type for parameter in fields(workload)}
    for name in settings:
        if name not in known:
            raise BadArgument("set", name, f"one of {', '.join(known)}")
    values = {name: _number(name, text, whole=known[name] == "int") for name, text in settings.items()}
    return workload(**values)


def _number(name: str, text: str, *, whole: bool = False) -> Any:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        raise BadArgument(name, text, "a whole number" if whole else "a number") from None


# --- blocks -------------------------------------------------------------------------------------------------------


def generate(workload: Workload, requests: int, *, seed: int = 0, block_size: int = BLOCK_SIZE) -> Trace:
    """Generates a trace of a workload.

    Args:
        workload: the workload.
        requests: number of requests.
        seed: 0 or more; equal seeds give equal traces.
        block_size: tokens per block.

    Raises:
        BadArgument: a number is outside its range.
    """
    check_integer("requests", requests, 1, 10**9)
    check_integer("seed", seed, 0, 2**63 - 1)
    check_integer("block_size", block_size, 1, 2**32 - 1)
    drawn = workload.requests(np.random.SeedSequence(seed), requests)
    return Trace.of(
        _batches(drawn, block_size),
        block_size=block_size,
        name=f"{workload.kind}, seed {seed}",
        tenants=workload.tenants,
        kinds=workload.kinds,
        notes=(f"Generated, not recorded, with seed {seed} and NumPy {np.__version__}: {workload.in_full.stated}.",),
    )


def _batches(requests: Requests, block_size: int) -> Iterator[Batch]:
    """Splits the requests into batches of about `_BATCH_BLOCKS` blocks."""
    ends = np.cumsum(-(-requests.lengths.sum(axis=1) // block_size))
    cuts = np.flatnonzero(np.diff(ends // _BATCH_BLOCKS)) + 1
    for start, stop in zip([0, *cuts], [*cuts, len(requests)], strict=True):
        yield _batch(requests.take(slice(start, stop)), block_size)


def _batch(requests: Requests, block_size: int) -> Batch:
    input_tokens = requests.lengths.sum(axis=1)
    counts = -(-input_tokens // block_size)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    owner = np.repeat(np.arange(len(requests)), counts)
    end = np.minimum((np.arange(offsets[-1]) - offsets[owner] + 1) * block_size, input_tokens[owner])
    same = ("time_s", "output_tokens", "tenant", "kind", "chat", "turn")
    columns = {name: getattr(requests, name) for name in same}
    return Batch(input_tokens=input_tokens, offsets=offsets, blocks=_names(requests, owner, end), **columns)


def _names(requests: Requests, owner: Int64s, end: Int64s) -> Uint64s:
    """Returns [blocks] a hash of the prompt up to each block's end.

    The hash covers the contents and lengths of all places before the one in which the block ends, the content of that
    place, and where the block ends. The length of that content does not count: another prompt may take more of it.
    """
    names = np.zeros(len(end), np.uint64)
    before = np.zeros(len(requests), np.uint64)
    begin = np.zeros(len(requests), np.int64)
    for place in range(requests.lengths.shape[1]):
        length = requests.lengths[:, place]
        here = mix(before + requests.contents[:, place] * GOLDEN + np.uint64(1))
        inside = end > begin[owner]
        names[inside] = mix(here[owner[inside]] + end[inside].astype(np.uint64) * GOLDEN)
        before = np.where(length > 0, mix(here ^ mix(length.astype(np.uint64))), before)
        begin = begin + length
    return names

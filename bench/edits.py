"""The cost of one changed word at the front of prompts, and what is left of it with rules: `agent_traffic` served.

For each edit, all sessions are sent to the server as they are, with each file of rules, with next turns computed while
nothing else runs, and without anchors. The tokens that it computed (`prompt_tokens` less `cached_tokens`) are compared
with the least: what is new of the same sessions without the edit, so neither a beginning of a prompt before nor an
answer to one. Tokens that are computed between requests are counted apart, and so is what the rules changed. Everything
follows from the seed: the cache, the scheduler and the API are real, and the model says what the session has, see
`saying`. vLLM is then sent the same tokens, see `vllm_tokens`.

Times of first tokens are those of a model of 8 billion parameters on one GPU, in virtual time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import quantiles
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from bench.agent_traffic import EDITS, Sizes, Step, steps
from bench.report import Report
from bench.saying import serving
from bench.tables import goals_table
from bench.virtual import prefill_s
from bench.vllm_tokens import Spoken, repeating, version
from mainstem.settings.engine import EngineConfig
from mainstem.settings.server import ServerConfig

RULES = Path(__file__).parent / "prompt_rules"
GOALS = {**dict.fromkeys(EDITS, 1.05), "compaction": 1.3, "fork": 1.3}
"""The most that is computed over the least, by edit."""
NONE = "none"
"""The name of sessions without any edit: what pages cost that are not full."""
_MOVED, _DROPPED = ({"prompt_rules": (str(RULES / name),)} for name in ("move.toml", "drop.toml"))


@dataclass(frozen=True, slots=True)
class Way:
    """Settings of a server, and of its engine."""

    server: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)


WAYS: Mapping[str, Way] = {
    "as sent": Way(),
    "moved": Way(_MOVED),
    "dropped": Way(_DROPPED),
    "moved, turns": Way({**_MOVED, "precompute_turns": 1.0}),
    "dropped, turns": Way({**_DROPPED, "precompute_turns": 1.0}),
    "moved, no anchors": Way(_MOVED, {"anchor_share": 0.0}),
}
"""Ways to serve, by name."""
_PLAIN, VLLM = "as sent", "as sent, vLLM"
_SLACK = 128
"""Tokens that the longest prompt may have more with an edit."""

FEW = Sizes(sessions=4, turns=16, turns_spread=0.4, most_turns=40, people=0.25, window=36_000, forking=1.0)
"""Fewer and shorter sessions than the published ones, with steps of their lengths; every one compacts or forks."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        sizes: of the sessions; `Sizes()` are the published ones, which take hours.
        edits: which are measured; several at once are joined by `+`.
        ways: names from `WAYS`; sessions without an edit are only sent as they are.
        vllm: whether vLLM is asked, too, if it is installed.
        tight: share of the least that the smaller cache holds, for the edits `short`; the other one holds everything.
        short: edits that are also measured with the smaller cache.
        page_size: of the cache.
        token_s, doubled_at: what computing takes in virtual time; see `virtual.prefill_s`.
        seed: of the sessions.
    """

    sizes: Sizes = FEW
    edits: tuple[str, ...] = (NONE, *EDITS, "time+id+attribution+tools")
    ways: tuple[str, ...] = tuple(WAYS)
    vllm: bool = True
    tight: float = 0.5
    short: tuple[str, ...] = ("compaction", "fork")
    page_size: int = 16
    token_s: float = 1e-4
    doubled_at: int = 32768
    seed: int = 0


QUICK = Settings(
    sizes=Sizes(sessions=2, turns=6, turns_spread=0.2, people=0.4, window=20_000, forking=1.0, forks=1, fork_turns=4),
    ways=("as sent", "moved", "dropped"),
    vllm=False,
)


class Subject(Protocol):
    """A server that is measured; another one than Mainstem's needs no more than this."""

    ahead: int

    def ask(self, step: Step) -> tuple[Mapping[str, Any], NDArray[np.int32], Sequence[int]]:
        """Sends a step; returns the usage, the tokens of the prompt, and those of the answer."""


class Transcript:
    """A server of which one knows the tokens that it was asked and said.

    Attributes:
        spoken: prompts and answers, in order.
    """

    def __init__(self, server: Subject) -> None:
        self._server = server
        self.spoken: list[Spoken] = []

    @property
    def ahead(self) -> int:
        """The tokens that it computed between requests."""
        return self._server.ahead

    def ask(self, step: Step) -> tuple[Mapping[str, Any], NDArray[np.int32], Sequence[int]]:
        """See `Subject`."""
        usage, prompt, said = self._server.ask(step)
        self.spoken.append((prompt, said))
        return usage, prompt, said


@dataclass(frozen=True, slots=True)
class Least:
    """The least that sessions need, which is that without their edit.

    Args:
        tokens: that are new.
        distinct: those and the answers: what a cache holds that never forgets.
        longest: prompt with its answer.
    """

    tokens: int
    distinct: int
    longest: int


def run(settings: Settings, report: Report) -> None:
    """Measures all edits, and adds rows, goals and tables to the report."""
    report.settings.update(asdict(settings))
    installed = version() if settings.vllm else None
    if installed is not None:
        report.versions["vllm"] = installed
    elif settings.vllm:
        report.notes.append("vLLM is not installed (make .venv-vllm/mainstem), so it has no rows")
    settings = replace(settings, vllm=installed is not None)
    for edit in settings.edits:
        report.rows += measure(settings, edit, report)
    report.more["goals"] = goals = judge(report.rows)
    report.tables += [table(report.rows), goals_table(goals)]


def measure(settings: Settings, edit: str, report: Report) -> Iterator[Row]:
    """Yields a row for each size of the cache and each way."""
    edits = () if edit == NONE else edit.split("+")
    sent = steps(settings.sizes, settings.seed, edits)
    report.progress(f"edits: {edit}, {len(sent)} requests")
    need = least(settings, steps(settings.sizes, settings.seed, edits, intended=True))
    rooms = {"all": _ample(settings, sent)}
    if edit in settings.short:
        least_pages = -(-(need.longest + _SLACK) // settings.page_size)
        rooms[f"{settings.tight:.0%}"] = max(least_pages, int(need.distinct * settings.tight) // settings.page_size)
    for room, pages in rooms.items():
        for way, row in _ways(settings, sent, pages, edited=bool(edits)):
            ratio, with_ahead = (tokens / need.tokens for tokens in (row["computed"], row["computed"] + row["ahead"]))
            found = {"ratio": ratio, "with_ahead": with_ahead}
            yield {"edit": edit, "room": room, "way": way, "least": need.tokens, **row, **found}


def _ways(settings: Settings, sent: Sequence[Step], pages: int, *, edited: bool) -> Iterator[tuple[str, Row]]:
    """Yields each way, and what was served: Mainstem's, then vLLM's."""
    context = _context(sent)
    spoken: list[Spoken] = []
    for way in settings.ways if edited else (_PLAIN,):
        engine = replace(_cache(settings, pages), **WAYS[way].engine)
        with serving(_server(**WAYS[way].server), engine, context) as server:
            heard = Transcript(server)
            yield way, served(settings, heard, sent)
        spoken = heard.spoken if way == _PLAIN else spoken
    if settings.vllm and spoken:
        with repeating(spoken, pages * settings.page_size, context) as other:
            yield VLLM, served(settings, other, sent)


def _server(**given: Any) -> ServerConfig:
    """Returns settings without next turns, unless they are given: those are computed beside what is compared."""
    return ServerConfig(**{"precompute_turns": 0.0, **given})


def least(settings: Settings, intended: Sequence[Step]) -> Least:
    """Returns what sessions need without their edit: a server makes the tokens, and all texts before are compared."""
    known: list[NDArray[np.int32]] = []
    new = distinct = longest = 0
    with serving(_server(), _cache(settings, _ample(settings, intended)), _context(intended)) as server:
        for step in intended:
            _, prompt, said = server.ask(step)
            whole = np.concatenate([prompt, np.asarray(said, np.int32)])
            found = max((_same(whole, each) for each in known), default=0)
            new += len(prompt) - min(found, len(prompt) - 1)  # the last one is computed in any case
            distinct += len(whole) - found
            longest = max(longest, len(whole))
            known = [each for each in known if _same(whole, each) < len(each)] + [whole]
    return Least(new, distinct, longest)


def served(settings: Settings, server: Subject, sent: Sequence[Step]) -> Row:
    """Sends steps to a server, and returns what it computed, in which time, and what rules changed."""
    prompts = computed = changes = 0
    first_s = []
    for step in sent:
        usage, prompt, _ = server.ask(step)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        prompts += len(prompt)
        computed += usage["prompt_tokens"] - cached
        changes += len(usage.get("prompt_rewrites") or ())
        first_s.append(prefill_s(usage["prompt_tokens"] - cached, cached, settings.token_s, settings.doubled_at))
    cuts = quantiles(first_s, n=100, method="inclusive") if len(first_s) > 1 else first_s * 99
    return {
        "requests": len(sent), "prompt_tokens": prompts, "computed": computed, "ahead": server.ahead,
        "changes": changes, "first_p50_s": cuts[49], "first_p90_s": cuts[89], "first_p99_s": cuts[98],
    }  # fmt: skip


def _same(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    n = min(len(one), len(other))
    different = np.flatnonzero(one[:n] != other[:n])
    return int(different[0]) if different.size else n


def _cache(settings: Settings, pages: int) -> EngineConfig:
    return EngineConfig(pages=pages, page_size=settings.page_size)


def _context(sent: Sequence[Step]) -> int:
    return 4096 + 2 * max(_characters(step) for step in sent) // 3


def _ample(settings: Settings, sent: Sequence[Step]) -> int:
    """Returns pages for all that the steps could need without any hit."""
    return sum(_characters(step) for step in sent) // 3 // settings.page_size + 64


def _characters(step: Step) -> int:
    messages = sum(len(message["content"]) for message in (*step.body["messages"], step.answer))
    return messages + sum(len(str(tool)) for tool in step.body["tools"])


def judge(rows: Sequence[Row]) -> list[Row]:
    """Returns a goal for each edit, size of the cache and way with rules."""
    return [
        {
            "what": f"{row['edit']}, {row['way']}, a cache for {row['room']}: computed over the least",
            "goal": most,
            "unit": "ratio",
            "measured": row["ratio"],
            "met": row["ratio"] <= most,
        }
        for row in rows
        if row["way"] not in (_PLAIN, VLLM)
        for most in [max(GOALS[edit] for edit in row["edit"].split("+"))]
    ]


def table(rows: Sequence[Row]) -> Table:
    """Builds a table of all rows for the terminal."""
    heads = ("edit", "cache", "way", "requests", "prompt tokens", "computed", "least", "over the least")
    title = "prompt tokens computed, over those that are new"
    shown = Table(*heads, "with what was ahead", "changes", "first token, s: P50", "P90", "P99", title=title)
    for row in rows:
        counts = [f"{row[name]:,}" for name in ("requests", "prompt_tokens", "computed", "least")]
        times = [f"{row[name]:.2f}" for name in ("first_p50_s", "first_p90_s", "first_p99_s")]
        ratios = [f"{row['ratio']:.2f}", f"{row['with_ahead']:.2f}"]
        shown.add_row(row["edit"], row["room"], row["way"], *counts, *ratios, f"{row['changes']:,}", *times)
    return shown

"""Sessions of agents as their clients send them, with what users of prefix caches complain about. All from a seed.

A session is a client of chat completions that works on a task: it sends its history, the model calls a tool or answers,
and the client sends the result of the tool or what a person says next. A step is one such request, with what the model
says to it, so that a history can be written before any model is asked.

Sizes, and their sources:

    steps of a session    43 in the median, and 142,000 tokens in and 444 out of a request (AgentX, through
                          vllm-project/vllm#57103); 83.7 on average (TraceLab: 357,161 steps of 4,265 sessions), which
                          gives the spread
    out                   523 tokens on average (TraceLab: 186.9 million); with the median this gives the spread
    tools return          86.5 % within a second, 95.1 % within ten (vllm-project/router#285): a lognormal with a median
                          of 10 ms
    people                begin 10.7 % of the steps, tools the others (TraceLab: 8.9 and 73.6 a session)
    compaction            in 9.7 % of the sessions (TraceLab): where they reach a window, which is chosen so
    subagents             in 44 % of the sessions (AgentX)
    front                 1,959 tokens of system prompt and 9,092 of tools (OpenCode, JustVugg/colibri#153)
    tools change          before 12 % of the requests (can1357/oh-my-pi#890)

TraceLab is at tracelab.cs.washington.edu. The texts that tools and people add to a history between two steps are chosen
so that a request has the 142,000 tokens: 2,300 on average. TraceLab has 1,224 new tokens a step, with which it would
have some 95,000: the two describe other people. Nobody has published the spread of it, the pauses of people, and the
lengths of thoughts, summaries and tasks: these are assumptions.

Edits are what clients do to a prompt by name, see `EDITS`. With `intended`, a session is the same without them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from mainstem.errors import BadArgument, one_of

EDITS = {
    "time": "the second of the request, in the system prompt",
    "id": "ids of the session and of the request, in the system prompt",
    "attribution": "a line with a nonce, first in the system prompt",
    "tools": "the list of tools in another order now and then",
    "flaps": "the tools of one server are gone for a request now and then",
    "thoughts": "what the model thought is dropped from answers before the last message of a person",
    "compaction": "the history is replaced by a summary, behind the same system prompt and tools",
    "fork": "subagents go on from the history, and name themselves in the system prompt",
}
"""The changes that clients make, by name."""

Message = dict[str, Any]
_VOCABULARY = (
    "about after again all also and any are around ask back because been before began between both branch build but "
    "call came can change check class clear close code come count could data day did down each end even every file "
    "find first follow for form found from full function gave get give good group had hand has have help here high "
    "hold home how idea into just keep kind know large last later learn left less let life like line list little long "
    "look made make many mean might more most move much must name near need never new next night not note now number "
    "off often old once one only open order other our out over own page part path place plan point put read ready real "
    "right room run said same saw say see seem set she should show side since small some soon stand start state still "
    "stop such sure take tell test than that the their them then there these they thing think this those time told too "
    "took tree try turn two under until use very wait walk want was watch water way well went were what when where "
    "which while white who why will with word work world would write year you young"
)
_WORDS = _VOCABULARY.split()
_LINE = 14  # words
_BEGAN = datetime(2026, 3, 2, 9, 15, 27, tzinfo=UTC)
_DECODE_S = 0.02  # of a word


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much sessions have. Lengths are in words, which are about tokens. The defaults are the published ones.

    Args:
        sessions: how many.
        every_s: seconds between their beginnings, on average.
        turns, turns_spread: steps of a session: median, and spread of the logarithm.
        most_turns: of a session.
        system: of the system prompt.
        tools, tool: how many, and of each.
        task: what a session begins with.
        new, new_spread: what tools and people add between two steps: median, and spread of the logarithm.
        answer, answer_spread: the same of answers.
        thought: what is thought before an answer, as a share of it.
        people: share of the steps that people begin.
        window: of a request; a session that would exceed it compacts.
        summary: of a compaction.
        forking, forks: share of the sessions with subagents, and how many each of them has.
        fork_turns: steps of a subagent.
        changing: share of the requests before which tools change.
    """

    sessions: int = 8
    every_s: float = 60.0
    turns: float = 43
    turns_spread: float = 1.154
    most_turns: int = 1200
    system: int = 1959
    tools: int = 24
    tool: int = 330
    task: int = 300
    new: float = 1400
    new_spread: float = 1.0
    answer: float = 444
    answer_spread: float = 0.572
    thought: float = 0.5
    people: float = 0.107
    window: int = 550_000
    summary: int = 1200
    forking: float = 0.44
    forks: int = 2
    fork_turns: int = 8
    changing: float = 0.12


@dataclass(frozen=True, slots=True)
class Turn:
    """One step before it has texts.

    Args:
        answer: words of the answer.
        new: words of what follows it.
        person: whether a person says that, not a tool.
        pause_s: seconds until it is there.
    """

    answer: int
    new: int
    person: bool
    pause_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """A request, and what the model says to it.

    Args:
        session: the name of the session.
        due_s: when it is sent, in seconds since the beginning.
        body: of a chat completion.
        answer: the message of the assistant.
    """

    session: str
    due_s: float
    body: dict[str, Any]
    answer: Message


def turns(sizes: Sizes, draw: Random) -> list[Turn]:
    """Returns the steps of a session, without texts."""
    count = min(sizes.most_turns, max(1, round(draw.lognormvariate(0, sizes.turns_spread) * sizes.turns)))
    made = []
    for _ in range(count):
        answer = max(8, round(draw.lognormvariate(0, sizes.answer_spread) * sizes.answer))
        new = max(4, round(draw.lognormvariate(0, sizes.new_spread) * sizes.new))
        person = draw.random() < sizes.people
        pause_s = draw.lognormvariate(0, 1.2) * 90 if person else draw.lognormvariate(0, 4.17) * 0.01
        made.append(Turn(answer, new, person, pause_s))
    return made


def inputs(sizes: Sizes, plan: Sequence[Turn]) -> list[tuple[int, bool]]:
    """Returns about how many words each step sends, and whether the session compacts after it."""
    front = sizes.system + sizes.tools * sizes.tool
    made, history = [], sizes.task
    for turn in plan:
        grown = history + turn.answer + turn.new
        full = front + grown > sizes.window
        made.append((front + history, full))
        history = sizes.summary if full else grown
    return made


def _places(count: int, times: int) -> list[int]:
    """Returns after which of so many steps something happens: at equal distances."""
    return sorted({(i + 1) * count // (times + 1) for i in range(times)})


def steps(sizes: Sizes, seed: int, edits: Collection[str] = (), *, intended: bool = False) -> list[Step]:
    """Returns the steps of all sessions in the order in which they are sent.

    Args:
        sizes: of the sessions.
        seed: all follows from it; sessions with other edits have the same words.
        edits: some of `EDITS`.
        intended: leaves out what the edits change: the same requests of clients that keep their prompts as they were.

    Raises:
        BadArgument: there is no such edit.
    """
    for edit in edits:
        if edit not in EDITS:
            raise BadArgument("edits", edit, one_of(edit, EDITS))
    starts, begins = Random(f"{seed} starts"), 0.0
    made: list[Step] = []
    for number in range(sizes.sessions):
        made += _Session(sizes, f"{seed} {number}", frozenset(edits), intended, begins).steps()
        begins += starts.expovariate(1 / sizes.every_s)
    return sorted(made, key=lambda step: step.due_s)


def written(answer: Message) -> str:
    """Returns an answer as the model writes it: its text, and its calls as templates of the Hermes form have them."""
    calls = [
        f'<tool_call>\n{{"name": "{each["name"]}", "arguments": {each["arguments"]}}}\n</tool_call>'
        for each in (call["function"] for call in answer.get("tool_calls", ()))
    ]
    return "\n".join((answer["content"], *calls))


# ---------------------------------------------------------------- one session


class _Session:
    def __init__(self, sizes: Sizes, seed: str, edits: frozenset[str], intended: bool, begins_s: float) -> None:
        self._sizes, self._seed, self._edits, self._intended = sizes, seed, edits, intended
        self._now_s = begins_s
        self._name = "session-" + _hex(self._draw("name"), 12)
        self._client = _Client(sizes, self._name, self._draw("client"), frozenset() if intended else edits)

    def _draw(self, of: str) -> Random:
        return Random(f"{self._seed} {of}")

    def steps(self) -> Iterator[Step]:
        """Yields the steps in order."""
        sizes, draw, plan = self._sizes, self._draw("texts"), turns(self._sizes, self._draw("turns"))
        compacts = [full and "compaction" in self._edits for _, full in inputs(sizes, plan)]
        forking = "fork" in self._edits and self._draw("fork").random() < sizes.forking
        forks = _places(len(plan), sizes.forks) if forking else []
        messages: list[Message] = [_said("user", _text(draw, sizes.task))]
        for at, turn in enumerate(plan):
            answer = self._answer(draw, turn, at)
            yield self._step(messages, answer)
            if at in forks:
                yield from self._subagent(messages, forks.index(at))
            self._now_s += turn.pause_s
            messages = self._after(messages, turn, answer, draw)
            if compacts[at]:
                summary = _said("assistant", _text(self._draw(f"summary {at}"), sizes.summary))
                yield self._step([*messages, _said("user", "Write down all that matters to go on.")], summary)
                messages = [_said("user", f"What was done so far:\n{summary['content']}\nGo on with it.")]

    def _step(self, messages: Sequence[Message], answer: Message, role: str = "") -> Step:
        step = Step(self._name, self._now_s, self._client.body(messages, self._now_s, role), answer)
        self._now_s += 1 + _DECODE_S * len(answer["content"].split())
        return step

    def _answer(self, draw: Random, turn: Turn, at: int) -> Message:
        text = _text(draw, turn.answer)
        if "thoughts" in self._edits:
            thought = _text(self._draw(f"thought {at}"), round(turn.answer * self._sizes.thought))
            text = f"<think>\n{thought}\n</think>\n\n{text}"
        called = json.dumps({"path": "/".join(draw.choices(_WORDS, k=4))})
        if turn.person:
            return _said("assistant", text)
        function = {"name": _tool_name(draw.randrange(self._sizes.tools)), "arguments": called}
        call = {"id": f"call_{at}", "type": "function", "function": function}
        return {**_said("assistant", text), "tool_calls": [call]}

    def _after(self, messages: list[Message], turn: Turn, answer: Message, draw: Random) -> list[Message]:
        """Returns the history with an answer, and with what follows it."""
        text = _text(draw, turn.new)
        if not turn.person:
            said = {**_said("tool", text), "tool_call_id": answer["tool_calls"][0]["id"]}
            return [*messages, answer, said]
        history = [*messages, answer]
        if "thoughts" in self._edits and not self._intended:
            history = [_without_thought(message) for message in history]
        return [*history, _said("user", text)]

    def _subagent(self, messages: Sequence[Message], number: int) -> Iterator[Step]:
        """Yields the steps of a subagent that goes on from a history."""
        draw = self._draw(f"fork {number}")
        plan = turns(replace(self._sizes, turns=self._sizes.fork_turns, turns_spread=0.3), draw)
        history = [*messages, _said("user", _text(draw, self._sizes.task))]
        for at, turn in enumerate(plan):
            answer = self._answer(draw, replace(turn, person=False), 1000 * (number + 1) + at)
            yield self._step(history, answer, role=f"reviewer-{number}")
            history = self._after(history, replace(turn, person=False), answer, draw)


class _Client:
    """The requests of one session's client: its system prompt, its tools, and what it changes in them."""

    def __init__(self, sizes: Sizes, session: str, draw: Random, edits: frozenset[str]) -> None:
        shared = Random("the client that all sessions run")
        self._text = _text(shared, sizes.system)
        self._tools = sorted(
            (_tool(number, shared, sizes.tool) for number in range(sizes.tools)), key=lambda tool: _name_of(tool)
        )
        self._session, self._draw, self._edits, self._changing = session, draw, edits, sizes.changing
        self._listed, self._gone = list(self._tools), False

    def body(self, messages: Sequence[Message], now_s: float, role: str) -> dict[str, Any]:
        """Returns the body of a request.

        Args:
            messages: all but that of the system.
            now_s: when it is sent.
            role: of a subagent; empty: it is the session's main agent.
        """
        changes, request = self._draw.random() < self._changing, _hex(self._draw, 16)
        return {
            "messages": [_said("system", self._system(now_s, role, request)), *messages],
            "tools": self._declared(changes),
            "temperature": 0,
            "prompt_cache_key": self._session,
            "prompt_rules": True,
        }

    def _system(self, now_s: float, role: str, request: str) -> str:
        lines = []
        if "attribution" in self._edits:
            lines.append(f"x-client-attribution: agent=1.8.2; nonce={request[:8]};")
        lines.append("You are an agent that works on code with tools.")
        if "fork" in self._edits and role:
            lines.append(f"You are the subagent {role}.")
        if "time" in self._edits:
            lines.append(f"Current time: {_BEGAN + timedelta(seconds=int(now_s)):%Y-%m-%d %H:%M:%S}")
        if "id" in self._edits:
            lines += [f"Session id: {self._session}", f"Request id: req_{request}"]
        return "\n".join((*lines, self._text))

    def _declared(self, changes: bool) -> list[dict[str, Any]]:
        if "tools" in self._edits and changes:
            self._listed = self._draw.sample(self._listed, len(self._listed))
        if "flaps" in self._edits:
            self._gone = changes and not self._gone
            if self._gone:
                return self._listed[: -max(1, len(self._listed) // 4)]
        return list(self._listed)


def _without_thought(message: Message) -> Message:
    if message["role"] != "assistant" or not message["content"].startswith("<think>"):
        return message
    return {**message, "content": message["content"].partition("</think>\n\n")[2]}


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _text(draw: Random, words: int) -> str:
    """Returns lines of so many random words."""
    drawn = draw.choices(_WORDS, k=max(1, words))
    return "\n".join(" ".join(drawn[at : at + _LINE]) for at in range(0, len(drawn), _LINE))


def _hex(draw: Random, digits: int) -> str:
    return f"{draw.getrandbits(4 * digits):0{digits}x}"


def _tool_name(number: int) -> str:
    return f"{_WORDS[number % len(_WORDS)]}_{_WORDS[-1 - number // len(_WORDS)]}"


def _tool(number: int, draw: Random, words: int) -> dict[str, Any]:
    path = {"type": "string", "description": _text(draw, words // 4)}
    parameters = {"type": "object", "properties": {"path": path}, "required": ["path"]}
    function = {"name": _tool_name(number), "description": _text(draw, words - words // 4), "parameters": parameters}
    return {"type": "function", "function": function}


def _name_of(tool: dict[str, Any]) -> str:
    return str(tool["function"]["name"])

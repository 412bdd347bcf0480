"""The benchmark of servers: what its client measures of a stream, how servers take turns, what failures lead to."""

from __future__ import annotations

import json
import math
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
from machine import eventually
from rich.console import Console

from bench import figures, hosted, servers
from bench.client import Answer, Client, ServerFailed
from bench.hosted import Hosted, System
from bench.report import Report
from bench.servers import COLD, REPEATING, WARM, Settings, Texts, decode_rate, measure, sharing, unshared
from mainstem import _core

Event = dict[str, Any]
SMALL = Settings(rounds=2, new_tokens=5, prefix=16, long_prefix=24, loads=(1, 2), alone=2, long_load=3, passage=4)
NAMES = [COLD, WARM, sharing(1, 16), sharing(2, 16), sharing(3, 24), unshared(2), REPEATING]


# ---------------------------------------------------------------- the client


def text(words: str, finish_reason: str | None = None) -> Event:
    return {"choices": [{"index": 0, "text": words, "finish_reason": finish_reason}], "usage": None}


def usage(tokens: int, prompt_tokens: int = 7) -> Event:
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}}


def sse(*events: Event | str) -> bytes:
    return b"".join(b"data: %s\n\n" % (e if isinstance(e, str) else json.dumps(e)).encode() for e in events)


END = sse(usage(3), "[DONE]")


class Script(httpx.AsyncByteStream):
    """A stream that sets the client's clock before each piece."""

    def __init__(self, pieces: Sequence[tuple[float, bytes]], clock: SimpleNamespace) -> None:
        self._pieces, self._clock = pieces, clock

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at_s, piece in self._pieces:
            self._clock.now = at_s
            yield piece


def client(
    pieces: Sequence[tuple[float, bytes]], status: int = 200, seen: list[Any] | None = None, **body: Any
) -> Client:
    """A client of a server that answers every request with this stream."""
    clock = SimpleNamespace(now=1.0)

    def reply(request: httpx.Request) -> httpx.Response:
        if seen is not None:
            seen.append(json.loads(request.content))
        return httpx.Response(status, stream=Script(pieces, clock))

    return Client("http://server", body, lambda: clock.now, httpx.MockTransport(reply))


def test_the_first_token_is_timed_apart_from_those_after_it() -> None:
    pieces = [(5.0, sse(text("a"))), (5.5, sse(text(" b"))), (6.0, sse(text(" c", "length"))), (9.0, END)]
    (answer,) = client(pieces).ask(["..."], 3)
    assert answer == Answer(sent_s=1.0, first_s=5.0, last_s=6.0, prompt_tokens=7, tokens=3, text="a b c")
    assert decode_rate([answer]) == 2 / 1.0


def test_an_event_counts_when_all_of_it_has_come() -> None:
    first = sse(text("a"))
    rest = sse(text(" b"), text(" c", "length"))
    (answer,) = client([(2.0, first[:9]), (3.0, first[9:] + rest[:4]), (4.0, rest[4:]), (5.0, END)]).ask(["..."], 3)
    assert (answer.first_s, answer.last_s, answer.text) == (3.0, 4.0, "a b c")


def test_tokens_are_counted_by_the_server_and_not_by_its_events() -> None:
    pieces = [(2.0, sse(text("a"))), (3.0, sse(text(" b c d"), text("", "length"), usage(4)))]
    (answer,) = client(pieces).ask(["..."], 4)
    assert answer.tokens == 4
    assert decode_rate([answer]) == 3 / 1.0


def test_an_event_without_text_is_no_first_token_and_the_last_one_ends_the_answer() -> None:
    pieces = [(2.0, sse(text(""))), (3.0, sse(text("a"))), (4.0, sse(text(""))), (5.0, sse(text("", "length")) + END)]
    (answer,) = client(pieces).ask(["..."], 3)
    assert (answer.first_s, answer.last_s) == (3.0, 5.0)


def test_a_request_says_how_many_tokens_and_what_its_server_needs() -> None:
    seen: list[Any] = []
    asked = client([(2.0, sse(text("a b c", "length")) + END)], seen=seen, ignore_eos=True)
    assert len(asked.ask(["one", "two"], 3)) == 2
    common = {"max_tokens": 3, "temperature": 0, "stream": True, "ignore_eos": True}
    assert sorted(seen, key=str) == [{"prompt": "one", **common}, {"prompt": "two", **common}]


FAILURES: dict[str, tuple[list[bytes], int, str]] = {
    "a status": ([b'{"detail": "no such model"}'], 404, "status 404: .*no such model"),
    "an error in the stream": ([sse(text("a"), {"error": "out of memory"})], 200, "error in the stream: out of memory"),
    "an early end": ([sse(text("a"))], 200, "the stream ended before the answer"),
    "no usage": ([sse(text("a b c", "length"))], 200, "the stream ended before the answer"),
    "no reason to end": ([sse(text("a b c"), usage(3))], 200, "the stream ended before the answer"),
    "no text": ([sse(usage(3))], 200, "the stream ended before the answer"),
    "too few tokens": ([sse(text("a", "stop"), usage(1))], 200, "an answer of 1 tokens instead of 3"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_what_a_server_did_instead_of_answering_is_named(failure: str) -> None:
    pieces, status, message = FAILURES[failure]
    with pytest.raises(ServerFailed, match=message):
        client([(2.0, piece) for piece in pieces], status).ask(["..."], 3)


def test_one_failure_of_many_requests_is_not_averaged_away() -> None:
    replies = [sse(text("a b c", "length")) + END, sse({"error": "lost"})]
    clock = SimpleNamespace(now=1.0)
    streams = (Script([(2.0, piece)], clock) for piece in replies)
    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=next(streams)))
    with pytest.raises(ServerFailed, match="lost"):
        Client("http://server", {}, transport=transport).ask(["one", "two"], 3)


def test_the_rate_of_requests_at_once_begins_with_the_first_token_of_any() -> None:
    """So a server that answers one after the other gains nothing."""

    def answer(first_s: float, last_s: float) -> Answer:
        return Answer(0.0, first_s, last_s, 1, 5, "")

    assert decode_rate([answer(2, 4), answer(2, 4)]) == 8 / 2
    assert decode_rate([answer(2, 4), answer(4, 6)]) == 8 / 4
    assert decode_rate([answer(2, 2)]) == math.inf


# ---------------------------------------------------------------- texts


class Tokenizer:
    """One token is one word with its blank."""

    def __init__(self) -> None:
        self._words: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self._words.setdefault(word, len(self._words)) for word in re.findall(r" [^ ]+", text)]

    def decode(self, tokens: list[int]) -> str:
        words = list(self._words)
        return "".join(words[token] for token in tokens)


PAGE = 8
QUESTION = Texts(Tokenizer(), "").question().count(" ")


def test_equal_seeds_give_equal_texts_and_others_differ() -> None:
    first, same, other = (Texts(Tokenizer(), seed) for seed in "aab")
    texts = [first.facts(9), first.facts(9), first.question()]
    assert texts == [same.facts(9), same.facts(9), same.question()]
    assert len({*texts, other.facts(9), other.question()}) == 5


def test_a_text_has_its_number_of_tokens_after_another_one_and_where_its_end_is_encoded_otherwise() -> None:
    class Merging(Tokenizer):
        """Splits the last word, if it is an odd number."""

        def encode(self, text: str) -> list[int]:
            return super().encode(re.sub(r"(\d)([13579])$", r"\1 \2", text))

    texts = Texts(Merging(), "a")
    for _ in range(9):
        text = texts.facts(9)  # its last word is a number
        assert texts.count(text) == 9 and text.startswith(" ")
        assert texts.count(texts.facts(3) + text) == 12


# ---------------------------------------------------------------- turns and rows


class Double:
    """A server in virtual time: a token of a prompt takes `prefill_s` unless its prefix was cached, a step `step_s`."""

    running: ClassVar[list[str]] = []

    def __init__(self, name: str, prefill_s: float, step_s: float) -> None:
        self.name, self.prefill_s, self.step_s = name, prefill_s, step_s
        self.asked: list[tuple[str, ...]] = []
        self.fails: Callable[[Sequence[str]], bool] = lambda prompts: False
        self.extra_tokens = 0
        self._cached: set[str] = set()

    @contextmanager
    def turn(self) -> Iterator[None]:
        assert not self.running, f"{self.running} still runs"
        self.running.append(self.name)
        try:
            yield
        finally:
            self.running.remove(self.name)

    def ask(self, prompts: Sequence[str], tokens: int) -> list[Answer]:
        assert self.running == [self.name], "it was not its turn"
        self.asked.append(tuple(prompts))
        if self.fails(prompts):
            raise ServerFailed("it is out of memory")
        first_s = self.prefill_s * sum(map(self._missed, prompts))
        last_s = first_s + self.step_s * (tokens - 1)
        return [Answer(0, first_s, last_s, each.count(" ") + self.extra_tokens, tokens, "") for each in prompts]

    def peak_bytes(self) -> int:
        return 1 << 30

    def preemptions(self) -> int | None:
        return 2 if self.name == "Mainstem" else None

    def _missed(self, prompt: str) -> int:
        words = prompt.split()
        pages = [" ".join(words[:end]) for end in range(PAGE, len(words) + 1, PAGE)]
        found = sum(page in self._cached for page in pages)
        self._cached |= set(pages)
        return len(words) - PAGE * found


@pytest.fixture
def doubles() -> Iterator[tuple[Double, Double]]:
    """Mainstem with half of vLLM's time for prompts, and half of its speed of decode."""
    yield Double("Mainstem", 0.5, 0.5), Double("vLLM", 1.0, 0.25)
    assert not Double.running


def report() -> Report:
    return Report("servers", "2026-01-02T03:04:05+00:00", quick=True, progress=lambda line: None)


def measured(*doubles: Double) -> tuple[Report, dict[tuple[str, str], Any]]:
    made = report()
    measure(SMALL, made, doubles, Tokenizer())
    return made, {(row["server"], row["what"]): row for row in made.rows}


def test_each_value_is_what_a_user_waits_for(doubles: tuple[Double, Double]) -> None:
    _, rows = measured(*doubles)
    assert list(dict.fromkeys(what for _, what in rows)) == NAMES
    medians = {what: rows["vLLM", what]["median"] for what in NAMES}
    rates = {sharing(1, 16): 4 / 1.0, sharing(2, 16): 8 / 1.0, sharing(3, 24): 12 / 1.0, REPEATING: 4 / 1.0}
    assert medians == {COLD: 16.0, WARM: QUESTION, unshared(2): pytest.approx(10 / (2 * (16 + QUESTION) + 1)), **rates}
    assert {rows["vLLM", what]["unit"] for what in (COLD, WARM)} == {"s"}
    assert {rows["vLLM", what]["unit"] for what in rates} == {"tokens/s"}


def test_ratios_are_to_vllm_in_the_same_round(doubles: tuple[Double, Double]) -> None:
    own, peer = doubles
    asked = peer.ask

    def slower_in_the_second_round(prompts: Sequence[str], tokens: int) -> list[Answer]:
        slow = 3.0 if len(peer.asked) > 16 else 1.0
        return [
            replace(each, first_s=slow * each.first_s, last_s=slow * each.last_s) for each in asked(prompts, tokens)
        ]

    peer.ask = slower_in_the_second_round  # type: ignore[method-assign]
    _, rows = measured(own, peer)
    assert rows["vLLM", COLD]["least"] == 16.0 and rows["vLLM", COLD]["most"] == 48.0
    assert rows["Mainstem", COLD]["ratio"] == pytest.approx((0.5 + 0.5 / 3) / 2)
    assert rows["vLLM", COLD]["ratio"] == 1.0


def test_goals_are_a_most_for_times_and_a_least_for_rates(
    doubles: tuple[Double, Double], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "GOALS", {COLD: 0.9, WARM: 0.4, sharing(1, 16): 1.1, REPEATING: 0.5, "other": 1.0})
    made, _ = measured(*doubles)
    judged = {goal["what"]: (goal["measured"], goal["met"]) for goal in made.more["goals"]}
    assert judged == {
        f"{what}, Mainstem over vLLM": expected
        for what, expected in {
            COLD: (0.5, True),
            WARM: (0.5, False),
            sharing(1, 16): (0.5, False),
            REPEATING: (0.5, True),
            "other": (None, None),
        }.items()
    }


def test_all_servers_get_equal_prompts_and_no_round_repeats_one(doubles: tuple[Double, Double]) -> None:
    own, peer = doubles
    measured(own, peer)
    assert own.asked == peer.asked
    first, second = own.asked[: len(own.asked) // 2], own.asked[len(own.asked) // 2 :]
    assert len(first) == len(second) and not set(first) & set(second)


def test_another_server_begins_each_round(doubles: tuple[Double, Double]) -> None:
    lines: list[str] = []
    made = replace(report(), progress=lines.append)
    measure(SMALL, made, doubles, Tokenizer())
    begin = [re.sub(r".*: ", "", line) for line in lines if COLD in line]
    assert begin == ["Mainstem", "vLLM", "vLLM", "Mainstem"]


def test_a_case_in_which_a_server_fails_once_has_no_values(doubles: tuple[Double, Double]) -> None:
    own, peer = doubles
    own.fails = lambda prompts: len(prompts) == 3 and len(own.asked) > 16
    made, rows = measured(own, peer)
    assert made.failures == [f"Mainstem, {sharing(3, 24)}: it is out of memory"]
    assert rows["Mainstem", sharing(3, 24)]["error"] == "it is out of memory"
    assert not {"median", "ratio"} & set(rows["Mainstem", sharing(3, 24)])
    assert rows["vLLM", sharing(3, 24)]["median"] == 12.0
    assert all("median" in rows["Mainstem", what] for what in NAMES if what != sharing(3, 24))


def test_a_failed_case_is_not_tried_again_and_gives_no_ratio(doubles: tuple[Double, Double]) -> None:
    own, peer = doubles
    peer.fails = lambda prompts: len(prompts) == 3
    made, rows = measured(own, peer)
    assert len(made.failures) == 1 and sum(len(prompts) == 3 for prompts in peer.asked) == 1
    assert "median" in rows["Mainstem", sharing(3, 24)] and "ratio" not in rows["Mainstem", sharing(3, 24)]


def test_a_case_that_takes_a_server_too_long_is_not_repeated_with_it(doubles: tuple[Double, Double]) -> None:
    peer = doubles[1]
    asked, now_s = peer.ask, 0.0

    def slow(prompts: Sequence[str], tokens: int) -> list[Answer]:
        nonlocal now_s
        now_s += 61.0 if len(prompts) == 3 else 1.0
        return asked(prompts, tokens)

    peer.ask = slow  # type: ignore[method-assign]
    made = report()
    measure(replace(SMALL, limit_s=60.0), made, doubles, Tokenizer(), clock=lambda: now_s)
    rounds = {(row["server"], row["what"]): row["rounds"] for row in made.rows}
    assert rounds.pop(("vLLM", sharing(3, 24))) == 1
    assert set(rounds.values()) == {2}
    assert next(row["ratio"] for row in made.rows if row["what"] == sharing(3, 24)) == 0.5
    assert "(once)" in figures.TABLES["servers"]({"servers-plain": made.as_json()})


@pytest.mark.parametrize("step_s", [0.0, 0.001])
def test_a_rate_from_chunks_that_came_together_is_measured_again(doubles: tuple[Double, Double], step_s: float) -> None:
    """Whichever round it was, and however small the time was from the first to the last."""
    peer = doubles[1]
    asked, usual_s, loads = peer.ask, peer.step_s, []

    def together_at_first(prompts: Sequence[str], tokens: int) -> list[Answer]:
        loads.append(len(prompts))
        peer.step_s = step_s if len(prompts) == 3 and loads.count(3) == 1 else usual_s
        return asked(prompts, tokens)

    peer.ask = together_at_first  # type: ignore[method-assign]
    made, rows = measured(*doubles)
    row = rows["vLLM", sharing(3, 24)]
    assert (row["discarded"], row["rounds"], row["most"]) == (1, 2, 12.0)
    assert not made.failures and loads.count(3) == 3
    assert rows["Mainstem", sharing(3, 24)]["ratio"] == 0.5
    assert "(12.0 to 12.0, 1 discarded)" in figures.TABLES["servers"]({"servers-plain": made.as_json()})
    assert {row["discarded"] for (_, what), row in rows.items() if what != sharing(3, 24)} == {0}


def test_a_server_whose_chunks_always_come_together_has_no_rate_and_fails_nothing(
    doubles: tuple[Double, Double],
) -> None:
    doubles[1].step_s = 0.0
    made, rows = measured(*doubles)
    assert not made.failures
    assert rows["vLLM", REPEATING]["error"] == "the chunks of its answers came together"
    assert rows["vLLM", REPEATING]["discarded"] == 2 + servers.AGAIN and "ratio" not in rows["Mainstem", REPEATING]
    assert "median" in rows["vLLM", unshared(2)]


def test_a_server_that_counts_other_tokens_in_a_prompt_fails(doubles: tuple[Double, Double]) -> None:
    own, peer = doubles
    peer.extra_tokens = 1
    made, rows = measured(own, peer)
    assert f"counts {QUESTION + 1} tokens in a prompt of {QUESTION}" in made.failures[0]
    assert all("error" in rows["vLLM", what] for what in NAMES)


def test_without_vllm_there_are_values_but_no_ratios(doubles: tuple[Double, Double]) -> None:
    made, rows = measured(doubles[0])
    assert set(rows) == {("Mainstem", what) for what in NAMES}
    assert all(goal["measured"] is None and goal["met"] is None for goal in made.more["goals"])


# ---------------------------------------------------------------- tables


def test_the_tables_show_medians_goals_failures_and_loads(
    doubles: tuple[Double, Double], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "GOALS", {COLD: 0.9, WARM: 0.4})
    doubles[0].fails = lambda prompts: len(prompts) == 3
    made, _ = measured(*doubles)
    console = Console(width=200, record=True, quiet=True)
    for table in made.tables:
        console.print(table)
    page = figures.TABLES["servers"]({"servers-plain": made.as_json()})
    for line in (
        "| cold first token, s | 8.00 (8.00 to 8.00) | 16.0 (16.0 to 16.0) | 0.500 | 0.900 | yes |",
        "| warm first token, s | 7.00 (7.00 to 7.00) | 14.0 (14.0 to 14.0) | 0.500 | 0.400 | no |",
        f"| {sharing(3, 24)}, tokens/s | failed | 12.0 (12.0 to 12.0) | – | – |  |",
        "| at once | 1 | 2 |",
        "| Mainstem | 500.0 | 500.0 |",
        "| Mainstem | 1.07 GB | 2 |",
        "| vLLM | 1.07 GB | – |",
    ):
        assert line in page
    assert len(made.tables) == 3


def test_each_kind_of_cpu_has_tables_and_missed_goals_of_its_own(
    doubles: tuple[Double, Double], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "GOALS", {WARM: 0.4})
    made, _ = measured(*doubles)
    records = {f"servers-{kind}": made.as_json() for kind in ("plain", "amx")}
    page = figures.TABLES["servers"](records)
    assert 0 <= page.index("Instructions `amx`") < page.index("Instructions `plain`")
    assert page.count("| cold first token, s |") == 2
    missed = figures.TABLES["missed goals"](records)
    assert f"| {WARM}, Mainstem over vLLM, amx |" in missed and f"| {WARM}, Mainstem over vLLM, plain |" in missed


def test_the_documentation_says_that_nothing_is_recorded_yet() -> None:
    assert figures.TABLES["servers"]({}) == "Not recorded yet."


# ---------------------------------------------------------------- processes

DOUBLE = Path(__file__).parents[1] / "doubles" / "model_server.py"
RUNS = f"{DOUBLE} {{port}}"
MINE = System("Mainstem", ("pytest", "httpx"), Path(sys.executable), RUNS, {"model": "{name}"}, preempted="preempted")


def states(process: Any) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0]


@pytest.mark.deadline
def test_a_server_runs_only_in_its_turns(tmp_path: Path) -> None:
    with Hosted(MINE, tmp_path, tmp_path / "log") as server:
        process = server._process
        eventually(lambda: states(process) == "T")
        with server.turn():
            (answer,) = server.ask([" one two"], 3)
            assert (answer.prompt_tokens, answer.tokens, answer.text) == (2, 3, " word word word")
            assert server.preemptions() == 3
        eventually(lambda: states(process) == "T")
        assert server.peak_bytes() > 1 << 20
    assert process.returncode == -signal.SIGTERM


@pytest.mark.deadline
def test_a_server_that_has_ended_fails_and_counts_nothing(tmp_path: Path) -> None:
    with Hosted(MINE, tmp_path, tmp_path / "log") as server:
        server._process.kill()
        server._process.wait()
        with server.turn(), pytest.raises(ServerFailed, match="ConnectError"):
            server.ask([" one"], 1)
        assert server.preemptions() is None


@pytest.mark.deadline
def test_a_server_that_does_not_start_says_what_it_printed(tmp_path: Path) -> None:
    broken = replace(MINE, command="-c print('no/such/model')")
    with pytest.raises(ServerFailed, match="no/such/model"), Hosted(broken, tmp_path, tmp_path / "log"):
        pytest.fail("it runs")


@pytest.mark.deadline
def test_the_benchmark_measures_what_is_installed_and_names_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = replace(MINE, name="vLLM", python=tmp_path / "python")
    partial = replace(MINE, name="peer", packages=("pytest", "no-such-package"))
    broken = replace(MINE, name="transformers", command="-c print('no/such/model')")
    monkeypatch.setattr(hosted, "SYSTEMS", (MINE, missing, partial, broken))
    model = SimpleNamespace(config=SimpleNamespace(name_or_path=str(tmp_path)))
    loaded = SimpleNamespace(model=model, name="tiny", tokenizer=Tokenizer())
    monkeypatch.setattr("mainstem.runtime.models.loading.load_model", lambda dtype: loaded)
    made = report()
    servers.run(SMALL, made)
    assert {row["server"] for row in made.rows} == {"Mainstem"} and len(made.rows) == len(NAMES)
    assert made.notes == [
        f"vLLM is left out: {tmp_path / 'python'} lacks pytest or httpx",
        f"peer is left out: {sys.executable} lacks pytest or no-such-package",
    ]
    assert [failure.partition(":")[0] for failure in made.failures] == ["transformers"]
    assert made.versions["pytest, serving"] == pytest.__version__
    assert made.kind == _core.instructions()
    assert made.settings["threads"] == 2 and "load_at_start" in made.settings
    assert made.more["servers"][0]["preemptions"] == 3

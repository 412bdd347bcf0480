"""`mainstem top`: what is shown is what happened between two scrapes, by plain arithmetic; servers may go and come."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import BadStatusLine, IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from rich.console import Console
from rigs.answering import answering
from rigs.fake_engine import FakeEngine
from rigs.hand_driven import Clock
from starlette.testclient import TestClient

from mainstem.cli import main
from mainstem.errors import BadArgument, MainstemError
from mainstem.server.app import create_app
from mainstem.watch import commands
from mainstem.watch.sample import MEASURES, Sample, Window, measure, totals
from mainstem.watch.top import ALL, Look, Watch, address, table

BOUNDS = (0.1, 0.5, 1.0, 5.0)


def text(**values: float) -> str:
    """Returns counters and gauges as a scrape; `__` in a name begins the label `tier`, `outcome` or `owner`."""
    label = {"mainstem_cached_tokens_total": "tier", "mainstem_requests_total": "outcome"}
    lines = []
    for name, value in values.items():
        metric, _, of = name.partition("__")
        lines.append(f'{metric}{{{label.get(metric, "owner")}="{of}"}} {value}' if of else f"{metric} {value}")
    return "\n".join(lines) + "\n"


def window(before: str, after: str, seconds: float = 2.0) -> Window:
    return Window.between(Sample.parse(before, 10.0), Sample.parse(after, 10.0 + seconds))


def test_rates_and_ratios_are_of_the_time_between_two_looks() -> None:
    before = text(
        mainstem_prompt_tokens_total=1000,
        mainstem_cached_tokens_total__device=100,
        mainstem_cached_tokens_total__host=50,
        mainstem_requests_total__stop=7,
        mainstem_requests_total__overloaded=1,
        mainstem_requests_running=3,
    )
    after = text(
        mainstem_prompt_tokens_total=1400,
        mainstem_cached_tokens_total__device=300,
        mainstem_cached_tokens_total__host=150,
        mainstem_requests_total__stop=11,
        mainstem_requests_total__overloaded=3,
        mainstem_requests_running=5,
    )
    shown = measure(window(before, after))
    expected = {
        "prompt_tokens_per_s": 200,
        "hit_ratio": 0.75,
        "device_hit_ratio": 0.5,
        "host_hit_ratio": 0.25,
        "requests_per_s": 3,
        "overloaded_per_s": 1,
        "running": 5,
    }
    assert {name: shown[name] for name in expected} == expected
    assert shown["host_filled_ratio"] is None and shown["storage_hit_ratio"] is None  # it has no such tier


def test_a_server_that_was_restarted_counts_from_nothing() -> None:
    shown = measure(window(text(mainstem_prompt_tokens_total=1000), text(mainstem_prompt_tokens_total=30)))
    assert shown["prompt_tokens_per_s"] == 15


def test_where_nothing_happened_there_is_no_ratio() -> None:
    same = text(mainstem_prompt_tokens_total=10, mainstem_cached_tokens_total__device=4)
    shown = measure(window(same, same))
    assert shown["hit_ratio"] is None and shown["prompt_tokens_per_s"] == 0


def test_a_cache_that_fills_its_pages_is_not_in_use() -> None:
    pages = {"free": 5, "cached": 85, "private": 10, "locked": 15, "total": 100}  # locked ones are cached
    now = text(**{f"mainstem_pool_pages__{owner}": count for owner, count in pages.items()})
    shown = measure(window(now, now))
    assert shown["device_used_ratio"] == 0.25 and shown["device_filled_ratio"] == 0.95
    assert shown["host_filled_ratio"] is None


def test_totals_are_since_the_start_and_only_of_what_happens() -> None:
    found = totals(
        Sample.parse(
            text(
                mainstem_prompt_tokens_total=400,
                mainstem_cached_tokens_total__device=100,
                mainstem_requests_total__stop=7,
                mainstem_requests_running=3,
            ),
            10.0,
        )
    )
    assert (found["requests"], found["prompt_tokens"], found["hit_ratio"]) == (7, 400, 0.25)
    assert not {"running", "waiting", "device_used_ratio", "retained_pages"} & set(found)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=200), st.floats(0, 1))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(seen: list[float], q: float) -> None:
    registry = CollectorRegistry()
    histogram = Histogram("mainstem_x_seconds", "x", buckets=BOUNDS, registry=registry)
    histogram.observe(0.3)  # before the window: it does not count
    before = Sample.parse(generate_latest(registry).decode(), 0.0)
    for value in seen:
        histogram.observe(value)
    found = Window.between(before, Sample.parse(generate_latest(registry).decode(), 1.0)).quantile(
        "mainstem_x_seconds", q
    )
    true = float(np.quantile(seen, q, method="inverted_cdf"))
    edges = (0.0, *BOUNDS)
    at = int(np.searchsorted(BOUNDS, true))
    assert found is not None
    assert edges[at] - 1e-9 <= found <= edges[min(at + 1, len(BOUNDS))] + 1e-9


def test_without_observations_there_is_no_quantile() -> None:
    registry = CollectorRegistry()
    Histogram("mainstem_x_seconds", "x", registry=registry)
    same = generate_latest(registry).decode()
    assert window(same, same).quantile("mainstem_x_seconds", 0.5) is None


def test_every_measure_is_of_a_metric_that_servers_have() -> None:
    engine = FakeEngine()
    server = TestClient(create_app(engine))  # type: ignore[arg-type]
    before = Sample.parse(server.get("/metrics").text, 0.0)
    for _ in range(2):
        assert server.post("/v1/completions", json={"model": "fake", "prompt": "x" * 40}).status_code == 200
    shown = measure(Window.between(before, Sample.parse(server.get("/metrics").text, 1.0)))
    tiers = {
        each.name for each in MEASURES if each.name.startswith(("host_filled", "late", "storage_faults", "storage_br"))
    }
    assert {name for name, value in shown.items() if value is None} <= tiers  # the engine here has no tiers
    assert shown["prompt_tokens_per_s"] == 80 and shown["requests_per_s"] == 2


class Servers:
    """Scripted servers: what each says at the next look; an exception is raised."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.says: dict[str, str | Exception] = {}

    def fetch(self, server: str) -> str:
        said = self.says[server]
        if isinstance(said, Exception):
            raise said
        return said


def test_one_server_that_goes_does_not_hide_the_others() -> None:
    servers = Servers()
    watch = Watch(["http://a", "http://b"], servers.fetch, servers.clock)

    def look(a: str | Exception, b: str | Exception) -> list[Look]:
        servers.says = {"http://a": a, "http://b": b}
        servers.clock.now_s += 2.0
        return watch.look()

    def count(tokens: float) -> str:
        return text(mainstem_prompt_tokens_total=tokens)

    first = look(count(0), count(100))
    assert [one.measures for one in first] == [{}, {}, {}]
    assert [one.totals["prompt_tokens"] for one in first] == [0, 100, 100]
    a, b, both = look(count(20), count(140))
    assert (a.measures["prompt_tokens_per_s"], b.measures["prompt_tokens_per_s"]) == (10, 20)
    assert both.server == ALL and both.measures["prompt_tokens_per_s"] == 30 and both.totals["prompt_tokens"] == 160
    a, b, both = look(ConnectionRefusedError("Connection refused"), count(180))
    assert a.error == "Connection refused" and not a.measures
    assert both.measures["prompt_tokens_per_s"] == b.measures["prompt_tokens_per_s"] == 20
    a, b, both = look(count(1000), count(220))  # it is back: nothing to compare with
    assert a.error is None and not a.measures and both.measures["prompt_tokens_per_s"] == 20


BAD_ANSWERS = [
    BadStatusLine("SSH-2.0-OpenSSH_9\r\n"),
    IncompleteRead(b"mainstem_x 1", 4000),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "{, =TYPE",
    "mainstem_time_to_first_token_seconds_bucket 5",
    'mainstem_time_to_first_token_seconds_bucket{le="x"} 5',
]


@pytest.mark.parametrize("bad", BAD_ANSWERS, ids=lambda bad: str(bad)[:40])
def test_one_server_that_answers_badly_does_not_hide_the_others(bad: str | Exception) -> None:
    servers = Servers()
    servers.says = {"http://a": bad, "http://b": text(mainstem_prompt_tokens_total=0)}
    watch = Watch(["http://a", "http://b"], servers.fetch, servers.clock)
    watch.look()
    servers.clock.now_s += 2.0
    servers.says["http://b"] = text(mainstem_prompt_tokens_total=40)
    a, b, both = watch.look()
    assert a.error and "as mainstem serve does" in a.error and not a.measures
    assert b.error is None and b.measures["prompt_tokens_per_s"] == both.measures["prompt_tokens_per_s"] == 20


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e308])
@pytest.mark.parametrize("since", [0, 2])
def test_what_is_no_number_is_null_and_in_no_sum(value: float, since: int) -> None:
    servers = Servers()
    watch = Watch(["http://a", "http://b"], servers.fetch, servers.clock)
    for at in range(3):
        servers.clock.now_s += 2.0
        counted = {"mainstem_prompt_tokens_total": 100.0 + 40 * at, "mainstem_requests_total__stop": 10.0 + at}
        odd = {"mainstem_prompt_tokens_total": value} if at >= since else {}
        twice = {"mainstem_requests_total__stop": value, "mainstem_requests_total__error": value} if at < since else {}
        servers.says = {"http://a": text(**counted | odd | twice), "http://b": text(**counted)}
        looks = watch.look()
    a, b, both = looks
    names = ("prompt_tokens_per_s", "requests_per_s")
    assert [a.measures[name] for name in names] == [None, None if since else 0.5]
    assert [both.measures[name] for name in names] == [20, 0.5 if since else 1.0]
    assert b.measures["prompt_tokens_per_s"] == 20
    assert a.totals["prompt_tokens"] is None and both.totals["prompt_tokens"] == b.totals["prompt_tokens"] == 180
    json.dumps([look.totals for look in looks], allow_nan=False)
    json.dumps([look.measures for look in looks], allow_nan=False)


@pytest.mark.parametrize("said", ["<html>", "", "other_metric 5\n", "mainstem_x{ 3\n"])
def test_what_is_not_a_server_of_ours_is_said(said: str) -> None:
    with pytest.raises(MainstemError, match="no metrics"):
        Sample.parse(said, 0.0)


def test_the_table_shows_every_measure_and_says_what_failed() -> None:
    console = Console(file=StringIO(), width=200)
    shown = measure(window(text(mainstem_prompt_tokens_total=0), text(mainstem_prompt_tokens_total=3000)))
    console.print(
        table([Look("http://a:1", shown, {"prompt_tokens": 123456}), Look("http://b:2", error="[Errno 111] refused")])
    )
    written = console.file.getvalue()  # type: ignore[attr-defined]
    (tokens,) = (line.split() for line in written.splitlines() if line.startswith("prompt tokens"))
    assert tokens[2:4] == ["1,500/s", "123,456"]
    assert "in all" in written and "a:1" in written and "[Errno 111] refused" in written and "1,500/s" in written
    assert all(each.title.strip() in written for each in MEASURES)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        (":9000", "http://127.0.0.1:9000"),
        ("https://kv.example/proxy/", "https://kv.example/proxy"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_servers_are_named_as_users_name_them(given: str, url: str) -> None:
    assert address(given) == url


@pytest.mark.parametrize("given", ["", "ftp://a", "http://", "http://a:99999999", "http://a?x=1", "file:///etc/passwd"])
def test_what_names_no_server_is_refused(given: str) -> None:
    with pytest.raises(BadArgument, match="server"):
        address(given)


@contextmanager
def served(says: list[str]) -> Iterator[str]:
    """Serves the texts at /metrics, one a request, the last one for ever."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/metrics"
            body = (says.pop(0) if len(says) > 1 else says[0]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_command_prints_one_sample_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    def both(tokens: int, hit: int) -> str:
        return text(mainstem_prompt_tokens_total=tokens, mainstem_cached_tokens_total__device=hit)

    with served([both(0, 0), both(100, 40)]) as server:
        assert main(["top", server, "--json", "--interval-s", "0.1"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["server"] == f"http://{server}" and found["error"] is None
    assert found["measures"]["hit_ratio"] == 0.4
    assert set(found["measures"]) == {each.name for each in MEASURES}
    assert found["totals"]["hit_ratio"] == 0.4 and found["totals"]["prompt_tokens"] == 100


def test_the_command_ends_with_one_line_where_no_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with served(["x"]) as gone:
        pass
    assert main(["top", gone]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"mainstem: no server answers: http://{gone}") and said.err.count("\n") == 1
    assert main(["top", gone, "--interval-s", "0"]) == 2
    assert "must be 0.1 to 3600" in capsys.readouterr().err


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\nmainstem_x 1\n"]
)
def test_the_command_goes_on_beside_what_is_no_server(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with served([text(mainstem_prompt_tokens_total=4)]) as good, answering(answer) as bad:
        assert main(["top", bad, good, "--json", "--interval-s", "0.1"]) == 0
        shown, _, _ = map(json.loads, capsys.readouterr().out.splitlines())
        assert "as mainstem serve does" in shown["error"]
        assert main(["top", bad]) == 1
        assert "no server answers" in capsys.readouterr().err


def test_control_c_is_the_usual_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("mainstem.watch.commands.time.sleep", sleep)
    with served([text(mainstem_prompt_tokens_total=0)]) as server:
        assert main(["top", server]) == 0
    assert "found in the cache" in capsys.readouterr().out
    assert len(looks) == 2  # the first table comes before the first wait


def test_a_server_has_five_seconds_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def opens(url: str, timeout: float) -> Any:
        waited.append(timeout)
        raise OSError("nobody there")

    monkeypatch.setattr(commands.urllib.request, "urlopen", opens)
    with pytest.raises(OSError, match="nobody"):
        commands._fetch("http://127.0.0.1:1")
    top: Any = commands.top.default_command
    for interval_s in (0.1, 3600.0):  # which are allowed
        with pytest.raises(MainstemError, match="nobody there"):
            top("127.0.0.1:1", interval_s=interval_s)
    assert waited == [5.0] * 3
    for interval_s in (0.09, 3600.1, 3_600_000.0):
        with pytest.raises(BadArgument, match="interval_s"):
            top("127.0.0.1:1", interval_s=interval_s)
    assert waited == [5.0] * 3 and inspect.signature(top).parameters["interval_s"].default == 2.0

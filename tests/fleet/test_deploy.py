"""What operators load elsewhere: the dashboard and the alert rules, in a real Prometheus over a server."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from machine import eventually
from rigs.clients import served
from rigs.fake_engine import FakeEngine
from rigs.full_stats import filled
from skips import PROMETHEUS

from mainstem.cache.explain import Evicted, Stretch
from mainstem.metric import rows
from mainstem.runtime.engine_core import EngineStats
from mainstem.runtime.schedule.timeline import Phase
from mainstem.server.watch.metrics import OUTCOMES

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "mainstem.rules.yml"
PANELS = [
    panel for panel in json.loads((ROOT / "deploy/grafana/mainstem.json").read_text())["panels"] if "targets" in panel
]
EXPRESSIONS = {
    f"{panel['title']}: {target['legendFormat']}": target["expr"] for panel in PANELS for target in panel["targets"]
}
HISTOGRAMS = {
    *("time_to_first_token", "inter_token_latency", "e2e_request_latency", "time_per_output_token", "storage_wait"),
    *("regret", "regret_idle", "reuse"),
}


def written(path: Path) -> str:
    """Returns a file without its line ends and indents."""
    return " ".join(path.read_text().split())


def test_the_dashboard_is_what_the_script_writes() -> None:
    run = subprocess.run([sys.executable, ROOT / "scripts" / "dashboard.py", "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_only_metrics_that_servers_have_are_asked_for() -> None:
    known = {row.name + "_total" * (row.kind == "counter") for _, row in rows(EngineStats)}
    known |= {"mainstem_requests_total", "mainstem_regret_tokens_total"} | {
        f"mainstem_{name}_seconds_bucket" for name in HISTOGRAMS
    }
    asked = set(re.findall(r"\bmainstem_\w+", " ".join([*EXPRESSIONS.values(), *alerts().values()])))
    assert asked <= known
    assert len(asked) > 20
    named = set(re.findall(r'outcome="(\w+)"', written(RULES)))
    assert named and named <= set(OUTCOMES)


def alerts() -> dict[str, str]:
    """Returns the expressions of the alerts."""
    found = re.findall(r"- alert: (\w+) expr: (?:>- )?(.*?) (?:for|labels):", written(RULES))
    assert len(found) == written(RULES).count("- alert:")
    return dict(found)


class FullEngine(FakeEngine):
    """Everything is there and grows: every number of its statistics is another at each scrape."""

    scrapes = 0

    def __init__(self) -> None:
        super().__init__()
        self.config = replace(self.config, explain=True)
        gone = Evicted("policy", "device", "lru", 1, 60.0, 5.0, 60, 7)
        self.why = {cached: Stretch(0, 0, cause="evicted", eviction=gone) for cached in range(0, 48, 16)}
        self.phases = (Phase("prefetch", 0.0, 0.002),)

    def stats(self) -> Any:
        self.scrapes += 1
        return filled(EngineStats, count(100 * self.scrapes, self.scrapes))


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that scrapes a server of ours and evaluates the rules; its URL."""
    folder = tmp_path_factory.mktemp("prometheus")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with served(FullEngine()) as server:
        target = server.removeprefix("http://")
        config = {
            "global": {"scrape_interval": "100ms", "evaluation_interval": "200ms"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "mainstem", "static_configs": [{"targets": [target]}]}],
        }
        path = folder / "prometheus.yml"
        path.write_text(json.dumps(config))  # JSON is YAML
        command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"]
        with (
            open(folder / "log", "wb") as log,
            subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log) as process,
        ):
            url = f"http://127.0.0.1:{port}"
            try:
                eventually(lambda: bool(found(url, "up{job='mainstem'} == 1")))
                for _ in range(3):
                    ask(server)
                eventually(lambda: bool(found(url, "rate(mainstem_time_to_first_token_seconds_count[5s]) > 0")))
                yield url
            finally:
                process.terminate()


def ask(server: str) -> None:
    body = json.dumps({"model": "fake", "prompt": "x" * 40}).encode()
    request = urllib.request.Request(f"{server}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200


def api(url: str, path: str, **query: str) -> Any:
    """Returns the data of an answer of Prometheus; an error of the expression fails."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from None


def found(url: str, expression: str) -> list[Any]:
    """Returns what an expression finds, or nothing while Prometheus starts."""
    try:
        return list(api(url, "query", query=expression)["result"])
    except (urllib.error.URLError, ConnectionError, AssertionError):
        return []


@PROMETHEUS.needed
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_panel_shows_something(prometheus: str, name: str) -> None:
    expression = EXPRESSIONS[name].replace("$__rate_interval", "1m").replace("$instance", ".*")
    api(prometheus, "query", query=expression)  # it is one
    eventually(lambda: bool(found(prometheus, expression)))  # a series needs two scrapes
    result = found(prometheus, expression)
    labels = re.findall(r"{{(\w+)}}", name)
    assert all(labels_of.keys() >= set(labels) for labels_of in (one["metric"] for one in result))


@PROMETHEUS.needed
def test_every_rule_is_evaluated(prometheus: str) -> None:
    def evaluated() -> bool:
        rules = [rule for group in api(prometheus, "rules")["groups"] for rule in group["rules"]]
        assert not [rule["lastError"] for rule in rules if rule.get("lastError")]
        return len(rules) == len(alerts()) and all(rule["health"] == "ok" for rule in rules)

    eventually(evaluated)


BAD: dict[str, dict[str, str]] = {
    "MainstemDown": {'up{job="mainstem",instance="a"}': "0x2000"},
    "MainstemHitRateFell": {
        'mainstem_prompt_tokens_total{instance="a"}': "0+100x2000",
        'mainstem_cached_tokens_total{instance="a",tier="device"}': "0+80x1900 152000+0x100",
    },
    "MainstemMissesChanged": {
        'mainstem_prompt_tokens_total{instance="a"}': "0+100x2000",
        'mainstem_misses_tokens_total{instance="a",cause="parted"}': "0+5x1900 9500+80x100",
        'mainstem_misses_tokens_total{instance="a",cause="never_seen"}': "0+5x2000",
    },
    "MainstemRegret": {
        'mainstem_prompt_tokens_total{instance="a"}': "0+100x2000",
        'mainstem_regret_tokens_total{instance="a",tier="device",why="policy"}': "0+40x2000",
    },
    "MainstemTurnsRequestsAway": {
        'mainstem_requests_total{instance="a",outcome="stop"}': "0+90x2000",
        'mainstem_requests_total{instance="a",outcome="overloaded"}': "0+10x2000",
    },
    "MainstemRequestsFail": {'mainstem_requests_total{instance="a",outcome="error"}': "0+1x2000"},
    "MainstemSlowFirstToken": {
        'mainstem_time_to_first_token_seconds_bucket{instance="a",le="10.0"}': "0+1x2000",
        'mainstem_time_to_first_token_seconds_bucket{instance="a",le="60.0"}': "0+10x2000",
        'mainstem_time_to_first_token_seconds_bucket{instance="a",le="+Inf"}': "0+10x2000",
    },
    "MainstemPreempts": {'mainstem_preemptions_total{instance="a"}': "0+60x2000"},
    "MainstemStorageBreakerOpen": {'mainstem_storage_breaker_open{instance="a"}': "1x2000"},
    "MainstemStorageFaults": {'mainstem_storage_faults_total{instance="a",cause="timeout"}': "0+5x2000"},
    "MainstemPagesLate": {
        'mainstem_late_pages_total{instance="a",cause="deadline"}': "0+60x2000",
        'mainstem_moved_pages_total{instance="a",from="storage",to="host"}': "0+60x2000",
    },
    "MainstemEventsLost": {'mainstem_kv_events_dropped_pages_total{instance="a"}': "0+1x2000"},
}
"""Series, a value a minute, that an alert is for."""


@PROMETHEUS.needed
@pytest.mark.slow
@pytest.mark.parametrize("bad", [True, False], ids=["trouble", "calm"])
def test_alerts_fire_in_trouble_and_only_then(tmp_path: Path, bad: bool) -> None:
    assert BAD.keys() == alerts().keys()
    # One run for all alerts: a run takes seconds. Each alert has an instance of its own.
    series = {key.replace('"a"', f'"{name}"'): values for name, each in BAD.items() for key, values in each.items()}
    calm = {key: "1x2000" if key.startswith("up") else "0x2000" for key in series}
    firing = 'count by (alertname) (ALERTS{{alertstate="firing",alertname="{0}",instance="{0}"}})'
    test = {
        "interval": "1m",
        "input_series": [{"series": key, "values": values} for key, values in (series if bad else calm).items()],
        "promql_expr_test": [
            {
                "expr": firing.format(name),
                "eval_time": "1990m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1}] if bad else [],
            }
            for name in BAD
        ],
    }
    path = tmp_path / "tests.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    run = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr

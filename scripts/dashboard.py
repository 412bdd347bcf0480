"""Writes the Grafana dashboard of `deploy/grafana` from a table of panels.

    python scripts/dashboard.py            writes it
    python scripts/dashboard.py --check    fails if it is not what the table makes

The form is Grafana's JSON model: https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "deploy" / "grafana" / "mainstem.json"
COLUMNS, HEIGHT, PANELS_A_ROW = 24, 8, 3
BY = 'job="mainstem",instance=~"$instance"'
"""What every expression selects."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time.

    Args:
        unit: Grafana's name of it.
        queries: the name of each line, as a template of labels, and its expression, in which `@` is the selection.
        stacked: whether the lines are parts of a whole.
    """

    title: str
    unit: str
    queries: dict[str, str]
    stacked: bool = False


def _rate(metric: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) (rate({metric}{{@}}[$__rate_interval]))"


def _ratio(part: str, whole: str) -> str:
    return f"{part} / ignoring(tier) group_left() {whole}" if "by (tier)" in part else f"{part} / {whole}"


def _quantile(q: float, metric: str, *by: str) -> str:
    return f"histogram_quantile({q}, {_rate(metric + '_bucket', *by, 'le')})"


def _latency(title: str, metric: str) -> Panel:
    return Panel(title, "s", {f"p{round(100 * q)}": _quantile(q, metric) for q in (0.5, 0.9, 0.99)})


def _owners(metric: str) -> dict[str, str]:
    parts = f'sum by (component, owner) ({metric}{{@,owner=~"free|cached|private"}})'
    whole = f'sum by (component) ({metric}{{@,owner="total"}})'
    return {"{{component}} {{owner}}": f"{parts} / ignoring(owner) group_left() {whole}"}


PROMPTS = _rate("mainstem_prompt_tokens_total")
ROWS: dict[str, tuple[Panel, ...]] = {
    "What is found": (
        Panel("Prompt tokens found, by tier", "percentunit",
              {"{{tier}}": _ratio(_rate("mainstem_cached_tokens_total", "tier"), PROMPTS)}, stacked=True),
        Panel("Prompt tokens", "short", {
            "computed": f"{PROMPTS} - {_rate('mainstem_cached_tokens_total')}",
            "{{tier}}": _rate("mainstem_cached_tokens_total", "tier"),
        }, stacked=True),
        Panel("Found, by server", "percentunit", {"{{instance}}": _ratio(
            _rate("mainstem_cached_tokens_total", "instance"), _rate("mainstem_prompt_tokens_total", "instance"))}),
    ),
    "Why the rest was computed": (
        Panel("Prompt tokens computed, by cause (--explain)", "short",
              {"{{cause}}": _rate("mainstem_misses_tokens_total", "cause")}, stacked=True),
        Panel("Regret: evicted and asked for again", "short",
              {"{{tier}}: {{why}}": _rate("mainstem_regret_tokens_total", "tier", "why")}, stacked=True),
        Panel("Ages", "s", {
            "asked for again after its eviction, p50": _quantile(0.5, "mainstem_regret_seconds"),
            "unused before that eviction, p50": _quantile(0.5, "mainstem_regret_idle_seconds")}),
        Panel("From one use to the next (--explain)", "s", {
            f"{{{{outcome}}}}, p{round(100 * q)}": _quantile(q, "mainstem_reuse_seconds", "outcome")
            for q in (0.5, 0.9)}),
        Panel("Wait for storage", "s", {
            f"p{round(100 * q)}": _quantile(q, "mainstem_storage_wait_seconds") for q in (0.5, 0.9, 0.99)}),
        Panel("Computing saved, as a part of one machine", "percentunit",
              {"{{instance}}": _rate("mainstem_saved_seconds_total", "instance")}),
        Panel("Operations saved a second", "flops", {"{{instance}}": _rate("mainstem_saved_flops_total", "instance")}),
    ),
    "What users wait for": (
        _latency("Time to the first token", "mainstem_time_to_first_token_seconds"),
        _latency("Time to the next token", "mainstem_inter_token_latency_seconds"),
        _latency("Time to the last token", "mainstem_e2e_request_latency_seconds"),
        _latency("Time per output token, by answer", "mainstem_time_per_output_token_seconds"),
        Panel("Requests, by outcome", "reqps",
              {"{{outcome}}": _rate("mainstem_requests_total", "outcome")}, stacked=True),
        Panel("Requests running and waiting", "short", {
            "running": "sum(mainstem_requests_running{@})", "waiting": "sum(mainstem_requests_waiting{@})"}),
        Panel("Generated tokens", "short", {
            "all": _rate("mainstem_generation_tokens_total"), "by drafts": _rate("mainstem_accepted_tokens_total")}),
    ),
    "Memory": (
        Panel("Device pages and slots, by owner", "percentunit", _owners("mainstem_pool_pages"), stacked=True),
        Panel("Host pages and slots, by owner", "percentunit", _owners("mainstem_host_pages"), stacked=True),
        Panel("Retained pages", "short", {"{{component}} on {{tier}}":
              "sum by (component, tier) (mainstem_retained_pages{@})"}, stacked=True),
        Panel("Evicted pages", "short", {"{{instance}}": _rate("mainstem_evicted_pages_total", "instance")}),
        Panel("Preemptions", "short", {"{{instance}}": _rate("mainstem_preemptions_total", "instance")}),
        Panel("Locked pages", "short", {"{{component}}": 'sum by (component) (mainstem_pool_pages{@,owner="locked"})'}),
    ),
    "Tiers and storage": (
        Panel("Pages moved", "short", {"{{from}} to {{to}}": _rate("mainstem_moved_pages_total", "from", "to")}),
        Panel("Pages not moved, and late pages", "short", {
            "{{reason}}": _rate("mainstem_dropped_pages_total", "reason"),
            "late: {{cause}}": _rate("mainstem_late_pages_total", "cause")}),
        Panel("Storage faults, and open breakers", "short", {
            "{{cause}}": _rate("mainstem_storage_faults_total", "cause"),
            "open breakers": "sum(mainstem_storage_breaker_open{@})",
            "queued pages": "sum(mainstem_storage_queued_pages{@})"}),
    ),
}  # fmt: skip
"""The panels, by the heading of their row."""


def dashboard() -> dict[str, Any]:
    """Returns Grafana's model of the dashboard."""
    panels: list[dict[str, Any]] = []
    top = 0
    for heading, row in ROWS.items():
        panels.append({"type": "row", "title": heading, "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1}})
        top += 1
        for number, panel in enumerate(row):
            width = COLUMNS // PANELS_A_ROW
            x, y = number % PANELS_A_ROW * width, top + number // PANELS_A_ROW * HEIGHT
            panels.append(_panel(panel, {"x": x, "y": y, "w": width, "h": HEIGHT}))
        top += -(-len(row) // PANELS_A_ROW) * HEIGHT
    for number, made in enumerate(panels, 1):
        made["id"] = number
    return {
        "uid": "mainstem",
        "title": "Mainstem",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), _instances()]},
        "panels": panels,
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _instances() -> dict[str, Any]:
    return {
        "name": "instance",
        "label": "Server",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": 'label_values(mainstem_requests_running{job="mainstem"}, instance)',
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.stacked else "none"}
    custom = {"stacking": stacking, "fillOpacity": 30 if panel.stacked else 0}
    return {
        "type": "timeseries",
        "title": panel.title,
        "gridPos": place,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "legendFormat": name, "expr": expression.replace("@", BY)}
            for number, (name, expression) in enumerate(panel.queries.items())
        ],
    }


def text() -> str:
    """Returns the file."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(None if PATH.read_text() == text() else f"{PATH} is old: python scripts/dashboard.py")
    PATH.write_text(text())

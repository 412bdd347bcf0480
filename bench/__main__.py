"""Benchmarks: index, core, policies, agents, states, marks, tiers, store-faults, ttft, throughput, ...; or all."""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from rich.console import Console

from bench import core, index
from bench.entries import SYSTEMS
from bench.report import Report

NAMES = (
    "index",
    "core",
    "policies",
    "agents",
    "edits",
    "scores",
    "batch",
    "batch-runs",
    "batch-serving",
    "fleet",
    "states",
    "marks",
    "tiers",
    "store-faults",
    "ttft",
    "throughput",
    "generate",
    "models",
    "plan",
    "attention",
    "loading",
    "throttled",
    "codec",
    "kv",
    "weights",
    "servers",
    "bits",
)
FLEET_PARTS = ("routers", "decision", "first", "apart")
WIDTH = 160
"""Columns of the widest table."""


def main() -> None:
    """Runs the chosen benchmarks, prints their tables and writes `<name>.json`. Exits with 1 if a check failed."""
    options = _options()
    console, log = Console(), Console(stderr=True)
    console.width = max(console.width, WIDTH)
    failures = 0
    for name in options.benchmarks or NAMES:
        report = Report(name, options.date, options.quick, progress=lambda line: log.print(line, style="dim"))
        _run(name, report, options)
        report.show(console)
        console.print(f"written to {report.write(options.out, options.record)}", soft_wrap=True)
        failures += len(report.failures)
    sys.exit(1 if failures else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("benchmarks", nargs="*", metavar="benchmark", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller settings")
    parser.add_argument("--record", action="store_true", help="write recorded-*.json, which the documentation shows")
    parser.add_argument("--peers-python", metavar="PATH", help="interpreter with the peers; default: this one")
    parts = f"index: run only these parts, of {', '.join(index.PARTS)}; fleet: of {', '.join(FLEET_PARTS)}"
    parser.add_argument("--only", nargs="+", metavar="PART", help=parts)
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=list(SYSTEMS),
        metavar="SYSTEM",
        help="index: run only these and Mainstem's leases",
    )
    parser.add_argument(
        "--trace",
        nargs="+",
        default=[],
        metavar="FILE",
        help="policies, agents, batch, states: also replay these traces; fleet: these alone",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON")
    parser.add_argument("--date", default=datetime.now(UTC).isoformat(timespec="seconds"), help="date for the JSON")
    options = parser.parse_args()
    with_traces = options.trace and options.benchmarks not in (["states"], ["agents"], ["batch"], ["fleet"])
    partial = options.quick or options.only or options.systems or with_traces
    if options.record and partial:
        allowed = "leave out --quick, --only, --systems, and --trace but for states, agents, batch and fleet"
        parser.error(f"only whole runs are recorded: {allowed}")
    there = FLEET_PARTS if options.benchmarks == ["fleet"] else index.PARTS
    if wrong := sorted(set(options.only or ()) - set(there)):
        parser.error(f"no such part: {', '.join(wrong)}; there are {', '.join(there)}")
    unknown = set(options.benchmarks) - set(NAMES)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    return options


def _run(name: str, report: Report, options: argparse.Namespace) -> None:
    if name == "index":
        settings = index.QUICK if report.quick else index.Settings()
        index.run(settings.only(options.only, options.systems), report, options.peers_python)
        return
    if name == "core":
        core.run(core.QUICK if report.quick else core.Settings(), report)
        return
    if name in ("edits", "scores", "batch-runs", "batch-serving", "servers", "bits"):  # need packages that not all have
        module = import_module("bench." + name.replace("-", "_"))
        module.run(module.QUICK if report.quick else module.Settings(), report)
        return
    if name == "policies":
        from bench import policies  # needs the packages that read traces

        chosen = policies.QUICK if report.quick else policies.Settings()
        policies.run(replace(chosen, traces=tuple(options.trace)), report)
        return
    if name == "agents":
        from bench import agents

        all_jobs = agents.QUICK if report.quick else agents.Settings()
        agents.run(replace(all_jobs, traces=tuple(options.trace)), report)
        return
    if name == "batch":
        from bench import batch

        lists = batch.QUICK if report.quick else batch.Settings()
        batch.run(replace(lists, traces=tuple(options.trace)), report)
        return
    if name == "fleet":
        from bench import fleet

        routed = fleet.QUICK if report.quick else fleet.Settings()
        fleet.run(replace(routed, traces=tuple(options.trace), parts=tuple(options.only or FLEET_PARTS)), report)
        return
    if name == "states":
        from bench import states

        kinds = states.QUICK if report.quick else states.Settings()
        states.run(replace(kinds, traces=tuple(options.trace)), report)
        return
    # The others need the runtime.
    from bench import (
        attention,
        codec,
        generate,
        kv,
        loading,
        marks,
        models,
        plan,
        store_faults,
        throttled,
        throughput,
        tiers,
        ttft,
        weights,
    )
    from mainstem.runtime.models.loading import load_model

    if name == "tiers":
        tiers.run(tiers.QUICK if report.quick else tiers.Settings(), report)
        return
    if name == "marks":
        marks.run(marks.QUICK if report.quick else marks.Settings(), report)
        return
    if name == "models":
        models.run(models.QUICK if report.quick else models.Settings(), report)
        return
    if name == "plan":
        plan.run(plan.QUICK if report.quick else plan.Settings(), report)
        return
    if name == "attention":
        attention.run(attention.QUICK if report.quick else attention.Settings(), report)
        return
    if name == "loading":
        loading.run(loading.QUICK if report.quick else loading.Settings(), report)
        return

    if name == "kv":
        kinds_of_kv = kv.QUICK if report.quick else kv.Settings()
        kv.run(kinds_of_kv, report, lambda dtype: load_model(dtype=dtype))
    elif name == "store-faults":
        faults = store_faults.QUICK if report.quick else store_faults.Settings()
        store_faults.run(faults, report, load_model(dtype=faults.dtype))
    elif name == "throttled":
        links = throttled.QUICK if report.quick else throttled.Settings()
        throttled.run(links, report, load_model(dtype=links.dtype))
    elif name == "ttft":
        lengths = ttft.QUICK if report.quick else ttft.Settings()
        for dtype in lengths.dtypes:
            ttft.run(lengths, report, load_model(dtype=dtype))
        report.tables.append(ttft.table(report.rows))
    elif name == "codec":
        rates = codec.QUICK if report.quick else codec.Settings()
        codec.run(rates, report, load_model(dtype=rates.dtype))
    elif name == "weights":
        forms = weights.QUICK if report.quick else weights.Settings()
        three = (load_model(dtype=forms.dtype, quantization=each) for each in ("none", "int4", "none"))
        weights.run(forms, report, *three)
    elif name == "generate":
        answers = generate.QUICK if report.quick else generate.Settings()
        generate.run(answers, report, load_model(dtype=answers.dtype))
    else:
        loads = throughput.QUICK if report.quick else throughput.Settings()
        throughput.run(loads, report, load_model(dtype=loads.dtype))


def run() -> None:
    """Runs `main` as a program: SIGTERM ends what it has started, too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    main()


if __name__ == "__main__":
    run()

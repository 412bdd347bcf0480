"""`mainstem replay`, which `mainstem.cli` mounts: its options and its output, nothing else."""

from __future__ import annotations

import csv as csv_format
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from mainstem.errors import BadArgument
from mainstem.here import check_output
from mainstem.replay.commands.trace import TracePath, read_trace
from mainstem.settings.fields import Settings, integer, number, setting
from mainstem.settings.flags import Switch, alone
from mainstem.settings.replay import DTYPE, Setup, TraceOptions
from mainstem.terminal import bar, printable, results
from mainstem.units import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mainstem.replay.plan.costs import ModelShape
    from mainstem.replay.simulate.rows import Row, Share, TierRow
    from mainstem.replay.trace import Trace

_PERCENTS = (1, 5, 10, 25, 50)


@dataclass(frozen=True)
class CacheOptions(Settings):
    """The caches to replay.

    Args:
        capacity: Capacity of the cache; several with commas. Default: 1%,5%,10%,25%,50%, at least one block.
        policy: Eviction policy; several with commas: lru, slru:3 and so on, package.module:Class of your own, and opt,
            the offline optimum. Default: lru,opt, or only lru with tiers, replicas or a time to live.
        tiers: Lower tiers, which also hold everything above: host=20%,storage=8TB; device=5% replaces --capacity.
        setup: Time to live, replicas; the sizes of the lower tiers need a trace.
        model: Model for bytes and FLOPs: a folder with a config.json, such a file, or a name such as llama-3.1-8b.
        kv_dtype: Type of the model's KV: bf16, fp8, fp16, int8, fp32 and so on.
        bytes_per_token: Memory of a cached token, without --model or instead of the model's.
        workers: Threads. Default: one per CPU core.
    """

    capacity: str | None = setting(None)
    policy: str | None = setting(None)
    tiers: str | None = setting(None)
    setup: Setup = Setup()
    model: str | None = setting(None)
    kv_dtype: str = setting("bf16", DTYPE)
    bytes_per_token: float | None = setting(None, number(0, above=True))
    workers: int | None = setting(None, integer(1, 1024))

    def token_bytes(self, shape: ModelShape | None) -> float | None:
        """Returns the bytes of a cached token; None: unknown."""
        if self.bytes_per_token is not None or shape is None:
            return self.bytes_per_token
        return float(shape.kv_bytes_per_token(self.kv_dtype)) or None

    def caches(self, trace: Trace, bytes_per_token: float | None) -> tuple[list[int], Setup]:
        """Returns the capacities of the device in blocks, and the whole setup.

        Raises:
            BadArgument: a value is outside its range, or the device's capacity is given twice.
        """
        from mainstem.replay.simulate.sweep import parse_capacities, parse_tiers

        tiers = {} if self.tiers is None else parse_tiers(self.tiers, trace, bytes_per_token)
        if "device" in tiers and self.capacity is not None:
            raise BadArgument("capacity", self.capacity, "left out if --tiers gives the device's capacity")
        if "device" in tiers:
            capacities = [tiers["device"]]
        elif self.capacity is not None:
            capacities = parse_capacities(self.capacity, trace, bytes_per_token)
        else:
            capacities = list(dict.fromkeys(max(1, trace.distinct_blocks * percent // 100) for percent in _PERCENTS))
        return capacities, replace(self.setup, host_blocks=tiers.get("host"), storage_blocks=tiers.get("storage"))

    def policies(self) -> list[str]:
        """Returns the names of the policies.

        Raises:
            BadArgument: there is no such policy.
        """
        from mainstem.replay.simulate.sweep import check_policy

        alone = self.tiers is None and self.setup.ttl is None and self.setup.replicas == 1
        default = "lru,opt" if alone else "lru"
        names = [name.strip() for name in (default if self.policy is None else self.policy).split(",")]
        for name in names:
            check_policy(name, self.setup)
        return names


@alone("replay")
def replay(
    path: TracePath,
    *,
    caches: CacheOptions = CacheOptions(),
    reading: TraceOptions = TraceOptions(),
    json: Switch = False,
    csv: Annotated[Path | None, Parameter(negative="")] = None,
    report: Annotated[Path | None, Parameter(negative="")] = None,
) -> None:
    """Replay a trace of requests through a cache of each size and policy.

    Args:
        path: The trace; - is standard input.
        json: Print a list of rows, one per policy and capacity.
        csv: Write the same rows to this file, without histograms.
        report: Write a report with charts and numbers to this file, .html; it needs no network.

    Examples:

      mainstem replay conversation_trace.jsonl.xz
      mainstem replay trace.mstrace --capacity 1%,2%,5%,10% --policy lru,slru,opt --csv rows.csv
      mainstem replay trace.mstrace --policy lru,slru,lfu,opt --report out.html
      mainstem replay trace.mstrace --capacity 40GB --tiers host=1TB,storage=8TB --model llama-3.1-8b
      mainstem replay requests.jsonl --prompt-rules rules.toml
      mainstem replay trace.mstrace --capacity 2Mtok --ttl 5m --replicas 4 --routing prefix --json

    Capacities are blocks (1000), tokens (2Mtok), bytes (10GB, with --model or --bytes-per-token) or percentages of the
    trace's distinct blocks (5%). "opt" is the offline optimum: no policy can hit more. With --prompt-rules, requests
    are replayed as they came and as the rules leave them, at the same capacities; a report has the latter.
    """
    from mainstem.replay.plan.configs import read_shape
    from mainstem.replay.simulate.sweep import sweep

    _check_outputs(path, csv=csv, report=report)
    shape = None if caches.model is None else read_shape(caches.model)
    token_bytes, policies = caches.token_bytes(shape), caches.policies()
    traces = _traces(path, reading)
    for note in dict.fromkeys(note for trace in traces for note in trace.notes):
        print(printable(note), file=sys.stderr)
    capacities, setup = caches.caches(traces[0], token_bytes)
    by_trace = []
    for trace in traces:
        with bar("replaying") as progress:
            rows = sweep(
                trace,
                policies,
                capacities,
                setup=setup,
                flops=None if shape is None else shape.prefill_flops,
                bytes_per_token=token_bytes,
                workers=caches.workers,
                progress=progress,
            )
        by_trace.append(rows)
    if json:
        print(dumps([asdict(row) for rows in by_trace for row in rows]), flush=True)
    else:
        for trace, rows in zip(traces, by_trace, strict=True):
            _show(trace, rows)
    if csv is not None:
        _write_csv(csv, [row for rows in by_trace for row in rows])
    if report is not None:
        from mainstem.replay.info import info
        from mainstem.replay.report.html import write_report

        write_report(report, info(traces[-1]), by_trace[-1])


def _traces(path: str, reading: TraceOptions) -> list[Trace]:
    """Returns the trace; with rules of prompts first without them, so that both are replayed."""
    if not reading.prompt_rules:
        return [read_trace(path, reading)]
    if path == "-":
        raise BadArgument("prompt_rules", ", ".join(reading.prompt_rules), "given with a file, which is read twice")
    return [read_trace(path, each) for each in (replace(reading, prompt_rules=()), reading)]


def _check_outputs(trace: str, **outputs: Path | None) -> None:
    others: list[str | Path] = [] if trace == "-" else [trace]
    for name, path in outputs.items():
        if path is not None:
            check_output(name, path, *others)
            others.append(path)


_FLAT = ("tiers", "tenants", "kinds", "timeline", "replica_requests")  # fields that are not a column by themselves


def flat(row: Row) -> dict[str, object]:
    """Returns a row's numbers as columns, without histograms. Columns of tiers are prefixed with the tier's name."""
    columns: dict[str, object] = {
        field.name: getattr(row, field.name) for field in fields(row) if field.name not in _FLAT
    }
    for tier in row.tiers:
        numbers: Mapping[str, object] = asdict(tier)
        columns |= {
            f"{tier.name}_{name}": value
            for name, value in numbers.items()
            if name != "name" and not isinstance(value, tuple)
        }
    return columns


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    columns = [flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in columns for name in row))
    with open(path, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv_format.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(columns)


# --- tables -------------------------------------------------------------------------------------------------------


def _show(trace: Trace, rows: Sequence[Row]) -> None:
    console = results()
    blocks = (
        f"{counted(len(trace.whole.blocks), 'block')} of {trace.block_size} tokens, {trace.distinct_blocks:,} distinct"
    )
    console.print(f"{printable(trace.name)}: {counted(len(trace), 'request')}, {blocks}", markup=False, soft_wrap=True)
    if rows[0].replicas > 1:
        console.print(f"{counted(rows[0].replicas, 'replica')} of each capacity, routing by {rows[0].routing}")
    best = {row.capacity_blocks: row.block_hits for row in rows if row.policy == "opt"}
    console.print(_table([dict(_cells(trace, row, best.get(row.capacity_blocks))) for row in rows]))
    if any(len(row.tiers) > 1 for row in rows):
        console.print(_table([dict(_tier_cells(row, tier)) for row in rows for tier in row.tiers]))
    for title, name in (("tenant", "tenants"), ("type", "kinds")):
        _show_groups(console, title, [(row, getattr(row, name)) for row in rows])


_MAX_LINES = 40  # of a table of tenants or types
_MAX_GROUPS = 10  # of one row


def _show_groups(console: Console, title: str, shares: Sequence[tuple[Row, Sequence[Share]]]) -> None:
    """Prints the tenants or types with the most blocks, if the trace has any."""
    chosen = [
        dict(_share_cells(title, row, share))
        for row, groups in shares
        for share in sorted(groups, key=lambda share: -share.block_accesses)[:_MAX_GROUPS]
    ]
    if all(len(groups) < 2 for _, groups in shares):
        return
    console.print(_table(chosen[:_MAX_LINES]))
    if left := sum(len(groups) for _, groups in shares) - min(len(chosen), _MAX_LINES):
        console.print(f"and {left:,} more lines; --json has all")


def _share_cells(title: str, row: Row, share: Share) -> Iterator[tuple[str, str]]:
    yield "policy", row.policy
    yield "blocks", f"{row.capacity_blocks:,}"
    yield title, printable(share.name) or "(none)"
    yield "requests", f"{share.requests:,}"
    yield "block accesses", f"{share.block_accesses:,}"
    yield "block hits", f"{share.block_hits / max(1, share.block_accesses):.2%}"
    yield "token hits", f"{share.token_hits / max(1, share.input_tokens):.2%}"


def _table(lines: Sequence[Mapping[str, str]]) -> Table:
    """Builds a table from lines of named cells, with a rule where the policy changes."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    names = list(dict.fromkeys(name for line in lines for name in line))
    for name in names:
        words = name in _WORDS
        longest = max(len(line.get(name, "")) for line in lines)
        table.add_column(
            name, justify="left" if words else "right", overflow="fold", min_width=min(longest, _MAX_LETTERS)
        )
    before = ""
    for line in lines:
        if before not in ("", line["policy"]):
            table.add_section()
        before = line["policy"]
        table.add_row(*(Text(line.get(name, "")) for name in names))
    return table


_WORDS = ("policy", "tier", "tenant", "type")
_MAX_LETTERS = 20  # of a cell that is never wrapped


def _cells(trace: Trace, row: Row, best: int | None) -> Iterator[tuple[str, str]]:
    yield "policy", row.policy
    yield "blocks", f"{row.capacity_blocks:,}"
    yield "of all", f"{row.capacity_blocks / max(1, trace.distinct_blocks):.1%}"
    yield "block hits", f"{row.block_hit_rate:.2%}"
    yield "token hits", f"{row.token_hit_rate:.2%}"
    if best is not None:
        yield "of opt", f"{row.block_hits / best:.1%}" if best else ""
    if row.prefill_flops is not None and row.saved_flops is not None:
        yield "FLOPs saved", f"{row.saved_flops / max(1.0, row.prefill_flops):.2%}"
    yield "ttft p50/p90/p99", _first_token(row)
    yield "evicted", f"{row.evicted_blocks:,}"
    if row.ttl_s is not None:
        yield "expired", f"{row.tiers[0].expired_blocks:,}"
    if row.evicted_blocks and row.policy != "opt":
        yield "median idle", _median(row.tiers[0].idle_s)


def _first_token(row: Row) -> str:
    """Returns the quantiles of the time to the first token, two digits of each."""
    quantiles = row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s
    return "/".join(f"{seconds:.2g}" if seconds < 99.5 else f"{seconds:,.0f}" for seconds in quantiles) + " s"


def _tier_cells(row: Row, tier: TierRow) -> Iterator[tuple[str, str]]:
    yield "policy", row.policy
    yield "tier", tier.name
    yield "blocks", f"{tier.capacity_blocks:,}"
    yield "block hits", f"{tier.block_hits / max(1, row.block_accesses):.2%}"
    yield "written", _moved(tier.written_blocks, tier.written_bytes)
    yield "loaded", _moved(tier.loaded_blocks, tier.loaded_bytes)
    yield "evicted", f"{tier.evicted_blocks:,}"
    yield "median idle", _median(tier.idle_s)


def _moved(blocks: int, size: int | None) -> str:
    from mainstem.units import show_bytes

    return f"{blocks:,}" if size is None else show_bytes(size).replace(" ", "")


def _median(histogram: Sequence[int]) -> str:
    """Returns a bound on the median idle time of evicted blocks."""
    from mainstem.replay.simulate.rows import median_below

    bound = median_below(histogram)
    return "" if bound is None else f"<{bound:,}s"

"""`mainstem replay`, as `mainstem.cli` mounts it: its options, and what it prints, nothing else."""

from __future__ import annotations

import csv as csv_format
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import cyclopts
from cyclopts import Parameter

from mainstem.errors import BadArgument
from mainstem.replay.commands import Json, TraceOptions, bar, read_trace

if TYPE_CHECKING:
    from rich.table import Table

    from mainstem.replay.costs import ModelShape
    from mainstem.replay.simulate import Row, Setup, TierRow
    from mainstem.replay.trace import Trace

_EXAMPLES = """\
Examples:

  mainstem replay conversation_trace.jsonl.xz
  mainstem replay trace.mstrace --capacity 1%,2%,5%,10% --policy lru,slru,opt --csv rows.csv
  mainstem replay trace.mstrace --policy lru,slru,lfu,opt --report out.html --plot out.png
  mainstem replay trace.mstrace --capacity 40GB --tiers host=1TB,storage=8TB --model llama-3.1-8b
  mainstem replay trace.mstrace --capacity 2Mtok --ttl 5m --replicas 4 --routing prefix --json

Capacities are blocks (1000), tokens (2Mtok), bytes (10GB, with --model or --bytes-per-token) or percents of the trace's
distinct blocks (5%). "opt" is the offline optimum: no policy can hit more."""

_CAPACITIES = "1%,5%,10%,25%,50%"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """What is replayed.

    Args:
        capacity: Of the cache; several with commas. Default: 1%,5%,10%,25%,50%.
        policy: What is evicted first; several with commas: lru, slru and so on, and opt, the offline optimum. Default:
            lru,opt, or lru alone with tiers, replicas or a time to live.
        tiers: Lower tiers, which have all that is above: host=20%,storage=8TB; device=5% stands for --capacity.
        ttl: Blocks that were not used for longer are gone: 300s, 5m.
        replicas: Independent caches of this capacity; 1 or more.
        routing: Which replica gets a request: each in turn; who has the longest prefix of it and is not busy; by its
            first block.
        model: What a token takes and costs: a folder with a config.json, such a file, or a name such as llama-3.1-8b.
        kv_dtype: Of the model's KV: bf16, fp8, fp16, int8, fp32 and so on.
        bytes_per_token: Memory of a cached token, if no model says it.
        workers: Threads. Default: one for each CPU core.
    """

    capacity: str | None = None
    policy: str | None = None
    tiers: str | None = None
    ttl: str | None = None
    replicas: int = 1
    routing: Literal["round-robin", "prefix", "hash"] = "prefix"
    model: str | None = None
    kv_dtype: str = "bf16"
    bytes_per_token: float | None = None
    workers: int | None = None

    def token_bytes(self, shape: ModelShape | None) -> float | None:
        """Bytes that a cached token takes; None: nobody said it.

        Raises:
            BadArgument: a number that is not above 0, or no such dtype.
        """
        from mainstem.replay.costs import dtype_bytes

        if self.bytes_per_token is not None and not 0 < self.bytes_per_token < float("inf"):
            raise BadArgument("bytes_per_token", self.bytes_per_token, "above 0")
        if self.bytes_per_token is not None or shape is None:
            return self.bytes_per_token
        dtype_bytes("kv_dtype", self.kv_dtype)
        return float(shape.kv_bytes_per_token(self.kv_dtype)) or None

    def caches(self, trace: Trace, bytes_per_token: float | None) -> tuple[list[int], Setup]:
        """Capacities of the device in blocks, and what there is beside it.

        Raises:
            BadArgument: a value outside its range, or two that say the same.
        """
        from mainstem.replay.simulate import Setup, parse_capacities, parse_tiers
        from mainstem.replay.units import parse_duration

        tiers = {} if self.tiers is None else parse_tiers(self.tiers, trace, bytes_per_token)
        if "device" in tiers and self.capacity is not None:
            raise BadArgument("capacity", self.capacity, "left out where --tiers gives the device's")
        capacities = (
            [tiers["device"]]
            if "device" in tiers
            else parse_capacities(self.capacity or _CAPACITIES, trace, bytes_per_token)
        )
        ttl_s = None if self.ttl is None else parse_duration("ttl", self.ttl)
        setup = Setup(tiers.get("host"), tiers.get("storage"), ttl_s, self.replicas, self.routing)
        return capacities, setup

    def policies(self) -> list[str]:
        """Names of policies."""
        if self.policy is not None:
            return [name.strip() for name in self.policy.split(",")]
        return ["lru", "opt"] if self.tiers is None and self.ttl is None and self.replicas == 1 else ["lru"]


_TRACE, _CACHES = TraceOptions(), CacheOptions()
replay = cyclopts.App(name="replay", help_epilogue=_EXAMPLES, help_format="plaintext")


@replay.default
def replay_trace(
    path: str,
    *,
    caches: CacheOptions = _CACHES,
    reading: TraceOptions = _TRACE,
    json: Json = False,
    csv: Annotated[Path | None, Parameter(negative="")] = None,
    report: Annotated[Path | None, Parameter(negative="")] = None,
    plot: Annotated[Path | None, Parameter(negative="")] = None,
) -> None:
    """What a cache of each size and policy would have done with a trace of requests.

    Args:
        path: The trace; - is standard input.
        json: Print a list of rows, one a policy and capacity.
        csv: Write the same rows to this file, without histograms.
        report: Write a page with pictures and numbers to this file, .html; it needs no network.
        plot: Draw the pictures into this file, .png, .svg or .pdf; needs mainstem[plot].
    """
    from mainstem.replay.configs import read_shape
    from mainstem.replay.plot import check_plot
    from mainstem.replay.simulate import sweep

    if plot is not None:
        check_plot(plot)
    shape = None if caches.model is None else read_shape(caches.model)
    token_bytes = caches.token_bytes(shape)
    trace = read_trace(path, reading)
    for note in trace.notes:
        print(note, file=sys.stderr)
    capacities, setup = caches.caches(trace, token_bytes)
    with bar("replaying") as progress:
        rows = sweep(
            trace,
            caches.policies(),
            capacities,
            setup=setup,
            flops=None if shape is None else shape.prefill_flops,
            bytes_per_token=token_bytes,
            workers=caches.workers,
            progress=progress,
        )
    if csv is not None:
        _write_csv(csv, rows)
    if report is not None or plot is not None:
        _draw(trace, rows, report, plot)
    if json:
        print(dumps([asdict(row) for row in rows], ensure_ascii=False))
    else:
        _show(trace, rows)


_FLAT = ("tiers", "tenants", "kinds", "timeline", "replica_requests")  # what is no column by itself


def flat(row: Row) -> dict[str, object]:
    """A row's numbers as columns: those of tiers with the tier's name in front, histograms left out."""
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


def _draw(trace: Trace, rows: Sequence[Row], report: Path | None, plot: Path | None) -> None:
    from mainstem.replay.info import info
    from mainstem.replay.plot import write_plot
    from mainstem.replay.report import write_report

    found = info(trace)
    if report is not None:
        write_report(report, found, rows)
    if plot is not None:
        write_plot(plot, found, rows)


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    columns = [flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in columns for name in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv_format.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(columns)


# --- tables -------------------------------------------------------------------------------------------------------


def _show(trace: Trace, rows: Sequence[Row]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    blocks = f"{len(trace.whole.blocks):,} blocks of {trace.block_size} tokens, {trace.distinct_blocks:,} distinct"
    console.print(f"{trace.name}: {len(trace):,} requests, {blocks}", markup=False, soft_wrap=True)
    best = {row.capacity_blocks: row.block_hits for row in rows if row.policy == "opt"}
    console.print(_table([dict(_cells(trace, row, best.get(row.capacity_blocks))) for row in rows]))
    if any(len(row.tiers) > 1 for row in rows):
        console.print(_table([dict(line) for row in rows for line in _tiers(row)]))


def _table(lines: Sequence[Mapping[str, str]]) -> Table:
    """Lines of named cells; a rule where the first cell changes."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    names = list(dict.fromkeys(name for line in lines for name in line))
    for name in names:
        table.add_column(name, justify="left" if name in ("policy", "tier") else "right")
    before = ""
    for line in lines:
        if before not in ("", line["policy"]):
            table.add_section()
        before = line["policy"]
        table.add_row(*(line.get(name, "") for name in names))
    return table


def _cells(trace: Trace, row: Row, best: int | None) -> Iterator[tuple[str, str]]:
    yield "policy", row.policy
    yield "blocks", f"{row.capacity_blocks:,}"
    yield "of all", f"{row.capacity_blocks / max(1, trace.distinct_blocks):.1%}"
    yield "block hits", f"{row.block_hit_rate:.2%}"
    yield "token hits", f"{row.token_hit_rate:.2%}"
    if best is not None:
        yield "of opt", f"{row.block_hits / max(1, best):.1%}"
    if row.prefill_flops is not None and row.saved_flops is not None:
        yield "FLOPs saved", f"{row.saved_flops / max(1.0, row.prefill_flops):.2%}"
    yield "evicted", f"{row.evicted_blocks:,}"
    if row.ttl_s is not None:
        yield "expired", f"{row.tiers[0].expired_blocks:,}"
    if row.evicted_blocks and row.policy != "opt":
        yield "median idle", _median(row.tiers[0].idle_s)


def _tiers(row: Row) -> Iterator[Iterator[tuple[str, str]]]:
    return (_tier_cells(row, tier) for tier in row.tiers)


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
    from mainstem.replay.units import show_bytes

    return f"{blocks:,}" if size is None else show_bytes(size).replace(" ", "")


def _median(histogram: Sequence[int]) -> str:
    """A time, a power of two, below which half of the blocks were idle when they were evicted."""
    half, seen = sum(histogram) / 2, 0
    for power, count in enumerate(histogram):
        seen += count
        if seen >= half:
            return f"<{2**power:,}s"
    return ""

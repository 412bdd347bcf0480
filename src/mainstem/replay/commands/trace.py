"""The `mainstem trace` commands, which `mainstem.cli` mounts. Arguments and printing, nothing else.

Results go to standard output, progress to standard error. The commands import heavy modules themselves.

Examples:

  mainstem trace info conversation_trace.jsonl.xz
  mainstem trace convert conversation_trace.jsonl.xz conversation.mstrace
  mainstem trace generate chat=3,agents=1 --requests 50000 -o mix.mstrace
  mainstem trace grow conversation.mstrace --times 20 -o many.mstrace

A trace is a .mstrace file or lines of JSON: the Mooncake or Qwen-Bailian
format, token ids, bodies of OpenAI requests, or a recording made by
`mainstem serve --record`. It may be compressed with xz, gzip or zstd.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from mainstem.errors import BadArgument
from mainstem.here import check_output
from mainstem.settings.flags import Switch, command, group
from mainstem.settings.replay import Growth, TraceOptions
from mainstem.terminal import bar, printable, results
from mainstem.units import counted

if TYPE_CHECKING:
    from rich.table import Table

    from mainstem.replay.info import Group, TraceInfo
    from mainstem.replay.trace import Trace

TracePath = Annotated[str, Parameter(help="The trace; - is standard input.", allow_leading_hyphen=True)]


def read_trace(path: str, options: TraceOptions) -> Trace:
    """Opens a trace with a progress bar. Raises what `open_trace` raises."""
    from mainstem.replay.readers.open import open_trace

    with bar(f"reading {os.path.basename(path)}") as progress:
        return open_trace(path, options, progress=progress)


trace = group("trace", __doc__, help="Inspect, convert, generate and grow traces of requests.")


@command(trace, "info")
def trace_info(path: TracePath, *, options: TraceOptions = TraceOptions(), json: Switch = False) -> None:
    """Summarize a trace: requests, blocks, the best possible hit rate, and how soon blocks are reused.

    Args:
        json: Print one JSON object.

    Examples:

      mainstem trace info conversation_trace.jsonl.xz
      mainstem trace info requests.jsonl --format openai --tokenizer ./my-model
      zcat log.gz | mainstem trace info - --on-bad skip --json
    """
    from mainstem.replay.info import info

    found = info(read_trace(path, options))
    if json:
        print(dumps(asdict(found)))
    else:
        _show(found)


@command(trace, "convert")
def trace_convert(
    path: TracePath, target: Path, *, options: TraceOptions = TraceOptions(), json: Switch = False
) -> None:
    """Convert a trace to the compact format, which opens instantly.

    Args:
        target: The file to write, .mstrace.
        json: Print one JSON object.

    Examples:

      mainstem trace convert conversation_trace.jsonl.xz conversation.mstrace
      mainstem trace convert requests.jsonl.zst requests.mstrace --on-bad skip
    """
    _check_trace("target", target)
    read = read_trace(path, options)
    read.save(target)
    size = target.stat().st_size
    facts = {"trace": read.name, "requests": len(read), "blocks": len(read.whole.blocks), "bytes": size}
    _written(read, target, json, facts, f"{size:,} bytes")


@command(trace, "generate")
def trace_generate(
    kind: str,
    *,
    requests: int,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    seed: int = 0,
    block_size: int = 64,
    set: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    json: Switch = False,
) -> None:
    """Generate a trace of a synthetic workload; the same options give the same trace.

    Args:
        kind: chat, agents, documents, prompts, best-of-n or tenants; or several, weighted by their share of the
            sessions: chat=3,agents=1.
        requests: Number of requests; 1 or more.
        output: The file to write, .mstrace.
        seed: Seed of the random numbers; 0 or more.
        block_size: Tokens per block; 1 or more.
        set: A parameter as NAME=VALUE, or KIND.NAME=VALUE in a mix; may be given several times. `mainstem trace kinds`
            lists them.
        json: Print one JSON object.

    Examples:

      mainstem trace generate documents --requests 10000 -o documents.mstrace
      mainstem trace generate chat=3,agents=1 --requests 50000 --seed 1 --set agents.steps=40 -o mix.mstrace
    """
    from mainstem.replay.generate import generate, parse_workload

    _check_trace("output", output)
    made = generate(parse_workload(kind, dict(map(_setting, set))), requests, seed=seed, block_size=block_size)
    _save(made, output, json)


def _save(made: Trace, output: Path, json: bool) -> None:
    made.save(output)
    facts = {
        "trace": made.name,
        "requests": len(made),
        "span_s": round(float(made.whole.time_s[-1]), 3),
        "blocks": len(made.whole.blocks),
        "distinct_blocks": made.distinct_blocks,
    }
    _written(made, output, json, facts, f"{made.distinct_blocks:,} distinct")


def _check_trace(name: str, path: Path, *others: str | Path) -> None:
    """Checks that a trace can be written, before it is made; see `check_output`."""
    from mainstem.replay.trace import SUFFIX

    if path.suffix != SUFFIX:
        raise BadArgument(name, str(path), f"a file that ends in {SUFFIX}")
    check_output(name, path, *others)


def _written(made: Trace, path: Path, json: bool, facts: Mapping[str, object], more: str) -> None:
    """Prints what was written: the facts as JSON, or a line that ends with one more, and the notes."""
    if json:
        print(dumps({**facts, "notes": made.notes}))
        return
    blocks = counted(len(made.whole.blocks), "block")
    print(f"{path}: {counted(len(made), 'request')}, {blocks}, {more}")
    print("".join(f"{printable(note)}\n" for note in made.notes), end="")


@command(trace, "grow")
def trace_grow(
    path: TracePath,
    *,
    times: int,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    growth: Growth = Growth(),
    options: TraceOptions = TraceOptions(),
    json: Switch = False,
) -> None:
    """Grow a trace: the same time with many times as many users, by a model of them (docs/replay.md).

    Args:
        times: Populations of the recorded users; the result has as many times the requests and block accesses.
        output: The file to write, .mstrace.
        json: Print one JSON object.

    Examples:

      mainstem trace grow conversation_trace.jsonl.xz --times 350 -o fleet.mstrace
      mainstem trace grow day.mstrace --times 20 --seed 1 --shift 5m --new-prompts 0.5 -o many.mstrace
    """
    from mainstem.replay.grow import grow

    _check_trace("output", output, *([] if path == "-" else [path]))
    _save(grow(read_trace(path, options), times, growth), output, json)


@command(trace, "kinds")
def trace_kinds(*, json: Switch = False) -> None:
    """List the synthetic workloads, with their parameters and defaults.

    Args:
        json: Print one JSON object.

    Examples:

      mainstem trace kinds
      mainstem trace kinds --json
    """
    from mainstem.replay.generate import WORKLOADS

    known = {name: {each.name: each.default for each in fields(kind)} for name, kind in WORKLOADS.items()}
    if json:
        print(dumps({name: {key: str(value) for key, value in kind.items()} for name, kind in known.items()}))
        return
    for name, parameters in known.items():
        print(f"{name}: {(WORKLOADS[name].__doc__ or '').splitlines()[0]}")
        print("".join(f"  {key:16} {value}\n" for key, value in parameters.items()))


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise BadArgument("set", text, "NAME=VALUE")
    return name, value


def _show(found: TraceInfo) -> None:
    console = results()
    for table in _tables(found):
        console.print(table)
    for note in found.notes:
        console.print(printable(note), markup=False, soft_wrap=True)


def _tables(found: TraceInfo) -> Iterator[Table]:
    yield _table("", ["", ""], _totals(found))
    exact = "" if found.sampled == 1 else f" (sampled: 1 block in {round(1 / found.sampled)})"
    if found.reuses:
        rows = [
            (f"{row.high:,}", f"{row.uses:,}", f"{row.lru_hit_rate:.2%}", _strip(row.lru_hit_rate))
            for row in found.reuses
            if row.lru_hit_rate
        ]
        yield _table(f"Reuse distances{exact}", ["LRU with room for blocks", "additional hits", "in total", ""], rows)
        largest = max(row.uses for row in found.waits) or 1
        waits = [(f"{row.high_s:,.0f} s", f"{row.uses:,}", _strip(row.uses / largest)) for row in found.waits]
        yield _table(f"Time until a block is reused{exact}", ["below", "uses", ""], waits)
    depths = [
        (f"{row.low:,}", f"{row.uses:,}", f"{row.distinct_blocks:,}", f"{row.sharing:,.2f}") for row in found.depths
    ]
    yield _table("Sharing by depth", ["blocks above, at least", "uses", "distinct", "requests a block"], depths)
    for name, groups in (("Tenant", found.tenants), ("Kind", found.kinds), ("Turn", found.turns)):
        if groups:
            yield _table("", [name, "requests", "input tokens", "output tokens", "blocks", "hits"], _groups(groups))


def _totals(found: TraceInfo) -> list[tuple[str, str]]:
    prompt, answer = (
        f"mean {each.mean:,.0f}, median {each.p50:,.0f}, p90 {each.p90:,.0f}, max {each.max:,.0f}"
        for each in (found.prompt_tokens, found.answer_tokens)
    )
    rows = [
        ("trace", found.trace),
        ("requests", f"{found.requests:,} in {found.span_s:,.0f} s"),
        ("input tokens", f"{found.input_tokens:,}"),
        ("per request", prompt),
        ("output tokens", f"{found.output_tokens:,}"),
        ("per request", answer),
        ("blocks", f"{found.blocks:,} of {found.block_size} tokens"),
        ("distinct blocks", f"{found.distinct_blocks:,}"),
        ("ideal hit rate", f"{found.block_hit_rate:.2%} of blocks, {found.token_hit_rate:.2%} of tokens"),
    ]
    if found.chat_requests is not None:
        chats = found.chat_requests
        rows.append(("conversations", f"{found.chats:,}, requests each: mean {chats.mean:,.2f}, max {chats.max:,.0f}"))
    return rows


_GROUPS_SHOWN = 10
_STRIP = 30


def _groups(groups: Sequence[Group]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            group.name or "(none)",
            f"{group.requests:,}",
            f"{group.input_tokens:,}",
            f"{group.output_tokens:,}",
            f"{group.blocks:,}",
            f"{group.block_hit_rate:.2%}",
        )
        for group in groups[:_GROUPS_SHOWN]
    ]
    left = len(groups) - len(rows)
    return [*rows, (f"and {left:,} more; --json has all", *[""] * 5)] if left > 0 else rows


def _strip(part: float) -> str:
    return "█" * round(part * _STRIP)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Builds a table: words or bin edges first, then numbers, and bars last if any."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, show_header=any(headings))
    for at, heading in enumerate(headings):
        words = at == 0 and heading not in _NUMBERED
        table.add_column(heading, justify="left" if words or not heading else "right", no_wrap=bool(heading) and at > 0)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


_NUMBERED = ("LRU with room for blocks", "below", "blocks above, at least", "Turn")

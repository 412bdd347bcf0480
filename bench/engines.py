"""What stores cost and save inside vLLM on the CPU, Mainstem beside vLLM's example connector over a folder, in one run.

    python -m bench.engines            needs .venv-vllm: `make bench-engines` makes it

Each system gets the same prompts in engines of its own: computed and saved, then, in a new engine, loaded; then once
more after a byte of every stored page was altered. Scheduler and worker share a process, which both systems allow, and
Mainstem has no owner, so that both read files. Times to the first token are medians over prompts; CPU time is that of
the process with all its threads. Other load on the machine makes the times useless.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rigs.vllm_process import VLLM, EngineEnded

from bench.report import Report
from mainstem.runtime.models import load_model
from mainstem.units import show_bytes, show_seconds

TOKENS = 800
BLOCK = 128  # vLLM's own on a CPU
OPTIONS = {"dtype": "bfloat16", "max_model_len": 2048, "block_size": BLOCK, "kv_cache_memory_bytes": 512 << 20}


@dataclass(frozen=True)
class System:
    """A connector, or none.

    Args:
        name: in the table.
        connector: vLLM's `kv_transfer_config`; FOLDER stands for the folder of its files. None: no connector.
    """

    name: str
    connector: dict[str, Any] | None

    def config(self, folder: Path) -> dict[str, Any] | None:
        """Returns the configuration over a folder."""
        if self.connector is None:
            return None
        own = {name: value.replace("FOLDER", str(folder)) for name, value in self.connector["extra"].items()}
        return {
            **{name: value for name, value in self.connector.items() if name != "extra"},
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": own,
        }


SYSTEMS = (
    System("vLLM alone", None),
    System(
        "Mainstem",
        {
            "kv_connector": "MainstemConnector",
            "kv_connector_module_path": "mainstem.integrations.vllm",
            "extra": {"storage": "file:FOLDER?capacity=8GiB", "host_bytes": "0"},
        },
    ),
    System("vLLM's ExampleConnector", {"kv_connector": "ExampleConnector", "extra": {"shared_storage_path": "FOLDER"}}),
)


@dataclass
class Row:
    """One system. Seconds to the first token, CPU seconds for it, bytes in storage, and what an altered page led to."""

    system: str
    prompts: int
    cold_s: float = 0.0
    cold_cpu_s: float = 0.0
    saved_bytes: int = 0
    warm_s: float = 0.0
    warm_cpu_s: float = 0.0
    altered: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, prints the table and writes engines.json. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one prompt")
    parser.add_argument("--record", action="store_true", help="write recorded-engines.json")
    options = parser.parse_args(arguments)
    log = Console(stderr=True)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    report = Report("engines", date, options.quick, progress=lambda line: log.print(line, style="dim"))
    loaded = load_model()
    model = Path(loaded.model.config.name_or_path)
    base = loaded.tokenizer.encode("The lighthouse of Port Arden stands 41 metres tall and was lit in 1889. " * 80)
    prompts = [[at + 40, *base[: TOKENS - 1]] for at in range(1 if options.quick else 3)]
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(system, model, prompts, Path(folder, str(at)), report) for at, system in enumerate(SYSTEMS)]
    report.settings = {"model": loaded.name, "prompt_tokens": TOKENS, "prompts": len(prompts), **OPTIONS}
    report.rows = [asdict(row) for row in rows]
    report.tables = [table(rows)]
    console = Console()
    report.show(console)
    console.print(f"written to {report.write(Path(__file__).parent / 'results', options.record)}", soft_wrap=True)
    return 1 if report.failures else 0


def measure(system: System, model: Path, prompts: list[list[int]], folder: Path, report: Report) -> Row:
    """Measures one system with two engines."""
    row, files = Row(system.name, len(prompts)), folder / "files"
    files.mkdir(parents=True)
    report.progress(f"{system.name}: computed and saved")
    with start(system, model, files, folder / "first.log") as engine:
        engine.generate([prompts[0][:100]], tokens=1)  # what a first request costs besides
        cold = engine.generate(prompts, tokens=1, settled=system.name == "Mainstem")
        expected = [answer["tokens"] for answer in engine.generate(prompts, tokens=8)]
        engine.end()
    row.cold_s, row.cold_cpu_s = typical(cold)
    row.saved_bytes = sum(file.stat().st_blocks * 512 for file in files.rglob("*") if file.is_file())
    if system.connector is None:
        return row
    report.progress(f"{system.name}: loaded after a restart")
    with start(system, model, files, folder / "second.log") as engine:
        engine.generate([prompts[0][:100]], tokens=1)
        row.warm_s, row.warm_cpu_s = typical(engine.generate(prompts, tokens=1))
        engine.end()
    alter(files)
    report.progress(f"{system.name}: altered")
    try:
        with start(system, model, files, folder / "third.log") as engine:
            answers = engine.generate(prompts, tokens=8)
            engine.end()
        same = [answer["tokens"] for answer in answers] == expected
        row.altered = "computed again, equal texts" if same else "other texts"
    except EngineEnded:
        row.altered = "the engine ended"
    return row


def start(system: System, model: Path, files: Path, log: Path) -> VLLM:
    """Starts an engine with a system."""
    return VLLM(model, None, log, connector=system.config(files), **OPTIONS)


def typical(answers: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Returns the median seconds and CPU seconds."""
    return median(each["seconds"] for each in answers), median(each["cpu"] for each in answers)


def alter(files: Path) -> None:
    """Changes a byte in each 64 KiB of every large file: some in every page."""
    for file in files.rglob("*"):
        if file.is_file() and file.stat().st_size > 1 << 20:
            with file.open("r+b") as opened:
                for at in range(1 << 15, file.stat().st_size, 1 << 16):
                    opened.seek(at)
                    byte = opened.read(1)
                    if byte and byte != b"\0":
                        opened.seek(at)
                        opened.write(bytes([byte[0] ^ 0x40]))


def table(rows: Sequence[Row]) -> Table:
    """Returns the table for the terminal."""
    shown = Table(title=f"Time to the first token behind {TOKENS} tokens in vLLM, saved and loaded")
    for name in (
        "",
        "computed",
        "CPU",
        "stored",
        "saved, bytes/s",
        "after a restart",
        "CPU",
        "loaded, bytes/s",
        "altered",
    ):
        shown.add_column(name, justify="left" if name in ("", "altered") else "right")
    for row in rows:
        stored = row.saved_bytes
        shown.add_row(
            row.system,
            show_seconds(row.cold_s),
            show_seconds(row.cold_cpu_s),
            show_bytes(stored) if stored else "",
            f"{show_bytes(stored / row.prompts / row.cold_s)}/s" if stored else "",
            show_seconds(row.warm_s) if row.warm_s else "",
            show_seconds(row.warm_cpu_s) if row.warm_s else "",
            f"{show_bytes(stored / row.prompts / row.warm_s)}/s" if row.warm_s else "",
            row.altered,
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())

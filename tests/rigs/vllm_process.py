"""vLLM's engine as a process that a test drives, and what runs inside it.

The test writes a command as a line of JSON and reads its answer. The process runs in the environment of vLLM, so what
is below `if __name__` is the only place that imports it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from machine import patience

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT / "tests"),  # Mainstem is installed there
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""The environment variables of processes with vLLM."""

Answer = dict[str, Any]


class VLLM:
    """An engine in a process of its own.

    Args:
        model: a folder.
        storage: the spec of a store; None: no connector.
        log: a file that gets what the process prints.
        apart: scheduler and worker are processes of their own.
        transcript: a file for a transcript of the connector's calls.
        extra: further options of the connector.
        connector: vLLM's `kv_transfer_config`, in place of `storage` and `extra`.
        variables: further environment variables.
        options: options of vLLM's `LLM`.
    """

    def __init__(
        self,
        model: Path,
        storage: str | None,
        log: Path,
        *,
        apart: bool = False,
        transcript: Path | None = None,
        extra: dict[str, Any] | None = None,
        connector: dict[str, Any] | None = None,
        variables: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        if storage is not None:
            connector = {
                "kv_connector": "MainstemConnector",
                "kv_connector_module_path": "mainstem.integrations.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"storage": storage, "timeout": "60s", **(extra or {})},
            }
        if connector is not None and transcript is not None:
            connector |= {"kv_connector": "RecordedConnector", "kv_connector_module_path": "rigs.vllm_recorder"}
        if connector is not None:
            options["kv_transfer_config"] = connector
        environment = {
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(apart)),
            "MAINSTEM_TRANSCRIPT": str(transcript),
            **(variables or {}),
        }
        command = [str(PYTHON), __file__, str(model), json.dumps(options)]
        self.log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=environment,
                start_new_session=True,
            )
        self._read()

    def ask(self, command: str, **arguments: Any) -> Any:
        """Returns the answer to a command: a method of `_Engine`."""
        self.tell(command, **arguments)
        return self._read()

    def tell(self, command: str, **arguments: Any) -> None:
        """Sends a command; `hear` returns its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Waits for the next line of the process."""
        return self._read()

    def generate(self, prompts: Sequence[list[int] | str], tokens: int = 4, **arguments: Any) -> list[Answer]:
        """Answers prompts one by one: the generated `tokens`, how many were `cached`, and what it took."""
        asked = list(prompts)
        answers: list[Answer] = self.ask("generate", prompts=asked, tokens=tokens, **arguments)
        return answers

    def end(self) -> Answer:
        """Ends the engine, with all its writes; returns what its connector counted."""
        counts: Answer = self.ask("counts")
        self.tell("end")
        assert self._process.wait(patience(120)) == 0, self._tail()
        return counts

    def kill(self) -> None:
        """Kills the process, and those that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> VLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise EngineEnded(self._tail())
        return json.loads(line)

    def _tail(self) -> str:
        return self.log.read_text()[-6000:]


class EngineEnded(Exception):
    """The process has ended; the message is the end of what it printed."""


class _Engine:
    """What runs inside. Each public method is a command."""

    def __init__(self, model: str, options: dict[str, Any], answers: Any) -> None:
        from vllm import LLM

        self._answers = answers
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "block_size": 32,
            "kv_cache_memory_bytes": 4 << 20,
            "disable_log_stats": True,
        }
        self._llm = LLM(model=model, **{**defaults, **options})
        self._engine = self._llm.llm_engine

    def say(self, value: Any) -> None:
        self._answers.write(json.dumps(value) + "\n")
        self._answers.flush()

    def generate(
        self,
        prompts: list[list[int] | str],
        tokens: int,
        salt: str | None = None,
        picture: int | None = None,
        together: bool = False,
        settled: bool = False,
        adapter: tuple[str, int, str] | None = None,
    ) -> list[Answer]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        more: dict[str, Any] = {"cache_salt": salt} if salt else {}
        if picture is not None:
            more["multi_modal_data"] = {"image": _picture(picture)}
        wrapped = [{"prompt" if isinstance(each, str) else "prompt_token_ids": each, **more} for each in prompts]
        batches = [wrapped] if together else [[each] for each in wrapped]
        answers = []
        for batch in batches:
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            lora = LoRARequest(*adapter) if adapter else None
            outputs = self._llm.generate(batch, parameters, use_tqdm=False, lora_request=lora)
            if settled:
                self.settle()
            took = {"seconds": time.perf_counter() - began_s, "cpu": time.process_time() - began_cpu_s}
            answers += [
                {"tokens": list(out.outputs[0].token_ids), "cached": out.num_cached_tokens, **took} for out in outputs
            ]
        return answers

    def mixed(self, prompts: list[list[int]], tokens: int, at_once: int, abort_every: int, seed: int) -> list[Any]:
        """Answers prompts, `at_once` at the same time; aborts some. Says how many have ended, every hundred."""
        from vllm import SamplingParams

        dice, waiting, running, answers = random.Random(seed), list(enumerate(prompts)), set(), {}
        ended = 0
        while waiting or running:
            while waiting and len(running) < at_once:
                at, prompt = waiting.pop(0)
                parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
                self._engine.add_request(str(at), {"prompt_token_ids": prompt}, parameters)
                running.add(str(at))
            if abort_every and dice.randrange(abort_every) == 0:
                victim = dice.choice(sorted(running))
                self._engine.abort_request([victim])
                running.discard(victim)
                ended += 1
            for out in self._engine.step():
                if out.finished and out.request_id in running:
                    running.discard(out.request_id)
                    answers[out.request_id] = [list(out.outputs[0].token_ids), out.num_cached_tokens]
                    ended += 1
                    if ended % 100 == 0:
                        self.say(ended)
        self.say("over")
        return [answers.get(str(at)) for at in range(len(prompts))]

    def reset(self, connector: bool) -> bool:
        """Empties vLLM's own prefix cache."""
        return bool(self._llm.reset_prefix_cache(reset_connector=connector))

    def settle(self) -> None:
        """Waits until the connector's writes have ended."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().drain(60.0)

    def counts(self) -> Answer:
        """Returns what the connectors of scheduler and worker counted, where they run in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        counts: Counter[str] = Counter()
        if has_kv_transfer_group():
            scheduler = self._engine.engine_core.engine_core.scheduler.connector
            for connector in (get_kv_transfer_group(), scheduler):
                counts.update(getattr(connector, "counts", {}))
        return counts

    def end(self) -> None:
        self._engine.engine_core.shutdown()


def _picture(seed: int) -> Any:
    """Returns a random image."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8))


def main() -> None:
    """Runs the process: answers are written to what was the standard output; vLLM prints to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = _Engine(sys.argv[1], json.loads(sys.argv[2]), answers)
    engine.say("ready")
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("command")
        value = getattr(engine, name)(**command)
        if name == "end":
            break
        engine.say(value)


if __name__ == "__main__":
    main()

"""Dynamo's selection service: `Service` drives it; this file, as a script, runs it in an environment of its own.

The script reads a line of JSON for each call, `[method, request]`, and writes one with the result or {"error": ...}.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def interpreter() -> Path:
    """Returns the interpreter of the environment with Dynamo, which need not be there."""
    default = Path(__file__).parents[2] / ".venv-routers" / "bin" / "python"
    return Path(os.environ.get("MAINSTEM_ROUTERS_PYTHON", default))


class ServiceFailed(Exception):
    """The service refused a call, or has ended."""


class Service:
    """The service in a process of its own, with Dynamo's defaults but for one thread for its index."""

    def __init__(self) -> None:
        own = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}  # its settings
        self._process = subprocess.Popen(
            [interpreter(), __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**own, "DYN_LOG": "error"},
        )  # fmt: skip

    def call(self, method: str, request: Any) -> Any:
        """Calls a method of the service with one argument.

        Raises:
            ServiceFailed: it refused that, or has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([method, request]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ServiceFailed(f"it has ended before {method}") from None
        line = self._process.stdout.readline()
        if not line:
            raise ServiceFailed(f"it has ended at {method}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise ServiceFailed(f"{method}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Ends the process; a second call does nothing."""
        self._process.kill()
        self._process.communicate()


async def main() -> None:
    """Answers until the input ends."""
    from dynamo.llm import SelectionService

    service = SelectionService(indexer_threads=1)
    while line := await asyncio.to_thread(sys.stdin.readline):
        method, request = json.loads(line)
        try:
            answer = await getattr(service, method)(request)
        except Exception as error:  # noqa: BLE001  # the caller says what it expected
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    service.shutdown()


if __name__ == "__main__":
    asyncio.run(main())

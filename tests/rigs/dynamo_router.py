"""Dynamo's selection service, for `test_events_routers.py`: runs in an environment of its own, without Mainstem.

Reads a line of JSON for each call, `[method, request]`, and writes one with the result or with {"error": ...}.
"""

import asyncio
import json
import sys

from dynamo.llm import SelectionService


async def main() -> None:
    """Answers until the input ends."""
    service = SelectionService(indexer_threads=1)
    while line := await asyncio.to_thread(sys.stdin.readline):
        method, request = json.loads(line)
        try:
            answer = await getattr(service, method)(request)
        except Exception as error:  # noqa: BLE001  # the test says what it expected
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    service.shutdown()


asyncio.run(main())

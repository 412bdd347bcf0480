"""A real server under many clients at once, some of whom leave: nobody is dropped, and nothing stays held."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import eventually, patience
from rigs.serving import Server, server_of, tiny_folder

CLIENTS, REQUESTS = 1000, 10_000
PREFIXES = [" ".join(f"w{2 + (n * 31 + at * at) % 198}" for at in range(40)) for n in range(20)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Few pages and a short queue, so that requests are preempted and refused, too."""
    folder = tmp_path_factory.mktemp("load")
    start = server_of(tiny_folder("llama", folder / "tiny"), folder, {"kv-bytes": "1MiB", "max-waiting": "600"})
    with start({}) as running:
        yield running


class Client:
    """One connection, kept while the server keeps it.

    Args:
        server: what it asks.
        random: what it asks for, and whether it leaves.
        seen: counts how its requests ended.
    """

    def __init__(self, server: Server, random: random.Random, seen: Counter[str]) -> None:
        self._port, self._model = server.http.base_url.port, server.model
        self._random, self._seen = random, seen
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self) -> None:
        """Sends a request, and reads its answer or leaves in the middle."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        stream, leaves = self._random.random() < 0.5, self._random.random() < 0.1
        self._writer.write(self._body(stream))
        await self._writer.drain()
        if leaves:
            await (self._in().readline() if stream else asyncio.sleep(self._random.random() * 0.2))
            self._seen["left"] += 1
            self._close()
            return
        status, headers = await self._head()
        if "content-length" in headers:
            body = await self._in().readexactly(int(headers["content-length"]))
            whole = bool(json.loads(body))
        else:
            events = b""
            while chunk := await self._chunk():
                events += chunk
            whole = events.endswith(b"data: [DONE]\n\n")
        self._seen[str(status) if whole else "cut off"] += 1
        if headers.get("connection") == "close":
            self._close()

    def _body(self, stream: bool) -> bytes:
        prompt = f"{self._random.choice(PREFIXES)} w{self._random.randrange(2, 200)}"
        fields = {"model": self._model, "prompt": prompt, "max_tokens": self._random.randrange(1, 9), "stream": stream}
        body = json.dumps(fields).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    async def _head(self) -> tuple[int, dict[str, str]]:
        first, *rest = (await self._in().readuntil(b"\r\n\r\n")).decode().split("\r\n")
        return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in rest if line)

    async def _chunk(self) -> bytes:
        size = int(await self._in().readuntil(b"\r\n"), 16)
        return (await self._in().readexactly(size + 2))[:-2]

    def _in(self) -> asyncio.StreamReader:
        assert self._reader is not None
        return self._reader

    def _close(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self._reader = self._writer = None


async def _all(server: Server, seen: Counter[str]) -> None:
    async def client(number: int) -> None:
        mine = Client(server, random.Random(number), seen)
        for _ in range(REQUESTS // CLIENTS):
            try:
                await mine.ask()
            except (OSError, asyncio.IncompleteReadError) as error:
                seen[f"lost: {error!r}"] += 1
                mine = Client(server, random.Random(number), seen)

    await asyncio.gather(*map(client, range(CLIENTS)))


@pytest.mark.slow
@pytest.mark.deadline
@pytest.mark.timeout(1800)
def test_many_clients_some_of_whom_leave(server: Server) -> None:
    seen: Counter[str] = Counter()
    asyncio.run(asyncio.wait_for(_all(server, seen), patience(600)))
    assert {*seen} <= {"200", "429", "left"}, seen
    assert seen.total() == REQUESTS
    assert seen["left"] > REQUESTS // 20
    assert seen["200"] > REQUESTS // 4

    def stats() -> Any:
        return server.http.get("/v1/cache/stats").json()

    eventually(lambda: not (stats()["running"] or stats()["waiting"]), 60.0)
    cache = stats()["cache"]
    for name, pool in cache["pools"].items():
        assert (pool["private"], pool["locked"]) == (0, cache["retention"]["device"][name]), pool
    assert server.http.get("/health").status_code == 200
    assert Path(server.log).read_text().count("Traceback") == 0

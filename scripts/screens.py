"""Takes the pictures of what moves: the live page and `mainstem top`, of a server under load: `make pictures`.

The server is real, its model tiny and random. Its clients are sessions of several turns, some of which share a
beginning; they outgrow the device and the host, so that every tier has something to do. Chromium draws the page, as in
the tests, whose rigs must be on the path.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from rigs.browser import browsing
from rigs.serving import Server, server_of, tiny_folder

from mainstem.watch.top import Look, Watch, table
from scripts.pictures import Picture

FOLDER = Path(__file__).parents[1] / "docs" / "screens"
PAGE_BYTES = 12288  # of 16 tokens of the model
CLIENTS = 6
LOADED_S = 75.0
SYSTEM, TURN = (64, 220), (24, 90)  # tokens
OPTIONS: dict[str, str | list[str]] = {
    "kv-bytes": str(640 * PAGE_BYTES),
    "host-bytes": str(1200 * PAGE_BYTES),
    "storage-secret": "0123456789abcdef",
    "max-running": "4",
}


class Client(threading.Thread):
    """Holds conversations until it is told to stop: a new one, or one of before, each time."""

    def __init__(self, server: Server, number: int, ends: threading.Event) -> None:
        super().__init__(daemon=True)
        self._url, self._model, self._ends = str(server.http.base_url), server.model, ends
        self._random = random.Random(number)
        shared = random.Random(0)
        self._systems = [[shared.randrange(2, 200) for _ in range(shared.randrange(*SYSTEM))] for _ in range(5)]
        self._salts = [None, None, "support", "research"]

    def run(self) -> None:
        """Runs the conversations."""
        held: list[tuple[str | None, list[int]]] = []
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._ends.is_set():
                if not held or self._random.random() < 0.25:
                    system = self._systems[int(self._random.paretovariate(1.2)) % len(self._systems)]
                    held.append((self._random.choice(self._salts), list(system)))
                at = max(0, len(held) - int(self._random.paretovariate(0.7)))
                salt, tokens = held[at]
                tokens += [self._random.randrange(2, 200) for _ in range(self._random.randrange(*TURN))]
                if len(tokens) > 900:
                    held.pop(at)
                    continue
                body = {"model": self._model, "prompt": tokens, "max_tokens": 12, "cache_salt": salt}
                http.post("/v1/completions", json={name: value for name, value in body.items() if value is not None})
                self._ends.wait(self._random.expovariate(8.0))


def top_picture(look: Look) -> str:
    """Draws what `mainstem top` says."""
    made = table([look])
    names, values, totals = ([str(cell) for cell in column.cells] for column in made.columns)
    picture = Picture("What mainstem top shows of a server", 60 + 20 * len(names))
    picture.text(20, 30, "$ mainstem top", "mono")
    picture.text(380, 30, look.server.removeprefix("http://"), "mono", "end")
    picture.text(480, 30, "in all", "mono", "end")
    for row, (name, value, total) in enumerate(zip(names, values, totals, strict=True)):
        indent = len(name) - len(name.lstrip())
        picture.text(20 + 8 * indent, 58 + 20 * row, name.strip(), "mono")
        picture.text(380, 58 + 20 * row, value, "mono", "end")
        picture.text(480, 58 + 20 * row, total, "mono", "end")
    return picture.svg()


def take(server: Server, folder: Path) -> None:
    """Takes the pictures of a server under load."""
    url = str(server.http.base_url).rstrip("/")

    def fetch(address: str) -> str:
        return httpx.get(f"{address}/metrics").text

    with browsing(folder) as page:
        page.open(f"{url}/cache", height=1260)
        time.sleep(LOADED_S)
        watch: Any = Watch([url], fetch, time.monotonic)
        watch.look()
        time.sleep(2.0)
        look = watch.look()[0]
        page.run("document.querySelector('#icicle').focus()")
        for key in ("ArrowRight", "ArrowDown", "ArrowDown"):
            page.press(key)
        page.picture(FOLDER / "live-light.png")
        page.dark(True)
        time.sleep(1.5)
        page.picture(FOLDER / "live-dark.png")
        assert not page.errors, page.errors
    shown = Look("http://127.0.0.1:8000", look.measures, look.totals)
    (FOLDER / "top.svg").write_text(top_picture(shown))


def main() -> None:
    """Runs a server and its clients, and takes the pictures."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_folder("llama", folder / "tiny")
        options = {**OPTIONS, "storage": f"file:{folder / 'store'}?capacity=256MiB"}
        with server_of(model, folder, {"page-size": "16"})(options) as server:
            ends = threading.Event()
            clients = [Client(server, number, ends) for number in range(CLIENTS)]
            for client in clients:
                client.start()
            try:
                take(server, folder)
            finally:
                ends.set()
                for client in clients:
                    client.join()


if __name__ == "__main__":
    main()

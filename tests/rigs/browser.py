"""Chromium without a window, driven over its DevTools protocol: https://chromedevtools.github.io/devtools-protocol/

Over a pipe, so no port is open and no package is needed.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import patience
from skips import BROWSER


class Page:
    """One page.

    Attributes:
        errors: what its scripts raised or logged as errors, and what its policy refused.
        requests: the URLs that it asked for.
    """

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._answers, self._read = to, answers, b""
        self._ids = itertools.count(1)
        self._session = ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Calls a method of the protocol, and returns its result."""
        message: dict[str, Any] = {"id": next(self._ids), "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(patience(60))
            if answer is None:
                raise TimeoutError(method)
            if answer.get("id") == message["id"]:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str, *, width: int = 1280, height: int = 1200, dark: bool = False, before: str = "") -> None:
        """Opens a URL; `before`: a script that runs before those of the page."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        self.dark(dark)
        if before:
            self.call("Page.addScriptToEvaluateOnNewDocument", source=before)
        self.call("Page.navigate", url=url)

    def dark(self, dark: bool) -> None:
        """Makes the page light or dark."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def run(self, expression: str) -> Any:
        """Returns the value of an expression, or of its promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 30.0) -> Any:
        """Waits until an expression is true, and returns its value."""
        ends_s = time.monotonic() + patience(seconds)
        while not (value := self.run(expression)):
            assert time.monotonic() < ends_s, (expression, self.errors)
            self._drain(0.05)
        return value

    def press(self, key: str) -> None:
        """Presses a key."""
        code = {"ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "Escape": 27}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, path: Path) -> None:
        """Writes what is seen as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _drain(self, seconds: float) -> None:
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0:
            self._next(left_s)

    def _next(self, timeout_s: float) -> Any:
        ends_s = time.monotonic() + timeout_s
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], max(ends_s - time.monotonic(), 0))
            if not ready:
                return None
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser ended"
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        found = json.loads(message)
        self._note(found.get("method", ""), found.get("params", {}))
        return found

    def _note(self, method: str, params: Any) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


def _above_ten(descriptor: int) -> int:
    """Moves a descriptor away from 3 and 4, which the browser uses."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved


@contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """Runs a browser with one page; its profile is in the folder."""
    ours_in, theirs_out = (_above_ten(end) for end in os.pipe())
    theirs_in, ours_out = (_above_ten(end) for end in os.pipe())
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    command = [BROWSER.need(), *options, "--no-first-run", f"--user-data-dir={folder / 'profile'}", "about:blank"]
    shell = ["bash", "-c", f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}', *command]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(shell, pass_fds=(theirs_in, theirs_out), stdout=quiet, stderr=quiet) as process:
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            page = Page(ours_out, ours_in)
            yield page
        finally:
            os.close(ours_out)  # which ends the browser
            os.close(ours_in)
            process.terminate()
            process.wait(patience(20))

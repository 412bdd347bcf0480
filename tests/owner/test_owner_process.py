"""The process of an owner: what it reports to its starter, and what it leaves in its log."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mainstem.errors import BackendUnavailable, BadArgument
from mainstem.owner import __main__ as process
from mainstem.owner.start import READY
from mainstem.settings.owner import OwnerConfig

CONFIG = OwnerConfig(socket="/nowhere/s.sock", host_bytes=5 << 20, linger_s=3.0)
Serve = Callable[..., None]


class Starter:
    """One that starts an owner in this process, with pipes for its lock and its report."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reader, self.ready = os.pipe()
        self.lock = os.open("/dev/null", os.O_RDONLY)
        for descriptor in (self.lock, self.ready):
            os.set_inheritable(descriptor, True)
        self.given: tuple[Any, ...] = ()
        self._patch = monkeypatch

    def start(self, serve: Serve) -> int:
        def called(spec: str, config: OwnerConfig, announce: Callable[[Any], None], lock: int) -> None:
            self.given = spec, config, lock
            serve(announce)

        order = {"spec": "memory:", "config": asdict(CONFIG), "lock": self.lock, "ready": self.ready}
        self._patch.setattr(sys, "stdin", io.StringIO(json.dumps(order)))
        self._patch.setattr(process, "serve", called)
        self._patch.setattr(logging, "basicConfig", lambda **_: None)  # pytest has its own
        return process.main()

    def heard(self) -> bytes:
        """Returns all that was reported; the owner must have closed its end."""
        return os.read(self.reader, 1 << 16) + os.read(self.reader, 1)


@pytest.fixture
def starter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starter]:
    made = Starter(monkeypatch)
    yield made
    os.close(made.lock)


def test_an_owner_reports_once_that_it_is_ready_and_its_stores_do_not_inherit_the_lock(starter: Starter) -> None:
    inherits: list[bool] = []

    def serve(announce: Callable[[Any], None]) -> None:
        announce(Path("/nowhere"))
        inherits.extend(map(os.get_inheritable, (starter.lock,)))
        announce(Path("/nowhere"))

    assert starter.start(serve) == 0
    assert starter.given == ("memory:", CONFIG, starter.lock)
    assert starter.heard() == READY
    assert inherits == [False]
    os.close(starter.reader)


@pytest.mark.parametrize(
    "error",
    [
        BackendUnavailable("a store\n is  locked"),
        BadArgument("storage", "x", "y"),
        OSError("no room"),
        ImportError("no lib"),
    ],
)
def test_why_an_owner_does_not_start_is_reported_in_one_line_and_logged(
    starter: Starter, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def serve(announce: Callable[[Any], None]) -> None:
        raise error

    with caplog.at_level(logging.ERROR):
        assert starter.start(serve) == 1
    assert starter.heard() == " ".join(str(error).split()).encode()
    assert [(each.levelname, each.message) for each in caplog.records] == [("ERROR", str(error))]
    os.close(starter.reader)


@pytest.mark.parametrize(("length", "reported"), [(4095, 4095), (4096, 4096), (4097, 4096), (100_000, 4096)])
def test_a_report_has_4096_bytes_at_most_so_that_no_pipe_is_full(starter: Starter, length: int, reported: int) -> None:
    def serve(announce: Callable[[Any], None]) -> None:
        raise OSError("x" * length)

    assert starter.start(serve) == 1
    assert len(starter.heard()) == reported
    os.close(starter.reader)


def test_an_owner_that_fails_later_reports_no_more_but_logs(starter: Starter, caplog: pytest.LogCaptureFixture) -> None:
    def serve(announce: Callable[[Any], None]) -> None:
        announce(Path("/nowhere"))
        raise OSError("the disk has gone")

    assert starter.start(serve) == 1
    assert starter.heard() == READY
    assert [each.message for each in caplog.records] == ["the disk has gone"]
    os.close(starter.reader)


def test_an_owner_whose_starter_has_gone_serves_all_the_same(starter: Starter) -> None:
    os.close(starter.reader)
    served: list[bool] = []

    def serve(announce: Callable[[Any], None]) -> None:
        announce(Path("/nowhere"))
        served.append(True)

    assert starter.start(serve) == 0 and served == [True]


def test_a_fault_of_our_own_is_not_hidden(starter: Starter) -> None:
    def serve(announce: Callable[[Any], None]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        starter.start(serve)
    os.close(starter.ready)
    os.close(starter.reader)

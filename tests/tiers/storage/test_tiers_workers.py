"""Workers on threads: the result of a call, and that neither a stuck call nor `close` blocks forever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from machine import patience

from mainstem.tiers.storage.workers import Call, ThreadWorkers

pytestmark = pytest.mark.deadline
PATIENCE_S = patience(20)  # limit for events that must happen


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """The event that stuck calls wait for; set at the end, so that none outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def finished(call: Call[Any]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not call.done() and time.monotonic() < end:
        time.sleep(0.001)
    return call.done()


def test_a_call_returns_the_result_of_its_function() -> None:
    workers = ThreadWorkers(2, "test")
    calls = [workers.submit(lambda n=n: n * n) for n in range(50)]  # type: ignore[misc]
    assert all(finished(call) for call in calls)
    assert [call.result() for call in calls] == [n * n for n in range(50)]
    assert calls[7].result() == 49  # any number of times
    assert workers.close(PATIENCE_S)


def test_whoever_waits_is_woken_after_a_call_has_ended() -> None:
    ended: list[bool] = []
    woken = threading.Semaphore(0)
    calls: list[Call[Any]] = []

    def wake() -> None:
        ended.append(calls[len(ended)].done())
        woken.release()

    workers = ThreadWorkers(1, "test", wake)
    begin = threading.Event()
    calls += [workers.submit(begin.wait), workers.submit(lambda: 1 / 0)]
    begin.set()
    assert woken.acquire(timeout=PATIENCE_S) and woken.acquire(timeout=PATIENCE_S)
    assert ended == [True, True]
    assert workers.close(PATIENCE_S)


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration(), SystemExit(3), KeyboardInterrupt()])
def test_an_exception_of_a_call_is_raised_by_its_result(error: BaseException) -> None:
    def fail() -> None:
        raise error

    workers = ThreadWorkers(1, "test")
    call, after = workers.submit(fail), workers.submit(lambda: "still here")
    assert finished(call)
    with pytest.raises(type(error)):
        call.result()
    assert finished(after)
    assert after.result() == "still here"
    assert workers.close(PATIENCE_S)


def test_calls_run_at_once_on_as_many_threads_with_that_name() -> None:
    workers, together = ThreadWorkers(3, "of-a-test"), threading.Barrier(3)

    def meet() -> str:
        together.wait(PATIENCE_S)
        return threading.current_thread().name

    calls = [workers.submit(meet) for _ in range(3)]
    assert all(finished(call) for call in calls)
    assert sorted(call.result() for call in calls) == ["of-a-test-0", "of-a-test-1", "of-a-test-2"]
    assert workers.close(PATIENCE_S)


def test_one_thread_runs_calls_in_the_order_of_submission() -> None:
    workers, order = ThreadWorkers(1, "test"), list[int]()
    calls = [workers.submit(lambda n=n: order.append(n)) for n in range(100)]  # type: ignore[misc]
    assert workers.close(PATIENCE_S)  # after the queued calls
    assert all(call.done() for call in calls)
    assert order == list(range(100))


def test_a_stuck_call_is_not_done_and_occupies_only_its_own_thread(release: threading.Event) -> None:
    workers = ThreadWorkers(2, "test")
    stuck = workers.submit(release.wait)
    others = [workers.submit(lambda: "fine") for _ in range(10)]
    assert all(finished(call) for call in others)
    assert not stuck.done()
    release.set()
    assert finished(stuck)
    assert stuck.result() is True
    assert workers.close(PATIENCE_S)


def test_close_abandons_a_stuck_call(release: threading.Event) -> None:
    workers = ThreadWorkers(2, "test")
    stuck = workers.submit(release.wait)
    assert not workers.close(0.05)
    assert not stuck.done()
    release.set()
    assert finished(stuck)


def test_threads_do_not_keep_the_process_alive(release: threading.Event) -> None:
    workers = ThreadWorkers(1, "daemonic")
    workers.submit(release.wait)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("daemonic"))


def test_close_gives_a_slow_call_the_whole_timeout_not_a_share_per_thread() -> None:
    workers = ThreadWorkers(2, "slow")
    workers.submit(lambda: time.sleep(0.6))
    assert workers.close(patience(1))

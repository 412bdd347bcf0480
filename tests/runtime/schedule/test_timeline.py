"""The phases of a request: which there are, and that they follow one another."""

from __future__ import annotations

from rigs.hand_driven import Clock

from mainstem.runtime.schedule.timeline import Phase, Timeline


def timeline() -> tuple[Clock, Timeline]:
    clock = Clock(100.0)
    return clock, Timeline(clock, 100.0)


def test_a_request_queues_matches_loads_computes_and_stores() -> None:
    clock, line = timeline()
    clock.now_s = 101.0
    line.match()
    clock.now_s = 101.5
    line.admitted(loads=True)
    clock.now_s = 102.0
    line.end("load")
    clock.now_s = 103.0
    line.generates()
    clock.now_s = 104.0
    line.generates()  # the second token changes nothing
    line.end("queue", "load", "prefill", "decode")
    line.begin("store")
    clock.now_s = 104.5
    line.end("store")
    assert set(line.phases()) == {
        Phase("queue", 0.0, 1.0),
        Phase("match", 1.0, 1.5),
        Phase("load", 1.5, 2.0),
        Phase("prefill", 1.5, 3.0),
        Phase("decode", 3.0, 4.0),
        Phase("store", 4.0, 4.5),
    }
    assert [phase.begin_s for phase in line.phases()] == sorted(phase.begin_s for phase in line.phases())


def test_an_admission_that_found_no_pages_never_was() -> None:
    clock, line = timeline()
    clock.now_s = 101.0
    line.match()
    clock.now_s = 102.0
    assert line.phases() == (Phase("queue", 0.0, 2.0),)
    clock.now_s = 105.0
    line.match()
    line.admitted(loads=False)
    assert Phase("queue", 0.0, 5.0) in line.phases()
    assert Phase("match", 5.0, 5.0) in line.phases()


def test_one_that_is_preempted_queues_again() -> None:
    clock, line = timeline()
    line.match()
    line.admitted(loads=False)
    clock.now_s = 101.0
    line.end("queue", "load", "prefill", "decode")
    line.begin("queue")
    clock.now_s = 103.0
    line.match()
    line.admitted(loads=False)
    stages = [phase.stage for phase in line.phases()]
    assert stages == ["queue", "match", "prefill", "queue", "match", "prefill"]
    assert line.phases()[3] == Phase("queue", 1.0, 3.0)


def test_the_phases_of_one_request_are_bounded() -> None:
    clock, line = timeline()
    for _ in range(1000):
        line.begin("store")
        clock.now_s += 1.0
        line.end("store")
    assert [phase.begin_s for phase in line.phases()] == [0.0, *range(64)]  # it still queues

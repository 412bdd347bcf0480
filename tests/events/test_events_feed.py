"""The two ends of a stream of batches: gaps, repeats, restarts and late joins; the wire format."""

from __future__ import annotations

import msgspec
import pytest

from mainstem.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from mainstem.events.feed import Feed, Follower
from mainstem.events.wire import Batch, decode, encode

FIRST = BlockStored((1, 2), None, (10, 11, 12, 13), 2, "GPU", None, None)
NEXT = BlockStored((3,), 2, (14, 15), 2, "GPU", None, None)
ON_HOST = BlockStored((1, 2), None, (10, 11, 12, 13), 2, "CPU", None, None)
GONE = BlockRemoved((3,), "GPU")


class Line:
    """A feed and its batches so far."""

    def __init__(self, kept_bytes: int = 1 << 20, now_s: float = 100.0) -> None:
        self.feed, self.now_s = Feed(now_s, kept_bytes), now_s
        self.batches: list[tuple[int, bytes]] = []
        self.state: list[Event] = [AllBlocksCleared()]  # all that was sent makes a state, too

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        return self.feed.replay(first, self.now_s, self.state)

    def send(self, *events: Event) -> tuple[int, bytes]:
        self.now_s += 1
        self.state += events
        self.batches.append(self.feed.publish(events, self.now_s))
        return self.batches[-1]


def hear(follower: Follower, line: Line, batch: tuple[int, bytes]) -> None:
    first = follower.missing(batch[0])
    for replayed in () if first is None else line.replay(first):
        follower.follow(*replayed)
    follower.follow(*batch)


def known(follower: Follower) -> dict[int, set[str]]:
    return {hash_: set(block.media) for hash_, block in follower.replica.blocks.items()}


def test_a_follower_has_what_was_sent() -> None:
    line, follower = Line(), Follower()
    for events in ((FIRST,), (NEXT, ON_HOST), (GONE,)):
        hear(follower, line, line.send(*events))
    assert known(follower) == {1: {"GPU", "CPU"}, 2: {"GPU", "CPU"}}
    assert follower.replica.path(2) == (10, 11, 12, 13)


def test_the_first_batch_makes_void_what_was_known_of_an_earlier_server() -> None:
    line = Line()
    assert decode(line.send(FIRST)[1]).events == [AllBlocksCleared(), FIRST]
    assert decode(line.send(NEXT)[1]).events == [NEXT]


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_a_gap_is_noticed_and_closed(kept_bytes: int) -> None:
    line, follower = Line(kept_bytes), Follower()
    hear(follower, line, line.send(FIRST))
    line.send(NEXT)
    line.send(ON_HOST)
    batch = line.send(GONE)
    assert follower.missing(batch[0]) == line.batches[1][0]
    hear(follower, line, batch)
    assert known(follower) == {1: {"GPU", "CPU"}, 2: {"GPU", "CPU"}}


def test_64_mebibytes_of_batches_are_kept_for_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    body = bytes((1 << 20) - 128)  # with what keeping it takes, a 64th of the room
    monkeypatch.setattr(Feed, "_encode", lambda *_: body)
    feed = Feed(0.0)
    for number in range(64):
        assert feed.publish([FIRST], 0.0)[0] == number
    assert [number for number, _ in feed.replay(0, 0.0, [])] == list(range(64))
    for number in range(64, 200):
        feed.publish([FIRST], 0.0)
        assert [kept for kept, _ in feed.replay(number - 63, 0.0, [])] == list(range(number - 63, number + 1))
        assert [kept for kept, _ in feed.replay(number - 64, 0.0, [])] == [number]  # the whole state, in one


def test_who_comes_too_late_gets_everything_that_is_there() -> None:
    line = Line(kept_bytes=0)
    for event in (FIRST, NEXT):
        line.send(event)
    ((number, payload),) = line.replay(0)
    assert number == line.batches[-1][0]
    assert decode(payload).events == [AllBlocksCleared(), FIRST, NEXT]


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_without_a_state_there_are_the_batches_if_they_are_all_there(kept_bytes: int) -> None:
    line = Line(kept_bytes)
    for event in (FIRST, NEXT):
        line.send(event)
    replayed = line.feed.replay(0, line.now_s)
    events = [event for _, payload in replayed for event in decode(payload).events]
    assert events == [AllBlocksCleared(), FIRST, NEXT] if kept_bytes else [AllBlocksCleared()]
    assert replayed[-1][0] == line.batches[-1][0]


def test_the_whole_state_is_made_in_steps_that_other_threads_run_between() -> None:
    line = Line(kept_bytes=0)
    for path in range(10):
        hashes = tuple(range(path * 100, path * 100 + 100))
        line.send(BlockStored(hashes, None, tuple(range(200)), 2, "GPU"))
    pauses: list[None] = []
    (paused,) = line.feed.replay(0, 5.0, line.state, lambda: pauses.append(None))
    assert len(pauses) == 3, "after every 256 pages or a little more"
    assert [paused] == line.feed.replay(0, 5.0, line.state)
    assert len(list(decode(paused[1]).events)) == 11


def test_a_replay_has_the_batches_themselves_while_they_are_kept() -> None:
    line = Line()
    for event in (FIRST, NEXT, GONE):
        line.send(event)
    assert line.replay(line.batches[1][0]) == line.batches[1:]
    assert line.replay(line.batches[-1][0] + 1) == []


def test_a_batch_that_comes_again_changes_nothing() -> None:
    line, follower = Line(), Follower()
    old = line.send(FIRST, NEXT)
    hear(follower, line, old)
    hear(follower, line, line.send(GONE))
    hear(follower, line, old)
    assert known(follower) == {1: {"GPU"}, 2: {"GPU"}}


def test_a_late_live_batch_does_not_undo_a_replay() -> None:
    line, follower = Line(kept_bytes=0), Follower()
    late = line.send(FIRST, NEXT)
    line.send(GONE)
    for replayed in line.replay(0):
        follower.follow(*replayed)
    hear(follower, line, late)
    assert known(follower) == {1: {"GPU"}, 2: {"GPU"}}


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
@pytest.mark.parametrize("sent_before_it_is_heard", [1, 2, 3])
def test_a_server_that_began_anew_is_noticed(sent_before_it_is_heard: int, kept_bytes: int) -> None:
    line, follower = Line(), Follower()
    for event in (FIRST, NEXT):
        hear(follower, line, line.send(event))
    line = Line(kept_bytes=kept_bytes, now_s=line.now_s)
    for event in (ON_HOST, ON_HOST, ON_HOST)[:sent_before_it_is_heard]:
        batch = line.send(event)
    hear(follower, line, batch)
    assert known(follower) == {1: {"CPU"}, 2: {"CPU"}}


def test_the_format_is_that_of_vllm() -> None:
    class EventBatch(msgspec.Struct, array_like=True):
        ts: float
        events: list[Stored | Removed | Cleared]
        data_parallel_rank: int | None = None

    salted = BlockStored((2**64 - 1,), None, (1, 2), 2, "CPU", "french", "salt")
    batch = msgspec.msgpack.decode(
        encode(Batch(1.5, [AllBlocksCleared(), salted, NEXT, GONE], 0)), type=EventBatch, strict=True
    )
    assert batch == EventBatch(
        1.5,
        [
            Cleared(),
            Stored([2**64 - 1], None, [1, 2], 2, None, "CPU", "french"),
            Stored([3], 2, [14, 15], 2, None, "GPU", None),
            Removed([3], "GPU"),
        ],
        0,
    )


class Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


def test_what_is_written_is_read_and_anything_else_is_refused() -> None:
    batch = Batch(1.5, [AllBlocksCleared(), FIRST, GONE], 0)
    assert decode(encode(batch)) == batch
    for wrong in (b"", b"\xc1", encode(batch)[:-3], msgspec.msgpack.encode([1.5, [{"type": "Other"}], 0])):
        with pytest.raises(ValueError, match=r"no (batch of )?KV event"):
            decode(wrong)

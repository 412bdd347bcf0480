"""Dynamo's service in the replay of routers: it knows exactly what each cache has, and what is under way."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from rigs.dynamo_router import ServiceFailed, interpreter

from bench import dynamo, fleet
from bench.dynamo import MARKS, Dynamo
from mainstem.events.replica import Replica
from mainstem.events.source import BlockRemoved, BlockStored
from mainstem.events.wire import decode
from mainstem.replay.trace import Batch, Trace


class Double:
    """A service that sends a prompt where most of it is, else where it sent least; it reads events when asked."""

    def __init__(self) -> None:
        self.sockets: dict[int, zmq.Socket[bytes]] = {}
        self.replicas: dict[int, Replica] = {}
        self.under_way: dict[str, int] = {}
        self.sent = Counter[int]()
        self.closed = False

    def call(self, method: str, request: Any) -> Any:
        if method == "upsert_worker":
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
            socket.connect(request["kv_events_endpoint"])
            socket.subscribe(b"")
            self.sockets[request["worker_id"]] = socket
            self.replicas[request["worker_id"]] = Replica()
        elif method == "overlap_scores":
            self.read()
            found = self._overlap(request["token_ids"])
            return {"workers": [{"worker_id": worker, "device_blocks": blocks} for worker, blocks in found.items()]}
        elif method == "select_and_reserve":
            found = self._overlap(request["token_ids"])
            chosen = max(found, key=lambda worker: (found[worker], -self.sent[worker]))
            self.sent[chosen] += 1
            self.under_way[request["selection_id"]] = chosen
            return {"worker_id": chosen}
        else:
            assert method == "free_reservation"
            del self.under_way[request]
        return None

    def close(self) -> None:
        self.closed = True
        for socket in self.sockets.values():
            socket.close()

    def read(self) -> None:
        for worker, socket in self.sockets.items():
            if socket.poll(0):  # one batch at a time, so that what was sent is applied late
                self.replicas[worker].apply(decode(socket.recv_multipart()[2]).events)

    def _overlap(self, tokens: list[int]) -> dict[int, int]:
        paths = {worker: {replica.path(block) for block in replica.blocks} for worker, replica in self.replicas.items()}
        return {worker: sum(tuple(tokens[:end]) in held for end in range(1, len(tokens) + 1))
                for worker, held in paths.items()}  # fmt: skip


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> list[Double]:
    """Those that were started, in order."""
    started: list[Double] = []

    def start() -> Double:
        started.append(Double())
        return started[-1]

    monkeypatch.setattr(dynamo, "Service", start)
    return started


def requests(paths: list[list[int]], seconds: float) -> fleet.Requests:
    batch = Batch.of(paths, time_s=[seconds * i for i in range(len(paths))], input_tokens=[4 * len(p) for p in paths])
    return fleet.read(Trace.of(batch, block_size=4))


PATHS = [[1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3, 7], [5, 6, 8], *([1, 2, 3, i] for i in range(10, 30))]
ROOMY, SCARCE = 100, 6  # pages
FAST = fleet.Speed(0.01, 0.0)


@pytest.mark.deadline
@pytest.mark.parametrize("replicas", [1, 3])
def test_each_choice_follows_all_events_before_it(doubles: list[Double], replicas: int) -> None:
    asked = requests(PATHS, 1000.0)
    row = fleet.replay(asked, "dynamo", replicas, ROOMY, FAST, 0)
    assert row["hit_tokens"] == sum(fleet.found_by_one(asked, ROOMY))
    (double,) = doubles
    assert len(double.replicas) == replicas and not double.under_way and double.closed


@pytest.mark.deadline
def test_what_was_evicted_is_forgotten_and_of_marks_there_is_the_last(doubles: list[Double]) -> None:
    fleet.replay(requests(PATHS, 1000.0), "dynamo", 1, SCARCE, FAST, 0)
    tokens = [token for held in doubles[0].replicas[0].blocks.values() for token in held.stored.token_ids]
    assert sum(token >= MARKS for token in tokens) == 1
    assert 0 < len(tokens) - 1 <= SCARCE


@pytest.mark.deadline
def test_requests_under_way_are_freed_in_their_order(doubles: list[Double]) -> None:
    router = Dynamo(1)
    for block in range(3):
        router.choose(np.array([block], np.int32))
    router.ended(0)
    assert sorted(doubles[0].under_way) == ["1", "2"]
    router.close()


@pytest.mark.deadline
def test_a_service_that_follows_no_events_is_named(doubles: list[Double], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "PATIENCE_S", 0.1)
    monkeypatch.setattr(Double, "read", lambda double: None)
    with pytest.raises(ServiceFailed, match=r"events of replica 0 were not followed in 0\.1 s"):
        Dynamo(2)
    assert doubles[0].closed


def test_the_version_is_that_of_the_other_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSTEM_ROUTERS_PYTHON", str(tmp_path / "bin" / "python"))
    assert dynamo.version() is None
    metadata = tmp_path / "lib" / "python3.11" / "site-packages" / "ai_dynamo_runtime-9.8.7.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: ai-dynamo-runtime\nVersion: 9.8.7\n")
    assert dynamo.version() == "9.8.7"


# ---------------------------------------------------------------- the real service: make test-routers


needs_dynamo = pytest.mark.skipif(
    not interpreter().exists(), reason=f"no Dynamo at {interpreter()}; slow lane: make test-routers"
)


def stored(*path: int) -> BlockStored:
    """Returns the event of a whole path."""
    return BlockStored(tuple(100 * block for block in path), None, path, 1, "GPU")


@needs_dynamo
@pytest.mark.deadline
def test_the_real_service_sends_a_prefix_where_it_is_at_that_moment() -> None:
    def asked(*path: int) -> int:
        chosen = router.choose(np.array(path, np.int32))
        router.ended(chosen)
        return chosen

    with closing(Dynamo(3)) as router:
        for turn in range(20):
            first, second = turn % 3, (turn + 1) % 3
            router.apply(first, [stored(1, 2, 3)])
            router.apply(second, [stored(1, 4, 5, 6)])
            assert (asked(1, 2, 3, 9), asked(1, 4, 5, 9)) == (first, second)
            router.apply(first, [BlockRemoved((200, 300), "GPU")])
            router.apply(second, [stored(1, 2)])
            assert asked(1, 2, 3, 9) == second
            router.apply(first, [BlockRemoved((100,), "GPU")])
            router.apply(second, [BlockRemoved((600, 500, 400, 200, 100), "GPU")])


@needs_dynamo
@pytest.mark.deadline
def test_the_real_service_knows_what_is_under_way() -> None:
    with closing(Dynamo(2)) as router:
        prompts = [np.arange(50 * i, 50 * i + 4, dtype=np.int32) for i in range(6)]
        chosen = [router.choose(prompt) for prompt in prompts]
        assert Counter(chosen) == {0: 3, 1: 3}  # nobody has any, so each goes where less is under way
        for _ in range(3):
            router.ended(0)
        assert [router.choose(prompt + 500) for prompt in prompts[:3]] == [0, 0, 0]

"""The publisher over real sockets: what routers receive, what they missed, and who may listen."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
import zmq.auth
from machine import eventually, patience

from mainstem import BadArgument
from mainstem.events import AllBlocksCleared, BlockRemoved, BlockStored
from mainstem.events import publisher as module
from mainstem.events.feed import Feed, Follower
from mainstem.events.publisher import Publisher
from mainstem.events.wire import decode
from mainstem.settings.engine import EventConfig

ANY = "tcp://127.0.0.1:0"
STORED = BlockStored((1, 2), None, (10, 11, 12, 13), 2, "GPU", "french@1234", "salt")
pytestmark = pytest.mark.deadline


@contextmanager
def connected(
    kind: int, endpoint: str | None, keys: tuple[bytes, bytes, bytes] | None = None, unread: int = 1000
) -> Iterator[zmq.Socket]:
    assert endpoint is not None
    with zmq.Context() as context, context.socket(kind) as made:
        made.linger = 0
        made.rcvhwm = unread
        made.rcvtimeo = int(1000 * patience(10))
        if keys is not None:
            made.curve_publickey, made.curve_secretkey, made.curve_serverkey = keys
        if kind == zmq.SUB:
            made.subscribe(b"")
        made.connect(endpoint)
        yield made


def receive(subscriber: zmq.Socket) -> tuple[int, bytes]:
    topic, number, payload = subscriber.recv_multipart()
    assert topic == b"" and len(number) == 8
    return int.from_bytes(number, "big"), payload


def ask(router: zmq.Socket, first: int) -> list[tuple[int, bytes]]:
    """Asks as vLLM's subscribers do."""
    router.send(first.to_bytes(8, "big"))
    found = []
    while True:
        *_, number, payload = router.recv_multipart()
        if number == b"\xff" * 8:
            assert payload == b""
            return found
        found.append((int.from_bytes(number, "big"), payload))


def subscribed(publisher: Publisher, subscriber: zmq.Socket) -> None:
    """Publishes until the subscriber hears it: a connection is made some time after `connect`."""
    subscriber.rcvtimeo = 20
    for _ in range(int(patience(10) / 0.02)):
        publisher.put(BlockRemoved((0,), "GPU"))
        try:
            receive(subscriber)
        except zmq.Again:
            continue
        subscriber.rcvtimeo = int(1000 * patience(10))
        return
    raise AssertionError("the subscriber hears nothing")


def next_stored(subscriber: zmq.Socket) -> BlockStored:
    while True:
        for event in decode(receive(subscriber)[1]).events:
            if isinstance(event, BlockStored):
                return event


def test_events_arrive_in_order_with_the_names_that_clients_use() -> None:
    with (
        closing(Publisher(ANY, adapter_name=lambda name: name.partition("@")[0])) as publisher,
        connected(zmq.SUB, publisher.endpoint) as subscriber,
    ):
        subscribed(publisher, subscriber)
        publisher.put(STORED)
        event = next_stored(subscriber)
        assert (event.block_hashes, event.lora_name, event.cache_salt) == ((1, 2), "french", "salt")


def test_a_state_has_the_names_that_clients_use() -> None:
    with (
        closing(Publisher(ANY, ANY, adapter_name=lambda name: name.partition("@")[0])) as publisher,
        connected(zmq.REQ, publisher.replay) as router,
    ):
        publisher.state = lambda: [AllBlocksCleared(), STORED]
        router.send((0).to_bytes(8, "big"))
        _, event = decode(router.recv_multipart()[1]).events
        assert isinstance(event, BlockStored) and (event.block_hashes, event.lora_name) == ((1, 2), "french")


def test_who_comes_late_asks_for_what_it_missed() -> None:
    with (
        closing(Publisher(ANY, ANY)) as publisher,
        connected(zmq.DEALER, publisher.replay) as router,
    ):
        publisher.put(STORED)
        follower = Follower()
        router.send_multipart((b"", (0).to_bytes(8, "big")))
        events = []
        while (frames := router.recv_multipart())[1] != b"\xff" * 8:
            follower.follow(int.from_bytes(frames[1], "big"), frames[2])
            events += decode(frames[2]).events
        assert isinstance(events[0], AllBlocksCleared)
        assert publisher.stats(0).replays == 1


def test_who_does_not_read_loses_batches_and_asks_for_them_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_UNREAD", 2)
    tokens = (70_000,) * 200_000  # so that what the network keeps is few batches
    with (
        closing(Publisher(ANY, ANY)) as publisher,
        connected(zmq.SUB, publisher.endpoint, unread=1) as subscriber,
        connected(zmq.DEALER, publisher.replay) as router,
    ):
        subscribed(publisher, subscriber)
        for block in range(1, 41):
            before = publisher.stats(0).published
            publisher.put(BlockStored((block,), None, tokens, len(tokens), "GPU"))
            eventually(lambda before=before: publisher.stats(0).published > before)
        heard, follower = [receive(subscriber)], Follower()
        while heard[-1][0] - len(heard) < heard[0][0]:
            heard.append(receive(subscriber))
        assert len(heard) < 40
        follower.follow(*heard[0])
        for number, payload in ask(router, heard[0][0] + 1):
            follower.follow(number, payload)
        assert set(range(1, 41)) <= follower.replica.blocks.keys()


def test_a_long_answer_gives_way_to_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    gave_way = threading.Event()
    monkeypatch.setattr(module, "_give_way", gave_way.set)
    with closing(Publisher(ANY, ANY)) as publisher, connected(zmq.REQ, publisher.replay) as router:
        pages = tuple(range(300))
        publisher.state = lambda: [AllBlocksCleared(), BlockStored(pages, None, pages, 1, "GPU")]
        assert not gave_way.is_set()
        router.send((0).to_bytes(8, "big"))
        _, payload = router.recv_multipart()
        assert len(list(decode(payload).events)) == 2 and gave_way.is_set()


def test_a_request_socket_gets_one_answer_to_one_question_as_with_vllm() -> None:
    with closing(Publisher(ANY, ANY)) as publisher, connected(zmq.REQ, publisher.replay) as router:
        router.send((0).to_bytes(8, "big"))
        number, payload = router.recv_multipart()
        assert int.from_bytes(number, "big") > 0 and decode(payload).events == [AllBlocksCleared()]


def test_a_request_that_is_none_is_answered_with_the_end() -> None:
    with closing(Publisher(ANY, ANY)) as publisher, connected(zmq.DEALER, publisher.replay) as router:
        router.send_multipart((b"", b"\xff" * 30))
        assert router.recv_multipart()[1:] == [b"\xff" * 8, b""]


def test_the_queue_is_bounded_and_says_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    going_on = threading.Event()

    def wait(self: Feed, events: object, now_s: float) -> tuple[int, bytes]:
        going_on.wait(patience(30))
        return 0, b""

    monkeypatch.setattr(module, "_QUEUED", 3)
    monkeypatch.setattr(Feed, "publish", wait)
    with closing(Publisher(ANY)) as publisher:
        for _ in range(3):
            assert publisher.has_room
            publisher.put(STORED)
        assert not publisher.has_room and publisher.stats(7).queued == 3 and publisher.stats(7).dropped == 7
        going_on.set()


@pytest.mark.parametrize(("queued", "room"), [(65_535, True), (65_536, False), (65_537, False), (10**8, False)])
def test_65536_events_wait_at_most(queued: int, room: bool) -> None:
    full = SimpleNamespace(_queue=range(queued), _failed=False)
    assert Publisher.has_room.fget(full) == room  # type: ignore[attr-defined]
    assert Publisher.lags.fget(full) != room  # type: ignore[attr-defined]
    failed = SimpleNamespace(_queue=range(queued), _failed=True)
    assert not Publisher.has_room.fget(failed) and not Publisher.lags.fget(failed)  # type: ignore[attr-defined]


def test_a_router_that_does_not_read_loses_batches_after_4096_and_a_replay_is_never_cut() -> None:
    with closing(Publisher(ANY, ANY)) as publisher:
        assert publisher._router is not None
        assert [each.getsockopt(zmq.SNDHWM) for each in (publisher._pub, publisher._router)] == [4096, 0]
        assert publisher._pub.getsockopt(zmq.LINGER) == 1000  # milliseconds, for what is not sent at the end


def test_a_publisher_that_failed_takes_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Feed, events: object, now_s: float) -> tuple[int, bytes]:
        raise OSError("no network")

    monkeypatch.setattr(Feed, "publish", fail)
    with caplog.at_level(logging.CRITICAL), closing(Publisher(ANY)) as publisher:
        publisher.close()
        assert not publisher.has_room and "no more are sent" in caplog.text


def test_an_address_in_use_is_named() -> None:
    with (
        closing(Publisher(ANY)) as publisher,
        pytest.raises(BadArgument, match=r"kv_events .*can be bound.*in use"),
    ):
        Publisher(publisher.endpoint)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5557", "tcp://*:5557", "tcp://10.0.0.1:5557", "tcp://[::]:5557"])
def test_prompts_do_not_leave_the_machine_without_keys(address: str, tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="without --kv-events-keys"):
        EventConfig(kv_events=address)
    with pytest.raises(BadArgument, match="without --kv-events-keys"):
        EventConfig(kv_events="tcp://127.0.0.1:5557", kv_events_replay=address)
    EventConfig(kv_events=address, kv_events_keys=tmp_path)
    for local in ("tcp://127.0.0.1:5557", "tcp://localhost:5557", "tcp://[::1]:5557"):
        EventConfig(kv_events=local)


@pytest.mark.parametrize("address", ["127.0.0.1:5557", "tcp://127.0.0.1", "udp://127.0.0.1:1", "tcp://127.0.0.1:70000"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(BadArgument, match=r"tcp://HOST:PORT"):
        EventConfig(kv_events=address)
    with pytest.raises(BadArgument, match="left out without --kv-events"):
        EventConfig(kv_events_replay="tcp://127.0.0.1:5557")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    for name in ("server", "router"):
        zmq.auth.create_certificates(tmp_path, name)
        (tmp_path / f"{name}.key_secret").chmod(0o600)
    return tmp_path


def test_only_who_has_a_key_of_the_folder_hears_anything(keys: Path) -> None:
    server, _ = zmq.auth.load_certificate(keys / "server.key")
    public, secret = zmq.auth.load_certificate(keys / "router.key_secret")
    stranger = zmq.curve_keypair()
    assert secret is not None
    with (
        closing(Publisher(ANY, ANY, keys)) as publisher,
        connected(zmq.SUB, publisher.endpoint, (public, secret, server)) as router,
        connected(zmq.SUB, publisher.endpoint, (*stranger, server)) as other,
        connected(zmq.SUB, publisher.endpoint) as naked,
    ):
        subscribed(publisher, router)
        publisher.put(STORED)
        assert next_stored(router) == STORED
        for each in (other, naked):
            with pytest.raises(zmq.Again):
                each.recv(zmq.NOBLOCK)


def test_a_secret_key_that_others_can_read_is_refused(keys: Path) -> None:
    (keys / "server.key_secret").chmod(0o644)
    with pytest.raises(BadArgument, match="only its owner can read"):
        Publisher(ANY, keys=keys)
    (keys / "server.key_secret").unlink()
    with pytest.raises(BadArgument, match=r"server\.key_secret"):
        Publisher(ANY, keys=keys)

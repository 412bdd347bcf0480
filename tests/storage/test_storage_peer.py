"""Peer pull over real sockets: what is read is what the peer has, its time is bounded, and each fault is a miss."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from machine import eventually, patience
from rigs.hand_driven import Clock
from rigs.peers import SECRET, FakePeer, Pulled, Shelf, serving
from rigs.servers import free_port
from rigs.stores import Values, cause_of

from mainstem.errors import BackendUnavailable, BadArgument
from mainstem.share import Share
from mainstem.storage import ABSENT, open_backend
from mainstem.storage.conformance import CASES, Case, run
from mainstem.storage.memory import MemoryBackend
from mainstem.storage.peer.client import PeerBackend, addresses_of
from mainstem.storage.peer.server import PeerServer, Responder
from mainstem.storage.peer.wire import (
    EXISTS,
    GET,
    MOST_KEYS,
    OK,
    Request,
    key_of,
    read_request,
    write_answer,
    write_request,
)

pytestmark = pytest.mark.deadline
SIZE = 100_000
PAGES = Values(SIZE)
TIMEOUT_S = patience(5)
SERVER = "mainstem.storage.peer.server"


@pytest.fixture
def kept() -> Iterator[MemoryBackend]:
    with closing(MemoryBackend()) as store:
        PAGES.put(store, *range(10))
        yield store


@pytest.fixture
def server(kept: MemoryBackend) -> Iterator[PeerServer]:
    with closing(serving(kept)) as server:
        yield server


def client(*addresses: str, timeout_s: float = TIMEOUT_S, **options: object) -> closing[PeerBackend]:
    return closing(PeerBackend(addresses, SECRET, timeout_s, **options))  # type: ignore[arg-type]


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance(case: Case) -> None:
    assert str(run(case, Pulled)) == f"pass  {case.name}"


def test_what_a_peer_has_is_read(server: PeerServer) -> None:
    with client(server.address) as peer:
        assert peer.exists(PAGES.keys[8:12]) == [True, True, False, False]
        assert PAGES.read(peer, 9, 3, 12) == [SIZE, SIZE, ABSENT]
        assert PAGES.read(peer, 20) == [ABSENT]
    assert server.counts["values"] == 2


def test_nothing_is_written_to_a_peer(server: PeerServer) -> None:
    with client(server.address) as peer:
        assert PAGES.put(peer, 1, 20) == [False, False]
        peer.delete([])
        for call in (lambda: peer.delete(PAGES.keys[:1]), peer.clear, lambda: list(peer.scan())):
            assert cause_of(call) == "refused"
        assert peer.exists(PAGES.keys[:1]) == [True]


def test_a_spec_opens_it(server: PeerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    monkeypatch.setenv("PEERS", SECRET.decode())
    for option in (f"secret_file={tmp_path}/secret", "secret_env=PEERS"):
        with closing(open_backend(f"peer://{server.address}?{option}&timeout={TIMEOUT_S}s")) as peer:
            assert peer.exists(PAGES.keys[:1]) == [True]


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("peer:", "storage address"),
        ("peer://somewhere", "peer"),
        ("peer://a:0", "peer"),
        ("peer://a:1?secret_file=/none/such", "secret_file"),
        ("peer://a:1?secret_env=NO_SUCH_VARIABLE", "secret_env"),
        ("peer://a:1?secret_env=A&secret_file=b", "secret_env"),
        ("peer://a:1?depth=1", "storage option"),
    ],
)
def test_a_wrong_spec_is_refused(spec: str, name: str) -> None:
    with pytest.raises(BadArgument) as caught:
        open_backend(spec)
    assert caught.value.name == name


def test_each_value_is_asked_of_the_peer_that_has_it(kept: MemoryBackend) -> None:
    other = MemoryBackend()
    PAGES.put(other, 20, 21)
    first, second = serving(kept), serving(other)
    with closing(first), closing(second), client(first.address, second.address) as peers:
        assert peers.exists([PAGES.keys[at] for at in (3, 20, 30)]) == [True, True, False]
        assert PAGES.read(peers, 3, 20) == [SIZE, SIZE]
        assert (first.counts["values"], second.counts["values"]) == (1, 1)
        assert PAGES.read(peers, 21, 4) == [SIZE, SIZE]  # without having asked who has them


@pytest.mark.parametrize("evicts", [0, 1])
def test_a_peer_that_has_evicted_a_value_is_no_longer_its_home(evicts: int) -> None:
    """Both have it when they are asked; one of them gives it up behind the client's back."""
    stores = (MemoryBackend(), MemoryBackend())
    PAGES.put(stores[0], 3, 4)
    PAGES.put(stores[1], 3, 5)
    first, second = serving(stores[0]), serving(stores[1])
    with closing(first), closing(second), client(first.address, second.address) as peers:
        assert peers.exists([PAGES.keys[at] for at in (3, 4, 5)]) == [True, True, True]
        stores[evicts].delete([PAGES.keys[3]])
        found = [PAGES.read(peers, 3) for _ in range(3)]
        assert found[1:] == [[SIZE]] * 2, "the other one still has it"
        stores[1 - evicts].delete([PAGES.keys[3]])
        assert [PAGES.read(peers, 3) for _ in range(2)] == [[ABSENT]] * 2
        PAGES.put(stores[evicts], 3)
        assert PAGES.read(peers, 3) == [SIZE], "a peer that gave it up may have it again"
        assert PAGES.read(peers, 4, 5) == [SIZE, SIZE]


def test_more_keys_than_a_request_takes(server: PeerServer) -> None:
    keys = [struct.pack("<32xI", at)[-32:] for at in range(MOST_KEYS + 3)]
    with client(server.address) as peer:
        assert peer.exists([*keys, PAGES.keys[0]]) == [False] * len(keys) + [True]
        buffers = [memoryview(bytearray(1)) for _ in keys]
        assert peer.get([*keys, PAGES.keys[0]], [*buffers, memoryview(bytearray(SIZE))]) == [ABSENT] * len(keys) + [
            SIZE
        ]


def test_threads_pull_at_once(server: PeerServer) -> None:
    results: list[list[int]] = []
    with client(server.address) as peer:
        threads = [threading.Thread(target=lambda: results.append(PAGES.read(peer, *range(10)))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [[SIZE] * 10] * 6


# ---------------------------------------------------------------- names


def test_peers_that_a_name_has_are_followed(kept: MemoryBackend) -> None:
    other = MemoryBackend()
    PAGES.put(other, 20)
    first, second = serving(kept), serving(other)
    found: dict[str, list[str]] = {"engines:7100": [first.address]}

    def resolve(name: str) -> list[str]:
        if name not in found:
            raise OSError("no such name")
        return found[name]

    asked = [PAGES.keys[1], PAGES.keys[20]]
    options = {"resolve": resolve, "follow_s": 0.01}
    with closing(first), closing(second), client("dns:engines:7100", **options) as peers:
        assert peers.exists(asked) == [True, False]
        found["engines:7100"].append(second.address)
        eventually(lambda: peers.exists(asked) == [True, True])
        assert PAGES.read(peers, 1, 20) == [SIZE, SIZE]
        del found["engines:7100"]  # the name fails: what it had stays
        time.sleep(0.1)
        assert peers.exists(asked) == [True, True]
        found["engines:7100"] = [second.address]
        eventually(lambda: peers.exists(asked) == [False, True])
        assert PAGES.read(peers, 1, 20) == [ABSENT, SIZE]
        found["engines:7100"] = []
        eventually(lambda: peers.exists(asked) == [False, False])


def test_peers_can_be_named_while_it_runs(kept: MemoryBackend) -> None:
    other = MemoryBackend()
    PAGES.put(other, 20)
    first, second = serving(kept), serving(other)
    asked = [PAGES.keys[1], PAGES.keys[20]]
    with closing(first), closing(second), client() as peers:
        assert peers.exists(asked) == [False, False]
        peers.follow([first.address])
        assert peers.exists(asked) == [True, False]
        peers.follow([second.address, first.address])
        assert PAGES.read(peers, 1, 20) == [SIZE, SIZE]
        for wrong in ("nowhere", "dns:7100"):
            with pytest.raises(BadArgument, match="HOST:PORT"):
                peers.follow([second.address, wrong])
        peers.follow([second.address])
        assert peers.exists(asked) == [False, True]
        peers.follow([])
        assert PAGES.read(peers, 1, 20) == [ABSENT, ABSENT]


def test_a_peer_that_is_dropped_while_it_is_asked_is_not_asked_again() -> None:
    def answer(parts: list[bytes]) -> list[bytes]:
        request = read_request(parts, key_of(SECRET))
        assert not isinstance(request, int)
        if request.keys:  # the first request greets
            peers.follow([])
        return write_answer(OK, request.number, [1] * len(request.keys))

    with closing(FakePeer(answer)) as peer, client(peer.address) as peers:
        (dropped,) = peers._peers
        assert peers.exists(PAGES.keys[:1]) == [True]
        assert not dropped.idle, "nobody would close its connection"
        assert PAGES.read(peers, 0) == [ABSENT]
        assert peer.asked == 2


def test_a_machine_is_not_its_own_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"engines": ["10.0.0.3", "10.0.0.2", "10.0.0.1", "fd00::2"], socket.gethostname(): ["10.0.0.1", "fd00::1"]}

    def look_up(host: str, port: object, **_: object) -> list[tuple[object, ...]]:
        if host not in known:
            raise socket.gaierror("no such name")
        return [(0, 0, 0, "", (address, port)) for address in known[host] * 2]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert addresses_of("engines:7100") == ["10.0.0.2:7100", "10.0.0.3:7100", "[fd00::2]:7100"]
    with pytest.raises(socket.gaierror):
        addresses_of("others:7100")
    del known[socket.gethostname()]
    assert "10.0.0.1:7100" in addresses_of("engines:7100")


def test_a_name_that_nobody_knows_has_no_peers() -> None:
    with client("dns:no-such-name.invalid:7100") as peers:
        assert peers.exists(PAGES.keys[:1]) == [False]
        assert PAGES.read(peers, 1) == [ABSENT]


# ---------------------------------------------------------------- faults


def test_a_wrong_secret_is_one_clear_line(server: PeerServer, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BackendUnavailable, match=rf"^refused: peer {server.address} has another secret$") as caught:
        PeerBackend([server.address], b"another secret", TIMEOUT_S)
    assert "\n" not in str(caught.value)
    assert not caplog.records or [record.name for record in caplog.records] == [SERVER]  # it says so, too
    assert server.counts == {"refused": 1}


def test_a_peer_that_is_not_there_yet_is_asked_again(kept: MemoryBackend) -> None:
    clock, port = Clock(), free_port()
    with client(f"127.0.0.1:{port}", clock=clock, timeout_s=1.0) as peer:
        for _ in range(3):
            assert cause_of(lambda: peer.exists(PAGES.keys[:1])) == "unreachable"
        with closing(serving(kept, f"127.0.0.1:{port}")) as server:
            assert cause_of(lambda: peer.exists(PAGES.keys[:1])) == "unreachable"  # the breaker is open
            assert not server.counts
            clock.now_s += 6
            assert peer.exists(PAGES.keys[:1]) == [True]


def test_one_that_dies_leaves_the_others(kept: MemoryBackend, server: PeerServer) -> None:
    with closing(serving(kept)) as dying, client(dying.address, server.address) as peers:
        assert peers.exists(PAGES.keys[:2]) == [True, True]
        dying.close()
        assert peers.exists(PAGES.keys[:2]) == [True, True]
        assert PAGES.read(peers, 0, 1) == [SIZE, SIZE]


def test_a_peer_that_does_not_answer_costs_the_timeout() -> None:
    with closing(FakePeer(lambda parts: None)) as fake, client(fake.address, timeout_s=0.05) as peer:
        assert cause_of(lambda: peer.exists(PAGES.keys[:1])) == "timeout"
        assert peer.counts["timeout"] == 2  # with the greeting


def test_an_answer_that_comes_late_is_not_taken_for_the_next_one() -> None:
    delay_s = [0.0]

    def slowly(parts: list[bytes]) -> list[bytes]:
        request = read_request(parts, key_of(SECRET))
        assert isinstance(request, Request)
        time.sleep(delay_s[0])
        return write_answer(OK, request.number, [1] * len(request.keys))

    with closing(FakePeer(slowly)) as fake, client(fake.address, timeout_s=patience(0.2)) as peer:
        delay_s[0] = patience(0.2) * 1.5
        assert cause_of(lambda: peer.exists(PAGES.keys[:1])) == "timeout"
        delay_s[0] = 0
        eventually(lambda: _exists(peer))


def _exists(peer: PeerBackend) -> bool:
    with suppress(Exception):
        return peer.exists(PAGES.keys[:1]) == [True]
    return False


GARBAGE: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "no head": lambda parts: [b""],
    "another request": lambda parts: write_answer(OK, 0, [1]),
    "too many lengths": lambda parts: write_answer(OK, _number(parts), [1, 2, 3, 4, 5]),
    "noise": lambda parts: [b"\xff" * 16, b"\xff" * 8],
    "another version": lambda parts: write_answer(3, 0),
    "a value that was not asked for": lambda parts: [*write_answer(OK, _number(parts), _absent(parts)), b"x" * 9],
    "a short value": lambda parts: [*write_answer(OK, _number(parts), [SIZE] * len(_absent(parts))), b"x" * 9],
}


def _number(parts: list[bytes]) -> int:
    return struct.unpack("<8xQ", parts[0])[0]  # type: ignore[no-any-return]


def _absent(parts: list[bytes]) -> list[int]:
    request = read_request(parts, key_of(SECRET))
    assert isinstance(request, Request)
    return [-1] * len(request.keys)


@pytest.mark.parametrize("answer", GARBAGE.values(), ids=GARBAGE)
def test_an_answer_that_makes_no_sense_is_a_fault(answer: Callable[[list[bytes]], list[bytes]]) -> None:
    with closing(FakePeer(answer)) as fake, client(fake.address) as peer:
        assert cause_of(lambda: PAGES.read(peer, 1)) == "protocol"


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" + b"\0" * 8 + b"\x7f" + b"\3"])
def test_one_that_closes_in_the_middle_is_unreachable_at_once(sent: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def hang_up() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.sendall(sent)
                connection.recv(64)
                connection.close()

    thread = threading.Thread(target=hang_up, daemon=True)
    thread.start()
    began_s = time.monotonic()
    with client(f"127.0.0.1:{listener.getsockname()[1]}", timeout_s=patience(60)) as peer:
        assert cause_of(lambda: peer.exists(PAGES.keys[:1])) == "unreachable"
    assert time.monotonic() - began_s < patience(30)
    listener.close()


@pytest.mark.parametrize(
    "parts",
    [[b""], [b"", b"", b""], [b"x" * 16, b"y" * 32, b"z" * 32], [b"x"] * 9],
    ids=["one", "empty", "noise", "nine"],
)
def test_requests_that_make_no_sense_disturb_no_other(server: PeerServer, parts: list[bytes]) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://{server.address}")
        dealer.send_multipart(parts)
        assert dealer.poll(int(TIMEOUT_S * 1000))
        assert len(dealer.recv_multipart()) == 2
    with client(server.address) as peer:
        assert PAGES.read(peer, 1) == [SIZE]


def test_a_web_page_gets_nothing_of_a_peer(server: PeerServer) -> None:
    host, port = server.address.rsplit(":", 1)
    body = b"MSPR" * 20_000
    head = f"POST / HTTP/1.1\r\nHost: {server.address}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port)), patience(30)) as page, suppress(OSError):
        page.sendall(head + body)
        page.shutdown(socket.SHUT_WR)
        assert b"HTTP" not in b"".join(iter(lambda: page.recv(65536), b""))
    with client(server.address) as peer:
        assert PAGES.read(peer, 1) == [SIZE]
    assert server.counts["values"] == 1


def test_an_address_that_cannot_be_bound_is_one_clear_line(server: PeerServer, kept: MemoryBackend) -> None:
    with pytest.raises(BadArgument, match="peer_listen"):
        serving(kept, server.address)


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("part", [0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("work_s", [0.0003, 0.01])
def test_however_much_is_asked_no_more_than_the_share_is_spent(part: float, work_s: float) -> None:
    clock = Clock()
    share = Share(part, burst_s=0.05, clock=clock)
    began_s, spent_s, refused = clock(), 0.0, 0
    for _ in range(20_000):
        if share.allows():
            clock.now_s += work_s
            share.spend(work_s)
            spent_s += work_s
        else:
            clock.now_s += 0.0001  # asked again at once
            refused += 1
        assert spent_s <= part * (clock() - began_s) + 0.05 + work_s
    assert part == 1.0 or refused
    assert spent_s >= 0.9 * part * (clock() - began_s)


@pytest.mark.parametrize("part", [0, -0.1, 1.1])
def test_a_share_is_a_part(part: float) -> None:
    with pytest.raises(BadArgument):
        Share(part)


class TakesTime(Shelf):
    """Gives values while a clock passes."""

    def __init__(self, store: MemoryBackend, clock: Clock) -> None:
        super().__init__(store)
        self.clock = clock

    def copy(self, key: bytes, length: int) -> bytearray | None:
        self.clock.now_s += 0.02
        return super().copy(key, length)


def test_a_server_gives_its_share_and_is_busy_beyond(kept: MemoryBackend) -> None:
    clock = Clock()
    share = Share(0.1, burst_s=0.05, clock=clock)
    server = PeerServer(TakesTime(kept, clock), "127.0.0.1:0", SECRET, share=share, clock=clock)
    with closing(server), client(server.address) as peer:
        assert [PAGES.read(peer, 1)[0] for _ in range(5)] == [SIZE] * 3 + [ABSENT] * 2
        assert peer.exists(PAGES.keys[:1]) == [False]
        assert (server.counts["busy"], peer.counts["busy"]) == (3, 3)
        clock.now_s += 0.2  # of which 0.02 s are for peers
        assert [PAGES.read(peer, 1)[0] for _ in range(2)] == [SIZE, ABSENT]
        assert peer.counts == {"busy": 4}  # it is no fault


def test_no_more_bytes_are_on_their_way_than_allowed(kept: MemoryBackend) -> None:
    with closing(serving(kept, in_flight_bytes=3 * SIZE + 5)) as server, client(server.address) as peer:
        assert PAGES.read(peer, *range(5)) == [SIZE] * 3 + [ABSENT] * 2
        eventually(lambda: PAGES.read(peer, 4) == [SIZE])  # once the others have left
    with closing(serving(kept, in_flight_bytes=SIZE - 1)) as server, client(server.address) as peer:
        assert PAGES.read(peer, 1) == [ABSENT]
        assert peer.counts == {"busy": 1}


def test_64_mebibytes_are_on_their_way_at_most_by_default(server: PeerServer) -> None:
    assert server._room() == 64 << 20


def test_a_connection_has_64_requests_waiting_and_is_given_up_after_five_seconds(server: PeerServer) -> None:
    found = [server._router.getsockopt(each) for each in (zmq.RCVHWM, zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT)]
    assert found == [64, 1000, 5000]
    assert server._router.getsockopt(zmq.MAXMSGSIZE) == 4096 * 40  # keys of 32 bytes, each with a length


@pytest.mark.parametrize(("keys", "taken"), [(4095, True), (4096, True), (4097, False), (100_000, False)])
def test_a_request_has_4096_keys_at_most(keys: int, taken: bool) -> None:
    asked = Request(GET, 1, [bytes(32)] * keys, [1] * keys)
    read = read_request(write_request(asked, key_of(SECRET)), key_of(SECRET))
    assert isinstance(read, Request) == taken


@pytest.mark.parametrize("idle_s", [0.1, 1.0, 1e6])
def test_a_share_saves_up_fifty_milliseconds_however_long_nothing_is_asked(idle_s: float) -> None:
    clock = Clock()
    share = Share(0.5, clock=clock)
    for _ in range(2):
        clock.now_s += idle_s
        assert share.allows()
        share.spend(0.049)
        assert share.allows()
        share.spend(0.002)
        assert not share.allows()
        clock.now_s += 0.0019
        assert not share.allows()
        clock.now_s += 0.0002
        assert share.allows()
        share.spend(0.0001 / 2)


class Silence:
    def send(self, parts: Any) -> None:
        pass

    def close(self) -> None:
        pass


class Silent:
    """Connections on which nothing ever comes; waiting for them takes its time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.waited: list[float] = []

    def open(self, address: str) -> Any:
        return Silence()

    def wait(self, lines: Any, timeout_s: float) -> list[Any]:
        self.waited.append(timeout_s)
        self.clock.now_s += timeout_s
        return []

    def close(self) -> None:
        pass


def test_a_peer_that_says_nothing_is_left_alone_for_five_seconds_after_three_calls_of_a_second() -> None:
    clock = Clock()
    lines = Silent(clock)
    with closing(PeerBackend(["10.0.0.2:7100"], SECRET, clock=clock, lines=lines)) as peer:  # type: ignore[arg-type]
        for _ in range(2):  # with the greeting, three
            assert cause_of(lambda: PAGES.read(peer, 1)) == "timeout"
        assert lines.waited == [1.0] * 3
        for wait_s, tried in ((0.0, 3), (4.9, 3), (0.2, 4), (0.0, 4), (4.9, 4), (0.2, 5), (5000.0, 6)):
            clock.now_s += wait_s
            assert cause_of(lambda: PAGES.read(peer, 1)) in ("timeout", "unreachable")
            assert len(lines.waited) == tried, wait_s


def test_who_has_the_latest_65536_keys_is_known() -> None:
    clock = Clock()
    with closing(PeerBackend([], SECRET, clock=clock, lines=Silent(clock))) as peer:  # type: ignore[arg-type]
        one: Any = SimpleNamespace(gone=False)
        for number in range(1 << 16):
            peer._see(b"%d" % number, one)
        assert peer._candidates(b"0") == [one]
        peer._see(b"0", one)  # a use
        peer._see(b"new", one)
        assert [peer._candidates(key) for key in (b"0", b"1", b"2", b"new")] == [[one], [], [one], [one]]
        assert len(peer._seen) == 1 << 16


def test_names_are_looked_up_every_five_seconds() -> None:
    clock, waited, looked = Clock(), list[float](), list[str]()
    with closing(
        PeerBackend(
            ["dns:engines:7100"],
            SECRET,
            clock=clock,
            resolve=lambda name: looked.append(name) or [],
            lines=Silent(clock),  # type: ignore[arg-type]
        )
    ) as peer:
        ended = peer._end_of_following
        peer._end_of_following = SimpleNamespace(wait=lambda s: waited.append(s) or len(waited) > 2)  # type: ignore[assignment]
        before = len(looked)
        peer._follow()
        assert waited == [5.0] * 3 and len(looked) >= before + 2
        peer._end_of_following = ended


def test_a_request_names_as_many_lengths_as_keys() -> None:
    request = Request(GET, 7, PAGES.keys[:3], [1, 2, 3])
    parts = write_request(request, key_of(SECRET))
    assert read_request(parts, key_of(SECRET)) == request
    for changed in ([parts[0], parts[1][:-1], parts[2]], [parts[0][:-1] + b"\1", *parts[1:]]):
        assert read_request(changed, key_of(SECRET)) == 2  # without the secret nobody can change one


def test_each_request_counts_once_by_what_was_answered() -> None:
    clock = Clock()
    share = Share(0.5, burst_s=1.0, clock=clock)
    responder = Responder(Shelf(MemoryBackend()), SECRET, share, clock)
    asked = Request(EXISTS, 1, [bytes(32)], [])
    for turn in range(1, 4):
        for secret in (SECRET, b"another", None):
            responder.answer(write_request(asked, key_of(secret)) if secret else [b"nothing"], lambda: 0)
        share.spend(2.0)
        responder.answer(write_request(asked, key_of(SECRET)), lambda: 0)
        counts = {name: n for name, n in responder.counts.items() if n}
        assert counts == dict.fromkeys(("answered", "busy", "refused", "malformed"), turn)
        clock.now_s += 10.0

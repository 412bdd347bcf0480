"""`shared+SPEC`: one owner serves a store to any number of clients, whatever becomes of either."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from machine import eventually, patience
from rigs.hand_driven import make_store
from rigs.owners import MIB, Served, end, folder, freeze, is_alive, served
from rigs.stores import Values, WriteOnce, cause_of

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.owner import client as client_module
from mainstem.owner.client import SharedBackend, status
from mainstem.owner.protocol import Channel, Hello, Kind
from mainstem.owner.start import Place, running
from mainstem.storage import open_backend
from mainstem.storage.base import ABSENT, Backend, Limit, Listed
from mainstem.storage.conformance import CASES, Case, run
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.storage.rows import Row
from mainstem.tiers.storage.sealer import HEADER_BYTES
from mainstem.tiers.storage.store import Part, Store

pytestmark = pytest.mark.deadline

VALUES = Values(100_000)
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of this user's sockets, and of a store."""
    with folder() as made:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(made))
        yield made


@pytest.fixture
def own() -> Iterator[Served]:
    with served(MemoryBackend()) as running_one:
        yield running_one


def shared(home: Path, options: str = "host_bytes=64MiB&linger=0") -> Backend:
    return open_backend(f"shared({options})+file:{home}/kv?capacity=256MiB")


def pid_of(home: Path) -> int:
    (path,) = running()
    found = status(path)
    assert found is not None
    return int(found["pid"])


# ---------------------------------------------------------------- the promises of a back end


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("backend", "host_bytes"),
    [(MemoryBackend, 64 * MIB), (MemoryBackend, 3 * MIB), (WriteOnce, 64 * MIB)],
    ids=["roomy", "tight", "first value stays"],
)
def test_a_client_keeps_every_promise(backend: type[MemoryBackend], host_bytes: int, case: Case) -> None:
    with served(backend(), host_bytes) as own:
        result = run(case, own.client)
        assert result.passed, result.reason
        own.owner.held.check()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_client_of_a_process_above_files_keeps_every_promise(case: Case, shared_files: str) -> None:
    result = run(case, lambda: open_backend(shared_files))
    assert result.passed, result.reason


@pytest.fixture(scope="module")
def shared_files() -> Iterator[str]:
    """The spec of an owner that stays for all cases."""
    with folder() as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(made))
        spec = f"shared(host_bytes=64MiB&linger=60)+file:{made}/kv?capacity=256MiB"
        open_backend(spec).close()
        yield spec


def test_a_client_takes_values_as_long_as_the_store_does(own: Served) -> None:
    assert own.client().longest is None
    short = MemoryBackend()
    short.longest = Limit(1000, "its option slot raises that")
    with served(short) as limited:
        store = limited.client()
        assert store.longest == short.longest
        store.close()


def test_exists_and_get_of_a_batch_take_one_round_trip(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    store = own.client()
    VALUES.put(store, *range(30))
    sent: list[Kind] = []
    send = Channel.send

    def note(self: Channel, kind: Kind, body: bytes = b"", descriptor: int | None = None) -> None:
        sent.append(kind)
        send(self, kind, body, descriptor)

    monkeypatch.setattr(Channel, "send", note)
    assert store.exists(VALUES.keys) == [True] * 30 + [False] * 10
    assert sent == [Kind.EXISTS, Kind.BOOLS]
    VALUES.read(store, *range(30))
    assert sent[2:] == [Kind.GET, Kind.PLACES, Kind.RELEASE]
    store.close()


class Lists(MemoryBackend):
    """A store that lists what nobody put: batches of any sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self._sizes = sizes

    def scan(self) -> Iterator[Sequence[Listed]]:
        for number, size in enumerate(self._sizes):
            yield [Listed(bytes([number]) + at.to_bytes(31, "big"), at, float(number)) for at in range(size)]


def test_a_listing_has_batches_of_any_size_and_ends_nothing_else() -> None:
    with served(Lists([0, 5000, 0, 0, 1])) as own:
        store = own.client()
        listing = store.scan()
        found = [*next(listing)]
        VALUES.put(store, 1)
        assert [*store.scan()], "another one at the same time"
        found += [value for batch in listing for value in batch]
        assert [value for value in found if value.age_s is not None] == [*itertools.chain(*own.backend.scan())]
        assert [value.key for value in found if value.age_s is None] == VALUES.keys[1:2], "the host knows no ages"
        store.close()


def test_a_listing_that_is_abandoned_gives_its_connection_back(own: Served) -> None:
    store = own.client()
    VALUES.put(store, *range(3))
    listing = store.scan()
    assert len(next(listing)) == 3
    VALUES.read(store, 0)
    assert own.owner.clients == 2, "the listing has one of its own"
    del listing
    eventually(lambda: own.owner.clients == 1)
    store.close()


class ListsNothing(MemoryBackend):
    """A store that cannot list."""

    scan = Backend.scan


def test_a_store_that_cannot_list_says_so_through_its_owner() -> None:
    with served(ListsNothing()) as own:
        store = own.client()
        VALUES.put(store, 1)
        for _ in range(2):
            with pytest.raises(StorageError, match="ListsNothing cannot list its values") as refused:
                next(iter(store.scan()))
            assert refused.value.cause == "refused"
        store.close()


# ---------------------------------------------------------------- pages of the tiers


def test_altered_bytes_in_shared_memory_are_found_by_the_seal_of_a_page(own: Served) -> None:
    mine = own.client()
    store = make_store(mine)
    row = Row(0, "full", exact=False)
    names = store.sealer.names(store.sealer.root(b""), b"aaaabbbbcccc", 4)
    pages = [memoryview(bytearray(HEADER_BYTES) + bytes([at]) * 5000) for at in range(3)]
    assert store.write([Part(row, names, pages)]).done()
    slots = [memoryview(bytearray(HEADER_BYTES + 5000)) for _ in range(3)]
    assert _read(store, row, names, slots) == 3
    assert [bytes(slot[HEADER_BYTES:]) for slot in slots] == [bytes([at]) * 5000 for at in range(3)]
    own.written()
    (place,) = own.owner.held.get(store.sealer.keys(names[1:2], "full"), [HEADER_BYTES + 5000])
    assert place.value is not None
    mine._memory[1][place.value.offset + HEADER_BYTES + 77] ^= 1  # as any process of this user could
    own.owner.held.release([place.value])
    assert _read(store, row, names, slots) == 1
    assert store.faults == {"altered": 1}
    assert mine.exists(store.sealer.keys(names, "full")) == [True, False, True], "so that an intact one can come"
    store.close(1.0)


def _read(store: Store, row: Row, names: Sequence[bytes], slots: Sequence[memoryview]) -> int:
    call = store.read(row, names, slots)
    assert call.done()
    return call.value


# ---------------------------------------------------------------- clients that die


def use(path: str, call: str, ready: str, fork: bool) -> None:
    """Gets or puts value 0, and stops for ever where its bytes are copied. It may leave a child process."""

    def stop(*_: object) -> None:
        if fork and os.fork() == 0:
            os.setsid()
            Path(f"{ready}.child").write_text(str(os.getpid()))
            signal.pause()
        eventually(lambda: not fork or Path(f"{ready}.child").exists())
        Path(ready).touch()
        signal.pause()

    client_module._copy = stop
    store = SharedBackend("memory:", socket=path)
    (VALUES.read if call == "get" else VALUES.put)(store, 0)


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a child that lives"])
@pytest.mark.parametrize("call", ["get", "put"])
def test_a_client_killed_while_it_copies_ends_what_it_holds(own: Served, tmp_path: Path, call: str, fork: bool) -> None:
    mine = own.client()
    VALUES.put(mine, *range(1, 20))
    if call == "get":
        VALUES.put(mine, 0)
    own.written()
    ready = tmp_path / "ready"
    process = SPAWN.Process(target=use, args=(str(own.path), call, str(ready), fork))
    process.start()
    eventually(ready.exists, 60)
    assert own.owner.status()["pinned"] == 1
    assert mine.exists(VALUES.keys[:1]) == [call == "get"], "a half-written value is visible"
    assert own.owner.clients == 2
    process.kill()
    eventually(lambda: own.owner.status()["pinned"] == 0)
    process.join()
    assert mine.exists(VALUES.keys[:1]) == [call == "get"]
    assert VALUES.read(mine, *range(1, 20)) == [VALUES.size] * 19
    own.owner.held.check()
    if fork:
        end(int(Path(f"{ready}.child").read_text()), signal.SIGKILL)
    mine.close()


def test_a_forked_process_opens_connections_of_its_own(own: Served) -> None:
    store = own.client()
    VALUES.put(store, 0)
    child = multiprocessing.get_context("fork").Process(target=VALUES.read, args=(store, 0))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert VALUES.read(store, 0) == [VALUES.size]
    eventually(lambda: own.owner.clients == 1)
    store.close()


def test_what_many_processes_put_all_of_them_read(home: Path) -> None:
    spec = f"shared(host_bytes=4MiB&linger=30)+file:{home}/kv?capacity=256MiB"
    with SPAWN.Pool(4) as processes:
        pids = processes.starmap(_work, [(spec, number) for number in range(4)])
    assert len(set(pids)) == 1, "there was more than one owner"
    store = open_backend(spec)
    assert VALUES.read(store, *range(40)) == [VALUES.size] * 40
    store.close()


def _work(spec: str, number: int) -> int:
    """Puts ten values, and reads all until they are there. Returns the process of the owner."""
    store = open_backend(spec)
    for at in range(number * 10, number * 10 + 10):
        VALUES.put(store, at)
        VALUES.read(store, *range(40))
    eventually(lambda: ABSENT not in VALUES.read(store, *range(40)), 60)
    (path,) = running()
    found = status(path)
    assert found is not None
    return int(found["pid"])


# ---------------------------------------------------------------- owners that die


def test_an_owner_that_is_killed_is_a_miss_and_the_next_call_starts_another(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = shared(home)
    VALUES.put(store, *range(20))
    first = pid_of(home)
    (path,) = running()
    eventually(lambda: (status(path) or {"queued": 1})["queued"] == 0)
    freeze(first)  # so that the call is under way when it dies
    causes: list[str] = []
    asked = threading.Event()
    send = Channel.send

    def note(self: Channel, kind: Kind, body: bytes = b"", descriptor: int | None = None) -> None:
        send(self, kind, body, descriptor)
        asked.set()

    monkeypatch.setattr(Channel, "send", note)
    call = threading.Thread(target=lambda: causes.append(cause_of(lambda: store.exists(VALUES.keys))))
    call.start()
    assert asked.wait(patience(20))
    end(first, signal.SIGKILL)
    call.join()
    assert causes == ["unreachable"]
    assert VALUES.read(store, *range(20)) == [VALUES.size] * 20, "the store has what was written"
    assert pid_of(home) != first
    store.close()


def test_an_owner_that_died_unnoticed_is_replaced_within_a_call(home: Path) -> None:
    store = shared(home)
    first = pid_of(home)
    end(first, signal.SIGKILL)
    assert VALUES.put(store, 1) == [True]
    assert VALUES.read(store, 1) == [VALUES.size]
    assert pid_of(home) != first
    store.close()


def test_an_owner_that_hangs_is_a_timeout_and_works_again_afterwards(home: Path) -> None:
    store = shared(home, "host_bytes=64MiB&linger=0&timeout=0.2")
    VALUES.put(store, 1)
    pid = pid_of(home)
    freeze(pid)
    assert cause_of(lambda: VALUES.read(store, 1)) == "timeout"
    assert cause_of(lambda: VALUES.read(store, 1)) == "timeout", "a new connection is not answered either"
    os.kill(pid, signal.SIGCONT)

    def works() -> bool:
        try:
            return VALUES.read(store, 1) == [VALUES.size]
        except StorageError:
            return False

    eventually(works)
    store.close()


def test_an_owner_that_is_stopped_writes_what_is_queued(home: Path) -> None:
    store = shared(home)
    VALUES.put(store, *range(40))
    pid = pid_of(home)
    end(pid)
    store.close()
    direct = open_backend(f"file:{home}/kv?capacity=256MiB")
    assert VALUES.read(direct, *range(40)) == [VALUES.size] * 40
    direct.close()
    assert list(running()) == [], "its socket is gone"


class Slow(MemoryBackend):
    """Stores nothing before `go`, and counts what it has when it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.had = -1

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        assert self.go.wait(patience(60))
        return super().put(keys, buffers)

    def close(self) -> None:
        self.had = len(self._values)
        super().close()


def test_an_owner_that_is_stopped_waits_for_a_slow_store() -> None:
    backend = Slow()
    with served(backend) as own:
        store = own.client()
        VALUES.put(store, *range(40))
        own.owner.stop()
        eventually(lambda: not own.path.exists() and not own.owner.clients)
        assert own.thread.is_alive() and backend.had == -1
        backend.go.set()
        own.thread.join(patience(60))
        assert backend.had == 40
        store.close()


def test_an_owner_leaves_after_its_last_client(home: Path) -> None:
    one, two = shared(home), shared(home)
    pid = pid_of(home)
    one.close()
    assert VALUES.put(two, 1) == [True]
    assert is_alive(pid)
    two.close()
    eventually(lambda: not is_alive(pid), 60)
    assert open_backend(f"file:{home}/kv").exists(VALUES.keys[1:2]) == [True]


def test_an_owner_lingers_for_as_long_as_it_should() -> None:
    now = [100.0]
    with served(MemoryBackend(), linger_s=30, clock=lambda: now[0]) as own:
        store = own.client()
        now[0] += 1000
        assert not own.owner.lingered(), "it has a client"
        store.close()
        eventually(lambda: not own.owner.clients)
        now[0] += 29
        assert not own.owner.lingered()
        another = own.client()
        now[0] += 1000
        another.close()
        eventually(lambda: not own.owner.clients)
        now[0] += 29
        assert not own.owner.lingered(), "the time begins anew"
        assert status(own.path) is not None, "who asks for its status is no client"
        now[0] += 1
        assert own.owner.lingered()
        status(own.path)  # wakes it
        own.thread.join(patience(20))
        assert not own.thread.is_alive()
        assert not own.path.exists()


def test_an_owner_waits_for_its_first_client() -> None:
    now = [0.0]
    with served(MemoryBackend(), linger_s=0, clock=lambda: now[0]) as own:
        now[0] += 9
        assert not own.owner.lingered()
        now[0] += 1
        assert own.owner.lingered()


# ---------------------------------------------------------------- who is served


def test_processes_that_start_at_once_get_one_owner(home: Path) -> None:
    with SPAWN.Pool(4) as processes:
        pids = processes.map(_open_and_ask, [f"shared(linger=30)+file:{home}/kv"] * 4, chunksize=1)
    assert len(pids) == 4 and len(set(pids)) == 1


def _open_and_ask(spec: str) -> int:
    store = open_backend(spec)
    (path,) = running()
    found = status(path)
    store.close()
    assert found is not None
    return int(found["pid"])


def test_another_user_is_refused() -> None:
    with served(MemoryBackend(), uid_of=lambda _: os.getuid() + 1) as own:
        with pytest.raises(BackendUnavailable, match=f"it serves user {os.getuid()}, not user {os.getuid() + 1}"):
            own.client()
        assert own.owner.clients == 0


def test_an_owner_of_another_user_is_not_used(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "peer_uid", lambda _: 12345)
    with pytest.raises(BackendUnavailable, match="is served by user 12345"):
        own.client()


def test_another_version_is_refused(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "VERSION", 7)
    with pytest.raises(BackendUnavailable, match="it speaks version 2 of the protocol, the client version 7"):
        own.client()


def test_another_store_and_another_size_are_refused(own: Served) -> None:
    with pytest.raises(BackendUnavailable, match=r"it serves memory:, not memory:\?capacity=1GiB"):
        SharedBackend("memory:?capacity=1GiB", socket=str(own.path))
    with pytest.raises(BackendUnavailable, match=f"its host tier has {64 * MIB} bytes, not {MIB}"):
        own.client(host_bytes=MIB)
    own.client(host_bytes=64 * MIB).close()


def test_a_refused_client_says_so_in_a_call_too(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    store = own.client()
    store.exists(VALUES.keys)
    monkeypatch.setattr(store, "_hello", Hello(9, 0, "memory:"))
    for connection in list(store._idle):
        connection.channel.cut()
    assert cause_of(lambda: store.exists(VALUES.keys)) == "unreachable"
    store.close()


def test_a_store_that_cannot_be_opened_is_one_clear_error(home: Path) -> None:
    direct = open_backend(f"file:{home}/kv")
    with pytest.raises(BackendUnavailable, match=r"cannot be started: .*lock"):
        open_backend(f"shared+file:{home}/kv")
    direct.close()
    with pytest.raises(BackendUnavailable, match=r"cannot be started: .*no-such-option"):
        open_backend(f"shared+file:{home}/kv?no-such-option=1")
    for wrong in ("host_bytes=0", "host_bytes=many", "linger=-1", "timeout=0", "colour=red"):
        with pytest.raises(BadArgument):
            open_backend(f"shared({wrong})+file:{home}/kv")
    with pytest.raises(BadArgument, match="at most 107 bytes"):
        open_backend(f"shared(socket={home}/{'x' * 100})+memory:")
    assert list(running()) == []


def test_the_arguments_of_an_owner_that_a_client_starts_do_not_show_the_spec(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[str] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, arguments: Sequence[str], *others: Any, **options: Any) -> None:
            commands.append(" ".join(arguments))
            super().__init__(arguments, *others, **options)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    store = shared(home)
    (command,) = commands
    running_one = Path(f"/proc/{pid_of(home)}/cmdline").read_text()
    assert "mainstem.owner" in command and "mainstem.owner" in running_one
    assert "file:" not in command and "file:" not in running_one
    store.close()


def test_a_look_starts_no_owner(home: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"has no owner: name the store without shared\+"):
        open_backend(f"shared+file:{home}/kv", existing=True)
    assert list(running()) == [] and not (home / "kv").exists()


def test_a_folder_that_others_can_open_is_refused(home: Path) -> None:
    (home / "mainstem").mkdir(mode=0o755)
    with pytest.raises(BackendUnavailable, match="must be this user's alone"):
        open_backend("shared+memory:")
    with pytest.raises(BackendUnavailable, match="No such file"):
        open_backend(f"shared(socket={home}/none/kv.sock)+memory:")


def test_without_linux_there_is_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(BackendUnavailable, match="need Linux"):
        open_backend("shared+memory:")


def test_a_folder_has_one_owner_however_it_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "link").symlink_to(home)
    monkeypatch.chdir(home)
    specs = ["file:kv?sync=none", "file:./kv?sync=none", f"file:{home}/link/kv?sync=none"]
    stores = [open_backend(f"shared(linger=0)+{spec}") for spec in specs]
    assert len(list(running())) == 1
    for store in stores:
        store.close()
    assert Place.of("tee+file:a,file:b").spec == f"tee+file:{home}/a,file:{home}/b"
    assert Place.of("readonly+file:a?x=1").spec == f"readonly+file:{home}/a?x=1"
    assert Place.of("redis://a/0").spec == "redis://a/0"

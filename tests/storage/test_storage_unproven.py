"""Back ends that never met their real service, over doubles of its client: promises, specs, frames, faults.

What every one of them must do is a test over all doubles, of which a new one needs no line here. Below that is what a
client does differently.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doubles import stores
from doubles.stores import eic, hf3fs, infinistore, simm
from machine import patience
from rigs.stores import Values, cause_of

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.storage.base import ABSENT, Backend, BackendStats, open_backend
from mainstem.storage.conformance import CASES, Case, make_value, run
from mainstem.storage.framed import ClientThread, Frames, Remembered
from mainstem.storage.unproven.hf3fs import HF3FSBackend
from mainstem.storage.unproven.simm import LONGEST

pytestmark = pytest.mark.deadline
DOUBLES = stores.load()
HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture
def double(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A double in place of its client."""
    found = request.param
    if found is simm and not HAS_TORCH:
        pytest.skip("SiMM's client works on tensors")
    package, _, inner = found.PACKAGE.partition(".")
    if inner:
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, found.PACKAGE, found)
    found.service.reset()
    yield found
    found.service.down, found.service.frozen = False, None


def over(*doubles: ModuleType) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("double", doubles, ids=lambda each: each.__name__.split(".")[-1], indirect=True)


every = over(*DOUBLES.values())
framed = over(*(module for module in DOUBLES.values() if hasattr(module, "FRAMED")))


def spec_of(double: Any, folder: Path | str = "", **options: object) -> str:
    joined = "&".join(f"{name}={value}" for name, value in options.items())
    return double.SPEC.format(folder=folder) + ("&" if "?" in double.SPEC else "?") + joined


class Rig:
    """A framed back end over a double, and values for it."""

    def __init__(self, double: Any) -> None:
        self.form: stores.Framed = double.FRAMED
        self.service: stores.Service = double.service
        self.store = open_backend(spec_of(double, staging=self.form.room, timeout=f"{patience(0.2)}s"))
        values = Values(self.form.size)
        self.keys, self.size, self.name = values.keys, values.size, values.name
        self.put: Callable[..., list[bool]] = lambda *numbers: values.put(self.store, *numbers)
        self.read: Callable[..., list[int]] = lambda *numbers: values.read(self.store, *numbers)


@pytest.fixture
def rig(double: Any) -> Iterator[Rig]:
    made = Rig(double)
    yield made
    made.service.down, made.service.frozen = False, None
    made.store.close()


# ---------------------------------------------------------------- every one


@every
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance(case: Case, double: Any, tmp_path: Path) -> None:
    options = {"staging": "12MiB"} if hasattr(double, "FRAMED") else {}
    result = run(case, lambda: open_backend(spec_of(double, tmp_path, **options)))
    assert result.passed, result.reason


@every
def test_a_spec_that_is_wrong_is_refused_and_a_second_close_does_nothing(double: Any, tmp_path: Path) -> None:
    opened = open_backend(spec_of(double, tmp_path, timeout="1s"))
    opened.close()
    opened.close()
    for bad in double.BAD:
        with pytest.raises(BadArgument):
            open_backend(bad.format(folder=tmp_path))


@every
def test_a_client_that_is_missing_or_broken_is_named(
    double: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = double.PACKAGE.partition(".")[0]
    for error, said in (
        (ModuleNotFoundError(name=package), rf"{package} needs "),
        (ImportError("cannot import name 'x'", name=package), rf"{package} cannot be imported: cannot import name 'x'"),
    ):
        monkeypatch.setattr("importlib.import_module", _failing(double.PACKAGE, error))
        with pytest.raises(BackendUnavailable, match=said.replace("hf3fs_fuse needs", "hf3fs needs")):
            open_backend(spec_of(double, tmp_path))


def _failing(module: str, error: ImportError, real: Callable[..., Any] = importlib.import_module) -> Callable[..., Any]:
    def import_module(name: str) -> Any:
        if name == module:
            raise error
        return real(name)

    return import_module


# ---------------------------------------------------------------- those that move values through frames


@framed
def test_names_are_hex_in_one_namespace_over_one_registered_region(rig: Rig) -> None:
    rig.put(0)
    assert list(rig.service.values) == [rig.name(0)] and len(rig.service.values[rig.name(0)]) == 8 + rig.size
    assert [size for _, size in rig.service.regions] == [rig.form.room]
    assert rig.store.stats() == BackendStats()


@framed
def test_a_miss_in_the_middle_shifts_nothing(rig: Rig) -> None:
    rig.put(0, 1, 3, 4, 6)
    assert rig.read(*range(7)) == [ABSENT if at in (2, 5) else rig.size for at in range(7)]
    assert rig.store.exists(rig.keys[:7]) == [at in (0, 1, 3, 4, 6) for at in range(7)]
    if rig.form.failed is not None:
        rig.service.codes = {rig.name(3): rig.form.failed}
        assert rig.read(*range(7)) == [ABSENT if at in (2, 3, 5) else rig.size for at in range(7)]
        assert rig.put(7, 3, 8) == [True, False, True]


@framed
def test_a_value_of_another_length_says_its_own_and_brings_no_bytes_after_it(rig: Rig) -> None:
    rig.store.put(rig.keys[:2], [make_value(rig.keys[0], 100), make_value(rig.keys[1], rig.size + 100)])
    rig.put(2)
    assert rig.read(0, 1, 2, 3) == [100, rig.size + 100, rig.size, ABSENT]
    assert rig.read(1, 0) == [rig.size + 100, 100]
    lengths = rig.store.get(rig.keys[:4], [memoryview(bytearray(1))] * 4)
    assert lengths == [100, rig.size + 100, rig.size, ABSENT]


@framed
def test_old_content_of_the_memory_is_no_value(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.put(0, 1)
    monkeypatch.setattr(*rig.form.reads)
    assert rig.read(0, 1) == [ABSENT, ABSENT]


@framed
def test_a_value_longer_than_it_takes_is_refused(rig: Rig) -> None:
    limit = rig.store.longest
    assert limit is not None and limit.size == min(rig.form.room, LONGEST) - 8 and "option" in limit.remedy
    long, buffer = memoryview(bytearray(limit.size + 1)), memoryview(bytearray(rig.size))
    assert rig.store.put(rig.keys[:2], [long, make_value(rig.keys[1], rig.size)]) == [False, True]
    assert rig.store.get(rig.keys[:2], [long, buffer]) == [ABSENT, rig.size]
    assert buffer == make_value(rig.keys[1], rig.size)


@framed
def test_a_batch_longer_than_the_memory_takes_several_rounds(rig: Rig) -> None:
    assert rig.put(*range(40)) == [True] * 40 and rig.read(*range(40)) == [rig.size] * 40
    assert 1 < max(rig.service.batches) < 40


@framed
def test_a_stuck_service_is_a_timeout_and_a_late_end_does_not_touch_the_caller(rig: Rig) -> None:
    rig.put(0)
    rig.service.frozen = release = threading.Event()
    buffer = memoryview(bytearray(rig.size))
    for call in (
        lambda: rig.store.get([rig.keys[0]], [buffer]),
        lambda: rig.put(1),
        lambda: rig.store.exists(rig.keys),
    ):
        with pytest.raises(StorageError, match=r"timeout: .*: no answer in"):
            call()
    rig.service.frozen = None
    release.set()
    assert rig.read(0) == [rig.size]
    assert buffer == bytes(rig.size)


@framed
def test_a_service_that_died_is_found_again_when_it_is_back(rig: Rig) -> None:
    rig.put(0)
    rig.service.down = True
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: rig.read(0),
        "exists": lambda: rig.store.exists(rig.keys),
        "put": lambda: rig.put(1),
        "delete": lambda: rig.store.delete(rig.keys[2:]),
        "clear": rig.store.clear,
    }
    for name, call in calls.items():
        if name in rig.form.silent:
            assert name != "exists" or not any(rig.store.exists(rig.keys))
        else:
            with pytest.raises(StorageError):
                call()
    rig.service.down = False
    assert rig.read(0) == [rig.size]


@framed
def test_clear_leaves_what_others_put(rig: Rig) -> None:
    rig.service.values[rig.name(9)] = b"x"
    rig.put(0, 1)
    rig.store.clear()
    assert list(rig.service.values) == [rig.name(9)]


@framed
def test_delete_says_when_a_value_is_still_there(rig: Rig) -> None:
    rig.put(0, 1)
    rig.service.deletes = not rig.form.checks_deletes
    if rig.form.checks_deletes:
        assert "still has 2 of 3" in _why(lambda: rig.store.delete([*rig.keys[:2], rig.keys[9]]))
        assert "still has 2" in _why(rig.store.clear)
        rig.service.deletes = True
    rig.store.clear()
    assert not rig.service.values


def _why(call: Callable[[], object]) -> str:
    with pytest.raises(StorageError) as caught:
        call()
    return str(caught.value)


@framed
def test_memory_that_cannot_be_registered_and_an_empty_place_are_named(double: Any) -> None:
    double.service.registers = False
    with pytest.raises(BackendUnavailable, match=r"10\.0\.0\.1:.*regist"):
        open_backend(double.SPEC)


# ---------------------------------------------------------------- what a client was told, and does differently


@pytest.mark.parametrize(
    ("double", "options", "told"),
    [
        (
            eic,
            "&namespace=n&transport=1&log_dir=/logs&flag_file=/f&ttl=60",
            {"instance": "kv-1", "endpoint": "10.0.0.1:7000", "log_dir": "/logs", "flag_file": "/f", "ttl": 60}
            | {"transport_type": eic.TransportType.TRANSPORT_TCP, "namespace": "n"},
        ),
        (
            infinistore,
            "?device=mlx5_3&link=IB&namespace=n",
            {"host_addr": "10.0.0.1", "service_port": 12345, "dev_name": "mlx5_3", "link_type": "IB"},
        ),
        (
            simm,
            "?namespace=n&threads=3",
            dict(zip(simm.FLAGS, ("10.0.0.1", "30001", "3", "250"), strict=True)),
        ),
    ],
    ids=["eic", "infinistore", "simm"],
    indirect=["double"],
)
def test_the_options_reach_the_client(double: Any, options: str, told: dict[str, Any]) -> None:
    key = bytes(32)
    with closing(open_backend(f"{double.SPEC}{options}&staging=8MiB&timeout=0.25")) as store:
        store.put([key], [make_value(key, 100)])
        assert [size for _, size in double.service.regions] == [8 << 20]
        assert list(double.service.values) == [f"n/{key.hex()}"]
    assert told.items() <= double.service.told.items()


@over(eic)
def test_a_value_that_fails_is_read_again_alone_until_one_fails_again(rig: Rig) -> None:
    """The code of a value that is longer than its buffer is not known, so any code may mean that."""
    rig.put(*range(5))
    rig.store.put(rig.keys[5:7], [make_value(key, rig.size + 1) for key in rig.keys[5:7]])
    rig.service.codes = {rig.name(1): eic.StatusCode.RPC_ERROR}
    rig.service.batches.clear()
    assert rig.read(5, 6, 0, 9) == [rig.size + 1, rig.size + 1, rig.size, ABSENT] and rig.service.batches == [4, 1, 1]
    assert rig.read(5, 0, 1, 6) == [rig.size + 1, rig.size, ABSENT, ABSENT] and rig.service.batches[3:] == [4, 1, 1]
    assert "mget of 1 values: StatusCode.RPC_ERROR" in _why(lambda: rig.read(1))


@over(eic)
def test_a_call_without_statuses_of_values_counts_as_a_whole(rig: Rig) -> None:
    rig.put(0, 1)
    rig.service.told["terse"] = True
    assert rig.put(2) == [True] and rig.read(0, 1) == [rig.size] * 2 and all(rig.store.exists(rig.keys[:3]))
    assert "PARTIAL_FAILED" in _why(lambda: rig.read(0, 9))


@over(infinistore)
def test_values_of_one_length_move_together_and_a_miss_costs_single_reads(rig: Rig) -> None:
    rig.put(*range(10))
    rig.read(*range(10))
    assert rig.service.batches == [10, 10]
    assert rig.read(0, 20, 1) == [rig.size, ABSENT, rig.size] and rig.service.batches[2:] == [3, 1, 1, 1]


@over(infinistore)
def test_exists_sees_a_gap_that_the_search_of_the_server_misses(rig: Rig) -> None:
    rig.put(0, 2, 3, 4, 5, 6)
    names = [rig.name(number) for number in range(7)]
    config = infinistore.ClientConfig(connection_type="RDMA", host_addr="a", service_port=1)
    assert infinistore.InfinityConnection(config).get_match_last_index(names) == 6
    assert rig.store.exists(rig.keys[:7]) == [at != 1 for at in range(7)]


@over(infinistore)
def test_a_foreign_value_under_a_name_is_no_value_and_another_code_is_an_error(rig: Rig) -> None:
    rig.service.values |= {rig.name(0): bytes(8 + rig.size), rig.name(1): b"\xff" * 20}
    assert rig.size not in rig.read(0, 1)
    rig.service.codes = {"": 503}
    assert "ret = 503" in _why(lambda: rig.read(0))


@over(infinistore)
def test_a_full_server_refuses_and_keeps_what_it_has(rig: Rig) -> None:
    rig.service.capacity = 2 * rig.size + 200
    assert rig.put(0, 1) == [True, True] and rig.put(2, 3) == [False, False]
    assert rig.store.put(rig.keys[4:6], [make_value(rig.keys[4], 50), make_value(rig.keys[5], rig.size)]) == [
        True,
        False,
    ]
    assert rig.read(0, 1) == [rig.size] * 2


@over(simm)
def test_a_full_cluster_drops_the_oldest_and_refuses_what_never_fits(rig: Rig) -> None:
    rig.service.capacity = 3 * (rig.size + 8)
    assert rig.put(0, 1, 2, 3) == [True] * 4
    assert rig.store.exists(rig.keys[:4]) == [False, True, True, True]
    sizes = (LONGEST + 1, rig.service.capacity, 100)
    assert rig.store.put(rig.keys[5:8], [memoryview(bytearray(size)) for size in sizes]) == [False, False, True]


@over(simm)
@pytest.mark.parametrize(("code", "cause"), [(-1002, "timeout"), (-2300, "unreachable"), (-2002, "unreachable")])
def test_when_no_value_has_a_known_result_the_code_says_why(rig: Rig, code: int, cause: str) -> None:
    rig.put(0, 1)
    rig.service.told["code"], rig.service.down = code, True
    assert cause_of(lambda: rig.read(0, 1)) == cause_of(lambda: rig.put(2)) == cause


@over(simm)
def test_a_value_as_long_as_can_be_touches_no_other(rig: Rig) -> None:
    long = make_value(rig.keys[1], LONGEST - 8)
    assert rig.put(0) == [True] and rig.store.put([rig.keys[1]], [long]) == [True] and rig.put(2, 3) == [True, True]
    assert rig.read(0, 1, 2, 3) == [rig.size, LONGEST - 8, rig.size, rig.size]
    whole = memoryview(bytearray(LONGEST - 8))
    assert rig.store.get([rig.keys[1]], [whole]) == [len(whole)] and whole == long


@over(simm)
def test_a_client_without_a_flag_is_refused_and_a_closed_one_has_no_memory(rig: Rig) -> None:
    rig.store.close()
    assert not rig.service.regions
    rig.service.told["flags"] = ()
    with pytest.raises(BackendUnavailable, match="no flag cm_primary_node_ip"):
        open_backend(simm.SPEC)


# ---------------------------------------------------------------- 3FS: rings

PIECE = 4096
VALUES = Values(3 * PIECE)


@pytest.fixture
def ring_store(double: Any, tmp_path: Path) -> Iterator[Backend]:
    opened = HF3FSBackend(tmp_path / "rank0", 1 << 20, PIECE, 4, timeout_s=patience(0.1))
    yield opened
    opened.close()


@over(hf3fs)
def test_a_ring_never_gets_more_than_its_entries(ring_store: Backend, double: Any) -> None:
    VALUES.put(ring_store, 0, 1, 2)
    assert double.service.batches == [4, 4, 1]
    assert VALUES.read(ring_store, 2, 0, 9, 1) == [VALUES.size, VALUES.size, ABSENT, VALUES.size]
    assert double.service.rings == 2


@over(hf3fs)
def test_a_short_or_failed_piece_is_read_again_or_an_error(ring_store: Backend, double: Any) -> None:
    mount = double.service
    VALUES.put(ring_store, 0)
    for result in (100, 0, -errno.EIO):  # of the second piece, which is the first one of the next try
        mount.fail = {mount.pieces + 1: result}
        assert VALUES.read(ring_store, 0) == [VALUES.size]
    mount.fail = {mount.pieces: -errno.EIO}
    assert cause_of(lambda: VALUES.read(ring_store, 0)) == "io"
    assert VALUES.read(ring_store, 0) == [VALUES.size]


@over(hf3fs)
def test_a_write_without_room_is_full_and_is_there_after_the_next(ring_store: Backend, double: Any) -> None:
    double.service.fail = {double.service.pieces: -errno.ENOSPC}
    assert cause_of(lambda: VALUES.put(ring_store, 0)) == "full"
    assert VALUES.put(ring_store, 0) == [True] and VALUES.read(ring_store, 0) == [VALUES.size]


@over(hf3fs)
def test_a_stuck_ring_is_abandoned_with_its_memory(ring_store: Backend, double: Any) -> None:
    mount = double.service
    VALUES.put(ring_store, 0, 1)
    mount.frozen = threading.Event()
    for call in (lambda: VALUES.put(ring_store, 2, 3), lambda: VALUES.read(ring_store, 0, 1)):
        assert cause_of(call) == "timeout"
    mount.frozen, rings = None, mount.rings
    assert all(VALUES.put(ring_store, *range(2, 8)))
    for _, fd, offset, _ in mount.late[:1]:  # a stuck write ends now, over what was written there since
        os.pwrite(fd, b"\xee" * PIECE, offset)
    assert mount.rings == rings + 1, "the old ring is not reused"
    assert sorted(VALUES.read(ring_store, *range(8))).count(ABSENT) <= 1


@over(hf3fs)
def test_what_was_stored_is_there_after_a_restart_with_the_size_that_it_has(double: Any, tmp_path: Path) -> None:
    where = f"hf3fs:{tmp_path}/rank0"
    with closing(open_backend(f"{where}?capacity=1MiB&slot=4KiB")) as store:
        VALUES.put(store, *range(20))
    assert not double.service.registered, "the file is deregistered before it is closed"
    with closing(open_backend(f"{where}?capacity=64KiB&slot=4KiB", existing=True)) as store:
        assert VALUES.read(store, *range(20)) == [VALUES.size] * 20
    with pytest.raises(BackendUnavailable, match="there is no store"):
        open_backend(f"hf3fs:{tmp_path}/rank1", existing=True)


@over(hf3fs)
def test_a_file_that_cannot_be_registered_is_closed(
    double: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EHOSTUNREACH, "no agent")

    with monkeypatch.context() as patch:
        patch.setattr(double, "register_fd", refuse)
        with pytest.raises(BackendUnavailable, match="no agent"):
            HF3FSBackend(tmp_path / "rank0")
    HF3FSBackend(tmp_path / "rank0").close()
    double.service.path = "/mnt"
    with pytest.raises(BackendUnavailable, match="on no 3FS mount"):
        HF3FSBackend(tmp_path / "rank0")


# ---------------------------------------------------------------- parts


def test_a_client_thread_passes_answers_and_errors_on() -> None:
    thread = ClientThread("a client")
    ended: list[bool] = []

    async def answer() -> int:
        return 3

    async def fail(error: Exception) -> int:
        raise error

    async def end() -> None:
        ended.append(True)
        raise KeyError("a client whose service is gone")

    assert thread.run(answer(), 5) == 3
    with pytest.raises(StorageError, match="full: no room"):
        thread.run(fail(StorageError("full", "no room")), 5)
    with pytest.raises(StorageError, match="unreachable: a client: KeyError: 'x'"):
        thread.run(fail(KeyError("x")), 5)
    thread.end(end()).result(patience(5))
    assert ended


@pytest.mark.parametrize(("size", "longest"), [(1 << 16, 0), (1 << 16, 1 << 14)])
def test_frames_of_a_round_do_not_touch(size: int, longest: int) -> None:
    frames = Frames(size, longest)
    keys = VALUES.keys[:12]
    rounds = list(frames.rounds(keys, [make_value(key, 1 + 997 * number) for number, key in enumerate(keys)]))
    assert sum(map(len, rounds)) == 12 and len(rounds) > 1
    for round_ in rounds:
        frames.fill(round_)
        assert round_[-1].start + round_[-1].size <= size - longest
        empty = [frame._replace(buffer=memoryview(bytearray(len(frame.buffer)))) for frame in round_]
        assert [frames.take(frame) for frame in empty] == [len(frame.buffer) for frame in round_]
        assert [frame.buffer for frame in empty] == [frame.buffer for frame in round_]
        frames.blank(round_)
        assert [frames.take(frame) for frame in empty] == [ABSENT] * len(round_)


def test_clear_deletes_what_was_put_once_and_says_when_it_forgot_some() -> None:
    keys, deleted = VALUES.keys, list[list[bytes]]()
    put_keys = Remembered(limit=3)
    put_keys.add(keys[:2])
    put_keys.discard(keys[:1])  # makes room
    put_keys.add(keys[2:4])
    put_keys.clear(deleted.append)
    put_keys.clear(deleted.append)
    put_keys.add(keys[:5])
    with pytest.raises(StorageError, match="refused: more than 3 keys"):
        put_keys.clear(deleted.append)
    assert deleted == [keys[1:4], [], keys[2:5]]

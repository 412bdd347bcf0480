"""Host memory: pages of every kind are copied to the host and back bit by bit, layer by layer, in any layout."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from machine import patience

from mainstem.errors import BadArgument, StorageError
from mainstem.here import Memory, machine_memory
from mainstem.runtime.memory import copies
from mainstem.runtime.memory.host import SLOT_ALIGNMENT, HostLayout, HostPool, Planes, host_pages
from mainstem.runtime.memory.kv import KVPool, KVShape
from mainstem.settings.engine import HostSize
from mainstem.tiers.host.transfer import HostMemory, Move
from mainstem.tiers.storage.sealer import HEADER_BYTES

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]
LAYOUTS: list[HostLayout] = ["page_first", "layer_first"]
HOST_PAGES = 11

# Shapes of the planes of each component, [layers, pages, ...], and the model's layers of the component.
KINDS: dict[str, list[tuple[list[tuple[int, ...]], tuple[int, ...] | None]]] = {
    "MHA": [([(3, 7, 4, 8, 16)] * 2, None)],
    "GQA": [([(3, 7, 4, 2, 16)] * 2, None)],
    "MLA": [([(3, 7, 4, 36)], None)],
    "window": [([(2, 7, 4, 2, 16)] * 2, (1, 3)), ([(2, 5, 4, 2, 16)] * 2, (0, 2))],
    "state": [([(1, 7, 4, 2, 16)] * 2, (2,)), ([(2, 4, 12, 3), (2, 4, 2, 8, 8)], (0, 1))],
    "odd": [([(2, 7, 3, 1, 5), (2, 7, 1)], None)],
}


class Steps:
    """Runs the copies of a pool, one layer per call."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()

    def __call__(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def step(self) -> None:
        self.waiting.popleft()()

    def all(self) -> None:
        while self.waiting:
            self.step()


def noise(shape: Sequence[int], dtype: torch.dtype, seed: int, device: str = "cpu") -> torch.Tensor:
    """All bit patterns, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 256, (int(np.prod(shape)) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return numbers.view(dtype).reshape(tuple(shape)).to(device)


def components(kind: str, dtype: torch.dtype, device: str = "cpu") -> list[Planes]:
    """A state's second tensor is kept in float32, whatever the first one's type."""
    rows = []
    for row, (shapes, layers) in enumerate(KINDS[kind]):
        wide = kind == "state" and row == 1
        types = [torch.float32 if wide and at else dtype for at in range(len(shapes))]
        tensors = (
            noise(shape, t, 10 * row + at, device) for at, (shape, t) in enumerate(zip(shapes, types, strict=True))
        )
        rows.append(Planes(tuple(tensors), layers))
    return rows


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().flatten().view(torch.uint8)


def kept(rows: Sequence[Planes]) -> list[list[torch.Tensor]]:
    return [[tensor.clone() for tensor in planes.tensors] for planes in rows]


def scramble(rows: Sequence[Planes]) -> None:
    for planes in rows:
        for tensor in planes.tensors:
            tensor.copy_(noise(tensor.shape, tensor.dtype, 99))


def ids(*page_ids: int) -> Any:
    return np.array(page_ids, dtype=np.int32)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(bits(left), bits(right))


def round_trip(rows: list[Planes], layout: HostLayout, run: Any = None) -> None:
    """Copies every page to the host, overwrites the device, and copies some pages back to other ids."""
    pool = HostPool(rows, [HOST_PAGES] * len(rows), layout, run=run)
    before, orders = kept(rows), [np.random.default_rng(c).permutation(p.pages) for c, p in enumerate(rows)]
    down = [Move(c, order.astype(np.int32), ids(*range(2, 2 + len(order)))) for c, order in enumerate(orders)]
    ticket = pool.down(down)
    ticket.wait()
    assert ticket.done()
    assert ticket.error is None
    scramble(rows)
    scrambled = kept(rows)
    up = [Move(c, ids(*range(2, 1 + len(order))), ids(*range(len(order) - 1))) for c, order in enumerate(orders)]
    back = pool.up(up)
    back.wait_layer(max(layer for planes in rows for layer in planes.model_layers))
    back.wait()
    assert back.error is None
    for planes, old, other, order in zip(rows, before, scrambled, orders, strict=True):
        for tensor, first, second in zip(planes.tensors, old, other, strict=True):
            assert same(tensor[:, :-1], first[:, order[:-1]])
            assert same(tensor[:, -1], second[:, -1])  # it was not copied back
    pool.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_go_down_and_come_back(kind: str, dtype: torch.dtype, layout: HostLayout) -> None:
    round_trip(components(kind, dtype), layout)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_go_down_and_come_back_on_a_gpu(kind: str, layout: HostLayout) -> None:
    for dtype in DTYPES:
        round_trip(components(kind, dtype, "cuda"), layout)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_a_stream_waits_for_its_layer_and_a_copy_for_the_stream() -> None:
    """`down` copies what was queued just before, and work queued just after `wait_layer` sees what `up` copied."""
    plane = torch.zeros(4, 64, 1 << 16, device="cuda")
    pool = HostPool([Planes((plane,))], [64])
    page_ids = ids(*range(64))
    big = torch.randn(4096, 4096, device="cuda")
    for value in (1.0, 2.0):
        for _ in range(20):
            big = (big @ big).clamp_(-1, 1)  # keeps the stream busy
        plane.fill_(value)
        down = pool.down([Move(0, page_ids, page_ids)])
        down.wait()
        plane.fill_(-1)
        up = pool.up([Move(0, page_ids, page_ids)])
        sums = []
        for layer in range(4):
            up.wait_layer(layer)
            sums.append(plane[layer].sum())
        assert [float(s) for s in sums] == [value * plane[0].numel()] * 4
        up.wait()
        assert up.done()
    pool.close()


def test_it_is_a_host_memory_for_the_pool_of_a_model() -> None:
    kv = KVPool(KVShape(layers=3, kv_heads=2, head_dim=8, value_dim=8), pages=5, page_size=4, dtype=torch.bfloat16)
    pool: HostMemory = HostPool([Planes((kv.k, kv.v))], [9], storage=True)
    assert pool.pages == 9
    assert pool.payload_bytes(0) == 2 * 3 * 4 * 2 * 8 * 2
    assert HostPool([Planes((kv.k, kv.v))], [9]).content == "page_first/v1 bfloat16[3, 4, 2, 8] bfloat16[3, 4, 2, 8]"


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.mark.parametrize(
    ("shape", "content"),
    [
        (KVShape(3, 2, head_dim=24, value_dim=16), "float32[3, 4, 2, 24] float32[3, 4, 2, 16]"),
        (KVShape(3, 1, head_dim=40, value_dim=32, latent=True), "float32[3, 4, 1, 40]"),
    ],
    ids=["values of their own size", "latent"],
)
def test_keys_and_values_of_any_sizes_go_to_the_host_and_back(shape: KVShape, content: str, steps: Steps) -> None:
    kv = KVPool(shape, pages=5, page_size=4, dtype=torch.float32)
    for plane in kv.planes:
        plane.normal_()
    before = [plane.clone() for plane in kv.planes]
    pool = HostPool([Planes(kv.planes)], [2], storage=True, run=steps)
    assert pool.payload_bytes(0) == shape.bytes_per_page(4, torch.float32)
    assert pool.content == f"page_first/v1 {content}"
    pool.down([Move(0, ids(4, 2), ids(0, 1))])
    steps.all()
    for plane in kv.planes:
        plane.fill_(-1)
    pool.up([Move(0, ids(0, 1), ids(3, 0))])
    steps.all()
    for plane, old in zip(kv.planes, before, strict=True):
        assert torch.equal(plane[:, [3, 0]], old[:, [4, 2]])
        assert bool((plane[:, [1, 2, 4]] == -1).all())


@pytest.fixture
def kv() -> Planes:
    return components("GQA", torch.float32)[0]


def test_a_payload_is_plane_after_plane_and_layer_after_layer(kv: Planes, steps: Steps) -> None:
    pool = HostPool([kv], [HOST_PAGES], storage=True, run=steps)
    pool.down([Move(0, ids(6, 1), ids(3, 10))])
    steps.all()
    for page, slot in zip((6, 1), pool.slots(0, [3, 10]), strict=True):
        assert len(slot) == HEADER_BYTES + pool.payload_bytes(0)
        expected = b"".join(bits(plane[layer, page]).numpy().tobytes() for plane in kv.tensors for layer in range(3))
        assert bytes(slot[HEADER_BYTES:]) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_content_of_a_page_is_the_same_bytes_on_device_and_host(
    kind: str, layout: HostLayout, steps: Steps
) -> None:
    rows = components(kind, torch.bfloat16)
    pool = HostPool(rows, [HOST_PAGES] * len(rows), layout, run=steps)
    for row, planes in enumerate(rows):
        pool.down([Move(row, np.array([3], np.int32), np.array([7], np.int32))])
        steps.all()
        expected = torch.cat([bits(tensor[:, 3]) for tensor in planes.tensors]).numpy()
        assert np.array_equal(planes.computed(3), expected) and np.array_equal(pool.payload(row, 7), expected)


def test_a_byte_of_a_page_has_a_place() -> None:
    planes = Planes((torch.zeros(2, 5, 4, 3), torch.zeros(2, 5, 4, 1)), (1, 6))
    assert planes.place(0) == (1, 0) and planes.place(12) == (1, 1) and planes.place(2 * 48 - 1) == (6, 3)
    assert planes.place(2 * 48 + 4) == (1, 1) and planes.place(2 * 48 + 16) == (6, 0)
    with pytest.raises(BadArgument, match="offset"):
        planes.place(2 * 48 + 2 * 16)


def test_what_storage_writes_to_a_slot_goes_up(kv: Planes, steps: Steps) -> None:
    pool = HostPool([kv], [HOST_PAGES], storage=True, run=steps)
    (slot,) = pool.slots(0, [4])
    slot[:] = bytes(HEADER_BYTES) + noise((pool.payload_bytes(0),), torch.uint8, 5).numpy().tobytes()
    pool.up([Move(0, ids(4), ids(2))])
    steps.all()
    written = torch.cat([bits(plane[layer, 2]) for plane in kv.tensors for layer in range(3)])
    assert bytes(slot[HEADER_BYTES:]) == written.numpy().tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_slots_lie_in_the_regions_apart_and_aligned(kind: str) -> None:
    pool = HostPool(components(kind, torch.uint8), [HOST_PAGES] * len(KINDS[kind]), storage=True)
    for component, region in enumerate(pool.regions()):
        base = np.frombuffer(region, np.uint8).ctypes.data
        slots = pool.slots(component, range(HOST_PAGES))
        begins = [np.frombuffer(slot, np.uint8).ctypes.data - base for slot in slots]
        assert all(begin % SLOT_ALIGNMENT == 0 for begin in begins)
        size = HEADER_BYTES + pool.payload_bytes(component)
        assert {len(slot) for slot in slots} == {size}
        assert begins[0] == 0
        assert all(a + size <= b for a, b in zip(begins, [*begins[1:], len(region)], strict=True))
    assert component + 1 == len(KINDS[kind])


def test_pages_of_a_model_without_attention_have_no_content(steps: Steps) -> None:
    kv = KVPool(KVShape(0, 0, 0, 0), pages=5, page_size=4, dtype=torch.float32)
    state = components("state", torch.float32)[1]
    pool = HostPool([Planes(kv.planes, ()), state], [9, 3], storage=True, run=steps)
    assert pool.payload_bytes(0) == 0
    assert pool.payload_bytes(1) == state.payload_bytes
    assert len(pool.regions()) == 1
    with pytest.raises(BadArgument, match="content"):
        pool.slots(0, [0])
    before = kept([state])[0]
    down = pool.down([Move(0, ids(0, 1), ids(3, 4)), Move(1, ids(2), ids(0))])
    steps.all()
    scramble([state])
    up = pool.up([Move(0, ids(3), ids(2)), Move(1, ids(0), ids(3))])
    steps.all()
    assert down.error is None
    assert up.error is None
    assert all(same(tensor[:, 3], old[:, 2]) for tensor, old in zip(state.tensors, before, strict=True))
    pool.close()


def test_layers_arrive_one_after_another(kv: Planes, steps: Steps) -> None:
    pool = HostPool([kv], [HOST_PAGES], run=steps)
    pool.down([Move(0, ids(*range(7)), ids(*range(7)))])
    steps.all()
    before = kept([kv])[0]
    scramble([kv])
    scrambled = kept([kv])[0]
    ticket = pool.up([Move(0, ids(*range(7)), ids(*range(7)))])
    for arrived in range(4):
        for plane, old, other in zip(kv.tensors, before, scrambled, strict=True):
            assert same(plane[:arrived], old[:arrived])
            assert same(plane[arrived:], other[arrived:])
        assert ticket.done() == (arrived == 3)
        if arrived < 3:
            reader = threading.Thread(target=ticket.wait_layer, args=(arrived,))
            reader.start()
            assert reader.is_alive()
            steps.step()
            reader.join(patience(60))
            assert not reader.is_alive()
    assert not steps.waiting


def test_layers_of_all_components_arrive_in_the_order_of_the_model(steps: Steps) -> None:
    rows = components("window", torch.float32)
    pool = HostPool(rows, [HOST_PAGES] * 2, run=steps)
    moves = [Move(0, ids(1), ids(1)), Move(1, ids(1), ids(1))]
    pool.down(moves)
    steps.all()
    before = kept(rows)
    scramble(rows)
    ticket = pool.up(moves)
    for layer, (component, row) in enumerate([(1, 0), (0, 0), (1, 1), (0, 1)]):
        plane, old = rows[component].tensors[0], before[component][0]
        assert not same(plane[row, 1], old[row, 1])
        steps.step()
        ticket.wait_layer(layer)
        assert same(plane[row, 1], old[row, 1])


def test_up_goes_before_down(kv: Planes, steps: Steps) -> None:
    pool = HostPool([kv], [HOST_PAGES], run=steps)
    first, second = (pool.down([Move(0, ids(page), ids(page))]) for page in (0, 1))
    steps.step()
    up = pool.up([Move(0, ids(5), ids(5))])
    for _ in range(3):
        assert not up.done()
        steps.step()
    assert up.done()
    assert not first.done()
    steps.step()
    steps.step()
    assert first.done()
    assert not second.done()
    steps.all()
    assert second.done()


def test_it_may_run_at_once(kv: Planes) -> None:
    pool = HostPool([kv], [HOST_PAGES], run=lambda work: work())
    assert pool.down([Move(0, ids(3), ids(3))]).done()


def test_nothing_to_move_is_done(kv: Planes, steps: Steps) -> None:
    pool = HostPool([kv], [HOST_PAGES], run=steps)
    assert pool.down([]).done()
    assert pool.up([Move(0, ids(), ids())]).done()
    assert not steps.waiting


def test_the_caller_may_use_its_ids_again(kv: Planes, steps: Steps) -> None:
    pool = HostPool([kv], [HOST_PAGES], storage=True, run=steps)
    source = ids(3)
    pool.down([Move(0, source, ids(0))])
    source[0] = 5
    steps.all()
    expected = torch.cat([bits(plane[layer, 3]) for plane in kv.tensors for layer in range(3)])
    assert bytes(pool.slots(0, [0])[0][HEADER_BYTES:]) == expected.numpy().tobytes()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the n-th copy of rows fail, counted from now."""
    left = [0]

    def copy(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError("the memory is broken")
        real(*arguments)

    real = copies.copy_rows
    monkeypatch.setattr(copies, "copy_rows", copy)
    return lambda n: left.__setitem__(0, n)


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_copy_that_fails_ends_its_own_ticket_only(kv: Planes, failing: Callable[[int], None], nth: int) -> None:
    pool = HostPool([kv], [HOST_PAGES])
    pool.down([Move(0, ids(0, 1), ids(0, 1))]).wait()
    failing(nth)
    broken, after = pool.up([Move(0, ids(0), ids(0))]), pool.up([Move(0, ids(1), ids(1))])
    broken.wait_layer(2)
    broken.wait()
    assert broken.done()
    assert isinstance(broken.error, OSError)
    after.wait()
    assert after.error is None
    pool.close()


def test_close_fails_what_is_left_and_touches_nothing_more(kv: Planes, steps: Steps) -> None:
    pool = HostPool([kv], [HOST_PAGES], run=steps)
    before = kept([kv])[0]
    tickets = [pool.up([Move(0, ids(page), ids(page))]) for page in (0, 1)]
    pool.close()
    pool.close()
    for ticket in tickets:
        ticket.wait_layer(2)
        ticket.wait()
        assert ticket.done()
        assert isinstance(ticket.error, StorageError)
    steps.all()
    assert all(same(plane, old) for plane, old in zip(kv.tensors, before, strict=True))


def test_many_transfers_on_a_thread_of_its_own() -> None:
    """Random concurrent transfers in both directions over disjoint pages, against plain copies."""
    plane = noise((3, 40, 64), torch.float32, 1)
    device, host = plane.clone(), torch.zeros(3, 60, 64)
    pool = HostPool([Planes((plane,))], [60], "page_first")
    zero = pool.up([])
    for slot in pool.slots(0, range(60)):
        slot[:] = bytes(len(slot))
    assert zero.done()
    rng = np.random.default_rng(3)
    for _ in range(30):
        device_ids, host_ids = rng.permutation(40).astype(np.int32), rng.permutation(60).astype(np.int32)
        tickets = []
        for at in range(0, 40, 8):
            d, h = device_ids[at : at + 8], host_ids[at : at + 8]
            if rng.random() < 0.5:
                tickets.append(pool.down([Move(0, d, h)]))
                host[:, h] = device[:, d]
            else:
                tickets.append(pool.up([Move(0, h, d)]))
                device[:, d] = host[:, h]
        for ticket in tickets:
            ticket.wait()
            assert ticket.error is None
        assert same(plane, device)
    pool.close()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("move", "name"),
    [
        (Move(1, ids(0), ids(0)), "component"),
        (Move(-1, ids(0), ids(0)), "component"),
        (Move(0, ids(7), ids(0)), "source"),
        (Move(0, ids(-1), ids(0)), "source"),
        (Move(0, ids(0), ids(HOST_PAGES)), "target"),
        (Move(0, ids(0, 1), ids(0)), "target"),
    ],
)
def test_moves_that_do_not_exist_are_refused(kv: Planes, steps: Steps, move: Move, name: str) -> None:
    pool = HostPool([kv], [HOST_PAGES], run=steps)
    with pytest.raises(BadArgument) as caught:
        pool.down([Move(0, ids(0), ids(0)), move])
    assert caught.value.name == name
    assert not steps.waiting


def test_without_slots_storage_sees_nothing(kv: Planes) -> None:
    pool = HostPool([kv], [HOST_PAGES], "layer_first")
    with pytest.raises(BadArgument, match="layout"):
        pool.slots(0, [0])
    with pytest.raises(BadArgument, match="layout"):
        pool.regions()
    with pytest.raises(BadArgument, match="layout"):
        HostPool([kv], [HOST_PAGES], "layer_first", storage=True)


@pytest.mark.parametrize("page", [-1, HOST_PAGES])
def test_slots_that_do_not_exist_are_refused(kv: Planes, page: int) -> None:
    with pytest.raises(BadArgument, match="page"):
        HostPool([kv], [HOST_PAGES], storage=True).slots(0, [0, page])


def test_components_and_pages_must_fit(kv: Planes) -> None:
    for rows, pages, layout, name in [
        ([], [], "auto", "pages"),
        ([kv], [1, 1], "auto", "pages"),
        ([kv], [0], "auto", "pages"),
        ([kv], [1], "other", "layout"),
        ([kv], [1 << 40], "page_first", "host_bytes"),
    ]:
        with pytest.raises(BadArgument) as caught:
            HostPool(rows, pages, layout)  # type: ignore[arg-type]
        assert caught.value.name == name


@pytest.mark.parametrize(
    ("tensors", "layers", "name"),
    [
        ((), None, "tensors"),
        ((torch.zeros(3),), None, "tensors"),
        ((torch.zeros(3, 0, 2),), None, "tensors"),
        ((torch.zeros(3, 4, 2).transpose(0, 1),), None, "tensors"),
        ((torch.zeros(3, 4, 2), torch.zeros(3, 5, 2)), None, "tensors"),
        ((torch.zeros(3, 4, 2),), (0, 1), "layers"),
        ((torch.zeros(3, 4, 2),), (0, 2, 1), "layers"),
        ((torch.zeros(3, 4, 2),), (0, 1, 1), "layers"),
    ],
)
def test_planes_must_fit(tensors: tuple[torch.Tensor, ...], layers: tuple[int, ...] | None, name: str) -> None:
    with pytest.raises(BadArgument) as caught:
        Planes(tensors, layers)
    assert caught.value.name == name


# ---------------------------------------------------------------- layout and size


@pytest.mark.parametrize(("times", "faster"), [((0, 1, 5, 7), "page_first"), ((0, 3, 5, 7), "layer_first")])
def test_auto_takes_what_copies_faster_and_leaves_the_device_alone(
    kv: Planes, times: tuple[float, ...], faster: HostLayout
) -> None:
    clock, before = iter(times), kept([kv])[0]
    assert HostPool([kv], [HOST_PAGES], clock=lambda: next(clock)).layout == faster
    assert all(same(plane, old) for plane, old in zip(kv.tensors, before, strict=True))


def test_auto_with_storage_needs_no_trial(kv: Planes) -> None:
    def clock() -> float:
        raise AssertionError("no trial")

    assert HostPool([kv], [HOST_PAGES], storage=True, clock=clock).layout == "page_first"


def test_sizes() -> None:
    kv, state = components("state", torch.float32)
    assert host_pages(HostSize(host_ratio=2), [kv, state]) == [14, 8]
    assert host_pages(HostSize(host_ratio=0.5), [kv, state]) == [3, 2]
    assert host_pages(HostSize(host_bytes=10 * kv.slot_bytes), [kv]) == [10]
    assert host_pages(HostSize(host_fraction=0.5), [kv], lambda: Memory(99 * kv.slot_bytes, 10 * kv.slot_bytes)) == [5]
    both = 7 * kv.slot_bytes + 4 * state.slot_bytes
    assert host_pages(HostSize(host_bytes=3 * both), [kv, state]) == [21, 12]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"host_ratio": 1.0, "host_bytes": 5}, "host size"),
        ({"host_bytes": 0}, "host_bytes"),
        ({"host_ratio": 0.0}, "host_ratio"),
        ({"host_ratio": float("inf")}, "host_ratio"),
        ({"host_ratio": float("nan")}, "host_ratio"),
        ({"host_fraction": 0.0}, "host_fraction"),
        ({"host_fraction": 1.1}, "host_fraction"),
    ],
)
def test_sizes_that_are_none_are_refused(given: dict[str, Any], name: str) -> None:
    with pytest.raises(BadArgument) as caught:
        HostSize(**given)
    assert caught.value.name == name


def test_a_size_below_a_page_is_refused(kv: Planes) -> None:
    with pytest.raises(BadArgument, match="a page of each"):
        host_pages(HostSize(host_bytes=kv.slot_bytes - 1), [kv])


def test_free_memory_is_what_the_system_and_the_group_leave(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    meminfo = tmp_path / "proc/meminfo"
    meminfo.write_text("MemTotal:  900 kB\nMemAvailable:   300 kB\n")
    assert machine_memory(tmp_path) == (900 * 1024, 300 * 1024)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5000\n")
    assert machine_memory(tmp_path) == (900 * 1024, 300 * 1024)
    (group / "memory.max").write_text("105000\n")
    assert machine_memory(tmp_path) == (105_000, 100_000)
    meminfo.write_text("MemTotal:  900 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        machine_memory(tmp_path)


def test_a_fraction_of_unknown_free_memory_is_refused(kv: Planes, tmp_path: Path) -> None:
    with pytest.raises(BadArgument) as caught:
        host_pages(HostSize(host_fraction=0.5), [kv], lambda: machine_memory(tmp_path))
    assert caught.value.name == "host_fraction"

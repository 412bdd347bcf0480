"""How memory is divided among pools."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.cache.components import Chunked, Component, Full, State, Window, by_name
from mainstem.errors import BadArgument
from mainstem.runtime.memory.sizing import Need, share_out
from mainstem.settings.engine import Shares

NEED = Need(local_pages={Window(8): 4}, context_pages=10, running=2)
BYTES = {"full": 100, "window": 50}


def counts(sizes: dict[Component, int]) -> dict[str, int]:
    return {name: sizes[row] for name, row in by_name(sizes).items()}


def shared_out(components: str, shares: Shares, slot_bytes: int = 40, need: Need = NEED) -> dict[str, int]:
    rows: dict[str, Component] = {"full": Full(), "window": Window(8), "state": State()}
    names = components.split()
    page_bytes = {name: BYTES[name] for name in names if name != "state"}
    return counts(share_out(tuple(rows[name] for name in names), page_bytes, slot_bytes, shares, need))


# ---------------------------------------------------------------- shares


def test_memory_is_divided() -> None:
    memory = Shares(12_000, window_ratio=0.5, state_share=0.5)
    assert shared_out("full", memory) == {"full": 120}
    assert shared_out("full window", memory) == {"full": 96, "window": 48}
    assert shared_out("window", memory) == {"window": 240}
    assert shared_out("full state", memory) == {"full": 60, "state": 150}
    assert shared_out("full window state", memory) == {"full": 48, "window": 24, "state": 150}
    assert shared_out("window state", memory) == {"window": 120, "state": 150}


def test_counts_can_be_given_instead() -> None:
    assert shared_out("full window state", Shares(1, pages=50, window_ratio=0.2)) == {
        "full": 50,
        "window": 10,
        "state": 8,
    }
    assert shared_out("window", Shares(1, pages=50)) == {"window": 50}
    assert shared_out("full state", Shares(1000, state_slots=5)) == {"full": 8, "state": 5}


def test_the_window_of_one_request_comes_first() -> None:
    assert shared_out("full window", Shares(1000, window_ratio=0.01)) == {"full": 8, "window": 4}
    assert shared_out("full window", Shares(1, pages=3)) == {"full": 3, "window": 4}


def of_several(shares: Shares, *components: Component, need: int = 1) -> dict[str, int]:
    local = {row: need for row in components if not isinstance(row, Full)}
    page_bytes = {"full": 100, "window-80": 50, "window-20": 10, "chunked": 20}
    return counts(share_out(components, page_bytes, 0, shares, Need(local, 10, 2)))


def test_shorter_windows_have_as_many_fewer_pages() -> None:
    """All windows then hold the ends of equally many prefixes."""
    several = Full(), Window(80), Window(20), Chunked(40)
    memory = 80 * 100 + 40 * 50 + 10 * 10 + 20 * 20
    expected = {"full": 80, "window-80": 40, "window-20": 10, "chunked": 20}
    assert of_several(Shares(memory, window_ratio=0.5), *several) == expected
    assert of_several(Shares(1, window_ratio=0.5, pages=80), *several) == expected
    assert of_several(Shares(40 * 50 + 10 * 10), Window(80), Window(20)) == {"window-80": 40, "window-20": 10}


def test_what_one_request_needs_of_a_short_window_is_taken_from_the_others() -> None:
    sizes = of_several(Shares(10_000, window_ratio=0.5), Full(), Window(80), Window(20), need=30)
    assert sizes == {"full": 77, "window-80": 38, "window-20": 30}
    assert 77 * 125 + 30 * 10 <= 10_000 < 78 * 125 + 30 * 10
    least = {"full": 1, "window-80": 30, "window-20": 30}
    assert of_several(Shares(1900), Full(), Window(80), Window(20), need=30) == least
    with pytest.raises(BadArgument, match="kv_bytes = 1899: must be 1900 or more"):
        of_several(Shares(1899), Full(), Window(80), Window(20), need=30)


def test_a_model_without_attention_has_marks_for_its_states() -> None:
    def marks(shares: Shares, need: Need = NEED) -> dict[str, int]:
        return counts(share_out((Full(), State()), {"full": 0}, 40, shares, need))

    assert marks(Shares(4000)) == {"full": 1000, "state": 100}, "all of the memory is for states"
    assert marks(Shares(4000, pages=7)) == {"full": 7, "state": 8}
    many = marks(Shares(1 << 40))
    assert many["full"] == 1 << 20
    assert marks(Shares(1 << 40), Need({}, 1 << 18, 16))["full"] == 16 << 18


@pytest.mark.parametrize(
    ("components", "shares", "named"),
    [
        ("full", Shares(99), "kv_bytes = 99: must be 100 or more"),
        ("full window", Shares(299), "kv_bytes = 299: must be 300 or more"),
        ("full window state", Shares(419), "kv_bytes = 419: must be 300 or more plus 200 for states"),
        ("window", Shares(199), "kv_bytes = 199: must be 200 or more"),
        ("window", Shares(1 << 30, pages=3), "pages = 3: must be at least 4"),
        ("full state", Shares(239), "kv_bytes = 239: must be enough for 3 recurrent states of 40 bytes"),
        ("full state", Shares(1000, state_slots=2), "state_slots = 2: must be at least 3"),
        ("full state", Shares(200, state_slots=6), "kv_bytes = 200: must be enough for 6 recurrent states of 40"),
        ("full state", Shares(200, state_slots=5), "kv_bytes = 200: must be 100 or more plus 200 for states"),
    ],
)
def test_too_little_memory_is_refused_with_the_field_and_what_is_needed(
    components: str, shares: Shares, named: str
) -> None:
    with pytest.raises(BadArgument) as caught:
        shared_out(components, shares)
    assert named in str(caught.value)


def test_as_much_memory_as_an_error_asks_for_is_enough() -> None:
    assert shared_out("full window", Shares(300)) == {"full": 1, "window": 4}
    assert shared_out("full state", Shares(300, state_slots=5)) == {"full": 1, "state": 5}


@pytest.mark.parametrize("name", ["window_ratio", "state_share"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "0.5", None])
def test_shares_are_checked(name: str, value: object) -> None:
    with pytest.raises(BadArgument, match=name):
        Shares(1000, **{name: value})  # type: ignore[arg-type]


def test_states_never_get_all_of_the_memory() -> None:
    with pytest.raises(BadArgument, match="state_share"):
        Shares(1000, state_share=1.0)


@given(
    st.sampled_from(["full", "full window", "window", "full state", "full window state", "window state"]),
    st.integers(1, 1 << 44),
    st.integers(1, 1 << 24),
    st.integers(1, 1 << 24),
    st.integers(1, 1 << 28),
    st.floats(1e-3, 10),
    st.floats(1e-3, 0.999),
    st.one_of(st.none(), st.integers(1, 1000)),
    st.integers(1, 500),
)
def test_pools_never_exceed_the_memory_and_hold_what_one_request_needs(
    names: str,
    memory: int,
    full: int,
    window: int,
    slot: int,
    ratio: float,
    share: float,
    slots: int | None,
    least: int,
) -> None:
    page_bytes = {name: size for name, size in (("full", full), ("window", window)) if name in names.split()}
    rows: dict[str, Component] = {"full": Full(), "window": Window(8), "state": State()}
    components = tuple(rows[name] for name in names.split())
    shares = Shares(memory, ratio, share, state_slots=slots)
    need = Need({Window(8): least}, 100, 4)
    part = min(share, 1 - share) if slots is None else 1
    least_of_all = (max(slots or 0, 3) * slot + least * window + full * (1 + ratio) + window * ratio) / part
    if slots is not None and slots < 3 and "state" in names:
        with pytest.raises(BadArgument, match="state_slots"):
            share_out(components, page_bytes, slot, shares, need)
        return
    try:
        sizes = counts(share_out(components, page_bytes, slot, shares, need))
    except BadArgument:
        assert memory < 4 * least_of_all, "it is enough"
        return
    assert list(sizes) == names.split()
    assert sum(n * {**page_bytes, "state": slot}[name] for name, n in sizes.items()) <= memory
    assert sizes.get("window", least) >= least and sizes.get("full", 1) >= 1 and sizes.get("state", 3) >= 3

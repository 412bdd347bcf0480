"""How memory is divided among pools, and which ratio of window pages is best for a trace."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.cache.components import Chunked, Component, Full, State, Window, by_name
from mainstem.errors import BadArgument, BadTokens
from mainstem.runtime.memory.sizing import RATIOS, Need, Trials, best_window_ratio, share_out
from mainstem.settings.engine import Shares
from mainstem.settings.window_trace import Use, read_window_trace

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


# ---------------------------------------------------------------- from a trace


def best(trace: list[object], memory: int = 60_000, page_size: int = 4, **arguments: object) -> Trials:
    settings: dict[str, object] = {
        "components": (Full(), Window(16)),
        "page_bytes": {"full": 100, "window": 100},
        "memory": memory,
        "page_size": page_size,
        "need": Need({Window(16): 10}, 1000, 1),
        "token_budget": 16,
    }
    return best_window_ratio(trace, **{**settings, **arguments})  # type: ignore[arg-type]


def test_short_chats_want_a_window_page_for_each_full_one() -> None:
    chats = [use for i in range(6) for use in [*[Use(20)] * 48, *(Use(24, 96 * i + j, 20) for j in range(48))]]
    trials = best(chats)
    assert trials.best.window_ratio == 1.0
    assert trials.best.hit_rate == pytest.approx(20 / 44), "every second turn finds the first one"
    assert trials.all[-2].hit_rate < 0.2


def test_a_trace_decides_for_several_windows_at_once() -> None:
    trials = best(
        [Use(1800), *(Use(1820, 0, 1800) for _ in range(20))],
        components=(Full(), Window(16), Window(4)),
        page_bytes={"full": 100, "window-16": 100, "window-4": 100},
        need=Need({Window(16): 10, Window(4): 7}, 1000, 1),
    )
    assert trials.best.window_ratio <= 0.125 and trials.best.hit_rate > 0.9
    for trial in trials.all:
        pages = trial.pages
        assert pages[Window(4)] == max(7, int(pages[Full()] * trial.window_ratio / 4))
        assert sum(100 * n for n in pages.values()) <= 60_000


def test_a_long_document_wants_few_window_pages() -> None:
    document = [Use(1800), *(Use(1820, 0, 1800) for _ in range(20))]
    trials = best(document)
    assert trials.best.window_ratio <= 0.125
    assert trials.best.hit_rate > 0.9
    assert trials.all[-1].hit_rate == 0, "with a window page for each full one, it does not fit"


def test_two_documents_in_turn_want_few_window_pages() -> None:
    """Pages of a document before its window must not evict the window at the end of the other document."""
    turns = [Use(1000), Use(1000), *(Use(1010, i % 2, 1000) for i in range(30))]
    trials = best(turns)
    assert trials.best.window_ratio <= 0.125
    assert trials.best.hit_rate > 0.9
    assert trials.all[-1].hit_rate < 0.5


def test_the_table_has_every_ratio() -> None:
    trials = best([Use(40), Use(900), Use(44, 0, 40)], ratios=(0.5, 0.1, 0.9))
    assert [trial.window_ratio for trial in trials.all] == [0.5, 0.1, 0.9]
    assert trials.best in trials.all
    for trial in trials.all:
        full, window = trial.pages[Full()], trial.pages[Window(16)]
        assert full * 100 + window * 100 <= 60_000
        assert window == max(10, int(full * trial.window_ratio))


def test_the_same_trace_gives_the_same_answer_in_tokens_as_in_lengths() -> None:
    rng = random.Random(1)
    uses, tokens = [Use(50)], [[rng.randrange(1000) for _ in range(50)]]
    for _ in range(150):
        like, more = rng.randrange(len(uses)), rng.randint(1, 40)
        shared = rng.randint(0, uses[like].length)
        uses.append(Use(shared + more, like, shared))
        tokens.append(tokens[like][:shared] + [rng.randrange(1000) for _ in range(more)])
    first = best(uses, 20_000)  # type: ignore[arg-type]
    assert first == best(uses, 20_000) == best(tokens, 20_000)  # type: ignore[arg-type]
    assert 0.05 < first.best.hit_rate < 0.95


def test_among_equal_ratios_the_one_with_most_full_pages_is_best() -> None:
    trials = best([Use(40), Use(40), Use(40)])
    assert {trial.hit_rate for trial in trials.all} == {0.0}
    assert trials.best.window_ratio == RATIOS[0]
    again = best([Use(40), Use(44, 0, 40), Use(44, 1, 44)], 600_000)
    assert len({trial.hit_rate for trial in again.all}) == 1 and again.best == again.all[0]


def test_a_sequence_that_does_not_fit_is_a_miss_and_affects_no_other() -> None:
    chats = [Use(20), Use(20, 0, 20)] * 3
    rate = best([*chats, Use(100_000), *chats], ratios=(0.5,)).best.hit_rate
    assert 0 < rate < 0.01


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"trace": []}, "trace"),
        ({"trace": [[]]}, r"trace\[0\]"),
        ({"trace": [Use(0)]}, r"trace\[0\].length"),
        ({"trace": [Use(4), Use(4, 1, 1)]}, r"trace\[1\].like"),
        ({"trace": [Use(4), Use(9, 0, 5)]}, r"trace\[1\].shared"),
        ({"trace": [Use(9), Use(4, 0, 5)]}, r"trace\[1\].shared"),
        ({"trace": [Use(9, 0, 3)]}, r"trace\[0\].shared"),
        ({"memory": 0}, "memory"),
        ({"memory": 1000}, "kv_bytes"),
        ({"page_size": 0}, "page_size"),
        ({"token_budget": 0}, "token_budget"),
        ({"ratios": ()}, "ratios"),
        ({"ratios": (0.5, 0.0)}, "window_ratio"),
        ({"page_bytes": {"full": 100}}, "page_bytes of window"),
    ],
)
def test_wrong_arguments_are_named(changed: dict[str, object], named: str) -> None:
    with pytest.raises(BadArgument, match=named):
        best(**{"trace": [Use(8)], **changed})  # type: ignore[arg-type]


def test_wrong_tokens_are_named() -> None:
    with pytest.raises(BadTokens):
        best([[1, -2]])


def test_a_trace_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"tokens": [1, 2, 3]}\n\n{"length": 9, "like": 0, "shared": 2}\n')
    assert read_window_trace(file) == ([1, 2, 3], Use(9, 0, 2))


@pytest.mark.parametrize("line", ["{", "[1]", '{"tokens": 3}', '{"length": 3, "shares": 2}'])
def test_a_line_that_is_no_sequence_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"tokens": [1]}\n' + line)
    with pytest.raises(BadArgument, match=r"trace.jsonl:2.*tokens.*length"):
        read_window_trace(file)
    with pytest.raises(BadArgument, match="window_trace"):
        read_window_trace(tmp_path / "nothing")

"""The benchmark inside vLLM: what it compares, and what it alters."""

from __future__ import annotations

from pathlib import Path

from bench.engines import ALONE, OURS, Row, Times, alter, cells, judge, turns


def row(system: str, seconds: list[float], cpu: list[float]) -> Row:
    return Row(system, *(Times(list(seconds), list(cpu)) for _ in range(3)), bytes_a_prompt=1e6, hit_tokens=768)


def test_a_goal_is_the_median_of_the_ratios_of_the_same_turns_to_the_fastest_store() -> None:
    ours = row(OURS, [1.0, 2.0, 8.0], [1.0, 1.0, 1.0])
    slow, quick = row("slow", [2.0, 4.0, 4.0], [2.0] * 3), row("quick", [0.9, 1.9, 16.0], [1.0] * 3)
    goals = {goal["what"]: goal for goal in judge([row(ALONE, [0.1] * 3, [0.1] * 3), ours, slow, quick])}
    first = goals["vLLM: time to the first token after a restart, over the fastest store"]
    assert first["measured"] == 2.0 / 1.9 and not first["met"], "the machine was slow in the last turn, for both"
    assert goals["vLLM: CPU time to the first token after a restart, over the fastest store"]["met"]


def test_every_system_is_first_in_some_turn() -> None:
    engines = [(Row(name), None) for name in "abc"]
    orders = ["".join(each.system for each, _ in turns(engines, at)) for at in range(4)]  # type: ignore[arg-type]
    assert orders == ["abc", "bca", "cab", "abc"]


def test_some_byte_of_every_page_is_altered_and_nothing_else(tmp_path: Path) -> None:
    content = {"pages": b"\1" * (1 << 17), "holes": bytes(1 << 17), "index": b"\1" * 1000}
    for name, value in content.items():
        (tmp_path / name).write_bytes(value)
    alter(tmp_path)
    after = {name: (tmp_path / name).read_bytes() for name in content}
    assert after["holes"] == content["holes"] and after["index"] == content["index"]
    changed = [at for at, byte in enumerate(after["pages"]) if byte != 1]
    assert changed == list(range((1 << 14) + 1, 1 << 17, 1 << 15)) and len(after["pages"]) == 1 << 17


def test_a_row_of_the_table_has_medians_and_rates() -> None:
    shown = cells(row(OURS, [1.0, 2.0, 4.0], [1.0, 1.5, 2.0]).as_json())
    assert shown == ["2 s", "2 s", "1.5 s", "500 KB/s", "2 s", "1.5 s", "500 KB/s", "768", ""]
    alone = Row(ALONE, first=Times([1.0], [1.0]), saved=Times([1.0], [1.0])).as_json()
    assert cells(alone) == ["1 s", "1 s", "1 s", "", "", "", "", "", ""]

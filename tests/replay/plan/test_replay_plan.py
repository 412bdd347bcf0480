"""Plans of traces small enough to compute by hand, and against the replay of real tiers."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.replays import BLOCK, DEVICE, SHAPE, Lru

from mainstem.errors import BadArgument
from mainstem.replay.plan.configs import read_shape, well_known
from mainstem.replay.plan.costs import Layer, ModelShape
from mainstem.replay.plan.engine import waits
from mainstem.replay.plan.hardware import DEVICES, Device, find_device
from mainstem.replay.plan.plan import Hits, Knee, Plan, PlanRow, _worth_most, plan
from mainstem.replay.plan.words import assumptions, notes, plan_as_dict, show_plan
from mainstem.replay.simulate.sweep import replay
from mainstem.replay.trace import Batch, Trace
from mainstem.settings.replay import Assumptions, Fleet, Memory, Setup
from mainstem.units import show_bytes

PLAIN: dict[str, Any] = {"mfu": 1.0, "memory_share": 1.0, "link_share": 1.0}


def traced(paths: list[list[int]], **columns: Any) -> Trace:
    return Trace.of(Batch.of(paths, block_size=10, **columns), block_size=10, name="made up")


def slow_lru(trace: Trace) -> Hits:
    batch = trace.whole
    paths = [batch.blocks[a:b].tolist() for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]

    def hits(capacity: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        cache, found = Lru(capacity), []
        for path in paths:
            found.append(cache.found(path))
            cache.serve(path)
        return np.array(found, np.int64)

    return hits


def planned(trace: Trace, memory: Memory, shape: ModelShape = SHAPE, device: Device = DEVICE, **given: Any) -> Plan:
    limit = given.pop("slo_ttft_s", None)
    return plan(trace, shape, device, memory, Assumptions(**{**PLAIN, **given}), slo_ttft_s=limit, hits=slow_lru(trace))


def tiers(of: PlanRow | Knee) -> tuple[int, int]:
    return of.host_bytes, of.storage_bytes


def mixed(found: Plan, host_bytes: int, storage_bytes: int) -> PlanRow:
    return next(row for row in found.rows if tiers(row) == (host_bytes, storage_bytes))


def chats(seed: int = 0, requests: int = 400) -> Trace:
    """Returns a trace of conversations that grow by one block per turn, a few at a time."""
    rng = np.random.default_rng(seed)
    turns: dict[int, int] = {}
    paths = []
    for i in range(requests):
        chat = int(rng.integers(max(0, i // 4 - 12), i // 4 + 1))
        turns[chat] = turns.get(chat, 2) + 1
        paths.append([1, *(1000 * (chat + 1) + turn for turn in range(turns[chat]))])
    return traced(paths, time_s=np.arange(requests) * 2.0)


def test_one_prompt_twice_computed_by_hand() -> None:
    found = planned(traced([[1, 2], [1, 2]], time_s=[0, 10]), Memory(), slo_ttft_s=1.0)
    whole = 2 * 100 * 20 + 2 * 4 * 5  # tokens, and logits
    last = 2 * 100 * 1 + 2 * 4 * 5  # of a cached prompt only the last token is computed
    assert found.engine.cache_bytes == 640
    assert found.engine.block_bytes == BLOCK
    assert found.bare.flops == 2 * whole
    assert found.bare.ttft_mean_s == whole / 1000
    row = found.rows[0]
    assert row.flops == whole + last
    assert row.flops_saved_share == 1 - (whole + last) / (2 * whole)
    assert row.ttft_mean_s == (whole + last) / 2 / 1000
    assert row.ttft_p90_s == pytest.approx((last + 0.9 * (whole - last)) / 1000)
    assert (row.token_hit_rate, row.device_hit_rate, row.block_hit_rate) == (0.5, 0.5, 0.5)
    assert row.gpu_hours_saved == (whole - last) / 1000 / 3600
    assert row.busy == (whole + last) / 1000 / 10
    assert (found.bare.slo_share, row.slo_share) == (0.0, 0.5)


def test_a_model_on_a_device_with_the_default_assumptions_computed_by_hand() -> None:
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)  # q and o, k and v, the MLP
    logits = 4096 * 128256
    long, short = list(range(1000)), [5000, 5001]
    trace = traced([long, short, short], time_s=[0, 50, 100])
    memory = Memory(10**9, 10**10, 7e9)
    found = plan(trace, read_shape("llama-3.1-8b"), find_device("h100"), memory, Assumptions(), slo_ttft_s=0.1)
    engine = found.engine
    assert (engine.gpus, engine.kv_copies, engine.weight_bytes) == (1, 1, 2)
    assert engine.cache_bytes == pytest.approx(0.9 * 80e9 - 2 * (layers + 2 * logits), rel=1e-12)
    assert engine.flops_per_s == pytest.approx(0.4 * 989e12, rel=1e-12)
    assert engine.weights_bytes_per_s == 3.35e12
    assert engine.host_bytes_per_s == pytest.approx(0.8 * 64e9, rel=1e-12)
    assert engine.storage_bytes_per_s == 7e9
    assert (engine.token_bytes, engine.end_bytes, engine.block_bytes) == (2 * 32 * 8 * 128 * 2, 0, 1310720)
    computed = (2 * layers * 10000 + 2 * logits + 32 * 4 * 4096 * 10000 * 10001 / 2) / (0.4 * 989e12)
    read = 2 * (layers + logits) / 3.35e12  # a short prompt takes as long as reading the weights
    assert (computed, read) == pytest.approx((0.41912, 0.0044804), rel=1e-4)
    assert found.bare.ttft_mean_s == pytest.approx((computed + 2 * read) / 3, rel=1e-12)
    assert found.bare.gpu_hours == pytest.approx((computed + 2 * read) / 3600, rel=1e-12)
    assert found.bare.busy == pytest.approx((computed + 2 * read) / 100, rel=1e-12)
    assert (found.bare.slo_share, found.bare.slo_met, found.bare.replicas) == (2 / 3, False, 1)
    assert found.rows[0].token_hit_rate == 20 / 10040
    assert (found.span_s, found.input_tokens, found.distinct_blocks) == (100, 10040, 1002)
    assert len({row.host_bytes for row in found.rows}) == 4, "nothing, and three sizes"


def test_the_gain_of_a_gigabyte_is_relative_to_the_device_alone() -> None:
    found = planned(chats(), Memory(64 * BLOCK))
    alone, *bought = found.rows
    assert alone.gain_per_gb is None and alone.flops_saved_share > 0 and bought
    for row in bought:
        saved = 100 * (row.flops_saved_share - alone.flops_saved_share)
        assert row.gain_per_gb == pytest.approx(saved / (row.host_bytes / 1e9), rel=1e-12)


def test_of_a_mix_all_of_its_memory_counts_in_gain_and_price() -> None:
    found = planned(chats(), Memory(64 * BLOCK, 256 * BLOCK, 1e9), write_policy="write_back")
    alone = found.rows[0]
    mixes = [row for row in found.rows if all(tiers(row))]
    assert mixes
    for row in mixes:
        saved = 100 * (row.flops_saved_share - alone.flops_saved_share)
        assert row.gain_per_gb == pytest.approx(saved / (sum(tiers(row)) / 1e9), rel=1e-12)
    best = max(mixes, key=lambda row: row.flops_saved_share)
    # It is bought up to the price at which it is just worth its memory.
    price = 100 * (best.flops_saved_share - alone.flops_saved_share) / (sum(tiers(best)) / 1e9)
    assert _worth_most((alone, best), price * 1.001) == alone and _worth_most((alone, best), price * 0.999) == best


def test_the_knee_is_where_memory_is_just_worth_its_price() -> None:
    trace, memory = chats(), Memory(64 * BLOCK)
    (_, least), *curve = planned(trace, memory).knee.curve
    price = max(100 * (saved - least) / (size / 1e9) for size, saved in curve)
    below, above = (planned(trace, memory, gain=price * factor) for factor in (1 - 1e-9, 1 + 1e-9))
    assert below.knee.memory_bytes > 0 and sum(tiers(below.buy)) > 0
    assert above.knee.memory_bytes == 0 and sum(tiers(above.buy)) == 0


def test_the_knee_is_searched_at_24_sizes_besides_those_of_the_table() -> None:
    found = planned(chats(), Memory(512 * BLOCK), steps=2)
    expected = {math.ceil(512 * BLOCK / 2 ** (i / 2)) for i in range(24)} | {0, 256 * BLOCK}
    assert [size for size, _ in found.knee.curve] == sorted(expected)


def test_a_first_token_just_at_the_limit_is_in_time() -> None:
    trace = traced([[1, 2], [1, 2, 3]], time_s=[0, 10])
    limit = (2 * 100 * 20 + 40) / 1000
    bare = planned(trace, Memory(), slo_ttft_s=limit, slo_share=0.5).bare
    assert (bare.slo_share, bare.slo_met) == (0.5, True)
    assert planned(trace, Memory(), slo_ttft_s=limit * (1 - 1e-9)).bare.slo_share == 0


def test_no_size_is_tried_if_half_of_it_is_enough() -> None:
    found = planned(traced([[1, 2, 3, 4, 5, 6]] * 3), Memory(2 * 6 * BLOCK), steps=2)
    assert [row.host_bytes for row in found.rows] == [0, 3 * BLOCK, 6 * BLOCK]


def test_the_fewest_devices_leave_a_tenth_of_the_weights_for_kv() -> None:
    assert planned(traced([[1]]), Memory(), device_memory=240 * 1.1 + 1e-6).engine.gpus == 1
    assert planned(traced([[1]]), Memory(), device_memory=240 * 1.1 - 1e-6).engine.gpus == 2
    assert planned(traced([[1]]), Memory(), device_memory=60 * 1.1 - 1e-6).engine.gpus == 8, "a power of two"


def test_a_block_has_one_end_and_its_own_part_of_a_window_at_most() -> None:
    layers = (Layer(kv_numbers=8), Layer(kv_numbers=4, window=15), Layer(recurrent_numbers=7))
    shape = ModelShape("hybrid", layers, 4, 5, tied=True)
    often = planned(traced([[1, 2]] * 9), Memory(), shape)
    assert often.engine.block_bytes == 10 * 16 + 10 * 4 * 2 + 7 * 4, "10 of a window of 15 positions, and one state"
    seldom = planned(traced([[1, 2, 3, 4, 5, 6, 7, 8]]), Memory(), shape)
    assert seldom.engine.block_bytes == 10 * 16 + (15 * 4 * 2 + 7 * 4) / 8


@pytest.mark.parametrize(
    ("policy", "host", "expected"),
    [
        ("write_back", 2 * BLOCK, (4 / 6, 2 / 6)),  # four blocks on the device, two below
        ("write_through", 2 * BLOCK, (4 / 6, 0.0)),  # copies of the blocks above
        ("write_through", 6 * BLOCK, (4 / 6, 2 / 6)),
    ],
)
def test_lower_tiers_hold_copies_or_what_was_evicted(policy: str, host: int, expected: tuple[float, float]) -> None:
    trace = traced([[1, 2, 3, 4, 5, 6]] * 1000, time_s=np.arange(1000))
    row = planned(trace, Memory(host), write_policy=policy, steps=1).rows[-1]
    assert row.host_bytes == host
    assert (row.device_hit_rate, row.host_hit_rate) == pytest.approx(expected, abs=1e-3)


def test_loading_takes_as_long_as_the_slowest_link() -> None:
    trace = traced([[1, 2, 3, 4, 5, 6, 7, 8]] * 2, time_s=[0, 100])
    found = planned(trace, Memory(6 * BLOCK, 8 * BLOCK, 80.0), steps=1)
    whole, last = (2 * 100 * tokens + 40 for tokens in (80, 1))
    host = mixed(found, 6 * BLOCK, 0)
    assert host.host_hit_rate * 160 == 20
    assert host.ttft_mean_s == pytest.approx((whole + 2 * 100 * 20 + 40 + 1000 * 20 * 16 / 160) / 2 / 1000)
    both = mixed(found, 6 * BLOCK, 8 * BLOCK)
    assert both.storage_hit_rate * 160 == 20
    assert both.ttft_mean_s == pytest.approx((whole + last + 1000 * (20 * 16 / 160 + 20 * 16 / 80)) / 2 / 1000)
    fast = mixed(planned(trace, Memory(6 * BLOCK, 8 * BLOCK, 1e9), steps=1), 6 * BLOCK, 8 * BLOCK)
    assert fast.ttft_mean_s == pytest.approx((whole + last + 1000 * 40 * 16 / 160) / 2 / 1000), (
        "through the host's link"
    )


def test_windows_and_states_are_kept_and_loaded_once_a_prompt() -> None:
    layers = (Layer(kv_numbers=8), Layer(kv_numbers=4, window=5), Layer(conv_numbers=6, recurrent_numbers=7))
    shape = ModelShape("hybrid", layers, 4, 5, tied=True)
    trace = traced([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [9, 8, 7, 6]], time_s=[0, 1, 2, 3])
    end = 5 * 4 * 2 + 6 * 2 + 7 * 4
    found = planned(trace, Memory(10**6), shape, device_memory=100.0, steps=1)
    assert (found.engine.token_bytes, found.engine.end_bytes) == (16, end)
    assert found.engine.block_bytes == 10 * 16 + 4 / 8 * end
    assert found.rows[0].token_hit_rate == 0, "nothing fits the device"
    loading = 2 * (40 * 16 + end) / 160 / 4
    computing = found.rows[1].gpu_hours * 3600 / 4
    assert found.rows[1].ttft_mean_s == pytest.approx(loading + computing)
    offered = Memory(400, 10**6, 80.0)
    deep = next(row for row in planned(trace, offered, shape, device_memory=100.0, steps=1).rows if all(tiers(row)))
    assert deep.host_hit_rate > 0 and deep.storage_hit_rate > 0
    from_host, from_storage = (rate * 160 * 16 for rate in (deep.host_hit_rate, deep.storage_hit_rate))
    loading = (from_host / 160 + (from_storage + 2 * end) / 80) / 4
    assert deep.ttft_mean_s == pytest.approx(loading + deep.gpu_hours * 3600 / 4), "ends are loaded from their tier"


@pytest.mark.parametrize("seed", [0, 1])
def test_hits_by_tier_are_those_of_real_tiers(seed: int) -> None:
    trace = chats(seed)
    given = Assumptions(**PLAIN, steps=1)
    row = plan(trace, SHAPE, DEVICE, Memory(40 * BLOCK, 90 * BLOCK, 1e9), given).rows[-1]
    real = replay(trace, "lru", 4, setup=Setup(host_blocks=40, storage_blocks=90))
    tokens = [
        round(rate * real.input_tokens) for rate in (row.device_hit_rate, row.host_hit_rate, row.storage_hit_rate)
    ]
    assert tokens == [tier.token_hits for tier in real.tiers]
    assert (row.token_hit_rate, row.block_hit_rate) == (real.token_hit_rate, real.block_hit_rate)


def test_more_memory_never_saves_less() -> None:
    found = planned(chats(), Memory(64 * BLOCK, 512 * BLOCK, 1e9), steps=4)
    assert len(found.rows) > 8
    for row in found.rows:
        smaller = [x for x in found.rows if x.host_bytes <= row.host_bytes and x.storage_bytes <= row.storage_bytes]
        assert all(x.flops_saved_share <= row.flops_saved_share for x in smaller)
    saved = [share for _, share in found.knee.curve]
    assert saved == sorted(saved)
    assert found.knee.endless_saved_share >= saved[-1]


@pytest.mark.parametrize("gain", [0.0, 1e3, 1e5, 1e6, 3e6, 1e9])
def test_beyond_the_knee_no_amount_is_worth_its_price(gain: float) -> None:
    knee = planned(chats(), Memory(4096 * BLOCK), gain=gain).knee

    def rate(less: tuple[int, float], more: tuple[int, float]) -> float:
        return 100 * (more[1] - less[1]) / ((more[0] - less[0]) / 1e9)

    at = (knee.memory_bytes, knee.saved_share)
    assert all(rate(at, point) <= gain for point in knee.curve if point[0] > at[0])
    assert all(rate(point, at) > gain for point in knee.curve if point[0] < at[0])
    if gain == 1e9:
        assert knee.memory_bytes == 0
    if gain == 0:
        assert knee.saved_share == knee.most_saved_share


def test_requests_wait_for_the_first_free_replica() -> None:
    arrivals, services = np.array([0.0, 1, 2, 20]), np.array([10.0, 10, 10, 1])
    assert waits(arrivals, services, 1).tolist() == [0, 9, 18, 10]
    assert waits(arrivals, services, 2).tolist() == [0, 0, 8, 0]
    assert waits(arrivals, services, 3).tolist() == [0, 0, 0, 0]
    trace = traced([[1, 2], [3, 4], [5, 6]], time_s=[0, 0, 0])
    one = (2 * 100 * 20 + 40) / 1000
    assert planned(trace, Memory(), queue=True).bare.ttft_mean_s == pytest.approx(2 * one)
    assert planned(trace, Memory(), queue=True, replicas=3).bare.ttft_mean_s == pytest.approx(one)


def test_every_assumption_has_its_effect() -> None:
    trace = chats()
    memory = Memory(64 * BLOCK)
    plain = planned(trace, memory)

    def changed(**given: Any) -> Plan:
        return planned(trace, memory, **given)

    assert changed(mfu=0.5).bare.ttft_mean_s == pytest.approx(2 * plain.bare.ttft_mean_s)
    assert changed(flops=2000.0).bare.gpu_hours == pytest.approx(plain.bare.gpu_hours / 2)
    assert changed(gpus=2).engine.cache_bytes == 2 * 880 - 240
    assert changed(gpus=2).bare.gpu_hours == pytest.approx(plain.bare.gpu_hours)
    assert changed(replicas=3).engine.cache_bytes == 3 * 640
    assert changed(replicas=3).bare.busy == pytest.approx((plain.bare.busy or 0) / 3)
    assert changed(memory_share=0.5).engine.cache_bytes == 200
    assert changed(device_memory=400.0).engine.cache_bytes == 160
    assert changed(kv_dtype="fp8").engine.block_bytes == BLOCK / 2
    assert changed(weights_dtype="fp32").engine.cache_bytes == 400
    assert changed(bytes_per_token=1.0).engine.block_bytes == 10
    assert changed(bandwidth_host=1.0).rows[-1].ttft_mean_s > plain.rows[-1].ttft_mean_s
    assert changed(link_share=0.5).engine.host_bytes_per_s == 80
    assert changed(bandwidth_device=1.0).bare.ttft_mean_s == 2 * 120  # 120 parameters that every token uses
    assert changed(gpus=2, kv_copies=2).engine.cache_bytes == (2 * 880 - 240) / 2
    assert changed(gpus=2, kv_copies=2).engine.host_bytes_per_s == plain.engine.host_bytes_per_s
    assert (changed(most_busy=1.0).bare.replicas, changed(most_busy=0.25).bare.replicas) == (7, 26)
    assert [changed(slo_ttft_s=9.0, slo_share=share).rows[-1].slo_met for share in (0.001, 1.0)] == [True, False]
    assert changed(overhead=5.0).bare.ttft_mean_s == pytest.approx(plain.bare.ttft_mean_s + 5)
    assert changed(gain=1e9).knee.memory_bytes == 0
    assert len(changed(steps=5).rows) == 6


def test_the_text_agrees_with_the_numbers() -> None:
    found = planned(chats(), Memory(64 * BLOCK, 512 * BLOCK, 50.0), gain=1e4, slo_ttft_s=20.0)
    text = show_plan(found)
    for row in found.rows:
        assert f"{row.token_hit_rate:.1%}" in text and f"{row.flops_saved_share:.1%}" in text
    for stated in assumptions(found):
        assert stated.what in text and stated.option in text and stated.shown in text
    options = {stated.option for stated in assumptions(found)}
    stated_fields = {field.name for field in fields(Assumptions)} - {"link_share"}
    assert {"--" + name.replace("_", "-") for name in stated_fields} <= options
    assert "--link-share" in text
    assert any("Loading a token from storage takes" in note for note in notes(found))
    assert any(note.startswith("Knee: ") and " of storage" in note for note in notes(found))
    assert any(note.startswith("Within 20 s: ") for note in notes(found))
    assert notes(found)[0].startswith("Buy: ")
    assert max(map(len, text.splitlines())) < 200
    found_again = json.loads(json.dumps(plan_as_dict(found)))
    assert [row["token_hit_rate"] for row in found_again["rows"]] == [row.token_hit_rate for row in found.rows]
    assert found_again["knee"]["memory_bytes"] == found.knee.memory_bytes
    assert len(found_again["assumptions"]) == len(assumptions(found)) and found_again["notes"]


def test_the_knee_is_named_as_tiers_and_marked_in_the_table() -> None:
    host, most = 8 * BLOCK, 512 * BLOCK
    for policy in ("write_through", "write_back"):
        found = planned(chats(), Memory(host, most, 1e9), gain=0.0, write_policy=policy)
        knee = found.knee
        assert knee.host_bytes + knee.storage_bytes == knee.memory_bytes
        assert knee.host_bytes == (0 if policy == "write_through" else host), "copies of host memory reach no further"
        row = next(each for each in found.rows if tiers(each) == tiers(knee))
        assert row.flops_saved_share == knee.saved_share
        said = next(note for note in notes(found) if note.startswith("Knee: "))
        above = f"{show_bytes(host)} of host memory and " if knee.host_bytes else ""
        assert said.startswith(f"Knee: {above}{show_bytes(knee.storage_bytes)} of storage saves")
        assert "knee" in next(line for line in show_plan(found).splitlines() if "<-" in line and "knee" in line)
    none = planned(chats(), Memory(host, most, 1e9), gain=1e9)
    assert none.knee.memory_bytes == 0
    assert any("Knee: the device alone" in note for note in notes(none))


def test_no_row_of_the_table_is_worth_more_than_the_knee() -> None:
    for gain in (3e4, 1e5, 3e5, 1e6):
        for policy in ("write_through", "write_back"):
            offered = Memory(100 * BLOCK, 384 * BLOCK, 1e9)
            found = planned(chats(), offered, gain=gain, write_policy=policy, steps=5)
            assert sum(tiers(found.buy)) == found.knee.memory_bytes, (gain, policy)


def test_the_row_to_buy_has_the_largest_net_worth() -> None:
    found = planned(chats(), Memory(64 * BLOCK, 512 * BLOCK, 1e9), gain=3e5)
    worth = {row: row.flops_saved_share - 3e5 / 100 * (row.host_bytes + row.storage_bytes) / 1e9 for row in found.rows}
    assert worth[found.buy] == max(worth.values())
    assert 0 < found.buy.host_bytes + found.buy.storage_bytes < 576 * BLOCK
    line = next(line for line in show_plan(found).splitlines() if "<- buy" in line)
    assert f"{found.buy.token_hit_rate:.1%}" in line
    assert show_bytes(found.buy.host_bytes or found.buy.storage_bytes) in notes(found)[0]


def test_no_memory_that_delays_first_tokens_is_bought() -> None:
    found = planned(chats(), Memory(0, 512 * BLOCK, 1.0), gain=0.0)
    assert found.rows[-1].flops_saved_share > found.rows[0].flops_saved_share
    assert found.buy == found.rows[0]
    assert notes(found)[0].startswith("Buy: no memory below the device")
    assert notes(planned(chats(), Memory()))[0].startswith("Buy: nothing was offered")


def test_with_a_limit_the_mix_to_buy_is_one_that_meets_it() -> None:
    trace, memory = chats(), Memory(64 * BLOCK, 512 * BLOCK, 1e9)
    loose = planned(trace, memory, gain=1e9, slo_ttft_s=1e6)
    assert loose.buy == loose.rows[0], "all are in time, and nothing is worth this price"
    limit = (loose.buy.ttft_p90_s + min(row.ttft_p90_s for row in loose.rows)) / 2
    tight = planned(trace, memory, gain=1e9, slo_ttft_s=limit)
    assert tight.buy.slo_met and not tight.rows[0].slo_met
    least = min(sum(tiers(row)) for row in tight.rows if row.slo_met)
    assert sum(tiers(tight.buy)) == least, "the price is so high that nothing else counts"
    assert any("The smallest mix that reaches the required 0.9 is" in note for note in notes(tight))
    never = planned(trace, memory, slo_ttft_s=1e-9)
    assert not any(row.slo_met for row in never.rows)
    assert any("No mix reaches the required 0.9. The closest is" in note for note in notes(never))


def test_the_plan_needs_as_many_replicas_as_keep_up() -> None:
    found = planned(chats(), Memory(64 * BLOCK))
    for row in found.rows:
        assert row.busy is not None and row.replicas is not None
        assert row.busy / row.replicas <= 0.7 < row.busy / (row.replicas - 1)
    assert notes(found)[1].startswith(f"Prefill needs {found.buy.replicas} toy with that")
    assert any(f"Plan again with --replicas {found.buy.replicas}" in note for note in notes(found))
    assert not any("Plan again" in note for note in notes(planned(chats(), Memory(), replicas=20)))


def test_overloaded_storage_is_named() -> None:
    slow = planned(chats(), Memory(0, 512 * BLOCK, 60.0))
    read = sum(row * 16 for row in [slow.rows[-1].storage_hit_rate * slow.input_tokens])
    assert slow.rows[-1].storage_busy == pytest.approx(read / 60 / slow.span_s)
    assert slow.rows[0].storage_busy == 0
    assert any("storage is read" in note for note in notes(slow))
    assert not any("storage is read" in note for note in notes(planned(chats(), Memory(0, 512 * BLOCK, 1e9))))


def test_the_weights_that_any_of_the_tokens_uses_are_read() -> None:
    layer = Layer(kv_numbers=8, parameters=900, active_parameters=100, routed=1 / 9)
    sparse = ModelShape("sparse", (layer,), 4, 5, tied=True)
    found = planned(traced([[1, 2]]), Memory(), sparse, flops=1e9, bandwidth_device=1.0, device_memory=1e4)
    assert found.bare.ttft_mean_s == pytest.approx(2 * (20 + 100 + 800 * (1 - (8 / 9) ** 19)))
    two = planned(traced([[1, 2]]), Memory(), sparse, flops=1e9, bandwidth_device=1.0, device_memory=1e4, gpus=2)
    assert two.bare.ttft_mean_s == pytest.approx(found.bare.ttft_mean_s / 2), "each reads its half"


def test_one_latent_on_eight_devices_leaves_an_eighth_of_their_memory() -> None:
    shape, device, trace = read_shape("deepseek-v3"), find_device("h200"), traced([[1, 2]])
    repeated, split = (plan(trace, shape, device, Memory(), Assumptions(kv_copies=copies)) for copies in (None, 1))
    assert (repeated.engine.gpus, repeated.engine.kv_copies) == (8, 8)
    assert repeated.engine.cache_bytes == split.engine.cache_bytes / 8
    assert repeated.engine.host_bytes_per_s == split.engine.host_bytes_per_s / 8, (
        "each reads all of it, over its own link"
    )


def test_replicas_that_share_nothing_each_have_a_part_of_every_tier() -> None:
    trace, given = chats(), Assumptions(**PLAIN, replicas=4, routing="hash", steps=1)
    row = plan(trace, SHAPE, DEVICE, Memory(160 * BLOCK), given).rows[-1]
    real = replay(trace, "lru", 4, setup=Setup(host_blocks=40, replicas=4, routing="hash"))
    assert row.token_hit_rate == real.token_hit_rate
    together = planned(trace, Memory(160 * BLOCK), replicas=4, steps=1).rows[-1]
    assert together.token_hit_rate >= row.token_hit_rate


def test_progress_is_reported_after_each_replay() -> None:
    calls: list[tuple[int, int]] = []
    trace = chats()
    given = Assumptions(**PLAIN)
    plan(
        trace, SHAPE, DEVICE, Memory(64 * BLOCK), given, hits=slow_lru(trace), progress=lambda *pair: calls.append(pair)
    )
    assert [done for done, _ in calls] == list(range(1, len(calls) + 1))
    assert {total for _, total in calls} == {len(calls)}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"mfu": 0.0}, "mfu"),
        ({"mfu": 1.5}, "mfu"),
        ({"memory_share": -1.0}, "memory_share"),
        ({"flops": 0.0}, "flops"),
        ({"bandwidth_host": float("nan")}, "bandwidth_host"),
        ({"overhead": -1.0}, "overhead"),
        ({"gain": float("inf")}, "gain"),
        ({"replicas": 0}, "replicas"),
        ({"gpus": 0}, "gpus"),
        ({"steps": 99}, "steps"),
        ({"mfu": 1e-300}, "mfu"),
        ({"flops": 1e-300}, "flops"),
        ({"bytes_per_token": 1e-300}, "bytes_per_token"),
        ({"bytes_per_token": 1e300}, "bytes_per_token"),
        ({"routing": "sticky"}, "routing"),
        ({"kv_copies": 0}, "kv_copies"),
        ({"slo_share": 0.0}, "slo_share"),
        ({"most_busy": 2.0}, "most_busy"),
        ({"kv_dtype": "int3"}, "kv_dtype"),
        ({"weights_dtype": "int3"}, "weights_dtype"),
        ({"write_policy": "write"}, "write_policy"),
    ],
)
def test_an_invalid_assumption_is_named(given: dict[str, Any], name: str) -> None:
    with pytest.raises(BadArgument, match=name):
        Assumptions(**given)


def test_an_impossible_plan_is_refused() -> None:
    trace = traced([[1]])
    with pytest.raises(BadArgument, match="gpus = 1: must be enough for"):
        planned(trace, Memory(), device_memory=200.0, gpus=1)
    assert planned(trace, Memory(), device_memory=200.0).engine.gpus == 2
    with pytest.raises(BadArgument, match="one whose weights fit"):
        planned(trace, Memory(), device_memory=0.02)
    with pytest.raises(BadArgument, match="8TB@7GB/s"):
        Memory(0, 100)
    with pytest.raises(BadArgument, match=r"slo_ttft = 0\.0: must be a time above 0"):
        planned(trace, Memory(), slo_ttft_s=0.0)
    with pytest.raises(BadArgument, match="kv_copies = 2: must be at most the devices"):
        planned(trace, Memory(), gpus=1, kv_copies=2)
    with pytest.raises(BadArgument, match="1 request or more"):
        planned(traced([]), Memory())
    with pytest.raises(BadArgument, match=r"one of .*h200.*; for another, .*--flops"):
        find_device("voodoo2")


def test_devices_are_what_their_makers_say() -> None:
    h200 = find_device("H200")
    assert (h200.memory_bytes, h200.memory_bytes_per_s, h200.flops_per_s("bf16")) == (141e9, 4.8e12, 989e12)
    assert h200.flops_per_s("fp8") == 1979e12
    assert h200.flops_per_s("int4") == 989e12
    assert find_device("a100-80gb").flops_per_s("fp8") == 312e12
    for device in DEVICES.values():
        assert device.source and device.fp8_flops_per_s in (None, pytest.approx(2 * device.bf16_flops_per_s, rel=0.02))


def test_a_policy_that_does_not_exist_is_refused_before_the_trace_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cyclopts", reason="cyclopts is not installed")
    from mainstem import cli

    arguments = ["plan", "no-such-trace", "--model", "llama-3.1-8b", "--gpu", "h200", "--policy", "absent_one:Rule"]
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith("mainstem: --policy absent_one:Rule: must be opt (the offline optimum), ")


def test_the_command_prints_the_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cyclopts = pytest.importorskip("cyclopts", reason="cyclopts is not installed")
    from mainstem.replay.commands.plan import plan as command

    trace = chats()
    trace.save(tmp_path / "chats.mstrace")
    app = cyclopts.App()
    app.command(command)
    plain = {"--model": "smollm2-135m", "--gpu": "rtx4090", "--device-memory": "400MB"}
    offered = {"--host-memory": "1GB", "--storage": "8GB@7GB/s", "--slo-ttft": "1ms", "--bandwidth-host": "20GB/s"}

    def output(options: dict[str, str], *flags: str) -> str:
        line = [word for pair in {**plain, **options}.items() for word in pair]
        app(["plan", str(tmp_path / "chats.mstrace"), *line, *flags], exit_on_error=False, result_action="return_value")
        return capsys.readouterr().out

    assert "smollm2-135m on 1 x rtx4090" in output({})
    assert "20 GB/s a device" in output(offered)
    found = json.loads(output(offered, "--json"))
    assert found["model"] == "smollm2-135m" and found["requests"] == len(trace)
    assert all(0 <= row["token_hit_rate"] <= 1 and 0 <= row["slo_share"] <= 1 for row in found["rows"])
    lines = [json.dumps({"timestamp": at, "tokens": [1, 2, 3, at]}) for at in range(3)]
    (tmp_path / "bad.jsonl").write_text("\n".join([*lines, '{"timestamp": 4}']))
    line = [word for pair in plain.items() for word in pair]
    skipping = ["plan", str(tmp_path / "bad.jsonl"), *line, "--on-bad", "skip", "--json"]
    app(skipping, exit_on_error=False, result_action="return_value")
    out, err = capsys.readouterr()
    assert json.loads(out)["requests"] == 3 and "line 4" in err, "standard output is JSON alone"
    for option, wrong in (("--storage", "8TB"), ("--gpu", "abacus"), ("--slo-ttft", "soon"), ("--model", "llama-0")):
        with pytest.raises((BadArgument, cyclopts.CoercionError), match=option.strip("-").replace("-", "_")):
            output({option: wrong})


def test_planning_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from mainstem.replay.plan import configs, plan, words; configs.read_shape('deepseek-v3'); "
        "sys.exit(', '.join({'torch', 'transformers', 'cyclopts', 'rich'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_page_has_every_option_and_the_figures_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text("utf-8")
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")
    ]
    rows = {row[0].partition(" ")[0]: row[1:] for row in cells}
    for name, device in DEVICES.items():
        memory, rate, bf16, fp8, link, power, rent = rows[name]
        assert (power, rent) == (f"{device.watts:,.0f} W", f"${device.dollars_per_h:.2f}")
        assert (memory, link) == (f"{device.memory_bytes / 1e9:.0f} GB", f"{device.host_bytes_per_s / 1e9:.0f} GB/s")
        assert rate == f"{device.memory_bytes_per_s / 1e12:.3g} TB/s"
        assert (bf16, fp8) == tuple(
            f"{rate / 1e12:,.0f}" if rate else "" for rate in (device.bf16_flops_per_s, device.fp8_flops_per_s)
        )
    shown = {name for name in rows if name in well_known()}
    assert len(shown) >= 10
    for name in shown:
        shape = read_shape(name)
        sizes = [show_bytes(size) if size else "" for size in (shape.window_bytes(1 << 20), shape.state_bytes())]
        assert rows[name] == [f"{shape.kv_bytes_per_token():,}", *sizes]
    defaults = {row[1]: [float(number) for number in re.findall(r"[\d.]*\d", row[2])] for row in cells if len(row) == 3}
    plain = Assumptions()
    for name in ("memory_share", "mfu", "link_share", "slo_share", "most_busy"):
        assert defaults[f"`--{name.replace('_', '-')}`"][0] == getattr(plain, name), name
    assert defaults["`--gain`, `--steps`"] == [plain.gain, plain.steps]
    assert defaults["`--overhead`"] == [plain.overhead]
    for field in (*fields(Assumptions), *fields(Fleet)):
        assert f"--{field.name.replace('_', '-')}" in page, field.name

"""Plans of fleets: hits, times and flows against a slow model of machines, and money that is computed by hand."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.replays import BLOCK, DEVICE, SHAPE, Lru, named, some_paths

from mainstem.errors import BadArgument
from mainstem.replay.generate import Agents, Chat, Mix, generate
from mainstem.replay.plan.configs import read_shape
from mainstem.replay.plan.engine import Outcome
from mainstem.replay.plan.fleet import FleetPlan, FleetRow, plan_fleet
from mainstem.replay.plan.hardware import DEVICES, find_device
from mainstem.replay.plan.plan import plan as plan_memory
from mainstem.replay.plan.words import assumptions, notes, plan_as_dict, show_plan
from mainstem.replay.trace import Batch, Trace
from mainstem.settings.replay import Assumptions, Fleet, Memory

GIVEN = Assumptions(mfu=1.0, memory_share=1.0, link_share=1.0, routing="round-robin", steps=1)
NETWORK, STORE = 320.0, 80.0  # bytes per second


def some_trace(seed: int) -> tuple[Trace, list[list[int]]]:
    choose, names = random.Random(seed), [named(path) for path in some_paths(seed, 80)]
    times = np.cumsum([choose.choice([0.5, 1.0, 7.0]) for _ in names])
    return Trace.of(Batch.of(names, block_size=10, time_s=times), block_size=10, name="made up"), names


def slow(trace: Trace, names: list[list[int]], machines: int, host: int, store: int, peers: bool) -> dict[str, Any]:
    """Serves a trace in turn; returns tokens by tier, times to first token, and bytes by interval."""
    caches = [[Lru(4), Lru(max(host, 4))] for _ in range(machines)]
    shared = Lru(store)
    tokens = np.zeros(4)
    ttft: list[float] = []
    pulled: dict[int, float] = {}
    read: dict[int, float] = {}
    for i, (time_s, path) in enumerate(zip(trace.whole.time_s.tolist(), names, strict=True)):
        own = i % machines
        device, below = (tier.found(path) for tier in caches[own])
        below = max(device, below)
        others = [max(tier.found(path) for tier in each) for n, each in enumerate(caches) if n != own]
        costs = (2 * 100 * 10) / 1000.0  # seconds to compute a block
        best = max([below, *others]) if peers else below
        best = best if costs >= BLOCK / NETWORK else below
        last = max(best, shared.found(path)) if store else best
        tokens += 10 * np.array([device, below - device, best - below, last - best])
        known = min(10 * last, 10 * len(path) - 1)
        new = 10 * len(path) - known
        seconds = (200 * new + 40) / 1000.0 + BLOCK * (below - device) / 160
        ttft.append(seconds + BLOCK * (best - below) / 160 + BLOCK * (last - best) / STORE)
        span = int(time_s // 10)
        pulled[span] = pulled.get(span, 0) + BLOCK * (best - below)
        read[span] = read.get(span, 0) + BLOCK * (last - best)
        for tier in caches[own]:
            tier.serve(path)
        shared.serve(path)
    return {"tokens": tokens, "ttft": ttft, "pulled": pulled, "read": read}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("machines", "host", "store", "peers"), [(3, 9, 40, True), (2, 0, 0, True), (4, 12, 15, False)]
)
def test_a_fleet_finds_and_moves_what_the_model_says(
    seed: int, machines: int, host: int, store: int, peers: bool
) -> None:
    trace, names = some_trace(seed)
    fleet = Fleet(machines, host * BLOCK, NETWORK if peers else None, router_lag=0.0)
    memory = Memory(0, store * BLOCK, STORE if store else 0.0)
    plan = plan_fleet(trace, SHAPE, DEVICE, memory, GIVEN, fleet)
    row = next(row for row in plan.rows if row.size.machines == machines)
    want = slow(trace, names, machines, host, store, peers)
    total = float(trace.whole.input_tokens.sum())
    rates = (row.device_hit_rate, row.host_hit_rate, row.peer_hit_rate, row.store_hit_rate)
    assert rates == pytest.approx(want["tokens"] / total)
    assert row.token_hit_rate == pytest.approx(sum(rates))
    assert row.ttft_mean_s == pytest.approx(np.mean(want["ttft"]), rel=1e-6)
    assert row.ttft_p90_s == pytest.approx(np.quantile(want["ttft"], 0.9), rel=1e-6)
    for flow, moved in ((row.network, want["pulled"]), (row.store_read, want["read"])):
        assert flow.mean_bytes_per_s == pytest.approx(sum(moved.values()) / plan.span_s)
        assert flow.peak_bytes_per_s == pytest.approx(max(moved.values()) / 10)
    assert (row.peer_hit_rate > 0) == peers and (row.store_hit_rate > 0) == (store > 0)


@pytest.mark.parametrize("queue", [False, True])
def test_one_machine_is_a_fleet_of_one(queue: bool) -> None:
    trace, _ = some_trace(0)
    host, store, given = 9 * BLOCK, 40 * BLOCK, replace(GIVEN, queue=queue, overhead=0.25)
    found = plan_memory(trace, SHAPE, DEVICE, Memory(host, store, STORE), given)
    alone = next(row for row in found.rows if (row.host_bytes, row.storage_bytes) == (host, store))
    row = plan_fleet(trace, SHAPE, DEVICE, Memory(0, store, STORE), given, Fleet(1, host)).rows[-1]
    for each in fields(Outcome):
        assert getattr(row, each.name) == getattr(alone, each.name), each.name
    assert (row.store_hit_rate, row.busy, row.needed) == (alone.storage_hit_rate, alone.busy, alone.replicas)
    assert row.host_hit_rate > 0 < row.store_hit_rate and row.peer_hit_rate == 0


def test_what_one_machine_reads_another_sends() -> None:
    paths = [[1, 2, 3], [1, 2, 3], [9], [9]]
    trace = Trace.of(Batch.of(paths, block_size=10, time_s=[0, 10, 20, 40]), block_size=10, name="pulls")
    row = plan_fleet(trace, SHAPE, DEVICE, Memory(), GIVEN, Fleet(2, network=NETWORK, router_lag=0.0)).rows[-1]
    assert row.peer_hit_rate == 4 / 8 and row.device_hit_rate == 0
    assert row.network.mean_bytes_per_s == 4 * BLOCK / 40 and row.network.peak_bytes_per_s == 3 * BLOCK / 10
    assert row.inbound == row.outbound == row.network, "machine 1 reads all from machine 0"


def test_no_pull_where_computing_is_sooner() -> None:
    trace = Trace.of(Batch.of([[1, 2], [1, 2]], block_size=10), block_size=10, name="slow network")
    row = plan_fleet(trace, SHAPE, DEVICE, Memory(), GIVEN, Fleet(2, network=1.0, router_lag=0.0)).rows[-1]
    assert row.peer_hit_rate == 0 and row.network.peak_bytes_per_s == 0


def test_waiting_is_for_the_machine_that_serves() -> None:
    trace = Trace.of(Batch.of([[1], [2], [3], [4], [5]], block_size=10, time_s=[0, 0, 0, 0, 9]), block_size=10)
    row = plan_fleet(trace, SHAPE, DEVICE, Memory(), replace(GIVEN, queue=True), Fleet(2)).rows[-1]
    assert row.ttft_mean_s == pytest.approx((2 * 2.04 + 2 * 4.08 + 2.04) / 5)


# ---- how many, and what they cost


def busy_trace(requests: int = 400) -> Trace:
    """Each prompt has one new block after nine of ten shared ones: 20 s to compute, or 2 if the nine are found."""
    paths = [[100 * (i % 10) + j for j in range(9)] + [10_000 + i] for i in range(requests)]
    return Trace.of(Batch.of(paths, block_size=10, time_s=np.arange(requests)), block_size=10, name="busy")


def test_the_fewest_machines_that_carry_the_load_are_found() -> None:
    fleet = Fleet(64, 200 * BLOCK, router_lag=0.0)
    plan = plan_fleet(busy_trace(), SHAPE, DEVICE, Memory(), replace(GIVEN, routing="cost", steps=6), fleet)
    assert plan.bare.needed == math.ceil(400 * 20.04 / 399 / 0.7)
    assert plan.enough is not None
    sizes = [row.size.machines for row in plan.rows]
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == 64
    assert plan.enough.needed <= plan.enough.size.machines
    assert all(row.needed > row.size.machines for row in plan.rows if row.size.machines < plan.enough.size.machines)
    assert plan.enough.size.machines < plan.bare.needed / 2
    text = " ".join(notes(plan))
    assert f"It takes {plan.enough.size.machines} machines of 1 x toy ({plan.bare.needed} without a cache)" in text


def test_too_few_machines_say_how_many() -> None:
    plan = plan_fleet(busy_trace(), SHAPE, DEVICE, Memory(), GIVEN, Fleet(1))
    assert plan.enough is None
    assert f"Too few with 1 machine: at their hits it takes {plan.rows[-1].needed}" in notes(plan)[0]


def test_money_and_energy_by_hand() -> None:
    fleet = Fleet(
        2,
        10**12,
        memory_price=0.5,
        store_price=0.1,
        energy_price=0.2,
        idle_power=0.5,
        machine_power=50.0,
        store_power=3.0,
        pue=2.0,
    )
    plan = plan_fleet(busy_trace(), SHAPE, DEVICE, Memory(0, 2 * 10**12, 1e9), GIVEN, fleet)
    row = plan.rows[-1]
    share = min(row.busy, 1.0)
    watts = 2.0 * (2 * (100.0 * (0.5 + 0.5 * share) + 50.0) + 2 * 3.0)
    assert row.energy_kwh == pytest.approx(watts * 0.73)
    assert row.money == pytest.approx(2 * 2.0 * 730 + 2 * 1000 * 0.5 + 2000 * 0.1 + row.energy_kwh * 0.2)
    dear = plan_fleet(
        busy_trace(), SHAPE, DEVICE, Memory(), GIVEN, Fleet(2, device_price=10.0, device_power=0.0, machine_power=0.0)
    )
    assert dear.rows[-1].money == pytest.approx(2 * 10.0 * 730)
    assert dear.rows[-1].energy_kwh == 0.0


def test_the_knees_follow_their_prices() -> None:
    def knees(machine_gain: float, gain: float) -> tuple[int, int]:
        given = replace(GIVEN, routing="prefix", steps=3, gain=gain)
        fleet = Fleet(8, 64 * BLOCK, machine_gain=machine_gain, router_lag=0.0)
        plan = plan_fleet(busy_trace(), SHAPE, DEVICE, Memory(), given, fleet)
        return plan.knee.size.machines, plan.host_knee.size.host_bytes

    free, dear = knees(0.0, 0.0), knees(100.0, 1e12)
    assert free[0] > dear[0] == 1 and free[1] > dear[1] == 0


def test_less_of_each_is_shown_at_the_chosen_size() -> None:
    memory = Memory(0, 50 * BLOCK, STORE)
    plan = plan_fleet(busy_trace(), SHAPE, DEVICE, memory, replace(GIVEN, steps=2), Fleet(4, 40 * BLOCK, NETWORK))
    sizes = {row.size for row in plan.memories}
    largest = (plan.enough or plan.rows[-1]).size
    assert {largest, replace(largest, network=False), replace(largest, store_bytes=0)} <= sizes
    assert {size.host_bytes for size in sizes} == {0, 20 * BLOCK, 40 * BLOCK}


# ---- words


def planned() -> FleetPlan:
    trace = generate(Mix(rate_per_s=20, parts=((Chat(), 3.0), (Agents(), 1.0))), 800, seed=1)
    given = Assumptions(steps=1, queue=True)
    fleet = Fleet(8, 10**11, 25e9)
    return plan_fleet(
        trace, read_shape("qwen3-32b"), find_device("h200"), Memory(0, 10**13, 10e9), given, fleet, slo_ttft_s=0.5
    )


def test_every_assumption_is_shown_with_its_option() -> None:
    plan = planned()
    shown = {each.option.lstrip("-").replace("-", "_") for each in assumptions(plan)}
    assert shown >= {field.name for field in fields(Fleet)}
    unused = {"replicas", "link_share"}  # machines replace replicas; the share is part of a source
    assert shown | unused >= {field.name for field in fields(Assumptions)} - {"queue"}
    assert all(each.source for each in assumptions(plan))
    text = show_plan(plan)
    assert "(--link-share)" in text
    for each in assumptions(plan):
        assert each.what in text and each.shown in text
    assert "<- " in text and "With less:" in text and "routed by cost" in text
    assert all(line == line.rstrip() for line in text.split("\n"))


def test_json_has_all_of_it() -> None:
    plan = planned()
    found = json.loads(json.dumps(plan_as_dict(plan)))
    assert found["rows"][0]["size"]["machines"] == plan.rows[0].size.machines
    assert {"bare", "rows", "memories", "knee", "host_knee", "enough", "assumptions", "notes"} <= set(found)
    assert found["model"] == "qwen3-32b" and found["device"] == "h200"
    assert set(found["rows"][0]) == {field.name for field in fields(FleetRow)}


def test_devices_have_power_and_a_rent() -> None:
    assert all(device.watts > 0 and device.dollars_per_h > 0 for device in DEVICES.values())


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "busy.mstrace"
    busy_trace(40).save(path)
    common = [sys.executable, "-m", "mainstem", "plan", str(path), "--model", "llama-3.1-8b", "--gpu", "l4"]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*common, *options], capture_output=True, text=True, check=False)

    done = run("--fleet", "--machines", "2", "--network", "10GB/s", "--steps", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert [row["size"]["machines"] for row in json.loads(done.stdout)["rows"]] == [1, 2]
    for options, message in (
        (("--machines", "4"), "--machines 4: must be left out without --fleet"),
        (("--fleet", "--machines", "0"), "--machines 0: must be an integer from 1 to 4096"),
        (("--fleet", "--machines", "1", "--network", "1GB/s"), "left out with one machine"),
        (("--fleet", "--host-memory", "1TB"), "left out with --fleet: --machine-memory is of one machine"),
    ):
        done = run(*options)
        assert done.returncode != 0 and message in done.stderr.replace("\n", " "), done.stderr
        assert "Traceback" not in done.stderr


def test_a_trace_without_time_is_refused() -> None:
    for trace in (Trace.of(Batch.of([])), Trace.of(Batch.of([[1], [2]], time_s=[3, 3]))):
        with pytest.raises(BadArgument, match="a trace whose requests come at different times"):
            plan_fleet(trace, SHAPE, DEVICE, Memory(), GIVEN, Fleet(2))

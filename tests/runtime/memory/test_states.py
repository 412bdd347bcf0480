"""States in slots: what models keep, and how they are found to go on; `test_runner.py` has whole sequences."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from rigs.slow import slow_but

from bench.tiny_models import ALONE, HYBRIDS, REFUSED, RESUMED, STEPPED, ZAMBA2, tiny
from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime.attention.paged import TOLERANCE
from mainstem.runtime.memory import states
from mainstem.runtime.memory.states import Continuation, Proof, StateCache, StatePool, StateShape, prove
from mainstem.runtime.models import places
from mainstem.runtime.parallel.ranks import ONE_RANK, Ranks

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 1e-4  # of the logits' spread, for rounding

(INFINITE,) = struct.unpack("<q", struct.pack("<d", float("inf")))
FAMILIES = {**HYBRIDS, **RESUMED, **STEPPED, **ALONE}


MOST_UNLIKE = ("qwen3_5_text", "mamba2", "lfm2", "mamba", "minimax", "recurrent_gemma", "rwkv")


@pytest.fixture(scope="module", params=slow_but(sorted(FAMILIES), *MOST_UNLIKE))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def proof(model: Any, limit: float = LIMIT, ranks: Ranks = ONE_RANK) -> Proof:
    return prove(model, shape_of(model), limit, ranks)


def shape_of(model: Any) -> StateShape:
    shape = StateShape.of(model)
    assert shape is not None
    return shape


def made(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return tiny(family, **FAMILIES[family]).to(dtype)  # type: ignore[call-arg, arg-type]


def wanted(family: str) -> Proof:
    resumed: Continuation = "resumed" if family in RESUMED else "chunked"
    return Proof("stepped" if family in STEPPED else resumed, stacked=family not in ALONE)


def test_the_self_test_finds_how_many_tokens_may_follow_a_state(family: str) -> None:
    assert proof(made(family)) == wanted(family)


def test_low_precision_hides_no_scan_that_starts_again(family: str) -> None:
    """In bfloat16, Mamba's error is smaller than the limit that rounding needs."""
    assert proof(made(family, torch.bfloat16), 0.5) == wanted(family)


def test_slots_cost_what_the_tensors_take(family: str) -> None:
    shape = shape_of(made(family))
    assert shape.bytes_per_slot * 6 == sum(tensor.nbytes for tensor in StatePool(shape, 6).tensors)


def test_a_forward_touches_no_slot_before_it_is_stored(family: str) -> None:
    model = made(family)
    pool = StatePool(shape_of(model), 2)
    cache = StateCache(model.config, pool)
    for tensor in pool.tensors:
        tensor.normal_()
    before = [tensor.clone() for tensor in pool.tensors]
    cache.load([1])
    states._forward(model, torch.tensor([[5]]), 9, cache)
    assert all(map(torch.equal, pool.tensors, before))
    cache.store([0])
    assert all(torch.equal(now[1], then[1]) for now, then in zip(pool.tensors, before, strict=True))
    assert not any(torch.equal(now[0], then[0]) for now, then in zip(pool.tensors, before, strict=True))


def test_states_of_layers_have_their_own_dtype() -> None:
    shape = shape_of(made("mamba2", torch.bfloat16))
    assert {spec.kind: spec.dtype for spec in shape.tensors} == {"conv": torch.bfloat16, "recurrent": torch.float32}


def test_a_model_without_states_is_not_run() -> None:
    model = tiny("llama")
    model.forward = refuse_to_run
    assert StateShape.of(model) is None


def refuse_to_run(*args: object, **others: object) -> None:
    raise AssertionError("it was run")


def test_a_model_whose_states_nothing_can_move_is_refused_and_not_run() -> None:
    family, changes = REFUSED["xlstm"]
    model = tiny(family, **changes)
    model.forward = refuse_to_run
    with pytest.raises(UnsupportedModel, match="xlstm keeps its state in a cache class of its own"):
        StateShape.of(model)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("minimax", "does not run with transformers' cache"),
        ("recurrent_gemma", "keeps the state of layer 0 outside"),
        ("rwkv", "takes no cache"),
    ],
)
def test_models_that_keep_their_states_elsewhere_need_their_place(
    family: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_PLACES", {})
    with pytest.raises(UnsupportedModel, match=message):
        StateShape.of(tiny(family, **FAMILIES[family]))


def test_a_model_with_states_in_its_modules_keeps_nothing_there_after_a_forward() -> None:
    model = made("recurrent_gemma")
    shape_of(model)
    for layer in model.model.layers:
        block = layer.temporal_block
        assert getattr(block, "conv1d_state", None) is None
        assert getattr(getattr(block, "rg_lru", None), "recurrent_states", None) is None


def test_a_stateful_model_without_a_place_in_the_cache_is_refused() -> None:
    model = tiny("llama")
    model._is_stateful = True
    with pytest.raises(UnsupportedModel, match="none that transformers' cache has a place for"):
        StateShape.of(model)


def test_a_layer_that_leaves_nothing_in_the_cache_is_refused() -> None:
    model = broken_lfm2(lambda conv, x, cache, **others: conv(x, past_key_values=None, **others))
    with pytest.raises(UnsupportedModel, match="keeps the state of layer 0 outside"):
        StateShape.of(model)


def test_a_model_that_wants_another_cache_is_refused() -> None:
    def fail(conv: Any, x: torch.Tensor, cache: Any, **others: Any) -> None:
        raise ValueError("not my cache")

    with pytest.raises(UnsupportedModel, match="not my cache"):
        StateShape.of(broken_lfm2(fail))


def forget(conv: Any, x: torch.Tensor, cache: Any, **others: Any) -> torch.Tensor:
    """Drops half of the state at every call."""
    if cache is not None and cache.has_previous_state(0):
        cache.layers[0].conv_states[0][:, ::2] = 0
    out: torch.Tensor = conv(x, past_key_values=cache, **others)
    return out


def mix(conv: Any, x: torch.Tensor, cache: Any, **others: Any) -> torch.Tensor:
    """Gives each row its neighbour's state."""
    if cache is not None and cache.has_previous_state(0):
        cache.layers[0].conv_states[0].copy_(cache.layers[0].conv_states[0].roll(1, 0))
    out: torch.Tensor = conv(x, past_key_values=cache, **others)
    return out


def fade(conv: Any, x: torch.Tensor, cache: Any, **others: Any) -> torch.Tensor:
    """Weakens the state where several tokens follow."""
    if cache is not None and cache.has_previous_state(0) and x.shape[1] > 1:
        cache.layers[0].conv_states[0].mul_(0.95)
    out: torch.Tensor = conv(x, past_key_values=cache, **others)
    return out


def test_at_low_precision_more_than_the_model_s_own_rounding_is_an_error() -> None:
    model = broken_lfm2(fade).to(torch.bfloat16)
    assert proof(model, TOLERANCE[torch.bfloat16]) == Proof("stepped", stacked=True)


@pytest.mark.parametrize(
    "family", slow_but([name for name in FAMILIES if name not in STEPPED], "qwen3_5_text", "mamba2")
)
def test_at_low_precision_rounding_is_none(family: str) -> None:
    assert proof(made(family, torch.bfloat16), TOLERANCE[torch.bfloat16]) == wanted(family)


def test_the_self_test_refuses_what_goes_on_wrongly() -> None:
    with pytest.raises(UnsupportedModel, match="even token by token"):
        proof(broken_lfm2(forget))


@pytest.mark.parametrize(("family", "changes"), [("nemotron_h", HYBRIDS["nemotron_h"]), ("zamba2", ZAMBA2)])
def test_a_shortest_time_step_of_scans_alone_is_refused_where_it_matters(family: str, changes: dict[str, Any]) -> None:
    """transformers keeps it in scans, but not in single steps."""
    for shortest, is_refused in ((1e-6, False), (1e-3, True)):
        model = tiny(family, **{**changes, "time_step_min": shortest})
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.data.sub_(5.0)  # shorter steps, most of them below the longer limit
        with pytest.raises(UnsupportedModel, match="even token by token") if is_refused else nullcontext():
            proof(model)


def test_the_self_test_finds_rows_that_are_not_independent() -> None:
    assert proof(broken_lfm2(mix)) == Proof("chunked", stacked=False)


def broken_lfm2(breakage: Any) -> Any:
    """A model whose first layer's convolution runs through `breakage`."""
    model = made("lfm2")
    conv = model.model.layers[0].conv
    original = conv.forward

    def forward(hidden_states: torch.Tensor, past_key_values: Any = None, **others: Any) -> Any:
        return breakage(original, hidden_states, past_key_values, **others)

    conv.forward = forward
    return model


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(BadArgument, match="kv_bytes"):  # the setting that states have their memory from
        StatePool(shape_of(made("lfm2")), 2**50)


class Beside(Ranks):
    """Two ranks as the first sees them; the other one's votes are ours, but for one call, by its number."""

    def __init__(self, differs: int = -1) -> None:
        super().__init__(size=2)
        self.differs, self.calls = differs, 0

    def agree(self, votes: Sequence[int]) -> Sequence[int]:
        self.calls += 1
        return [-INFINITE] if self.calls - 1 == self.differs else votes


def test_what_one_rank_finds_is_what_all_decide_by() -> None:
    """Ranks that decided otherwise would wait for each other."""
    model = made("lfm2")
    assert proof(model, LIMIT, alike := Beside()) == Proof("chunked", stacked=True)
    assert alike.calls == 4  # one for each decision
    with pytest.raises(UnsupportedModel, match="differ from those of the whole prompt by inf"):
        proof(model, LIMIT, Beside(differs=0))
    assert proof(model, LIMIT, Beside(differs=1)) == Proof("chunked", stacked=False)
    for number in (2, 3):
        assert proof(model, LIMIT, Beside(differs=number)).continuation == "stepped"

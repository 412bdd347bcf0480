"""States in slots: however a sequence is cut, copied, stacked and restored, its logits are those of the whole."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from bench.tiny_models import ALONE, HYBRIDS, REFUSED, RESUMED, STEPPED, VOCAB, ZAMBA2, tiny
from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime.attention.paged import TOLERANCE
from mainstem.runtime.kernels.scans import resume
from mainstem.runtime.memory.states import Continuation, Proof, StateCache, StatePool, StateShape, prove
from mainstem.runtime.models import places
from mainstem.runtime.models.places import run
from mainstem.runtime.parallel.ranks import ONE_RANK, Ranks

pytestmark = pytest.mark.usefixtures("one_thread")

# Logits differ from those of the whole sequence by rounding only: fp32, logits up to about 10. Most models differ by up
# to 2e-5, Qwen3-Next by up to 1.2e-4: its scan inverts matrices of 64 tokens.
ATOL = 5e-4

# The same as a fraction of the logits' spread.
LIMIT = 1e-4

TOKENS = torch.randint(VOCAB, (3, 75), generator=torch.Generator().manual_seed(5))
CUTS = (0, 8, 13, 14, 40, 75)  # at a boundary of the scan, off it, one token, over several boundaries
KEPT = "states_test_kept"
(INFINITE,) = struct.unpack("<q", struct.pack("<d", float("inf")))
FAMILIES = {**HYBRIDS, **RESUMED, **STEPPED, **ALONE}


@functools.cache
def whole(family: str) -> torch.Tensor:
    """Plain logits [3, 75, vocab] of TOKENS, without a cache."""
    model = tiny(family, **FAMILIES[family])
    with torch.inference_mode():
        return torch.cat([model(input_ids=row.unsqueeze(0), use_cache=False).logits for row in TOKENS])


class StatesRig:
    """A model with states in slots; a plain attention function keeps its keys and values by sequence."""

    def __init__(self, family: str) -> None:
        model = made(family)
        shape = shape_of(model)
        assert (resume(model) is not None) == (family in RESUMED)
        self.model, self.shape, self.alone = model, shape, family in ALONE
        self.pool = StatePool(shape, 6)
        for tensor in self.pool.tensors:
            tensor.fill_(7)  # uninitialised memory may be NaN, which equals nothing
        self.cache = StateCache(model.config, self.pool)
        self.kept: dict[tuple[Any, int], tuple[torch.Tensor, torch.Tensor]] = {}
        AttentionInterface.register(KEPT, kept_attention)
        if family != "rwkv":
            model.set_attn_implementation(KEPT)

    def start(self, tokens: torch.Tensor, slot: int, name: Any) -> torch.Tensor:
        """Runs a sequence's first tokens; returns logits [n, vocab]."""
        self.cache.start(1)
        return self._run(tokens.unsqueeze(0), [0], [slot], [name])[0]

    def go_on(
        self, tokens: torch.Tensor, starts: Sequence[int], slots: Sequence[int], names: Sequence[Any]
    ) -> torch.Tensor:
        """Runs tokens [rows, n] after the states in slots, if possible in one forward; returns [rows, n, vocab]."""
        if self.alone and len(slots) > 1:
            rows = zip(tokens.split(1), starts, slots, names, strict=True)
            return torch.cat([self.go_on(row, [start], [slot], [name]) for row, start, slot, name in rows])
        self.cache.load(slots)
        return self._run(tokens, starts, slots, names)

    def _run(
        self, tokens: torch.Tensor, starts: Sequence[int], slots: Sequence[int], names: Sequence[Any]
    ) -> torch.Tensor:
        positions = torch.tensor(starts).unsqueeze(1) + torch.arange(tokens.shape[1])
        with torch.inference_mode():
            given = {"input_ids": tokens, "position_ids": positions, "kept": (self.kept, names)}
            logits: torch.Tensor = run(self.model, self.cache, **given).logits
        self.cache.store(slots)
        return logits

    def fork(self, name: Any, other: Any) -> None:
        """Gives a sequence the keys and values of another."""
        for (owner, layer), pair in list(self.kept.items()):
            if owner == name:
                self.kept[other, layer] = pair

    def slot(self, slot: int) -> list[torch.Tensor]:
        return [tensor[slot].clone() for tensor in self.pool.tensors]


def kept_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    kept: tuple[dict[Any, Any], Sequence[Any]],
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of rows of sequences to all keys that were kept of each."""
    assert attention_mask is None
    assert key.shape[-2] == query.shape[-2]  # the new ones only
    memory, names = kept
    rows = []
    for row, name in enumerate(names):
        entry = (name, module.layer_idx)
        new = (key[row : row + 1], value[row : row + 1])
        k, v = (
            (torch.cat(pair, dim=-2) for pair in zip(memory.get(entry, ()), new, strict=True))
            if entry in memory
            else new
        )
        memory[entry] = (k, v)
        n, seen = query.shape[-2], k.shape[-2]
        mask = torch.ones(n, seen, dtype=torch.bool).tril(seen - n)
        q = query[row : row + 1]
        rows.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True))
    return torch.cat(rows).transpose(1, 2), None


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cuts(family: str) -> tuple[int, ...]:
    return (0, *range(54, 76)) if family in STEPPED else CUTS


def close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)


def test_a_cut_sequence_is_as_the_whole(family: str, cuts: tuple[int, ...]) -> None:
    rig = StatesRig(family)
    tokens, expected = TOKENS[0], whole(family)[0]
    close(rig.start(tokens[: cuts[1]], 2, "a"), expected[: cuts[1]])
    for begin, end in itertools.pairwise(cuts[1:]):
        close(rig.go_on(tokens[None, begin:end], [begin], [2], ["a"])[0], expected[begin:end])


def test_one_token_is_a_start_too(family: str) -> None:
    rig = StatesRig(family)
    close(rig.start(TOKENS[0, :1], 0, "a"), whole(family)[0, :1])
    close(rig.go_on(TOKENS[:1, 1:2], [1], [0], ["a"])[0], whole(family)[0, 1:2])


def test_a_restored_state_goes_on_as_the_first_did_and_its_source_stays(family: str, cuts: tuple[int, ...]) -> None:
    rig = StatesRig(family)
    tokens, begin = TOKENS[0], cuts[-4]
    rig.start(tokens[:begin], 0, "a")
    rig.pool.copy(0, 5)
    rig.fork("a", "b")
    aside = rig.slot(5)
    ran = []
    for slot, name in ((0, "a"), (1, "b")):
        if slot == 1:
            rig.pool.copy(5, 1)
        logits = [rig.go_on(tokens[None, b:e], [b], [slot], [name]) for b, e in itertools.pairwise(cuts[-4:])]
        ran.append((torch.cat(logits, dim=1), rig.slot(slot)))
    assert torch.equal(ran[0][0], ran[1][0])
    assert all(torch.equal(one, other) for one, other in zip(ran[0][1], ran[1][1], strict=True))
    assert all(torch.equal(now, then) for now, then in zip(rig.slot(5), aside, strict=True))
    assert not any(torch.equal(now, then) for now, then in zip(rig.slot(0), aside, strict=True))


def test_a_forward_touches_no_slot_before_it_is_stored(family: str) -> None:
    rig = StatesRig(family)
    rig.start(TOKENS[0, :9], 3, "a")
    before = [tensor.clone() for tensor in rig.pool.tensors]
    rig.cache.load([3])
    rig.cache.store = lambda slots: None  # type: ignore[method-assign]
    rig._run(TOKENS[:1, 9:10], [9], [3], ["a"])
    rig.start(TOKENS[1, :5], 3, "b")
    assert all(torch.equal(now, then) for now, then in zip(rig.pool.tensors, before, strict=True))


def test_stacked_sequences_of_any_length_are_as_each_alone(family: str) -> None:
    rig = StatesRig(family)
    slots, starts = [4, 0, 3], [40, 9, 23]
    for row in range(3):
        rig.start(TOKENS[row, : starts[row]], slots[row], row)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 2]):
        at = [starts[row] for row in order]
        new = torch.stack([TOKENS[row, starts[row] : starts[row] + 1] for row in order])
        logits = rig.go_on(new, at, [slots[row] for row in order], order)
        close(logits[:, 0], torch.stack([whole(family)[row, start] for row, start in zip(order, at, strict=True)]))
        for row in order:
            starts[row] += 1


def test_nothing_of_a_sequence_is_in_the_slot_of_another(family: str) -> None:
    after = []
    for beside in (1, 2):
        rig = StatesRig(family)
        rig.start(TOKENS[0, :11], 0, "a")
        rig.start(TOKENS[beside, :17], 1, "b")
        new = torch.stack([TOKENS[0, 11:12], TOKENS[beside, 17:18]])
        rig.go_on(new, [11, 17], [0, 1], ["a", "b"])
        after.append((rig.slot(0), rig.slot(1)))
    for one, other in zip(after[0][0], after[1][0], strict=True):
        close(one, other)
    assert not any(torch.equal(one, other) for one, other in zip(after[0][1], after[1][1], strict=True))


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
    rig = StatesRig(family)
    assert rig.shape.bytes_per_slot * 6 == sum(tensor.nbytes for tensor in rig.pool.tensors)


@pytest.mark.parametrize(("family", "layers"), [("falcon_h1", (0, 1, 2)), ("lfm2", (0, 2)), ("nemotron_h", (0,))])
def test_the_layers_that_keep_a_state_are_known(family: str, layers: tuple[int, ...]) -> None:
    assert shape_of(made(family)).layers == layers


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
    rig = StatesRig("recurrent_gemma")
    rig.start(TOKENS[0, :9], 0, "a")
    for layer in rig.model.model.layers:
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


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in STEPPED])
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

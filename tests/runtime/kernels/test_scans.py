"""Our own scans: from any state, in any blocks, they compute what one token after another does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import silu, softplus

from bench.tiny_models import RESUMED, tiny
from mainstem.errors import UnsupportedModel
from mainstem.runtime.kernels import scans
from mainstem.runtime.kernels.scans import resume, selective_scan
from mainstem.runtime.memory.states import Proof, StateShape, prove

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, CHANNELS, N, TOKENS = 2, 5, 3, 150  # more tokens than two blocks


def inputs(tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    wide = (ROWS, CHANNELS, tokens)
    return {
        "x": normal(*wide), "dt": normal(*wide), "z": normal(*wide),
        "b": normal(ROWS, N, tokens), "c": normal(ROWS, N, tokens),
        "a": -normal(CHANNELS, N).exp(), "D": normal(CHANNELS), "delta_bias": normal(CHANNELS),
        "state": normal(ROWS, CHANNELS, N),
    }  # fmt: skip


def recurrence(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, one token after another."""
    h, rows = given["state"].clone(), []
    dt = softplus(given["dt"] + given["delta_bias"][:, None])
    for t in range(dt.shape[2]):
        step, x = dt[:, :, t, None], given["x"][:, :, t, None]
        h = torch.exp(step * given["a"]) * h + step * given["b"][:, None, :, t] * x
        y = (h * given["c"][:, None, :, t]).sum(-1) + given["D"] * x[..., 0]
        rows.append(y * silu(given["z"][:, :, t]))
    return torch.stack(rows, dim=-1), h


@pytest.mark.parametrize("tokens", [1, 64, 65, TOKENS])
def test_a_scan_goes_on_from_a_state(tokens: int) -> None:
    given = inputs(tokens)
    before = given["state"].clone()
    y, last = selective_scan(**given, delta_softplus=True, return_last_state=True)
    expected, after = recurrence(given)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(last, after)
    assert torch.equal(given["state"], before)


def test_bias_gate_and_skip_may_be_missing() -> None:
    given = inputs()
    wanted = recurrence({**given, "delta_bias": torch.zeros(CHANNELS), "D": torch.zeros(CHANNELS)})[0]
    for name in ("D", "delta_bias"):
        del given[name]
    gate = silu(given.pop("z"))
    torch.testing.assert_close(selective_scan(**given, delta_softplus=True) * gate, wanted)


def test_only_layers_that_call_such_a_scan_are_changed_and_it_can_be_undone() -> None:
    assert resume(tiny("mamba2", num_attention_heads=..., num_key_value_heads=..., num_heads=8, head_dim=16)) is None
    jamba = tiny("jamba", **RESUMED["jamba"])
    undo = resume(jamba)
    assert undo is not None
    assert changed(jamba) == ["JambaMambaMixer"] * 2
    undo()
    assert changed(jamba) == []


def test_a_layer_that_others_have_changed_is_left_to_them() -> None:
    jamba = tiny("jamba", **RESUMED["jamba"])
    first, *_ = (module for module in jamba.modules() if type(module).__name__ == "JambaMambaMixer")
    theirs = first.forward = lambda *args, **others: args
    undo = resume(jamba)
    assert undo is not None and first.forward is theirs and changed(jamba) == ["JambaMambaMixer"] * 2
    undo()
    assert first.forward is theirs and changed(jamba) == ["JambaMambaMixer"]


def changed(model: torch.nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules() if "forward" in vars(module)]


def forgets(state: torch.Tensor, *args: Any, **others: Any) -> Any:
    return selective_scan(torch.zeros_like(state), *args, **others)


def skews(state: torch.Tensor, *args: Any, **others: Any) -> Any:
    return selective_scan(state * 1.1, *args, **others)


@pytest.mark.parametrize("ours", [None, forgets, skews])
@pytest.mark.parametrize("family", sorted(RESUMED))
def test_a_model_whose_scan_is_not_proven_steps(family: str, ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "_SCANS", {} if ours is None else {"mamba_selective_scan": ours})
    model = tiny(family, **RESUMED[family])
    shape = StateShape.of(model)
    assert shape is not None
    assert prove(model, shape, 1e-4) == Proof("stepped", stacked=True)
    assert changed(model) == []


@pytest.mark.parametrize("family", sorted(RESUMED))
def test_a_model_that_has_our_scans_already_is_not_taken_for_one_that_needs_none(family: str) -> None:
    model = tiny(family, **RESUMED[family])
    shape = StateShape.of(model)
    assert shape is not None
    assert prove(model, shape, 1e-4) == prove(model, shape, 1e-4) == Proof("resumed", stacked=True)


def test_a_model_that_is_refused_keeps_its_own_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("mamba", **RESUMED["mamba"])
    shape = StateShape.of(model)
    assert shape is not None
    with pytest.raises(UnsupportedModel):
        prove(model, shape, 0.0)
    assert changed(model) == []

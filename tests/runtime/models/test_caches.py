"""Models that attend by their own code: keys and values of one sequence are gathered for them from pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bench.tiny_models import GATHERED, loaded, tiny
from mainstem.errors import UnsupportedModel
from mainstem.runtime.attention.paged import BatchPlan, Extent, Paging, SdpaAttention, plan_batch
from mainstem.runtime.memory.kv import KVPool, KVShape
from mainstem.runtime.models.caches import Gathering
from mainstem.runtime.models.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=8, value_dim=4)
TABLE = np.array([5, 1, 4, 0], np.int32)


class _Landed:
    """A transfer that notes which layers were waited for."""

    def __init__(self) -> None:
        self.waited: list[int] = []

    def wait_layer(self, layer: int) -> None:
        self.waited.append(layer)


def gathering(plan: BatchPlan, start: int, *arriving: Any) -> Gathering:
    paging = Paging(SdpaAttention(), {"full": plan}, {3: ("full", 0), 7: ("full", 1)}, 64, arriving)
    return Gathering(tiny("llama").config, paging, start)


def test_a_layer_gets_back_the_keys_and_values_of_all_positions() -> None:
    pool = KVPool(SHAPE, pages=6, page_size=3, dtype=torch.float32)
    keys, values = torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 4)
    for begin, end in ((0, 4), (4, 5), (5, 11)):
        landed = _Landed()
        cache = gathering(plan_batch([Extent(end - begin, begin, TABLE)], pool), begin, landed)
        assert cache.get_seq_length() == begin
        assert cache.get_mask_sizes(end - begin, 7) == (end, 0)
        given = keys[:, :, begin:end], values[:, :, begin:end]
        seen = cache.update(*given, 7)
        assert torch.equal(seen[0], keys[:, :, :end])
        assert torch.equal(seen[1], values[:, :, :end])
        assert landed.waited == [7]


@pytest.mark.parametrize(("layer", "size"), [(7, 8), (4, 4)], ids=["size", "layer"])
def test_what_the_pool_does_not_hold_is_refused(layer: int, size: int) -> None:
    pool = KVPool(SHAPE, pages=6, page_size=3, dtype=torch.float32)
    cache = gathering(plan_batch([Extent(2, 0, TABLE)], pool), 0)
    with pytest.raises(UnsupportedModel, match="which its pool does not hold"):
        cache.update(torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, size), layer)


# ---------------------------------------------------------------- in the runner


def test_a_model_that_attends_by_its_own_code_is_said_to_run_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert ModelRunner(loaded(tiny("bloom", **GATHERED["bloom"])), 8, 16).alone
    assert ModelRunner(loaded(tiny("stablelm")), 8, 16).alone
    assert [record.message for record in caplog.records if record.name.startswith("mainstem")] == [
        "tiny: requests do not share a forward: its attention cannot be exchanged",
        "tiny: requests do not share a forward: StableLmAttention got no page tables: the model does not pass "
        "arguments on",
    ]
    assert not ModelRunner(loaded(tiny("llama")), 8, 16).alone


def test_the_self_test_finds_a_wrong_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gathering, "get_seq_length", lambda self, layer_idx=0: 0)
    with pytest.raises(UnsupportedModel, match="self-test failed"):
        ModelRunner(loaded(tiny("bloom", **GATHERED["bloom"])), 8, 16)

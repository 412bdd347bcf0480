"""Recorded decode steps give the logits, and write the keys, of steps that are computed like other forwards.

On the CPU, the kernels are interpreted, and what is recorded is called again; on a GPU, it is a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from machine import DEVICE

from bench.tiny_models import CONTEXT, FAMILIES, VARIANTS, VOCAB, WINDOWED, loaded, tiny
from mainstem.runtime.attention.paged import TOLERANCE, Attention, SdpaAttention
from mainstem.runtime.kernels import step_graphs
from mainstem.runtime.kernels.step_graphs import padded_rows
from mainstem.runtime.models.layout import Layout
from mainstem.runtime.models.runner import ModelRunner, recorder_for
from mainstem.runtime.sampling.pooling import Pooling
from mainstem.runtime.segments import Segment
from tests.rigs.interpreted import triton_attention

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = 4
ONE_LAYER = {"num_hidden_layers": 1}
EXACT = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Attention:
    made = triton_attention()
    if DEVICE == "cpu":  # the interpreter takes as long for a task without rows as for any other
        monkeypatch.setattr("mainstem.runtime.attention.triton_attention._LEAST", (4, 16, 64))
    return made


class Recorder:
    """Records as the device does, and counts; a CPU calls what it recorded again.

    Args:
        broken: changes what a repeated step leaves in its results.
    """

    def __init__(self, broken: Callable[[torch.Tensor], object] = lambda _: None) -> None:
        self.recorded, self.repeated = 0, 0
        self._broken = broken
        self._device = recorder_for(torch.device(DEVICE))

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        self.recorded += 1
        again, results = (self._device or self._called)(work)

        def repeat() -> None:
            self.repeated += 1
            again()
            self._broken(results)

        return repeat, results

    @staticmethod
    def _called(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        results = work().clone()
        return lambda: results.copy_(work()), results


class Requests:
    """Requests of which two runners compute the same: one records its steps, the other does not."""

    def __init__(
        self, family: str, changes: dict[str, Any], kernel: Attention, recorder: Any, patch: pytest.MonkeyPatch
    ) -> None:
        # The interpreter takes long, so PyTorch computes the self-test, and what is compared with.
        patch.setattr("mainstem.runtime.models.runner.attention_for", lambda *_: SdpaAttention())
        self.runners = []
        for _ in range(2):
            model: Any = tiny(family, **changes).to(DEVICE)  # type: ignore[arg-type]
            counts = dict.fromkeys(Layout.of(model.config, CONTEXT).names, 200)
            self.runners.append(ModelRunner(loaded(model), counts, PAGE, cuda_graphs=False))
        recorded = self.runners[0]._forward
        recorded.attention = kernel
        recorded.record(lambda _: recorder, TOLERANCE[torch.float32])
        self._chance = np.random.default_rng(0)
        self._tables: list[Any] = []
        self._ends: list[int] = []
        self._free = 0

    def add(self, length: int, shared: int = 0) -> None:
        """Adds a request, whose first pages are those of request 0, and computes its prompt."""
        kept = self._tables[0][: shared // PAGE] if shared else np.empty(0, dtype=np.int32)
        own = CONTEXT // PAGE - len(kept)
        self._tables.append(np.concatenate([kept, self._free + np.arange(own)]).astype(np.int32))
        self._free += own
        self._ends.append(shared)
        self.compute([(len(self._tables) - 1, length - shared)])

    def compute(self, news: list[tuple[int, int]]) -> None:
        """Computes some new tokens of some requests, and compares the logits of both runners."""
        segments = []
        for at, count in news:
            tokens = self._chance.integers(0, VOCAB, count).astype(np.int32)
            tables = tuple(self._tables[at] for _ in self.runners[0].layout.attended)
            segments.append(Segment(tokens, self._ends[at], tables, 1))
            self._ends[at] += count
        found, expected = (runner.forward(segments) for runner in self.runners)
        torch.testing.assert_close(found, expected, **EXACT)

    def step(self, *members: int) -> None:
        """Computes one new token of some requests."""
        self.compute([(at, 1) for at in members])

    def same_keys(self) -> bool:
        """Whether the pages of both runners hold the same, as far as requests have computed."""
        recorded, plain = (runner.pools for runner in self.runners)
        for name, pool in recorded.items():
            for ours, theirs in zip(pool.planes, plain[name].planes, strict=True):  # type: ignore[union-attr]
                for table, end in zip(self._tables, self._ends, strict=True):
                    rows = torch.from_numpy(pool.slots(table, 0, end)).to(DEVICE)  # type: ignore[union-attr, operator, arg-type]
                    pair = (plane.flatten(1, 2)[:, rows] for plane in (ours, theirs))
                    if not torch.allclose(*pair, atol=1e-4):
                        return False
        return True


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**FAMILIES["llama"], "num_hidden_layers": 1}),  # full attention
    "mistral": ("mistral", WINDOWED["mistral"]),  # windows
    "gemma2": (  # both, with capped scores
        "gemma2",
        {**WINDOWED["gemma2"], "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_oss": ("gpt_oss", WINDOWED["gpt_oss"]),  # sinks
    "llama4_text": VARIANTS["llama4_text"],  # chunks, and positions that the cache gives
}


@pytest.mark.parametrize(
    "family",
    [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_recorded_steps_give_the_same_logits_and_keys(
    family: str, kernel: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    requests = Requests(*MODELS[family], kernel, recorder, monkeypatch)
    for length, shared in ((21, 0), (30, 12), (9, 8), (5, 0), (13, 12)):
        requests.add(length, shared)
    for members in ((0, 1, 2), (2, 1, 0), (0, 3, 1), (0,), (4, 3, 2, 1, 0), (3,), (0, 1, 2, 4), (2, 3, 4, 1, 0), (4,)):
        requests.step(*members)  # three and four requests take the step of four rows, and five that of eight
    assert requests.same_keys()
    if requests.runners[0]._forward.steps.refused is None:  # type: ignore[union-attr]
        assert (recorder.recorded, recorder.repeated) == (3, 8)  # the last prompts have one token of their own
    else:
        assert family == "gpt_oss" and DEVICE != "cpu", "its experts may not be recorded"


def test_a_step_that_outgrows_its_room_is_recorded_anew(kernel: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainstem.runtime.attention.triton_attention._LEAST", (1, 1, 1))
    recorder = Recorder()
    requests = Requests("llama", ONE_LAYER, kernel, recorder, monkeypatch)
    requests.add(14)
    for _ in range(6):  # four pages, then five
        requests.step(0)
    assert (recorder.recorded, recorder.repeated) == (2, 4)
    assert requests.same_keys()


def test_other_forwards_are_not_recorded(kernel: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    requests = Requests("llama", ONE_LAYER, kernel, recorder, monkeypatch)
    requests.add(8)
    requests.add(1)
    requests.compute([(0, 1), (1, 2)])
    requests.compute([(0, 3)])
    assert recorder.recorded == 0


def test_a_token_whose_hidden_states_are_taken_is_no_recorded_step(
    kernel: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    requests = Requests("llama", ONE_LAYER, kernel, recorder, monkeypatch)
    requests.add(8)
    for _ in range(2):
        requests.step(0)
    pooling = Pooling()
    pooling.add(0, torch.zeros(10, 64, device=DEVICE))
    segment = Segment(np.array([1], np.int32), 10, (np.arange(CONTEXT // PAGE, dtype=np.int32),), 1, pooling=pooling)
    requests.runners[0].forward([segment])
    vector = pooling.vector(11)
    assert vector is not None and np.linalg.norm(vector) == pytest.approx(1)
    assert (recorder.recorded, recorder.repeated) == (1, 1)


def test_what_is_on_its_way_is_waited_for(kernel: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    requests = Requests("llama", ONE_LAYER, kernel, recorder, monkeypatch)
    requests.add(8)
    for _ in range(2):
        requests.step(0)
    waited: list[int] = []

    class Ticket:
        wait_layer = staticmethod(waited.append)

    ticket: Any = Ticket()
    runner, table = requests.runners[0], np.arange(CONTEXT // PAGE, dtype=np.int32)
    runner.forward([Segment(np.array([1], dtype=np.int32), 10, (table,), 1, arriving=ticket)])
    assert waited == list(range(len(waited))) and waited
    assert (recorder.recorded, recorder.repeated) == (1, 1)


def test_what_cannot_be_recorded_is_computed_and_said_once(
    kernel: Attention, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(work: Callable[[], torch.Tensor]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    requests = Requests("llama", ONE_LAYER, kernel, refuses, monkeypatch)
    requests.add(8)
    for _ in range(3):
        requests.step(0)
    assert requests.same_keys()
    (why,) = (line for line in caplog.messages if "CUDA graphs" in line)
    assert "not permitted when stream is capturing" in why


@pytest.mark.parametrize(("failures", "recorded"), [(2, 1), (3, 0)])
def test_a_recording_without_memory_is_tried_again_a_few_times(
    failures: int,
    recorded: int,
    kernel: Attention,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder, left = Recorder(), [None] * failures

    def record(work: Callable[[], torch.Tensor]) -> Any:
        if left:
            left.pop()
            raise torch.OutOfMemoryError("on purpose")
        return recorder(work)

    requests = Requests("llama", ONE_LAYER, kernel, record, monkeypatch)
    requests.add(8)
    for _ in range(5):
        requests.step(0)
    assert requests.same_keys() and recorder.recorded == recorded
    assert sum("no memory to record" in line for line in caplog.messages) == 1 - recorded


@pytest.mark.parametrize("number", [1.0, float("nan")])
def test_a_repeated_step_that_differs_is_not_used(
    number: float, kernel: Attention, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither its logits nor the keys and values that it wrote."""

    def spoil(logits: torch.Tensor) -> None:
        logits[:, 3].add_(number)
        for pool in requests.runners[0].pools.values():
            rows = torch.from_numpy(pool.slots(requests._tables[0], requests._ends[0] - 1, requests._ends[0])).to(
                DEVICE
            )  # type: ignore[union-attr, operator, arg-type]
            for plane in pool.planes:  # type: ignore[union-attr]
                plane.flatten(1, 2)[:, rows] += 1

    recorder = Recorder(broken=spoil)
    requests = Requests("llama", ONE_LAYER, kernel, recorder, monkeypatch)
    requests.add(8)
    for _ in range(4):
        requests.step(0)
    assert (recorder.recorded, recorder.repeated) == (1, 1)
    assert requests.same_keys()
    assert sum("of their spread" in line for line in caplog.messages) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_a_recording_that_fails_leaves_the_device_as_it_was() -> None:
    recorder = step_graphs.CudaRecorder(torch.device("cuda"))
    number = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError):
        recorder(lambda: number * number.sum().item())  # reads a result while nothing is computed
    assert torch.rand(5, device="cuda").shape == (5,)
    torch.cuda.empty_cache()  # refuses while a recording goes on
    again, doubled = recorder(lambda: number * 2)
    number.fill_(4)
    again()
    assert doubled.tolist() == [8, 8, 8]
    del again, doubled
    assert recorder(lambda: number * 3)[1].shape == (3,)


def test_the_steps_that_were_not_used_for_longest_are_dropped(
    kernel: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graphs, "MOST_STEPS", 2)
    recorder = Recorder()
    requests = Requests("llama", ONE_LAYER, kernel, recorder, monkeypatch)
    for _ in range(3):
        requests.add(5)
    for members in ((0,), (0, 1), (0,), (0, 1, 2), (0,), (0, 1)):
        requests.step(*members)
    assert (recorder.recorded, recorder.repeated) == (4, 2)


def test_many_requests_are_not_recorded(kernel: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MOST_ROWS", 1)
    recorder = Recorder()
    requests = Requests("llama", ONE_LAYER, kernel, recorder, monkeypatch)
    requests.add(5)
    requests.add(6)
    for _ in range(2):
        requests.step(0, 1)
    assert recorder.recorded == 0


def test_a_model_with_states_or_latents_is_not_recorded(kernel: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.tiny_models import HYBRIDS, LATENT

    monkeypatch.setattr("mainstem.runtime.models.runner.attention_for", lambda *_: SdpaAttention())
    for family, changes in (("deepseek_v3", LATENT["deepseek_v3"]), ("qwen3_next", HYBRIDS["qwen3_next"])):
        model: Any = tiny(family, **changes).to(DEVICE)  # type: ignore[arg-type]
        runner = ModelRunner(loaded(model), dict.fromkeys(Layout.of(model.config, CONTEXT).names, 8), 16)
        runner._forward.attention = kernel
        runner._forward.record(lambda _: pytest.fail("it would be recorded"), TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("requests", "rows"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 24), (500, 504)]
)
def test_rows_are_powers_of_two_and_then_multiples_of_eight(requests: int, rows: int) -> None:
    assert padded_rows(requests) == rows

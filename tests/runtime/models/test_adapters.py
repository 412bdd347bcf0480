"""Adapters: what they change and leave unchanged, what is refused; and that adapters never share KV."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.letters import Letters
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from bench.tiny_models import GATHERED, LATENT, VARIANTS, VOCAB, loaded, tiny
from mainstem.cache.namespaces import Namespace, encode_namespace
from mainstem.errors import BadArgument, MainstemError, UnsupportedModel
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.adapters import Adapter, Adapters, read_adapter
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.models.runner import ModelRunner
from mainstem.runtime.request import Completion, Request
from mainstem.runtime.segments import Segment
from mainstem.settings.engine import EngineConfig, SamplingParams

pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = torch.arange(2, 22).unsqueeze(0)


def save(
    folder: Path,
    seed: int,
    family: str = "llama",
    changes: dict[str, Any] | None = None,
    embeddings: bool = False,
    **lora: Any,
) -> Path:
    """Saves an adapter with PEFT, with random weights that change something."""
    from peft import LoraConfig, get_peft_model

    defaults = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    config = LoraConfig(**{**defaults, **lora})
    torch.manual_seed(seed)
    adapted = get_peft_model(tiny(family, **(changes or {})), config)
    for name, weight in adapted.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(str(folder), save_embedding_layers=embeddings)
    return folder


def change_settings(folder: Path, **settings: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(input_ids=PROMPT, use_cache=False).logits
    return result


def with_adapter(adapters: Adapters, model: PreTrainedModel, adapter: Adapter | None) -> torch.Tensor:
    with adapters.select(adapter):
        return logits(model)


def state(model: PreTrainedModel) -> tuple[Any, ...]:
    """What an adapter must not change."""
    weights = {name: (weight.clone(), weight.requires_grad) for name, weight in model.named_parameters()}
    return {name: id(module) for name, module in model.named_modules()}, weights, dict(vars(model)), repr(model.config)


def same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    weights = left[1].keys() == right[1].keys() and all(
        torch.equal(weight, right[1][name][0]) and grad == right[1][name][1] for name, (weight, grad) in left[1].items()
    )
    return bool(weights and left[0] == right[0] and left[2].keys() == right[2].keys() and left[3] == right[3])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {"a": save(folder / "a", 1), "b": save(folder / "b", 2, r=8, target_modules=["k_proj", "gate_proj"])}


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny("llama")


# --- what they compute --------------------------------------------------------------------------------------------


def test_each_adapter_computes_its_own_and_the_base_stays_as_it_is(
    model: PreTrainedModel, saved: dict[str, Path]
) -> None:
    base, before = logits(model), state(model)
    adapters = Adapters(model)
    a, b = adapters.load("a", saved["a"]), adapters.load("b", saved["b"])
    assert adapters.names == ("a", "b")
    with_a, with_b = with_adapter(adapters, model, a), with_adapter(adapters, model, b)
    assert not torch.allclose(with_a, base, atol=0.1)
    assert not torch.allclose(with_b, base, atol=0.1)
    assert not torch.allclose(with_a, with_b, atol=0.1)
    assert torch.equal(logits(model), base)
    assert torch.equal(with_adapter(adapters, model, None), base)
    assert torch.equal(with_adapter(adapters, model, a), with_a), "one after another, not on top of each other"
    adapters.unload("b")
    assert adapters.names == ("a",)
    assert torch.equal(with_adapter(adapters, model, b), with_b), "a reference keeps it usable"
    assert same(state(model), before)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"use_rslora": True, "target_modules": "all-linear"}),
        ("llama", {"use_dora": True}),
        ("llama", {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
        ("llama", {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "layers_to_transform": [0, 1]}),
        ("llama", {"init_lora_weights": "gaussian", "lora_dropout": 0.5}),
        ("llama", {"lora_bias": True}),
        ("qwen2", {"target_modules": ["q_proj", "o_proj"]}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    ],
)
def test_it_computes_what_peft_computes(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    from peft import PeftModel

    folder = save(tmp_path, 3, family, **settings)
    model = tiny(family)
    adapters = Adapters(model)
    got = with_adapter(adapters, model, adapters.load("a", folder))
    wanted = logits(PeftModel.from_pretrained(tiny(family), str(folder)))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    assert not torch.allclose(got, logits(model), atol=0.1)


def test_an_adapter_takes_the_models_dtype(saved: dict[str, Path]) -> None:
    model = tiny("llama").to(torch.bfloat16)  # type: ignore[arg-type]
    adapters = Adapters(model)
    base = logits(model)
    changed = with_adapter(adapters, model, adapters.load("a", saved["a"]))
    assert changed.dtype == base.dtype == torch.bfloat16
    assert not torch.allclose(changed, base, atol=0.1)
    assert torch.equal(logits(model), base)


def test_loading_draws_no_random_numbers(model: PreTrainedModel, saved: dict[str, Path]) -> None:
    before = torch.random.get_rng_state()
    Adapters(model).load("a", saved["a"])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_forward_that_fails_leaves_the_base(model: PreTrainedModel, saved: dict[str, Path]) -> None:
    base, adapters = logits(model), Adapters(model)
    adapter = adapters.load("a", saved["a"])
    with pytest.raises(ZeroDivisionError), adapters.select(adapter):
        raise ZeroDivisionError
    assert torch.equal(logits(model), base)


# --- names --------------------------------------------------------------------------------------------------------


def test_other_weights_under_an_old_name_are_another_namespace(
    model: PreTrainedModel, saved: dict[str, Path], tmp_path: Path
) -> None:
    adapters = Adapters(model)
    first = adapters.load("x", saved["a"])
    assert adapters.load("x", saved["a"]) is first
    second = adapters.load("x", saved["b"])
    assert adapters.get("x") is second
    adapters.unload("x")
    again = adapters.load("x", shutil.copytree(saved["a"], tmp_path / "copy"))
    assert first.namespace == again.namespace != second.namespace
    assert first.namespace == f"x@{first.digest}"
    assert len(first.digest) == 64
    other_name = adapters.load("y", saved["a"])
    names = [adapter.namespace for adapter in (first, second, other_name)]
    assert len({encode_namespace(Namespace(adapter=name)) for name in [None, *names]}) == 4


def test_another_scale_is_another_digest(saved: dict[str, Path], tmp_path: Path) -> None:
    scaled = change_settings(shutil.copytree(saved["a"], tmp_path / "scaled"), lora_alpha=99)
    assert read_adapter(scaled).digest != read_adapter(saved["a"]).digest


@pytest.mark.parametrize("name", ["", "a b", "a\n", "x" * 257, "é"])
def test_names_that_cannot_be(name: str, model: PreTrainedModel, saved: dict[str, Path]) -> None:
    with pytest.raises(BadArgument, match="name"):
        Adapters(model).load(name, saved["a"])


def test_a_name_without_an_adapter(model: PreTrainedModel) -> None:
    with pytest.raises(BadArgument, match="adapter = 'a'"):
        Adapters(model).get("a")
    with pytest.raises(BadArgument, match="adapter = 'a'"):
        Adapters(model).unload("a")


# --- refusing -----------------------------------------------------------------------------------------------------


def refused(model: PreTrainedModel, folder: Path, error: type[MainstemError], says: str) -> None:
    """Checks that the refusal is typed and says why, and that the model is unchanged."""
    base, before, adapters = logits(model), state(model), Adapters(model)
    with pytest.raises(error, match=says):
        adapters.load("x", folder)
    assert adapters.names == ()
    assert same(state(model), before)
    assert torch.equal(logits(model), base)


def test_a_path_that_holds_no_adapter(model: PreTrainedModel, saved: dict[str, Path], tmp_path: Path) -> None:
    refused(model, tmp_path / "nothing", BadArgument, "No such file")
    copy = shutil.copytree(saved["a"], tmp_path / "copy")
    (copy / "adapter_config.json").write_text("{")
    refused(model, copy, BadArgument, "in JSON")
    (copy / "adapter_config.json").write_text("[]")
    refused(model, copy, BadArgument, "an object")


def test_a_pickle_is_not_read(model: PreTrainedModel, saved: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(saved["a"], tmp_path / "copy")
    (copy / "adapter_model.safetensors").rename(copy / "adapter_model.bin")
    refused(model, copy, BadArgument, "pickle")


def test_damaged_weights(model: PreTrainedModel, saved: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(saved["a"], tmp_path / "copy")
    weights = (copy / "adapter_model.safetensors").read_bytes()
    (copy / "adapter_model.safetensors").write_bytes(weights[:-100])
    refused(model, copy, BadArgument, "undamaged")


@pytest.mark.parametrize("pattern", ["(", "(([a-z._0-9]+)+)+X", r".*\.(q_proj|v_proj|down_proj)"])
def test_a_regular_expression_is_not_run_the_weights_say_where_they_belong(
    pattern: str, model: PreTrainedModel, saved: dict[str, Path], tmp_path: Path
) -> None:
    plain, described = Adapters(model), Adapters(model)
    folder = change_settings(shutil.copytree(saved["a"], tmp_path / "copy"), target_modules=pattern)
    tokens = torch.arange(12).unsqueeze(0)
    with plain.select(plain.load("a", saved["a"])):
        wanted = model(tokens).logits
    with described.select(described.load("a", folder)):
        assert torch.equal(model(tokens).logits, wanted)


def test_weights_that_are_not_finite(model: PreTrainedModel, saved: dict[str, Path], tmp_path: Path) -> None:
    file = shutil.copytree(saved["a"], tmp_path / "copy") / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file)
    refused(model, file.parent, UnsupportedModel, "NaN or infinity")


def test_a_path_that_no_file_can_have(model: PreTrainedModel) -> None:
    refused(model, Path("a\0b"), BadArgument, "null")


def test_virtual_tokens_are_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model

    for number, config in enumerate(
        (
            PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
            PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        )
    ):
        folder = tmp_path / str(number)
        get_peft_model(tiny("llama"), config).save_pretrained(str(folder))
        refused(model, folder, UnsupportedModel, "tokens of their own")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [3, 4]}, "trainable_token_indices"),
        ({"bias": "all"}, "bias"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"something_of_a_later_release": 7}, "something_of_a_later_release"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"target_modules": ["nowhere"]}, "nowhere"),
        ({"target_modules": ["q_proj", "v_proj"]}, "no layer for"),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "o_proj"]}, "lacks"),
        ({"r": "four"}, "ranks"),
        ({"r": 10**9}, "ranks"),
        ({"rank_pattern": {"q_proj": 10**9}}, "ranks"),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
        ({"rank_pattern": {"(": 4}}, "plain name"),
        ({"alpha_pattern": {"(a+)+": 4}}, "plain name"),
        ({"exclude_modules": "(.*)*"}, "plain name"),
    ],
)
def test_settings_that_are_refused(
    settings: dict[str, Any], says: str, model: PreTrainedModel, saved: dict[str, Path], tmp_path: Path
) -> None:
    folder = change_settings(shutil.copytree(saved["a"], tmp_path / "copy"), **settings)
    refused(model, folder, UnsupportedModel, says)


@pytest.mark.parametrize("changes", [{"hidden_size": 32}, {"num_hidden_layers": 4}, {"num_hidden_layers": 2}])
def test_an_adapter_of_another_model(changes: dict[str, Any], model: PreTrainedModel, tmp_path: Path) -> None:
    refused(model, save(tmp_path, 1, changes=changes), UnsupportedModel, "does not fit")


def test_a_saved_vocabulary_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    folder = save(tmp_path, 1, embeddings=True, target_modules=["lm_head", "q_proj"])
    refused(model, folder, UnsupportedModel, "replaces weights, such as base_model.model.lm_head.base_layer.weight")


def test_weights_that_would_replace_the_base_models(
    model: PreTrainedModel, saved: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(saved["a"], tmp_path / "copy")
    path = copy / "adapter_model.safetensors"
    save_file({**load_file(path), "base_model.model.lm_head.weight": torch.zeros(VOCAB, 64)}, path)
    refused(model, copy, UnsupportedModel, "replaces weights, such as base_model.model.lm_head.weight")


def test_experts_are_refused(tmp_path: Path) -> None:
    model = tiny("mixtral")
    folder = save(tmp_path, 1, "mixtral", target_modules=None, target_parameters=["experts.down_proj"])
    refused(model, folder, UnsupportedModel, "target_parameters")
    change_settings(folder, target_parameters=None, target_modules=["experts"])
    refused(model, folder, UnsupportedModel, "fit")


def test_a_layer_that_returns_more_than_its_product_is_refused_by_name(tmp_path: Path) -> None:
    family, changes = VARIANTS["llama4_text"]
    model = tiny(family, **changes)
    folder = save(tmp_path, 1, family, changes, target_modules=["router", "q_proj"])
    refused(model, folder, UnsupportedModel, r"only linear layers and embeddings can be adapted, not router")


def test_a_linear_layer_with_code_of_its_own_can_be_adapted(tmp_path: Path) -> None:
    model = tiny("falcon", **GATHERED["falcon"])
    folder = save(tmp_path, 1, "falcon", GATHERED["falcon"], target_modules=["query_key_value"])
    adapters = Adapters(model)
    base = logits(model)
    assert not torch.allclose(with_adapter(adapters, model, adapters.load("a", folder)), base, atol=0.1)


def test_a_model_with_an_adapter_of_its_own(saved: dict[str, Path]) -> None:
    model = tiny("llama")
    model.load_adapter(str(saved["b"]))
    with pytest.raises(UnsupportedModel, match="of its own"):
        Adapters(model).load("a", saved["a"])


# --- over the cache -----------------------------------------------------------------------------------------------


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[Engine]:
    loaded = LoadedModel(model, Letters(eos_token_id=1), "base", torch.float32, 128)  # type: ignore[arg-type]
    with Engine(loaded, EngineConfig(pages=64, page_size=4)) as running:
        yield running


def ask(engine: Engine, adapter: str | None = None, **fields: Any) -> Completion:
    tokens = np.arange(2, 42, dtype=np.int32)
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0, **fields)
    completion = engine.submit(Request(tokens, params, Namespace(adapter=adapter, salt="s"))).result(20)
    assert len(completion.tokens) == 8
    return completion


def test_an_adapters_kv_never_serves_another(engine: Engine, saved: dict[str, Path], tmp_path: Path) -> None:
    engine.load_adapter("a", saved["a"])
    engine.load_adapter("b", saved["b"])
    assert engine.adapters == ("a", "b")
    cold = {name: ask(engine, name) for name in (None, "a", "b")}
    assert [answer.usage.cached_tokens for answer in cold.values()] == [0, 0, 0]
    assert len({answer.tokens for answer in cold.values()}) == 3
    for name in ("a", None, "b", "a"):
        warm = ask(engine, name)
        assert warm.usage.cached_tokens == 39
        assert warm.tokens == cold[name].tokens
        for one, other in zip(warm.logprobs, cold[name].logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)

    engine.load_adapter("a", saved["b"])  # other weights under the old name
    changed = ask(engine, "a")
    assert changed.usage.cached_tokens == 0
    assert changed.tokens == cold["b"].tokens
    engine.load_adapter("a", shutil.copytree(saved["a"], tmp_path / "moved"))
    again = ask(engine, "a")
    assert (again.usage.cached_tokens, again.tokens) == (39, cold["a"].tokens)


def test_requests_of_all_adapters_run_together(engine: Engine, saved: dict[str, Path]) -> None:
    names = (None, "a", "b")
    engine.load_adapter("a", saved["a"])
    engine.load_adapter("b", saved["b"])
    alone = {name: ask(engine, name).tokens for name in names}
    engine.flush()
    requests = [
        Request(
            np.arange(2, 42, dtype=np.int32), SamplingParams(max_tokens=8, ignore_eos=True), Namespace(adapter=name)
        )
        for name in names * 2
    ]
    streams = [engine.submit(request) for request in requests]
    assert [stream.result(20).tokens for stream in streams] == [alone[name] for name in names * 2]


def test_an_unloaded_adapter_takes_no_requests_but_ends_those_it_has(engine: Engine, saved: dict[str, Path]) -> None:
    engine.load_adapter("a", saved["a"])
    wanted = ask(engine, "a").tokens
    tokens = np.arange(2, 42, dtype=np.int32)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    stream = engine.submit(Request(tokens, params, Namespace(adapter="a")))
    engine.unload_adapter("a")
    assert engine.adapters == ()
    assert stream.result(20).tokens[:8] == wanted
    with pytest.raises(BadArgument, match="adapter = 'a'"):
        ask(engine, "a")
    with pytest.raises(BadArgument, match="adapter = 'a'"):
        engine.unload_adapter("a")


def test_a_refused_adapter_does_not_stop_the_engine(engine: Engine, saved: dict[str, Path], tmp_path: Path) -> None:
    base = ask(engine).tokens
    with pytest.raises(BadArgument, match="No such file"):
        engine.load_adapter("a", tmp_path / "nothing")
    with pytest.raises(UnsupportedModel, match="does not fit"):
        engine.load_adapter("a", save(tmp_path / "other", 1, changes={"hidden_size": 32}))
    with pytest.raises(BadArgument, match="the model's own"):
        engine.load_adapter("base", saved["a"])
    assert engine.adapters == ()
    assert ask(engine).tokens == base


def test_an_adapted_projection_of_latents_is_computed_by_its_own_layer(tmp_path: Path) -> None:
    from peft import PeftModel

    def model() -> PreTrainedModel:
        return tiny("deepseek_v3", **LATENT["deepseek_v3"])

    folder = save(tmp_path, 1, "deepseek_v3", LATENT["deepseek_v3"], target_modules=["kv_b_proj"])
    tokens = PROMPT[0].numpy().astype(np.int32)
    plain = PeftModel.from_pretrained(model(), str(folder)).eval()
    with torch.inference_mode():
        wanted = plain(PROMPT, use_cache=False).logits[0]
    runner = ModelRunner(loaded(model()), 8, 4)
    adapter = runner.adapters.load("adapter", folder)
    table = np.arange(8, dtype=np.int32)[::-1].copy()
    for begin, end in ((0, 12), (12, 18), (18, 19), (19, 20)):
        rows = runner.forward([Segment(tokens[begin:end], begin, (table,), True, adapter=adapter)])
        torch.testing.assert_close(rows[0], wanted[end - 1], atol=1e-4, rtol=0)

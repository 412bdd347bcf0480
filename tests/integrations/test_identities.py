"""The identity of a page, field by field: each that is changed alone changes the page's name.

The fields are read from the source. One that the code begins to read, or no longer reads, fails until it stands here:
with another value, or with the reason why it changes nothing.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import fields
from functools import reduce
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from doubles import sglang_hicache
from doubles.sglang_hicache import HiCacheStorageConfig, HostPool, PoolName
from doubles.vllm_interface import CONFIG, KV_CACHE, SPECS, vllm_config, vllm_double

from mainstem.cache.identity import Identity
from mainstem.integrations.options import Options
from mainstem.runtime.memory import tiers
from mainstem.runtime.memory.host import Planes
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.parallel.ranks import Ranks

Name = tuple[bytes, str, str]
"""The parts of the names of pages: the identity, the shard, and what is said of one pool."""


def reads(functions: list[Callable[..., Any]], roots: Mapping[str, str]) -> set[str]:
    """Returns the attributes that functions read of some of their variables, as dotted paths.

    Args:
        functions: by their source. A local variable that is assigned an attribute counts as that attribute.
        roots: by the variables' names, what their paths begin with.
    """
    found: set[str] = set()
    for function in functions:
        nodes = [*ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))]
        names, called = dict(roots), {node.func for node in nodes if isinstance(node, ast.Call)}

        def path(node: ast.AST | None, names: dict[str, str] = names) -> str | None:
            """Returns the path of an expression; None: it is no attribute of a root."""
            match node:
                case ast.Name(name):
                    return names.get(name)
                case ast.Attribute(inner, name) | ast.Call(ast.Name("getattr"), [inner, ast.Constant(name), *_]):
                    return None if (base := path(inner)) is None else f"{base}.{name}".lstrip(".")
            return None

        for node in nodes:
            match node:
                case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)):
                    pairs = [*zip(targets, values, strict=True)]
                case ast.Assign([target], value):
                    pairs = [(target, value)]
                case _:
                    continue
            names |= {t.id: at for t, value in pairs if isinstance(t, ast.Name) and (at := path(value)) is not None}
        found |= {at for node in nodes if node not in called and (at := path(node)) is not None}
    return {at for at in found if not any(other.startswith(f"{at}.") for other in found)} - {*roots.values(), ""}


def change(given: Any, path: str, value: Any) -> Any:
    """Returns a copy of an object in which one attribute has another value."""
    copy = deepcopy(given)
    *parts, last = path.split(".")
    setattr(reduce(getattr, parts, copy), last, value)
    return copy


def check(name: Callable[[Any], Name], given: Any, table: Mapping[str, Any]) -> None:
    """Checks that each field changes the name, alone and to a name of its own, but for those that `No` gives reasons.

    A list has several values.
    """
    plain, names = name(given), dict[Name, str]()
    assert name(deepcopy(given)) == plain
    for path, entry in table.items():
        values = entry.values if isinstance(entry, No) else entry if isinstance(entry, list) else [entry]
        for value in values:
            now = name(change(given, path, value))
            if isinstance(entry, No):
                assert now == plain, f"{path} = {value!r} changes the name, though {entry.why}"
            else:
                assert now != plain, f"{path} = {value!r}: the name does not depend on it"
                assert now not in names, f"{path} = {value!r} has the name of {names[now]}"
                names[now] = f"{path} = {value!r}"


class No:
    """A field that is not in the name.

    Args:
        why: the reason.
        values: with which the name must be the same.
    """

    def __init__(self, why: str, *values: Any) -> None:
        self.why, self.values = why, values


# ---------------------------------------------------------------- the runtime's own, and so transformers'


class Config(SimpleNamespace):
    """The configuration of a model, as far as an identity reads it."""

    def get_text_config(self, decoder: bool) -> Config:
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Model(SimpleNamespace):
    """A model of few weights."""

    def state_dict(self, keep_vars: bool) -> dict[str, torch.Tensor]:
        return dict(self.weights)


class Vocabulary(SimpleNamespace):
    """A tokenizer."""

    def get_vocab(self) -> dict[str, int]:
        return dict(self.tokens)


BYTES = torch.arange(64, dtype=torch.uint8)
WEIGHTS = {"a": BYTES.view(torch.float8_e4m3fn).view(8, 8), "b": torch.ones(3)}
FORMATS = "page_first/v1 float8_e4m3fn[2, 16, 2, 8]"
OURS: dict[str, Any] = {
    "content": [FORMATS.replace("e4m3fn", "e5m2"), FORMATS.replace("16", "8")],
    "codec": ["int8", "fp8", f"calibrated {'0' * 32}"],
    "computation": [("keys gathered",), ("keys paged", "scan stepped"), ("scan stepped", "keys paged")],
    "page_size": 8,
    "loaded.name": "another",
    "loaded.dtype": [torch.float16, torch.float32],
    "loaded.model._is_stateful": No("only latents have states of their own by rank, see below", True),
    "loaded.model.config": Config(num_hidden_layers=4, num_attention_heads=4),
    "loaded.model.config.quantization_config": [{"bits": 8, "type": "e4m3"}, {"bits": 8, "type": "e5m2"}],
    "loaded.model.weights": [
        {**WEIGHTS, "a": WEIGHTS["a"].view(torch.float8_e5m2)},
        {**WEIGHTS, "a": WEIGHTS["a"].view(torch.int8)},
        {**WEIGHTS, "a": WEIGHTS["a"].view(4, 16)},
        {**WEIGHTS, "b": torch.tensor([1.0, 1.0, 1.0000001])},
        {"a": WEIGHTS["a"], "c": WEIGHTS["b"]},
        {"a": WEIGHTS["a"]},
    ],
    "loaded.tokenizer": [None, Vocabulary(tokens={"x": 1, "y": 0}), Vocabulary(tokens={"x": 0})],
    "loaded.ranks": [Ranks(1, 2), Ranks(0, 4)],
    "loaded.max_context": No("bounds requests; the KV of a position does not depend on what may follow", 7),
    "loaded.processor": No("images come as their own digests among the symbols of a prompt", SimpleNamespace(a=1)),
    "config.num_attention_heads": 8,
    "config.num_key_value_heads": [1, 4],
    "config.kv_lora_rank": 16,
    "config.qk_rope_head_dim": 16,
    "config.num_hidden_layers": 5,
    "config.rope_parameters": [{"rope_theta": 1e6}, None],
    "config.rms_norm_eps": [1e-5, 1e-6],
    "config._name_or_path": No("where it was loaded from", "elsewhere"),
    "config.transformers_version": No("which software wrote the file", "6"),
    "config.architectures": No("the class is known by what the other fields say", ["Other"]),
    "config.torch_dtype": No("the dtype that counts is the one that was loaded", "float64"),
    "config.dtype": No("the same", "float64"),
    "config.use_cache": No("how others run it", False),
}


def ours() -> Any:
    config = Config(
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-4, qk_rope_head_dim=8,
        rope_parameters={"rope_theta": 1e4}, quantization_config={"bits": 4},
    )  # fmt: skip
    model = Model(config=config, weights=WEIGHTS, _is_stateful=False)
    loaded = SimpleNamespace(
        model=model, tokenizer=Vocabulary(tokens={"x": 0, "y": 1}), name="m", dtype=torch.bfloat16, max_context=9,
        processor=None, ranks=Ranks(0, 2),
    )  # fmt: skip
    return SimpleNamespace(
        loaded=loaded, config=config, content=FORMATS, codec="none", computation=("keys paged",), page_size=16
    )


def name_of_ours(given: Any) -> Name:
    identity = tiers.identity_of(given.loaded, given.page_size, given.content, given.codec, given.computation)
    return identity.encode(), identity.shard, ""


def test_each_field_of_a_loaded_model_changes_the_name_of_its_pages() -> None:
    pytest.importorskip("blake3", reason="blake3 is not installed")
    found = reads([tiers.identity_of], {"loaded": "loaded", "config": "config"})
    assert found - {*OURS} == {"loaded.ranks.rank", "loaded.ranks.size"}
    assert {f"loaded.{field.name}" for field in fields(LoadedModel)} - {*OURS} == {"loaded.model"}, "it has parts"
    assert {*inspect.signature(tiers.identity_of).parameters} == {"loaded", *(at for at in OURS if "." not in at)}
    assert {at.removeprefix("config.") for at, entry in OURS.items() if at.startswith("config.") and isinstance(
        entry, No)} == tiers.IRRELEVANT  # fmt: skip
    check(name_of_ours, ours(), OURS)


@pytest.mark.parametrize("field", [field.name for field in fields(Identity)])
def test_each_field_of_the_identity_is_what_it_is_named_after(field: str) -> None:
    """The configuration's digest changes with most of them; the log explains a miss by the others."""
    pytest.importorskip("blake3", reason="blake3 is not installed")
    moves = {
        "model": "loaded.name", "weights": "loaded.model.weights", "dtype": "loaded.dtype", "layout": "content",
        "quantization": "loaded.model.config.quantization_config", "shape": "config.num_hidden_layers",
        "attention": "config.kv_lora_rank", "rope": "config.rope_parameters", "tokenizer": "loaded.tokenizer",
        "page_size": "page_size", "tp_rank": "loaded.ranks", "tp_size": "loaded.ranks", "extra": "codec",
    }  # fmt: skip

    def value(given: Any) -> Any:
        made = tiers.identity_of(given.loaded, given.page_size, given.content, given.codec, given.computation)
        return getattr(made, field)

    if field == "symbols":
        assert value(ours()) == "token ids/4", "no field: the runtime has one kind of keys"
        return
    entry = OURS[moves[field]]
    entry = [Ranks(1, 4)] if moves[field] == "loaded.ranks" else entry if isinstance(entry, list) else [entry]
    assert value(ours()) not in [value(change(ours(), moves[field], each)) for each in entry]


def test_ranks_with_latents_share_pages_but_those_with_states_do_not() -> None:
    pytest.importorskip("blake3", reason="blake3 is not installed")
    latent = change(ours(), "config.kv_lora_rank", 16)
    other = change(latent, "loaded.ranks", Ranks(1, 2))
    assert name_of_ours(latent) == name_of_ours(other)
    latent, other = (change(each, "loaded.model._is_stateful", True) for each in (latent, other))
    assert name_of_ours(latent) != name_of_ours(other)


def test_formats_of_as_many_bytes_have_names_of_their_own() -> None:
    kinds = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16)
    shapes = ((2, 5, 16, 2, 8), (2, 5, 8, 2, 16), (2, 5, 16, 4, 4), (4, 5, 16, 2, 4))
    tensors = [torch.zeros(shape).to(kind) for kind in kinds for shape in shapes]
    pairs = [Planes((tensor, tensor)).content for tensor in tensors]
    assert len({*pairs, *(Planes((tensor,)).content for tensor in tensors)}) == 2 * len(tensors)
    assert Planes((torch.zeros(2, 9, 16, 2, 8).half(),)).content == "page_first/v1 float16[2, 16, 2, 8]"


# ---------------------------------------------------------------- vLLM


def configured(**config: Any) -> Any:
    """Returns a model's configuration file."""
    return SimpleNamespace(to_dict=lambda: {"rope_parameters": {"rope_theta": 1e4}, "hidden_size": 64, **config})


REFUSED = "check() refuses any other"
VLLM: dict[str, Any] = {
    "vllm.__version__": "0.32.9",
    "platform.device_type": "cuda",
    "model_config.model": "folder/other",
    "model_config.revision": "v2",
    "model_config.code_revision": "v2",
    "model_config.dtype": ["torch.float16", "torch.float32"],
    "model_config.quantization": ["fp8", "awq"],
    "model_config.quantization_config": [{"ignore": ["k_proj"]}, {"ignore": ["v_proj"]}],
    "model_config.use_mla": True,
    "model_config.hf_config": [configured(hidden_size=32), configured(rope_parameters={"rope_theta": 1e6})],
    "cache_config.prefix_caching_hash_algo": "sha256_cbor",
    "cache_config.block_size": 32,
    "cache_config.cache_dtype": [
        "float16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
        "fp8_inc",
        "fp8_ds_mla",
        "int8_per_token_head",
        "nvfp4",
        "fp8_per_token_head",
        "nvfp4_4over6",
    ],
    "cache_config.mamba_cache_dtype": ["float32", "float16"],
    "cache_config.mamba_ssm_cache_dtype": ["float32", "float16"],
    "cache_config.kv_cache_dtype_skip_layers": [["0"], ["1"], ["sliding_window"]],
    "cache_config.use_replayssm": True,
    "cache_config.replayssm_buffer_len": No("without ReplaySSM there is no buffer", 8),
    "cache_config.enable_prefix_caching": No(REFUSED),
    "attention_config.backend": ["FLASH_ATTN", "FLASHINFER"],
    "attention_config.backend_per_kind": [{"mla_attention": "A"}, {"mla_attention": "B"}],
    "attention_config.indexer_kv_dtype": ["fp8", "mxfp4"],
    "parallel_config.tensor_parallel_size": 8,
    "parallel_config.pipeline_parallel_size": No(REFUSED),
    "parallel_config.decode_context_parallel_size": No(REFUSED),
    "parallel_config.prefill_context_parallel_size": No(REFUSED),
    "load_config.load_format": No("only dummy weights are others, which check() refuses", "safetensors"),
    "kv_transfer_config.kv_load_failure_policy": No("what follows a fault", "fail"),
    "kv_cache.kv_cache_groups": [[]],
    "kv_cache.kv_cache_layout": ["LBNHC", "LBHNC"],
    "kv_cache.hash_block_size": 48,
    "kv_cache.kv_tp_replicas": 2,
    "kv_cache.num_blocks": No("how much memory there is", 9),
    "kv_cache.prefix_cacheable_group_ids": No("which groups are stored; each has keys of its own", ()),
    "group.layer_names": [["a", "b", "c"]],
    "spec.block_size": 64,
    "spec.dtype": No("elsewhere than on a CPU, dtypes of the model and of the cache say it", "torch.float16"),
    "spec.head_size": No("elsewhere than on a CPU, the model's configuration says it", 8),
    "options.weights": "of mine",
}


ON_A_CPU = {"spec.dtype": "torch.float16", "spec.head_size": 8}
"""There vLLM chooses the order of numbers by these, too."""


@pytest.fixture(scope="module")
def vllm() -> Iterator[ModuleType]:
    isa = ModuleType("vllm.v1.attention.backends.cpu_attn")
    isa._get_attn_isa = lambda *what: f"isa for {what}"  # type: ignore[attr-defined]
    with vllm_double() as module, pytest.MonkeyPatch.context() as patch:
        for name in ("vllm.v1.attention", "vllm.v1.attention.backends"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, isa.__name__, isa)
        patch.setattr(module, "digest_weights", lambda model, revision: f"files of {revision}")
        yield module


def given_to_vllm() -> Any:
    config = vllm_config({"parallel_config": {"tensor_parallel_size": 4}})
    config.model_config.hf_config = configured()
    spec = SPECS["FullAttentionSpec"](block_size=16, dtype="torch.bfloat16", head_size=64)
    group = SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=spec, is_eagle_group=False)
    cache = SimpleNamespace(**{**KV_CACHE, "hash_block_size": None, "kv_cache_groups": [group]})
    return SimpleNamespace(
        **vars(config), kv_cache=cache, group=group, spec=spec, options=SimpleNamespace(weights=None), rank=3,
        platform=SimpleNamespace(device_type="cpu", is_cpu=lambda: False), vllm=SimpleNamespace(__version__="0.32.0"),
    )  # fmt: skip


def name_in_vllm(module: ModuleType) -> Callable[[Any], Name]:
    def name(given: Any) -> Name:
        module.current_platform, module.vllm = given.platform, given.vllm  # type: ignore[attr-defined]
        identity = module.identity_of(given, given.kv_cache, given.options, given.rank)
        return identity.encode(), identity.shard, ""

    return name


def test_each_field_of_vllms_configuration_changes_the_name_of_its_blocks(vllm: ModuleType) -> None:
    roots = {
        "vllm_config": "", "kv_cache_config": "kv_cache", "group": "group", "spec": "spec", "options": "options",
        "current_platform": "platform", "vllm": "vllm",
    }  # fmt: skip
    found = reads([vllm.identity_of, vllm._unusual, vllm._layout], roots)
    known = {at for at, entry in VLLM.items() if not isinstance(entry, No)}
    assert found == {*known, "cache_config.replayssm_buffer_len", *ON_A_CPU}
    double = {f"{part}.{name}" for part, values in CONFIG.items() for name in values} | {
        f"kv_cache.{at}" for at in KV_CACHE
    }
    assert double <= {*VLLM}
    check(name_in_vllm(vllm), given_to_vllm(), VLLM)
    check(name_in_vllm(vllm), change(given_to_vllm(), "platform.is_cpu", lambda: True), VLLM | ON_A_CPU)


def test_what_few_settings_need_counts_once_they_are_set(vllm: ModuleType) -> None:
    name = name_in_vllm(vllm)
    replayed = change(given_to_vllm(), "cache_config.use_replayssm", True)
    assert name(replayed) != name(change(replayed, "cache_config.replayssm_buffer_len", 8))
    skipped = [
        change(given_to_vllm(), "cache_config.kv_cache_dtype_skip_layers", each) for each in (["0", "1"], ["1", "0"])
    ]
    assert name(skipped[0]) == name(skipped[1]), "an order says nothing"


@pytest.mark.parametrize(("config", "counts"), [
    ({"_name_or_path": "x"}, False), ({"transformers_version": "6"}, False), ({"architectures": ["X"]}, False),
    ({"dtype": "float64"}, False), ({"torch_dtype": "float64"}, False), ({"use_cache": False}, False),
    ({"vocab_size": 7}, True), ({"text_config": {"dtype": "x"}}, True), ({"quantization_config": {"a": 1}}, True),
])  # fmt: skip
def test_of_a_models_file_only_its_source_is_left_out(vllm: ModuleType, config: dict[str, Any], counts: bool) -> None:
    name = name_in_vllm(vllm)
    other = change(given_to_vllm(), "model_config.hf_config", configured(**config))
    assert (name(other) != name(given_to_vllm())) == counts


def test_ranks_have_names_of_their_own_unless_they_hold_the_same(vllm: ModuleType) -> None:
    name = name_in_vllm(vllm)
    names = [name(change(given_to_vllm(), "rank", rank)) for rank in range(4)]
    assert len({*names}) == 4
    latent = change(given_to_vllm(), "model_config.use_mla", True)
    assert len({name(change(latent, "rank", rank)) for rank in range(4)}) == 1
    state = SPECS["MambaSpec"](block_size=16)
    latent.kv_cache.kv_cache_groups = [SimpleNamespace(layer_names=["a"], kv_cache_spec=state)]
    assert len({name(change(latent, "rank", rank)) for rank in range(4)}) == 4, "states are of each rank"


def test_of_the_connectors_options_only_weights_are_in_the_name() -> None:
    """The others say where blocks are and how fast: a block is the same in any store."""
    elsewhere = {"storage", "host_bytes", "buffer_bytes", "timeout_s"}
    assert {field.name for field in fields(Options)} == elsewhere | {"weights"}


# ---------------------------------------------------------------- SGLang


class Packed(HostPool):
    """A pool of another class."""


SGLANG: dict[str, Any] = {
    "config.model_name": ["other", None],
    "config.is_mla_model": True,
    "config.tp_size": 8,
    "config.tp_rank": 2,
    "config.pp_size": 4,
    "config.pp_rank": 1,
    "config.attn_cp_size": 4,
    "config.attn_cp_rank": 1,
    "config.dp_rank": No("replicas of the model hold the same", 1),
    "config.enable_storage_metrics": No("what is measured", True),
    "config.is_page_first_layout": No("the pool says it more exactly", False),
    "config.tp_lcm_size": No("how others' stores cut heads; pages here are whole", 8),
    "config.should_split_heads": No("the same", True),
    "config.dcp_size": No("SGLang refuses it for dynamic back ends"),
    "config.dcp_rank": No("the same"),
    "config.logical_page_size": No("the same: only set with it"),
    "config.extra_config": No("the options, see below", {"timeout": 3}),
    "weights": "of mine",
    "name": PoolName.INDEXER,
    "pool": [Packed(head_num=2, dtype=torch.bfloat16)],
    "pool.layout": ["layer_first", "page_head"],
    "pool.storage_format_tag": "packed",
    "pool.dtype": [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8],
    "pool.page_size": 32,
    "pool.head_num": 4,
    "pool.temporal_dtype": [torch.float16, torch.bfloat16],
    "pool.conv_dtype": [torch.float16, torch.bfloat16],
    "pool.temporal_state_shape": [(2, 3), (3, 2)],
    "pool.conv_state_shapes": [((2, 3),), ((3, 2),)],
    **{
        f"pool.{name}": 9
        for name in (
            "layer_num", "start_layer", "end_layer", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim",
            "kv_cache_dim", "index_head_dim", "num_mamba_layers", "size_per_token",
        )
    },
    "server.dtype": ["float16", "bfloat16"],
    "server.kv_cache_dtype": ["fp8_e4m3", "fp8_e5m2", "int8"],
    "server.quantization": ["fp8", "modelopt"],
    "server.revision": "v2",
    "server.weight_version": "2",
    "server.json_model_override_args": "{}",
    "server.quantization_param_path": ["scales.json", "others.json"],
    "server.modelopt_quant": "fp8",
    "server.rl_quant_profile": "profile",
    "server.qsa_indexer_dtype": ["fp8", "fp4"],
    "server.enable_deepseek_v4_fp4_indexer": True,
    "server.enable_int8_mamba_checkpoint": True,
}  # fmt: skip


def given_to_sglang() -> Any:
    config = HiCacheStorageConfig(tp_size=4, tp_rank=1, pp_size=2, attn_cp_size=2)
    pool = HostPool(head_num=2, dtype=torch.bfloat16)
    return SimpleNamespace(config=config, pool=pool, weights="", name=PoolName.KV, server=SimpleNamespace())


def test_each_field_of_sglangs_configuration_changes_the_name_of_its_pages() -> None:
    with sglang_hicache.installed(settings={}) as module:
        functions = [module._identity, module._describe, module._same_on_all_ranks, module._server_settings]
        found = reads(functions, {"config": "config", "pool": "pool", "settings": "server"})
        found |= {f"pool.{name}" for name in module._SHAPE}
        found |= {f"server.{name}" for name in (*module._SERVER, *module._RARE)}
        known = {at for at, entry in SGLANG.items() if "." in at and not isinstance(entry, No)}
        assert found - {"server.pop", "server.items"} == known
        assert {f"config.{field.name}" for field in fields(HiCacheStorageConfig)} == {
            at for at in SGLANG if at.startswith("config.")
        }

        def name(given: Any) -> Name:
            module.get_server_args = lambda: given.server
            identity = module._identity(given.config, given.pool, given.weights)
            return identity.encode(), identity.shard, module._describe(given.config, given.pool, str(given.name))

        check(name, given_to_sglang(), SGLANG)

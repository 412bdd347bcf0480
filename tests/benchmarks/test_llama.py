"""The weights that llama.cpp serves in the benchmark are those of the folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rigs.byte_pairs import byte_pairs
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from bench import hosted
from bench.llama.convert import write_gguf


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_has_the_weights_of_the_folder_in_bfloat16(tmp_path: Path, tied: bool) -> None:
    """transformers reads it back: names, shapes, and the order of the dimensions that positions turn."""
    tokenizer = byte_pairs()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    write_gguf(tmp_path, tmp_path / "tiny.gguf")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    own = model.state_dict()
    assert own.keys() == read.state_dict().keys()
    for name, weight in read.state_dict().items():
        expected = own[name] if own[name].dim() == 1 else own[name].bfloat16().float()
        assert torch.equal(weight, expected), name


def test_llama_cpp_is_measured_where_its_package_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = hosted.SYSTEMS[-1]
    monkeypatch.setattr(hosted, "ROOT", tmp_path)
    assert (system.name, system.version()) == ("llama.cpp", None)
    package = tmp_path / ".venv-llama" / "node_modules" / "node-llama-cpp" / "package.json"
    package.parent.mkdir(parents=True)
    package.write_text('{"version": "3.22.1"}')
    assert system.version() == "3.22.1"

"""Calibrating a codec for a model: what is found of it, and that its pages then go through storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.serving import tiny_folder

from bench.tiny_models import VOCAB, WINDOWED, loaded, tiny
from mainstem.cli import main
from mainstem.errors import BadArgument
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.calibration import calibrate, tokens_of
from mainstem.runtime.models.layout import Layout
from mainstem.runtime.models.loading import LoadedModel, load_model
from mainstem.runtime.request import Request
from mainstem.settings.engine import EngineConfig, HostSize, SamplingParams, StorageConfig, TierConfig
from mainstem.tiers.storage.calibrated import Calibrated, open_codec, save
from mainstem.tiers.storage.codecs import Page, load_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
CONTEXT = 128


def model_of(family: str = "llama", **changes: Any) -> LoadedModel:
    return loaded(tiny(family, max_position_embeddings=CONTEXT, **changes))


def text(passages: int = 4) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(0).integers(2, VOCAB, passages * CONTEXT).astype(np.int64)


def relative_error(codec: Calibrated, page: torch.Tensor) -> float:
    payload = memoryview(bytearray(page.contiguous().numpy().tobytes()))
    data = memoryview(bytearray(codec.encoded_bytes(len(payload), "float32")))
    codec.encode(payload, data, "float32", Page("full", 1))
    out = memoryview(bytearray(len(payload)))
    codec.decode(data, out, "float32")
    before, after = (load_numbers(each, "float32") for each in (payload, out))
    return float(((after - before) ** 2).mean() / (before**2).mean()) ** 0.5


def test_pages_of_the_calibrated_model_lose_less_than_others() -> None:
    model = model_of()
    codec = calibrate(model, text(), ratio=8)
    ids = torch.from_numpy(np.random.default_rng(1).integers(2, VOCAB, 32))[None]
    with torch.inference_mode():
        layers = model.model(input_ids=ids, use_cache=True).past_key_values.layers
    page = torch.stack(
        [torch.stack([each[0, :, 16:].transpose(0, 1) for each in (a.keys, a.values)]) for a in layers], 1
    )
    assert relative_error(codec, page) < 0.1
    assert relative_error(codec, page.flip(-1)) > 2 * relative_error(codec, page)


def test_the_angles_are_those_of_the_model() -> None:
    model = model_of()
    found = calibrate(model, text(), ratio=6).bases["full"].rotary
    buffers = [buffer for name, buffer in model.model.named_buffers() if name.endswith("inv_freq")]
    assert any(np.allclose(found, buffer) for buffer in buffers)


def test_each_component_of_pages_has_a_basis() -> None:
    model = model_of("gemma3_text", **WINDOWED["gemma3_text"])
    codec = calibrate(model, text(2), ratio=6)
    layers = Layout.of(model.model.config, CONTEXT).kv_layers
    assert len(layers) == 2 and {name: basis.layers for name, basis in codec.bases.items()} == {
        name: len(own) for name, own in layers.items()
    }


@pytest.mark.parametrize(("head_dim", "groups"), [(128, [2, 1]), (320, [1])])
def test_neighbouring_layers_share_a_basis_of_1152_numbers_at_most(head_dim: int, groups: list[int]) -> None:
    model = model_of(num_hidden_layers=sum(groups), head_dim=head_dim)
    decode = calibrate(model, text(1), ratio=6).bases["full"].decode
    assert [len(each) for each in decode] == [layers * 2 * 2 * head_dim for layers in groups]


def test_an_error_costs_what_it_costs_the_second_half_of_a_passage() -> None:
    """Three layers of a window of 8 see 21 positions before the second half: other tokens change no weight."""

    def weights(change: slice) -> np.ndarray[Any, Any]:
        tokens = text(1)
        tokens[change] = tokens[change][::-1].copy()
        (basis,) = calibrate(model_of("mistral", sliding_window=8), tokens, ratio=6).bases.values()
        (decode,) = basis.decode
        found = np.linalg.inv(decode.T.astype(np.float64) @ decode)  # F, but for the length of a step
        return np.asarray(found / np.trace(found))

    own = weights(slice(0))
    np.testing.assert_allclose(weights(slice(30)), own, atol=1e-4 * np.abs(own).max())
    assert np.abs(weights(slice(50, 60)) - own).max() > 0.01 * np.abs(own).max()


def test_a_text_shorter_than_a_passage_is_refused() -> None:
    with pytest.raises(BadArgument, match=f"text = '127 tokens': must be {CONTEXT} or more"):
        calibrate(model_of(), text()[: CONTEXT - 1], ratio=6)
    with pytest.raises(BadArgument, match="with a tokenizer"):
        tokens_of(model_of(), "text")


# ---------------------------------------------------------------- with an engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with a tokenizer."""
    return tiny_folder("llama", tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=CONTEXT)


def calibrated(model: LoadedModel, path: Path, passages: int = 4) -> str:
    """Writes a calibration; returns its path."""
    save(path, calibrate(model, text(passages), ratio=3))
    return str(path)


def test_the_command_writes_the_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, out = tmp_path / "text.txt", tmp_path / "a.npz"
    written.write_text(" ".join(f"w{token}" for token in text(2)))
    arguments = ["calibrate", str(written), str(out), "--model", str(folder), "--dtype", "float32"]
    assert main([*arguments, "--ratio", "3"]) == 0
    theirs = open_codec(str(out))
    ours = open_codec(calibrated(load_model(str(folder), dtype="float32"), tmp_path / "b.npz", 2))
    assert theirs.name == ours.name != "calibrated "
    assert main([*arguments, "--ratio", "0.5"]) == 2
    assert "--ratio 0.5: must be 1 to 1000" in capsys.readouterr().err
    written.write_text("w2 w3")
    assert main(arguments) == 2
    assert "text 2 tokens" in capsys.readouterr().err


def engine(model: LoadedModel, folder: Path, codec: str) -> Engine:
    limits = StorageConfig(prefetch="wait_complete", prefetch_min_tokens=8)
    spec = f"file:{folder}?capacity=8MiB"
    tiers = TierConfig(size=HostSize(host_ratio=2.0), storage=spec, storage_codec=codec, limits=limits)
    return Engine(model, EngineConfig(pages=16, page_size=8, tiers=tiers))


def ask(engine: Engine) -> tuple[list[int], int]:
    """Returns the answer to a prompt of 60 tokens, and how many of those came from storage."""
    prompt = np.random.default_rng(2).integers(2, VOCAB, 60).astype(np.int32)
    completion = engine.submit(Request(prompt, SamplingParams(max_tokens=4, ignore_eos=True))).result()
    return list(completion.tokens), completion.usage.storage_tokens


def test_pages_of_a_calibration_are_found_with_the_same_file_only(folder: Path, tmp_path: Path) -> None:
    def load() -> LoadedModel:
        return load_model(str(folder), dtype="float32")

    first, second = calibrated(load(), tmp_path / "first.npz"), calibrated(load(), tmp_path / "second.npz", 2)
    with engine(load(), tmp_path / "kv", first) as writer:
        answer, stored = ask(writer)
        assert stored == 0
    with engine(load(), tmp_path / "kv", first) as reader:
        assert ask(reader) == (answer, 56)
    with engine(load(), tmp_path / "kv", second) as other:
        assert ask(other) == (answer, 0)


def test_an_engine_refuses_the_calibration_of_another_model(folder: Path, tmp_path: Path) -> None:
    model = load_model(str(folder), dtype="float32")
    path = calibrated(model, tmp_path / "a.npz", 2)
    with torch.no_grad():
        next(iter(model.model.parameters())).add_(1)
    with pytest.raises(BadArgument, match="storage_codec = 'a calibration of the weights"):
        engine(model, tmp_path / "kv", path)

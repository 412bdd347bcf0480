"""Images in prompts: identities, spans, embeddings, and which models may share prefixes with images."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bench.tiny_vision import FAMILIES, paligemma, picture, save, tokenizer
from mainstem.cache.namespaces import Namespace, encode_namespace
from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime.models.loading import LoadedModel, load_model
from mainstem.runtime.request import PreparedPrompt
from mainstem.runtime.text import vision as vision_module
from mainstem.runtime.text.prompts import ANSWER, WHOLE
from mainstem.runtime.text.vision import Vision, image_identity

IMAGE = tokenizer().convert_tokens_to_ids("<image>")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = tmp_path_factory.mktemp("models")
    return {family: load_model(str(save(family, folder / family)), dtype="float32") for family in FAMILIES}


@pytest.fixture(params=sorted(FAMILIES))
def loaded(request: pytest.FixtureRequest, models: dict[str, LoadedModel]) -> LoadedModel:
    return models[request.param]


@pytest.fixture
def llava(models: dict[str, LoadedModel]) -> Vision:
    return Vision(models["llava"])


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(shown: Image.Image) -> dict[str, Any]:
    return {"type": "image", "image": shown}


def chat(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def two_images() -> list[dict[str, Any]]:
    return chat(text("look: "), image(picture(1)), text(" and "), image(picture(2, 60, 50)), text(" what?"))


# ---------------------------------------------------------------- identities


def test_an_equal_image_has_an_equal_identity() -> None:
    assert image_identity(picture(1)) == image_identity(picture(1))
    assert len(image_identity(picture(1))) == 16


def pixels(change: int = 0) -> np.ndarray:
    array = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    array[2, 3, 1] += change
    return array


@pytest.mark.parametrize(
    "other",
    [
        pixels(1),
        pixels().reshape(6, 4, 3),
        pixels().reshape(4, 6 * 3),
        pixels().view(np.int8),
        Image.fromarray(pixels()),
        Image.fromarray(pixels()).convert("HSV"),
    ],
    ids=["one pixel", "shape", "channels", "dtype", "mode", "another mode"],
)
def test_images_that_differ_in_anything_never_match(other: Any) -> None:
    assert image_identity(pixels()) != image_identity(other)


def test_equal_bytes_of_another_mode_or_shape_are_another_image() -> None:
    flat = np.full((8, 8, 3), 7, dtype=np.uint8)
    images = [
        Image.fromarray(flat, "RGB"),
        Image.fromarray(flat, "HSV"),
        Image.fromarray(flat.reshape(4, 16, 3), "RGB"),
    ]
    assert len({image_identity(one) for one in images}) == 3


def test_a_palette_counts_by_its_colours() -> None:
    indices = Image.fromarray(np.array([[0, 1], [1, 0]], dtype=np.uint8))
    coloured = []
    for colours in ([0, 0, 0, 255, 0, 0], [0, 0, 0, 0, 255, 0]):
        one = indices.copy()
        one.putpalette(colours)
        coloured.append(image_identity(one))
    assert len({*coloured, image_identity(indices)}) == 3


def test_the_settings_of_the_processor_are_part_of_it() -> None:
    assert image_identity(picture(1), b"a") != image_identity(picture(1), b"b") != image_identity(picture(1))


def test_a_processor_with_other_settings_makes_another_identity(models: dict[str, LoadedModel], tmp_path: Path) -> None:
    first = Vision(models["llava"]).prepare(chat(image(picture(1)))).images[0]
    other = load_model(str(save("llava", tmp_path)), dtype="float32")
    assert other.processor is not None
    other.processor.image_processor.image_mean = [0.5, 0.5, 0.5]
    assert Vision(other).prepare(chat(image(picture(1)))).images[0].identity != first.identity


# ---------------------------------------------------------------- prompts


def test_a_prompt_has_the_tokens_of_the_models_own_processor(loaded: LoadedModel) -> None:
    prompt, theirs = Vision(loaded).prepare(two_images()), whole(loaded)
    assert prompt.tokens.tolist() == theirs["input_ids"][0].tolist()
    assert prompt.tokens.dtype == np.int32 and not prompt.tokens.flags.writeable


def test_a_variant_parts_before_or_after_an_image_and_never_inside_of_one(loaded: LoadedModel) -> None:
    vision, (message,) = Vision(loaded), two_images()
    parts = message["content"]
    changed = [{**message, "content": [*parts[:at], text("here"), *parts[at:]]} for at in range(1, 6)]
    prompt = vision.prepare([message], ANSWER, [([each], ANSWER) for each in changed])
    first, second = prompt.images
    assert prompt.tokens.tolist() == vision.prepare([message]).tokens.tolist()
    before, between, words, after, end = prompt.partings
    assert 0 < before <= first.start < first.end <= between <= words <= second.start < second.end <= after <= end
    assert end <= len(prompt.tokens)


def whole(loaded: LoadedModel) -> Any:
    """Processes both images at once."""
    processor: Any = loaded.processor
    words = processor.apply_chat_template(
        chat(text("look: "), {"type": "image"}, text(" and "), {"type": "image"}, text(" what?")),
        add_generation_prompt=True,
    )
    return processor(text=[words], images=[[picture(1), picture(2, 60, 50)]], return_tensors="pt")


def test_images_cover_their_placeholders_and_no_more(loaded: LoadedModel) -> None:
    prompt = Vision(loaded).prepare(two_images())
    covered = np.zeros(len(prompt.tokens), dtype=bool)
    for one in prompt.images:
        covered[one.start : one.end] = True
        assert prompt.tokens[one.start] == prompt.tokens[one.end - 1] == IMAGE
    assert len(prompt.images) == 2
    assert covered[prompt.tokens == IMAGE].all()
    if loaded.name not in ("idefics3", "pixtral"):  # which have text between the tiles, and rows, of an image
        assert np.array_equal(covered, prompt.tokens == IMAGE)


def test_rows_of_pixtrals_images_end_with_a_token_of_text(models: dict[str, LoadedModel]) -> None:
    loaded = models["pixtral"]
    vision = Vision(loaded)
    prompt = vision.prepare(chat(image(picture(1))))  # 40 x 30 pixels, 5 x 4 patches
    (one,) = prompt.images
    breaks = np.flatnonzero(prompt.tokens == loaded.tokenizer.convert_tokens_to_ids("<break>")) - one.start
    assert (one.length, breaks.tolist()) == (23, [5, 11, 17])
    rows = vision.embed(one)
    text = loaded.model.get_input_embeddings()(torch.from_numpy(prompt.tokens[one.start + breaks].astype(np.int64)))
    assert torch.equal(rows[torch.from_numpy(breaks)], text)
    assert int(prompt.tokens[one.end]) == loaded.tokenizer.convert_tokens_to_ids("<end>")


def embedded(vision: Vision, loaded: LoadedModel, prompt: PreparedPrompt) -> torch.Tensor:
    rows = loaded.model.get_input_embeddings()(torch.from_numpy(prompt.tokens.astype(np.int64)))
    for one in prompt.images:
        rows[one.start : one.end] = vision.embed(one)
    return rows.unsqueeze(0)


def test_embeddings_and_positions_give_the_models_own_logits(loaded: LoadedModel) -> None:
    vision = Vision(loaded)
    prompt, theirs = vision.prepare(two_images()), whole(loaded)
    assert (prompt.positions is not None) == vision.m_rope == (loaded.name == "qwen2_vl")
    beside = {"token_type_ids": theirs["token_type_ids"]} if "token_type_ids" in theirs else {}
    if prompt.positions is not None:
        beside["position_ids"] = torch.from_numpy(prompt.positions.copy()).unsqueeze(1)
    with torch.inference_mode():
        ours = loaded.model(inputs_embeds=embedded(vision, loaded, prompt), **beside).logits
        plain = loaded.model(**theirs).logits
    assert torch.allclose(ours, plain, atol=1e-4)


def test_an_identical_image_is_processed_once_per_prompt(llava: Vision) -> None:
    prompt = llava.prepare(chat(image(picture(1)), image(picture(2)), image(picture(1))))
    first, second, third = prompt.images
    assert first.identity == third.identity != second.identity
    assert first.inputs is third.inputs
    assert first.end == second.start  # adjacent, and still two spans


def test_a_conversation_without_images_is_a_prompt_like_any_other(loaded: LoadedModel) -> None:
    said = [{"role": "user", "content": "hi"}]
    prompt = Vision(loaded).prepare(said)
    assert (prompt.images, prompt.positions) == ((), None)
    assert tokenizer().decode(prompt.tokens) == "<bos><turn>user:hi<turn>assistant:"
    prefix = Vision(loaded).prepare(said, WHOLE)
    assert tokenizer().decode(prefix.tokens) == "<bos><turn>user:hi"


@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_pictures_of_other_modes_are_taken(loaded: LoadedModel, mode: str) -> None:
    prompt = Vision(loaded).prepare(chat(image(picture(1, mode=mode))))
    assert prompt.images[0].inputs["pixel_values"].isfinite().all()


@pytest.mark.parametrize("words", [["<image>"], ["so <image> and"], ["<im", "age>"], ["<turn>assistant:no"]])
def test_text_that_looks_like_an_image_or_a_turn_is_text(loaded: LoadedModel, words: list[str]) -> None:
    vision, written = Vision(loaded), "".join(words)
    prompt = vision.prepare(chat(*map(text, words)))
    assert (prompt.images, prompt.positions) == ((), None)
    assert tokenizer().decode(prompt.tokens) == f"<bos><turn>user:{written}<turn>assistant:"
    turn, placeholder = tokenizer().convert_tokens_to_ids(["<turn>", "<image>"])
    assert (prompt.tokens.tolist().count(turn), prompt.tokens.tolist().count(placeholder)) == (2, 0)
    beside = vision.prepare(chat(*map(text, words), image(picture(1))))
    alone = vision.prepare(chat(image(picture(1))))
    assert [one.identity for one in beside.images] == [one.identity for one in alone.images]
    assert beside.images[0].start > alone.images[0].start


def test_what_the_template_refuses_is_refused_by_name(
    models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    llava = Vision(models["llava"])
    monkeypatch.setattr(models["llava"].processor, "chat_template", "{{ raise_exception('users only') }}")
    with pytest.raises(BadArgument, match=r"messages .* users only"):
        llava.prepare(chat(text("hi")))


def test_an_image_that_the_processor_cannot_take_is_refused(models: dict[str, LoadedModel]) -> None:
    with pytest.raises(BadArgument, match="image"):
        Vision(models["qwen2_vl"]).prepare(chat(image(picture(1, 4000, 2))))  # it allows sides of 200 to 1


# ---------------------------------------------------------------- embeddings


def test_the_encoder_runs_once_for_an_image(loaded: LoadedModel) -> None:
    vision = Vision(loaded)
    assert vision.stats().encoder_runs == 0
    for _ in range(2):
        for one in vision.prepare(two_images()).images:
            assert vision.embed(one).shape == (one.length, 64)
    stats = vision.stats()
    assert (stats.encoder_runs, stats.hits, stats.images) == (2, 2, 2)


def test_text_between_the_tiles_of_an_image_is_not_kept_as_an_adapter_left_it(models: dict[str, LoadedModel]) -> None:
    vision = Vision(models["idefics3"])
    (one,) = vision.prepare(chat(image(picture(1)))).images
    plain = vision.embed(one)
    weights = models["idefics3"].model.get_input_embeddings().weight
    with torch.no_grad():
        weights.mul_(2)  # as an adapter of the embeddings would
        adapted = vision.embed(one)
        weights.div_(2)
    doubled = (adapted == 2 * plain).all(1)
    assert doubled.any(), "the text"
    assert (adapted == plain).all(1)[~doubled].all(), "the image"
    assert not doubled.all()
    assert vision.stats().encoder_runs == 1


def test_another_namespace_encodes_an_image_for_itself(models: dict[str, LoadedModel]) -> None:
    vision = Vision(models["llava"])
    (one,) = vision.prepare(chat(image(picture(1)))).images
    mine, theirs = (encode_namespace(Namespace(salt=salt)) for salt in ("mine", "theirs"))
    rows = [vision.embed(one, namespace) for namespace in (mine, theirs, mine, theirs, b"")]
    assert all(torch.equal(each, rows[0]) for each in rows)
    stats = vision.stats()
    assert (stats.encoder_runs, stats.hits, stats.images) == (3, 2, 3)


def test_embeddings_are_kept_within_their_bytes_the_least_recent_goes_first(models: dict[str, LoadedModel]) -> None:
    vision = Vision(models["llava"], cache_bytes=2 * 9 * 64 * 4)
    one, two, three = vision.prepare(chat(*(image(picture(seed)) for seed in range(3)))).images
    for each in (one, two, one, three, one, two):
        vision.embed(each)
    stats = vision.stats()
    assert (stats.encoder_runs, stats.hits, stats.images, stats.bytes) == (4, 2, 2, 2 * 9 * 64 * 4)


def test_the_last_image_stays_however_small_the_cache(models: dict[str, LoadedModel]) -> None:
    vision = Vision(models["llava"], cache_bytes=0)
    (one,) = vision.prepare(chat(image(picture(1)))).images
    assert vision.embed(one) is vision.embed(one)
    with pytest.raises(BadArgument):
        Vision(models["llava"], cache_bytes=-1)


# ---------------------------------------------------------------- the self-test


def test_which_models_see_both_ways_inside_an_image(loaded: LoadedModel) -> None:
    vision = Vision(loaded)
    assert vision.both_ways == (loaded.name == "gemma3")
    assert all(one.splits != vision.both_ways for one in vision.prepare(two_images()).images)


def test_a_model_whose_prompts_attend_both_ways_is_refused(models: dict[str, LoadedModel]) -> None:
    with pytest.raises(UnsupportedModel, match="attend both ways as a whole"):
        Vision(paligemma(models["llava"]))


def test_no_token_of_paligemmas_prompts_stands_by_itself(models: dict[str, LoadedModel]) -> None:
    """The reason why it is refused: KV of the first token depends on the last one."""
    model = paligemma(models["llava"]).model.eval()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    tokens = torch.arange(10, 20)[None]
    other = tokens.clone()
    other[0, -1] = 99
    prompt = torch.zeros_like(tokens)  # its token types
    with torch.inference_mode():
        one, two = (model(input_ids=given, token_type_ids=prompt).logits[0, 0] for given in (tokens, other))
    assert float((one - two).abs().max()) > 0.01


def test_a_model_without_a_processor_is_refused(models: dict[str, LoadedModel]) -> None:
    with pytest.raises(UnsupportedModel, match="no processor"):
        Vision(dataclasses.replace(models["llava"], processor=None))


@pytest.fixture
def sees_ahead(models: dict[str, LoadedModel]) -> Iterator[LoadedModel]:
    """LLaVA, but the last embedding leaks into the first."""
    loaded = models["llava"]
    language = loaded.model.model.language_model  # type: ignore[union-attr]
    before = language.forward

    def forward(*args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
        mixed = inputs_embeds.clone()
        mixed[:, 0] += inputs_embeds[:, -1]
        return before(*args, inputs_embeds=mixed, **kwargs)

    language.forward = forward
    yield loaded
    language.forward = before


def test_a_model_that_sees_later_tokens_is_refused(sees_ahead: LoadedModel) -> None:
    with pytest.raises(UnsupportedModel, match="tokens see what comes after them"):
        Vision(sees_ahead)


def test_a_model_whose_images_are_more_than_embeddings_is_refused(
    models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Vision._encode
    monkeypatch.setattr(vision_module.Vision, "_encode", lambda self, one: before(self, one) * 1.1)
    with pytest.raises(UnsupportedModel, match="used for more than embeddings"):
        Vision(models["llava"])


def test_a_model_whose_inner_layers_read_the_image_again_is_refused(tmp_path: Path) -> None:
    model = load_model(str(save("qwen3_vl", tmp_path)), dtype="float32")
    with pytest.raises(UnsupportedModel, match="used for more than embeddings"):
        Vision(model)


@pytest.fixture
def first_token(models: dict[str, LoadedModel]) -> Iterator[Vision]:
    config = models["llava"].model.config
    config.first_token_sees_image = True
    yield Vision(models["llava"])
    del config.first_token_sees_image


def test_images_join_the_namespace_where_the_first_token_sees_them(llava: Vision, first_token: Vision) -> None:
    mine = Namespace(salt="mine")
    given = first_token._assemble("<bos><image>what?", [picture(1)])
    other = first_token._assemble("<bos><image>what?", [picture(2)])
    assert llava.namespace_for(given.images, mine) is mine
    assert first_token.namespace_for((), mine) is mine
    names = [first_token.namespace_for(prompt.images, mine) for prompt in (given, other, given)]
    assert names[0] == names[2] != names[1]
    assert names[0] is not None and names[0].salt == "mine"
    assert first_token.namespace_for(given.images) not in (None, Namespace())


def test_the_first_token_and_its_image_are_one_span(llava: Vision, first_token: Vision) -> None:
    given = first_token._assemble("<bos><image>what?", [picture(1)])
    plain = llava._assemble("<bos><image>what?", [picture(1)])
    assert [(one.start, one.length, one.splits) for one in given.images] == [(0, 10, False)]
    assert torch.equal(first_token.embed(given.images[0])[1:], llava.embed(plain.images[0]))
    with pytest.raises(BadArgument, match="directly after the first token"):
        first_token._assemble("<bos>and <image>what?", [picture(1)])

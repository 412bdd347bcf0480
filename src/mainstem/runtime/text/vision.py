"""Images in prompts: turns pictures into spans of tokens, identities, and embeddings.

    messages, pictures --prepare--> tokens with spans, each with the encoder's inputs for that picture alone
                       ---embed---> [length, hidden] of a span, from a cache, else from the encoder

Embeddings are shared as KV is: only within a namespace. So no tenant learns from the time to an answer which images
another one has sent.

This module knows the model's own processor, its chat template and its encoder. It does not know pages, requests, or
HTTP. `prepare` may be slow and may be called from any thread; `embed` is for the thread that runs the model.

The KV of a prefix may be shared only if it does not depend on anything after the prefix. So a self-test runs a prompt
three times, each with one change, and checks which logits move:

    changed                 checked                      if they move
    what is after it        all up to the image's end    the model is rejected (its whole prompt attends both ways)
    the image               all before it                the model is rejected, unless it declares exactly this
    the image's last row    the image's other rows       the image is attended both ways as a whole: never split
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.cache.keys import IMAGE_DIGEST_BYTES, IMAGE_MIN_LENGTH
from mainstem.cache.namespaces import Namespace
from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.metric import Metric, gauge
from mainstem.runtime.attention.paged import TOLERANCE
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.request import ImageInput, PreparedPrompt
from mainstem.runtime.text.cuts import common_tokens
from mainstem.runtime.text.escapes import TEMPLATE_ERRORS, Escapes, not_taken
from mainstem.runtime.text.prompts import ANSWER, Template, Variant, parting

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

# Below this, logits have not moved: a row that does not see another is computed alike, whatever the other holds.
_STILL = 1e-7

_SPAN_IDS = "span_ids"
"""A key of an image's inputs: the ids of its span, if there is text between its placeholders."""

_WHOLE_PROMPTS = {"paligemma": "its prompts attend both ways as a whole, so no prefix of one can be shared"}


@dataclass(frozen=True, slots=True)
class VisionStats:
    """Counts of embeddings: runs of the encoder, hits of the cache, and the images and bytes that the cache holds.

    An image that two namespaces hold counts twice.
    """

    encoder_runs: int
    hits: int
    images: int
    bytes: int

    METRICS: ClassVar = (
        Metric("mainstem_image_encoder_runs", "Images encoded", "encoder_runs"),
        Metric("mainstem_image_embedding_hits", "Images whose embeddings were still cached", "hits"),
        gauge("mainstem_image_embeddings_bytes", "Size of cached image embeddings", "bytes"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Processed:
    """The processor's result for one picture: the text that represents it, and the encoder's inputs."""

    identity: bytes
    text: str
    placeholders: int
    inputs: Mapping[str, torch.Tensor]


def image_identity(image: Picture | NDArray[Any], settings: bytes = b"") -> bytes:
    """Returns 16 bytes that identify an image: SHA-256, cut, of its pixels with shape, mode, dtype, and of `settings`.

    A palette counts by its colours, and by its mode. Alpha counts, though models do not see it. Other data of a file
    (orientation, colour profiles, names) does not count: apply it before.

    Args:
        image: decoded; an array has mode "".
        settings: everything else that the embeddings depend on, in one encoding.
    """
    mode, pixels = ("", image) if isinstance(image, np.ndarray) else (image.mode, np.asarray(_without_palette(image)))
    about = json.dumps([mode, pixels.dtype.str, pixels.shape]).encode()
    digest = hashlib.sha256(b"mainstem image 1")
    for part in (settings, about, np.ascontiguousarray(pixels).tobytes()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()[:IMAGE_DIGEST_BYTES]


def _without_palette(image: Picture) -> Picture:
    if image.mode not in ("P", "PA"):
        return image
    return image.convert("RGBA" if image.mode == "PA" or "transparency" in image.info else "RGB")


class Vision:
    """The parts of a model that takes images, besides pages. Make it before the runner, which changes its attention.

    Args:
        loaded: a model with a processor.
        cache_bytes: memory for embeddings; those of the last image always stay.

    Attributes:
        escapes: tell control tokens, those of images among them, from their texts.
        both_ways: tokens inside an image see each other in both directions, so an image is never split.
        m_rope: prompts with images have M-RoPE positions.
        first_token_sees_image: the first token and the image after it see each other, as the model's configuration
            declares by this name; they form one span.

    Raises:
        UnsupportedModel: prefixes with images cannot be shared, or not be computed from embeddings; the message says
            why.
        BadArgument: cache_bytes is negative.
    """

    def __init__(self, loaded: LoadedModel, cache_bytes: int = 256 << 20) -> None:
        if cache_bytes < 0:
            raise BadArgument("cache_bytes", cache_bytes, "0 or more")
        if reason := _refusal(loaded):
            raise UnsupportedModel(f"{loaded.name} cannot run with images: {reason}")
        processor: Any = loaded.processor
        encoder: Any = loaded.model.get_image_features
        self._model: Any = loaded.model
        self._processor = processor
        self._tokenizer = processor.tokenizer
        self._dtype = loaded.dtype
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[tuple[bytes, bytes], torch.Tensor] = OrderedDict()  # by namespace and identity
        self._bytes = self._runs = self._hits = 0
        self._marker = str(processor.image_token)
        reserved = [token for token in processor.image_token_ids if token is not None]
        names = {self._marker, *self._tokenizer.convert_ids_to_tokens(reserved)}
        self.escapes = Escapes(self._tokenizer, names, _template(processor))
        self._placeholder = reserved[0]  # one for each row of the encoder; others end rows and images
        self._vocab_size = int(self._model.config.get_text_config(decoder=True).vocab_size)
        self._taken = set(inspect.signature(encoder).parameters)
        self._rope_index = _rope_index(self._model)
        self._settings = _settings(processor)
        self.m_rope = self._rope_index is not None
        self.first_token_sees_image = bool(getattr(self._model.config, "first_token_sees_image", False))
        self.both_ways = self.first_token_sees_image
        try:
            self._self_test(loaded)
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
            raise UnsupportedModel(f"{loaded.name} cannot run with images: its own code says: {error}") from error

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], template: Template = ANSWER, variants: Sequence[Variant] = ()
    ) -> PreparedPrompt:
        """Makes a prompt of a conversation, by default up to where the assistant's answer begins.

        Args:
            messages: `role` and `content` of each; content is text or a list of parts, `{"type": "text", "text": ...}`
                or `{"type": "image", "image": a decoded PIL image}`.
            template, variants: see `Prompts.prepare`; parts of variants need no decoded images.

        Raises:
            BadArgument: the chat template rejects it, or the processor rejects an image.
        """
        pictures = [part["image"] for message in messages for part in _parts(message) if part["type"] == "image"]
        try:
            text = self._render(messages, template)
        except TEMPLATE_ERRORS as error:
            raise not_taken(messages, error) from error
        return self._assemble(text, pictures, [parting(text, partial(self._render, *each)) for each in variants])

    def embed(self, image: ImageInput, namespace: bytes = b"") -> torch.Tensor:
        """Returns the embeddings of an image's span, [length, hidden], in the model's dtype and on its device.

        Text inside the span is embedded by the model as it is now: the selected adapter may affect it.

        Args:
            image: of a prompt.
            namespace: of the request, encoded; embeddings of other namespaces are not used.
        """
        name = (namespace, image.identity)
        rows = self._cached.get(name)
        if rows is None:
            self._runs += 1
            rows = self._encode(image)
            self._keep(name, rows)
        else:
            self._hits += 1
            self._cached.move_to_end(name)
        return self._span(image, rows)

    def namespace_for(
        self, images: Sequence[ImageInput], namespace: Namespace | str | None = None
    ) -> Namespace | str | None:
        """Returns the namespace of a prompt; it includes the images if tokens before an image depend on it."""
        if not images or not self.first_token_sees_image:
            return namespace
        named = tuple(f"image:{image.identity.hex()}" for image in images)
        base = Namespace(extra=(f"namespace:{namespace}",)) if isinstance(namespace, str) else namespace or Namespace()
        return replace(base, extra=base.extra + named)

    def stats(self) -> VisionStats:
        """Returns counts since construction, without the self-test."""
        return VisionStats(self._runs, self._hits, len(self._cached), self._bytes)

    # --- prompts ------------------------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Mapping[str, Any]], template: Template) -> str:
        text: Any = self._tokenizer.apply_chat_template(
            self.escapes.messages({**message, "content": _template_parts(message)} for message in messages),
            chat_template=_template(self._processor),
            tokenize=False,
            **self.escapes.value(template.arguments),
        )
        return self.escapes.rendered(str(text))

    def _assemble(self, text: str, pictures: Sequence[Picture], boundaries: Sequence[int] = ()) -> PreparedPrompt:
        """Makes a prompt of a rendered text; `boundaries`: its characters at which variants part from it, or 0."""
        pieces = text.split(self._marker)
        if len(pieces) != len(pictures) + 1:
            raise BadArgument(
                "messages", f"{len(pictures)} images", f"{len(pieces) - 1}, the number that the chat template has"
            )
        known: dict[bytes, _Processed] = {}
        processed = [self._process(picture, known) for picture in pictures]
        whole = self._with_images(text, processed)
        bos = self._tokenizer.bos_token
        added = not (bos and whole.startswith(bos))
        ids = self._ids(whole, special_tokens=added)
        images = tuple(
            self._image(each, span, ids) for each, span in zip(processed, self._spans(ids, processed), strict=True)
        )
        positions = self._positions(ids, images)
        tokens = np.where(ids < self._vocab_size, ids, 0).astype(np.int32)  # some have no id for placeholders
        tokens.flags.writeable = False
        begins = [self._with_images(text[:at], processed) for at in boundaries]
        # The beginning of a text may have other tokens at its end.
        partings = tuple(common_tokens(self._ids(begin, special_tokens=added), ids) if begin else 0 for begin in begins)
        return PreparedPrompt(tokens, images, positions, partings=partings)

    def _with_images(self, text: str, processed: Sequence[_Processed]) -> str:
        """Returns a text, or its beginning, with what represents each image in place of its marker."""
        pieces = text.split(self._marker)
        return "".join(piece + each.text for piece, each in zip(pieces[:-1], processed, strict=False)) + pieces[-1]

    def _process(self, picture: Picture, known: dict[bytes, _Processed]) -> _Processed:
        """Processes one picture alone; for a picture that is in the prompt twice, reuses the result."""
        identity = image_identity(picture, self._settings)
        if identity not in known:
            settings = self._processor._merge_kwargs(
                tokenizer_init_kwargs=self._tokenizer.init_kwargs, return_tensors="pt"
            )["images_kwargs"]
            try:
                inputs, texts = self._processor._process_images([_without_palette(picture).convert("RGB")], **settings)
            except (ValueError, TypeError, OSError) as error:
                raise BadArgument("image", picture.size, f"one that the model's processor takes: {error}") from error
            count = int(self._is_placeholder(self._ids(texts[0], special_tokens=False)).sum())
            tensors = {name: value for name, value in inputs.items() if name in self._taken}
            known[identity] = _Processed(identity, texts[0], count, tensors)
        return known[identity]

    def _ids(self, text: str, special_tokens: bool) -> NDArray[np.int64]:
        return np.array(self.escapes.encode(text, special_tokens=special_tokens), dtype=np.int64)

    def _is_placeholder(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.isin(ids, [self._placeholder])

    def _spans(self, ids: NDArray[np.int64], processed: Sequence[_Processed]) -> list[tuple[int, int]]:
        """Returns [start, end) of each image, from its first to after its last placeholder."""
        at = np.flatnonzero(self._is_placeholder(ids))
        ends = np.cumsum([each.placeholders for each in processed], dtype=np.int64)
        if len(at) != (ends[-1] if len(ends) else 0):
            raise BadArgument("messages", f"{len(at)} placeholders", "text without the model's placeholders of images")
        spans = [(int(part[0]), int(part[-1]) + 1) for part in np.split(at, ends[:-1]) if len(part)]
        if spans and self.first_token_sees_image:
            if len(spans) > 1 or spans[0][0] != 1:
                raise BadArgument("images", spans, "one image, directly after the first token")
            spans = [(0, spans[0][1])]
        return spans

    def _image(self, each: _Processed, span: tuple[int, int], ids: NDArray[np.int64]) -> ImageInput:
        start, end = span
        if end - start < IMAGE_MIN_LENGTH:
            raise BadArgument("image", f"{end - start} tokens", f"one of {IMAGE_MIN_LENGTH} tokens or more")
        if each.placeholders == end - start:
            return ImageInput(start, end - start, each.identity, each.inputs, not self.both_ways)
        inside = ids[start:end]
        digest = hashlib.sha256(each.identity + inside.astype("<i8").tobytes()).digest()[:IMAGE_DIGEST_BYTES]
        inputs = {**each.inputs, _SPAN_IDS: torch.from_numpy(inside.copy())}
        return ImageInput(start, end - start, digest, inputs, not self.both_ways)

    def _positions(self, ids: NDArray[np.int64], images: Sequence[ImageInput]) -> NDArray[np.int64] | None:
        if self._rope_index is None or not images:
            return None
        types = torch.from_numpy(self._is_placeholder(ids).astype(np.int64)).unsqueeze(0)
        names = [name for name in images[0].inputs if name.endswith("_grid_thw")]
        grids = {name: torch.cat([image.inputs[name] for image in images]) for name in names}
        tokens = torch.from_numpy(ids).unsqueeze(0)
        positions: torch.Tensor = self._rope_index(input_ids=tokens, mm_token_type_ids=types, **grids)[0]
        columns = positions.squeeze(1).numpy().astype(np.int64)
        columns.flags.writeable = False
        return columns

    # --- embeddings ---------------------------------------------------------------------------------------------------

    def _encode(self, image: ImageInput) -> torch.Tensor:
        device = self._model.device
        inputs = {
            name: value.to(device, self._dtype) if value.is_floating_point() else value.to(device)
            for name, value in image.inputs.items()
        }
        inputs.pop(_SPAN_IDS, None)
        with torch.inference_mode():
            output = self._model.get_image_features(**inputs).pooler_output
            parts = output if isinstance(output, (list, tuple)) else [output]
            return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).to(self._dtype)

    def _span(self, image: ImageInput, rows: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of a span: the encoder's rows at its placeholders, and the text between them."""
        if _SPAN_IDS not in image.inputs:
            return rows
        ids = image.inputs[_SPAN_IDS].to(rows.device)
        with torch.inference_mode():
            placed = ids == self._placeholder
            span: torch.Tensor = self._model.get_input_embeddings()(ids.masked_fill(placed, 0)).clone()
            span[placed] = rows
        return span

    def _keep(self, name: tuple[bytes, bytes], rows: torch.Tensor) -> None:
        self._cached[name] = rows
        self._bytes += rows.nbytes
        while self._bytes > self._cache_bytes and len(self._cached) > 1:
            self._bytes -= self._cached.popitem(last=False)[1].nbytes

    # --- the self-test ------------------------------------------------------------------------------------------------

    def _self_test(self, loaded: LoadedModel) -> None:
        """Runs the self-test that the module's docstring describes."""
        from PIL import Image as Pictures

        noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
        picture = Pictures.fromarray(noise)
        text = f"{self._tokenizer.bos_token or ''}{self._marker}and so on"
        inputs = self._processor(text=[text], images=[picture], return_tensors="pt")
        ours = self._assemble(text, [picture])
        outside = np.ones(len(ours.tokens), dtype=bool)
        for image in ours.images:
            outside[image.start : image.end] = False
        theirs = inputs["input_ids"][0].numpy()
        if len(theirs) != len(outside) or not np.array_equal(theirs[outside], ours.tokens[outside]):
            raise UnsupportedModel(
                f"{loaded.name}: its processor makes different tokens when it processes an image alone"
            )
        span = self._span(ours.images[0], self._encode(ours.images[0]))
        _Test(self, loaded, ours, inputs, span).run()


class _Test:
    """Runs one prompt with changes; the model must not attend through pages yet. `span`: the image's embeddings."""

    def __init__(
        self,
        vision: Vision,
        loaded: LoadedModel,
        prompt: PreparedPrompt,
        inputs: Mapping[str, Any],
        span: torch.Tensor,
    ) -> None:
        self._vision = vision
        self._model: Any = loaded.model
        self._name = loaded.name
        self._tolerance = TOLERANCE[loaded.dtype]
        self._image = prompt.images[0]
        device = loaded.model.device
        taken = inspect.signature(self._model.forward).parameters
        given = {name: value.to(device) for name, value in inputs.items() if name in taken}
        self._pixels = {
            name: value.to(loaded.dtype) if value.is_floating_point() else value for name, value in given.items()
        }
        extra = ("token_type_ids", "mm_token_type_ids")
        self._extra: dict[str, torch.Tensor] = {name: given[name] for name in extra if name in given}
        if prompt.positions is not None:
            self._extra["position_ids"] = torch.from_numpy(prompt.positions.copy()).unsqueeze(1).to(device)
        with torch.inference_mode():
            tokens = torch.from_numpy(prompt.tokens.astype(np.int64)).to(device)
            self._rows = self._model.get_input_embeddings()(tokens).clone()
            self._rows[self._image.start : self._image.end] = span

    def run(self) -> None:
        """Sets `both_ways` of the vision. Raises UnsupportedModel."""
        start, end, vision = self._image.start, self._image.end, self._vision
        with torch.inference_mode():
            plain = self._model(**self._pixels, use_cache=False).logits.float()
        ours = self._logits(self._rows)
        self._spread = float(ours.max() - ours.min())
        self._require(self._moved(plain, ours, 0, len(self._rows)), "its images are used for more than embeddings")
        after = self._logits(self._changed(end, len(self._rows)))
        self._require(self._moved(after, ours, 0, end), "tokens see what comes after them")
        if not vision.first_token_sees_image:
            other = self._logits(self._changed(start, end))
            self._require(self._moved(other, ours, 0, start), "tokens see an image that comes after them")
        last = self._logits(self._changed(end - 1, end))
        vision.both_ways |= self._moved(last, ours, start, end - 1) > _STILL

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            output = self._model(inputs_embeds=rows.unsqueeze(0), use_cache=False, **self._extra)
        logits: torch.Tensor = output.logits.float()
        return logits

    def _changed(self, begin: int, end: int) -> torch.Tensor:
        """Returns the rows, with those of [begin, end) negated and rolled."""
        rows: torch.Tensor = self._rows.clone()
        rows[begin:end] = -rows[begin:end].roll(1, dims=-1)
        return rows

    def _moved(self, left: torch.Tensor, right: torch.Tensor, begin: int, end: int) -> float:
        """Returns the largest difference of logits in [begin, end), as a fraction of their spread."""
        difference = (left - right)[0, begin:end].abs()
        if not difference.numel():
            return 0.0
        return float(difference.max()) / self._spread if bool(difference.isfinite().all()) else float("inf")

    def _require(self, moved: float, otherwise: str) -> None:
        if not moved <= self._tolerance:
            raise UnsupportedModel(
                f"{self._name} cannot run with images: {otherwise}: logits differ by {moved:.2g} of their spread; "
                f"{self._tolerance:g} is allowed"
            )


def _refusal(loaded: LoadedModel) -> str | None:
    if loaded.processor is None:
        return "it has no processor of images"
    if getattr(loaded.processor, "image_token", None) is None or not hasattr(loaded.model, "get_image_features"):
        return "its processor has no marker of images, or its encoder cannot run by itself"
    return _WHOLE_PROMPTS.get(loaded.model.config.model_type)


def _rope_index(model: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
    """Returns the function that computes M-RoPE positions, if the model has one."""
    return getattr(getattr(model, "model", model), "get_rope_index", None)


def _template(processor: Any) -> str | None:
    """Returns the chat template; None: the tokenizer's. The tokenizer renders it: some processors look for videos."""
    templates: str | dict[str, str] | None = processor.chat_template
    return templates.get("default") if isinstance(templates, dict) else templates


def _settings(processor: Any) -> bytes:
    """Encodes what an image's embeddings depend on besides its pixels: settings, classes and versions."""
    import PIL
    import transformers

    settings = {
        name: value for name, value in processor.to_dict().items() if name not in ("tokenizer", "chat_template")
    }
    kinds = [type(part).__name__ for part in (processor, processor.image_processor)]
    versions = [transformers.__version__, PIL.__version__]
    return json.dumps([kinds, versions, settings], sort_keys=True, default=repr).encode()


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content: str | Sequence[Mapping[str, Any]] | None = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def _template_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the parts of a message without the pictures themselves, which templates do not take."""
    return [{"type": "image"} if part["type"] == "image" else dict(part) for part in _parts(message)]

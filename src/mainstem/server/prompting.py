"""Makes the prompts of clients' requests: rendered by the model's template, and tokenised.

Knows the model's tokenizer, its names, and how it speaks; no engine, so that the front of a fleet reads a request as
its replicas do. All calls may be slow: they render templates, tokenise and load images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.namespaces import Namespace
from mainstem.errors import BadArgument, RequestTooLong
from mainstem.runtime.request import PreparedPrompt
from mainstem.runtime.text.prompts import WHOLE, Prompts, Template, Variant
from mainstem.server import errors
from mainstem.server.apis.conversation import parts
from mainstem.server.apis.generation import Conversation, Generation, Texts
from mainstem.server.errors import ApiError, client_names
from mainstem.server.fields.breakpoints import Mark
from mainstem.server.fields.images import Pictures
from mainstem.server.fields.tools import Tool
from mainstem.server.kept.answers import Answers, Turn
from mainstem.server.parsing.dialect import speaking
from mainstem.settings.server import ServerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mainstem.runtime.engine import Engine


Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Reader:
    """The attributes of an engine that prompts need, for a model that takes text only."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    max_context: int
    adapters: tuple[str, ...]
    has_states: bool = False
    vision: None = None


class Prompting:
    """Makes prompts for one model. Any thread may call it.

    Args:
        speaker: the model.
        config: the settings of the server.

    Attributes:
        names: of the model; the first one is shown.
        prompts: of the model.
        answers: whose tokens are found again.
        dialect: how the model writes thoughts and calls.

    Raises:
        BadArgument: an adapter has one of the names in `config.served_model_name`.
    """

    def __init__(self, speaker: Engine | Reader, config: ServerConfig) -> None:
        self._speaker = speaker
        self.names = config.served_model_name or (speaker.name,)
        double = next((name for name in self.names if name in speaker.adapters), None)
        if double is not None:
            raise BadArgument("served_model_name", double, "a name that no adapter has")
        escapes = None if speaker.vision is None else speaker.vision.escapes
        self.prompts = Prompts(speaker.tokenizer, speaker.max_context, marks=speaker.has_states, escapes=escapes)
        self._unlimited = self.prompts.unlimited()
        self.answers = Answers(self.prompts, speaker.tokenizer, config.remember_answers)
        self.dialect = speaking(self.prompts, speaker.tokenizer, config)
        self._pictures, self._max_images = Pictures(config.images), config.images.max_images

    # ---- prompts

    def turn(self, namespace: Namespace | None) -> Turn:
        """Returns a `Turn`, which makes prompts with the tokens of earlier answers, and remembers the next answer."""
        return Turn(self.answers, self.prompts, namespace)

    def made(self, generation: Generation, turn: Turn) -> list[PreparedPrompt]:
        """Returns the prompts of a request, with its breakpoints.

        Raises:
            ApiError, MainstemError: they cannot be made; `client_names` has to name the client's field.
        """
        most = generation.truncate
        if most is None:
            return self._read(generation, turn, generation.marks)
        try:  # one that is to be cut may be longer than the context before
            prompts = self._read(generation, turn, generation.marks)
        except RequestTooLong:  # no answers are looked for in one that is too long
            prompts = self._read(generation, self._unlimited, generation.marks)
        return [_truncated(prompt, most) for prompt in prompts]

    def addressed(self, generation: Generation, tenant: bytes | None) -> tuple[Tokens, Namespace | None]:
        """Returns the tokens of a request's first prompt and its namespace, for routers; raises what `made` raises."""
        request = generation.request
        namespace = self.namespace(request.model, request.cache_salt, tenant)
        return self._read(generation, self.prompts)[0].tokens, namespace

    def count(self, generation: Generation) -> int:
        """Returns the number of tokens of a request's prompts, however long; raises what else `made` raises."""
        with client_names(generation.paths):
            self.check_model(generation.request.model)
            return sum(len(prompt.tokens) for prompt in self._read(generation, self._unlimited))

    def ignored(self, generation: Generation) -> list[str]:
        """Returns the paths of a request's fields that this model cannot heed."""
        asked = generation.prompt
        if isinstance(asked, Texts):
            return []
        return [generation.paths.get(name, name) for name in self.dialect.ignored(asked.thinks, asked.effort)]

    def tokens(self, prompt: str | list[int]) -> Tokens:
        """Returns the tokens of a prompt; see `Prompts`."""
        return self.prompts.text(prompt) if isinstance(prompt, str) else self.prompts.tokens(prompt)

    def text(self, prompt: str, *, special_tokens: bool, parse_special: bool) -> Tokens:
        """Returns the tokens of a text of any length; see `Prompts.text`."""
        return self._unlimited.text(prompt, special_tokens=special_tokens, parse_special=parse_special)

    def chat(self, asked: Conversation) -> Tokens:
        """Returns the tokens of a chat of any length, as its template renders it."""
        return self._conversation(asked, asked.template(), self._unlimited).tokens

    def prefixes(self, asked: Conversation, namespace: Namespace | None) -> list[Tokens]:
        """Returns the prefixes as which a chat may be cached: with the tokens of its answers, and without them."""
        makers = (self.turn(namespace), self.prompts)
        answered, plain = (self._conversation(asked, WHOLE, maker).tokens for maker in makers)
        return [plain] if np.array_equal(answered, plain) else [answered, plain]

    def check_model(self, name: str | None) -> None:
        """Checks the name of a model or an adapter, if there is one.

        Raises:
            ApiError: 404; there is none of this name.
        """
        known = [*self.names, *self._speaker.adapters]
        if name is not None and name not in known:
            message = f"The model {name!r} does not exist; this server has {', '.join(map(repr, known))}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def adapter(self, model: str | None) -> str | None:
        """Returns the adapter that a model's name stands for; None for the model itself."""
        return None if model in self.names else model

    def namespace(self, model: str | None, salt: str | None, tenant: bytes | None) -> Namespace | None:
        """Returns the namespace of requests to a model or an adapter; None: the unnamed one."""
        adapter = self.adapter(model)
        if adapter is None and salt is None and tenant is None:
            return None
        return Namespace(adapter, salt, tenant=None if tenant is None else tenant.hex())

    # ---- parts

    def _read(
        self, generation: Generation, maker: Turn | Prompts, marks: Sequence[Mark] = ()
    ) -> list[PreparedPrompt]:  # fmt: skip
        asked = generation.prompt
        if isinstance(asked, Conversation):
            template = asked.template(self.dialect.switches.variables(asked.thinks, asked.effort))
            return [self._conversation(asked, template, maker, marks)]
        plain = self._plain(maker)
        return [PreparedPrompt(_tokens(asked, prompt, plain)) for prompt in asked.prompts]

    def _plain(self, maker: Turn | Prompts) -> Prompts:
        """Returns the `Prompts` without answers that has the same limits."""
        return self.prompts if isinstance(maker, Turn) else maker

    def _conversation(
        self, asked: Conversation, template: Template, maker: Turn | Prompts, marks: Sequence[Mark] = ()
    ) -> PreparedPrompt:
        """Makes the prompt of a conversation, in a turn with the tokens of its answers.

        Its partings are the places of the marks, but for the end of the prompt.
        """

        def spoken(
            messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
        ) -> tuple[list[dict[str, Any]], Template]:
            taken, listed = self.dialect.conversation(messages, tools)
            return taken, replace(template, tools=listed)

        tools = asked.tooling.tools
        variants: list[Variant] = [spoken(*mark.variant(asked.messages, tools)) for mark in marks if mark.inside]
        messages, template = spoken(asked.messages, tools)
        vision = self._speaker.vision
        images = parts(messages, "image")
        if vision is None:
            if images:
                raise errors.wrong(images[0]["at"], "this model accepts text only", "unsupported_content")
            return maker.prepare(messages, template, variants)
        texts, plain = [each["content"] for each in messages if isinstance(each["content"], str)], self._plain(maker)
        plain.check_length(len(messages), "messages")
        plain.check_size(texts + [part["text"] for part in parts(messages, "text")], "messages")
        self._load(images, asked.path)
        prompt = vision.prepare(messages, template, variants)
        plain.check_length(len(prompt.tokens), "messages")
        return prompt

    def _load(self, images: Sequence[dict[str, Any]], at: str) -> None:
        """Loads the image of every image part of the messages at a path; a repeated URL is read once."""
        if len(images) > self._max_images:
            raise errors.wrong(at, f"at most {self._max_images} images in a request", "too_many_images")
        loaded: dict[str, Any] = {}
        pixels = 0
        for part in images:
            if part["url"] not in loaded:
                loaded[part["url"]] = picture = self._pictures.load(part["url"], part["at"], pixels)
                pixels += picture.width * picture.height
            part["image"] = loaded[part["url"]]


def _tokens(asked: Texts, prompt: str | list[int], prompts: Prompts) -> Tokens:
    if isinstance(prompt, str):
        return prompts.text(prompt, special_tokens=asked.special_tokens, parse_special=asked.parse_special)
    return prompts.tokens(prompt)


def _truncated(prompt: PreparedPrompt, most: int) -> PreparedPrompt:
    """Returns the last tokens of a prompt."""
    cut = len(prompt.tokens) - most
    if cut <= 0:
        return prompt
    if prompt.images:
        raise errors.wrong("truncate_prompt_tokens", "a prompt with images cannot be truncated")
    marks = tuple(mark - cut for mark in prompt.marks if mark >= cut)
    partings = tuple(max(parting - cut, 0) for parting in prompt.partings)
    return replace(prompt, tokens=prompt.tokens[cut:], marks=marks, partings=partings)

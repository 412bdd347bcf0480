"""Makes the engine's requests of what clients ask: prompts, parameters, and what the reply needs.

Knows the engine's model, its names, and how it speaks. Does not know HTTP. All calls may be slow: they render
templates, tokenise, compile grammars and load images.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.namespaces import Namespace
from mainstem.errors import BadArgument, RequestTooLong
from mainstem.runtime.request import Hints, PreparedPrompt, Request
from mainstem.runtime.text.detokenizer import Content
from mainstem.runtime.text.prompts import WHOLE, Prompts, Template, Variant
from mainstem.server import errors
from mainstem.server.apis.replies import Echo, Extras
from mainstem.server.apis.requests import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    Messages,
    parts,
    template_input,
)
from mainstem.server.apis.tool_fields import GRAMMAR, ToolSpec, tools_of
from mainstem.server.errors import ApiError
from mainstem.server.fields.breakpoints import Mark
from mainstem.server.fields.images import Pictures
from mainstem.server.fields.schemas import holdable
from mainstem.server.fields.tools import Tool, Tooling
from mainstem.server.generation import Task
from mainstem.server.kept.answers import Answers, Turn
from mainstem.server.parsing.checked import Check, Checked, by_schema
from mainstem.server.parsing.dialect import speaking
from mainstem.server.parsing.formats import schema_of
from mainstem.server.parsing.output import OutputParser, PlainText
from mainstem.settings.engine import Grammar, SamplingParams
from mainstem.settings.server import ServerConfig

if TYPE_CHECKING:
    from mainstem.runtime.engine import Engine

log = logging.getLogger(__name__)

_SCHEMAS = 256  # of tools, of which it is known what can be held

Ask = CompletionRequest | ChatRequest
Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task that can run.

    Args:
        task: as given.
        requests: for the engine; the choices of a prompt are adjacent.
        extras: what the reply shows besides answers.
        turn: of a conversation.
        parser: makes what finds the pieces of an answer; given the id of the response, calls get ids that follow from
            it, else random ones.
    """

    task: Task
    requests: Sequence[Request]
    extras: Extras
    turn: Turn
    parser: Callable[..., OutputParser]


class Preparation:
    """Makes requests for one engine. Any thread may call it.

    Args:
        engine: runs the requests.
        config: the settings of the server.

    Attributes:
        names: of the model; the first one is shown.
        prompts: of the model.
        answers: which are found again.

    Raises:
        BadArgument: an adapter has one of the names in `config.served_model_name`.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self._engine = engine
        self.names = config.served_model_name or (engine.name,)
        taken = next((name for name in self.names if name in engine.adapters), None)
        if taken is not None:
            raise BadArgument("served_model_name", taken, "a name that no adapter has")
        escapes = None if engine.vision is None else engine.vision.escapes
        self.prompts = Prompts(engine.tokenizer, engine.max_context, marks=engine.has_states, escapes=escapes)
        self._unlimited = self.prompts.unlimited()
        self.answers = Answers(self.prompts, engine.tokenizer, config.remember_answers)
        self._dialect = speaking(self.prompts, engine.tokenizer, config)
        self._holdable = lru_cache(_SCHEMAS)(self._hold)
        self._pictures, self._max_images = Pictures(config.images), config.images.max_images

    def prepare(self, task: Task, tenant: bytes | None) -> Prepared:
        """Makes the requests of a task.

        Args:
            task: what a client asks.
            tenant: whose KV it may share; None: everyone's.

        Raises:
            ApiError, MainstemError: it cannot be answered; the error names the client's field.
        """
        ask = task.request
        with errors.renamed(task.names):
            self.check_model(ask.model)
            self._check_grammar(ask)
            namespace = self.namespace(ask.model, ask.cache_salt, tenant)
            turn = Turn(self.answers, self.prompts, namespace)
            prompts = self._truncated(ask, turn)
            made = [request for prompt in prompts for request in self._choices(ask, prompt, namespace)]
            extras = self._extras(ask, prompts)
            if task.shape is not None:
                page_size = self._engine.config.page_size
                extras = replace(extras, fingerprint=task.shape.fingerprint(prompts[0], namespace, page_size))
            return Prepared(task, made, extras, turn, partial(self._parser, ask, made[0]))

    def addressed(self, task: Task, tenant: bytes | None) -> tuple[Tokens, Namespace | None]:
        """Returns the tokens of a task's first prompt and its namespace, for routers; raises what `prepare` raises."""
        namespace = self.namespace(task.request.model, task.request.cache_salt, tenant)
        return self._read(task.request, self.prompts)[0].tokens, namespace

    def count(self, task: Task) -> int:
        """Returns the number of tokens of a task's prompts, however long; raises what else `prepare` raises."""
        with errors.renamed(task.names):
            self.check_model(task.request.model)
            return sum(len(prompt.tokens) for prompt in self._read(task.request, self._unlimited))

    def ignored(self, task: Task) -> list[str]:
        """Returns the paths of a task's fields that this model cannot heed."""
        ask = task.request
        if not isinstance(ask, ChatRequest):
            return []
        return [task.names.get(name, name) for name in self._dialect.ignored(ask.thinks, ask.reasoning_effort)]

    def tokens(self, prompt: str | list[int]) -> Tokens:
        """Returns the tokens of a prompt; see `Prompts`."""
        return self.prompts.text(prompt) if isinstance(prompt, str) else self.prompts.tokens(prompt)

    def text(self, prompt: str, *, special_tokens: bool, parse_special: bool) -> Tokens:
        """Returns the tokens of a text of any length; see `Prompts.text`."""
        return self._unlimited.text(prompt, special_tokens=special_tokens, parse_special=parse_special)

    def chat(self, messages: Messages, tools: Sequence[ToolSpec] | None, template: Template) -> Tokens:
        """Returns the tokens of a chat of any length, as its template renders it."""
        return self._conversation(template_input(messages), template, Tooling(tools_of(tools)), self._unlimited).tokens

    def prefixes(
        self, messages: Messages, tools: Sequence[ToolSpec] | None, namespace: Namespace | None
    ) -> list[Tokens]:
        """Returns the prefixes as which a chat may be cached: with the tokens of its answers, and without them."""
        makers = (Turn(self.answers, self.prompts, namespace), self.prompts)
        given, tooling = template_input(messages), Tooling(tools_of(tools))
        answered, plain = (self._conversation(given, WHOLE, tooling, maker).tokens for maker in makers)
        return [plain] if np.array_equal(answered, plain) else [answered, plain]

    def check_model(self, name: str | None) -> None:
        """Checks the name of a model or an adapter, if there is one.

        Raises:
            ApiError: 404; there is none of this name.
        """
        known = [*self.names, *self._engine.adapters]
        if name is not None and name not in known:
            message = f"The model {name!r} does not exist; this server has {', '.join(map(repr, known))}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def adapter(self, model: str | None) -> str | None:
        """Returns the adapter that a model's name stands for; None for the model itself."""
        return None if model in self.names else model

    def namespace(self, model: str | None, salt: str | None, tenant: bytes | None) -> Namespace | None:
        """Returns the namespace of requests to a model or an adapter; None: the one without a name."""
        adapter = self.adapter(model)
        if adapter is None and salt is None and tenant is None:
            return None
        return Namespace(adapter, salt, tenant=None if tenant is None else tenant.hex())

    # ---- prompts

    def _truncated(self, ask: Ask, turn: Turn) -> list[PreparedPrompt]:
        """Returns the prompts of a request; one that is to be cut may be longer than the context before."""
        most = ask.truncate_prompt_tokens
        if most is None:
            return self._read(ask, turn, marked=True)
        try:
            prompts = self._read(ask, turn, marked=True)
        except RequestTooLong:  # no answers are looked for in one that is too long
            prompts = self._read(ask, self._unlimited, marked=True)
        return [_truncated(prompt, most) for prompt in prompts]

    def _read(self, ask: Ask, maker: Turn | Prompts, *, marked: bool = False) -> list[PreparedPrompt]:
        """Makes the prompts of a request; `marked`: also finds its breakpoints."""
        if isinstance(ask, ChatRequest):
            marks = ask.marks() if marked else ()
            template = ask.template(self._dialect.switches.variables(ask.thinks, ask.reasoning_effort))
            return [self._conversation(ask.conversation(), template, ask.tooling(), maker, marks)]
        prompts = ask.prompts()
        if len(prompts) * ask.choices > MAX_CHOICES:
            name = "n" if ask.best_of is None else "best_of"
            raise ApiError(400, f"{name}: at most {MAX_CHOICES} choices over all prompts", param=name)
        return [PreparedPrompt(_tokens(ask, prompt, self._plain(maker))) for prompt in prompts]

    def _plain(self, maker: Turn | Prompts) -> Prompts:
        """Returns what makes prompts of the same lengths without answers."""
        return self.prompts if isinstance(maker, Turn) else maker

    def _conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: Template,
        tooling: Tooling,
        maker: Turn | Prompts,
        marks: Sequence[Mark] = (),
    ) -> PreparedPrompt:
        """Makes the prompt of a conversation, in a turn with the tokens of its answers.

        Its partings are the places of the marks, but for the end of the prompt.
        """

        def spoken(
            messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
        ) -> tuple[list[dict[str, Any]], Template]:
            taken, listed = self._dialect.conversation(messages, tools)
            return taken, replace(template, tools=listed)

        variants: list[Variant] = [spoken(*mark.variant(messages, tooling.tools)) for mark in marks if mark.inside]
        messages, template = spoken(messages, tooling.tools)
        vision = self._engine.vision
        images = parts(messages, "image")
        if vision is None:
            if images:
                raise errors.text_only(images[0]["at"])
            return maker.prepare(messages, template, variants)
        texts, plain = [each["content"] for each in messages if isinstance(each["content"], str)], self._plain(maker)
        plain.check_length(len(messages), "messages")
        plain.check_size(texts + [part["text"] for part in parts(messages, "text")], "messages")
        self._load(images)
        prompt = vision.prepare(messages, template, variants)
        plain.check_length(len(prompt.tokens), "messages")
        return prompt

    def _load(self, images: Sequence[dict[str, Any]]) -> None:
        """Loads the image of every image part; a repeated URL is read once."""
        if len(images) > self._max_images:
            message = f"messages: at most {self._max_images} images in a request"
            raise ApiError(400, message, param="messages", code="too_many_images")
        loaded: dict[str, Any] = {}
        pixels = 0
        for part in images:
            if part["url"] not in loaded:
                loaded[part["url"]] = picture = self._pictures.load(part["url"], part["at"], pixels)
                pixels += picture.width * picture.height
            part["image"] = loaded[part["url"]]

    # ---- parameters

    def _choices(self, ask: Ask, prompt: PreparedPrompt, namespace: Namespace | None) -> list[Request]:
        """Returns one request per choice; without a seed all choices share the same request.

        The first one finds the log-probabilities of the prompt for all, unless each choice is streamed on its own.
        """
        room = self._engine.max_context - len(prompt.tokens)
        hints = self._hints(ask, prompt)
        marks = prompt.marks
        if self._engine.has_states:  # a prefix without one at its end is of no use
            marks = tuple(sorted({*marks, *(prefix.end for prefix in hints.prefixes)}))
        words, ending = self.prompts.words(ask.bad_words or ()), self.prompts.ending(prompt.tokens)

        def request(choice: int) -> Request:
            params = replace(ask.params(room, choice), bad_words=words)
            if choice and not ask.stream:
                params = replace(params, prompt_logprobs=None)
            content = None
            if isinstance(ask, ChatRequest):
                params = self._spoken(params, ask.tooling(), ending)
                content = self._content(params, ask.tooling(), ending)
            given = (params, namespace, ask.priority or 0, prompt.images, prompt.positions)
            return Request(prompt.tokens, *given, marks=marks, hints=hints, content=content)

        if ask.seed is not None:
            return [request(choice) for choice in range(ask.choices)]
        first = request(0)
        other = first if first.params.prompt_logprobs is None or ask.choices == 1 else request(1)
        return [first, *[other] * (ask.choices - 1)]

    def _hints(self, ask: Ask, prompt: PreparedPrompt) -> Hints:
        """Returns what is known of how the KV of a prompt will be used again, with the prefixes that are marked."""
        longest_s, places = self._engine.config.max_retain_s, iter(prompt.partings)
        ends = [(mark, next(places) if mark.inside else len(prompt.tokens)) for mark in ask.marks()]
        return replace(ask.hints(longest_s), prefixes=tuple(mark.prefix(end, longest_s) for mark, end in ends if end))

    def _spoken(self, params: SamplingParams, tooling: Tooling, ending: str) -> SamplingParams:
        """Returns parameters of an answer in the model's own forms of calls and thoughts."""
        loose = params.grammar is None and tooling.choice != "required"
        if not loose:
            tooling = replace(tooling, tools=tuple(map(self._held, tooling.tools)))
        grammar = self._dialect.grammar(tooling, ending, params.grammar)
        if grammar is not None and grammar != params.grammar:
            self._compile_calls(grammar, [tool for tool in tooling.tools if tool.strict or not loose])
        return self._dialect.shown(replace(params, grammar=grammar), tooling)

    def _held(self, tool: Tool) -> Tool:
        """Returns a tool with what a grammar can hold of its schema; one that is strict, or custom, as it is."""
        if tool.strict or tool.custom:
            return tool
        return replace(tool, parameters=self._holdable(tool.name, json.dumps(tool.parameters))[0])

    def _hold(self, name: str, schema: str) -> tuple[Mapping[str, Any], bool]:
        """Returns what a grammar can hold of the schema of a tool, and whether that is all; logs what it cannot."""

        def problem(parameters: Mapping[str, Any]) -> str:
            return self._engine.grammars.problem(Grammar("json_schema", schema_of(Tool(name, None, parameters))))

        held, left_out = holdable(json.loads(schema), problem)
        if left_out:
            log.warning(
                "calls of the tool %s are not held to all of its schema: no grammar holds %s; they are checked when"
                " they are complete",
                name,
                ", ".join(left_out),
            )
        return held, not left_out

    def _content(self, params: SamplingParams, tooling: Tooling, ending: str) -> Callable[[], Content] | None:
        """Returns what finds stop texts where they count in a part of an answer only."""
        made = partial(self._dialect.reading, tooling, ending, params)
        return None if not params.stop or isinstance(made(), PlainText) else made  # type: ignore[return-value]

    def _check_grammar(self, ask: Ask) -> None:
        """Compiles the grammar of a request, if there is one, so that `submit` finds it; errors name the field."""
        asked = ask.asked()
        if asked is not None:
            self._engine.grammars.compile(asked.grammar, asked.field)
        for i, spec in enumerate((ask.tools or ()) if isinstance(ask, ChatRequest) else ()):
            if spec.name is not None and (form := spec.tool().form) is not None:
                self._engine.grammars.compile(Grammar(form.syntax, form.definition), f"tools[{i}].{GRAMMAR}")

    def _compile_calls(self, grammar: Grammar, held: Sequence[Tool]) -> None:
        """Compiles the grammar of an answer with calls; errors name the tool whose schema is the cause, if one is.

        Args:
            grammar: what to compile.
            held: the tools whose schemas are in it.
        """
        try:
            self._engine.grammars.compile(grammar, "tools")
        except BadArgument:
            for tool in held:
                if not tool.custom:
                    schema = Grammar("json_schema", json.dumps(tool.parameters))
                    self._engine.grammars.compile(schema, f"tools[{tool.place}].function.parameters")
            raise

    # ---- what replies need

    def _parser(self, ask: Ask, request: Request, name: str | None = None) -> OutputParser:
        """Returns the parser of one answer; see `Prepared`."""
        if isinstance(ask, CompletionRequest):
            return PlainText()
        tooling = ask.tooling()
        parser = self._dialect.reading(tooling, self.prompts.ending(request.tokens), request.params, name)
        checks = {tool.name: check for tool in tooling.callable if (check := self._check_of(tool, tooling)) is not None}
        return Checked(parser, checks) if checks else parser

    def _check_of(self, tool: Tool, tooling: Tooling) -> Check | None:
        """Returns what checks calls of a tool that should be held, and are held to a part only; None: all is held."""
        if tool.form is not None and not self._dialect.holds(tool):
            return partial(self._fits, Grammar(tool.form.syntax, tool.form.definition))
        if tooling.choice != "required" or tool.strict or tool.custom:
            return None
        return None if self._holdable(tool.name, json.dumps(tool.parameters))[1] else by_schema(tool.parameters)

    def _fits(self, grammar: Grammar, text: str) -> bool:
        tokens = self.text(text, special_tokens=False, parse_special=False).tolist() if text else []
        return self._engine.grammars.compile(grammar).takes(tokens)

    def _extras(self, ask: Ask, prompts: Sequence[PreparedPrompt]) -> Extras:
        """Returns what the reply shows besides the texts of its answers."""
        echoes: list[Echo] = []
        if isinstance(ask, CompletionRequest) and ask.echo:
            echoes = [self._echo(ask, *pair) for pair in zip(ask.prompts(), prompts, strict=True)]
        return Extras(
            ask.kept,
            ask.logprobs is not None,
            echoes,
            ask.prompt_logprobs,
            [prompt.tokens.tolist() for prompt in prompts] if ask.return_token_ids else (),
            bool(ask.return_tokens_as_token_ids),
        )

    def _echo(self, ask: CompletionRequest, given: str | list[int], prompt: PreparedPrompt) -> Echo:
        tokens, skipped = prompt.tokens.tolist(), ask.skip_special_tokens is not False
        is_whole = len(tokens) != ask.truncate_prompt_tokens
        text = given if isinstance(given, str) and is_whole else self.prompts.read(tokens, skip_special=skipped)
        if ask.logprobs is None:
            return Echo(text, tokens)
        return Echo(text, tokens, self.prompts.offsets(tokens, text), ask.logprobs)


def _tokens(ask: CompletionRequest, prompt: str | list[int], prompts: Prompts) -> Tokens:
    if isinstance(prompt, str):
        adds, parses = ask.add_special_tokens is not False, ask.parse_special is not False
        return prompts.text(prompt, special_tokens=adds, parse_special=parses)
    return prompts.tokens(prompt)


def _truncated(prompt: PreparedPrompt, most: int) -> PreparedPrompt:
    """Returns the last tokens of a prompt."""
    cut = len(prompt.tokens) - most
    if cut <= 0:
        return prompt
    if prompt.images:
        name = "truncate_prompt_tokens"
        raise ApiError(400, f"{name}: a prompt with images cannot be truncated", param=name)
    marks = tuple(mark - cut for mark in prompt.marks if mark >= cut)
    partings = tuple(max(parting - cut, 0) for parting in prompt.partings)
    return replace(prompt, tokens=prompt.tokens[cut:], marks=marks, partings=partings)

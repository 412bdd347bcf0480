"""Makes the engine's requests of clients' requests: prompts, parameters, and the extras of replies.

Knows the engine. Does not know HTTP. All calls may be slow: they compile grammars, besides all that `prompting` does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from mainstem.cache.namespaces import Namespace
from mainstem.errors import BadArgument
from mainstem.runtime.request import Hints, PreparedPrompt, Request
from mainstem.runtime.text.detokenizer import Content
from mainstem.server.apis.generation import Conversation, Generation, Texts
from mainstem.server.apis.replies import Echo, Extras
from mainstem.server.errors import client_names
from mainstem.server.fields.schemas import holdable
from mainstem.server.fields.tools import Tool, Tooling
from mainstem.server.kept.answers import Turn
from mainstem.server.parsing.formats import schema_of
from mainstem.server.parsing.output import OutputParser, PlainText
from mainstem.server.prompting import Prompting
from mainstem.server.watch.diagnosis import Fingerprint
from mainstem.settings.engine import Grammar, SamplingParams
from mainstem.settings.server import ServerConfig

if TYPE_CHECKING:
    from mainstem.runtime.engine import Engine

log = logging.getLogger(__name__)

_SCHEMAS = 256  # of tools, whose enforceable parts are cached


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can run.

    Args:
        generation: the client's request.
        requests: for the engine; the choices of a prompt are adjacent.
        extras: what the reply shows besides answers.
        turn: of a conversation.
        parser: makes the parser of an answer. With an id of the response as its argument, the ids of calls follow from
            that id, else they are random.
        fingerprint: of the request, if a diagnosis compares it.
    """

    generation: Generation
    requests: Sequence[Request]
    extras: Extras
    turn: Turn
    parser: Callable[..., OutputParser]
    fingerprint: Fingerprint | None


class Preparation(Prompting):
    """Makes requests for one engine. Any thread may call it.

    Args:
        engine: runs the requests.
        config: the settings of the server.

    Raises:
        BadArgument: see `Prompting`.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        super().__init__(engine, config)
        self._engine = engine
        self._holdable = lru_cache(_SCHEMAS)(self._hold)

    def prepare(self, generation: Generation, tenant: bytes | None) -> Prepared:
        """Makes the engine's requests of a client's request.

        Args:
            generation: the client's request.
            tenant: whose KV it may share; None: everyone's.

        Raises:
            ApiError, MainstemError: it cannot be answered; the error names the client's field.
        """
        asked = generation.request
        with client_names(generation.paths):
            self.check_model(asked.model)
            self._check_grammar(generation)
            namespace = self.namespace(asked.model, asked.cache_salt, tenant)
            turn = self.turn(namespace)
            prompts = self.made(generation, turn)
            made = [request for prompt in prompts for request in self._choices(generation, prompt, namespace)]
            fingerprint = None
            if generation.comparison is not None:
                page_size = self._engine.config.page_size
                fingerprint = generation.comparison.shape.fingerprint(prompts[0], namespace, page_size)
            extras, parser = self._extras(generation, prompts), partial(self._parser, generation, made[0])
            return Prepared(generation, made, extras, turn, parser, fingerprint)

    # ---- parameters

    def _choices(self, generation: Generation, prompt: PreparedPrompt, namespace: Namespace | None) -> list[Request]:
        """Returns one request per choice; without a seed all choices share the same request.

        The first one finds the log-probabilities of the prompt for all, unless each choice is streamed on its own.
        """
        asked, conversation = generation.request, generation.prompt
        room = self._engine.max_context - len(prompt.tokens)
        hints = self._hints(generation, prompt)
        marks = prompt.marks
        if self._engine.has_states:  # a prefix without one at its end is of no use
            marks = tuple(sorted({*marks, *(prefix.end for prefix in hints.prefixes)}))
        words, ending = self.prompts.words(generation.bad_words), self.prompts.ending(prompt.tokens)

        def request(choice: int) -> Request:
            params = replace(generation.params(room, choice), bad_words=words)
            if choice and not asked.stream:
                params = replace(params, prompt_logprobs=None)
            content = None
            if isinstance(conversation, Conversation):
                params = self._spoken(params, conversation.tooling, ending)
                content = self._content(params, conversation.tooling, ending)
            parts = (params, namespace, asked.priority or 0, prompt.images, prompt.positions)
            return Request(prompt.tokens, *parts, marks=marks, hints=hints, content=content)

        if asked.seed is not None:
            return [request(choice) for choice in range(generation.choices)]
        first = request(0)
        other = first if first.params.prompt_logprobs is None or generation.choices == 1 else request(1)
        return [first, *[other] * (generation.choices - 1)]

    def _hints(self, generation: Generation, prompt: PreparedPrompt) -> Hints:
        """Returns the hints about later uses of a prompt's KV, with the prefixes that the client has marked."""
        longest_s, places = self._engine.config.max_retain_s, iter(prompt.partings)
        ends = [(mark, next(places) if mark.inside else len(prompt.tokens)) for mark in generation.marks]
        hints = generation.hints.checked(longest_s, generation.session)
        return replace(hints, prefixes=tuple(mark.prefix(end, longest_s) for mark, end in ends if end))

    def _spoken(self, params: SamplingParams, tooling: Tooling, ending: str) -> SamplingParams:
        """Returns parameters of an answer in the model's own forms of calls and thoughts."""
        loose = params.grammar is None and tooling.choice != "required"
        if not loose:
            tooling = replace(tooling, tools=tuple(map(self._held, tooling.tools)))
        grammar = self.dialect.grammar(tooling, ending, params.grammar)
        if grammar is not None and grammar != params.grammar:
            self._compile_calls(grammar, [tool for tool in tooling.tools if tool.strict or not loose])
        return self.dialect.shown(replace(params, grammar=grammar), tooling)

    def _held(self, tool: Tool) -> Tool:
        """Returns a tool with the enforceable part of its schema; strict and custom tools as they are."""
        if tool.strict or tool.custom:
            return tool
        return replace(tool, parameters=self._holdable(tool.name, json.dumps(tool.parameters)))

    def _hold(self, name: str, schema: str) -> Mapping[str, Any]:
        """Returns the part of a tool's schema that a grammar can enforce; logs the rest."""

        def problem(parameters: Mapping[str, Any]) -> str:
            return self._engine.grammars.problem(Grammar("json_schema", schema_of(Tool(name, None, parameters))))

        held, left_out = holdable(json.loads(schema), problem)
        if left_out:
            message = "calls of the tool %s are not held to all of its schema: no grammar holds %s"
            log.warning(message, name, ", ".join(left_out))
        return held

    def _content(self, params: SamplingParams, tooling: Tooling, ending: str) -> Callable[[], Content] | None:
        """Returns a maker of readers that find stop texts, where these count in a part of an answer only."""
        made = partial(self.dialect.reading, tooling, ending, params)
        return None if not params.stop or isinstance(made(), PlainText) else made  # type: ignore[return-value]

    def _check_grammar(self, generation: Generation) -> None:
        """Compiles the grammars that a request gives, so that `submit` finds them; errors name the field."""
        if generation.form is not None:
            self._engine.grammars.compile(generation.form.grammar, generation.form.at)
        for tool in generation.prompt.tooling.tools if isinstance(generation.prompt, Conversation) else ():
            if tool.form is not None:
                self._engine.grammars.compile(Grammar(tool.form.syntax, tool.form.definition), tool.at)

    def _compile_calls(self, grammar: Grammar, held: Sequence[Tool]) -> None:
        """Compiles the grammar of an answer with calls; errors name the tool whose schema is the cause, if one is.

        Args:
            grammar: of the whole answer.
            held: the tools whose schemas are in it.
        """
        try:
            self._engine.grammars.compile(grammar, "tools")
        except BadArgument:
            for tool in held:
                if not tool.custom:
                    schema = Grammar("json_schema", json.dumps(tool.parameters))
                    self._engine.grammars.compile(schema, tool.at)
            raise

    # ---- for replies

    def _parser(self, generation: Generation, request: Request, name: str | None = None) -> OutputParser:
        """Returns the parser of one answer; see `Prepared`."""
        if isinstance(generation.prompt, Texts):
            return PlainText()
        ending = self.prompts.ending(request.tokens)
        return self.dialect.reading(generation.prompt.tooling, ending, request.params, name)

    def _extras(self, generation: Generation, prompts: Sequence[PreparedPrompt]) -> Extras:
        """Returns what a reply shows besides texts."""
        echoes: list[Echo] = []
        if isinstance(generation.prompt, Texts) and generation.prompt.echo:
            echoes = [self._echo(generation, *pair) for pair in zip(generation.prompt.prompts, prompts, strict=True)]
        tokens = [prompt.tokens.tolist() for prompt in prompts] if generation.shows_ids else ()
        return Extras(generation, echoes, tokens)

    def _echo(self, generation: Generation, given: str | list[int], prompt: PreparedPrompt) -> Echo:
        tokens, skipped = prompt.tokens.tolist(), generation.sampling.get("skip_special_tokens", True)
        is_whole = len(tokens) != generation.truncate
        text = given if isinstance(given, str) and is_whole else self.prompts.read(tokens, skip_special=skipped)
        if not generation.shows_logprobs:
            return Echo(text, tokens)
        return Echo(text, tokens, self.prompts.offsets(tokens, text), generation.logprobs or 0)

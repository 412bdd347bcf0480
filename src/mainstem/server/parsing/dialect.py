"""How one model writes calls and reasoning, and how its chat template takes tools.

The server finds it once, when it starts. The format of calls follows from markers in the chat template or the
vocabulary, or is set by an option. Since templates have no other interface, the server finds by trial what one takes:
it renders short conversations and looks at the text. A template that knows no tools gets a plain instruction that lists
them, calls as the text that the model is told to write, and results as messages of the user.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from mainstem.runtime.sampling.grammars import spaced
from mainstem.runtime.text.detokenizer import Stops, special_tokens
from mainstem.runtime.text.escapes import template_text
from mainstem.runtime.text.prompts import ANSWER, Prompts
from mainstem.server.fields.effort import EFFORTS, Switches, switches_of
from mainstem.server.fields.tools import NO_TOOLS, Tool, Tooling
from mainstem.server.parsing.formats import ANY, FORMATS, CallFormat, format_of, terms, upto
from mainstem.server.parsing.output import OutputParser, PlainText, UntilStop
from mainstem.server.parsing.reasoning import THINKING, ReasoningParser, Thinking, thinking_of
from mainstem.server.parsing.repair import NoJson, repaired
from mainstem.settings.engine import Grammar, SamplingParams
from mainstem.settings.server import ServerConfig

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
Render: TypeAlias = Callable[..., str | None]
"""render(messages, tools=None, variables={}) returns a prompt as text; None: the template does not take these."""


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The forms that a chat template takes.

    Args:
        tools: whether it lists tools.
        objects: whether arguments of calls are given as objects; else as JSON texts.
        empty: the content of a message that has calls alone.
        system: whether it has a system message.
    """

    tools: bool = False
    objects: bool = True
    empty: str | None = ""
    system: bool = True


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model speaks.

    Args:
        calls: the format of calls.
        thinking: the form of thoughts; None: there are none.
        traits: what the chat template takes.
        special: the ids of special tokens, by text.
        switches: the variables of the chat template that say whether, and how much, the model thinks.
    """

    calls: CallFormat
    thinking: Thinking | None
    traits: TemplateTraits
    special: Mapping[str, int]
    switches: Switches = field(default_factory=Switches)

    def reading(
        self, tooling: Tooling, ending: str, params: SamplingParams, name: str | None = None
    ) -> UntilStop | PlainText:
        """Returns the parser of one answer that may have stop texts; `PlainText` if they count anywhere in it.

        Args:
            tooling, ending, name: see `parser`.
            params: of the request.
        """
        parser = self.parser(tooling, ending, name)
        if isinstance(parser, PlainText):
            return parser
        return UntilStop(parser, Stops(params.stop, params.include_stop_str_in_output))

    def parser(self, tooling: Tooling = NO_TOOLS, ending: str = "", name: str | None = None) -> OutputParser:
        """Returns the parser of one answer without stop texts.

        Args:
            tooling: the tools of the request.
            ending: the last text of the prompt; it may have opened a thought.
            name: what the ids of calls follow from; None: they are random.
        """
        rest = self.calls.parser(tooling, name) if tooling.callable or self.calls.thinking else PlainText()
        if self.thinking is None or self.calls.thinking or self.thinking.closed(ending):
            return rest
        return ReasoningParser(self.thinking, self.thinking.opened(ending), rest)

    def grammar(self, tooling: Tooling, ending: str = "", form: Grammar | None = None) -> Grammar | None:
        """Returns the grammar that an answer is held to, or None.

        It is held to calls where they are required, and otherwise to a form that the request asks for: then calls are
        allowed besides. Where neither is so, the calls of strict tools are held, once the model begins one. A model may
        think before: it must, where the prompt has opened a thought.

        Args:
            tooling: the tools of the request.
            ending: the last text of the prompt.
            form: of the answer without calls and thoughts. One that is a grammar of its own is not combined with them.
        """
        required, thinks = tooling.choice == "required", self.thinking is not None and not self.thinking.closed(ending)
        answer = None if required or form is None else _rule(form)
        offers = not required and form is None and any(tool.strict for tool in tooling.callable)
        if not (required or offers) and (answer is None or not (thinks or tooling.callable)):
            return form
        special = {text: self.special[text] for text in self._markers() if text in self.special}
        rules = [] if answer is None else [f"answer: {terms(self.calls.text, special)} ({answer})"]
        if offers:
            rules.append(self.calls.offer(tooling, special, self.thinking.begin if self.thinking and thinks else ""))
        elif tooling.callable:
            rules.append(self.calls.grammar(tooling, special))
        start = " | ".join(rule.partition(":")[0] for rule in rules)
        if self.thinking is not None and thinks:
            begin, after = (terms(text, special) for text in (self.thinking.begin, self.thinking.after))
            rules.append(upto("thought", ANY, self.thinking.end, special))
            before = f"thought {after or _GAP}"
            start = f"{before} ({start})" if self.thinking.opened(ending) else f"({begin} {before})? ({start})"
        return Grammar("lark", "\n".join([f"start: {start}", *rules]))

    def shown(self, params: SamplingParams, tooling: Tooling) -> SamplingParams:
        """Returns parameters whose text has the markers that the parser needs, though they are special tokens."""
        needed = {self.special[text] for text in self._markers(tooling) if text in self.special}
        if not needed or not params.skip_special_tokens:
            return params
        return replace(params, skip_special_tokens=False, hidden_tokens=frozenset(self.special.values()) - needed)

    def _markers(self, tooling: Tooling | None = None) -> tuple[str, ...]:
        """Returns the markers of thoughts, and those of calls unless there are no tools that may be called."""
        thoughts = () if self.thinking is None else (self.thinking.begin, self.thinking.end)
        calls = tooling is None or tooling.callable or self.calls.thinking
        return (*thoughts, *(self.calls.markers if calls else ()))

    def ignored(self, thinks: bool | None, effort: str | None) -> list[str]:
        """Returns the fields of a request that this model cannot follow; a request for its usual behaviour, it follows.

        Args:
            thinks, effort: see `Switches.variables`; the fields are `thinking`; `reasoning_effort`.
        """
        never = self.thinking is None
        takes_thinking = thinks is None or self.switches.exist or (never and not thinks)
        takes_effort = effort is None or (effort in EFFORTS and (self.switches.exist or (never and effort == "none")))
        taken = {"thinking": takes_thinking, "reasoning_effort": takes_effort}
        return [name for name in taken if not taken[name]]

    @property
    def in_texts(self) -> tuple[str, ...]:
        """The markers that texts of the assistant may have: of thoughts, and of calls if the template writes none."""
        return self._markers(NO_TOOLS) if self.traits.tools else self._markers()

    def conversation(
        self, messages: Conversation, tools: Sequence[Tool] = ()
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Returns a conversation, and the tools, as the chat template takes them.

        Args:
            messages: as `requests.template_input` makes them: content may be None, `tool_calls` have arguments as text.
            tools: of the request.
        """
        given = [dict(message) for message in messages]
        if not self.traits.tools:
            return _without_tools(given, tools, self), None
        for message in given:
            if message["content"] is None:
                message["content"] = self.traits.empty if "tool_calls" in message else ""
            if "tool_calls" in message:
                message["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
            if "tool_call_id" in message:
                message["tool_call_id"] = self.calls.accepted_id(message["tool_call_id"])
        return given, [tool.spec() for tool in tools] or None

    def said(self, message: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns a message of the assistant as the chat template takes it; None: the template has no calls."""
        return self.conversation([message])[0][0] if self.traits.tools or "tool_calls" not in message else None

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if self.traits.objects:
            function["arguments"] = _parsed(function["arguments"])
        return {**call, "id": self.calls.accepted_id(call["id"]), "function": function}


def speaking(prompts: Prompts, tokenizer: Any, config: ServerConfig) -> Dialect:
    """Finds how a model speaks.

    Args:
        prompts: renders its conversations.
        tokenizer: the same model's, of transformers.
        config: names a format, or a form of thoughts, if it is not to be found.
    """
    template, vocabulary = template_text(tokenizer), tokenizer.get_vocab()
    calls, thinking = config.tool_call_parser, config.reasoning_parser
    spoken = format_of(template, vocabulary) if calls == "auto" else FORMATS[calls]
    thought = thinking_of(template, vocabulary) if thinking == "auto" else THINKING.get(thinking)

    def render(
        messages: Conversation, tools: Sequence[Mapping[str, Any]] | None = None, variables: Mapping[str, Any] = {}
    ) -> str | None:
        try:
            return prompts.render(messages, replace(ANSWER, tools=tools, variables=variables))
        except ValueError:
            return None

    traits, switches = traits_of(render), switches_of(lambda variables: render([_ASK], variables=variables))
    made = Dialect(spoken, spoken.thinking or thought, traits, special_tokens(tokenizer), switches)
    prompts.escapes.speak(made.in_texts)
    return made


# ---------------------------------------------------------------- trials

_PROBE = "probe_of_tools"
_ASK = {"role": "user", "content": "?"}


def traits_of(render: Render) -> TemplateTraits:
    """Finds by trial the forms that a chat template takes."""
    has_system = _PROBE in (render([{"role": "system", "content": _PROBE}, _ASK]) or "")
    if _PROBE not in (render([_ASK], [Tool(_PROBE).spec()]) or ""):
        return TemplateTraits(system=has_system)
    for empty in (None, ""):
        for objects in (True, False):
            text = render(_called(empty, objects), [Tool(_PROBE).spec()]) or ""
            if "value_of_probe" in text and "'value_of_probe'" not in text and "None" not in text:
                return TemplateTraits(True, objects, empty, has_system)
    return TemplateTraits(True, system=has_system)


def _called(empty: str | None, objects: bool) -> Conversation:
    """Returns a conversation with a call."""
    arguments: Any = {"key": "value_of_probe"}
    function = {"name": _PROBE, "arguments": arguments if objects else json.dumps(arguments)}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    answered = {"role": "tool", "tool_call_id": "abcdefghi", "content": "1"}
    return [_ASK, {"role": "assistant", "content": empty, "tool_calls": [call]}, answered]


# ---------------------------------------------------------------- templates that know no tools


def _without_tools(messages: list[dict[str, Any]], tools: Sequence[Tool], dialect: Dialect) -> list[dict[str, Any]]:
    """Returns a conversation for a template that knows no tools: all is in the texts of messages."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    plain: list[dict[str, Any]] = []
    before = None
    for message in messages:
        content = _plain_content(message, names, dialect.calls)
        if before == "tool" and message["role"] in ("tool", "user"):  # some templates want the roles to alternate
            plain[-1]["content"] = _joined(plain[-1]["content"], content, "\n\n")
        else:
            role = "user" if message["role"] == "tool" else message["role"]
            kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
            plain.append({**kept, "role": role, "content": content})
        before = message["role"]
    return _instructed(plain, _instruction(tools, dialect.calls), dialect.traits.system) if tools else plain


def _plain_content(message: Mapping[str, Any], names: Mapping[str, str], calls: CallFormat) -> Any:
    content = message["content"] or ""
    if message["role"] == "tool":
        call_id = message["tool_call_id"]
        return _joined(f"Result of {names.get(call_id, call_id)}:", content, "\n")
    made = [(call["function"]["name"], call["function"]["arguments"] or "{}") for call in message.get("tool_calls", ())]
    return _joined(content, calls.written(made), "\n") if made else content


def _instruction(tools: Sequence[Tool], calls: CallFormat) -> str:
    listed = "\n".join(json.dumps(tool.spec()["function"], ensure_ascii=False) for tool in tools)
    example = calls.written([("NAME", '{"PARAMETER": "VALUE"}')])
    return (
        f"You can call these tools, each given as JSON:\n{listed}\n"
        f"To call a tool, answer with this and nothing else, with the name and the arguments of the call:\n{example}"
    )


def _instructed(messages: list[dict[str, Any]], instruction: str, system: bool) -> list[dict[str, Any]]:
    """Adds an instruction to the system message, or to the first message where the template has no system message."""
    first = messages[0]
    if system and first["role"] != "system":
        return [{"role": "system", "content": instruction}, *messages]
    one, other = (first["content"], instruction) if system else (instruction, first["content"])
    return [{**first, "content": _joined(one, other, "\n\n")}, *messages[1:]]


def _joined(one: Any, other: Any, between: str) -> Any:
    """Returns two contents as one: texts, or lists of parts with images."""
    if isinstance(one, str) and isinstance(other, str):
        return one + between + other if one and other else one or other
    return [*_parts(one), *_parts(other)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _parsed(arguments: str) -> Mapping[str, Any]:
    """Returns the arguments of a call as an object, also of a call that was cut off."""
    try:
        parsed = json.loads(repaired(arguments) if arguments.strip() else "{}")
    except (NoJson, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"arguments": arguments}


_GAP = r"/\s{0,2}/"
"""The white space after a thought."""


def _rule(form: Grammar) -> str | None:
    """Returns a form as a rule of Lark; None: it cannot be one."""
    if form.kind == "json_object":
        return "%json " + spaced('{"type": "object"}')
    if form.kind == "json_schema" and form.text.lstrip().startswith("{"):
        return f"%json {spaced(form.text)}"
    if form.kind == "choice":
        return " | ".join(json.dumps(text) for text in json.loads(form.text))
    return None

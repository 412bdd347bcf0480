"""`rewritten_body`: applies rules to the body of a request as it was logged, as the server applies them to its prompt.

Reads the bodies of /v1/completions, /v1/chat/completions, /v1/responses and /v1/messages, and knows which by their
fields. Texts are joined to messages as the server joins them, so that a pattern finds the same. Three things differ. A
body says neither its client nor its tenant, so rules for some of them count for all. Sessions are not known, so nothing
is kept. And documents, results of searches and tools in namespaces are not looked into.

Fields of another form than the API has are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from mainstem.prompt_rules.notes import Notes
from mainstem.prompt_rules.rewriting import Declared, Message, Rewritten, rewritten
from mainstem.prompt_rules.rules import Rewrite, Rule, Sort

Body = Mapping[str, Any]
"""The body of a request, as OpenAI's or Anthropic's API has it."""

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""The paths of the APIs whose bodies are known."""


def route_of(body: Body) -> str:
    """Returns the path of the API that a body is for, by its fields."""
    if body.get("prompt") is not None:
        return "/v1/completions"
    if body.get("messages") is None:
        return "/v1/responses"
    blocks = (block for message in _objects(body["messages"]) for block in _objects(message.get("content")))
    of_messages = (
        body.get("system") is not None
        or any("input_schema" in tool for tool in _objects(body.get("tools")))
        or any(block.get("type") in ("tool_use", "tool_result") for block in blocks)
    )
    return "/v1/messages" if of_messages else "/v1/chat/completions"


class RewrittenBody(NamedTuple):
    """A body after the rules, and what they changed."""

    body: Body
    changes: Sequence[Rewrite]


_ONE = ("model", "cache_salt", "prompt_cache_key")
"""Fields that are the same in all bodies of one conversation."""


def rewritten_body(
    rules: Sequence[Rule], body: Body, route: object = None, notes: Notes | None = None
) -> RewrittenBody:
    """Returns a body after the rules; the same object if they change nothing.

    Args:
        rules: those of a server.
        body: of a request; it is not changed.
        route: the path of its API, as a log has it. Otherwise: as its fields say.
        notes: those of earlier bodies; None: there are none.
    """
    path = str(route) if route in ROUTES else route_of(body)
    covering = [rule for rule in rules if not rule.scope.routes or path in rule.scope.routes]
    if not covering or body.get("prompt_rules") is False:
        return RewrittenBody(body, ())
    made = _Read(body, path).rewritten(covering)
    made.place(Notes() if notes is None else notes, tuple(body.get(name) for name in _ONE))
    in_order = any(isinstance(rule.action, Sort) and "keys" in rule.action.lists for rule in covering)
    if not made.changes and not (in_order and body.get("tools")):
        return RewrittenBody(body, ())
    copied = deepcopy(dict(body))
    _Read(copied, path).write(made, in_order=in_order)
    return RewrittenBody(copied, made.changes)


def _objects(value: object) -> Iterator[dict[str, Any]]:
    return (each for each in value if isinstance(each, dict)) if isinstance(value, list | tuple) else iter(())


# ---- texts


class _Text(NamedTuple):
    """A text of a body.

    Args:
        holder, key: where it is.
        within: the list that has the holder, from which it can be taken if another text has grown over it.
    """

    holder: dict[str, Any]
    key: str
    within: list[Any]

    @property
    def text(self) -> str:
        return str(self.holder[self.key])


@dataclass(slots=True)
class _Turn:
    """A message as the server has it.

    Args:
        role: of it.
        texts: in order; None: a part that is no text.
        parts: the list to which a part can be added.
    """

    role: str
    texts: list[_Text | None] = field(default_factory=list)
    parts: list[Any] | None = None

    def message(self) -> Message:
        """Returns it as templates take it."""
        texts = [text.text for text in self.texts if text is not None]
        if len(texts) == len(self.texts):
            return {"role": self.role, "content": "\n".join(texts) if texts else None}
        parts = [{"type": "text", "text": text.text} if text else {"type": "other"} for text in self.texts]
        return {"role": self.role, "content": parts}

    def write(self, content: Any, moved: Callable[[int], int]) -> None:
        """Writes a content after the rules.

        Args:
            content: of the message.
            moved: returns where a position in its text is now.
        """
        if not isinstance(content, str):
            for text, part in zip(self.texts, content, strict=False):
                if text is not None:
                    text.holder[text.key] = part["text"]
            if self.parts is not None:
                self.parts += content[len(self.texts) :]
            return
        if not self.texts:
            return  # the server refuses such a message
        texts, begin, end = [text for text in self.texts if text is not None], 0, -1
        kept: list[tuple[_Text, int]] = []  # the texts that remain, and where each begins now
        for text in texts:
            begin, before = end + 1, moved(end)
            end = begin + len(text.text)
            if not kept or (content[before : before + 1] == "\n" and moved(begin) == before + 1):
                kept.append((text, moved(begin) if kept else 0))
            else:  # a change reaches from the text before it into this one
                text.within[:] = [each for each in text.within if each is not text.holder]
        stops = [*(begin - 1 for _, begin in kept[1:]), len(content)]
        for (text, begin), stop in zip(kept, stops, strict=True):
            text.holder[text.key] = content[begin:stop]


_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The field that has the text of a part, by its type."""


class _Turns:
    """Builds messages from the texts of a body."""

    def __init__(self) -> None:
        self.turns: list[_Turn] = []

    def begin(self, role: str, *, joins: bool) -> _Turn:
        """Begins a message; `joins`: unless the last one is of the same role."""
        if not (joins and self.turns and self.turns[-1].role == role):
            self.turns.append(_Turn(role))
        return self.turns[-1]

    def add(self, turn: _Turn, holder: dict[str, Any], key: str, within: list[Any]) -> None:
        """Adds the content of a field, a text or a list of parts, to a message."""
        content = holder.get(key)
        if isinstance(content, str):
            turn.texts.append(_Text(holder, key, within))
        elif isinstance(content, list):
            turn.parts = content
            for part in content:
                self._add_part(turn, part, content)
        elif content is not None:
            turn.texts.append(None)

    def _add_part(self, turn: _Turn, part: object, within: list[Any]) -> None:
        name = _TEXTS.get(str(part.get("type"))) if isinstance(part, dict) else None
        is_text = isinstance(part, dict) and name is not None and isinstance(part.get(name), str)
        turn.texts.append(_Text(part, str(name), within) if is_text else None)  # type: ignore[arg-type]


def _chat(body: dict[str, Any]) -> list[_Turn]:
    built = _Turns()
    for message in _objects(body.get("messages")):
        turn = built.begin(_role(message), joins=False)
        built.add(turn, message, "content", body["messages"])
    return built.turns


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    return "system" if role == "developer" else role if isinstance(role, str) else ""


def _messages(body: dict[str, Any]) -> list[_Turn]:
    built = _Turns()
    if body.get("system"):
        built.add(built.begin("system", joins=True), body, "system", [])
    for message in _objects(body.get("messages")):
        role, content = _role(message), message.get("content")
        if not isinstance(content, list):
            built.add(built.begin(role, joins=True), message, "content", body["messages"])
            continue
        for block in _objects(content):
            _add_block(built, role, block, content)
    return built.turns


def _add_block(built: _Turns, role: str, block: dict[str, Any], within: list[Any]) -> None:
    kind = block.get("type")
    if kind == "tool_result":
        turn = built.begin("tool", joins=False)
        if block.get("is_error"):
            turn.texts.append(_Text({"text": "Error:"}, "text", []))  # the server writes it
        built.add(turn, {"content": ""} if block.get("content") is None else block, "content", [])
        return
    turn = built.begin(role, joins=True)
    turn.parts = within
    if kind == "text" and isinstance(block.get("text"), str):
        turn.texts.append(_Text(block, "text", within))
    elif role != "assistant":  # thoughts and calls are no content
        turn.texts.append(None)


def _response(body: dict[str, Any]) -> list[_Turn]:
    built, items = _Turns(), body.get("input")
    if body.get("instructions"):
        built.add(built.begin("system", joins=True), body, "instructions", [])
    if isinstance(items, str):
        built.add(built.begin("user", joins=False), body, "input", [])
    for item in _objects(items):
        kind = item.get("type") or "message"
        if kind == "message":
            role = _role(item)
            built.add(built.begin(role, joins=role == "system"), item, "content", body["input"])
        elif kind == "agent_message":
            built.begin("user", joins=False).texts.append(None)
        elif str(kind).endswith("_output") and kind != "tool_search_output":
            built.add(built.begin("tool", joins=False), item, "output", [])
        elif str(kind).endswith("_call") or kind == "reasoning":
            built.begin("assistant", joins=True)
    return built.turns


# ---- tools


class _Field(NamedTuple):
    """The object that has the fields of a tool, and the name of its schema there; empty: it can have none."""

    holder: dict[str, Any]
    schema: str


def _described(tool: object) -> _Field | None:
    """Returns where a tool of any API is described; None: it is run by the maker of the API, or is no function."""
    if not isinstance(tool, dict):
        return None
    for name, schema in (("function", "parameters"), ("custom", "")):
        if isinstance(tool.get(name), dict):
            return _Field(tool[name], schema)
    kind = tool.get("type")
    if kind not in (None, "function", "custom", "namespace") or not isinstance(tool.get("name"), str):
        return None
    return _Field(
        tool, "parameters" if kind == "function" else "input_schema" if kind is None or "input_schema" in tool else ""
    )


_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""The schema of a tool that has none, as the server has it."""


def _declared(described: _Field, index: int) -> Declared:
    name, description = described.holder.get("name"), described.holder.get("description")
    schema = described.holder.get(described.schema)
    return Declared(
        name if isinstance(name, str) else "",
        description if isinstance(description, str) else None,
        schema if isinstance(schema, dict) and schema else _NO_PARAMETERS,
        index,
    )


# ---- bodies

_READERS: Mapping[str, Callable[[dict[str, Any]], list[_Turn]]] = {
    "/v1/chat/completions": _chat,
    "/v1/messages": _messages,
    "/v1/responses": _response,
}


class _Read:
    """A body as rules read it.

    Args:
        body: of a request.
        route: the path of its API, one of `ROUTES`.
    """

    def __init__(self, body: Body, route: str) -> None:
        self._body: dict[str, Any] = dict(body) if not isinstance(body, dict) else body
        completes = route == "/v1/completions"
        self._turns = [] if completes else _READERS[route](self._body)
        self._prompt = self._body.get("prompt") if completes else None
        field = {"/v1/messages": "system", "/v1/responses": "instructions"}.get(route, "")
        self._instructed = field if self._body.get(field) else ""
        tools = self._body.get("tools")
        self._tools = [] if completes or not isinstance(tools, list) else tools
        self._at = [i for i, tool in enumerate(self._tools) if _described(tool) is not None]

    def rewritten(self, rules: Sequence[Rule]) -> Rewritten:
        """Returns its prompt after rules."""
        described = [_described(self._tools[i]) for i in self._at]
        tools = [_declared(each, i) for i, each in enumerate(described) if each is not None]
        return rewritten(rules, [turn.message() for turn in self._turns], tools, self._texts())

    def _texts(self) -> list[str]:
        listed = [self._prompt] if isinstance(self._prompt, str) else self._prompt
        return [text for text in listed if isinstance(text, str)] if isinstance(listed, list) else []

    def write(self, made: Rewritten, *, in_order: bool) -> None:
        """Writes a prompt after rules into the body; `in_order`: with the keys of tools in one order."""
        listed = [each for each in (self._body.get("messages"), self._body.get("input")) if isinstance(each, list)]
        empty = [each for messages in listed for each in messages if _is_empty(each)]
        for index, (turn, message) in enumerate(zip(self._turns, made.messages, strict=True)):
            if message != turn.message():
                turn.write(message["content"], partial(made.offset, index))
        for messages in listed:  # without those whose texts a change has taken
            messages[:] = [each for each in messages if not _is_empty(each) or any(each is old for old in empty)]
        self._spell_empty()
        self._write_tools(made.tools, in_order=in_order)
        if isinstance(self._prompt, str):
            self._body["prompt"] = made.texts[0]
        elif isinstance(self._prompt, list):
            texts = iter(made.texts)
            self._prompt[:] = [next(texts) if isinstance(each, str) else each for each in self._prompt]

    def _spell_empty(self) -> None:
        """Writes instructions of which a rule left nothing as an empty text: an empty field would be read as none."""
        if self._instructed == "system" and self._body["system"] == "":
            self._body["system"] = [{"type": "text", "text": ""}]
        given = self._body.get("input")
        if self._instructed == "instructions" and self._body["instructions"] == "" and isinstance(given, str | list):
            listed = given if isinstance(given, list) else [{"role": "user", "content": given}]
            self._body["input"] = [{"role": "system", "content": ""}, *listed]
            del self._body["instructions"]

    def _write_tools(self, tools: Sequence[Declared], *, in_order: bool) -> None:
        given = [self._tools[i] for i in self._at]
        for at, declared in zip(self._at, tools, strict=True):
            tool = given[declared.index or 0]
            described = _described(tool)
            assert described is not None, "it was read as one"
            if declared.description is not None:
                described.holder["description"] = declared.description
            if in_order and described.schema:
                described.holder[described.schema] = declared.parameters
            self._tools[at] = _in_order(tool) if in_order else tool


def _is_empty(message: object) -> bool:
    return isinstance(message, dict) and message.get("content") == []


def _in_order(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool with its own keys in one order, as the server always writes them."""
    made = {name: tool[name] for name in sorted(tool)}
    return {name: _in_order(each) if name in ("function", "custom") else each for name, each in made.items()}

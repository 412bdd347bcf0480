"""`prompts`: the prompts of a request's body, as text that can be compared.

Reads the bodies of /v1/completions, /v1/chat/completions, /v1/responses and /v1/messages, and knows which by their
fields. A conversation becomes the same text whichever route it is for: the tools, as templates place them, the system
prompt, the messages. What no template shows, such as breakpoints, is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mainstem.errors import MainstemError

Body = Mapping[str, Any]
"""The body of a request, as OpenAI's or Anthropic's API has it."""

END = "\0"
"""The end of each part of a prompt."""

_FIRST_ID, _IDS = 0x10000, 0x100000  # the character of token id 0, after those that a surrogate could be; how many fit
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The field that has the text of a part, by its type."""
_MARKS = {"cache_control", "prompt_cache_breakpoint"}
_NOT_SHOWN = {"role", "content", "id", "status", *_MARKS}  # or shown at another place


class BadRequestBody(MainstemError, ValueError):
    """A line is not the body of a request with a prompt."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text.

    Args:
        model, salt: prompts of different models, or with different salts, share nothing.
        tools: the text of each tool.
        text: everything, each part followed by `END`.
        parts: what each part is, such as `messages[0] (system)`, and where it ends in the text.
        ids: the client sent token ids; each is one character of the text, which says nothing.
    """

    model: str
    salt: str
    tools: tuple[str, ...]
    text: str
    parts: tuple[tuple[str, int], ...]
    ids: bool = False

    def part(self, at: int) -> tuple[str, int, int]:
        """Returns the name of the part at a position, where it begins and where it ends."""
        begin = 0
        for name, end in self.parts:
            if at < end:
                return name, begin, end
            begin = end
        return "the end", begin, len(self.text)

    @property
    def tools_end(self) -> int:
        """The position where the tools end in the text."""
        return self.parts[len(self.tools) - 1][1] if self.tools else 0


def prompts(body: Body) -> list[Prompt]:
    """Returns the prompts of a request: several for /v1/completions with a list, else one.

    Raises:
        BadRequestBody: it has none, or a field of them is malformed; names the field.
    """
    if not isinstance(body, Mapping):
        raise BadRequestBody("not an object")
    model, salt = _string(body, "model"), _string(body, "cache_salt")
    try:
        if body.get("prompt") is not None:
            return [_completed(model, salt, prompt) for prompt in _listed(body["prompt"])]
        tools = tuple(map(_json, _objects(() if body.get("tools") is None else body["tools"], "tools")))
        named = [(f"tools[{number}]", tool) for number, tool in enumerate(tools)]
        return [_joined(model, salt, tools, [*named, *_turns(body)])]
    except RecursionError:
        raise BadRequestBody("nested too deeply") from None


def _joined(model: str, salt: str, tools: tuple[str, ...], named: Iterable[tuple[str, str]]) -> Prompt:
    pieces: list[str] = []
    parts: list[tuple[str, int]] = []
    end = 0
    for name, piece in named:
        pieces.append(piece.replace(END, " ") + END)
        end += len(pieces[-1])
        parts.append((name, end))
    return Prompt(model, salt, tools, "".join(pieces), tuple(parts))


# --- completions ------------------------------------------------------------------------------------------------------


def _completed(model: str, salt: str, prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, str):
        return _joined(model, salt, (), [("prompt", prompt)])
    text = "".join(chr(_FIRST_ID + id) for id in prompt)
    return Prompt(model, salt, (), text, (("prompt", len(text)),), ids=True)


def _listed(prompt: object) -> list[Any]:
    """Returns the prompts of a completion, each as text or token ids."""
    many = prompt if isinstance(prompt, list) and not _are_ids(prompt) else [prompt]
    if many and (all(isinstance(one, str) for one in many) or all(map(_are_ids, many))):
        return many
    raise BadRequestBody(
        f"prompt: must be a string, or a list of strings, of token ids (below {_IDS:,}), or of lists of token ids"
    )


def _are_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(id) is int and 0 <= id < _IDS for id in prompt)


# --- conversations ----------------------------------------------------------------------------------------------------


def _turns(body: Body) -> Iterator[tuple[str, str]]:
    """Yields the name and text of the system prompt, if it has a field of its own, and of each message."""
    messages, items = body.get("messages"), body.get("input")
    if all(each is None for each in (messages, items, body.get("instructions"))):
        raise BadRequestBody("neither messages nor prompt, input or instructions is present")
    if messages is not None:
        if text := _content(body.get("system"), "system"):
            yield "system", _said("system", text)
        yield from _messages(messages, "messages")
        return
    if text := _string(body, "instructions"):
        yield "instructions", _said("system", text)
    if body.get("previous_response_id") is not None:
        return  # the conversation goes on from an answer that is not here
    if isinstance(items, str):
        yield "input", _said("user", items)
    elif items is not None:
        yield from _messages(items, "input")


def _messages(messages: object, at: str) -> Iterator[tuple[str, str]]:
    for number, message in enumerate(_objects(messages, at)):
        here = f"{at}[{number}]"
        role = _string(message, "role", f"{here}.") or _string(message, "type", f"{here}.")
        text = _content(message.get("content"), f"{here}.content")
        rest = {name: value for name, value in message.items() if name not in _NOT_SHOWN}
        if rest.get("type") == "message":
            del rest["type"]
        more = json.dumps(rest, ensure_ascii=False) if rest else ""
        yield f"{here} ({role})", _said("system" if role == "developer" else role, text + more)


def _said(role: str, text: str) -> str:
    return f"{role}\n{text}"


def _content(content: object, at: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_shown(part, f"{at}[{number}].") for number, part in enumerate(_objects(content, at, "a string")))


def _shown(part: Body, at: str) -> str:
    name = _TEXTS.get(_string(part, "type", at))
    return _json(part) if name is None else _string(part, name, at)


def _json(value: Body) -> str:
    return json.dumps({name: each for name, each in value.items() if name not in _MARKS}, ensure_ascii=False)


# --- fields -----------------------------------------------------------------------------------------------------------


def _string(holder: Body, name: str, at: str = "") -> str:
    """Returns a field; empty if it is absent or null."""
    value = holder.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequestBody(f"{at}{name}: must be a string")
    return value or ""


def _objects(value: object, at: str, otherwise: str = "") -> Iterator[Body]:
    """Yields the objects of a list. `otherwise`: the other type that it may have, for the error."""
    if not isinstance(value, list | tuple):
        raise BadRequestBody(f"{at}: must be {otherwise}{' or ' if otherwise else ''}a list of objects")
    for number, each in enumerate(value):
        if not isinstance(each, Mapping):
            raise BadRequestBody(f"{at}[{number}]: must be an object")
        yield each

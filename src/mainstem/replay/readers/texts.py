"""Turns the text of a request into tokens: bytes, or those of a model's tokenizer. Knows nothing about traces."""

from __future__ import annotations

import json

from mainstem.errors import BadArgument
from mainstem.imports import load_package
from mainstem.replay.readers.formats import BadLine, Line, short, text_of

_MESSAGE, _CONTENT, _MORE, _TOOLS = 256, 257, 258, 259


def as_bytes(body: Line) -> list[int]:
    """Encodes a body as UTF-8. Numbers above all bytes separate messages, so that no text looks like a boundary."""
    if body.get("prompt") is not None:
        prompt = _prompt(body)
        return prompt if isinstance(prompt, list) else list(_utf8(prompt))
    tokens: list[int] = []
    if body.get("tools"):
        tokens += [_TOOLS, *_utf8(json.dumps(body["tools"], sort_keys=True))]
    for message in _messages(body):
        rest = {key: value for key, value in message.items() if key not in ("role", "content")}
        tokens += [_MESSAGE, *_utf8(text_of(message, "role")), _CONTENT, *_utf8(_content(message.get("content")))]
        tokens += [_MORE, *_utf8(json.dumps(rest, sort_keys=True))] if rest else []
    return tokens


def _prompt(body: Line) -> str | list[int]:
    prompt = body["prompt"]
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
        return prompt
    raise BadLine(f"prompt is neither a string nor a list of token ids: {short(prompt)}")


def _messages(body: Line) -> list[Line]:
    """Returns the messages, with the system prompt first where it has a field of its own."""
    messages, first = body.get("messages"), body.get("system")
    if messages is None and (body.get("input") is not None or body.get("instructions") is not None):
        if body.get("previous_response_id") is not None:
            raise BadLine("it goes on from an answer that is not here (previous_response_id)")
        messages, first = body.get("input") or [], body.get("instructions")
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadLine("neither prompt nor messages (a list of objects) is present")
    system = [{"role": "system", "content": first}] if first else []
    return list(map(_plain, [*system, *messages]))


_TEXT_PARTS = ("text", "input_text", "output_text")


def _plain(message: Line) -> Line:
    """Joins the parts of a message if all are text, as the server does for templates."""
    parts = message.get("content")
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") in _TEXT_PARTS for part in parts
    ):
        return message
    return {**message, "content": "\n".join(text_of(part, "text") for part in parts)}


def _content(content: object) -> str:
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, sort_keys=True)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadLine("a text is not valid Unicode") from error


class Tokenizer:
    """Tokenizes the body of a request like an engine does: with the model's chat template."""

    def __init__(self, name: str) -> None:
        transformers = load_package("transformers", "a tokenizer needs transformers: pip install 'mainstem[runtime]'")
        jinja2 = load_package("jinja2", "a chat template needs jinja2: pip install 'mainstem[runtime]'")
        self._template_error: type[Exception] = jinja2.TemplateError
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise BadArgument("tokenizer", name, f"the name or folder of a tokenizer: {error}") from error

    def __call__(self, body: Line) -> list[int]:
        try:
            if body.get("prompt") is not None:
                prompt = _prompt(body)
                return prompt if isinstance(prompt, list) else list(self._tokenizer.encode(prompt))
            return list(
                self._tokenizer.apply_chat_template(
                    _messages(body), tools=body.get("tools"), add_generation_prompt=True, return_dict=False
                )
            )
        except (self._template_error, LookupError, TypeError, ValueError, AttributeError) as error:
            raise BadLine(f"it cannot be tokenized: {error}") from error

"""guidance over a server of chats: text with a stop, a choice and JSON."""

from __future__ import annotations

from guidance import assistant, gen, json, system, user
from guidance.models import OpenAI
from task import MODEL, V1, run


def _model():
    return OpenAI(MODEL, base_url=V1, api_key="any", echo=False)


def chats() -> None:
    lm = _model()
    with system():
        lm += "Be brief."
    with user():
        lm += "<say>It is sunny.</say>"
    with assistant():
        lm += gen(name="answer", max_tokens=50)
    assert lm["answer"] == "It is sunny."


def schemas() -> None:
    lm = _model()
    schema = {
        "type": "object",
        "properties": {"sunny": {"type": "boolean"}},
        "required": ["sunny"],
        "additionalProperties": False,
    }
    with user():
        lm += '<say>{"sunny": true}</say>'
    with assistant():
        lm += json(name="answer", schema=schema)
    assert lm["answer"].replace(" ", "") == '{"sunny":true}'


run(chats, schemas)

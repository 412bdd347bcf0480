"""A model that does what the user's text tells it: for clients whose protocol is tested, not what a model understands.

A text has steps, such as

    <call name="weather">{"city": "Paris"}</call><say>It is sunny.</say>

Each turn of the assistant after it takes the next step; the last one is repeated. A call needs a tool of that name, and
an answer that must have a form gets it: what is to be said is followed as far as the grammar lets it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rigs.fake_engine import FakeEngine, FakeTokenizer
from rigs.templates import TOOL_TEMPLATES
from starlette.applications import Starlette
from transformers.utils.chat_template_utils import render_jinja_template

from mainstem.runtime.request import Request
from mainstem.runtime.sampling.grammars import Grammars
from mainstem.server.access.origins import reach_of
from mainstem.server.app import create_app
from mainstem.settings.engine import Grammar
from mainstem.settings.server import ServerConfig

_STEP = re.compile(r'<call name="([\w.:/-]+)">(.*?)</call>|<say>(.*?)</say>', re.DOTALL)
_USER, _ASSISTANT = "<|im_start|>user\n", "<|im_start|>assistant\n"
_LISTED = re.compile(r'^{"type": "function", "function": {"name": "([^"]*)"', re.MULTILINE)
_NOTHING = "There is nothing to do."
# Where a text is at its end or impossible, bytes that close what is open come first, and blanks last.
_FALLBACK = [
    *b'"}],:0123456789',
    *range(ord("A"), ord("Z")),
    *range(ord("a"), ord("z")),
    *b"{[-._",
    *range(33, 256),
    32,
]
_MOST = 4096


class ScriptedTokenizer(FakeTokenizer):
    """One token per byte, and a chat template that knows tools."""

    chat_template = TOOL_TEMPLATES["hermes"]

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool, **given: Any) -> str:
        assert not tokenize
        tools, continues = given.pop("tools", None), given.pop("continue_final_message", False)
        (text,), _ = render_jinja_template(
            conversations=[[dict(message) for message in messages]],
            tools=tools,
            chat_template=self.chat_template,
            continue_final_message=continues,
            **given,
        )
        return str(text)


class Step(NamedTuple):
    """A text to say, or the arguments of a call."""

    name: str | None
    text: str

    def written(self) -> str:
        """Returns it as the model writes it."""
        if self.name is None:
            return self.text
        # A custom tool takes a text: to the model it has one argument.
        given = self.text if self.text.startswith("{") else json.dumps({"input": self.text})
        return f'<tool_call>\n{{"name": {json.dumps(self.name)}, "arguments": {given}}}\n</tool_call>'


def next_step(prompt: str) -> Step:
    """Returns what the model does after a prompt."""
    turns = [(start, text) for start, text in _turns(prompt) if _STEP.search(text)]
    if not turns:
        return Step(None, _NOTHING)
    text = turns[-1][1]
    start = next(at for at, other in turns if other == text)  # some clients send it again with each result
    steps = [Step(found[1], found[2] or found[3]) for found in _STEP.finditer(text)]
    done = max(prompt.count(_ASSISTANT, start) - 1, 0)
    step = steps[min(done, len(steps) - 1)]
    if step.name is None or step.name in _LISTED.findall(prompt):
        return step
    return next((each for each in reversed(steps) if each.name is None), Step(None, _NOTHING))


def _turns(prompt: str) -> Iterator[tuple[int, str]]:
    """Yields where the turns of the user begin, and their texts. A prompt without turns is one."""
    if _USER not in prompt:
        yield 0, prompt
    for found in re.finditer(re.escape(_USER), prompt):
        yield found.start(), prompt[found.end() :].partition("<|im_end|>")[0]


class ScriptedEngine(FakeEngine):
    """Does what prompts say, in the form that a request asks for."""

    name = "scripted"

    def __init__(self) -> None:
        super().__init__(max_context=1 << 20)
        self.tokenizer = ScriptedTokenizer()
        self.grammars = Grammars(self.tokenizer, 256)

    def answer_to(self, request: Request) -> str:
        prompt = self.tokenizer.decode(request.tokens)
        thought = "I do what I am asked.\n</think>\n\n" if prompt.endswith("<think>\n") else ""
        wanted = thought + next_step(prompt).written()
        grammar = request.params.grammar
        return wanted if grammar is None else self._in_form(grammar, wanted.encode())

    def _in_form(self, grammar: Grammar, wanted: bytes) -> str:
        """Returns a text that a grammar lets pass: the one that is wanted, as far as that goes."""
        matcher, made = self.grammars.compile(grammar).matcher(), bytearray()
        while len(made) < _MOST:
            following, fits = matcher.following(), wanted.startswith(made)
            assert not following.problem, following.problem
            at = len(made)
            if fits and at < len(wanted) and following.tokens[wanted[at]]:
                token = wanted[at]
            elif following.may_end:
                break
            else:
                token = next(byte for byte in _FALLBACK if following.tokens[byte])
            made.append(token)
            if not matcher.accept(token):
                break
        return made.decode(errors="replace")


def scripted_app() -> tuple[Starlette, ServerConfig]:
    """Returns the server of a scripted model, and its settings.

    Its second name is one that Codex knows, and to which it offers more tools than to others.
    """
    names = (ScriptedEngine.name, "gpt-5.5")
    # Usage is recorded and compared, so nothing is computed between requests that may come before it is done.
    settings = ServerConfig(port=0, served_model_name=names, embeddings=True, precompute_turns=0.0)
    engine: Any = ScriptedEngine()
    return create_app(engine, settings, reach=reach_of(settings, settings.host)), settings

"""Calls of tools: canned texts of four families, cut everywhere; grammars that hold a model to calls."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, get_args
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from rigs.templates import byte_tokenizer
from test_output import scanned

from mainstem.server.output import Arguments, Call, Piece, Text, joined
from mainstem.server.reasoning import THINKING
from mainstem.server.tools import FORMATS, MAX_FORCED, CallFormat, Tool, Tooling, format_of
from mainstem.settings.server import ReasoningParser, ToolCallParser

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = Tooling((Tool("weather", "The weather.", CITY), Tool("time"), Tool("ns.call-2")))

W = '{"name": "weather", "arguments": {"city": "Rome"}}'
T = '{"name": "time", "arguments": {}}'
ROME = ("weather", '{"city": "Rome"}')
TIME = ("time", "{}")


def parsed(format: str, *texts: str, tooling: Tooling = TOOLS) -> tuple[list[Any], list[Call]]:
    """Returns the texts, and the calls as names and arguments, in order; and the calls themselves."""
    pieces = scanned(FORMATS[format].parser(tooling), *texts)
    shown: list[Any] = []
    calls = [piece for piece in pieces if isinstance(piece, Call)]
    for piece in pieces:
        if isinstance(piece, Text):
            shown.append(piece.text)
        elif isinstance(piece, Call):
            shown.append((piece.name, ""))
        else:
            assert isinstance(piece, Arguments)
            name, before = shown[-1]
            shown[-1] = (name, before + piece.text)
    assert [call.number for call in calls] == list(range(len(calls)))
    return shown, calls


CASES: dict[str, list[tuple[str, list[Any]]]] = {
    "hermes": [
        ("Hello <b>you</b>.", ["Hello <b>you</b>."]),
        (f"<tool_call>\n{W}\n</tool_call>", [ROME]),
        (f"Let me see.\n\n<tool_call>{W}</tool_call>\n<tool_call>\n{T}\n</tool_call>\n", ["Let me see.", ROME, TIME]),
        (f"<tool_call>[{W}, {T}]</tool_call> Done.", [ROME, TIME, "Done."]),
        ('<tool_call>{"arguments": {"city": "Rome"}, "name": "weather"}</tool_call>', [ROME]),
        ('<tool_call>{"name": "time"}</tool_call>', [TIME]),
        ('<tool_call>{"name": "time", "arguments": null}</tool_call>', [TIME]),
        (
            '<tool_call>{"name": "time", "arguments": "{\\"a\\": \\"\\\\u00e9\\"}"}</tool_call>',
            [("time", '{"a": "\\u00e9"}')],
        ),
        ('<tool_call>{"arguments": "{}", "name": "time"}</tool_call>', [TIME]),
        (
            '<tool_call>{"id": 7, "type": "function", "name":"time","arguments":{"a":[{"}":"\\"]}"}]}}</tool_call>',
            [("time", '{"a":[{"}":"\\"]}"}]}')],
        ),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Ro', [("weather", '{"city": "Ro')]),
        ('<tool_call>{"name": "weather"', [("weather", "")]),
        ('<tool_call>{"name": "wea', ['<tool_call>{"name": "wea']),
        (
            '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
            ['<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'],
        ),
        (f"<tool_call>what?<tool_call>{T}</tool_call>", ["<tool_call>what?", TIME]),
        ("<tool_call>[]</tool_call>", ["<tool_call>[]</tool_call>"]),
        ("<tool_call>{}</tool_call>", ["<tool_call>{}</tool_call>"]),
        (f"<tool_call>{T}}}</tool_call>", [TIME, "}</tool_call>"]),
        (f"<tool_call>{T}", [TIME]),
        ("<tool_call", ["<tool_call"]),
        ("a </tool_call> b  ", ["a </tool_call> b  "]),
        ("  \n", ["  \n"]),
        (f"\n <tool_call>{T}</tool_call>", [TIME]),
        ('<tool_call>{"name": "time", "arguments": 7 , "id": tru}</tool_call>', [("time", "7")]),
        ('<tool_call>{"name": "time", "name": "time"}</tool_call>', [("time", ""), ', "name": "time"}</tool_call>']),
        ('<tool_call>{"name": "time", "arguments": {"a": "\U0001f600"}}', [("time", '{"a": "\U0001f600"}')]),
    ],
    "llama3_json": [
        ('{"name": "weather", "parameters": {"city": "Rome"}}', [ROME]),
        ('\n{"type": "function", "name": "weather", "parameters": {"city": "Rome"}}', [ROME]),
        ('<|python_tag|>{"name": "time", "parameters": {}}', [TIME]),
        ('Now: <|python_tag|>{"name": "time", "parameters": {}}', ["Now:", TIME]),
        ('{"name": "time", "parameters": {}}; {"name": "weather", "parameters": {"city": "Rome"}}', [TIME, ROME]),
        ('{"name": "time", "parameters": {}};<|python_tag|>{"name": "time", "parameters": {}}', [TIME, ";", TIME]),
        ('Now: {"name": "time", "parameters": {}}', ['Now: {"name": "time", "parameters": {}}']),
        ('<|python_tag|>print("hi")', ['<|python_tag|>print("hi")']),
        ("", []),
    ],
    "json": [
        (W, [ROME]),
        (f" {W}\n{T}\n", [ROME, TIME]),
        (f"[{W}, {T}]", [ROME, TIME]),
        (f"{T} Done; really.", [TIME, "Done; really."]),
        (f"{T}; Done", [TIME, "; Done"]),
        (f"[{W}, 3]", [ROME, ", 3]"]),
        ('{"answer": 42}', ['{"answer": 42}']),
        ("[1, 2]", ["[1, 2]"]),
        ('{"name": "Rome", "arguments": {}}', ['{"name": "Rome", "arguments": {}}']),
        ("{", ["{"]),
        ('  {"a"', ['  {"a"']),
        (f"I say {W}", [f"I say {W}"]),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{W}, {T}]", [ROME, TIME]),
        (f"[TOOL_CALLS][{W}]", [ROME]),
        (f"[TOOL_CALLS]{W}", [ROME]),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]time[ARGS]{}', [ROME, TIME]),
        ('[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS] {"city": "Rome"}', [ROME]),
        ('[TOOL_CALLS]weather{"city": "Rome"}', [ROME]),
        ('Well. [TOOL_CALLS]ns.call-2[ARGS]{"x": [1]}', ["Well.", ("ns.call-2", '{"x": [1]}')]),
        ("[TOOL_CALLS]weather[ARG]{}", ["[TOOL_CALLS]weather[ARG]{}"]),
        ("[TOOL_CALLS]weath", ["[TOOL_CALLS]weath"]),
        ("[TOOL_CALLS]what[ARGS]{}", ["[TOOL_CALLS]what[ARGS]{}"]),
        (f"[TOOL_CALLS][TOOL_CALLS] [{T}]", ["[TOOL_CALLS]", TIME]),
        ("[TOOL] [1]", ["[TOOL] [1]"]),
    ],
}
CASES["mistral_args"] = CASES["mistral"]
CANNED = [(name, text, expected) for name, cases in CASES.items() for text, expected in cases]


@pytest.mark.parametrize(("format", "text", "expected"), CANNED)
def test_canned_texts_cut_at_every_position(format: str, text: str, expected: list[Any]) -> None:
    assert parsed(format, text)[0] == expected
    assert parsed(format, *text)[0] == expected
    for at in range(len(text)):
        assert parsed(format, text[:at], text[at:])[0] == expected


def is_beginning(some: Sequence[Piece], all: Sequence[Piece]) -> bool:
    """Whether what was shown is a beginning of all that is shown in the end, whatever the ids."""

    def letters(pieces: Sequence[Piece]) -> list[tuple[Any, ...]]:
        spelled: list[tuple[Any, ...]] = []
        for piece in pieces:
            if isinstance(piece, Call):
                spelled.append((piece.number, piece.name))
            else:
                spelled += [(type(piece), getattr(piece, "number", None), letter) for letter in piece.text]
        return spelled

    shorter, longer = letters(some), letters(all)
    return longer[: len(shorter)] == shorter


SCRAPS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", W, T, "weather", "time",
          '{"name": "', '"', "{", "}", "[", "]", ",", ":", " ", "\n", "\\", "a", ";", '"arguments"', "7"]  # fmt: skip


@given(
    format=st.sampled_from(sorted(FORMATS)),
    scraps=st.lists(st.sampled_from(SCRAPS), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=5),
    parallel=st.booleans(),
)
def test_nothing_is_taken_back_and_no_split_matters(
    format: str, scraps: list[str], cuts: list[int], parallel: bool
) -> None:
    tooling = Tooling(TOOLS.tools, parallel=parallel)
    text = "".join(scraps)
    whole = scanned(FORMATS[format].parser(tooling), text)
    places = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    pieces: list[Piece] = []
    parser = FORMATS[format].parser(tooling)
    for begin, end in itertools.pairwise(places):
        pieces += parser.feed(text[begin:end])
        assert is_beginning(pieces, whole)
    pieces += parser.close()
    assert is_beginning(joined(pieces), whole)
    assert is_beginning(whole, joined(pieces))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = [tool.name for tool in TOOLS.tools]
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=5), JSON, max_size=3)), min_size=1, max_size=3
)


@given(format=st.sampled_from(sorted(FORMATS)), calls=CALLS, ascii=st.booleans())
def test_what_a_format_writes_is_read_back(format: str, calls: list[tuple[str, dict[str, Any]]], ascii: bool) -> None:
    written = [(name, json.dumps(arguments, ensure_ascii=ascii)) for name, arguments in calls]
    assert parsed(format, FORMATS[format].written(written))[0] == written


def test_arguments_are_shown_as_they_come() -> None:
    parser = FORMATS["hermes"].parser(TOOLS)
    assert parser.feed('Well. <tool_call>{"name": "weather"') == [Text("Well."), Call(0, ANY, "weather")]
    assert parser.feed(', "arguments": {"ci') == [Arguments(0, '{"ci')]
    assert parser.feed('ty": "Ro') == [Arguments(0, 'ty": "Ro')]


def test_only_tools_that_may_be_called_are_found() -> None:
    text = f"<tool_call>{W}</tool_call>"
    only_time = Tooling(TOOLS.tools, allowed=frozenset(["time"]))
    assert parsed("hermes", text, tooling=only_time)[0] == [text]
    assert parsed("hermes", text, tooling=Tooling(TOOLS.tools, "none"))[0] == [text]


@pytest.mark.parametrize(
    "text", [f"[TOOL_CALLS] [{W}, {T}]", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]time{}']
)
def test_without_parallel_calls_only_the_first_one_is_shown(text: str) -> None:
    assert parsed("mistral", text, tooling=Tooling(TOOLS.tools, parallel=False))[0] == [ROME]


def test_ids_are_unique_and_in_the_form_of_the_model() -> None:
    for format, length in (("hermes", 29), ("mistral", 9)):
        _, calls = parsed(format, FORMATS[format].written([ROME] * 5))
        assert len({call.id for call in calls}) == 5
        assert {len(call.id) for call in calls} == {length}
    mistral = FORMATS["mistral"]
    assert mistral.accepted_id("abcDEF123") == "abcDEF123"
    long = mistral.accepted_id("call_1234567890")
    assert len(long) == 9
    assert long.isalnum()
    assert long == mistral.accepted_id("call_1234567890") != mistral.accepted_id("call_1234567891")
    assert FORMATS["hermes"].accepted_id("call_1") == "call_1"


@pytest.mark.parametrize(
    ("template", "vocabulary", "name"),
    [
        ("... <tool_call> ...", {"<|python_tag|>"}, "hermes"),
        ("plain", {"<tool_call>"}, "hermes"),
        ("... [TOOL_CALLS] ...", {"[ARGS]"}, "mistral"),
        ("... [TOOL_CALLS] ... [ARGS]", set(), "mistral_args"),
        ("", {"[TOOL_CALLS]"}, "mistral"),
        ("<|python_tag|>", set(), "llama3_json"),
        ("plain", set(), "json"),
    ],
)
def test_models_are_told_by_their_markers(template: str, vocabulary: set[str], name: str) -> None:
    assert format_of(template, vocabulary) is FORMATS[name]


def test_the_options_are_the_formats() -> None:
    assert set(get_args(ToolCallParser)) == {"auto", *FORMATS}
    assert set(get_args(ReasoningParser)) == {"auto", "none", *THINKING}


# ---------------------------------------------------------------- grammars


class Judge:
    """Says which texts a grammar takes, over a tokenizer of bytes."""

    def __init__(self, grammar: str, special: Sequence[str] = ()) -> None:
        tokenizer = byte_tokenizer("chatml", special)
        self._tokenizer = tokenizer
        self._matcher = LLMatcher(from_tokenizer(tokenizer), LLMatcher.grammar_from_lark(grammar))
        assert not self._matcher.is_error(), self._matcher.get_error()

    def takes(self, text: str) -> bool:
        self._matcher.reset()
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        return self._matcher.try_consume_tokens(tokens) == len(tokens) and self._matcher.is_accepting()


def grammar(format: CallFormat, tooling: Tooling, special: dict[str, int] = {}) -> str:  # noqa: B006
    return "start: calls\n" + format.grammar(tooling, special)


REQUIRED = Tooling(TOOLS.tools, "required")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_grammars_take_calls_as_the_format_writes_them(name: str) -> None:
    format = FORMATS[name]
    judge = Judge(grammar(format, REQUIRED))
    assert judge.takes(format.written([ROME]))
    assert judge.takes(format.written([TIME, ROME]))
    assert not judge.takes(format.written([("weather", "{}")])), "the city is required"
    assert not judge.takes(format.written([("weather", '{"city": 7}')]))
    assert not judge.takes(format.written([("weather", '{"city": "Rome", "more": 1}')]))
    assert not judge.takes(format.written([("unknown", "{}")]))
    assert not judge.takes("Hello.")
    assert not judge.takes("")
    assert not judge.takes(format.written([ROME]) + " Hello.")
    assert judge.takes(format.written([TIME] * MAX_FORCED))
    assert not judge.takes(format.written([TIME] * (MAX_FORCED + 1)))
    one = Judge(grammar(format, Tooling(TOOLS.tools, "required", frozenset(["time"]), parallel=False)))
    assert one.takes(format.written([TIME]))
    assert not one.takes(format.written([TIME, TIME]))
    assert not one.takes(format.written([ROME]))


@given(
    schema=st.sampled_from(
        [{}, {"properties": {"a": {"enum": [1, "x"]}}}, {"additionalProperties": {"type": "integer"}}]
    )
)
def test_arguments_are_an_object_whatever_the_schema(schema: dict[str, Any]) -> None:
    format = FORMATS["json"]
    judge = Judge(grammar(format, Tooling((Tool("f", None, schema),), "required")))
    assert judge.takes(format.written([("f", "{}")]))
    assert judge.takes(format.written([("f", '{"a": 1}')]))
    assert not judge.takes(format.written([("f", "7")]))
    assert not judge.takes(format.written([("f", '{"a":1}')])), "in one spelling, so that white space has an end"
    assert judge.takes(format.written([("f", '{"b": 1}')])) == ("properties" not in schema)


def test_markers_that_are_special_tokens_are_their_ids() -> None:
    format, special = FORMATS["mistral_args"], ("[TOOL_CALLS]", "[ARGS]")
    tokenizer = byte_tokenizer("chatml", special)
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in special}
    judge = Judge(grammar(format, REQUIRED, ids), special)
    assert judge.takes(format.written([ROME, TIME]))
    assert not Judge(grammar(format, REQUIRED), special).takes(format.written([ROME])), "spelled in letters"

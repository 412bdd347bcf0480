"""Calls of tools: canned texts of every format, cut everywhere; grammars that hold a model to calls."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from rigs.templates import byte_tokenizer

from mainstem.server.fields.tools import Tool, Tooling
from mainstem.server.parsing.formats import FORMATS, MAX_FORCED, CallFormat, format_of
from mainstem.server.parsing.output import Arguments, Call, NoCall, Piece, Reasoning, Text, joined
from mainstem.server.parsing.reasoning import THINKING
from mainstem.settings.server import ReasoningParser, ToolCallParser
from tests.server.parsing.test_output import scanned

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = Tooling((Tool("weather", "The weather.", CITY), Tool("time"), Tool("ns.call-2")))

W = '{"name": "weather", "arguments": {"city": "Rome"}}'
T = '{"name": "time", "arguments": {}}'
ROME = ("weather", '{"city": "Rome"}')
TIME = ("time", "{}")


def parsed(format: str, *texts: str, tooling: Tooling = TOOLS, cut: bool = False) -> tuple[list[Any], list[Call]]:
    """Returns the texts, and the calls as names and arguments, in order; and the calls themselves.

    What turned out to be no call is left out, as in a whole answer.
    """
    pieces = scanned(FORMATS[format].parser(tooling), *texts, cut=cut)
    shown: list[Any] = []
    calls = [piece for piece in pieces if isinstance(piece, Call)]
    assert [call.number for call in calls] == list(range(len(calls)))
    for piece in pieces:
        if isinstance(piece, Reasoning):
            shown.append(piece)
        elif isinstance(piece, Text):
            shown += [shown.pop() + piece.text if shown and isinstance(shown[-1], str) else piece.text]
        elif isinstance(piece, Call):
            shown.append((piece.name, ""))
        elif isinstance(piece, NoCall):
            shown.pop()
            calls = [call for call in calls if call.number != piece.number]
        else:
            assert isinstance(piece, Arguments)
            name, before = shown[-1]
            shown[-1] = (name, before + piece.text)
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
        ('<tool_call>{"name": "time", "arguments": "{\'a\': True,}"}</tool_call>', [("time", '{"a": true}')]),
        ('<tool_call>{"name": "time", "arguments": " "}</tool_call>', [TIME]),
        ("<tool_call>{'name': 'weather', 'arguments': {'city': 'Rome',},}</tool_call>", [ROME]),
        (
            """<tool_call>{"name": "time", "arguments": {'a': 'it\\'s', "b": [1, None,], }}</tool_call>""",
            [("time", """{"a": "it's", "b": [1, null] }""")],
        ),
        ('<tool_call>{"name": "time", "arguments": {"a": "x\n\ty\\d"}}</tool_call>', [("time", r'{"a": "x\n\ty\\d"}')]),
        ('<tool_call>{"name": "time", "arguments": {"a": "\\ud83d"}}</tool_call>', [("time", r'{"a": "\ufffd"}')]),
        (
            f'No. <tool_call>{{"name": "time", "arguments": {{"a": b}}}}</tool_call> <tool_call>{T}</tool_call>',
            ['No. <tool_call>{"name": "time", "arguments": {"a": b}}</tool_call>', TIME],
        ),
        (
            f'<tool_call>[{T}, {{"name": "time", "arguments": {{"a": "b" c}}}}]</tool_call>',
            [TIME, ', {"name": "time", "arguments": {"a": "b" c}}]</tool_call>'],
        ),
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
        (
            '<tool_call>{"name": "time", "arguments": 7 , "id": tru}</tool_call>',
            ['<tool_call>{"name": "time", "arguments": 7 , "id": tru}</tool_call>'],
        ),
        (
            '<tool_call>{"name": "time", "arguments": "7"}</tool_call>',
            ['<tool_call>{"name": "time", "arguments": "7"}</tool_call>'],
        ),
        (
            '<tool_call>{"name": "time", "name": "time"}</tool_call>',
            ['<tool_call>{"name": "time", "name": "time"}</tool_call>'],
        ),
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

BEGIN, CALL, SEP, END, DONE = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip
FENCED = f"{CALL}function{SEP}weather\n```json\n" + '{"city": "Rome"}\n```' + END
CASES["deepseek_v3"] = [
    (f"{BEGIN}{FENCED}{DONE}", [ROME]),
    (
        f"Let me see.{BEGIN}{FENCED}\n{CALL}function{SEP}time\n```json\n{{}}\n```{END}{DONE}",
        ["Let me see.", ROME, TIME],
    ),
    (f'{BEGIN}{CALL}weather{SEP}{{"city": "Rome"}}{END}{CALL}time{SEP}{{}}{END}{DONE}', [ROME, TIME]),
    (f"{BEGIN}\n{CALL}time{SEP}{{}}{END}\n{DONE} Done.", [TIME, "Done."]),
    (f"{CALL}time{SEP}{{}}{END}", [TIME]),
    (f'{BEGIN}{CALL}weather{SEP}{{"city": Ro{END}', [f'{BEGIN}{CALL}weather{SEP}{{"city": Ro{END}']),
    (f"{BEGIN}{FENCED[: -len(END) - 1]}", [ROME]),
    (f"{BEGIN}{CALL}function{SEP}weat", [f"{BEGIN}{CALL}function{SEP}weat"]),
    (f"{BEGIN}{CALL}unknown{SEP}{{}}{END}{DONE}", [f"{BEGIN}{CALL}unknown{SEP}{{}}{END}{DONE}"]),
    (f"{BEGIN}what?", [f"{BEGIN}what?"]),
    (f"{BEGIN[:-3]} {DONE}", [f"{BEGIN[:-3]} {DONE}"]),
]
CASES["deepseek_v31"] = CASES["deepseek_v3"]

TO_WEATHER = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
TO_TIME = " to=functions.time<|channel|>commentary json<|message|>{}"
FINAL, THINKS, AGAIN = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
CASES["harmony"] = [
    (f"{FINAL}Hello <b>you</b>. ", ["Hello <b>you</b>. "]),
    ("Hello.", ["Hello."]),
    (f'{TO_WEATHER}{{"city": "Rome"}}<|call|>', [ROME]),
    (f'{TO_WEATHER}{{"city": "Rome"}}<|call|><|start|>assistant{TO_TIME}', [ROME, TIME]),
    (TO_TIME, [TIME]),
    ("<|channel|> to=functions.time<|message|>{}", [TIME]),
    ("<|channel|><|message|>a", ["<|channel|><|message|>a"]),
    (f"{THINKS}I wonder. {AGAIN}{FINAL}Yes.", [Reasoning("I wonder. "), "Yes."]),
    (f"{THINKS}One.{AGAIN}{THINKS}Two.{AGAIN}{TO_TIME}", [Reasoning("One.\nTwo."), TIME]),
    (f"{THINKS}I wonder", [Reasoning("I wonder")]),
    (f"<|channel|>commentary<|message|>First this.{AGAIN}{TO_TIME}<|call|>", ["First this.", TIME]),
    (f"<|channel|>commentary<|message|>First.{AGAIN}{FINAL}Then.<|return|>", ["First.\nThen."]),
    (f"{THINKS}a{TO_WEATHER}Rome<|call|>", [Reasoning("a"), f"{TO_WEATHER}Rome<|call|>"]),
    ("<|channel|>commentary to=python<|message|>{}", ["<|channel|>commentary to=python<|message|>{}"]),
    ("<|channel|>other<|message|>a", ["<|channel|>other<|message|>a"]),
    ("<|channel|>what<|channel|>final<|message|>a", ["<|channel|>whata"]),
    ("<|chan", ["<|chan"]),
    ("to=day", ["to=day"]),
]

TYPED = Tooling(
    (
        Tool(
            "weather",
            "The weather.",
            {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"enum": ["C", "F"]},
                    "more": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "number"}}]},
                },
                "required": ["city"],
            },
        ),
        *TOOLS.tools[1:],
    )
)
ALL = ("weather", '{"city": "New\\nYork \\"1\\"", "days": 3, "more": [1, 2.5]}')


def coder(name: str, *given: tuple[str, str]) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given)
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def glm(name: str, *given: tuple[str, str]) -> str:
    values = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in given)
    return f"<tool_call>{name}\n{values}</tool_call>"


GIVEN = (("city", 'New\nYork "1"'), ("days", "3"), ("more", "[1, 2.5]"))
CASES["qwen3_coder"] = [
    (coder("weather", *GIVEN), [ALL]),
    (coder("weather", ("city", "Rome")) + "\n" + coder("time"), [ROME, TIME]),
    ("So: <function=weather><parameter=city>Rome</parameter></function>", ["So:", ROME]),
    (coder("weather", ("city", ""), ("days", "True"), ("unit", "C"), ("more", "None"), ("x", "{}"), ("y", "a b")),
     [("weather", '{"city": "", "days": "True", "unit": "C", "more": null, "x": {}, "y": "a b"}')]),
    (coder("weather", ("city", "\n<b>\n")), [("weather", '{"city": "\\n<b>\\n"}')]),
    (coder("weather", ("days", "1.5"), ("more", "NaN")), [("weather", '{"days": "1.5", "more": "NaN"}')]),
    (coder("weather", ("more", "[1,\n2,]"), ("x", "{'a': None}")),
     [("weather", '{"more": [1,\n2], "x": {"a": null}}')]),
    ("<tool_call>\n<function=weat", ["<tool_call>\n<function=weat"]),
    (coder("unknown"), [coder("unknown")]),
    ("<function=weather>what?</function>", ["<function=weather>what?</function>"]),
    ("<function=weather><parameter=city>Rome</parameter>what?",
     ["<function=weather><parameter=city>Rome</parameter>what?"]),
    ("Hello <b>you</b> </tool_call>", ["Hello <b>you</b> </tool_call>"]),
    (W, [W]),
]  # fmt: skip
CASES["glm45"] = [
    (glm("weather", *GIVEN), [ALL]),
    (glm("weather", ("city", "Rome")) + "\n" + glm("time"), [ROME, TIME]),
    ("So: " + glm("weather", ("city", "Rome")).replace("\n", "") + " Yes.", ["So:", ROME, "Yes."]),
    ("<tool_call>time</tool_call>", [TIME]),
    (glm("weather", ("city", " a\n")), [("weather", '{"city": " a\\n"}')]),
    ("<tool_call>weather", ["<tool_call>weather"]),
    ("<tool_call>weathers\n</tool_call>", ["<tool_call>weathers\n</tool_call>"]),
    ("<tool_call>weather\nis nice</tool_call>", ["<tool_call>weather\nis nice</tool_call>"]),
]  # fmt: skip
TAGGED = ["glm45", "qwen3_coder"]
IN_JSON = sorted(FORMATS.keys() - TAGGED)
CANNED = [(name, text, expected) for name, cases in CASES.items() for text, expected in cases]


@pytest.mark.parametrize(("format", "text", "expected"), CANNED)
def test_canned_texts_cut_at_every_position(format: str, text: str, expected: list[Any]) -> None:
    tooling = TYPED if format in TAGGED else TOOLS
    assert parsed(format, text, tooling=tooling)[0] == expected
    assert parsed(format, *text, tooling=tooling)[0] == expected
    for at in range(len(text)):
        assert parsed(format, text[:at], text[at:], tooling=tooling)[0] == expected


def test_every_format_has_canned_texts() -> None:
    assert CASES.keys() == FORMATS.keys() == CUT.keys()


CUT: dict[str, list[tuple[str, Any]]] = {
    "hermes": [
        ('<tool_call>{"name": "weather", "arguments": {"city": "Ro', ("weather", '{"city": "Ro')),
        ('<tool_call>{"name": "weather"', ("weather", "")),
    ],
    "llama3_json": [('{"name": "weather", "parameters": {"city": "Ro', ("weather", '{"city": "Ro'))],
    "json": [('{"name": "weather", "arguments": {"city": "Ro', ("weather", '{"city": "Ro'))],
    "mistral": [('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Ro', ("weather", '{"city": "Ro'))],
    "mistral_args": [('[TOOL_CALLS]weather[ARGS]{"city": "Ro', ("weather", '{"city": "Ro'))],
    "deepseek_v3": [(f'{BEGIN}{CALL}function{SEP}weather\n```json\n{{"city": "Ro', ("weather", '{"city": "Ro'))],
    "deepseek_v31": [(f'{BEGIN}{CALL}weather{SEP}{{"city": "Ro', ("weather", '{"city": "Ro'))],
    "harmony": [
        ('<|channel|>commentary to=functions.weather<|message|>{"city": "Ro', ("weather", '{"city": "Ro')),
    ],
    "qwen3_coder": [
        ("<tool_call>\n<function=weather>\n<parameter=city>\nRo", ("weather", '{"city": "Ro')),
        ("<tool_call>\n<function=weather>\n<parameter=days>\n1", ("weather", '{"days": 1')),
        ("<tool_call>\n<function=weather>\n<parameter=ci", ("weather", "")),
    ],
    "glm45": [
        ("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ro</arg", ("weather", '{"city": "Ro</arg')),
    ],
}


@pytest.mark.parametrize(("format", "text", "expected"), [(name, *case) for name in CUT for case in CUT[name]])
@pytest.mark.parametrize("before", ["", "Let me see.\n\n"])
def test_a_call_that_is_cut_shows_as_far_as_it_goes_and_one_that_ends_is_text(
    format: str, text: str, expected: Any, before: str
) -> None:
    begins = FORMATS[format].scanner.begins
    before = before if begins and text.startswith(begins) and format != "harmony" else ""
    said = ["Let me see."] if before else []
    assert parsed(format, before + text, tooling=TYPED, cut=True)[0] == [*said, expected]
    assert parsed(format, before + text, tooling=TYPED)[0] == [before + text], "with the white space before it"


def is_beginning(some: Sequence[Piece], all: Sequence[Piece]) -> bool:
    """Whether what was shown is a beginning of all that is shown in the end, whatever the ids."""

    def letters(pieces: Sequence[Piece]) -> list[tuple[Any, ...]]:
        spelled: list[tuple[Any, ...]] = []
        for piece in pieces:
            if isinstance(piece, Call):
                spelled.append((piece.number, piece.name))
            elif isinstance(piece, NoCall):
                spelled.append(("none", piece.number))
            else:
                spelled += [(type(piece), getattr(piece, "number", None), letter) for letter in piece.text]
        return spelled

    shorter, longer = letters(some), letters(all)
    return longer[: len(shorter)] == shorter


SCRAPS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", W, T, "weather", "time",
          '{"name": "', '"', "{", "}", "[", "]", ",", ":", " ", "\n", "\\", "a", ";", '"arguments"', "7",
          BEGIN, CALL, SEP, END, DONE, "function", "```json", "```", "<|channel|>", "<|start|>assistant", "<|message|>",
          "<|end|>", "<|call|>", "analysis", "final", "commentary", " to=functions.", "<function=", ">", "<parameter=",
          "</parameter>", "</function>", "city", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]  # fmt: skip


@given(
    format=st.sampled_from(sorted(FORMATS)),
    scraps=st.lists(st.sampled_from(SCRAPS), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=5),
    parallel=st.booleans(),
)
def test_nothing_is_taken_back_and_no_split_matters(
    format: str, scraps: list[str], cuts: list[int], parallel: bool
) -> None:
    tooling = Tooling(TYPED.tools, parallel=parallel)
    text = "".join(scraps)
    whole = scanned(FORMATS[format].parser(tooling), text)
    if not any(isinstance(piece, Call) for piece in whole) and (format != "harmony" or "<|message|>" not in text):
        assert whole == ([Text(text)] if text else []), "what is no call is text, all of it"
    shown, calls = parsed(format, text, tooling=tooling)
    assert all(isinstance(json.loads(each[1]), dict) for each in shown if isinstance(each, tuple) and len(each) == 2)
    if not calls and format != "harmony":
        assert shown == ([text] if text else []), "nor what has begun as one and is none"
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


@given(format=st.sampled_from(IN_JSON), calls=CALLS, ascii=st.booleans())
def test_what_a_format_writes_is_read_back(format: str, calls: list[tuple[str, dict[str, Any]]], ascii: bool) -> None:
    written = [(name, json.dumps(arguments, ensure_ascii=ascii)) for name, arguments in calls]
    assert parsed(format, FORMATS[format].written(written))[0] == written


WEATHERS = st.fixed_dictionaries(
    {"city": st.text(st.characters(exclude_categories=["Cs"]), max_size=9).filter(lambda text: "</" not in text)},
    optional={
        "days": st.integers(),
        "unit": st.sampled_from("CF"),
        "more": st.none() | st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    },
)


@given(format=st.sampled_from(TAGGED), calls=st.lists(WEATHERS, min_size=1, max_size=3))
def test_what_is_written_in_tags_is_read_back_with_its_types(format: str, calls: list[dict[str, Any]]) -> None:
    written = [("weather", json.dumps(arguments, ensure_ascii=False)) for arguments in calls]
    assert parsed(format, FORMATS[format].written(written), tooling=TYPED)[0] == written


def test_texts_in_tags_are_shown_as_they_come_and_other_values_when_they_are_complete() -> None:
    parser = FORMATS["qwen3_coder"].parser(TYPED)
    assert parser.feed("<tool_call>\n<function=weather>") == [Call(0, ANY, "weather")]
    assert parser.feed("\n<parameter=city>\nNew Y") == [Arguments(0, '{"city": "New Y')]
    assert parser.feed("ork\n") == [Arguments(0, "ork")], "the end of the line may be the end of the value"
    assert parser.feed("</parameter>\n<parameter=days>\n1") == [Arguments(0, '", "days": ')]
    assert parser.feed("2\n</parameter>") == [Arguments(0, "12")]
    assert parser.feed("\n</function>\n</tool_call>") == [Arguments(0, "}")]


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
        ("<tool_call> <parameter=x>", {"<tool_call>"}, "qwen3_coder"),
        ("<tool_call> <arg_key>", set(), "glm45"),
        ("", {"<tool_call>", "<arg_key>"}, "glm45"),
        (f"{BEGIN} {SEP} ```json", set(), "deepseek_v3"),
        (f"{BEGIN} {SEP}", set(), "deepseek_v31"),
        ("```json", {SEP}, "deepseek_v31"),
        ("<|channel|>final<|message|>", set(), "harmony"),
        ("<seed:tool_call> <parameter=x>", set(), "json"),
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

    def grown(self, scraps: Sequence[str]) -> str:
        """Returns the text of those scraps that go on with the grammar after those before."""
        self._matcher.reset()
        grown = ""
        for scrap in scraps:
            tokens = self._tokenizer.encode(scrap, add_special_tokens=False)
            if self._matcher.validate_tokens(tokens) == len(tokens):
                assert self._matcher.consume_tokens(tokens)
                grown += scrap
        return grown

    @property
    def complete(self) -> bool:
        """Whether the grammar is, after the text that was grown."""
        return bool(self._matcher.is_accepting())

    def takes(self, text: str, spelled: bool = False) -> bool:
        """Returns whether the grammar takes a text, in which markers are special tokens, or `spelled` in letters."""
        self._matcher.reset()
        tokenizer = byte_tokenizer("chatml") if spelled else self._tokenizer
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return self._matcher.try_consume_tokens(tokens) == len(tokens) and self._matcher.is_accepting()


def grammar(format: CallFormat, tooling: Tooling, special: dict[str, int] = {}) -> str:  # noqa: B006
    return "start: calls\n" + format.grammar(tooling, special)


REQUIRED = Tooling(TOOLS.tools, "required")


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_of_calls_has_no_text_wherever_it_is_cut(name: str) -> None:
    whole = FORMATS[name].written([ROME, TIME])
    named = 0
    for end in range(len(whole) + 1):
        shown, calls = parsed(name, whole[:end], tooling=REQUIRED, cut=True)
        assert not any(isinstance(each, str) for each in shown), whole[:end]
        named = max(named, len(calls))
    assert named == 2


@pytest.mark.parametrize("name", IN_JSON)
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


HELD = Tooling((replace(TYPED.tools[0], strict=True), *TYPED.tools[1:]), "required")
FULL = json.dumps({"city": "Rome", "days": 3, "unit": "C", "more": [1.5]})


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TAGGED)
def test_grammars_of_arguments_in_tags(name: str, special: bool) -> None:
    format = FORMATS[name]
    texts = format.markers if special else ()
    tokenizer = byte_tokenizer("chatml", texts)
    judge = Judge(grammar(format, HELD, {text: tokenizer.convert_tokens_to_ids(text) for text in texts}), texts)
    for arguments in ('{"city": "Rome"}', '{"city": "New\\n<b>York"}', FULL, '{"city": "", "more": null}'):
        assert judge.takes(format.written([("weather", arguments)])), arguments
    assert judge.takes(format.written([TIME, ("weather", FULL)]))
    for arguments in ("{}", '{"days": 3}', '{"city": "Rome", "days": "x"}', '{"city": "Rome", "unit": "K"}',
                      '{"city": "Rome", "x": 1}', '{"days": 3, "city": "Rome"}'):  # fmt: skip
        assert not judge.takes(format.written([("weather", arguments)])), arguments
    assert not judge.takes(format.written([("unknown", "{}")]))
    loose = Judge("start: calls\n" + format.grammar(HELD, {}, {"weather", "time"}))
    for arguments in ("{}", '{"x": 1, "y": "a\\nb"}', FULL):
        assert loose.takes(format.written([("weather", arguments)])), arguments


@pytest.mark.parametrize("name", TAGGED)
def test_the_name_of_an_argument_is_text_whatever_it_looks_like(name: str) -> None:
    marker = FORMATS[name].markers[0]
    tool = Tool("f", None, {"properties": {f"a{marker}": {"type": "string"}}, "required": [f"a{marker}"]})
    rules = FORMATS[name].grammar(Tooling((tool,), "required"), {marker: 7})
    assert json.dumps(f"a{marker}") in rules and "<[7]>" in rules


def test_references_in_schemas_of_arguments_in_tags() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/size"}, "b": {"type": "array", "items": {"$ref": "#/$defs/size"}}},
              "$defs": {"size": {"type": "integer"}}, "additionalProperties": False}  # fmt: skip
    tooling = Tooling((Tool("f", None, schema),), "required")
    format = FORMATS["qwen3_coder"]
    judge = Judge(grammar(format, tooling))
    call = ("f", '{"a": 5, "b": [1, 2]}')
    assert judge.takes(format.written([call])) and parsed("qwen3_coder", format.written([call]), tooling=tooling)[
        0
    ] == [call]
    assert not judge.takes(format.written([("f", '{"a": "x"}')]))
    assert not judge.takes(format.written([("f", '{"b": ["x"]}')]))
    assert not judge.takes(format.written([("f", '{"c": 1}')]))


# ---------------------------------------------------------------- strict tools

STRICT = Tooling((replace(TOOLS.tools[0], strict=True), *TOOLS.tools[1:]))


def offered(format: CallFormat, special: Sequence[str] = (), tooling: Tooling = STRICT, never: str = "") -> Judge:
    tokenizer = byte_tokenizer("chatml", special)
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in special}
    return Judge("start: offer\n" + format.offer(tooling, ids, never), special)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_calls_of_strict_tools_are_held_once_they_begin(name: str, special: bool) -> None:
    format = FORMATS[name]
    judge, said = offered(format, format.markers if special else ()), format.text
    for text in ("", "Hello.", ' {"answer": 42}', "[1, 2] <b>", "a\n\nb </b"):
        assert judge.takes(said + text), text
    free = ("time", '{"a": [1, "x"]}') if name in IN_JSON else ("time", '{"a": "x"}')
    for calls in ([ROME], [TIME], [free], [TIME, ROME, free]):
        assert judge.takes(format.written(calls)), calls
    beyond = format.written([("weather", '{"city": "Rome", "more": "1"}')])
    for text in (format.written([("weather", "{}")]), beyond, format.written([("unknown", "{}")]),
                 format.written([ROME]) + " Hello.", format.written([TIME] * (MAX_FORCED + 1))):  # fmt: skip
        assert not judge.takes(text), text
    begins, call = format.scanner.begins, format.written([ROME])
    if begins and not format.text:
        before = "" if call.startswith(begins[0]) else begins[0]
        assert judge.takes(f"Let me see.\n\n{before}{call}")
        assert not judge.takes(f"Let me see. {begins[0]} then.")
    for begin in begins:
        assert judge.takes(f"{said}a {begin[:-1]} b") or special
        assert not judge.takes(f"{said}a {begin} b", spelled=not said), "however it is spelled"
    one = offered(format, (), replace(STRICT, parallel=False))
    assert one.takes(call) and one.takes(said + "Hello.")
    assert not one.takes(format.written([ROME, ROME]))


@pytest.mark.parametrize("name", ["json", "llama3_json"])
def test_what_may_be_a_call_is_no_text_beside_strict_tools(name: str) -> None:
    judge = offered(FORMATS[name])
    for text in (
        '{"name"',
        ' [\n{ "arguments": 1}',
        '{"type": "function", "name": "weather"',
        '{"n\\u0061me": "weather"',
    ):
        assert not judge.takes(text), text
    assert judge.takes('{"title": "weather"}') and judge.takes('Say {"name"')


def test_a_text_beside_strict_tools_does_not_begin_as_a_thought() -> None:
    judge = offered(FORMATS["hermes"], never="<think>")
    assert judge.takes("a <think>") and judge.takes("<thin")
    assert not judge.takes("<think>a") and not judge.takes(" \n<think>")


@given(format=st.sampled_from(sorted(FORMATS)), scraps=st.lists(st.sampled_from(SCRAPS), max_size=20))
def test_whatever_the_grammar_takes_its_calls_of_strict_tools_fit(format: str, scraps: list[str]) -> None:
    judge = offered(FORMATS[format])
    head = FORMATS[format].written([ROME]).partition("Rome")[0]
    text = judge.grown([*scraps[:3], head, *scraps[3:]])
    shown, _ = parsed(format, text, tooling=STRICT)
    calls = [each for each in shown if isinstance(each, tuple) and each[0] == "weather"]
    for i, (_, arguments) in enumerate(calls):
        if i < len(calls) - 1 or judge.complete:
            given = json.loads(arguments)
            assert given.keys() == {"city"} and isinstance(given["city"], str)
        else:
            assert '{"city": "'.startswith(arguments) or arguments.startswith('{"city": "')

"""Custom tools: their texts as calls bring them, and grammars that hold these, in every format."""

from __future__ import annotations

import itertools
import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.runtime.sampling.grammars import MAX_BYTES
from mainstem.server.app import create_app
from mainstem.server.fields.tools import Tooling, custom_tool
from mainstem.server.parsing.custom import Form, NotHeld, TextInputs, as_arguments, by_characters
from mainstem.server.parsing.formats import FORMATS
from mainstem.server.parsing.output import Arguments, Call, NoCall, OutputParser, PlainText, Text, joined
from mainstem.server.parsing.repair import Repair
from mainstem.settings.server import ServerConfig
from tests.server.fields.test_tools import Judge, grammar

PATCH = Form(
    "lark",
    r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Add File: " name LF added+  // a new file
name: /(.+)/
added: "+" /(.*)/ LF -> line
%import common.LF
""",
)
ADDED = '*** Begin Patch\n*** Add File: a "b".py\n+print("h\\n")\n+\tx\n+\n*** End Patch'
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


class Arrives:
    """A parser that finds one call, whose arguments are what is fed."""

    def __init__(self) -> None:
        self._begun = False

    def feed(self, text: str) -> list[Call | Arguments]:
        call = [] if self._begun else [Call(0, "c", "patch")]
        self._begun = True
        return [*call, Arguments(0, text)]

    def close(self, cut: bool = False) -> list[Text]:
        return [Text("after")]


def strictly(written: str) -> list[str]:
    """What scanners show of arguments after each character."""
    repair = Repair()
    return [repair.feed(character) for character in written]


def shown(parts: list[str]) -> tuple[str, list[str]]:
    """The text that parts of arguments stand for, and what each part added; text after the call is not of it."""
    parser: OutputParser = TextInputs(Arrives(), frozenset(["patch"]))
    grown = []
    for part in parts:
        pieces = parser.feed(part)
        assert all(piece.custom for piece in pieces if isinstance(piece, Call | Arguments))
        grown.append("".join(piece.text for piece in pieces if isinstance(piece, Arguments)))
    *rest, last = parser.close()
    assert last == Text("after")
    return "".join([*grown, *(piece.text for piece in rest if isinstance(piece, Arguments))]), grown


# --- the text of a call -------------------------------------------------------------------------------------------


@given(text=TEXTS, ascii=st.booleans(), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_a_text_is_what_was_written_however_it_comes(text: str, ascii: bool, cuts: list[int]) -> None:
    written = json.dumps({"input": text}, ensure_ascii=ascii)
    places = [0, *sorted(min(cut, len(written)) for cut in cuts), len(written)]
    parts = strictly(written)
    assert shown(["".join(parts[begin:end]) for begin, end in itertools.pairwise(places)])[0] == text


def test_a_text_comes_with_each_character() -> None:
    written = as_arguments('a"b\n😀')
    whole, grown = shown(strictly(written))
    assert whole == 'a"b\n😀' == "".join(grown)
    assert [part for part in grown if part] == ["a", '"', "b", "\n", "😀"]
    assert [part for part in shown(strictly(json.dumps({"input": "é😀"})))[1] if part] == ["é", "😀"], (
        "a pair is one character"
    )


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"why": 1, "input": "x"}', "x"),
        ('{"input": 7}', '{"input": 7}'),
        ('{"input": "a\nb\tc"}', "a\nb\tc"),
        (r'{"input": "\d\é"}', r"\d\é"),
        (r'{"input": "\ud800 \udc00"}', "\ufffd \ufffd"),
        (r'{"input": "\ud83dx"}', "\ufffdx"),
        (r'{"input": "\uZZ"}', r"\uZZ"),
        ('{"input": "cut of', "cut of"),
        (r'{"input": "cut \u00', "cut "),
        ("{}", "{}"),
        ("", ""),
    ],
)
def test_what_is_not_written_as_it_should_be(written: str, text: str) -> None:
    parts = strictly(written)
    assert shown(["".join(parts)])[0] == text
    assert shown(parts)[0] == text


def test_more_than_a_text_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    shown([as_arguments("x")])
    assert not caplog.records
    assert shown(['{"input": "x", "why": "because"}'])[0] == "x"
    assert "because" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('"just a text"', "just a text"),
        ("'it\\'s\n'", "it's\n"),
        ("{'input': 'x',}", "x"),
        ('{"input": "say "hi""}', None),
        ("just a text", None),
    ],
)
def test_a_text_that_is_written_in_place_of_arguments(arguments: str, text: str | None) -> None:
    tooling = Tooling((custom_tool("patch", None, None),))
    written = f'<tool_call>{{"name": "patch", "arguments": {arguments}}}</tool_call>'
    pieces = joined([*(parser := FORMATS["hermes"].parser(tooling)).feed(written), *parser.close()])
    if text is None:
        assert NoCall(0) in pieces and pieces[-1] == Text(written)
    else:
        assert [piece.text for piece in pieces if isinstance(piece, Arguments)] == [text]
        assert not any(isinstance(piece, NoCall | Text) for piece in pieces)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30)
@given(text=TEXTS.filter(lambda text: "</" not in text))
def test_every_format_writes_calls_that_are_read_back(name: str, text: str) -> None:
    tooling = Tooling((custom_tool("patch", None, None), custom_tool("other", None, None)))
    parser = FORMATS[name].parser(tooling)
    written = FORMATS[name].written([("patch", as_arguments(text)), ("other", as_arguments("x"))])
    pieces = joined([piece for character in written for piece in parser.feed(character)] + [*parser.close()])
    calls = [piece for piece in pieces if isinstance(piece, Call)]
    assert [(call.name, call.custom) for call in calls] == [("patch", True), ("other", True)]
    given = {piece.number: piece.text for piece in pieces if isinstance(piece, Arguments)}
    assert given.get(0, "") == text
    assert given[1] == "x"


def test_calls_of_functions_are_left_as_they_are() -> None:
    assert TextInputs(PlainText(), frozenset(["x"])).feed("text") == [Text("text")]
    parser = TextInputs(Arrives(), frozenset(["other"]))
    assert parser.feed('{"input": "x"}') == [Call(0, "c", "patch"), Arguments(0, '{"input": "x"}')]


# --- grammars -----------------------------------------------------------------------------------------------------


def tooling(form: Form | None, **fields: Any) -> Tooling:
    return Tooling((custom_tool("patch", "Patches.", form),), **{"choice": "required", **fields})


@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_holds_the_text_in_every_format(name: str) -> None:
    format = FORMATS[name]
    judge = Judge(grammar(format, tooling(PATCH)))

    def takes(text: str) -> bool:
        return judge.takes(format.written([("patch", as_arguments(text))]))

    assert takes(ADDED)
    assert takes(ADDED + "\n")
    assert not takes("x")
    assert not takes(ADDED.replace("Add", "Added"))
    assert not takes(ADDED.replace("+print", "print"))
    assert not takes("*** Begin Patch\n*** End Patch")
    assert not judge.takes(format.written([("patch", '{"other": "x"}')]))


@pytest.mark.parametrize("name", FORMATS)
def test_a_regular_expression_holds_the_text_in_every_format(name: str) -> None:
    format = FORMATS[name]
    judge = Judge(grammar(format, tooling(Form("regex", r'^"[a-z/]+"\n(?P<sure>\d{2}|\\)$'))))
    for text, fits in [('"a/b"\n12', True), ('"a"\n\\', True), ('"a" 12', False), ('"a"\n1', False), ("", False)]:
        assert judge.takes(format.written([("patch", as_arguments(text))])) == fits, text


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize(
    ("expression", "fitting", "others"),
    [
        (r"[^\n]*", ["", 'a"\\\t'], ["\n"]),
        (r"(?s:.)x.", ["\nxa"], ["\nx\n"]),
        (r".+", ['"\\\x01é😀'], ["", "a\n"]),
        (r"\S\s\d\w", ['"\t1_', "\\\n2a"], ["  1a", "a-1a"]),
        (r"a{2,3}|b?|(c|)d*?", ["aa", "aaa", "b", "", "cdd"], ["a", "bb"]),
        (r"[]a-]\.\/", ["].​/".replace("\u200b", ""), "-./"], ["b./"]),
        (r"\x41é\u0022", ['Aé"'], ["aé"]),
        (r"(?:a|b)(?<n>c)", ["ac", "bc"], ["a", "c"]),
    ],
)
def test_expressions_by_characters(escaped: bool, expression: str, fitting: list[str], others: list[str]) -> None:
    judge = Judge(by_characters(Form("regex", expression).lark, escaped=escaped))
    for text in [*fitting, *others]:
        written = json.dumps(text, ensure_ascii=False)[1:-1] if escaped else text
        assert judge.takes(written) == (text in fitting), text


@pytest.mark.parametrize("escaped", [False, True])
def test_grammars_by_characters(escaped: bool) -> None:
    text = '// sums\nstart: sum ("," sum)~2 "END"i?\n?sum: A_B ["+" A_B]\nA_B: /[a"]+/i | WS\n%import common (WS, LF)'
    judge = Judge(by_characters(text.replace('["+" A_B]', '("+" A_B)?'), escaped=escaped))
    for written, fits in [('a,"a+A,a', True), ("a,a,\n \tend", True), ("a,a", False), ("a,a,b", False)]:
        spelled = json.dumps(written)[1:-1] if escaped else written
        assert judge.takes(spelled) == fits, written


@pytest.mark.parametrize(
    "lark",
    [
        'start: "a"\n%ignore " "',
        'start: %json {"type": "string"}',
        "start: /[a&&b]/",
        r"start: /\p{L}/",
        r"start: /a\b/",
        "start: /(?i:a)/",
        "start: /a^/",
        "start: /a/x",
        "start: A\nA: /a/ & ~/b/",
        'start: "a".."c"',
        "start: <|end|>",
        "start[lazy]: /a/",
        'start: terminal_a\nterminal_a: "a"',
        "%import common.C_COMMENT\nstart: C_COMMENT",
    ],
)
def test_what_cannot_be_held_is_named_and_logged(lark: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NotHeld):
        by_characters(lark, escaped=True)
    with caplog.at_level(logging.WARNING):
        judge = Judge(grammar(FORMATS["hermes"], tooling(Form("lark", lark))))
    assert "calls of the tool patch are not held to its lark" in caplog.text
    assert judge.takes(FORMATS["hermes"].written([("patch", as_arguments("any text"))])), "it is a text in any case"
    assert not judge.takes(FORMATS["hermes"].written([("patch", '{"input": 1}')]))


@pytest.mark.parametrize("lark", ["start: /{}/", 'start: "{}"'])
def test_a_grammar_that_is_too_long_character_by_character_is_not_held(lark: str) -> None:
    unit = "." if "/" in lark else "x"
    each = len(by_characters(lark.format(unit * 2), escaped=True)) - len(by_characters(lark.format(unit), escaped=True))
    fits = MAX_BYTES // each
    assert len(by_characters(lark.format(unit * (fits - 9)), escaped=True)) < MAX_BYTES
    with pytest.raises(NotHeld, match=str(MAX_BYTES)):
        by_characters(lark.format(unit * (fits * 2)), escaped=True)


# --- chats --------------------------------------------------------------------------------------------------------

PATH = "/v1/chat/completions"
TOOL = {"type": "custom", "custom": {"name": "patch", "description": "Patches."}}
HELD = {"type": "grammar", "grammar": {"syntax": PATCH.syntax, "definition": PATCH.definition}}
FUNCTION = {"type": "function", "function": {"name": "f"}}


def chat(engine: FakeEngine, messages: Any = None, **fields: Any) -> Any:
    server = TestClient(create_app(engine, ServerConfig(tool_call_parser="hermes")))
    given = messages or [{"role": "user", "content": "x"}]
    return server.post(PATH, json={"model": "fake", "messages": given, "tools": [TOOL], **fields})


def calls(text: str) -> str:
    return FORMATS["hermes"].written([("patch", as_arguments(text)), ("f", "{}")])


def test_what_a_chat_says_it_takes_back() -> None:
    message = chat(FakeEngine(lambda _: calls(ADDED)), tools=[TOOL, FUNCTION]).json()["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in message["tool_calls"]]
    engine = FakeEngine()
    response = chat(engine, [{"role": "user", "content": "x"}, message, *results], tools=[TOOL, FUNCTION])
    assert response.status_code == 200, response.text
    prompt = engine.tokenizer.decode(engine.streams[-1].request.tokens)
    assert as_arguments(ADDED) in prompt, "as the model wrote it"
    assert "Result of patch:\ndone" in prompt


def test_a_grammar_is_held_where_the_model_chooses_and_where_it_must_call() -> None:
    held = {"type": "custom", "custom": {"name": "patch", "format": HELD}}
    for fields in ({}, {"tool_choice": "required"}, {"tool_choice": {"type": "custom", "custom": {"name": "patch"}}}):
        engine = FakeEngine()
        assert chat(engine, tools=[held], **fields).status_code == 200
        (stream,) = engine.streams
        grammar = stream.request.params.grammar
        assert grammar is not None
        assert r"\\n" in grammar.text
        assert stream.request.params.grammar == grammar
        prompt = engine.tokenizer.decode(stream.request.tokens)
        assert "Lark" in prompt
        assert json.dumps(PATCH.definition)[1:-1] in prompt
    engine = FakeEngine()
    assert chat(engine).status_code == 200
    assert engine.streams[0].request.params.grammar is None, "any text is held to nothing where the model chooses"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{**TOOL, "function": {"name": "f"}}]}, "tools[0].function", "not a field of the type 'custom'"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.custom", "required"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "no"}}}, "tool_choice.custom.name", "patch"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format.grammar",
            "required",
        ),
        (
            {"tools": [{"type": "custom", "custom": {"name": "f", "format": {**HELD, "grammar": {"syntax": "ebnf"}}}}]},
            "tools[0].custom.format.grammar.syntax",
            "",
        ),
    ],
)
def test_bad_input_is_named(fields: dict[str, Any], param: str, message: str) -> None:
    response = chat(FakeEngine(), **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_the_path_of_a_schema_counts_tools_that_are_left_out() -> None:
    bad = {
        "type": "function",
        "function": {"name": "g", "strict": True, "parameters": {"properties": {"a": {"type": "x"}}}},
    }
    response = chat(FakeEngine(), tools=[{"type": "web_search"}, FUNCTION, bad])
    assert response.json()["error"]["param"] == "tools[2].function.parameters"


@pytest.mark.parametrize(("syntax", "definition"), [("lark", "start: ((("), ("lark", "begin: /a/"), ("regex", "(")])
def test_a_grammar_that_cannot_be_read_is_named(syntax: str, definition: str) -> None:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    response = chat(FakeEngine(), tools=[FUNCTION, {"type": "custom", "custom": {"name": "patch", "format": form}}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[1].custom.format.grammar.definition"

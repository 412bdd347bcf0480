"""JSON as models write it is read as what it was meant to be; what is strict stays as it is."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.server.parsing.repair import NoJson, Repair, repaired, strict

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    [
        'say "hi"',
        "it's",
        "a\nb\tc",
        "\\d+",
        "// no",
        "/* no */",
        "# no",
        ",}",
        "True",
        "\x00\x1f\x7f\u2028",
        "\U0001f600",
    ]
)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=4)


class Slips:
    """Writes values of JSON as a careless model does, each slip by chance."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def written(self, value: Any) -> str:
        if isinstance(value, dict):
            return self._listed(
                "{}", [f"{self._key(key)}{self._gap()}:{self.written(each)}" for key, each in value.items()]
            )
        if isinstance(value, list):
            return self._listed("[]", [*map(self.written, value)])
        if isinstance(value, str):
            return self._text(value)
        return self._random.choice([json.dumps(value), repr(value)])

    def _listed(self, around: str, parts: list[str]) -> str:
        comma = "," if parts and self._random.random() < 0.3 else ""
        inside = ",".join(self._gap() + part + self._gap() for part in parts)
        return around[0] + inside + comma + self._gap() + around[1]

    def _key(self, text: str) -> str:
        return text if text.isidentifier() and text.isascii() and self._random.random() < 0.3 else self._text(text)

    def _text(self, text: str) -> str:
        raw = json.dumps(text, ensure_ascii=False)
        for character in map(chr, range(32)):
            if self._random.random() < 0.5:
                raw = raw.replace(json.dumps(character)[1:-1], character) if "\\\\" not in raw else raw
        return self._random.choice([json.dumps(text), raw, repr(text), f"'{text}'" if text.isalnum() else raw])

    def _gap(self) -> str:
        return self._random.choice(["", "", " ", "\n", "\t ", "\u00a0", "/* why? */", " // it's\n", "# {\n"])


@given(value=OBJECTS, seed=st.integers(0, 1 << 32))
def test_slips_are_read_as_what_was_meant(value: dict[str, Any], seed: int) -> None:
    text = Slips(seed).written(value)
    made = repaired(text)
    assert json.loads(made) == value, text
    assert msgspec.json.decode(made) == value or "e" in text.lower(), "and others read it, too"


@given(value=OBJECTS, indent=st.sampled_from([None, 0, 3]), ascii=st.booleans(), separators=st.sampled_from(["", " "]))
def test_what_is_strict_stays_as_it_is(value: dict[str, Any], indent: int | None, ascii: bool, separators: str) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent, separators=(f"{separators},", f":{separators}"))
    repair, shown = Repair(), ""
    for at, character in enumerate(text):
        assert not repair.ended
        shown += repair.feed(character)
        assert text[: at + 1].startswith(shown), "and shows no more than there is"
    assert repair.ended and shown == text


@given(text=st.text("{}[]\"':,\\u0d8/*#tT1- \nax", max_size=24))
def test_whatever_is_taken_is_json(text: str) -> None:
    try:
        made = repaired(text)
    except NoJson:
        return
    json.loads(made)
    made.encode()


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1, 2, ], }', {"a": [1, 2]}),
        ('{"a": "x\ny\tz\r\x00"}', {"a": "x\ny\tz\r\x00"}),
        ("{'a': 'it\\'s \"b\"', \"c\": True, 'd': None}", {"a": 'it\'s "b"', "c": True, "d": None}),
        ("{a: 1, b_2: 2, $c: 3, 4: 4}", {"a": 1, "b_2": 2, "$c": 3, "4": 4}),
        ('{"a": 1, // why\n "b": /* this? */ 2 # yes\n}', {"a": 1, "b": 2}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        ('{"a": "\\ud83d", "\\ude00": 1}', {"a": "\ufffd", "\ufffd": 1}),
        ('{"a": "\\ud83d\\ud83d\\ude00\\ud83d\\n\\ud83d\\x41\\ud83d"}', {"a": "\ufffd\U0001f600\ufffd\n\ufffdA\ufffd"}),
        ('{"a": "\\d\\u12\\x1b\\xzz\\U0001f600\\Users"}', {"a": "\\d\\u12\x1b\\xzz\U0001f600\\Users"}),
        ('{"a": "one \\\n two"}', {"a": "one \\\n two"}),
        ('{"a": +1, "b": .5, "c": 2., "d": 0x1F, "e": 1_000, "f": NaN, "g": -Infinity, "h": undefined}',
         {"a": 1, "b": 0.5, "c": 2.0, "d": 31, "e": 1000, "f": None, "g": None, "h": None}),
        ('{"a":\u00a01\x0b}', {"a": 1}),
        ("'a \"text\"'", 'a "text"'),
        (" [ ] ", []),
    ],
)  # fmt: skip
def test_each_slip(text: str, meant: Any) -> None:
    assert json.loads(repaired(text)) == meant


@pytest.mark.parametrize(
    "text",
    ['{"a": Rome}', '{"a" 1}', "{,}", '{"a": 1,, "b": 2}', '{"a":}', '{"a"}', "[1}", "[,1]", '{"a": "say "hi""}', "7",
     "", '{"a": 1', '{"a": 1} x', '{"a": 1 "b": 2}', '{"a": 1 / 2}', '{"a": 1 /*', '"a', "{[]: 1}",
     '{"a": "b"+""}',
     '{"a": ²}'],
)  # fmt: skip
def test_what_has_no_one_meaning_is_refused(text: str) -> None:
    with pytest.raises(NoJson):
        repaired(text)


def test_a_text_shows_as_it_comes_and_a_comma_once_something_follows() -> None:
    repair = Repair()
    assert [repair.feed(each) for each in "{'a': '"] == ["{", '"', "a", '"', ":", "", ' "']
    assert [repair.feed(each) for each in "x\n"] == ["x", "\\n"]
    assert "".join(repair.feed(each) for each in "', ") == '"'
    assert repair.feed("'") == ', "'


def test_nesting_has_no_limit() -> None:
    text = '{"a":' * 50_000 + "[]" + "}" * 50_000
    assert repaired(text) == text


def test_numbers_and_constants() -> None:
    assert [strict(word) for word in ("1e999", "-0.0", "None", "TRUE")] == ["1e999", "-0.0", "null", "true"]
    assert [strict(word) for word in ("007", "-010", "+01", "00.50")] == ["7", "-10", "1", "0.5"], "a count stays one"

"""Custom tools: tools that take one text, in a form of their own, instead of arguments.

A model sees such a tool as a function with one parameter, `input`, and writes its calls as any others. `TextInputs`
extracts the text again, as it comes. `by_characters` puts the grammar of a text into the grammar of a call.

The grammar of a text is in the dialect of Lark that llguidance reads, or a regular expression of Rust.
Knows neither requests nor replies.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from mainstem.runtime.sampling.grammars import MAX_BYTES
from mainstem.server.parsing.output import Arguments, Call, NoCall, OutputParser, Piece, joined

log = logging.getLogger(__name__)

INPUT = "input"
"""The name of the one parameter."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a text.

    Args:
        syntax: of the definition.
        definition: a grammar whose first rule is `start`, or a regular expression for all of the text.
    """

    syntax: Literal["lark", "regex"]
    definition: str

    @property
    def lark(self) -> str:
        """The grammar in Lark."""
        if self.syntax == "lark":
            return self.definition
        return "start: /" + re.sub(r"(\\.)|([/\n])", _slashed, self.definition, flags=re.DOTALL) + "/"

    def described(self) -> str:
        """Returns the description that the model reads."""
        kind = "Lark grammar" if self.syntax == "lark" else "regular expression"
        return f"A text in the form of this {kind}:\n{self.definition}"


def _slashed(found: re.Match[str]) -> str:
    return found[1] or {"/": r"\/", "\n": r"\n"}[found[2]]


def parameters(form: Form | None) -> Mapping[str, Any]:
    """Returns the schema of the arguments of a tool that takes a text in a form, or any text."""
    described = {} if form is None else {"description": form.described()}
    text = {"type": "string", **described}
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


AROUND = (f'{{"{INPUT}": "', '"}')
"""The JSON before and after a text in arguments."""


def as_arguments(text: str) -> str:
    """Returns the arguments of a call with a text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


# ---------------------------------------------------------------- calls, as they come


class TextInputs:
    """An `OutputParser` that shows the calls of custom tools with their texts, as they come.

    Args:
        parser: finds the calls. Their arguments are strict JSON, as of `Repair`: no piece ends within an escape.
        names: of the custom tools.
    """

    def __init__(self, parser: OutputParser, names: frozenset[str]) -> None:
        self._parser, self._names = parser, names
        self._open: _Text | None = None  # of the call that grows

    def feed(self, text: str) -> Sequence[Piece]:
        """See `OutputParser.feed`."""
        return joined([*self._shown(self._parser.feed(text))])

    def close(self, cut: bool = False) -> Sequence[Piece]:
        """See `OutputParser.close`."""
        return joined([*self._shown(self._parser.close(cut)), *self._end()])

    def _shown(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if isinstance(piece, Arguments) and self._open is not None:
                yield from self._open.feed(piece.text)
                continue
            if isinstance(piece, NoCall):
                self._open = None  # its text follows
            yield from self._end()
            if isinstance(piece, Call) and piece.name in self._names:
                self._open = _Text(piece.number)
                piece = piece._replace(custom=True)
            yield piece

    def _end(self) -> Iterator[Piece]:
        ended, self._open = self._open, None
        if ended is not None:
            yield from ended.close()


_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_INSIDE = re.compile(r'(?:[^"\\]|\\.)*')


class _Text:
    """The text of one call, extracted from its arguments as they come.

    Arguments that do not begin with the text wait for the end of the call. If they have no text even then, the
    arguments themselves are the text.
    """

    def __init__(self, number: int) -> None:
        self._number, self._waits, self._inside, self._ended = number, "", False, False

    def feed(self, text: str) -> Iterator[Arguments]:
        self._waits += text
        if not self._inside and (begun := _BEGIN.match(self._waits)):
            self._inside, self._waits = True, self._waits[begun.end() :]
        if self._inside and not self._ended:
            yield from self._grow()

    def _grow(self) -> Iterator[Arguments]:
        whole = _INSIDE.match(self._waits)
        assert whole is not None, "the expression matches nothing, too"
        self._waits = self._waits[whole.end() :]
        self._ended = self._waits.startswith('"')
        if whole[0]:
            yield Arguments(self._number, json.loads(f'"{whole[0]}"'), custom=True)

    def close(self) -> Iterator[Arguments]:
        if self._ended and self._waits.split() not in ([], ['"'], ['"}'], ['"', "}"]):
            log.warning("a call of a custom tool has more than its text, which is not shown: %s", self._waits[:80])
        if not self._inside and (text := _found(self._waits)):
            yield Arguments(self._number, text, custom=True)


def _found(written: str) -> str:
    try:
        arguments = json.loads(written)
    except (ValueError, RecursionError):  # it was cut off
        return written
    return arguments[INPUT] if isinstance(arguments, dict) and isinstance(arguments.get(INPUT), str) else written


# ---------------------------------------------------------------- grammars

_SPECIAL = '"\\' + "".join(map(chr, range(32)))  # characters that a JSON string escapes
_PLAIN = r'[^"\\\x00-\x1f]'
_COMMON = {
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[a-fA-F0-9]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "NUMBER": r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+([eE][+-]?[0-9]+)?)",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[A-Za-z]",
    "WORD": r"[A-Za-z]+",
    "CNAME": r"[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
}
"""Terminals that grammars import."""

_TERMINAL = "terminal_"
_TOKENS = re.compile(
    r"(?P<comment>//[^\n]*)"
    r'|(?P<text>"(?:\\.|[^"\\\n])*")(?P<ignoring>i?)'
    r"|/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)"
    r"|%import\s+common(?P<imported>\.\w+(?:[ \t]*->[ \t]*\w+)?|[ \t]*\([^)]*\))"
    r"|(?P<times>~\s*\d+(?:\s*\.\.\s*\d+)?)|(?P<count>\{\d*,?\d*\})|(?P<alias>->\s*\w+)"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<syntax>[\s:|()*+?!]+)",
    re.DOTALL,
)


class NotHeld(Exception):
    """A grammar that cannot be spelled character by character."""


def by_characters(lark: str, *, escaped: bool) -> str:
    """Returns a grammar of the same texts, or of their JSON strings, each in one spelling.

    Its terminals are single characters. Those of the grammar itself would not do: a terminal takes as much as it can,
    and every escape begins alike, so that the one of a line break would be taken into the text before it.

    Args:
        lark: the grammar; any of its terminals may follow another without white space.
        escaped: whether it is inside a JSON string.

    Raises:
        NotHeld: a part of the grammar is not known here, or it becomes longer than grammars may be.
    """
    parts, at, characters = list[str](), 0, _Characters(escaped)
    while at < len(lark):
        token = _TOKENS.match(lark, at)
        if token is None:
            raise NotHeld(f"it has {lark[at : at + 12]!r}")
        parts.append(_token(token, characters))
        at = token.end()
    return "".join(parts)


@lru_cache(maxsize=256)
def held(name: str, form: Form, *, escaped: bool) -> str | None:
    """Returns the term that holds a text to a form, by `by_characters`; None: it cannot be held, which is logged once.

    Args:
        name: of the tool.
        form: of its text.
        escaped: see `by_characters`.
    """
    try:
        return f"%lark {{\n{by_characters(form.lark, escaped=escaped)}\n}}"
    except NotHeld as problem:
        log.warning("calls of the tool %s are not held to its %s: %s", name, form.syntax, problem)
        return None


def _token(found: re.Match[str], characters: _Characters) -> str:
    match found.lastgroup:
        case "comment" | "alias":
            return ""
        case "ignoring":
            return characters.text(found["text"], bool(found["ignoring"]))
        case "flags":
            return f"({_Expression(found['regex'], found['flags'], characters).rule()})"
        case "imported":
            return "".join(_import(each, characters) for each in found["imported"].strip(" .()").split(","))
        case "name":
            return _rule_name(found[0])
    return found[0]


def _rule_name(name: str) -> str:
    if name.startswith(_TERMINAL):
        raise NotHeld(f"it has a rule {name}")
    return name if name == name.lower() and name != name.upper() else _TERMINAL + name.lower()


def _import(name: str, characters: _Characters) -> str:
    name, _, alias = (part.strip() for part in name.partition("->"))
    if name not in _COMMON:
        raise NotHeld(f"it imports {name}")
    return f"\n{_rule_name(alias or name)}: {_Expression(_COMMON[name], '', characters).rule()}\n"


class _Characters:
    """How single characters of one grammar are spelled: as they are, or in a JSON string."""

    def __init__(self, escaped: bool) -> None:
        self._escaped, self._left = escaped, MAX_BYTES

    def text(self, quoted: str, ignoring: bool) -> str:
        """Returns the terms of a text, given in quotes; `ignoring`: its case does not matter."""
        try:
            text = json.loads(quoted)
        except ValueError:
            raise NotHeld(f"{quoted} has escapes that JSON does not have") from None
        return f"({' '.join(self.one(each, ignoring) for each in text) or _QUOTES})"

    def one(self, character: str, ignoring: bool) -> str:
        """Returns the term of a character."""
        return self._term(json.dumps(_escaped(character) if self._escaped else character) + ("i" if ignoring else ""))

    def any_of(self, text: str, ignoring: bool) -> str:
        """Returns the term of a class of characters, given as an expression."""
        try:
            members = [each for each in _SPECIAL if re.fullmatch(text, each, re.ASCII)] if self._escaped else []
        except re.error as error:
            raise NotHeld(f"an expression has {text}: {error}") from None
        plain = f"[{text}&&{_PLAIN}]" if members else text
        flag = "(?i)" if ignoring else ""
        if not members:
            return self._term(f"/{flag}{plain}/")
        special = "|".join(re.escape(_escaped(each)).replace("/", "[/]") for each in members)
        return self._term(f"(/{flag}{plain}/ | /{special}/)")

    def _term(self, term: str) -> str:
        self._left -= len(term)
        if self._left < 0:
            raise NotHeld(f"character by character, it has more than {MAX_BYTES} bytes")
        return term


_QUOTES = '""'


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_ATOMS = re.compile(
    r"(?P<group>\((?:\?(?P<flags>[a-z-]*):|\?P?<\w+>|(?!\?)))"
    r"|(?P<end>\))|(?P<or>\|)|(?P<times>(?:[*+?]|\{\d*,?\d*\})\??)|(?P<anchor>[\^$])"
    r"|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<dot>\.)"
    r"|(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.))|(?P<plain>[^(\[\\{])",
    re.DOTALL,
)
_KINDS = "dDwWsSnrtfv"


class _Expression:
    """A regular expression as a rule of single characters.

    Args:
        text: of the expression.
        flags: of it.
        characters: how they are spelled.
    """

    def __init__(self, text: str, flags: str, characters: _Characters) -> None:
        if set(flags) - {"i", "s"}:
            raise NotHeld(f"an expression has the flags {flags}")
        self._text, self._ignoring, self._characters = text, "i" in flags, characters
        self._lines = ["s" in flags]  # whether a dot matches line breaks, in each group

    def rule(self) -> str:
        """Returns the rule.

        Raises:
            NotHeld: the expression has what is not known here.
        """
        parts, at = ["("], 0
        while at < len(self._text):
            match = _ATOMS.match(self._text, at)
            if match is None:
                raise NotHeld(f"an expression has {self._text[at : at + 8]!r}")
            atom, at = self._atom(match), match.end()
            parts += [_QUOTES] if atom in ("|", ")") and parts[-1] in ("|", "(") else []
            parts.append(atom)
        parts += [_QUOTES] if parts[-1] in ("|", "(") else []
        return " ".join([*parts, ")"])

    def _atom(self, found: re.Match[str]) -> str:
        text, kind = found[0], found.lastgroup
        if kind == "anchor" and found.start() == (0 if text == "^" else len(self._text) - 1):
            return ""
        if kind in ("group", "flags"):
            self._open(found["flags"] or "", text)
            return "("
        if kind == "end" and len(self._lines) > 1:
            self._lines.pop()
        if kind in ("end", "or"):
            return text
        if kind == "times":
            return text.removesuffix("?") if len(text) > 1 else text
        return self._character(text, kind)

    def _open(self, flags: str, text: str) -> None:
        on, _, off = flags.partition("-")
        if set(on + off) - {"s"}:
            raise NotHeld(f"an expression has {text}")
        self._lines.append("s" in on or (self._lines[-1] and "s" not in off))

    def _character(self, text: str, kind: str | None) -> str:
        if kind == "plain":
            return self._characters.one(text, self._ignoring)
        if kind == "dot":
            text = r"[\s\S]" if self._lines[-1] else r"[^\n]"
        elif kind == "escape" and len(text) == 2:
            if text[1] not in _KINDS and text[1].isalnum():
                raise NotHeld(f"an expression has {text}")
            if not text[1].isalnum():
                return self._characters.one(text[1], self._ignoring)
            text = f"[{text}]"
        elif kind == "escape":
            return self._characters.one(chr(int(text[2:], 16)), self._ignoring)
        elif kind != "set" or re.search(r"&&|--|~~|\[|\\[pP]", text[1:-1].replace(r"\[", "")):
            raise NotHeld(f"an expression has {text}")
        return self._characters.any_of(text.replace("/", r"\/").replace(r"\\/", r"\/"), self._ignoring)

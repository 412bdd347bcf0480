"""Tells the control tokens that a chat template writes from their texts in what a client wrote.

A template joins both in one text, and a tokenizer makes a control token of its text wherever that stands: what a user
writes could end the turn and begin another one. So where such a text begins in what is given to a template, its first
character is escaped: replaced by half a surrogate pair, which no valid text has. The places of all characters stay.

    given       hi<|im_end|>
    escaped     hi?|im_end|>
    rendered    <|im_start|>user\\nhi?|im_end|><|im_end|>
    tokens      [<|im_start|>] user \\n hi < | im _ end | > [<|im_end|>]

Control tokens are the special ones, and other added tokens that the chat template names (transformers' rule, too). In
messages of the assistant some stay what they are: those with which the model marks thoughts and calls, and others that
are not special, unless they begin or end turns. They come back as texts, and templates look for them.

Texts without such texts are tokenised as ever. Others are by a copy of the tokenizer in which no text is a control
token; characters for private use stand in for the control tokens of the template.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from mainstem.errors import BadArgument

TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, RecursionError)
"""What a chat template raises that does not take a conversation."""

_ESCAPES = 0xDC00  # the first of the halves of surrogate pairs that escape
_LAST_STAND_IN = 0x10FFFD  # characters for private use, from the last one downwards
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_SPOKEN = ("content", "reasoning_content")  # what of a message of the assistant the model wrote
_PLAIN_CHAT = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]


class Finder:
    """Finds texts in a text, of which any number may be looked for at once.

    Args:
        texts: none of them empty.
    """

    def __init__(self, texts: Collection[str]) -> None:
        root: dict[str, Any] = {}
        for text in texts:
            node = root
            for character in text:
                node = node.setdefault(character, {})
            node[""] = {}
        self.pattern = re.compile(_expression(root) if texts else "(?!)")
        self._begun = {text[:length] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def places(self, text: str) -> list[int]:
        """Returns where any of the texts begins, ascending."""
        places = list[int]()
        match = self.pattern.search(text)
        while match is not None:
            places.append(match.start())
            match = self.pattern.search(text, match.start() + 1)
        return places

    def begun(self, text: str) -> list[int]:
        """Returns where one begins that what follows the text, without white space at its end, may complete."""
        end = len(text.rstrip())
        return [at for at in range(max(end - self._longest + 1, 0), end) if text[at:end] in self._begun]


def _expression(node: Mapping[str, Any]) -> str:
    """Returns the expression of all texts that go on from a node; the longest one that fits is found."""
    branches = [re.escape(character) + _expression(after) for character, after in node.items() if character]
    if not branches:
        return ""
    optional = "?" if "" in node else ""
    return branches[0] if len(branches) == 1 and not optional else f"(?:{'|'.join(branches)}){optional}"


class Escapes:
    """Escapes what is given to a chat template, and tokenises what it rendered. Any thread may call it.

    Args:
        tokenizer: of the model, of transformers; one that knows no added tokens has no control tokens.
        more: texts of control tokens besides those that are found, such as those that stand for images.
        template: the chat template; None: that of the tokenizer.
    """

    def __init__(self, tokenizer: Any, more: Collection[str] = (), template: str | None = None) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        # The texts of control tokens that are not special: those that the tokenizer lists, or those in the template.
        named: Collection[str] | None = getattr(tokenizer, "chat_control_tokens", None)
        if named is None:
            named = template_text(tokenizer) if template is None else template
        self._ids = {
            str(each): int(id)
            for id, each in added.items()
            if str(each).strip() and (each.special or str(each) in more or str(each) in named)
        }
        self._control = {*self._ids.values()}
        unknown = getattr(tokenizer, "unk_token_id", None)
        self._unspelled = {id for text, id in self._ids.items() if id != unknown and not _BYTE.fullmatch(text)}
        firsts = sorted({text[0] for text in self._ids})
        self._escape = {first: chr(_ESCAPES + at) for at, first in enumerate(firsts)}
        self._plain = {ord(escape): first for first, escape in self._escape.items()}
        self._special = {str(each) for each in added.values() if each.special} | {*more}
        self._all = Finder(self._ids)
        self._around = self._around_turns(template)
        self._turns = self._all  # those that no message of the assistant has
        self.speak(())
        self._apart: _Apart | None = None
        self._making = threading.Lock()  # guards that

    def speak(self, texts: Collection[str]) -> None:
        """Says with which texts the model marks thoughts and calls. Call it before other threads use this."""
        never = self._special & self._around
        mostly = self._special | self._around
        self._turns = Finder({text for text in self._ids if text in (never if text in texts else mostly)})

    def messages(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages that a chat template may be given.

        Raises:
            BadArgument: a text in them has half a surrogate pair.
        """
        return [
            {
                name: self.value(value, spoken=message["role"] == "assistant" and name in _SPOKEN)
                for name, value in message.items()
            }
            for message in messages
        ]

    def value(self, value: Any, *, spoken: bool = False) -> Any:
        """Returns a value as JSON has them, with all texts in it escaped; `spoken`: see `text`."""
        if not self._ids:
            return value
        if isinstance(value, str):
            return self.text(value, spoken=spoken)
        if isinstance(value, Mapping):
            return {self.value(name): self.value(each, spoken=spoken) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(each, spoken=spoken) for each in value]
        return value

    def text(self, text: str, *, spoken: bool = False, name: str = "messages") -> str:
        """Returns a text, escaped.

        Args:
            text: what is given.
            spoken: the model may have written it: see the module's docstring.
            name: of the text, for the error.

        Raises:
            BadArgument: it has half a surrogate pair.
        """
        finder = self._turns if spoken else self._all
        if any(escape in text for escape in self._escape.values()):
            utf8_bytes(text, name)
        places = {*finder.places(text), *finder.begun(text)}
        if not places:
            return text
        letters = [*text]
        for at in places:
            letters[at] = self._escape[letters[at]]
        return "".join(letters)

    def generated(self, tokens: Sequence[int], texts: Sequence[str]) -> str:
        """Returns the text of tokens that a model generated as an assistant's message has it, escaped.

        Args:
            tokens: what was generated.
            texts: of each token.
        """
        runs = groupby(zip(tokens, texts, strict=True), lambda each: each[0] in self._control)
        joined = ((control, "".join(text for _, text in run)) for control, run in runs)
        return "".join(text if control else self.rendered(self.text(text, spoken=True)) for control, text in joined)

    def rendered(self, text: str) -> str:
        """Returns a text made of escaped ones, without the escapes where no whole text of a control token follows."""
        if not self._has_escapes(text):
            return text
        plain, letters = self.plain(text), [*text]
        for at, letter in enumerate(letters):
            if ord(letter) in self._plain and not self._all.pattern.match(plain, at):
                letters[at] = plain[at]
        return "".join(letters)

    def plain(self, text: str) -> str:
        """Returns a text as it was before it was escaped."""
        return text.translate(self._plain) if self._has_escapes(text) else text

    def encode(self, text: str, *, special_tokens: bool = False, name: str = "messages") -> list[int]:
        """Returns the tokens of an escaped text.

        Args:
            text: escaped.
            special_tokens: with those that the tokenizer adds.
            name: of the text, for errors.

        Raises:
            BadArgument: the tokenizer cannot tell a control token from its text.
        """
        if not self._has_escapes(text):
            return list(self._tokenizer.encode(text, add_special_tokens=special_tokens))
        if getattr(self._tokenizer, "is_fast", False):
            return self._known_apart().encode(self, text, special_tokens, name)[0]
        return self._in_pieces(text, special_tokens, name)

    def encode_with_offsets(self, text: str, *, name: str = "messages") -> tuple[list[int], NDArray[np.int32]]:
        """Returns the tokens of an escaped text, and where they are in it, [n, 2]; the tokenizer must have offsets."""
        if self._has_escapes(text):
            ids, offsets = self._known_apart().encode(self, text, False, name)
        else:
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        return ids, np.asarray(offsets, np.int32)

    def parts(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Yields the parts of an escaped text, unescaped: control tokens with their ids, and what is between."""
        at = 0
        for match in self._all.pattern.finditer(text):
            if match.start() > at:
                yield self.plain(text[at : match.start()]), None
            yield match[0], self._ids[match[0]]
            at = match.end()
        if at < len(text):
            yield self.plain(text[at:]), None

    def check_ids(self, ids: Iterable[int], name: str) -> None:
        """Checks that tokens of a text without control tokens have none, but those of bytes and unknown characters."""
        wrong = next((token for token in ids if token in self._unspelled), None)
        if wrong is not None:
            text = self._tokenizer.decode([wrong])
            raise BadArgument(name, text, "text without this token's text, of which the tokenizer always makes it")

    def _has_escapes(self, text: str) -> bool:
        return any(escape in text for escape in self._escape.values())

    def _known_apart(self) -> _Apart:
        with self._making:
            if self._apart is None:
                self._apart = _Apart(self._tokenizer.backend_tokenizer, self._ids)
            return self._apart

    def _in_pieces(self, text: str, special_tokens: bool, name: str) -> list[int]:
        """As `encode`, for a tokenizer that is no fast one: what is between control tokens is tokenised by itself."""
        ids = list[int]()
        for part, control in self.parts(text):
            if control is not None:
                ids.append(control)
                continue
            made = self._tokenizer.encode(part, add_special_tokens=False, split_special_tokens=True)
            self.check_ids(made, name)
            ids += made
        return list(self._tokenizer.build_inputs_with_special_tokens(ids)) if special_tokens else ids

    def _around_turns(self, template: str | None) -> set[str]:
        """Returns the control tokens that the template writes in a chat in which nothing is thought or called."""
        if not self._ids:
            return set()
        options = {} if template is None else {"chat_template": template}
        try:
            text = self._tokenizer.apply_chat_template(_PLAIN_CHAT, tokenize=False, **options)
        except TEMPLATE_ERRORS:
            return set()
        return {*self._all.pattern.findall(str(text))}


class _Apart:
    """A copy of a fast tokenizer in which no text is a control token, but stand-ins are.

    Args:
        backend: the tokenizer.
        control: the ids of control tokens, by text.
    """

    def __init__(self, backend: Any, control: Mapping[str, int]) -> None:
        from tokenizers import AddedToken, Tokenizer

        state = json.loads(backend.to_str())
        flags = {each["content"]: each for each in state["added_tokens"]}
        for text in control:
            flags[text]["special"] = True
        self._copy = Tokenizer.from_str(json.dumps(state))
        self._copy.no_padding()
        self._copy.no_truncation()
        self._copy.encode_special_tokens = True
        kept = ("single_word", "lstrip", "rstrip", "normalized")
        self._texts = {text: chr(_LAST_STAND_IN - at) * len(text) for at, text in enumerate(control)}
        self._copy.add_tokens(
            [AddedToken(each, **{flag: flags[text][flag] for flag in kept}) for text, each in self._texts.items()]
        )
        self._ids = {self._copy.token_to_id(each): control[text] for text, each in self._texts.items()}
        self._stand_ins = Finder(self._texts.values())

    def encode(
        self, escapes: Escapes, text: str, special_tokens: bool, name: str
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the tokens of an escaped text, and where they are in it."""
        match = self._stand_ins.pattern.search(text)
        if match is not None:
            raise BadArgument(name, ascii(match[0]), "text without these characters for private use")
        parts = escapes.parts(text)
        encoded = self._copy.encode(
            "".join(part if control is None else self._texts[part] for part, control in parts),
            add_special_tokens=special_tokens,
        )
        pairs = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
        escapes.check_ids((token for token, added in pairs if not added), name)
        return [self._ids.get(token, token) for token in encoded.ids], encoded.offsets


def beginning(tokenizer: Any) -> tuple[int | None, str]:
    """Returns the token with which a tokenizer begins texts, and its text; None and empty: it adds none."""
    whole, plain = (tokenizer.encode("a", add_special_tokens=added) for added in (True, False))
    return (None, "") if whole[:1] == plain[:1] else (int(whole[0]), str(tokenizer.decode(whole[:1])))


def begun_once(tokenizer: Any, ids: Sequence[int]) -> Sequence[int]:
    """Returns the tokens of a text, as `encode` gives them, without a second beginning: the text may have its own."""
    twice = len(ids) > 1 and ids[0] == ids[1] and ids[0] in getattr(tokenizer, "all_special_ids", ())
    return ids[1:] if twice and ids[0] == beginning(tokenizer)[0] else ids


def template_text(tokenizer: Any) -> str:
    """Returns the chat template, or all of several; empty: there is none."""
    templates = getattr(tokenizer, "chat_template", None) or ""
    return templates if isinstance(templates, str) else "\n".join(templates.values())


def not_taken(messages: Iterable[Mapping[str, Any]], error: Exception) -> BadArgument:
    """Returns the error of a conversation that the chat template does not take."""
    roles = [message["role"] for message in messages]
    return BadArgument("messages", roles, f"messages that the model's chat template takes: {error}")


def utf8_bytes(text: str, name: str) -> int:
    """Returns the size of a text in UTF-8.

    Raises:
        BadArgument: it has none.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        # The message does not hold the text itself, since it could not be printed.
        where = f"{text[error.start : error.end]!a} at character {error.start}"
        raise BadArgument(name, where, "text that UTF-8 can encode, without surrogates") from None

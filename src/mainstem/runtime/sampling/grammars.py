"""Grammars: which tokens may come next in an answer that must have a given form.

    Grammar -- compile, once a form --> CompiledGrammar -- matcher, one a sequence --> Matcher
    (text)                              (shared, cached)                               follows, accept

llguidance parses the bytes of tokens; it is imported with the first grammar. The tokens that end an answer are no part
of a grammar: a `Matcher` says where the answer may end, and the `LogitsProcessor` which tokens end it.

The tokens after the one that was just accepted are found on a thread, while the scheduler and the next forward run.
Those at the beginning are found when the grammar is compiled, once for all answers. If the grammar leaves one text
to go on with, its tokens are known at once: the next forward can compute them together.

This module knows tokenizers. It does not know requests, logits or schedulers.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.imports import needs
from mainstem.runtime.text.escapes import Finder
from mainstem.settings.engine import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 18
"""The longest text of a grammar, in bytes of UTF-8."""

_CACHED = 64  # compiled grammars; those that requests still use live on without the cache
_STATES = 50_000  # of the lexer of one grammar, 1 or 2 KB each; the other limits are llguidance's own
_THREADS = 4  # that look for tokens; they hold no interpreter lock meanwhile
_SHOWN, _SAID = 60, 240  # characters in an error: of a grammar, of what llguidance says of it
_END = "<|end of the answer|>"
_REPLACEMENT = "\ufffd"
_SAMPLE = '{"Zoë": [1, -2.5e3, "a b\\n"],\n  "x": null}'  # a tokenizer must give its bytes back


class NextTokens(NamedTuple):
    """The tokens that may follow those so far.

    Args:
        tokens: bool [at least the tokens of the tokenizer]: those that go on with the grammar.
        may_end: whether the grammar is complete.
        problem: why it cannot be followed any further; empty: it can.
    """

    tokens: NDArray[np.bool_]
    may_end: bool
    problem: str = ""


class Matcher:
    """Follows one answer through its grammar. It serves one thread at a time.

    Args:
        beginning: the grammar's state before the first token; shared, so it is copied before it changes.
        end: see `_Vocabulary`.
        first: what may follow there.
        threads: look for what follows.

    Attributes:
        forced: tokens that must come next, one after another, as the tokenizer spells them. They are likely rather than
            certain: after some of them, the rest of their text may be spelled in another way.
    """

    def __init__(self, beginning: LLMatcher, end: int, first: NextTokens, threads: ThreadPoolExecutor) -> None:
        self._beginning, self._end, self._threads = beginning, end, threads
        self._state: LLMatcher | None = None
        self._following: NextTokens | Future[NextTokens] = first
        self.forced: tuple[int, ...] = ()

    def following(self) -> NextTokens:
        """Returns what may follow; waits until it is known."""
        if isinstance(self._following, Future):
            self._following = self._following.result()
        return self._following

    def accept(self, token: int) -> bool:
        """Goes on with a token that may follow; returns whether any may follow that one, by the grammar alone."""
        if self._state is None:
            self._state = self._beginning.deep_copy()
        self.following()  # which reads the state: it must not change meanwhile
        self.forced = ()
        if self._state.consume_token(token) and not self._state.is_stopped():
            self.forced = tuple(self._state.compute_ff_tokens())
            self._following = self._threads.submit(_following, self._state, self._end)
            return True
        self._following = _ended(self._state)
        return False


def _following(state: LLMatcher, end: int) -> NextTokens:
    try:
        bits = state.compute_bitmask()
    except BaseException as error:  # noqa: BLE001  # a panic of Rust is no Exception; it must not end the engine
        return NextTokens(np.zeros(0, np.bool_), False, f"{type(error).__name__}: {error}")
    if state.is_error():
        return _ended(state)
    tokens = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)
    tokens[end] = False  # a token with this id may have logits
    return NextTokens(tokens, state.is_accepting())


def _ended(state: LLMatcher) -> NextTokens:
    return NextTokens(np.zeros(0, np.bool_), not state.is_error() and state.is_accepting(), state.get_error())


class CompiledGrammar:
    """A grammar that answers can follow. Any number of threads may make matchers."""

    def __init__(self, beginning: LLMatcher, end: int, first: NextTokens, threads: ThreadPoolExecutor) -> None:
        self._arguments = beginning, end, first, threads

    def matcher(self) -> Matcher:
        """Returns what follows one answer, from its beginning."""
        return Matcher(*self._arguments)


class Grammars:
    """Compiles grammars for one tokenizer. Callable from any thread.

    Args:
        tokenizer: a fast one of Hugging Face transformers, or any whose `decode` joins the texts of single tokens.
        vocab_size: the upper bound of token ids, exclusive.

    Attributes:
        compiled: number of grammars compiled since the start.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.compiled = 0
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()  # guards the cache and the count
        self._vocabulary: _Vocabulary | None = None
        self._building = threading.Lock()  # guards that
        self._threads = ThreadPoolExecutor(_THREADS, "mainstem-grammar")  # starts none before the first grammar

    def compile(self, grammar: Grammar, name: str = "grammar") -> CompiledGrammar:
        """Returns a compiled grammar, from the cache if it is there. Takes up to seconds for a long one.

        Args:
            grammar: what to compile.
            name: how errors call it.

        Raises:
            BadArgument: it is too long or too complex, or cannot be read, or no token can begin it.
            UnsupportedModel: llguidance is missing, or it is unknown which bytes the model's tokens stand for.
        """
        with self._lock:
            if (found := self._cache.get(grammar)) is not None:
                self._cache.move_to_end(grammar)
                return found
        made = self._compile(grammar, name)
        with self._lock:
            self.compiled += 1
            self._cache[grammar] = made
            while len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return made

    def problem(self, grammar: Grammar) -> str:
        """Returns why a grammar cannot be read; empty: it can. Quick: it is not compiled for the model's tokens.

        Raises:
            UnsupportedModel: llguidance is missing.
        """
        with needs("llguidance", _HINT, UnsupportedModel):
            from llguidance import LLMatcher
        try:
            return LLMatcher.validate_grammar(_spelled(grammar), None)
        except (ValueError, TypeError, RecursionError) as error:
            return str(error) or type(error).__name__

    def close(self) -> None:
        """Ends the threads. No matcher may be used after that."""
        self._threads.shutdown()

    def _compile(self, grammar: Grammar, name: str) -> CompiledGrammar:
        shown = grammar.text if len(grammar.text) <= _SHOWN else grammar.text[:_SHOWN] + "…"
        try:
            size = len(grammar.text.encode())
        except UnicodeEncodeError:
            raise BadArgument(name, ascii(shown), "text that UTF-8 can encode, without surrogates") from None
        if size > MAX_BYTES:
            raise BadArgument(name, shown, f"at most {MAX_BYTES} bytes, not {size}")
        vocabulary = self._known_vocabulary()
        from llguidance import LLMatcher

        words = _WORDS[grammar.kind]
        try:
            beginning = LLMatcher(vocabulary.tokens, _spelled(grammar), log_level=0, limits=_limits())
        except (ValueError, TypeError, RecursionError) as error:
            raise BadArgument(name, shown, f"{words}: {_brief(str(error))}") from error
        first = _ended(beginning) if beginning.is_error() else _following(beginning, vocabulary.end)
        if first.problem:
            raise BadArgument(name, shown, f"{words}: {_brief(first.problem)}")
        if not (first.may_end or first.tokens.any()):
            raise BadArgument(name, shown, f"{words} that the model's tokens can begin")
        return CompiledGrammar(beginning, vocabulary.end, first, self._threads)

    def _known_vocabulary(self) -> _Vocabulary:
        with self._building:
            if self._vocabulary is None:
                with needs("llguidance", _HINT, UnsupportedModel):
                    self._vocabulary = _Vocabulary.of(self._tokenizer, self._vocab_size)
            return self._vocabulary


_HINT = "a grammar needs llguidance: pip install 'mainstem[server]'"

_WORDS = {
    "json_object": "a JSON object",
    "json_schema": "a JSON schema that can be followed",
    "regex": "a regular expression",
    "choice": "a list of at least one text",
    "lark": "a grammar of Lark or GBNF",
}


def _spelled(grammar: Grammar) -> str:
    """Returns a grammar as llguidance reads it.

    Raises:
        ValueError: it cannot be read.
    """
    from llguidance import LLMatcher, grammar_from

    match grammar.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema(spaced('{"type": "object"}'))
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(spaced(grammar.text))
        case "regex":
            return LLMatcher.grammar_from_regex(_ascii_classes(grammar.text))
        case "choice":
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, _texts(grammar))))
        case "lark":
            return grammar_from("grammar", grammar.text)


_SPACES = r"[ ]{0,2}|\r?\n[ \t]{0,60}"


def spaced(schema: str) -> str:
    """Returns a JSON schema whose values have two blanks between their tokens, or a line break and an indent, at most.

    A weak model may write white space for as long as it may, and nothing else.
    """
    inside = schema.lstrip()
    if not inside.startswith("{"):
        return schema
    options = json.dumps({"x-guidance": {"whitespace_pattern": _SPACES}})[:-1]
    rest = inside[1:].lstrip()
    return f"{options}{'' if rest.startswith('}') else ', '}{rest}"


_ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}


def _ascii_classes(regex: str) -> str:
    """Returns a regular expression in which digits and letters are those of ASCII, as in patterns of JSON schemas."""
    return re.sub(r"\\(.)", lambda escaped: _ASCII.get(escaped[1], escaped[0]), regex, flags=re.DOTALL)


def _texts(grammar: Grammar) -> Sequence[str]:
    texts = json.loads(grammar.text)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("it is none")
    return texts


def _brief(problem: str) -> str:
    if problem.startswith("NoExtensionBias"):  # llguidance's word for it
        return "nothing fits it"
    line = " ".join(problem.removesuffix("<non-verbose/>").split())
    return line if len(line) <= _SAID else line[:_SAID] + "…"


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=_STATES, verbose_errors=False)


# ---------------------------------------------------------------- tokenizers


class _Vocabulary(NamedTuple):
    """A tokenizer for llguidance: the bytes of each token, and one token more, which ends an answer.

    It must have such a token. Those of the model are not used for it: some have none, and requests may ignore it.
    """

    tokens: LLTokenizer
    end: int

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int) -> Self:
        """Makes it from a tokenizer.

        Raises:
            UnsupportedModel: it is unknown which bytes the tokens stand for.
        """
        from llguidance import LLTokenizer, TokenizerWrapper

        backend = copy(getattr(tokenizer, "backend_tokenizer", None))
        if backend is None:
            return cls(LLTokenizer(TokenizerWrapper(_Decoded(tokenizer, vocab_size))), vocab_size)
        backend.no_padding()
        backend.no_truncation()
        backend.add_special_tokens([_END])
        try:
            end = backend.token_to_id(_END)
            known = LLTokenizer(backend.to_str(), eos_token=end, slices=[])
            read = known.decode_bytes(tokenizer.encode(_SAMPLE, add_special_tokens=False)).decode(errors="replace")
        except (ValueError, RuntimeError) as error:
            raise UnsupportedModel(f"the tokenizer does not say which bytes its tokens stand for: {error}") from error
        if read.removeprefix(" ") != _SAMPLE:
            raise UnsupportedModel(f"the bytes of the tokenizer's tokens are unknown: {_SAMPLE!r} becomes {read!r}")
        return cls(LLTokenizer(TokenizerWrapper(_Spelled(known))), end)


class _Spelled:
    """The tokens of a fast tokenizer, as llguidance takes them: special ones are no text.

    llguidance itself makes special tokens of their texts where a grammar forces these, and then follows nothing else.

    Args:
        known: the same tokens, as llguidance reads the tokenizer.
    """

    bos_token_id = None

    def __init__(self, known: LLTokenizer) -> None:
        self._known = known
        self.eos_token_id = known.eos_token
        self.tokens = [known.decode_bytes([token]) for token in range(known.vocab_size)]
        self.special_token_ids = [token for token in range(known.vocab_size) if known.is_special_token(token)]
        texts = [self.tokens[token].decode(errors="replace") for token in self.special_token_ids]
        self._special = Finder({text for text in texts if len(text) > 1})

    def __call__(self, text: bytes) -> list[int]:
        """Returns the tokens of a text that a grammar forces, cut inside of each text of a special token."""
        whole = text.decode(errors="replace")
        cuts = [0, *(place + 1 for place in self._special.places(whole)), len(whole)]
        pieces = [whole[begin:end] for begin, end in itertools.pairwise(cuts)]
        return [token for piece in pieces for token in self._known.tokenize_str(piece)]


class _Decoded:
    """The tokens of a tokenizer that only decodes, as llguidance takes them.

    Raises:
        UnsupportedModel: the text of several tokens is not that of each, one after another.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        known = min(vocab_size, len(tokenizer)) if hasattr(tokenizer, "__len__") else vocab_size
        texts = [str(tokenizer.decode([token])) for token in range(known)]
        if "".join(texts) != tokenizer.decode([*range(known)]):
            raise UnsupportedModel("a grammar needs a fast tokenizer, or one that joins the texts of its tokens")
        self.eos_token_id = vocab_size
        self.tokens = [b"" if _REPLACEMENT in text else text.encode() for text in texts]
        self.tokens += [b""] * (vocab_size - known) + [_END.encode()]
        special = {*getattr(tokenizer, "all_special_ids", ()), vocab_size}
        self.special_token_ids = sorted(special)
        self._by_bytes = {text: token for token, text in enumerate(self.tokens) if text and token not in special}
        self._longest = max(map(len, self._by_bytes), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Returns the tokens of a text that a grammar forces, the longest first, as far as there are any."""
        made, at = list[int](), 0
        while at < len(text):
            lengths = range(min(self._longest, len(text) - at), 0, -1)
            length = next((length for length in lengths if text[at : at + length] in self._by_bytes), None)
            if length is None:
                break
            made.append(self._by_bytes[text[at : at + length]])
            at += length
        return made

"""Grammars: what follows is what a slow search finds, and whatever is sampled under a grammar conforms to it."""

from __future__ import annotations

import functools
import json
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import regex
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs.byte_pairs import byte_pairs, bytes_of
from rigs.fake_engine import FakeTokenizer
from rigs.families import THOUGHT, tokenizer_of
from rigs.ghost import EOS, VOCAB, GhostTokenizer
from rigs.letters import Letters
from rigs.scheduler import Bench

from bench.tiny_models import tiny
from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.request import Completion, Request
from mainstem.runtime.sampling import grammars
from mainstem.runtime.sampling.grammars import Grammars, spaced
from mainstem.runtime.sampling.processor import LogitsProcessor
from mainstem.runtime.sampling.sampler import Sampler, sample, verify
from mainstem.settings.engine import EngineConfig, Grammar, SamplingParams
from tests.house.test_imports import fail

WIDTH = 400  # of logits: more than the tokenizer has tokens, as models round them up
NOTHING = np.zeros(1, np.int32)


@functools.cache
def small() -> Grammars:
    return Grammars(byte_pairs(), WIDTH)


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def choice(*texts: str) -> Grammar:
    return Grammar("choice", json.dumps(texts))


def rules(grammar: Grammar | str, ends: set[int], **params: Any) -> LogitsProcessor:
    """Returns the rules of a request with a grammar, or with a regular expression."""
    grammar = Grammar("regex", grammar) if isinstance(grammar, str) else grammar
    return LogitsProcessor(SamplingParams(grammar=grammar, **params), NOTHING, ends, small().compile(grammar))


def answer(
    grammar: Grammar | str, seed: int, most: int = 300, logits: torch.Tensor | None = None, **params: Any
) -> tuple[str, str | None]:
    """Returns the text that random logits, or these, give under a grammar, and why it ended; None: it did not."""
    tokenizer = byte_pairs()
    eos = tokenizer.eos_token_id
    params = {"temperature": 1.0, "seed": seed, "max_tokens": most, **params}
    made = SamplingParams(**params)
    sampler = Sampler(made, random.Random(0), rules(grammar, {eos}, **params))
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    while len(tokens) < most:
        given = torch.randn(1, WIDTH, generator=generator) * 2 if logits is None else logits
        (chosen,) = sample(given, [sampler])
        if not isinstance(chosen, tuple):
            return tokenizer.decode(tokens), chosen
        if chosen[0] == eos:
            return tokenizer.decode(tokens), "eos"
        tokens.append(chosen[0])
        if sampler.ended is not None or chosen[0] in made.stop_token_ids:
            return tokenizer.decode(tokens), sampler.ended
    return tokenizer.decode(tokens), None


# ---------------------------------------------------------------- what follows

ATOMS = st.sampled_from(["a", "b", "c", "ab", "[a-d]", "[^a-y]", " ", "\\d"])
REGEXES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2,3}"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("pattern", "taken", "refused"),
    [
        (r"\d", "07", "٣a"),
        (r"[\d.]", "7.", "٣a"),
        (r"[^\d]", "aé٣", "5"),
        (r"\D", "aé٣", "5"),
        (r"\w", "aZ_7", "é٣-"),
        (r"\W", "é٣-", "a_7"),
        (r"\\d|x", "x", "7"),
        (r"\x64", "d", "7"),
    ],
)
def test_digits_and_letters_of_expressions_are_those_of_ascii(pattern: str, taken: str, refused: str) -> None:
    """As in patterns of schemas, which are written in ECMAScript: the classes of Rust have those of all scripts."""

    def takes(character: str) -> bool:
        matcher = small().compile(Grammar("regex", pattern)).matcher()
        for token in byte_pairs().encode(character, add_special_tokens=False):
            if not matcher.following().tokens[token]:
                return False
            matcher.accept(token)
        return matcher.following().may_end

    assert [*filter(takes, taken + refused)] == [*taken]


@given(pattern=REGEXES, seed=st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_what_follows_is_what_trying_each_token_finds(pattern: str, seed: int) -> None:
    rng = random.Random(seed)
    matcher = small().compile(Grammar("regex", pattern)).matcher()
    known, text = len(byte_pairs()), ""
    spelled = [bytes_of(token) for token in range(known)]
    whole = regex.compile(pattern)
    for _ in range(8):
        following = matcher.following()
        assert following.may_end == bool(whole.fullmatch(text))
        assert not following.tokens[known:].any()
        allowed = np.flatnonzero(following.tokens).tolist()
        found = [
            token
            for token, added in enumerate(spelled)
            if added and added.isascii() and whole.fullmatch(text + added.decode(), partial=True)
        ]
        plain = [token for token in allowed if spelled[token].isascii()]
        forced = len(plain) == 1  # where the text is, it is spelled as the tokenizer does
        assert plain == found or (forced and {*plain} < {*found}), (pattern, text)
        if not plain:
            break
        token = rng.choice(plain)
        text += spelled[token].decode()
        if not matcher.accept(token):
            assert whole.fullmatch(text) and not any(
                whole.fullmatch(text + chr(each), partial=True) for each in range(128)
            )
            break


def test_a_character_of_several_tokens_is_followed_byte_by_byte() -> None:
    matcher = small().compile(choice("ø", "ñ")).matcher()
    singles = {bytes_of(token): token for token in range(len(byte_pairs())) if len(bytes_of(token)) == 1}
    assert np.flatnonzero(matcher.following().tokens).tolist() == [singles[b"\xc3"]]
    matcher.accept(singles[b"\xc3"])
    assert {*np.flatnonzero(matcher.following().tokens).tolist()} == {singles[b"\xb8"], singles[b"\xb1"]}
    assert not matcher.accept(singles[b"\xb1"])
    assert matcher.following().may_end


def test_matchers_of_one_grammar_are_independent() -> None:
    made = small().compile(choice("ab", "cd"))
    first, second = made.matcher(), made.matcher()
    (token,) = byte_pairs().encode("ab")
    assert not first.accept(token) and first.following().may_end
    assert not second.following().may_end and second.following().tokens[token]
    assert not made.matcher().following().may_end


# ---------------------------------------------------------------- whole answers

SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(
        [
            {"type": "integer", "minimum": -5, "maximum": 120},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "maxLength": 4},
            {"enum": ["one", 2, None, "drei"]},
            {"const": {"a": [1, "b"]}},
        ]
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(
            lambda each: {
                "type": "object",
                "properties": {f"k{at}": one for at, one in enumerate(each)},
                "required": [f"k{at}" for at in range(0, len(each), 2)],
                "additionalProperties": False,
            }
        ),
        inner.map(lambda one: {"type": "array", "items": one, "minItems": 1, "maxItems": 2}),
        st.lists(inner, min_size=2, max_size=2).map(lambda both: {"anyOf": both}),
    ),
    max_leaves=5,
)


def conforms(value: Any, wanted: dict[str, Any]) -> bool:
    """Whether a value is of a schema, for the keywords of `SCHEMAS`."""
    if "enum" in wanted:
        return value in wanted["enum"] and not isinstance(value, bool)
    if "const" in wanted:
        return bool(value == wanted["const"])
    if "anyOf" in wanted:
        return any(conforms(value, each) for each in wanted["anyOf"])
    match wanted["type"]:
        case "integer":
            return type(value) is int and wanted["minimum"] <= value <= wanted["maximum"]
        case "boolean":
            return type(value) is bool
        case "null":
            return value is None
        case "string":
            return isinstance(value, str) and len(value) <= wanted["maxLength"]
        case "array":
            return isinstance(value, list) and 1 <= len(value) <= 2 and all(conforms(v, wanted["items"]) for v in value)
    known = wanted["properties"]
    fits = isinstance(value, dict) and {*wanted["required"]} <= value.keys() <= known.keys()
    return fits and all(conforms(value[name], known[name]) for name in value)


@given(wanted=SCHEMAS, seed=st.integers(0, 999))
@settings(max_examples=80, deadline=None)
def test_answers_to_a_schema_conform_to_it(wanted: dict[str, Any], seed: int) -> None:
    text, ended = answer(schema(wanted), seed, 2000)
    assert ended in ("stop", "eos"), (text[-80:], ended)
    assert conforms(json.loads(text), wanted), text


@given(seed=st.integers(0, 999))
@settings(max_examples=8, deadline=None)
def test_answers_in_json_are_objects(seed: int) -> None:
    text, ended = answer(Grammar("json_object"), seed, 3000)
    assert ended is None or isinstance(json.loads(text), dict)


@given(pattern=REGEXES, seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_answers_to_a_regular_expression_match_it(pattern: str, seed: int) -> None:
    text, ended = answer(pattern, seed)
    assert regex.fullmatch(pattern, text, partial=ended is None)


@given(texts=st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_answers_to_a_choice_are_one_of_it(texts: list[str], seed: int) -> None:
    text, ended = answer(choice(*texts), seed)
    assert ended in ("stop", "eos") and text in texts


@pytest.mark.parametrize("grammar", [Grammar("json_object"), schema({"type": "object"}), schema({})])
@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"a": [1, 2], "b": {}}', True),
        ('{"a":[1,2],"b":{}}', True),
        (json.dumps({"a": [1, {"b": 2}]}, indent=4), True),
        (json.dumps({"a": [1, {"b": 2}]}, indent="\t").replace("\n", "\r\n"), True),
        ('{ "a" : 1 }', True),
        ('{  "a":1}', True),
        ('{   "a":1}', False),
        ('{"a":\n\n1}', False),
        ('{"a":' + "\n" + " " * 61 + "1}", False),
    ],
)
def test_white_space_of_json_has_an_end(grammar: Grammar, text: str, taken: bool) -> None:
    matcher = small().compile(grammar).matcher()
    followed = True
    for token in byte_pairs().encode(text, add_special_tokens=False):
        followed = followed and bool(matcher.following().tokens[token])
        if followed:
            matcher.accept(token)
    assert followed == taken


@pytest.mark.parametrize(
    "text", ["{}", ' {"type": "object"}', "true", '{"x-guidance": {"whitespace_flexible": false}}']
)
def test_a_schema_that_says_something_of_white_space_keeps_it(text: str) -> None:
    made = spaced(text)
    if text == "true":
        assert made == text
    else:
        assert json.loads(made) == {"x-guidance": {"whitespace_pattern": ANY}, **json.loads(text)}


def test_every_choice_can_be_made() -> None:
    texts = ["a", "ab", "abc", "b\n\"'\\/", "über", "{x}"]
    assert {answer(choice(*texts), seed)[0] for seed in range(120)} == {*texts}


@pytest.mark.parametrize(
    "text",
    [
        'start: "ab" inner\ninner: "(" inner ")" | "x"',
        'root ::= "ab" inner\ninner ::= "(" inner ")" | "x"',
    ],
    ids=["lark", "gbnf"],
)
def test_context_free_grammars(text: str) -> None:
    for seed in range(10):
        made, ended = answer(Grammar("lark", text), seed)
        depth = made.count("(")
        assert (made, ended) == ("ab" + "(" * depth + "x" + ")" * depth, "stop")


def test_a_grammar_may_hold_a_schema() -> None:
    inner = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                        "additionalProperties": False})  # fmt: skip
    text, _ = answer(Grammar("lark", f'start: "<call>" args "</call>"\nargs: %json {inner}'), 3, 2000)
    assert text.startswith("<call>") and text.endswith("</call>")
    assert isinstance(json.loads(text[6:-7])["a"], bool)


@pytest.mark.parametrize("pattern", ["^(?:ab|cd)$", "(?:ab|cd)$", "^(?:ab|cd)"])
def test_anchors_around_a_regular_expression_say_nothing_new(pattern: str) -> None:
    assert {answer(pattern, seed)[0] for seed in range(20)} == {"ab", "cd"}


def test_an_escaped_anchor_is_a_character() -> None:
    assert answer(r"ab\$", 1) == ("ab$", "stop")
    assert answer(r"ab\\$", 1) == ("ab\\", "stop")


# ---------------------------------------------------------------- ends, and other rules


def test_the_end_is_allowed_exactly_where_the_grammar_is_complete() -> None:
    """With logits that always prefer the end, an answer is the shortest; with `ignore_eos` it is as long as it goes."""
    logits = torch.zeros(1, WIDTH)
    logits[0, [byte_pairs().eos_token_id, *byte_pairs().encode("a")]] = torch.tensor([5.0, 2.0])
    shortest = functools.partial(answer, "a{2,5}", 0, 20, logits, temperature=0)
    assert shortest() == ("aa", "eos")
    assert shortest(min_tokens=4) == ("aaaa", "eos")
    assert shortest(min_tokens=9) == ("aaaaa", "stop")
    assert shortest(ignore_eos=True) == ("aaaaa", "stop")


def test_a_stop_token_may_end_the_answer_where_it_is_complete() -> None:
    user = byte_pairs().convert_tokens_to_ids("<user>")
    processor = rules("a{2,5}", {0}, stop_token_ids=(user,))
    (a,) = byte_pairs().encode("a")
    for complete in (False, False, True):
        logits = torch.zeros(WIDTH)
        processor.apply(logits)
        assert logits[user].isfinite().item() is complete
        processor.accept(a)


def test_a_token_that_ends_answers_is_no_text_of_a_grammar() -> None:
    (a,), (b,) = byte_pairs().encode("a"), byte_pairs().encode("b")
    for ignores in (False, True):
        processor = rules("[ab]{2,4}", {a}, ignore_eos=ignores)
        for complete in (False, False, True):
            logits = torch.zeros(WIDTH)
            processor.apply(logits)
            assert logits[a].isfinite().item() is (complete and not ignores)
            processor.accept(b)


@pytest.mark.parametrize("more", [WIDTH - len(byte_pairs()), -20])
def test_logits_beyond_the_tokenizer_are_never_sampled_and_there_may_be_fewer(more: int) -> None:
    logits = torch.zeros(len(byte_pairs()) + more)
    logits[len(byte_pairs()) :] = 9.0
    rules("[ab]*", {0}).apply(logits)
    assert logits[len(byte_pairs()) :].isinf().all() and logits.isfinite().any()


def test_a_ban_gives_way_to_a_grammar_that_lets_nothing_else_follow() -> None:
    ids = {text: byte_pairs().encode(text) for text in ("a", "b")}
    banned = {"bad_words": (tuple(ids["a"]),)}
    assert {answer("[ab]", seed, **banned)[0] for seed in range(9)} == {"b"}
    assert answer("a", 0, **banned) == ("a", "stop")
    stops = {"stop_token_ids": tuple(ids["a"]), "min_tokens": 5}
    assert answer("ba", 0, **stops)[0] == "ba"


def test_penalties_and_biases_stay_within_the_grammar() -> None:
    (a,), (b,) = byte_pairs().encode("a"), byte_pairs().encode("b")
    rules = {"logit_bias": ((a, 50.0), (byte_pairs().encode("z")[0], 90.0)), "presence_penalty": 2.0}
    assert answer("[ab]{3}", 0, **rules)[0] == "aaa"
    assert answer("[ab]{3}", 0, logit_bias=((b, 50.0),))[0] == "bbb"


def test_allowed_tokens_and_a_grammar_exclude_each_other() -> None:
    with pytest.raises(BadArgument, match="allowed_token_ids"):
        SamplingParams(grammar=Grammar("json_object"), allowed_token_ids=(1,))


def test_a_grammar_that_becomes_too_complex_ends_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from llguidance import LLParserLimits

    monkeypatch.setattr(grammars, "_limits", lambda: LLParserLimits(max_lexer_states=40, verbose_errors=False))
    made = Grammars(byte_pairs(), WIDTH).compile(Grammar("regex", "(?:a|b)*a(?:a|b){12}c"))
    params = SamplingParams(grammar=Grammar("regex", "unused"), temperature=1.0, seed=1)
    sampler = Sampler(params, random.Random(0), LogitsProcessor(params, NOTHING, {0}, made))
    for _ in range(500):
        sample(torch.zeros(1, WIDTH), [sampler])
        if sampler.ended:
            break
    assert sampler.ended == "length"


# ---------------------------------------------------------------- drafts


@given(seed=st.integers(0, 99), wrong=st.integers(0, 8))
@settings(max_examples=30, deadline=None)
def test_a_draft_changes_nothing(seed: int, wrong: int) -> None:
    """Logits depend on the position alone, so the draft may be anything."""
    grammar, steps = "(?:ab|cd){1,3}x", 9
    logits = torch.randn(steps, WIDTH, generator=torch.Generator().manual_seed(seed))

    def sampler() -> Sampler:
        params: dict[str, Any] = {"temperature": 1.0, "seed": seed}
        return Sampler(SamplingParams(**params), random.Random(0), rules(grammar, {0}, **params))

    one = sampler()
    wanted: list[Any] = []
    while one.ended is None and len(wanted) < steps and (not wanted or wanted[-1][0] != 0):
        wanted += sample(logits[len(wanted)].unsqueeze(0), [one])
    draft = np.array([token for token, _ in wanted] + [5] * steps, np.int32)[: steps - 1]
    draft[wrong:] = 3
    (made,) = verify(logits, [sampler()], [draft])
    expected = wanted[: wrong + 1] + ([one.ended] if one.ended and wrong >= len(wanted) - 1 else [])
    assert made[: len(expected)] == expected
    assert len(made) == len(expected) or wanted[-1][0] == 0


# ---------------------------------------------------------------- the scheduler

WORDS = Grammar("regex", "(?:[A-F]{2,4}[P-Z]){3,12}")


@pytest.mark.parametrize("pages", [24, 200], ids=["preempted", "drafted"])
def test_answers_in_batches_are_those_that_are_computed_alone(pages: int) -> None:
    bench = Bench(pages, max_running=8, token_budget=9, draft_tokens=32)
    for _ in range(2):
        for seed in range(8):
            bench.add([seed % 3] * 6 + [seed], grammar=WORDS, max_tokens=30, temperature=1.0, seed=seed % 4)
        bench.run()
        bench.assert_complete()
    totals = bench.scheduler.totals
    assert totals.accepted_tokens > 20 if pages > 24 else totals.preemptions > 0
    assert totals.grammar_requests == 16
    for id in bench.requests:
        tokens, text, reason = bench.output(id)
        text = text.replace(GhostTokenizer().decode([EOS]), "")
        cut = reason == "length" and len(tokens) == 30
        assert regex.fullmatch(WORDS.text, text, partial=cut)
    bench.check_at_rest()


SKELETON = Grammar("regex", "ABCDEFG[I-K]LMNOPQRSTU[V-X]{2}ABCDEFG")


def test_text_that_a_grammar_forces_is_computed_in_few_forwards() -> None:
    made = {}
    for draft_tokens in (0, 7, 40):
        bench = Bench(draft_tokens=draft_tokens, cache=False)
        id = bench.add([1, 2, 3], grammar=SKELETON, max_tokens=60, temperature=1.0, seed=3, logprobs=2)
        bench.run_and_flush()
        logprobs = [entry for delta in bench.deltas[id] for entry in delta.logprobs]
        made[draft_tokens] = len(bench.ghost.forwards), bench.output(id), logprobs
    steps = [made[draft_tokens][0] for draft_tokens in (0, 7, 40)]
    length = len(made[0][1][0])
    assert length == 27 and steps[0] == length
    assert steps[1] <= 10 and steps[2] <= 6, steps
    assert made[0][1:] == made[7][1:] == made[40][1:]


def test_forced_text_and_guesses_share_the_drafts_of_a_step() -> None:
    bench = Bench(draft_tokens=6)
    for seed in range(3):
        bench.add([seed] * 5, grammar=SKELETON, max_tokens=60, temperature=1.0, seed=seed)
    bench.run_and_flush()
    assert max(max(forward) for forward in bench.ghost.forwards if len(forward) == 3 and max(forward) <= 4) == 3
    totals = bench.scheduler.totals
    assert totals.accepted_tokens == 45, "what is forced is always right here"
    assert totals.drafted_tokens - totals.accepted_tokens <= 6, "but for the last token, after which nothing comes"


def test_an_answer_given_before_goes_on_where_nothing_is_forced() -> None:
    bench, steps = Bench(draft_tokens=40), []
    for _ in range(2):
        before = len(bench.ghost.forwards)
        bench.add([1, 2, 3], grammar=SKELETON, max_tokens=60, temperature=1.0, seed=3)
        bench.run()
        steps.append(len(bench.ghost.forwards) - before)
    bench.assert_complete()
    assert steps[1] < steps[0], "the tree knows what came in the gaps, too"
    bench.check_at_rest()


def test_an_answer_ends_with_the_last_token_of_its_grammar() -> None:
    bench = Bench()
    id = bench.one([1, 2, 3], grammar=Grammar("regex", "[A-F]{5}"), max_tokens=5, ignore_eos=True)
    tokens, text, reason = bench.output(id)
    assert (len(tokens), len(text), reason) == (5, 5, "stop"), "also with max_tokens of exactly that"
    assert bench.deltas[id][-1].tokens == tokens[-1:], "it is no event of its own"
    id = bench.one([1, 2, 3], grammar=Grammar("regex", "[A-F]{5}"), max_tokens=4)
    assert bench.output(id)[2] == "length"
    id = bench.one([1, 2, 3], grammar=Grammar("regex", "[A-F]{5}"), max_tokens=0)
    assert bench.output(id)[0] == ()


def test_where_no_token_can_follow_the_answer_ends() -> None:
    """The ghost has no small letters after p, so that nothing follows an `a`."""
    bench = Bench()
    id = bench.add([1, 2, 3], grammar=Grammar("regex", "[A-C]a(?:z+)"), max_tokens=9)
    bench.run()
    tokens, text, reason = bench.output(id)
    assert (len(tokens), text[1:], reason) == (2, "a", "length")
    id = bench.add([1, 2, 3], grammar=Grammar("regex", "[A-C]a(?:z+)?"), max_tokens=9, ignore_eos=True)
    bench.run()
    assert bench.output(id)[1:] == (text, "stop")
    bench.check_at_rest()


def test_a_stop_text_ends_an_answer_inside_its_grammar() -> None:
    bench = Bench()
    id = bench.one([4], grammar=Grammar("regex", "A{20}"), max_tokens=20, stop=("AAA",))
    assert bench.output(id) == ((0, 0, 0), "", "stop")


def test_a_scheduler_refuses_a_grammar_that_does_not_compile() -> None:
    bench = Bench()
    for nothing in (schema({"$ref": "#"}), Grammar("regex", r"[^\s\S]")):
        with pytest.raises(BadArgument, match="nothing fits it"):
            small().compile(nothing)
    with pytest.raises(BadArgument, match="a regular expression") as caught:
        bench.add([1], grammar=Grammar("regex", "(A"))
    assert caught.value.name == "grammar"
    assert not bench.scheduler.busy


# ---------------------------------------------------------------- an engine

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}


def tiny_engine(**config: Any) -> Engine:
    tokenizer = byte_pairs()
    model = tiny("llama", vocab_size=WIDTH, eos_token_id=tokenizer.eos_token_id, max_position_embeddings=512)
    loaded = LoadedModel(model, tokenizer, "tiny", torch.float32, 512)
    return Engine(loaded, EngineConfig(pages=200, page_size=8, **config))


@pytest.fixture(scope="module")
def engine(one_thread: None) -> Any:
    with tiny_engine() as made:
        yield made


def ask(engine: Engine, count: int = 1, **params: Any) -> list[Completion]:
    tokens = np.array(engine.tokenizer.encode("yes no maybe"))
    given = {"max_tokens": 400, "temperature": 1.0, **params}
    streams = [engine.submit(Request(tokens, SamplingParams(seed=seed, **given))) for seed in range(count)]
    return [stream.result(60) for stream in streams]


def test_an_engine_follows_grammars_of_many_requests_at_once(engine: Engine) -> None:
    compiled = engine.stats().compiled_grammars
    for completion in ask(engine, 8, grammar=schema(PERSON)):
        assert completion.finish_reason == "stop"
        assert conforms(json.loads(completion.text), {**PERSON, "required": ["name", "count"]})
    assert engine.stats().compiled_grammars - compiled <= 1
    assert {completion.text for completion in ask(engine, 12, grammar=choice("yes", "no"))} == {"yes", "no"}


def test_an_engine_drafts_what_a_schema_forces_and_answers_alike(engine: Engine) -> None:
    given: dict[str, Any] = {"grammar": schema(PERSON), "logprobs": 2}
    before = engine.stats().totals
    drafted, after = ask(engine, 4, **given), engine.stats().totals
    kept, tried = after.accepted_tokens - before.accepted_tokens, after.drafted_tokens - before.drafted_tokens
    assert kept > 20 and kept > 0.6 * tried
    with tiny_engine(draft_tokens=0) as other:
        plain = ask(other, 4, **given)
        assert other.stats().totals.drafted_tokens == 0
    for one, two in zip(drafted, plain, strict=True):
        assert (one.tokens, one.text) == (two.tokens, two.text)
        logprobs = ([entry.logprob for entry in each.logprobs] for each in (one, two))
        assert next(logprobs) == pytest.approx(next(logprobs), abs=1e-4)


def test_an_answer_goes_on_within_its_grammar_from_what_another_engine_said(engine: Engine) -> None:
    for seed, grammar in enumerate([Grammar("regex", "(foo|bar){2} [0-9]{1,8}"), schema(PERSON)]):
        params = SamplingParams(max_tokens=80, temperature=1.0, seed=seed, grammar=grammar)
        request = Request(np.arange(1, 20, dtype=np.int32), params)
        whole = engine.submit(request).result()
        for length in range(0, len(whole.tokens) + 1, 2):
            again = engine.submit(replace(request, said=whole.tokens[:length])).result()
            assert (again.tokens, again.text, again.finish_reason) == (whole.tokens, whole.text, whole.finish_reason)


def test_an_engine_refuses_what_does_not_compile(engine: Engine) -> None:
    with pytest.raises(BadArgument, match=r"^grammar = "):
        ask(engine, grammar=BAD[0])


# ---------------------------------------------------------------- compiling

BAD = [
    schema({"type": "nonsense"}),
    schema({"type": "string", "minLength": 5, "maxLength": 2}),
    schema({"$ref": "https://example.com/schema"}),
    schema({"$ref": "#/$defs/absent"}),
    schema({"type": "object", "unheardOf": 1, "if": {"type": "string"}}),
    schema([1]),
    Grammar("json_schema", "{"),
    Grammar("json_schema", "7"),
    Grammar("regex", "(a"),
    Grammar("regex", "(?<=a)b"),
    Grammar("regex", "[^\\s\\S]"),
    Grammar("choice", "[]"),
    Grammar("choice", "[1]"),
    Grammar("choice", '"a"'),
    Grammar("lark", "nonsense"),
    Grammar("lark", "start: other"),
    Grammar("lark", "root ::= ("),
    Grammar("regex", "\ud800"),
    Grammar("regex", "a" * (grammars.MAX_BYTES + 1)),
]


@pytest.mark.parametrize("grammar", BAD, ids=lambda grammar: f"{grammar.kind}-{grammar.text[:24]!a}")
def test_what_does_not_compile_is_refused_by_name(grammar: Grammar) -> None:
    with pytest.raises(BadArgument, match=r"^guided_x = ") as caught:
        small().compile(grammar, "guided_x")
    assert caught.value.name == "guided_x"
    assert len(str(caught.value)) < 1000


HEAVY = [
    Grammar("regex", "(?:a{1000}){1000}"),
    Grammar("regex", "(?:(?:(?:a{1,99}){1,99}){1,99}){1,99}"),
    Grammar("regex", "(?:a|b)*a(?:a|b){5000}c"),
    Grammar("regex", "(?:.*a){200}" + "|".join(f"(?:.*{chr(97 + at % 26)}){{{at}}}" for at in range(90))),
    Grammar("regex", "(" * 5000 + "a" + ")" * 5000),
    schema({"type": "array", "minItems": 10**9, "items": {"type": "string", "pattern": "^(a|b){1,5000}$"}}),
    schema({"type": "object", "properties": {f"k{at}": {"type": "string", "maxLength": at} for at in range(3000)}}),
    schema({"allOf": [{"anyOf": [{"properties": {f"p{at}{i}": {"const": i}}} for i in range(9)]} for at in range(9)]}),
    Grammar("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    Grammar("lark", "start: " + "(" * 3000 + '"a"' + ")" * 3000),
    Grammar("lark", "start: " + " ".join(["x?"] * 3000) + '\nx: "a" | x x'),
    Grammar("choice", json.dumps([f"{at:05d}" * 4 for at in range(9000)])),
]
HEAVY_OR_SLOW = [pytest.param(each, marks=[pytest.mark.slow] * (at in (0, 6))) for at, each in enumerate(HEAVY)]


@pytest.mark.parametrize("grammar", HEAVY_OR_SLOW, ids=lambda grammar: f"{grammar.kind}-{grammar.text[:24]}")
def test_heavy_grammars_are_compiled_or_refused_and_never_crash(grammar: Grammar) -> None:
    """The timeout of a test is their bound; each takes a few seconds at most."""
    try:
        made = small().compile(grammar)
    except BadArgument:
        return
    matcher = made.matcher()
    for _ in range(3):
        tokens = np.flatnonzero(matcher.following().tokens)
        if not len(tokens) or not matcher.accept(int(tokens[-1])):
            break


def test_a_grammar_is_compiled_once_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_CACHED", 2)
    made = Grammars(byte_pairs(), WIDTH)
    one, two, three = (Grammar("regex", text) for text in "abc")
    first = made.compile(one)
    assert made.compile(one) is first and made.compiled == 1
    made.compile(two)
    made.compile(one)  # is now the newest
    made.compile(three)
    assert made.compile(one) is first
    assert made.compiled == 3
    made.compile(two)
    assert made.compiled == 4


def test_threads_compile_at_once() -> None:
    made, results = Grammars(byte_pairs(), WIDTH), []

    def work(number: int) -> None:
        results.extend(
            (at, made.compile(choice("abcdef"[at:])).matcher().following().tokens.tobytes()) for at in range(6)
        )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 48 and len({*results}) == 6
    made.close()


# ---------------------------------------------------------------- tokenizers


@pytest.mark.parametrize(
    ("tokenizer", "size", "pattern", "wanted"),
    [
        (GhostTokenizer(), VOCAB, "[BD]", [1, 3]),
        (Letters(), 97, "[\u4e05\u4e06]|x", [5, 6]),
        (FakeTokenizer(), 256, '[{"]é?', [34, 123]),
    ],
    ids=["ghost", "letters", "bytes"],
)
def test_a_tokenizer_that_only_decodes(tokenizer: Any, size: int, pattern: str, wanted: list[int]) -> None:
    following = Grammars(tokenizer, size).compile(Grammar("regex", pattern)).matcher().following()
    assert np.flatnonzero(following.tokens).tolist() == wanted


def pieces() -> Any:
    """A tokenizer as SentencePiece makes them: blanks are part of words, and rare characters are bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    known = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefghijklmnopqrstuvwxyz", "▁"]
    known += [*'{}[]":,.-0123456789Z\n', "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    vocabulary = {text: token for token, text in enumerate(known)}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def test_a_tokenizer_with_blanks_in_its_words_and_bytes_for_rare_characters() -> None:
    tokenizer = pieces()
    made = Grammars(tokenizer, len(tokenizer))
    q = {tokenizer.encode("q")[-1], tokenizer.convert_tokens_to_ids("<0x71>")}
    for text, *others in (["ab ab"], ["é ab"], ["xab é"], ["ab ab", "q"], ["é ab", "q"]):
        matcher, tokens = made.compile(choice(text, *others)).matcher(), list[int]()
        while not tokens or matcher.accept(tokens[-1]):
            tokens.append(
                next(token for token in np.flatnonzero(matcher.following().tokens).tolist() if token not in q)
            )
        assert tokenizer.decode(tokenizer.encode("z") + tokens) == "z" + text


def with_special() -> Any:
    """As `pieces`, with special tokens, and tokens that were added to it and are not special."""
    from tokenizers import AddedToken

    made = pieces()
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    made.add_tokens([AddedToken(text, normalized=False) for text in THOUGHT])
    return made


class Decoded:
    """Only decodes, and has special tokens."""

    all_special_ids = (256, 257)

    def __len__(self) -> int:
        return 258

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        shown = (token for token in tokens if not (skip_special_tokens and token in self.all_special_ids))
        return b"".join(self._bytes(token) for token in shown).decode(errors="replace")

    def _bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else (b"<s>", b"</s>")[token - 256]


SPECIAL: dict[str, Callable[[], Any]] = {
    "byte_pairs": byte_pairs,
    "pieces": with_special,
    "decoded": Decoded,
    **{name: functools.partial(tokenizer_of, name) for name in ("qwen", "llama3", "mistral", "deepseek")},
}


@functools.cache
def special(name: str) -> tuple[Any, Grammars]:
    tokenizer = SPECIAL[name]()
    return tokenizer, Grammars(tokenizer, len(tokenizer) + 3)


def written(name: str, grammar: Grammar, seed: int, forced: bool) -> str:
    """Returns a text of a grammar, of which no token is special; `forced`: what is forced is followed as it is."""
    (tokenizer, made), rng = special(name), random.Random(seed)
    matcher, tokens = made.compile(grammar).matcher(), list[int]()
    goes_on = True
    while goes_on and not matcher.following().may_end:
        allowed = np.flatnonzero(matcher.following().tokens).tolist()
        next_ones = list(matcher.forced) if forced and matcher.forced else [rng.choice(allowed)]
        for token in next_ones:
            assert token not in tokenizer.all_special_ids and matcher.following().tokens[token]
            tokens.append(token)
            goes_on = matcher.accept(token)
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text.removeprefix(" ") if name == "pieces" else text


@pytest.mark.parametrize(
    ("name", "forced"),
    [
        pytest.param(name, forced, marks=[] if forced == (name in ("qwen", "decoded")) else pytest.mark.slow)
        for name in sorted(SPECIAL)
        for forced in (False, True)
    ],
)
def test_the_text_of_a_special_token_is_text_in_a_grammar(name: str, forced: bool) -> None:
    tokenizer = special(name)[0]
    known = getattr(tokenizer, "added_tokens_decoder", None)
    texts = ["<s>", "</s>"] if known is None else [str(each) for each in known.values()]
    texts = [text for text in texts if "<0x" not in text]
    assert len(texts) >= 2
    for text in texts:
        for said in (text, f"a{text}", f"{text}a", f"ab {text}{text}{text[:-1]} {text[1:]}"):
            grammars = [choice(said), Grammar("regex", regex.escape(said)), schema({"const": said})]
            for seed, grammar in enumerate([*grammars, Grammar("lark", f"start: {json.dumps(said)}")]):
                made = written(name, grammar, seed, forced)
                assert (json.loads(made) if grammar.kind == "json_schema" else made) == said
    several = [f"open {text}" for text in texts]
    assert {written(name, choice(*several), seed, forced) for seed in range(40)} <= {*several}


@pytest.mark.parametrize("name", ["byte_pairs", "pieces", "qwen"])
def test_a_grammar_of_a_clients_own_names_special_tokens(name: str) -> None:
    tokenizer, made = special(name)
    id = tokenizer.eos_token_id
    for term in (f"<[{id}]>", tokenizer.eos_token):
        matcher = made.compile(Grammar("lark", f'start: {term} "{tokenizer.eos_token}"')).matcher()
        assert np.flatnonzero(matcher.following().tokens).tolist() == [id]
        assert matcher.accept(id) and not matcher.following().tokens[id]


class Spaced(GhostTokenizer):
    """Joins words by blanks, so that the text of a token depends on where it is."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: object) -> str:
        return " ".join(f"w{token}" for token in token_ids)


def words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{token}": token for token in range(40)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("make", [Spaced, words])
def test_a_tokenizer_whose_bytes_are_unknown_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedModel):
        Grammars(make(), VOCAB).compile(Grammar("json_object"))


def test_without_llguidance_a_grammar_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, "llguidance", ModuleNotFoundError("No module named 'llguidance'", name="llguidance"))
    with pytest.raises(UnsupportedModel, match=r"^a grammar needs llguidance: pip install 'mainstem\[server\]'$"):
        Grammars(byte_pairs(), WIDTH).compile(Grammar("json_object"))

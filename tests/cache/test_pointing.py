"""Typed tokens end to end: a model that reads back the points and boxes that it wrote, over a cache of their bins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rigs.pointing import PREFIX, Answer, Box, Kind, Point, PointingEngine, PointingModel, Token, key_of

from mainstem.cache.keys import BINS, Coordinate, Size

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = PointingModel()
QUESTION: tuple[Token, ...] = (5, 9, 5, 30)
KINDS: tuple[Kind, ...] = ("text", "point", "point", "box", "text", "point", "point", "box", "text")
NEXT = 1 / (BINS - 1)  # from the middle of one bin to that of the next


def photo(seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (7, 12), dtype=np.uint8)


def plain(tokens: tuple[Token, ...], kinds: tuple[Kind, ...] = KINDS, image: int = 0) -> Answer:
    return PointingEngine(MODEL, cached=False).answer(photo(image), tokens, kinds)


def same(one: Answer, other: Answer) -> None:
    assert one.tokens == other.tokens
    torch.testing.assert_close(one.logits, other.logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_was_generated_is_found_again_and_goes_on_as_without_a_cache(page_size: int) -> None:
    engine = PointingEngine(MODEL, page_size=page_size)
    first = engine.answer(photo(), QUESTION, KINDS)
    same(first, plain(QUESTION))
    assert {type(token) for token in first.tokens} == {int, Point, Box}
    assert len(set(first.tokens)) > 5  # it does not repeat itself
    more = (*QUESTION, *first.tokens, 7)
    second = engine.answer(photo(), more, KINDS)
    assert (first.hit, second.hit) == (0, PREFIX + len(more) - 2)  # all but the last token, and the new one
    same(second, plain(more))
    engine.cache.check()


def test_generated_values_are_the_middles_of_their_bins() -> None:
    points = [token for token in plain(QUESTION).tokens if isinstance(token, Point)]
    boxes = [token for token in plain(QUESTION).tokens if isinstance(token, Box)]
    assert points and all(key_of(token) == Coordinate(round(token.at * (BINS - 1))) for token in points)
    assert boxes and all(isinstance(key_of(token), Size) for token in boxes)
    for token in boxes:
        again = key_of(Box(token.width * 2 ** (0.4 * 10 * NEXT) if token.width < 1 else 1.0, token.height))
        assert again == key_of(token)


@pytest.mark.parametrize("kind", [Point, Box])
def test_values_of_one_bin_share_the_kv_of_the_first(kind: type[Point] | type[Box]) -> None:
    """The rule of bins: the answer is that of the value that came first, less than a bin away."""

    def value(bins: float) -> Token:
        return Point(0.5 + bins * NEXT) if kind is Point else Box(2 ** (-5 + bins * 10 * NEXT), 0.25)

    base = round(0.5 * (BINS - 1)) - 0.5 * (BINS - 1)  # from the value to the middle of its bin
    near, nearby, beyond = value(base), value(base + 0.4), value(base + 1)
    asked = {token: (*QUESTION, token, 8) for token in (near, nearby, beyond)}
    assert key_of(near) == key_of(nearby) != key_of(beyond)
    engine = PointingEngine(MODEL, page_size=1)
    engine.answer(photo(), asked[near], KINDS)
    shared = engine.answer(photo(), asked[nearby], KINDS)
    assert shared.hit == PREFIX + len(asked[nearby]) - 1
    same(shared, plain(asked[near]))
    off = (plain(asked[nearby], ("text",)).logits - plain(asked[near], ("text",)).logits).abs().max()
    assert 1e-5 < off < 0.05  # the bin's width, as logits: the difference that the rule takes
    apart = engine.answer(photo(), asked[beyond], KINDS)
    assert apart.hit == PREFIX + len(QUESTION)
    same(apart, plain(asked[beyond]))


def test_a_point_a_box_and_a_text_of_one_bin_are_three_tokens() -> None:
    engine = PointingEngine(MODEL, page_size=1)
    tokens: tuple[Token, ...] = (3, Point(3 * NEXT), Box(2 ** (10 * 3 * NEXT - 10), 2**-10))
    assert key_of(tokens[1]) == Coordinate(3) and key_of(tokens[2]) == Size(3, 0)
    hits = [engine.answer(photo(), (*QUESTION, token, 8), KINDS).hit for token in (*tokens, *tokens)]
    assert hits == [0, *[PREFIX + len(QUESTION)] * 2, *[PREFIX + len(QUESTION) + 1] * 3]
    for token in tokens:
        same(engine.answer(photo(), (*QUESTION, token, 8), KINDS), plain((*QUESTION, token, 8)))


def test_another_image_shares_nothing_not_even_the_token_before_it() -> None:
    engine = PointingEngine(MODEL, page_size=1)
    engine.answer(photo(), QUESTION, KINDS)
    other = engine.answer(photo(1), QUESTION, KINDS)
    assert other.hit == 0
    same(other, plain(QUESTION, image=1))
    again = engine.answer(photo().copy(), QUESTION, KINDS)
    assert again.hit == PREFIX + len(QUESTION) - 1
    same(again, plain(QUESTION))
    assert engine.cache.tree.stats().namespaces == 2

from typing import Any

import numpy as np
import pytest

from mainstem.errors import BadArgument, BadTokens
from mainstem.runtime.request import ImageInput, Prefix, Request
from mainstem.settings.engine import SamplingParams


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", (-1, 1.0, True, 2**31)),
        ("temperature", (-0.1, float("nan"), float("inf"), "1", None)),
        ("top_p", (0, -0.5, 1.01, float("nan"), None)),
        ("top_k", (-1, 1.5, False, None)),
        ("min_p", (-0.1, 1.1, float("nan"))),
        ("seed", (-(2**63) - 1, 2**64, 1.0, True)),
        ("stop", (("",), ["a"], "a", (1,))),
        ("logprobs", (-1, 21, 1.0, True)),
        ("min_tokens", (-1, 257, 1.0)),  # more than max_tokens
        ("stop_token_ids", ((-1,), [1], (1.0,), (True,))),
        ("presence_penalty", (-2.1, 2.1, float("nan"), "1")),
        ("frequency_penalty", (-2.1, 2.1, None)),
        ("repetition_penalty", (0, -1, 0.009, 101, float("inf"))),
        ("logit_bias", (((1,),), ((1, 2.0), (1, 3.0)), ((-1, 1.0),), ((1, float("nan")),), {1: 2.0})),
        ("allowed_token_ids", ((), (-1,), [1])),
        ("bad_words", (((),), ((1,), ()), (1,), ((-1,),))),
        ("skip_special_tokens", (1, None)),
        ("include_stop_str_in_output", (1, None)),
    ],
)
def test_a_bad_field_is_named_with_its_range(field: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(BadArgument, match=f"^{field} = .*must be") as caught:
            SamplingParams(**{field: value})
        assert caught.value.name == field


def test_the_ends_of_every_range_are_allowed() -> None:
    SamplingParams(max_tokens=1, temperature=0, top_p=1, top_k=0, min_p=0, seed=-(2**63), stop=(), logprobs=0)
    SamplingParams(max_tokens=2**31 - 1, temperature=9.0, top_p=1e-9, min_p=1, seed=2**64 - 1, stop=("a",), logprobs=20)


@pytest.mark.parametrize("tokens", [[], [[1, 2]], 5, [1.0], ["a"], [-1], [0, 2**31], [2**40]])
def test_a_prompt_that_is_no_row_of_tokens_is_refused(tokens: object) -> None:
    with pytest.raises(BadTokens):
        Request(tokens)  # type: ignore[arg-type]


def test_bad_tokens_are_named_by_position_and_value() -> None:
    with pytest.raises(BadTokens, match="token -3 at position 2"):
        Request(np.array([1, 2, -3, -4]))


def test_a_priority_is_an_int32() -> None:
    with pytest.raises(BadArgument, match="priority"):
        Request(np.array([1]), priority=2**31)


def test_integers_of_numpy_are_taken_as_python_s() -> None:
    """As uint8, the priority that comes first, -3, would be 253; and no recording could be written as JSON."""
    request = Request(np.array([1]), priority=np.uint8(3))  # type: ignore[arg-type]
    image = ImageInput(np.int64(1), np.int64(5), bytes(16), {})  # type: ignore[arg-type]
    values = request.priority, Prefix(np.int64(4)).end, image.start, image.length  # type: ignore[arg-type]
    assert [(type(each), each) for each in values] == [(int, 3), (int, 4), (int, 1), (int, 5)]
    assert -request.priority == -3


def test_a_request_keeps_its_own_copy_of_the_prompt() -> None:
    mine = np.array([1, 2, 3], np.int32)
    request = Request(mine)
    mine[0] = 9
    assert request.tokens.tolist() == [1, 2, 3]
    assert request.tokens.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        request.tokens[0] = 9


def test_a_namespace_is_one_of_its_forms() -> None:
    with pytest.raises(BadArgument, match="namespace"):
        Request(np.array([1]), namespace=5)  # type: ignore[arg-type]


def test_a_read_only_prompt_is_shared_and_any_other_is_copied() -> None:
    tokens = np.arange(8, dtype=np.int32)
    assert not np.shares_memory(Request(tokens).tokens, tokens)
    tokens.flags.writeable = False
    assert np.shares_memory(Request(tokens).tokens, tokens)


def image(start: int, length: int = 5) -> ImageInput:
    return ImageInput(start, length, bytes(16), {})


@pytest.mark.parametrize(
    ("field", "values"),
    [("start", (-1, 1.0, None)), ("length", (4, 0, 5.0)), ("identity", (bytes(15), "x" * 16, None))],
)
def test_an_image_says_what_is_wrong_with_it(field: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(BadArgument, match=f"^{field} = "):
            ImageInput(**{"start": 0, "length": 5, "identity": bytes(16), "inputs": {}, field: value})


def test_images_are_in_order_and_disjoint_inside_the_prompt() -> None:
    tokens = np.arange(20)
    assert Request(tokens, images=(image(0), image(5), image(15))).images[2].end == 20
    for wrong in ((image(16),), (image(0), image(4)), (image(5), image(0)), [image(0)], (5,)):
        with pytest.raises(BadArgument, match=r"^images = "):
            Request(tokens, images=wrong)  # type: ignore[arg-type]


def test_positions_continue_after_the_prompt() -> None:
    positions = np.array([[0, 1, 1, 3], [0, 1, 2, 3], [0, 2, 1, 3]])
    request = Request(np.arange(4), positions=positions)
    positions[:] = 0
    assert request.positions is not None and request.positions.dtype == np.int64
    parts = [request.positions_of(begin, end) for begin, end in ((0, 3), (2, 6), (5, 7))]
    assert [part.tolist() for part in parts if part is not None] == [
        [[0, 1, 1], [0, 1, 2], [0, 2, 1]],
        [[1, 3, 4, 5], [2, 3, 4, 5], [1, 3, 4, 5]],
        [[5, 6]] * 3,
    ]
    assert Request(np.arange(4)).positions_of(0, 9) is None


@pytest.mark.parametrize(
    "positions", [np.zeros((3, 5), int), np.zeros((2, 4), int), np.zeros((3, 4)), -np.ones((3, 4), int)]
)
def test_positions_are_three_rows_over_the_prompt(positions: np.ndarray) -> None:
    with pytest.raises(BadArgument, match=r"^positions = "):
        Request(np.arange(4), positions=positions)


@pytest.mark.parametrize("marks", [(), (0,), (2, 3), [1], np.array([0, 3]), np.array([], np.int64)])
def test_marks_are_positions_of_the_prompt(marks: Any) -> None:
    assert Request([1, 2, 3], marks=marks).marks == tuple(int(mark) for mark in marks)  # type: ignore[arg-type]


@pytest.mark.parametrize("marks", [(-1,), (4,), (2, 2), (2, 1), (1.0,), ("a",), ((1, 2),), (True,), 3, None])
def test_bad_marks_are_refused(marks: Any) -> None:
    with pytest.raises(BadArgument, match="ascending integers from 0 to 3") as caught:
        Request([1, 2, 3], marks=marks)  # type: ignore[arg-type]
    assert caught.value.name == "marks"

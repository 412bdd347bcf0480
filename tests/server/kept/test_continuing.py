"""A stream that another engine has begun goes on here with its prompt, or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from mainstem.runtime.request import ImageInput, Request
from mainstem.server.errors import ApiError
from mainstem.server.kept.continuing import ChoiceProgress, StreamProgress, resumed

PROMPT = np.arange(20, dtype=np.int32)
LONGER = np.append(PROMPT, [1, 2]).astype(np.int32)  # e.g. with a note that the other engine remembered


def test_the_prompt_is_that_of_the_engine_that_began() -> None:
    progress = StreamProgress("id", 1, [ChoiceProgress(LONGER, 9, [5, 6])])
    [request] = resumed([Request(PROMPT, marks=(3,))], progress)
    assert np.array_equal(request.tokens, LONGER) and request.said.tolist() == [5, 6]
    assert (request.params.max_tokens, tuple(request.marks)) == (9, ())


def test_images_at_other_places_end_the_stream() -> None:
    image = ImageInput(2, 6, b"i" * 16, {})
    here = Request(PROMPT, images=(image,))
    [same] = resumed([here], StreamProgress("id", 1, [ChoiceProgress(PROMPT, 9, [5])]))
    assert same.images == (image,)
    with pytest.raises(ApiError, match="other places") as refused:
        resumed([here], StreamProgress("id", 1, [ChoiceProgress(LONGER, 9, [5])]))
    assert refused.value.status == 409

"""Replays the corpus of the fuzzer: inputs of each kind, and all that ever broke something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.calls import Bytes
from fuzz.targets import TARGETS, Target

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"


def inputs(target: Target) -> Iterator[bytes]:
    """Returns the inputs of a target."""
    for path in sorted((CORPUS / target.name).iterdir()):
        yield path.read_bytes()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_nothing_of_the_corpus_breaks_anything(target: Target) -> None:
    run = target.make()
    known = list(inputs(target))
    assert known
    for data in [b"", *known]:
        run(data)


def test_each_folder_of_the_corpus_has_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} == {target.name for target in TARGETS}


def test_choices_end_with_the_bytes() -> None:
    choose = Bytes(b"\x05\xff")
    assert (choose.below(4), choose.left, choose.below(16), choose.left, choose.below(9)) == (1, True, 15, False, 0)

"""The proof that parts of a model compute what it computes undivided; `test_tp.py` has it between real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.tiny_models import FAMILIES, HYBRIDS, LATENT, RESUMED, VARIANTS, tiny
from mainstem.errors import UnsupportedModel
from mainstem.runtime.parallel.division import prove_division, whole

pytestmark = pytest.mark.usefixtures("one_thread")

# Weights of experts, of a convolution that its parent applies, of layers that share, and of tied embeddings.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", FAMILIES["mixtral"]),
    "gpt_neox": ("gpt_neox", FAMILIES["gpt_neox"]),
    "gemma3n_text": VARIANTS["gemma3n_text"],
    "deepseek_v2": ("deepseek_v2", LATENT["deepseek_v2"]),
    "bamba": ("bamba", HYBRIDS["bamba"]),
    "jamba": ("jamba", RESUMED["jamba"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_twin_of_an_undivided_model_computes_the_same_numbers(kind: str) -> None:
    family, changes = KINDS[kind]
    prove_division(tiny(family, **changes), kind, 0.0)


def test_a_part_that_computes_something_else_is_refused_with_the_difference() -> None:
    model = tiny("llama")
    own = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: 1.1 * own(x)
    with pytest.raises(UnsupportedModel, match=r"odd: divided .* differ by 0\.\d+ of their spread; 0\.0001 is allowed"):
        prove_division(model, "odd", 1e-4)
    with pytest.raises(UnsupportedModel, match=r"in bfloat16 .* is allowed: --dtype float32 rounds less, and --tp 1"):
        prove_division(model.bfloat16(), "odd", 1e-4)
    model.float()
    model.model.layers[1].mlp.forward = lambda x: torch.nan * own(x)
    with pytest.raises(UnsupportedModel, match="differ by nan"):
        prove_division(model, "odd", 1e-4)


def test_a_model_that_does_not_run_is_refused() -> None:
    model = tiny("llama")
    del model.model.norm.weight
    with pytest.raises(UnsupportedModel, match=r"odd cannot be compared with its parts on several ranks: .*weight"):
        prove_division(model, "odd", 1e-4)


def test_a_weight_that_is_not_divided_is_whole() -> None:
    weight = torch.ones(2)
    assert whole(weight) is weight

"""Which components and layers a configuration makes, for the families that transformers knows."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mainstem.cache.components import Chunked, Component, Full, Local, State, Window
from mainstem.errors import UnsupportedModel
from mainstem.runtime.models.layout import Layout

CONTEXT = 4096
SLIDES, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
MAMBA2 = {"num_heads": 8, "head_dim": 16}


def configure(family: str, **changes: Any) -> PreTrainedConfig:
    base = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config: PreTrainedConfig = CONFIG_MAPPING[family](**{**base, "vocab_size": 97, **changes})
    return config


@pytest.mark.parametrize(
    ("family", "changes", "components", "kv_layers", "state_layers"),
    [
        ("llama", {}, [Full()], {"full": (0, 1, 2, 3)}, ()),
        ("gpt2", {}, [Full()], {"full": (0, 1, 2, 3)}, ()),
        ("mistral", {"sliding_window": 512}, [Window(512)], {"window": (0, 1, 2, 3)}, ()),
        ("mistral", {"sliding_window": CONTEXT}, [Full()], {"full": (0, 1, 2, 3)}, ()),
        ("mistral", {"sliding_window": None}, [Full()], {"full": (0, 1, 2, 3)}, ()),
        ("phi3", {"sliding_window": 512}, [Window(512)], {"window": (0, 1, 2, 3)}, ()),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 3},
            [Full(), Window(512)],
            {"full": (0, 1, 2), "window": (3,)},
            (),
        ),
        ("qwen2", {"sliding_window": 512, "max_window_layers": 3}, [Full()], {"full": (0, 1, 2, 3)}, ()),
        (
            "gemma3_text",
            {"layer_types": [SLIDES, SLIDES, FULL, SLIDES], "sliding_window": 512},
            [Full(), Window(512)],
            {"full": (2,), "window": (0, 1, 3)},
            (),
        ),
        (
            "mistral",
            {"sliding_window": 256, "per_layer_config": {1: {"sliding_window": 512}, 2: {"sliding_window": CONTEXT}}},
            [Full(), Window(512), Window(256)],
            {"full": (2,), "window-512": (1,), "window-256": (0, 3)},
            (),
        ),
        ("gemma2", {"sliding_window": 512}, [Full(), Window(512)], {"full": (1, 3), "window": (0, 2)}, ()),
        (
            "llama4_text",
            {"attention_chunk_size": 512},
            [Full(), Chunked(512)],
            {"full": (3,), "chunked": (0, 1, 2)},
            (),
        ),
        ("llama4_text", {"attention_chunk_size": CONTEXT}, [Full()], {"full": (0, 1, 2, 3)}, ()),
        (
            "llama4_text",
            {"attention_chunk_size": 512, "layer_types": ["chunked_attention"] * 4},
            [Full(), Chunked(512)],
            {"full": (), "chunked": (0, 1, 2, 3)},
            (),
        ),
        ("gpt_oss", {}, [Full(), Window(128)], {"full": (1, 3), "window": (0, 2)}, ()),
        ("qwen3_next", {}, [Full(), State()], {"full": (3,)}, (0, 1, 2)),
        ("lfm2", {"layer_types": ["conv", FULL, "conv", FULL]}, [Full(), State()], {"full": (1, 3)}, (0, 2)),
        ("falcon_h1", {}, [Full(), State()], {"full": (0, 1, 2, 3)}, (0, 1, 2, 3)),
        ("nemotron_h", {"layers_block_type": [LINEAR, "mlp", FULL, "moe"]}, [Full(), State()], {"full": (2,)}, (0,)),
        ("mamba2", MAMBA2, [Full(), State()], {"full": ()}, (0, 1, 2, 3)),
    ],
)
def test_layers_are_sorted_by_what_they_keep(
    family: str,
    changes: dict[str, Any],
    components: list[Component],
    kv_layers: dict[str, tuple[int, ...]],
    state_layers: tuple[int, ...],
) -> None:
    layout = Layout.of(configure(family, **changes), CONTEXT)
    assert layout.components == tuple(components)
    assert layout.kv_layers == kv_layers
    assert layout.state_layers == state_layers
    assert list(layout.local.values()) == [row for row in components if isinstance(row, Local)]
    assert layout.attended.keys() == kv_layers.keys()
    assert {layer: layout.kv_layers[name][i] for layer, (name, i) in layout.places.items()} == {
        layer: layer for layers in kv_layers.values() for layer in layers
    }


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_a_layer_that_shares_keys_has_the_place_of_the_last_one_of_its_kind_that_keeps_them(family: str) -> None:
    config = configure(
        family,
        num_hidden_layers=7,
        layer_types=[SLIDES, FULL, SLIDES, SLIDES, SLIDES, SLIDES, FULL],
        num_kv_shared_layers=3,
        sliding_window=512,
    )
    layout = Layout.of(config, CONTEXT)
    assert layout.kv_layers == {"full": (1,), "window": (0, 2, 3)}
    assert layout.shared == {4: 3, 5: 3, 6: 1}
    assert layout.places == {
        0: ("window", 0), 1: ("full", 0), 2: ("window", 1), 3: ("window", 2),
        4: ("window", 2), 5: ("window", 2), 6: ("full", 0),
    }  # fmt: skip


def test_the_text_part_of_a_model_with_images_counts() -> None:
    config = CONFIG_MAPPING["gemma3"](
        text_config={"num_hidden_layers": 2, "layer_types": [SLIDES, FULL], "sliding_window": 512}
    )
    assert Layout.of(config, CONTEXT).kv_layers == {"full": (1,), "window": (0,)}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v32", {}, "chooses keys by a sparse index"),
        ("xlstm", {}, "a cache class of its own"),
    ],
)
def test_what_fits_no_pool_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        Layout.of(configure(family, **changes), CONTEXT)

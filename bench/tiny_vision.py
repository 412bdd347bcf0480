"""Tiny random models that read images, each a folder with weights, processor, tokenizer and chat template.

gemma3     attends in both directions within an image; 9 positions per image of 48 x 48 pixels
llava      attends in one direction; 9 positions per image of 24 x 24 pixels
qwen2_vl   attends in one direction; M-RoPE; one position per 8 x 8 pixels
idefics3   attends in one direction; an image is split into tiles, with text between the placeholders of each
pixtral    attends in one direction; one position per 8 x 8 pixels, and a token at the end of each row of them

qwen3_vl, which is refused, is as qwen2_vl, and its first layers add what the encoder's inner layers found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaConfig,
    LlavaProcessor,
    PaliGemmaConfig,
    PixtralImageProcessorPil,
    PixtralVisionConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    SiglipVisionConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mainstem.runtime.models.loading import LoadedModel, images_only, without_torchvision

CONTEXT = 512
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<turn>", "<image>", "<begin>", "<end>", "<video>")
_TEXT: dict[str, Any] = {
    "vocab_size": 256 + len(_SPECIAL),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
}
_IMAGE, _BEGIN, _END, _VIDEO = (_SPECIAL.index(token) for token in ("<image>", "<begin>", "<end>", "<video>"))


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per byte, after the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({word: at for at, word in enumerate((*_SPECIAL, *alphabet))}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens={
            "image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<end>", "video_token": "<video>",
        },
    )  # fmt: skip


def template(image: str) -> str:
    """Returns a chat template for contents in parts; an image becomes this text."""
    part = f"{{% if part['type'] == 'image' %}}{image}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    parts = f"{{% for part in message['content'] %}}{part}{{% endfor %}}"
    message = f"<turn>{{{{ message['role'] }}}}:{parts}"
    ending = "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
    return f"<bos>{{% for message in messages %}}{message}{{% endfor %}}{ending}"


def _gemma3(**changes: Any) -> tuple[PreTrainedConfig, ProcessorMixin]:
    text = {**_TEXT, "model_type": "gemma3_text", "sliding_window": CONTEXT, "query_pre_attn_scalar": 16, **changes}
    config = Gemma3Config(
        text_config=text,
        vision_config=SiglipVisionConfig(**_VISION, image_size=48, vision_use_head=False).to_dict(),
        mm_tokens_per_image=9,
        image_token_index=_IMAGE,
        boi_token_index=_BEGIN,
        eoi_token_index=_END,
    )
    pictures = Gemma3ImageProcessorPil(size={"height": 48, "width": 48})
    return config, Gemma3Processor(pictures, tokenizer(), chat_template=template("<begin>"), image_seq_length=9)


def _llava(**changes: Any) -> tuple[PreTrainedConfig, ProcessorMixin]:
    text = CONFIG_MAPPING["llama"](**{**_TEXT, **changes})
    vision = CLIPVisionConfig(**_VISION, image_size=24)
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=_IMAGE, image_seq_length=9)
    side = {"height": 24, "width": 24}
    pictures = CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size=side)
    processor = LlavaProcessor(
        pictures, tokenizer(), patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=template("<image>"),
    )  # fmt: skip
    return config, processor


def _qwen2_vl(**changes: Any) -> tuple[PreTrainedConfig, ProcessorMixin]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = {**_TEXT, "model_type": "qwen2_vl_text", "rope_parameters": rope, **changes}
    text.pop("head_dim")
    config = Qwen2VLConfig(
        text_config=text,
        vision_config={
            "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        image_token_id=_IMAGE, video_token_id=_VIDEO, vision_start_token_id=_BEGIN, vision_end_token_id=_END,
    )  # fmt: skip
    return config, _qwen_processor(Qwen2VLProcessor)


def _qwen3_vl(**changes: Any) -> tuple[PreTrainedConfig, ProcessorMixin]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = Qwen3VLConfig(
        text_config={**_TEXT, "model_type": "qwen3_vl_text", "rope_parameters": rope, **changes},
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_heads": 2,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=_IMAGE, video_token_id=_VIDEO, vision_start_token_id=_BEGIN, vision_end_token_id=_END,
    )  # fmt: skip
    return config, _qwen_processor(Qwen3VLProcessor)


def _qwen_processor(kind: type[ProcessorMixin]) -> ProcessorMixin:
    pictures = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 24 * 24, "longest_edge": 64 * 64}
    )
    return images_only(kind)(pictures, tokenizer(), chat_template=template("<begin><image><end>"))


def _idefics3(**changes: Any) -> tuple[PreTrainedConfig, ProcessorMixin]:
    words = tokenizer()
    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 96}, max_image_size={"longest_edge": 48})
    processor = Idefics3Processor(pictures, words, image_seq_len=9, chat_template=template("<image>"))
    text = CONFIG_MAPPING["llama"](**{**_TEXT, "vocab_size": len(words), **changes})
    config = Idefics3Config(
        text_config=text,
        vision_config={**_VISION, "image_size": 48},
        image_token_id=_IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )
    return config, processor


def _pixtral(**changes: Any) -> tuple[PreTrainedConfig, ProcessorMixin]:
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<break>"]})
    pictures = PixtralImageProcessorPil(size={"longest_edge": 48}, patch_size={"height": 8, "width": 8})
    processor = without_torchvision("PixtralProcessor")(
        pictures, words, patch_size=8, image_token="<image>", image_break_token="<break>", image_end_token="<end>",
        chat_template=template("<image>"),
    )  # fmt: skip
    config = LlavaConfig(
        text_config=CONFIG_MAPPING["mistral"](**{**_TEXT, "vocab_size": len(words), "sliding_window": None, **changes}),
        vision_config=PixtralVisionConfig(**_VISION, image_size=48),
        image_token_index=_IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return config, processor


FAMILIES: dict[str, Callable[..., tuple[PreTrainedConfig, ProcessorMixin]]] = {
    "gemma3": _gemma3,
    "llava": _llava,
    "qwen2_vl": _qwen2_vl,
    "idefics3": _idefics3,
    "pixtral": _pixtral,
}
REFUSED: dict[str, Callable[..., tuple[PreTrainedConfig, ProcessorMixin]]] = {"qwen3_vl": _qwen3_vl}


def save(family: str, folder: Path, **changes: Any) -> Path:
    """Writes a random model of a family for `mainstem serve`, the same in every run.

    Args:
        family: a name from `FAMILIES` or `REFUSED`.
        folder: folder to write to; created if needed.
        changes: changes to the configuration of its text model.
    """
    config, processor = (FAMILIES | REFUSED)[family](**changes)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # the usual initialization is so near 0 that attention is uniform and hides errors
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def paligemma(llava: LoadedModel) -> LoadedModel:
    """Returns a model whose whole prompts attend in both directions, with the processor of llava."""
    text = {**llava.model.config.text_config.to_dict(), "model_type": "gemma"}
    config = PaliGemmaConfig(text_config=text, vision_config={**_VISION, "image_size": 24})
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    return replace(llava, model=model, name="paligemma")


def picture(seed: int, width: int = 40, height: int = 30, mode: str = "RGB") -> Image.Image:
    """Returns a random image, the same for the same seed."""
    shape = (height, width) if mode == "L" else (height, width, len(mode))
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), mode)

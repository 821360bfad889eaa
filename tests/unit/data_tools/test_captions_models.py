"""Captions by a model of transformers on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_tools.footage import write_captions
from tests.support.caption_servers import Server, clips, server
from wands.config.options import CaptionOptions
from wands.data.clips.tables import read_table
from wands.errors import ConfigError

__all__ = ["clips", "server"]  # fixtures


def build_tokenizer(*special: str, **names: str) -> Any:
    """Return a tokenizer of bytes. The ids of the special tokens begin at 4."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {word: index for index, word in enumerate(words)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", **names}
    return PreTrainedTokenizerFast(tokenizer_object=raw, additional_special_tokens=list(special), **names)


SIZE = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}


def build_model(folder: Path) -> None:
    """Save a random LLaVA that fits a test."""
    import torch
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = build_tokenizer("<image>", bos_token="<s>")
    template = (
        "{{bos_token}}{% for m in messages %}{% for c in m.content %}"
        "{% if c.type == 'image' %}<image>{% else %}{{c.text}}{% endif %}{% endfor %}{% endfor %}"
    )
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**SIZE, num_hidden_layers=2, image_size=28, patch_size=14),
        text_config=LlamaConfig(
            vocab_size=len(tokenizer), **SIZE, num_hidden_layers=1, num_key_value_heads=2, pad_token_id=0
        ),
        image_token_index=4,
        vision_feature_layer=-1,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    ).save_pretrained(folder)


def build_qwen(folder: Path) -> None:
    """Save a random Qwen2.5-VL. Its processor needs torchvision."""
    pytest.importorskip("torchvision")
    import torch
    import transformers

    names = ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
    tokens = [f"<|{name}|>" for name in names]
    tokenizer = build_tokenizer(*tokens, eos_token="<|im_end|>")
    template = (
        "{% for m in messages %}<|im_start|>{{m.role}}\n{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|>"
        "<|image_pad|><|vision_end|>{% else %}{{c.text}}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}
    text = {"vocab_size": len(tokenizer), "num_hidden_layers": 1, "num_key_value_heads": 2, "eos_token_id": 5}
    vision = {
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": 16,
        "fullatt_block_indexes": [0],
        "window_size": 56,
    }
    config = transformers.Qwen2_5_VLConfig(
        vision_config={"hidden_size": 16, "intermediate_size": 16, **vision},
        text_config={**SIZE, **text, "rope_parameters": rope, "bos_token_id": None},
        **{f"{name}_token_id": 6 + number for number, name in enumerate(("vision_start", "vision_end"))},
        image_token_id=8,
        video_token_id=9,
    )
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    images = transformers.Qwen2VLImageProcessor(min_pixels=28**2, max_pixels=16 * 28**2)
    videos = transformers.Qwen2VLVideoProcessor()
    processor = transformers.Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=template)
    processor.save_pretrained(folder)


class Unfit:
    """A model and its processor, which accepts only one image."""

    tokenizer = SimpleNamespace(padding_side="", pad_token="<pad>", get_added_vocab=dict)
    to = eval = lambda self, *devices: self

    def apply_chat_template(self, chats: list, **options: Any) -> Any:
        raise ValueError("only one image\nis supported")


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (
            ImportError("X requires the Torchvision library. Go on."),
            r"cannot be loaded \(X .* library\)\. .*torch==",
        ),
        (
            json.JSONDecodeError("no", "", 0),
            r"cannot be loaded \(no.*\)\. .*choose an image-text-to-text model",
        ),
        (SimpleNamespace(), r"cannot be loaded \(.*tokenizer.*\)\. .*choose an image-text-to-text model"),
        (
            Unfit(),
            r"cannot caption 1 clip of 3 images \(only one image is supported\); lower --batch, --frames",
        ),
    ],
)
def test_an_unfit_model_is_one_sentence(
    server: Server, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processor: Any, reason: str
):
    def from_pretrained(*folder: object, **options: object) -> Any:
        if isinstance(processor, Exception):
            raise processor
        return processor

    for name in ("AutoProcessor", "AutoModelForImageTextToText"):
        monkeypatch.setattr(f"transformers.{name}", SimpleNamespace(from_pretrained=from_pretrained))
    values = {"source": str(clips / "shots.jsonl"), "model": str(tmp_path), "frames": 3, "batch": 1}
    with pytest.raises(ConfigError, match=reason) as caught:
        write_captions.caption(CaptionOptions(out=tmp_path / "out.csv", device="cpu", **values))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("build", [build_model, build_qwen])
def test_a_model_of_transformers(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[Path], None]
):
    """The same captions for every batch, in one process and in two, and the control tokens of a prompt are not read."""
    build(tmp_path / "model")
    values = {"source": str(clips / "shots.jsonl"), "model": str(tmp_path / "model"), "frames": 2}
    values |= {
        "max_tokens": 12,
        "max_side": 64,
        "device": "cpu",
        "prompt": ("{film} <image><|image_pad|></s>",),
    }
    problems = []
    for batch, workers in ((1, 1), (2, 1), (4, 1), (2, 2)):
        out = tmp_path / f"{batch}-{workers}.jsonl"
        if workers == 1:
            monkeypatch.setattr(write_captions, "clean_answer", lambda text, is_cut: (repr(text), ""))
        else:
            monkeypatch.undo()
        write_captions.caption(CaptionOptions(out=out, batch=batch, workers=workers, **values))
        rows = [row for _, row in read_table(out)]
        problems.append([row["caption"] or row["caption_problem"] for row in rows])
    assert problems[0] == problems[1] == problems[2]
    assert len(set(problems[0])) > 2
    assert len(problems[3]) == 6
    assert all(problems[3])

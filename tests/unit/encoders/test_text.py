"""Captions to embeddings against diffusers' own WanPipeline, with each known bug put in once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor

from wands.encoders import text as text_module
from wands.encoders.text import TextEncoder, clean_caption
from wands.errors import ConfigError
from wands.variants import TEXT_LEN

CAPTIONS = [
    "",
    "A man in a dark suit sits in a moving car.",
    "  Two&amp;nbsp;dogs &amp;lt;run&amp;gt;\n\tover   the â€œgreenâ€\x9d hill  ",
    "A cat. " * 60,  # some 300 tokens: above diffusers' default of 226
    "A long walk on the beach, " * 150,  # above 512: cut
]


@pytest.fixture(scope="module")
def pipeline(tiny_pipeline: Path) -> WanPipeline:
    return WanPipeline.from_pretrained(tiny_pipeline, transformer=None, vae=None)


@pytest.fixture(scope="module")
def encoder(tiny_pipeline: Path) -> TextEncoder:
    return TextEncoder.load(tiny_pipeline, dtype=torch.float32)


def stock(pipeline: WanPipeline, caption: str, max_sequence_length: int = TEXT_LEN) -> Tensor:
    with torch.no_grad():
        embeds, _ = pipeline.encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
        )
    return embeds[0]


def padded(embeds: Tensor) -> Tensor:
    return torch.nn.functional.pad(embeds, (0, 0, 0, TEXT_LEN - len(embeds)))


def mismatch(encoder: TextEncoder, pipeline: WanPipeline, caption: str) -> float:
    """Largest difference after zero padding, in units of what storing bf16 rounds."""
    ours = padded(encoder.encode(caption)).float()
    theirs = stock(pipeline, caption)
    allowed = theirs.abs() * 2**-8 + 1e-5
    return float(((ours - theirs).abs() / allowed).max())


@pytest.mark.parametrize("caption", CAPTIONS)
def test_equals_the_pipeline_after_zero_padding(
    encoder: TextEncoder, pipeline: WanPipeline, caption: str
) -> None:
    embeds = encoder.encode(caption)
    assert embeds.dtype == torch.bfloat16
    assert 1 <= len(embeds) <= TEXT_LEN
    assert mismatch(encoder, pipeline, caption) <= 1
    assert not stock(pipeline, caption)[len(embeds) :].any()  # trimmed at the real length, not beyond it
    assert stock(pipeline, caption)[len(embeds) - 1].any()


def test_lengths_reach_512_and_pass_226(encoder: TextEncoder) -> None:
    lengths = [len(encoder.encode(caption)) for caption in CAPTIONS]
    assert lengths[0] == 1
    assert 226 < lengths[3] < TEXT_LEN
    assert lengths[4] == TEXT_LEN


def test_bug_226_tokens_is_caught(
    encoder: TextEncoder, pipeline: WanPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "TEXT_LEN", 226)
    assert mismatch(encoder, pipeline, CAPTIONS[1]) <= 1
    assert mismatch(encoder, pipeline, CAPTIONS[3]) > 10


def test_bug_attention_mask_ignored_is_caught(encoder: TextEncoder, pipeline: WanPipeline) -> None:
    """Padded to 512 and no mask: pads leak into the text."""
    tokens = encoder.tokenizer(CAPTIONS[1], padding="max_length", max_length=TEXT_LEN, return_tensors="pt")
    length = int(tokens.attention_mask.sum())
    with torch.no_grad():
        right = encoder.model(tokens.input_ids, tokens.attention_mask).last_hidden_state[0, :length]
        wrong = encoder.model(tokens.input_ids).last_hidden_state[0, :length]
    theirs = stock(pipeline, CAPTIONS[1])[:length]
    assert torch.allclose(right, theirs, atol=1e-5)
    assert not torch.allclose(wrong, theirs, atol=1e-2)


def test_bug_pads_not_zeroed_is_caught(encoder: TextEncoder, pipeline: WanPipeline) -> None:
    """Keeping what UMT5 says of its pads: the stored length is 512 and the tail is not zero."""
    tokens = encoder.tokenizer(CAPTIONS[1], padding="max_length", max_length=TEXT_LEN, return_tensors="pt")
    with torch.no_grad():
        kept = encoder.model(tokens.input_ids, tokens.attention_mask).last_hidden_state[0]
    theirs = stock(pipeline, CAPTIONS[1])
    assert not torch.allclose(kept, theirs, atol=1e-2)
    assert torch.allclose(padded(encoder.encode(CAPTIONS[1])).float(), theirs, atol=1e-2)


def test_bug_untied_embedding_is_refused(tiny_pipeline: Path) -> None:
    loaded = TextEncoder.load(tiny_pipeline, dtype=torch.float32)
    untied = torch.nn.Embedding.from_pretrained(torch.randn_like(loaded.model.shared.weight))
    loaded.model.encoder.set_input_embeddings(untied)
    with pytest.raises(ConfigError, match=r"embed_tokens.weight differs from shared.weight"):
        TextEncoder(loaded.tokenizer, loaded.model)


def test_bug_untied_embedding_would_change_the_text(tiny_pipeline: Path, pipeline: WanPipeline) -> None:
    loaded = TextEncoder.load(tiny_pipeline, dtype=torch.float32)
    untied = torch.nn.Embedding.from_pretrained(torch.randn_like(loaded.model.shared.weight))
    loaded.model.encoder.set_input_embeddings(untied)
    assert mismatch(loaded, pipeline, CAPTIONS[1]) > 10


def test_caption_alone_decides_bitwise(encoder: TextEncoder) -> None:
    first = encoder.encode(CAPTIONS[1])
    encoder.encode(CAPTIONS[4])
    assert torch.equal(first, encoder.encode(CAPTIONS[1]))
    assert torch.equal(first, encoder.encode("  A man in a dark   suit sits in a moving car.\n"))


def test_bf16_stays_close_to_fp32(tiny_pipeline: Path, encoder: TextEncoder) -> None:
    half = TextEncoder.load(tiny_pipeline, dtype=torch.bfloat16)
    assert half.model.shared.weight.dtype == torch.bfloat16
    ours = half.encode(CAPTIONS[1]).float()
    full = encoder.encode(CAPTIONS[1]).float()
    assert (ours - full).norm() / full.norm() < 0.03


@pytest.mark.parametrize(
    "caption",
    [*CAPTIONS, "&amp;lt;b&amp;gt;", "schÃ¶n", "a\u3000b\u00a0c", "x\x00y", "&lt;&amp;amp;", "ﬁne “quotes”"],
)
def test_cleaning_equals_diffusers(caption: str) -> None:
    assert clean_caption(caption) == prompt_clean(caption)


def test_missing_parts_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer folder"):
        TextEncoder.load(tmp_path)
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(ConfigError, match="text encoder cannot be loaded") as caught:
        TextEncoder.load(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="neither a folder nor a Hub id"):
        TextEncoder.load("no/such/model")

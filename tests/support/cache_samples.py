"""Samples of a cache, and their comparison bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from tests.support.samples import narrow_text, sample_of
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.data.collate import Sample

VARIANT = narrow_text("wan2.1-t2v-1.3b")
FINGERPRINT = {
    "vae": {"weights": "aa"},
    "text_encoder": {"weights": "bb"},
    "settings": {"fps": 16, "max_frames": 81},
}
NULL = torch.full((1, 8), 0.5, dtype=torch.bfloat16)


def make_sample(number: int, text_len: int = 3) -> Sample:
    generator = torch.Generator().manual_seed(number)
    latents = torch.randn(16, 1 + number % 3, 4, 6, generator=generator).bfloat16()
    return sample_of(f"clip/{number:03d}", latents, torch.randn(text_len, 8, generator=generator).bfloat16())


def meta_of(sample: Sample, **changes: object) -> dict[str, object]:
    frames = 4 * (sample.latents.shape[1] - 1) + 1
    return {"num_frames": frames, "fps": 16.0, "content": "c0", "caption": f"of {sample.sample_id}"} | changes


def write(path: Path, samples: Iterable[Sample], commit: bool = True, **kwargs: int) -> Path:
    with CacheWriter(path, VARIANT, FINGERPRINT, **kwargs) as writer:
        for sample in samples:
            writer.add(sample.sample_id, sample.arrays, meta_of(sample))
        if commit:
            writer.commit(NULL)
    return path


def bits(tensor: torch.Tensor) -> bytes:
    assert tensor.dtype == torch.bfloat16
    return tensor.contiguous().view(torch.uint16).numpy().tobytes()


def assert_same(cache: LatentCache, samples: Iterable[Sample]) -> None:
    wanted = {sample.sample_id: sample for sample in samples}
    assert cache.index.keys == tuple(sorted(wanted))
    assert len(cache) > 0
    for i, key in enumerate(cache.index.keys):
        read = cache.read(i)
        assert read.sample_id == key
        assert read.latents.shape == wanted[key].latents.shape
        assert bits(read.latents) == bits(wanted[key].latents)
        assert bits(read.text_embeds) == bits(wanted[key].text_embeds)

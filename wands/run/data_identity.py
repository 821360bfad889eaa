"""The identity of a run's data: digests that say whether a resumed run trains on the same clips in the same order."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from wands.config.recipe import Recipe
from wands.data.cache.reader import LatentCache
from wands.data.datasets import CombinedDataset, Dataset, select_sources


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """Digests and numbers of the training data.

    Attributes:
        fingerprint: digest of what determines the order of the samples: their keys and lengths, how often an epoch uses each
            cache, and, with `packing.buffer_size`, their positions in the cache.
        contents: digest of the contents of the samples. It changes if a clip is encoded again.
        summary: result of `summarize_data`, for the model card.
    """

    fingerprint: str
    contents: str
    summary: dict[str, Any]

    @classmethod
    def of(cls, recipe: Recipe, data: Dataset, num_tokens: np.ndarray) -> DataIdentity:
        """Compute the identity of a recipe's data, whose samples have `num_tokens` tokens, int64 [N]."""
        return cls(
            fingerprint=_fingerprint(recipe, data, num_tokens),
            contents=_contents(recipe, data),
            summary=summarize_data(data, num_tokens, excluded=frozenset(recipe.data.exclude)),
        )


def summarize_data(data: Dataset, num_tokens: np.ndarray, excluded: Collection[str]) -> dict[str, Any]:
    """Return numbers about the training data. A clip counts once, however often an epoch repeats it.

    The keys are "num_samples", "num_tokens" and "licenses": (license, number of clips) of the 20 most frequent licenses, then
    "others" and "not stated" if needed; empty if no clip states a license.
    """
    rows = zip(data.keys, num_tokens.tolist(), data.licenses, strict=True)
    clips = {key: rest for key, *rest in rows if key not in excluded}
    counts = Counter(name for _, name in clips.values())
    not_stated = counts.pop("", 0)
    common = counts.most_common(20)
    rest = {"others": counts.total() - sum(dict(common).values()), "not stated": not_stated}
    licenses = common and common + [pair for pair in rest.items() if pair[1]]
    return {
        "num_samples": len(clips),
        "num_tokens": sum(length for length, _ in clips.values()),
        "licenses": licenses,
    }


def _fingerprint(recipe: Recipe, data: Dataset, num_tokens: np.ndarray) -> str:
    rows = zip(data.keys, num_tokens.tolist(), strict=True)
    text = "".join([f"{key}\0{length}\n" for key, length in rows])
    if isinstance(data, CombinedDataset):
        text += repr([str(repeat) for repeat in data.schedule.repeats])
    # With a buffer, the bins depend on the positions of the samples in the cache shards.
    if recipe.packing.buffer_size is not None:
        text += hashlib.sha256(np.ascontiguousarray(data.places).tobytes()).hexdigest()
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _contents(recipe: Recipe, data: Dataset) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for source in select_sources(recipe.data, data):
        if isinstance(source.data, LatentCache):
            index = source.data.index
            for array in (index.crc32, index.text_lens, index.latent_shapes):
                digest.update(np.ascontiguousarray(array[source.chosen]).data)
            digest.update(index.null_text.data)
        else:
            digest.update(repr(recipe.data.mock).encode())
    return digest.hexdigest()

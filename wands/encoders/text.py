"""Encode captions in the same way as the official code of Wan, and look up stored embeddings of captions.

Letters: L text tokens, D width of the encoder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, UMT5EncoderModel

from wands.conditions.arrays import from_bits
from wands.data.cache.write_ahead_log import read_records
from wands.data.clips.captions import CLEANING_VERSION as CLEANING_VERSION
from wands.data.clips.captions import clean_caption
from wands.encoders.components import check_part, find_part, load_part
from wands.errors import ConfigError
from wands.variants import TEXT_LEN


def check_embedding(model: UMT5EncoderModel, label: str) -> None:
    """Check that the encoder's token embedding `embed_tokens` has the values of the trained one, `shared`.

    transformers releases of late 2025 give the encoder a random embedding, so that every caption becomes noise. Sampled videos
    are then sharp, but ignore the prompt.

    Raises:
        ConfigError: if the values differ. The message names the model by `label`.
    """
    if not torch.equal(model.encoder.embed_tokens.weight, model.shared.weight):
        raise ConfigError(
            f"{label}: the installed transformers release loads UMT5 wrongly (embed_tokens.weight differs from shared.weight). "
            "Run pip install -U transformers."
        )


class TextEncoder:
    """UMT5 encoder with its tokenizer. It encodes one caption at a time, without padding.

    UMT5 masks padding, so padding would change only cost and rounding. Without it, every bit of an embedding depends only on its
    caption. Wan's DiT attends to 512 text tokens, zeros after the caption's; wands' DiT computes the zero token once, with a
    larger weight.
    """

    def __init__(self, tokenizer: Any, model: UMT5EncoderModel) -> None:
        """Take a loaded tokenizer and encoder, and freeze the encoder; raise ConfigError, see `check_embedding`."""
        check_embedding(model, "text_encoder")
        self.tokenizer = tokenizer
        self.model = model.eval().requires_grad_(False)

    @classmethod
    def load(
        cls, model: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
    ) -> TextEncoder:
        """Load the tokenizer and the encoder from a pipeline folder or Hub id.

        Raises:
            ConfigError: if the model does not exist or its files are damaged.
            CheckpointError: if a weight contains NaN or infinite values.
        """

        def load() -> tuple[Any, UMT5EncoderModel]:
            tokenizer = AutoTokenizer.from_pretrained(find_part(model, "tokenizer"), trust_remote_code=False)
            folder = find_part(model, "text_encoder")
            encoder = UMT5EncoderModel.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, trust_remote_code=False
            )
            check_part(encoder, folder)
            return tokenizer, encoder

        tokenizer, encoder = load_part(model, "text encoder", load)
        return cls(tokenizer, encoder.to(device))

    @torch.no_grad()
    def encode(self, caption: str) -> Tensor:
        """Encode a caption, cleaned and cut to 512 tokens with the end token, to bf16 [L, D] on the CPU, L >= 1.

        An empty text gives the unconditional embedding.
        """
        options = {"max_length": TEXT_LEN, "truncation": True, "return_tensors": "pt"}
        tokens = self.tokenizer(clean_caption(caption), **options).to(self.model.device)
        states = self.model(tokens.input_ids, tokens.attention_mask).last_hidden_state
        return states[0].to("cpu", torch.bfloat16)


def caption_name(caption: str) -> str:
    """Return the name under which a write-ahead log stores a caption's embedding: 32 hex digits, a digest of the caption."""
    return hashlib.blake2b(caption.encode(), digest_size=16).hexdigest()


class TextSpool:
    """Looks up the stored text embeddings of captions in write-ahead logs (`wands.data.cache.write_ahead_log`).

    Only the positions of the embeddings are in memory, because a million embeddings would need 800 GB.
    """

    def __init__(self, logs: Iterable[Path]) -> None:
        """Index all text embeddings in the write-ahead logs `logs`. Embeddings that are added to the logs later are not found."""
        self._records = {record.name: record for log in logs for record in read_records(log)}

    def __contains__(self, caption: str) -> bool:
        return caption_name(caption) in self._records

    def read(self, caption: str) -> Tensor:
        """Return the stored embedding of a caption, bf16 [L, D].

        Raises:
            CacheError: if the stored embedding is damaged.
            KeyError: if it is not stored. Check this first with `caption in self`.
        """
        return from_bits(self._records[caption_name(caption)].read()[0])

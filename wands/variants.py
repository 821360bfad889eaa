"""The Wan family as data: one frozen row per variant, and the arithmetic that follows from a DiT's shape.

A variant is recognised from the model's own config, never from a folder's name.
Sources: the official Wan 2.1 and 2.2 configs and diffusers' conversion of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TEXT_LEN = 512
"""Text tokens that every sample attends to: trimmed embeddings, zero-padded, pads attended (official Wan)."""


@dataclass(frozen=True)
class DiTShape:
    """The numbers of a Wan DiT that data, planning and reporting need.

    Attributes:
        num_heads: attention heads of a block.
        head_dim: channels of one head.
        num_layers: transformer blocks.
        ffn_dim: hidden width of the feed-forward.
        in_channels: latent channels that enter the patch embedding.
        out_channels: latent channels that leave the model.
        text_dim: width of the text encoder's states.
        freq_dim: width of the sinusoidal timestep features.
        patch_size: latent (frames, height, width) of one token.
    """

    num_heads: int
    head_dim: int
    num_layers: int
    ffn_dim: int
    in_channels: int
    out_channels: int
    text_dim: int
    freq_dim: int = 256
    patch_size: tuple[int, int, int] = (1, 2, 2)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DiTShape:
        """Read the shape from a diffusers ``WanTransformer3DModel`` config."""
        pt, ph, pw = config["patch_size"]
        return cls(
            num_heads=config["num_attention_heads"],
            head_dim=config["attention_head_dim"],
            num_layers=config["num_layers"],
            ffn_dim=config["ffn_dim"],
            in_channels=config["in_channels"],
            out_channels=config["out_channels"] or config["in_channels"],
            text_dim=config["text_dim"],
            freq_dim=config["freq_dim"],
            patch_size=(pt, ph, pw),
        )

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return self.num_heads * self.head_dim

    @property
    def num_params(self) -> int:
        """Parameters of a text-to-video DiT of this shape (no image branch), norms and biases included."""
        d, f, patch = self.dim, self.ffn_dim, self._patch_volume
        attention = 4 * (d * d + d) + 2 * d  # q, k, v, out and the two qk norms
        block = 2 * attention + 2 * d + (d * f + f) + (f * d + d) + 6 * d
        time = (self.freq_dim * d + d) + (d * d + d) + (d * 6 * d + 6 * d)
        text = (self.text_dim * d + d) + (d * d + d)
        embed = self.in_channels * patch * d + d
        head = d * self.out_channels * patch + self.out_channels * patch + 2 * d
        return self.num_layers * block + time + text + embed + head

    @property
    def _patch_volume(self) -> int:
        return self.patch_size[0] * self.patch_size[1] * self.patch_size[2]

    def linear_flops_per_token(self) -> int:
        """Multiply-adds x 2 of one video token's linear layers in one forward, attention scores left out."""
        d = self.dim
        block = 2 * (4 * d * d + 2 * d * d + 2 * d * self.ffn_dim)  # self q k v o, cross q o, ffn
        cross = 4 * d * TEXT_LEN  # scores and values against the text
        ends = 2 * d * self._patch_volume * (self.in_channels + self.out_channels)
        return self.num_layers * (block + cross) + ends

    def linear_flops_per_sample(self) -> int:
        """FLOPs of one forward that every sample pays once: text keys and values, text and time embedding."""
        d = self.dim
        text_kv = self.num_layers * 2 * 2 * d * d * TEXT_LEN
        embed = 2 * TEXT_LEN * (self.text_dim * d + d * d)
        time = 2 * (self.freq_dim * d + d * d + 6 * d * d)
        return text_kv + embed + time

    def attention_flops_per_squared_token(self) -> int:
        """FLOPs of self-attention per pair of tokens of one sample in one forward (scores and values)."""
        return self.num_layers * 4 * self.dim

    def forward_flops(self, seq_lens: Sequence[int]) -> int:
        """Exact matmul FLOPs of one forward of stock Wan over a pack, all 512 text rows of each sample included.

        A training step with full gradients costs three times this.

        Args:
            seq_lens: tokens of each sample in the pack.
        """
        tokens = sum(seq_lens)
        squares = sum(length * length for length in seq_lens)
        return (
            tokens * self.linear_flops_per_token()
            + len(seq_lens) * self.linear_flops_per_sample()
            + squares * self.attention_flops_per_squared_token()
        )


@dataclass(frozen=True)
class Variant:
    """One published Wan model.

    Attributes:
        name: how wands and its recipes call it.
        dit: shape of the DiT (of each expert).
        vae_stride: pixels per latent in (frames, height, width).
        fps: frame rate that the model was trained at.
        default_shift: flow shift of official inference.
        boundary_ratio: t/1000 at which the high-noise expert takes over, None for one expert.
        conditions: what the model is conditioned on besides noise.
    """

    name: str
    dit: DiTShape
    vae_stride: tuple[int, int, int] = (4, 8, 8)
    fps: int = 16
    default_shift: float = 5.0
    boundary_ratio: float | None = None
    conditions: tuple[str, ...] = ("text",)


def _t2v(num_heads: int, num_layers: int, ffn_dim: int) -> DiTShape:
    return DiTShape(num_heads, 128, num_layers, ffn_dim, in_channels=16, out_channels=16, text_dim=4096)


VARIANTS: dict[str, Variant] = {
    row.name: row
    for row in (
        Variant("wan2.1-t2v-1.3b", _t2v(num_heads=12, num_layers=30, ffn_dim=8960)),
        Variant("wan2.1-t2v-14b", _t2v(num_heads=40, num_layers=40, ffn_dim=13824)),
    )
}
TINY = "wan2.1-t2v-tiny"
"""Name under which any other text-to-video shape goes: same interfaces, fewer layers."""


def variant_of(config: Mapping[str, Any]) -> Variant:
    """Recognise the variant of a diffusers ``WanTransformer3DModel`` config.

    A shape that was never published, such as the demo's, is a `wan2.1-t2v-tiny` with Wan 2.1's interfaces.

    Raises:
        ValueError: the config is not a text-to-video model of Wan 2.1 (other input channels, image branch).
    """
    shape = DiTShape.from_config(config)
    if shape.in_channels != shape.out_channels or config.get("image_dim") is not None:
        raise ValueError(
            f"in_channels={shape.in_channels}, out_channels={shape.out_channels}, image_dim={config.get('image_dim')} "
            "is not a Wan 2.1 text-to-video model"
        )
    for row in VARIANTS.values():
        if row.dit == shape:
            return row
    return Variant(TINY, shape)


def legal_frames(num_frames: int) -> int:
    """The longest 4k+1 that is not above `num_frames`: the causal VAE takes one frame and then groups of four."""
    return (num_frames - 1) // 4 * 4 + 1

"""The Wan family as data: one frozen row per variant, and the arithmetic that follows from a DiT's shape.

A variant is recognised from the model's own config, never from a folder's name.
Sources: the official Wan 2.1 and 2.2 configs and diffusers' conversion of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

TEXT_LEN = 512
"""Text tokens that every sample attends to: trimmed embeddings, zero-padded, pads attended (official Wan)."""
IMAGE_LEN = 257
"""CLIP tokens of one picture: 16 x 16 patches and the class token, whatever the picture's size."""
MASK_CHANNELS = 4
"""Channels that say which of a latent frame's four pixel frames are given."""


@dataclass(frozen=True)
class DiTShape:
    """The numbers of a Wan DiT that data, planning and reporting need.

    Attributes:
        num_heads: attention heads of a block.
        head_dim: channels of one head.
        num_layers: transformer blocks.
        ffn_dim: hidden width of the feed-forward.
        in_channels: channels that enter the patch embedding: noisy latents, and behind them what they are
            conditioned on.
        out_channels: channels that leave the model: those of the latents.
        text_dim: width of the text encoder's states.
        freq_dim: width of the sinusoidal timestep features.
        patch_size: latent (frames, height, width) of one token.
        image_dim: width of CLIP's states, None for a model that attends to no picture.
        image_len: CLIP tokens that every sample attends to, 0 without `image_dim`.
        image_positions: rows of the table of positions that tells two pictures apart, 0 without one.
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
    image_dim: int | None = None
    image_len: int = 0
    image_positions: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DiTShape:
        """Read the shape from a diffusers ``WanTransformer3DModel`` config."""
        pt, ph, pw = config["patch_size"]
        image_dim, positions = config.get("image_dim"), config.get("pos_embed_seq_len") or 0
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
            image_dim=image_dim,
            image_len=0 if image_dim is None else positions or IMAGE_LEN,
            image_positions=0 if image_dim is None else positions,
        )

    def to_config(self) -> dict[str, Any]:
        """The diffusers config of a DiT of this shape, as `from_config` reads it."""
        config: dict[str, Any] = {
            "patch_size": list(self.patch_size),
            "num_attention_heads": self.num_heads,
            "attention_head_dim": self.head_dim,
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "text_dim": self.text_dim,
            "freq_dim": self.freq_dim,
            "ffn_dim": self.ffn_dim,
            "num_layers": self.num_layers,
        }
        if self.image_dim is not None:
            config |= {"image_dim": self.image_dim, "added_kv_proj_dim": self.dim}
            config |= {"pos_embed_seq_len": self.image_positions or None}
        return config

    @property
    def condition_channels(self) -> int:
        """Channels of a token that are neither noised nor predicted: a mask and the latents of pictures."""
        return self.in_channels - self.out_channels

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return self.num_heads * self.head_dim

    @property
    def num_params(self) -> int:
        """Parameters of a DiT of this shape, norms and biases included."""
        d, f, patch = self.dim, self.ffn_dim, self._patch_volume
        attention = 4 * (d * d + d) + 2 * d  # q, k, v, out and the two qk norms
        block = 2 * attention + 2 * d + (d * f + f) + (f * d + d) + 6 * d
        time = (self.freq_dim * d + d) + (d * d + d) + (d * 6 * d + 6 * d)
        text = (self.text_dim * d + d) + (d * d + d)
        embed = self.in_channels * patch * d + d
        head = d * self.out_channels * patch + self.out_channels * patch + 2 * d
        image = 0
        if self.image_dim is not None:
            i = self.image_dim
            block += 2 * (d * d + d) + d  # keys and values of the picture, and the norm of its keys
            image = self.image_positions * i + 2 * i + (i * i + i) + (i * d + d) + 2 * d
        return self.num_layers * block + time + text + image + embed + head

    @property
    def _patch_volume(self) -> int:
        return self.patch_size[0] * self.patch_size[1] * self.patch_size[2]

    def linear_flops_per_token(self) -> int:
        """Multiply-adds x 2 of one video token's linear layers in one forward, attention scores left out."""
        d = self.dim
        block = 2 * (4 * d * d + 2 * d * d + 2 * d * self.ffn_dim)  # self q k v o, cross q o, ffn
        cross = 4 * d * (TEXT_LEN + self.image_len)  # scores and values against text and picture
        ends = 2 * d * self._patch_volume * (self.in_channels + self.out_channels)
        return self.num_layers * (block + cross) + ends

    def linear_flops_per_sample(self) -> int:
        """FLOPs of one forward that every sample pays once: keys, values and embeddings of text, picture and time."""
        d = self.dim
        text_kv = self.num_layers * 2 * 2 * d * d * (TEXT_LEN + self.image_len)
        embed = 2 * TEXT_LEN * (self.text_dim * d + d * d)
        time = 2 * (self.freq_dim * d + d * d + 6 * d * d)
        image = 2 * self.image_len * ((self.image_dim or 0) ** 2 + (self.image_dim or 0) * d)
        return text_kv + embed + image + time

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
class Expert:
    """One DiT of a model and the noise levels that it is trained at.

    Attributes:
        name: "high" or "low", "" for a model of one DiT.
        subfolder: "transformer" or "transformer_2": subfolder of a diffusers pipeline, and name of the module there.
        sigma_range: [low, high), the end included when it is 1.
    """

    name: str
    subfolder: str
    sigma_range: tuple[float, float]


@dataclass(frozen=True)
class Variant:
    """One published Wan model.

    Attributes:
        name: how wands and its recipes call it.
        dit: shape of the DiT (of each expert).
        vae_stride: pixels per latent in (frames, height, width).
        fps: frame rate that the model was trained at.
        default_shift: flow shift of official inference.
        boundary_ratio: t/1000 from which on the high-noise expert works, None for one expert.
        conditions: what the model is conditioned on besides noise, of
            "text": the caption, always;
            "image": the first frame, as 4 channels of mask and latents of that frame before grey ones;
            "last_image": the last frame, in the same channels;
            "clip": CLIP's states of these pictures, attended to beside the text;
            "first_frame": at will, the first latent frame itself, clean, its tokens at timestep 0.
    """

    name: str
    dit: DiTShape
    vae_stride: tuple[int, int, int] = (4, 8, 8)
    fps: int = 16
    default_shift: float = 5.0
    boundary_ratio: float | None = None
    conditions: tuple[str, ...] = ("text",)

    @property
    def num_images(self) -> int:
        """Pictures that every sample is conditioned on: 0, 1 (its first frame) or 2 (its last as well)."""
        return ("image" in self.conditions) + ("last_image" in self.conditions)

    @property
    def experts(self) -> tuple[Expert, ...]:
        """Its DiTs: sampling takes the first whenever t >= 1000 * boundary_ratio, else the second."""
        if self.boundary_ratio is None:
            return (Expert("", "transformer", (0.0, 1.0)),)
        boundary = self.boundary_ratio
        return (
            Expert("high", "transformer", (boundary, 1.0)),
            Expert("low", "transformer_2", (0.0, boundary)),
        )


def _shape(num_heads: int, num_layers: int, ffn_dim: int, **more: Any) -> DiTShape:
    channels = {"in_channels": 16, "out_channels": 16} | more
    return DiTShape(num_heads, 128, num_layers, ffn_dim, text_dim=4096, **channels)


_B1_3 = {"num_heads": 12, "num_layers": 30, "ffn_dim": 8960}
_B14 = {"num_heads": 40, "num_layers": 40, "ffn_dim": 13824}
_CLIP = {"in_channels": 36, "image_dim": 1280, "image_len": IMAGE_LEN}
_CLIP_2 = {"in_channels": 36, "image_dim": 1280, "image_len": 2 * IMAGE_LEN, "image_positions": 2 * IMAGE_LEN}
_B5 = {"num_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48}

VARIANTS: dict[str, Variant] = {
    row.name: row
    for row in (
        Variant("wan2.1-t2v-1.3b", _shape(**_B1_3)),
        Variant("wan2.1-t2v-14b", _shape(**_B14)),
        Variant("wan2.1-i2v-14b", _shape(**_B14, **_CLIP), conditions=("text", "image", "clip")),
        Variant(
            "wan2.1-flf2v-14b",
            _shape(**_B14, **_CLIP_2),
            default_shift=16.0,
            conditions=("text", "image", "last_image", "clip"),
        ),
        Variant("wan2.2-t2v-a14b", _shape(**_B14), default_shift=12.0, boundary_ratio=0.875),
        Variant(
            "wan2.2-i2v-a14b",
            _shape(**_B14, in_channels=36),
            boundary_ratio=0.9,
            conditions=("text", "image"),
        ),
        Variant(
            "wan2.2-ti2v-5b",
            _shape(**_B5),
            vae_stride=(4, 16, 16),
            fps=24,
            conditions=("text", "first_frame"),
        ),
    )
}


def variant_of(config: Mapping[str, Any], index: Mapping[str, Any] | None = None) -> Variant:
    """Recognise a model from its own configs.

    A shape that was never published, such as the demo's, is of the family whose interfaces it has, under a name
    that ends in "-tiny".

    Args:
        config: of the diffusers ``WanTransformer3DModel``; of A14B, either expert's.
        index: `model_index.json` of the pipeline. It tells the experts of Wan 2.2 T2V from a Wan 2.1 T2V model,
            whose DiT has the same shape, and it may set another `boundary_ratio`. None for a bare DiT.

    Raises:
        ValueError: the config is of no model that wands knows.
    """
    shape, index = DiTShape.from_config(config), index or {}
    family = _family(shape, index)
    rows = [row for row in VARIANTS.values() if row.name.startswith(f"{family}-")]
    row = next((row for row in rows if row.dit == shape), None)
    if row is None:
        row = replace(rows[0], name=f"{family}-tiny", dit=shape)
    boundary = index.get("boundary_ratio")
    return row if boundary is None else replace(row, boundary_ratio=float(boundary))


def _family(shape: DiTShape, index: Mapping[str, Any]) -> str:
    latents, extra, clip = shape.out_channels, shape.condition_channels, shape.image_dim is not None
    two_experts = index.get("boundary_ratio") is not None
    if extra == 0 and not clip:
        # The 5B model alone has the 48 channels of the Wan 2.2 VAE.
        if index.get("expand_timesteps", latents == 48):
            return "wan2.2-ti2v"
        return "wan2.2-t2v" if two_experts else "wan2.1-t2v"
    if extra == MASK_CHANNELS + latents:
        if not clip:
            return "wan2.2-i2v"
        return "wan2.1-flf2v" if shape.image_positions else "wan2.1-i2v"
    raise ValueError(
        f"in_channels={shape.in_channels}, out_channels={latents}, image_dim={shape.image_dim} is of no Wan 2.1 or 2.2 "
        "text-to-video or image-to-video model"
    )


def legal_frames(num_frames: int) -> int:
    """The longest 4k+1 that is not above `num_frames`: the causal VAE takes one frame and then groups of four."""
    return (num_frames - 1) // 4 * 4 + 1

"""Table of the Wan variants, and computations on the shape of a DiT (diffusion transformer).

A variant is recognized from the config of a model, never from the name of a folder.
Sources: the official Wan 2.1 and 2.2 configs (`wan/configs/*.py`), their `generate.py` and README, and the converted configs of
diffusers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from wands.errors import ConfigError

TEXT_LEN = 512
"""Number of text tokens that every sample attends to: the caption's, then zeros, as in official Wan."""
IMAGE_LEN = 257
"""Number of CLIP tokens of one image of any size: 16 x 16 patches and the class token."""
MASK_CHANNELS = 4
"""Mask channels of a latent frame, one for each of its four pixel frames: 1 for conditioning frames, 0 for others."""
EXTRA_KEY = "_wands_conditions"
"""Key in the config of a DiT that lists its inputs from outside code: {"name": NAME, "channels": NUMBER} for each."""
_EQUAL_KEYS = ("patch_size", "in_channels", "out_channels", "text_dim", "freq_dim", "ffn_dim", "num_layers")
_CONFIG_KEYS = {name: name for name in _EQUAL_KEYS}
_CONFIG_KEYS |= {"num_heads": "num_attention_heads", "head_dim": "attention_head_dim"}
"""Maps a field of DiTShape to the key of this field in diffusers' config."""


@dataclass(frozen=True)
class DiTShape:
    """Shape of a Wan DiT: numbers of heads, layers and channels.

    Attributes:
        num_heads: attention heads of a block.
        head_dim: channels of one head.
        num_layers: transformer blocks.
        ffn_dim: hidden width of the feed-forward layer.
        in_channels: latent channels of the input: noisy channels, then conditioning channels.
        out_channels: latent channels of the output.
        text_dim: width of the text encoder's hidden states.
        freq_dim: width of the sinusoidal timestep features.
        patch_size: size of one token in latent (frames, rows, columns).
        image_dim: width of CLIP's hidden states; None without CLIP.
        image_len: CLIP tokens that every sample attends to; 0 without CLIP.
        image_positions: rows of the learned position embedding that FLF2V models add to the CLIP tokens; 0 without it.
    """

    num_heads: int
    head_dim: int
    num_layers: int
    ffn_dim: int
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    patch_size: tuple[int, int, int] = (1, 2, 2)
    image_dim: int | None = None
    image_len: int = 0
    image_positions: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DiTShape:
        """Return the shape from the config of a diffusers `WanTransformer3DModel`; raise ValueError if it lacks a key."""
        if missing := [key for key in _CONFIG_KEYS.values() if key not in config]:
            raise ValueError(f"the transformer's config lacks keys of a Wan model: {', '.join(missing)}")
        image_dim = config.get("image_dim")
        positions = config.get("pos_embed_seq_len") or 0
        sizes: dict[str, Any] = {field: config[key] for field, key in _CONFIG_KEYS.items()}
        sizes["patch_size"] = tuple(config["patch_size"])
        sizes["out_channels"] = config["out_channels"] or config["in_channels"]
        if image_dim is not None:
            sizes |= {"image_len": positions or IMAGE_LEN, "image_positions": positions}
        return cls(image_dim=image_dim, **sizes)

    def to_config(self) -> dict[str, Any]:
        """Return the diffusers config of a DiT with this shape. `from_config` reads this config."""
        config = {key: getattr(self, field) for field, key in _CONFIG_KEYS.items()}
        config["patch_size"] = list(self.patch_size)
        if self.image_dim is not None:
            config |= {"image_dim": self.image_dim, "added_kv_proj_dim": self.dim}
            config["pos_embed_seq_len"] = self.image_positions or None
        return config

    @property
    def condition_channels(self) -> int:
        """Number of input channels of conditions, which get no noise and are not predicted."""
        return self.in_channels - self.out_channels

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @cached_property
    def num_params(self) -> int:
        """Number of parameters of a DiT with this shape, including norms and biases."""
        import torch
        from diffusers import WanTransformer3DModel

        with torch.device("meta"):
            model = WanTransformer3DModel.from_config(self.to_config())
        return sum(parameter.numel() for parameter in model.parameters())

    def linear_flops_per_token(self) -> int:
        """Return the FLOPs (2 for a multiply-add) per video token of linear layers and cross-attention in one forward pass."""
        d = self.dim
        block = 2 * (4 * d * d + 2 * d * d + 2 * d * self.ffn_dim)  # self q k v o, cross q o, ffn
        cross = 4 * d * (TEXT_LEN + self.image_len)  # scores and values of text and images
        ends = 2 * d * math.prod(self.patch_size) * (self.in_channels + self.out_channels)
        return self.num_layers * (block + cross) + ends

    def linear_flops_per_sample(self) -> int:
        """Return the FLOPs per sample, in one forward pass, of the layers that do not process video tokens.

        They compute the embeddings of text, images and timestep, and the keys and values of cross-attention.
        """
        d = self.dim
        text_kv = self.num_layers * 2 * 2 * d * d * (TEXT_LEN + self.image_len)
        embed = 2 * TEXT_LEN * (self.text_dim * d + d * d)
        time = 2 * (self.freq_dim * d + d * d + 6 * d * d)
        image = 2 * self.image_len * ((self.image_dim or 0) ** 2 + (self.image_dim or 0) * d)
        return text_kv + embed + image + time

    def attention_flops_per_squared_token(self) -> int:
        """Return the FLOPs of all self-attention layers in one forward pass for one (query, key) pair of tokens."""
        return self.num_layers * 4 * self.dim

    def forward_flops(self, seq_lens: Sequence[int]) -> int:
        """Return the matmul FLOPs of one forward pass of diffusers' model over samples with `seq_lens` video tokens.

        Each sample has 512 text tokens, padding included. A training step of a full finetune needs three times as many FLOPs.
        """
        of_samples = len(seq_lens) * self.linear_flops_per_sample()
        linear = sum(seq_lens) * self.linear_flops_per_token() + of_samples
        squares = sum(length * length for length in seq_lens)
        return linear + squares * self.attention_flops_per_squared_token()


class ExtraInput(Protocol):
    """Part of a condition (`wands.conditions.condition.Condition`) of outside code that decides the shape of a DiT."""

    name: str
    channels: int
    cross_tokens: int


@dataclass(frozen=True)
class Expert:
    """A DiT of a model, with the range of noise levels that it is trained for.

    Attributes:
        name: "high" or "low" noise; "" for a model with one DiT.
        subfolder: "transformer" or "transformer_2", also the name of the DiT.
        sigma_range: (smallest, largest) noise level in [0, 1]. The largest is excluded unless it is 1, so that ranges do not
            overlap.
    """

    name: str
    subfolder: str
    sigma_range: tuple[float, float]


_NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，"
    "多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，"
    "倒着走"
)
_STEADY = "镜头晃动，"  # shaking camera
_ONE_SHOT = f"镜头切换，{_STEADY}"  # change of the camera


@dataclass(frozen=True)
class SamplingDefaults:
    """Options for sampling videos from a model. For a published model, these are the options of the model's authors.

    Any other model gets the default values of this class, and as `flow_shift` and `scheduler_shift` the `scheduler_shift` of a
    published model of the same kind, such as Wan 2.1 text-to-video.

    Source: `generate.py` and `wan/configs` of Wan 2.1 and 2.2. For the 1.3B model, the size, the guidance scale 6 and the shift 8
    (recommended: 8 to 12) are from the README of Wan 2.1.

    Attributes:
        height: in pixels.
        width: in pixels.
        num_frames: number of frames.
        num_inference_steps: number of denoising steps.
        guidance_scale: scale of classifier-free guidance; with two experts, of the high-noise expert.
        guidance_scale_2: guidance scale of the low-noise expert; None uses `guidance_scale`.
        flow_shift: shift of the noise schedule.
        scheduler_shift: shift in the scheduler's config of the published pipeline. It can differ from `flow_shift`.
        negative_prompt: text from which classifier-free guidance steers away.
    """

    height: int = 480
    width: int = 832
    num_frames: int = 81
    num_inference_steps: int = 50
    guidance_scale: float = 5.0
    guidance_scale_2: float | None = None
    flow_shift: float = 3.0
    scheduler_shift: float = 3.0
    negative_prompt: str = ""


@dataclass(frozen=True)
class Variant:
    """A published Wan model.

    A model has one or more of these conditions:

    - "text": the caption. Every model has this condition.
    - "image": the first frame, as additional input channels: 4 mask channels, and the latents of a video with gray other frames.
    - "last_image": the last frame, in the same channels as "image".
    - "clip": CLIP's hidden states of the first frame, and for FLF2V also of the last frame, for the cross-attention.
    - "first_frame": the clean first latent frame, whose tokens have timestep 0. This condition is optional per sample.

    Attributes:
        name: name in wands and in recipes.
        dit: shape of the DiT; with two experts, of each.
        vae_stride: factors by which the VAE divides the numbers of (frames, rows, columns) of a video.
        fps: frame rate of the training videos.
        sampling: official sampling options.
        boundary_ratio: the high-noise expert is used for timesteps >= 1000 * boundary_ratio. None for a model with one DiT.
        conditions: names from the list above. `wands.conditions.published.conditions_of` returns the objects.
        extra: conditions of outside code, in the order in which they enter the model.
    """

    name: str
    dit: DiTShape
    vae_stride: tuple[int, int, int] = (4, 8, 8)
    fps: int = 16
    sampling: SamplingDefaults = SamplingDefaults()
    boundary_ratio: float | None = None
    conditions: tuple[str, ...] = ("text",)
    extra: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    @property
    def published_dit(self) -> DiTShape:
        """Shape of the DiT without the conditions of outside code."""
        return _widened(self.dit, self.extra, -1)

    @property
    def num_images(self) -> int:
        """Number of conditioning frames of every sample: 0, 1 (first frame) or 2 (first and last frame)."""
        return ("image" in self.conditions) + ("last_image" in self.conditions)

    @property
    def experts(self) -> tuple[Expert, ...]:
        """DiTs of the model: one, or the high-noise expert and then the low-noise expert."""
        boundary = self.boundary_ratio
        if boundary is None:
            return (Expert("", "transformer", (0.0, 1.0)),)
        return Expert("high", "transformer", (boundary, 1.0)), Expert("low", "transformer_2", (0.0, boundary))

    def latent_size(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return the size (frames, rows, columns) of the latents of a video.

        The frames are rounded down to a multiple of 4 plus 1.
        """
        stride = self.vae_stride
        return (num_frames - 1) // stride[0] + 1, height // stride[1], width // stride[2]

    def num_tokens(self, num_frames: int, height: int, width: int) -> int:
        """Return the number of tokens of a video in the DiT, see `latent_size`."""
        sides = zip(self.latent_size(num_frames, height, width), self.dit.patch_size, strict=True)
        return math.prod(side // patch for side, patch in sides)


_5B = DiTShape(num_heads=24, head_dim=128, num_layers=30, ffn_dim=14336, in_channels=48, out_channels=48)
_14B = DiTShape(num_heads=40, head_dim=128, num_layers=40, ffn_dim=13824)
_14B_I2V = replace(_14B, in_channels=36)
_14B_CLIP = replace(_14B_I2V, image_dim=1280, image_len=IMAGE_LEN)
_14B_CLIP_2 = replace(_14B_CLIP, image_len=2 * IMAGE_LEN, image_positions=2 * IMAGE_LEN)
_I2V = ("text", "image")
_TI2V = ("text", "first_frame")
_FIRST_LAST = (*_I2V, "last_image", "clip")
_480P = SamplingDefaults(negative_prompt=_NEGATIVE_PROMPT)
_480P_I2V = replace(_480P, num_inference_steps=40, negative_prompt=_STEADY + _NEGATIVE_PROMPT)
_480P_SMALL = replace(_480P, guidance_scale=6.0, flow_shift=8.0)
_720P = replace(_480P, height=720, width=1280, flow_shift=5.0)
_FLF2V = replace(_720P, flow_shift=16.0, scheduler_shift=16.0, negative_prompt=_ONE_SHOT + _NEGATIVE_PROMPT)
_I2V_A14B = replace(_720P, num_inference_steps=40, guidance_scale=3.5, guidance_scale_2=3.5)
_T2V_A14B = replace(_I2V_A14B, guidance_scale=4.0, guidance_scale_2=3.0, flow_shift=12.0)
_TI2V_5B = replace(_720P, height=704, num_frames=121, scheduler_shift=5.0)
_ROWS = (
    Variant(
        "wan2.1-t2v-1.3b",
        DiTShape(num_heads=12, head_dim=128, num_layers=30, ffn_dim=8960),
        sampling=_480P_SMALL,
    ),
    Variant("wan2.1-t2v-14b", _14B, sampling=_720P),
    Variant("wan2.1-i2v-14b", _14B_CLIP, sampling=_480P_I2V, conditions=(*_I2V, "clip")),
    Variant("wan2.1-flf2v-14b", _14B_CLIP_2, sampling=_FLF2V, conditions=_FIRST_LAST),
    Variant("wan2.2-t2v-a14b", _14B, sampling=_T2V_A14B, boundary_ratio=0.875),
    Variant("wan2.2-i2v-a14b", _14B_I2V, sampling=_I2V_A14B, boundary_ratio=0.9, conditions=_I2V),
    Variant("wan2.2-ti2v-5b", _5B, vae_stride=(4, 16, 16), fps=24, sampling=_TI2V_5B, conditions=_TI2V),
)
VARIANTS: dict[str, Variant] = {row.name: row for row in _ROWS}


def sampling_table() -> str:
    """Return a Markdown table of the official sampling options of all variants, except the negative prompts."""
    rows = [["variant", "width x height", "frames", "fps", "steps", "guidance", "shift"]]
    rows.append(["-" * len(title) for title in rows[0]])
    for name, variant in VARIANTS.items():
        official = variant.sampling
        scales = filter(None, (official.guidance_scale, official.guidance_scale_2))
        numbers = (official.num_frames, variant.fps, official.num_inference_steps)
        guidance = " / ".join(f"{scale:g}" for scale in scales)
        shift = f"{official.flow_shift:g}"
        rows.append([name, f"{official.width} x {official.height}", *map(str, numbers), guidance, shift])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)


def variant_of(
    config: Mapping[str, Any],
    index: Mapping[str, Any] | None = None,
    conditions: Sequence[ExtraInput] = (),
) -> Variant:
    """Return the variant of a model, recognized from its configs.

    A model with the inputs of a published family, such as "wan2.1-t2v", but an unpublished shape, such as a small model for
    tests, gives a new variant, named after the family with "-tiny", without official sampling options.

    With conditions of outside code, the shape in the result has their channels, whether or not the model has them already. A
    model that wands has trained lists them in its config. Another model has them if its channels fit no family without them.

    Args:
        config: config of the diffusers `WanTransformer3DModel`, of either expert.
        index: `model_index.json` of the pipeline; None for a DiT without one. It distinguishes Wan 2.2 T2V from Wan 2.1 T2V,
            whose DiTs have the same shape. A `boundary_ratio` in it replaces the variant's.
        conditions: conditions of outside code.

    Raises:
        ValueError: if the config lacks a key or matches no supported family, if a condition is missing that the model was trained
            with, or if the model has no place for a condition.
    """
    shape = DiTShape.from_config(config)
    index = index or {}
    known, new = _sort_extra(config, conditions)
    base = replace(shape, in_channels=shape.in_channels - sum(each.channels for each in known))
    try:
        family = _family(base, index)
    except ValueError:
        if known or not new:
            raise
        base = replace(shape, in_channels=shape.in_channels - sum(each.channels for each in new))
        family = _family(base, index)
    if shape.image_dim is None or shape.image_positions:
        for condition in conditions:
            if condition.cross_tokens:
                raise ConfigError(
                    f"condition {condition.name} enters the cross-attention to images, which only models of Wan 2.1 I2V have "
                    "(image_dim in transformer/config.json); use such a model, or let it enter by channels."
                )
    rows = [row for row in VARIANTS.values() if row.name.startswith(f"{family}-")]
    shift = rows[0].sampling.scheduler_shift
    sampling = SamplingDefaults(flow_shift=shift, scheduler_shift=shift)
    tiny = replace(rows[0], name=f"{family}-tiny", dit=base, sampling=sampling)
    row = next((row for row in rows if row.dit == base), tiny)
    if conditions:
        extra = (*known, *new)
        row = replace(row, dit=_widened(base, extra), extra=extra)
    boundary = index.get("boundary_ratio")
    return row if boundary is None else replace(row, boundary_ratio=float(boundary))


def with_extra(config: Mapping[str, Any], variant: Variant) -> dict[str, Any]:
    """Return the config of a DiT with the channels of the variant's conditions of outside code."""
    if not variant.extra:
        return dict(config)
    listed = [{"name": each.name, "channels": each.channels} for each in variant.extra]
    return {**config, "in_channels": variant.dit.in_channels, EXTRA_KEY: listed}


def check_extra(trained: Mapping[str, Any], config: Mapping[str, Any], place: str) -> None:
    """Raise ValueError unless the DiT with `config` has the outside conditions of the `trained` config, whose weights it gets."""
    names, present = (
        ", ".join(entry["name"] for entry in each.get(EXTRA_KEY) or ()) or "no input of outside code"
        for each in (trained, config)
    )
    if names != present:
        raise ValueError(
            f"{place} was trained with {names}, but this command has {present}; add --import FILE, where FILE defines the same "
            "inputs"
        )


def extra_channels(config: Mapping[str, Any]) -> int:
    """Return the number of input channels of conditions of outside code that the config of a DiT lists."""
    return sum(entry["channels"] for entry in config.get(EXTRA_KEY) or ())


def _sort_extra(
    config: Mapping[str, Any], conditions: Sequence[ExtraInput]
) -> tuple[list[ExtraInput], list[ExtraInput]]:
    """Divide conditions into those that a DiT lists in its config, in the order of the config, and new ones."""
    given = {condition.name: condition for condition in conditions}
    if len(given) < len(conditions):
        raise ValueError(f"two conditions have the same name ({', '.join(each.name for each in conditions)})")
    known = []
    for entry in config.get(EXTRA_KEY) or ():
        name = entry["name"]
        channels = entry["channels"]
        if name not in given:
            raise ConfigError(
                f"the transformer was trained with the input {name}, but no condition of this name is given; add --import FILE, "
                f"where FILE defines {name}."
            )
        if given[name].channels != channels:
            raise ValueError(
                f"condition {name} has {given[name].channels} channels, but the transformer was trained with {channels}"
            )
        known.append(given.pop(name))
    return known, list(given.values())


def _widened(dit: DiTShape, extra: Sequence[ExtraInput], sign: int = 1) -> DiTShape:
    """Return a shape with the channels and cross-attention tokens of conditions added, or removed for sign = -1."""
    return replace(
        dit,
        in_channels=dit.in_channels + sign * sum(each.channels for each in extra),
        image_len=dit.image_len + sign * sum(each.cross_tokens for each in extra),
    )


def _family(shape: DiTShape, index: Mapping[str, Any]) -> str:
    latents = shape.out_channels
    extra = shape.condition_channels
    clip = shape.image_dim is not None
    two_experts = index.get("boundary_ratio") is not None
    if extra == 0 and not clip:
        # Only the 5B model has the 48 channels of the Wan 2.2 VAE.
        if index.get("expand_timesteps", latents == 48):
            return "wan2.2-ti2v"
        return "wan2.2-t2v" if two_experts else "wan2.1-t2v"
    if extra == MASK_CHANNELS + latents:
        if not clip:
            return "wan2.2-i2v"
        return "wan2.1-flf2v" if shape.image_positions else "wan2.1-i2v"
    raise ValueError(
        f"the transformer's config has in_channels={shape.in_channels}, out_channels={latents} and image_dim="
        f"{shape.image_dim}, which no Wan 2.1 or 2.2 text-to-video or image-to-video model has"
    )

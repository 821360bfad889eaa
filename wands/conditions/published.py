"""Conditions of the published Wan models, and the list of the conditions of a variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wands.conditions.arrays import ArraySpec, ClipSize, latents_spec
from wands.conditions.clip_files import MASK_FILE, ClipFile
from wands.conditions.condition import (
    Arrays,
    Channels,
    ClipFrames,
    Condition,
    CrossAttention,
    Draw,
    Encoders,
    Entry,
    LossWeights,
    TextTokens,
)
from wands.config.recipe import FlowConfig
from wands.errors import DataError
from wands.patches import condition_channels
from wands.variants import MASK_CHANNELS, TEXT_LEN, DiTShape, Variant

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False)
class Text(Condition):
    """The caption, embedded by the text encoder, apart from clips. At dropout, `null_embeds` of the empty caption replace it."""

    width: int
    null_embeds: Tensor | None = None
    name = "text"
    encoders = ()

    def __post_init__(self) -> None:
        self.arrays = (
            ArraySpec(name="text_embeds", dtype="bf16", dims=(None, self.width), max_len=TEXT_LEN),
        )

    def encode(self, clip: ClipFrames, encoders: Encoders) -> dict[str, Tensor]:
        """Return nothing: the text of a sample does not come from its clip."""
        return {}

    def absent(self, size: ClipSize) -> dict[str, Tensor]:
        """Return the embedding of the empty caption."""
        assert self.null_embeds is not None
        return {"text_embeds": self.null_embeds}

    def mock(self, draw: Draw, size: ClipSize, free_len: int) -> dict[str, Tensor]:
        [spec] = self.arrays
        return {spec.name: spec.draw(draw("text"), spec.shape(size, [free_len]))}

    def enter(self, arrays: Arrays, size: ClipSize) -> Entry:
        return TextTokens(arrays["text_embeds"])

    def dropout_rate(self, flow: FlowConfig, of_source: float | None) -> float:
        """Return `flow.cfg_dropout`, unless the data source has its own rate."""
        return flow.cfg_dropout if of_source is None else of_source

    @property
    def dropout_purpose(self) -> str:
        return "cfg_dropout"


@dataclass(eq=False)
class ImageFrames(Condition):
    """First frame, and with `last_image` the last, as channels: a mask, and the latents of a video with gray other frames."""

    latent_channels: int
    last_image: bool = False
    name = "image"
    kind = "image"

    def __post_init__(self) -> None:
        dims = (self.latent_channels, "frames", "rows", "columns")
        self.arrays = (ArraySpec(name="image_latents", dtype="bf16", dims=dims),)
        self.channels = MASK_CHANNELS + self.latent_channels

    def fingerprint(self) -> Any:
        """Return which frames are given. Latents of the first frame differ from latents of the first and last frame."""
        return {"frames": "first and last" if self.last_image else "first"}

    def check_clip(self, path: str, num_frames: int) -> None:
        if num_frames == 1:
            raise DataError(
                f"video={path} gives one frame, but an image-to-video model generates a video from the first frame and "
                "needs more frames; remove images from SOURCE, or use a longer clip"
            )

    def encode_batch(self, clips: Sequence[ClipFrames], encoders: Encoders) -> list[dict[str, Tensor]]:
        """Encode the given frames of all samples as one batch of the VAE."""
        import torch

        assert len(clips[0].frames) > 1, "a still image has no frames after the first frame"
        given = torch.stack([given_frames(clip.pixels, self.last_image) for clip in clips])
        return [{"image_latents": latents} for latents in encoders.vae.encode(given)]

    def mock(self, draw: Draw, size: ClipSize, free_len: int) -> dict[str, Tensor]:
        [spec] = self.arrays
        return {spec.name: spec.draw(draw("image latents"), spec.shape(size))}

    def enter(self, arrays: Arrays, size: ClipSize) -> Entry:
        return Channels(condition_channels(arrays["image_latents"], self.last_image, size.patch_size))


@dataclass(eq=False)
class ClipStates(Condition):
    """Hidden states of CLIP for the first frame, and with `last_image` the last; `num_tokens` of both together."""

    num_tokens: int
    width: int
    last_image: bool = False
    name = "clip"
    encoders = ("vae", "image")

    def __post_init__(self) -> None:
        self.arrays = (ArraySpec(name="image_embeds", dtype="bf16", dims=(self.num_tokens, self.width)),)
        self.cross_tokens = self.num_tokens

    def encode(self, clip: ClipFrames, encoders: Encoders) -> dict[str, Tensor]:
        kept = [0, -1] if self.last_image else [0]
        return {"image_embeds": encoders.image.encode([*clip.frames[kept].numpy()])}

    def mock(self, draw: Draw, size: ClipSize, free_len: int) -> dict[str, Tensor]:
        [spec] = self.arrays
        return {spec.name: spec.draw(draw("image"), spec.shape(size))}

    def enter(self, arrays: Arrays, size: ClipSize) -> Entry:
        return CrossAttention(arrays["image_embeds"])


class CleanFirstFrame(Condition):
    """First latent frame without noise, with probability `flow.i2v_ratio` in each use of a sample (TI2V)."""

    name = "first_frame"
    kind = "first frame"
    is_optional = True
    encoders = ()

    def num_clean_tokens(self, draw: Draw, grid: tuple[int, int, int], flow: FlowConfig) -> int:
        """Return the number of tokens of the first frame, or 0. An image has no other token to train, and gets 0."""
        if grid[0] == 1:
            return 0
        is_given = draw("first_frame").random() < flow.i2v_ratio
        return grid[1] * grid[2] if is_given else 0


class LossMask(Condition):
    """Weight of each token in the loss, from 0 to 1. Only samples with a mask have the array.

    bf16 stores 0 and 1 exactly, other weights with an error of at most 0.4 %. Every rank needs the whole array, because the loss
    of a sample is divided by the sum of its weights.
    """

    name = "mask"
    files = (MASK_FILE,)
    encoders = ()
    arrays = (
        ArraySpec(
            name="token_weights",
            dtype="bf16",
            dims=("token_frames", "token_rows", "token_columns"),
            optional=True,
            whole=True,
        ),
    )

    def encode(self, clip: ClipFrames, encoders: Encoders) -> dict[str, Tensor]:
        """Return the weights that were computed while the mask was decoded."""
        weights = clip.files.get("mask")
        return {} if weights is None else {"token_weights": weights}

    def enter(self, arrays: Arrays, size: ClipSize) -> Entry | None:
        weights = arrays.get("token_weights")
        return None if weights is None else LossWeights(weights.flatten().float())


def given_frames(pixels: Tensor, last_image: bool) -> Tensor:
    """Return a copy of pixels [..., 3, F, H, W] in [-1, 1], F > 1, that keeps the first and, with `last_image`, the last frame.

    All other frames are gray (0).
    Source: diffusers `WanImageToVideoPipeline.prepare_latents`.
    """
    import torch

    video = torch.zeros_like(pixels)
    # A list as index would be copied to the GPU, and the host would wait.
    for i in (0, -1) if last_image else (0,):
        video[..., i, :, :] = pixels[..., i, :, :]
    return video


PUBLISHED = ("text", "image", "clip", "first_frame", "mask")


def published_conditions(dit: DiTShape, names: Sequence[str] = ("text",)) -> tuple[Condition, ...]:
    """Return the conditions of a published model, in the order in which they enter it. For `names`, see `Variant.conditions`."""
    last_image = "last_image" in names
    found: list[Condition] = [Text(dit.text_dim)]
    if "image" in names:
        found.append(ImageFrames(dit.out_channels, last_image))
    if "clip" in names:
        assert dit.image_dim is not None
        found.append(ClipStates(dit.image_len, dit.image_dim, last_image))
    if "first_frame" in names:
        found.append(CleanFirstFrame())
    return (*found, LossMask())


def conditions_of(variant: Variant) -> tuple[Condition, ...]:
    """Return the conditions of a model variant: those of the published model, then those of outside code."""
    return (*published_conditions(variant.published_dit, variant.conditions), *variant.extra)


def kinds_of(conditions: Sequence[Condition]) -> tuple[str, ...]:
    """Return the kinds of samples in an evaluation, such as ("text", "first frame").

    The first kind is without optional conditions. Each optional condition adds a kind.
    """
    named = [condition for condition in conditions if condition.kind is not None]
    always = [str(condition.kind) for condition in named if not condition.is_optional]
    optional = [str(condition.kind) for condition in named if condition.is_optional]
    return (" and ".join(always) or "text", *optional)


def arrays_of(variant: Variant) -> tuple[ArraySpec, ...]:
    """Return the arrays of a sample for a model variant, in the order in which checksums and offsets use them."""
    return specs_of(variant.dit, conditions_of(variant))


def clip_files_of(conditions: Sequence[Condition]) -> tuple[ClipFile, ...]:
    """Return the kinds of files next to a clip that the conditions need, each once."""
    return tuple({kind.column: kind for condition in conditions for kind in condition.files}.values())


def specs_of(dit: DiTShape, conditions: Sequence[Condition]) -> tuple[ArraySpec, ...]:
    """Return the arrays of a sample: the latents, then the arrays of the conditions in their order."""
    specs = [latents_spec(dit.out_channels)]
    for condition in conditions:
        specs += condition.arrays
    return tuple(specs)

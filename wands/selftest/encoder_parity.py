"""Checks that compare the VAE, text encoder and CLIP of `wands preprocess` with diffusers' stock pipeline."""

from __future__ import annotations

import inspect
from functools import partial
from unittest.mock import MagicMock

import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanVideoToVideoPipeline
from PIL import Image
from torch import Tensor

from wands.conditions.published import given_frames
from wands.data.clips.video import to_pixels
from wands.encoders.components import load_part
from wands.encoders.image import ImageEncoder
from wands.encoders.text import TextEncoder
from wands.encoders.vae import WanVideoEncoder
from wands.errors import ConfigError
from wands.model.files.official import LATENTS_22
from wands.patches import condition_channels, patchify
from wands.selftest.parity_setup import Result, Setup, Skipped, judge, judge_error, relative_error
from wands.selftest.stock import OFFICIAL_TEXT_LEN

MEAN_BAND = 0.5
STD_BAND = (0.3, 1.6)
"""Largest absolute mean, and range of the standard deviation, of the normalized latents of an ordinary clip.

Without normalization, the standard deviation would be about 2.2 in Wan 2.1."""
CAPTIONS = (
    "",
    "A man in a dark suit sits in a moving car.",
    "  Two&amp;nbsp;dogs &amp;lt;run&amp;gt;\n\tover   the â€œgreenâ€\x9d hill, 一只猫 ",
)
WORDS = "A long walk on the beach, "


class VaePart:
    """VAE in fp32 as `wands preprocess` loads it, and a clip that diffusers' stock pipeline has encoded.

    Attributes:
        pixels: pixels of the clip as the stock pipeline prepares them, fp32 [3, frames, height, width].
        latents: normalized latents as the stock pipeline computes them.
    """

    def __init__(self, setup: Setup) -> None:
        """Load the VAE, and let the stock pipeline encode the clip; raise ConfigError if the VAE cannot be loaded."""
        self.setup = setup
        self.encoder = WanVideoEncoder.load(setup.folder, setup.device)
        self.has_last = setup.has("last_image")
        self.parts = {"tokenizer": None, "text_encoder": None, "vae": self.encoder.vae}
        no_noise = MagicMock(add_noise=lambda latents, *_: latents)
        pipeline = WanVideoToVideoPipeline(**self.parts, transformer=None, scheduler=no_noise)
        frames = [Image.fromarray(frame) for frame in setup.frames]
        self.pixels: Tensor = pipeline.video_processor.preprocess_video(frames)[0].to(torch.float32)
        latents = pipeline.prepare_latents(self.pixels[None], dtype=torch.float32, device=setup.device)
        self.latents: Tensor = latents[0].cpu()

    def stock_condition(self) -> Tensor:
        """Return the stock pipeline's image condition for the first frame and, if the model takes it, the last."""
        expand_timesteps = self.setup.has("first_frame")
        device = self.setup.device
        pipeline = WanImageToVideoPipeline(**self.parts, scheduler=None, expand_timesteps=expand_timesteps)
        _, num_frames, height, width = self.pixels.shape
        pixels = self.pixels[None].to(device)
        condition: Tensor = pipeline.prepare_latents(
            pixels[:, :, 0],
            *(1, self.encoder.vae.config.z_dim, height, width, num_frames, torch.float32, device),
            last_image=pixels[:, :, -1] if self.has_last else None,
        )[1]
        return condition[0].cpu()


def check_pixels(part: VaePart) -> Result:
    """Check that `wands preprocess` gives the VAE the same pixels in [-1, 1] as the stock pipeline of diffusers."""
    pixels = to_pixels(part.setup.frames)
    low, high = pixels.aminmax()
    error = float((pixels - part.pixels).abs().max())
    number = f"pixels in [{low:.3f}, {high:.3f}], largest difference {error:.2g} from the stock pipeline"
    return Result.of(error <= 1e-6, number, "[-1, 1], <= 1e-06")


def check_latents(part: VaePart) -> Result:
    """Compare the normalized latents of `wands preprocess` with the latents of diffusers' stock pipeline."""
    latents = part.encoder.encode(part.pixels)
    variant = part.setup.variant
    shape = [variant.dit.out_channels, *variant.latent_size(*part.pixels.shape[1:])]
    if list(latents.shape) != shape:
        return Result.of(False, f"latents {list(latents.shape)}", f"{shape}, the shape of {variant.name}")
    return judge(latents, part.latents)


def check_statistics(part: VaePart) -> Result:
    """Check the mean and the standard deviation in the VAE's config, which normalize the latents.

    If the model has published layer sizes, compare them with the published ones. If the user gives the clip, the mean and the
    standard deviation of its normalized latents must be in `MEAN_BAND` and `STD_BAND`. If neither applies, only report the
    measured values.
    """
    std, mean = (float(value) for value in torch.std_mean(part.latents))
    number = f"mean {mean:.3f}, std {std:.3f}"
    passed = None
    bounds = []
    if part.setup.is_published:
        distance = _distance_from_published(part.encoder.vae)
        passed = distance <= 1e-3
        number += f", config {distance:.2g} from the published config"
        bounds.append("config <= 0.001")
    if part.setup.options.clip:
        low, high = STD_BAND
        passed = passed is not False and abs(mean) <= MEAN_BAND and low <= std <= high
        bounds.append(f"mean within {MEAN_BAND}, std {low} to {high}")
    return Result.of(passed, number, ", ".join(bounds) or "no bound for a synthetic clip; add --clip")


def _distance_from_published(vae: AutoencoderKLWan) -> float:
    """Return the largest difference of the config's latent mean and standard deviation from those of Wan 2.1 or 2.2."""
    table = LATENTS_22
    defaults = inspect.signature(AutoencoderKLWan.__init__).parameters
    if vae.config.z_dim == defaults["z_dim"].default:  # Wan 2.1
        table = {key: defaults[key].default for key in LATENTS_22}
    pairs = [(torch.tensor(vae.config[key]), torch.tensor(table[key])) for key in table]
    return max(float((stored - expected).abs().max()) for stored, expected in pairs)


def check_condition(part: VaePart) -> Result:
    """Compare the image condition (mask and latents) of an image-to-video model with that of diffusers' stock pipeline."""
    patch = part.setup.variant.dit.patch_size
    latents = part.encoder.encode(given_frames(part.pixels, part.has_last))
    return judge(condition_channels(latents, part.has_last, patch), patchify(part.stock_condition(), patch))


def check_first_frame(part: VaePart) -> Result:
    """Compare the first latent frame of a whole clip, as wands encodes it, with the first frame encoded alone, as diffusers does.

    They must be equal, because the VAE is causal.
    """
    return judge(part.encoder.encode(part.pixels)[:, :1], part.stock_condition())


def _load_stock(setup: Setup, dtype: torch.dtype, label: str, *parts: str) -> WanImageToVideoPipeline:
    """Load a stock pipeline of diffusers with only some of its parts, such as "tokenizer"; `label` names them in the ConfigError.

    It is the image-to-video pipeline for every model, because both encode text in the same way.
    """
    unused = dict.fromkeys(inspect.signature(WanImageToVideoPipeline).parameters.keys() - set(parts))
    options = {**unused, "dtype": dtype, "use_safetensors": True, "trust_remote_code": False}
    load = partial(WanImageToVideoPipeline.from_pretrained, setup.folder, **options)
    return load_part(setup.folder, label, load).to(setup.device)


@torch.no_grad()
def check_image_embeds(setup: Setup) -> Result:
    """Compare the image embeddings (input of CLIP's last layer) with those of diffusers' stock pipeline."""
    frames = setup.frames[[0, -1] if setup.has("last_image") else [0]]
    embeds = ImageEncoder.load(setup.folder, setup.device).encode(list(frames))
    pipeline = _load_stock(setup, torch.float32, "image encoder", "image_processor", "image_encoder")
    images = [Image.fromarray(frame) for frame in frames]
    return judge(embeds, pipeline.encode_image(images, setup.device).flatten(0, 1))


class TextPart:
    """Tokenizer and text encoder UMT5, loaded by diffusers' stock pipeline, which contains only these."""

    def __init__(self, setup: Setup) -> None:
        self.pipeline = _load_stock(setup, setup.dtype, "text encoder", "tokenizer", "text_encoder")
        self.tokenizer = self.pipeline.tokenizer
        self.model = self.pipeline.text_encoder
        self.model.requires_grad_(False)

    def encode(self, caption: str) -> Tensor:
        """Return the text embedding that `wands preprocess` computes, fp32 [tokens, text_dim].

        Raises:
            Skipped: if the token embedding of UMT5 was loaded with random values, which the check "text.tied" reports.
        """
        try:
            return TextEncoder(self.tokenizer, self.model).encode(caption).float()
        except ConfigError as error:
            raise Skipped(f"the check text.tied fails: {error}") from None

    def encode_stock(self, caption: str) -> Tensor:
        """Return the text embedding that diffusers' stock pipeline computes, fp32 [512, text_dim]."""
        embeds, _ = self.pipeline.encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=OFFICIAL_TEXT_LEN
        )
        return embeds[0].float().cpu()


def check_embeds(part: TextPart, captions: tuple[str, ...] = CAPTIONS) -> Result:
    """Compare text embeddings, padded with zeros to 512 tokens, with those of diffusers' stock pipeline."""
    errors = []
    for caption in captions:
        embeds = part.encode(caption)
        padded = torch.nn.functional.pad(embeds, (0, 0, 0, OFFICIAL_TEXT_LEN - len(embeds)))
        errors.append(relative_error(padded, part.encode_stock(caption)))
    if part.model.dtype == torch.float32:
        return judge_error(max(errors), 2**-8, "stored in bf16")
    return judge_error(max(errors), 0.1, "computed in bf16, padded and unpadded")


def check_tied(part: TextPart) -> Result:
    """Check that the encoder of UMT5 uses the trained token embedding `shared.weight` itself, and not a separate tensor."""
    used = part.model.encoder.embed_tokens.weight
    trained = part.model.shared.weight
    error = float((used - trained).abs().max())
    same = used.data_ptr() == trained.data_ptr()
    number = f"encoder.embed_tokens is {'' if same else 'not '}shared.weight, largest difference {error:.2g}"
    return Result.of(same and error == 0, number, "the same tensor")


def check_length(part: TextPart) -> Result:
    """Check that `wands preprocess` cuts captions after 512 tokens, as the stock pipeline with this limit (default: 226)."""
    tokens_per_phrase = (len(part.tokenizer(WORDS * 10).input_ids) - len(part.tokenizer(WORDS).input_ids)) / 9
    captions = (WORDS * round(350 / tokens_per_phrase), WORDS * round(700 / tokens_per_phrase))
    short, long = (len(part.encode(caption)) for caption in captions)
    embeds = check_embeds(part, captions)
    passed = embeds.status == "pass" and 226 < short < long == OFFICIAL_TEXT_LEN
    number = f"long captions keep {short} and {long} tokens, {embeds.text}"
    return Result.of(passed, number, "226 < n < 512 and 512")

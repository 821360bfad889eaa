"""Checks of VAE, text encoder and CLIP: the encoders of preprocess against the stock pipeline."""

from __future__ import annotations

import inspect

import torch
from accelerate.utils.memory import clear_device_cache
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanPipeline
from diffusers.pipelines.wan.pipeline_wan_i2v import retrieve_latents
from diffusers.video_processor import VideoProcessor
from PIL import Image
from torch import Tensor

from wands.commands.selftest.parity_setup import (
    Group,
    Outcome,
    Setup,
    Skipped,
    judge,
    relative_error,
)
from wands.commands.selftest.stock import OFFICIAL_TEXT_LEN
from wands.data.clips.video import to_pixels
from wands.data.conditions import condition_tokens
from wands.data.patchify import patchify
from wands.encoders.components import find_part, loading_part
from wands.encoders.image import ImageEncoder, given_frames
from wands.encoders.text import TextEncoder
from wands.encoders.vae import WanVideoEncoder
from wands.errors import ConfigError
from wands.model.files.official import LATENTS_22

FP32_BOUND = 1e-5, "fp32 in another order"
MEAN_BAND, STD_BAND = 0.5, (0.3, 1.6)
"""Ranges of normalised latents of an ordinary clip. Before normalisation, Wan 2.1's latents have a deviation near 2.2."""
PSNR_FLOOR = 15.0
CAPTIONS = (
    "",
    "A man in a dark suit sits in a moving car.",
    "  Two&amp;nbsp;dogs &amp;lt;run&amp;gt;\n\tover   the â€œgreenâ€\x9d hill, 一只猫 ",
)
WORDS = "A long walk on the beach, "


class VaePart:
    """VAE in fp32, the clip's pixels and the clip's latents, as the stock pipeline computes them."""

    def __init__(self, setup: Setup) -> None:
        """Load the VAE as preprocess does.

        Raises:
            ConfigError: if the VAE is missing or cannot be loaded.
        """
        self.setup, self.conditions = setup, setup.variant.conditions
        self.encoder = WanVideoEncoder.load(setup.folder, setup.device)
        self.vae: AutoencoderKLWan = self.encoder.vae
        processor = VideoProcessor(vae_scale_factor=self.vae.config.scale_factor_spatial)
        frames = [Image.fromarray(frame) for frame in setup.frames]
        self.pixels: Tensor = processor.preprocess_video(frames)[0].to(torch.float32)  # [3, F, H, W]
        with torch.no_grad():
            encoded = self.vae.encode(self.pixels[None].to(self.vae.device, self.vae.dtype))
        latents = retrieve_latents(encoded, sample_mode="argmax").cpu().float()[0]
        # as in `WanImageToVideoPipeline.prepare_latents`
        mean, std = (
            torch.tensor(values).view(-1, 1, 1, 1)
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        self.latents: Tensor = (latents - mean) * (1.0 / std)  # [C, f, h, w]

    @torch.no_grad()
    def prepare(self, *last_image: Tensor) -> Tensor:
        """Return the condition that the stock pipeline computes from the first image and an optional last image."""
        pipeline = WanImageToVideoPipeline(
            tokenizer=None,
            text_encoder=None,
            vae=self.vae,
            scheduler=None,
            expand_timesteps="first_frame" in self.conditions,
        )
        _, num_frames, height, width = self.pixels.shape
        device = self.setup.device
        shape = (1, self.vae.config.z_dim, height, width, num_frames, torch.float32, device)
        images = [image[None].to(device) for image in (self.pixels[:, 0], *last_image)]
        condition: Tensor = pipeline.prepare_latents(
            images[0], *shape, torch.Generator(device), None, *images[1:]
        )[1]
        return condition[0]


def check_pixels(part: VaePart) -> Outcome:
    """Check that the VAE gets pixels in [-1, 1]."""
    pixels = to_pixels(part.setup.frames)
    low, high = pixels.aminmax()
    error = float((pixels - part.pixels).abs().max())
    number = f"pixels in [{low:.3f}, {high:.3f}], {error:.2g} from the stock pipeline's"
    return Outcome(error <= 1e-6, number, "[-1, 1], <= 1e-06")


def check_latents(part: VaePart) -> Outcome:
    """Compare the normalised latents with the stock pipeline."""
    latents, variant = part.encoder.encode(part.pixels), part.setup.variant
    frames, height, width = part.pixels.shape[1:]
    shape = [variant.dit.out_channels, *variant.latent_size(frames, height, width)]
    if list(latents.shape) != shape:
        return Outcome(False, f"latents {list(latents.shape)}", f"{shape}, the shape of {variant.name}")
    return judge(relative_error(latents, part.latents), *FP32_BOUND)


def check_statistics(part: VaePart) -> Outcome:
    """Compare the statistics in the VAE's config with its latents, and with the published ones."""
    std, mean = (float(value) for value in torch.std_mean(part.latents))
    number, passed, bounds = f"mean {mean:.3f}, std {std:.3f}", None, []
    if part.setup.is_published:
        distance = _distance_from_published(part.vae)
        passed = distance <= 1e-3
        number += f", config {distance:.2g} from the published one"
        bounds.append("config <= 0.001")
    if part.setup.has_clip:
        low, high = STD_BAND
        passed = passed is not False and abs(mean) <= MEAN_BAND and low <= std <= high
        bounds.append(f"mean within {MEAN_BAND}, std {low} to {high}")
    return Outcome(passed, number, ", ".join(bounds) or "none for a synthetic clip; give --clip")


def _distance_from_published(vae: AutoencoderKLWan) -> float:
    defaults = inspect.signature(AutoencoderKLWan.__init__).parameters  # the statistics of Wan 2.1
    for table in ({key: defaults[key].default for key in LATENTS_22}, LATENTS_22):
        if len(table["latents_mean"]) == len(vae.config.latents_mean):
            pairs = [(torch.tensor(vae.config[key]), torch.tensor(table[key])) for key in table]
            return max(float((stored - expected).abs().max()) for stored, expected in pairs)
    return float("inf")


def check_roundtrip(part: VaePart) -> Outcome:
    """Measure the clip's PSNR after encoding and decoding."""
    decoded = part.encoder.decode(part.latents)
    psnr = 10 * float(torch.log10(4.0 / (decoded - part.pixels).square().mean()))
    if not part.setup.is_published:
        return Outcome(None, f"PSNR {psnr:.1f} dB", "none for a VAE that was never published")
    return Outcome(psnr >= PSNR_FLOOR, f"PSNR {psnr:.1f} dB", f">= {PSNR_FLOOR:g} dB")


@torch.no_grad()
def check_condition(part: VaePart) -> Outcome:
    """Compare the image condition of I2V, mask and latents, with the stock pipeline."""
    has_last, patch = "last_image" in part.conditions, part.setup.variant.dit.patch_size
    condition = part.prepare(*([part.pixels[:, -1]] if has_last else []))
    tokens = condition_tokens(part.encoder.encode(given_frames(part.pixels, has_last)), has_last, patch)
    return judge(relative_error(tokens, patchify(condition.cpu(), patch)), *FP32_BOUND)


def check_first_frame(part: VaePart) -> Outcome:
    """Compare the first latent frame of a clip with the latents that the TI2V pipeline computes from its first frame."""
    return judge(relative_error(part.encoder.encode(part.pixels)[:, :1], part.prepare()), *FP32_BOUND)


@torch.no_grad()
def check_image_embeds(setup: Setup) -> Outcome:
    """Compare CLIP's hidden states before the last layer with the stock pipeline."""
    given = [0, -1] if "last_image" in setup.variant.conditions else [0]
    unused = dict.fromkeys(["vae", "text_encoder", "tokenizer", "transformer", "transformer_2"])
    with loading_part(setup.folder, "image encoder"):
        pipeline = WanImageToVideoPipeline.from_pretrained(setup.folder, **unused, dtype=torch.float32)
    images = [Image.fromarray(image) for image in setup.frames[given]]
    expected = pipeline.to(setup.device).encode_image(images, setup.device).flatten(0, 1).cpu()
    del pipeline
    clear_device_cache(garbage_collection=True)
    embeds = ImageEncoder.load(setup.folder, setup.device).encode(list(setup.frames[given]))
    return judge(relative_error(embeds, expected), *FP32_BOUND)


class TextPart:
    """Tokenizer and UMT5, as the stock pipeline loads and calls them."""

    def __init__(self, setup: Setup) -> None:
        """Load tokenizer and UMT5.

        Raises:
            ConfigError: if a part is missing or cannot be loaded.
        """
        from transformers import AutoTokenizer, UMT5EncoderModel

        self.dtype = setup.dtype
        with loading_part(setup.folder, "text encoder"):
            self.tokenizer = AutoTokenizer.from_pretrained(find_part(setup.folder, "tokenizer"))
            model = UMT5EncoderModel.from_pretrained(
                find_part(setup.folder, "text_encoder"), dtype=setup.dtype
            )
        self.model = model.to(setup.device).eval().requires_grad_(False)
        self.pipeline = WanPipeline(
            tokenizer=self.tokenizer, text_encoder=self.model, vae=None, scheduler=None
        )

    def encode(self, caption: str) -> Tensor:
        """Return the embedding of preprocess, fp32 [tokens, text_dim]."""
        try:
            return TextEncoder(self.tokenizer, self.model).encode(caption).float()
        except ConfigError as error:
            raise Skipped(f"text.tied fails: {error}") from None

    @torch.no_grad()
    def encode_stock(self, caption: str) -> Tensor:
        """Return the embedding of the stock pipeline, fp32 [512, text_dim]."""
        embeds, _ = self.pipeline.encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=OFFICIAL_TEXT_LEN
        )
        return embeds[0].float().cpu()

    def compare(self, captions: tuple[str, ...]) -> Outcome:
        """Compare zero-padded embeddings with the embeddings of the stock pipeline."""
        errors = []
        for caption in captions:
            embeds = self.encode(caption)
            padded = torch.nn.functional.pad(embeds, (0, 0, 0, OFFICIAL_TEXT_LEN - len(embeds)))
            errors.append(relative_error(padded, self.encode_stock(caption)))
        if self.dtype == torch.float32:
            return judge(max(errors), 2**-8, "stored in bf16")
        return judge(max(errors), 0.1, "computed in bf16, padded and unpadded")


def check_tied(part: TextPart) -> Outcome:
    """Check that UMT5 uses the trained token embedding."""
    used, trained = part.model.encoder.embed_tokens.weight, part.model.shared.weight
    error = float((used - trained).abs().max())
    same = used.data_ptr() == trained.data_ptr()
    number = f"encoder.embed_tokens is {'' if same else 'not '}shared, {error:.2g} from it"
    return Outcome(same and error == 0, number, "the same tensor")


def check_pads(part: TextPart) -> Outcome:
    """Check that the stock embedding is zero after the last token of the caption, and not before."""
    lens = [len(part.encode(caption)) for caption in CAPTIONS]
    stock = [part.encode_stock(caption) for caption in CAPTIONS]
    pads = max(float(rows[length:].abs().max()) for rows, length in zip(stock, lens, strict=True))
    ends = min(float(rows[length - 1].abs().max()) for rows, length in zip(stock, lens, strict=True))
    number = f"captions of {', '.join(map(str, lens))} tokens, the largest pad is {pads:g}"
    whole = {len(rows) for rows in stock} == {OFFICIAL_TEXT_LEN}
    return Outcome(pads == 0 < ends and whole, number, "0 up to row 512")


def check_length(part: TextPart) -> Outcome:
    """Check that long captions are cut at 512 tokens, not at 226, the default of diffusers' `encode_prompt`."""
    tokens_per_phrase = (len(part.tokenizer(WORDS * 10).input_ids) - len(part.tokenizer(WORDS).input_ids)) / 9
    captions = (WORDS * round(350 / tokens_per_phrase), WORDS * round(700 / tokens_per_phrase))
    short, long = (len(part.encode(caption)) for caption in captions)
    compared = part.compare(captions)
    passed = bool(compared.passed) and 226 < short < long == OFFICIAL_TEXT_LEN
    number = f"long captions keep {short} and {long} tokens, {compared.number}"
    return Outcome(passed, number, f"226 < n < 512 and 512, {compared.bound}")


ENCODER_GROUPS: tuple[Group, ...] = (
    (
        VaePart,
        {
            "vae.pixels": check_pixels,
            "vae.latents": check_latents,
            "vae.statistics": check_statistics,
            "vae.roundtrip": check_roundtrip,
            "image.condition": check_condition,
            "first_frame.latents": check_first_frame,
        },
    ),
    (
        TextPart,
        {
            "text.tied": check_tied,
            "text.embeds": lambda part: part.compare(CAPTIONS),
            "text.pads": check_pads,
            "text.length": check_length,
        },
    ),
    (lambda setup: setup, {"image.embeds": check_image_embeds}),
)

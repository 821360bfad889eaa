"""Checks of VAE, text encoder and CLIP: what preprocess makes of a clip is what the stock pipeline makes of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanPipeline
from diffusers.pipelines.wan.pipeline_wan_i2v import retrieve_latents
from diffusers.video_processor import VideoProcessor
from PIL import Image
from torch import Tensor

from wands.commands.selftest.parity_setup import (
    OFFICIAL_TEXT_LEN,
    Outcome,
    Setup,
    Skipped,
    free_memory,
    judge,
    relative_error,
)
from wands.data.clips.video import to_pixels
from wands.data.conditions import condition_tokens
from wands.data.patchify import patchify
from wands.encoders.components import find_part, quiet_without_terminal
from wands.encoders.image import ImageEncoder, given_frames
from wands.encoders.text import TextEncoder
from wands.encoders.vae import WanVideoEncoder
from wands.errors import ConfigError
from wands.model.files.encoder_names import LATENTS_22

FP32 = "fp32 in another order"
MEAN_BAND, STD_BAND = 0.5, (0.3, 1.6)
"""Of normalised latents of an ordinary clip. Wan 2.1's own have a deviation near 2.2 before they are normalised."""
PSNR_FLOOR = 15.0
CAPTIONS = (
    "",
    "A man in a dark suit sits in a moving car.",
    "  Two&amp;nbsp;dogs &amp;lt;run&amp;gt;\n\tover   the â€œgreenâ€\x9d hill, 一只猫 ",
)
WORDS = "A long walk on the beach, "


class VaeChecks:
    """Pixels to latents and back, and what a model is conditioned on that the VAE makes."""

    def __init__(self, setup: Setup) -> None:
        """Load the VAE in fp32, as preprocess does.

        Raises:
            ConfigError: there is none, or it does not load.
        """
        self.setup = setup
        self.encoder = WanVideoEncoder.load(setup.folder, setup.device)
        self.vae: AutoencoderKLWan = self.encoder.vae
        processor = VideoProcessor(vae_scale_factor=self.vae.config.scale_factor_spatial)
        pictures = [Image.fromarray(frame) for frame in setup.frames]
        self.pixels = processor.preprocess_video(pictures)[0].to(torch.float32)  # [3, F, H, W], the stock way
        self.latents = self._stock_latents()

    @torch.no_grad()
    def _stock_latents(self) -> Tensor:
        """[C, f, h, w] as `WanImageToVideoPipeline.prepare_latents` normalises them."""
        config = self.vae.config
        encoded = self.vae.encode(self.pixels[None].to(self.vae.device, self.vae.dtype))
        latents = retrieve_latents(encoded, sample_mode="argmax").cpu().float()
        mean = torch.tensor(config.latents_mean).view(1, config.z_dim, 1, 1, 1)
        std = 1.0 / torch.tensor(config.latents_std).view(1, config.z_dim, 1, 1, 1)
        return ((latents - mean) * std)[0]

    def check_pixels(self) -> Outcome:
        """The VAE gets pixels in [-1, 1]."""
        pixels = to_pixels(self.setup.frames)
        low, high = pixels.aminmax()
        error = float((pixels - self.pixels).abs().max())
        number = f"pixels in [{low:.3f}, {high:.3f}], {error:.2g} from the stock pipeline's"
        return Outcome(error <= 1e-6, number, "[-1, 1], <= 1e-06")

    def check_latents(self) -> Outcome:
        """The posterior's mean, normalised."""
        found, dit = self.encoder.encode(self.pixels), self.setup.variant
        frames, height, width = self.pixels.shape[1:]
        time, rows, columns = dit.vae_stride
        wanted = (dit.dit.out_channels, (frames - 1) // time + 1, height // rows, width // columns)
        if tuple(found.shape) != wanted:
            return Outcome(False, f"latents {list(found.shape)}", f"{list(wanted)}, those of {dit.name}")
        return judge(relative_error(found, self.latents), 1e-5, FP32)

    def check_statistics(self) -> Outcome:
        """The statistics in the VAE's config are those of its latents."""
        std, mean = (float(x) for x in torch.std_mean(self.latents))
        number, passed, bounds = f"mean {mean:.3f}, std {std:.3f}", None, []
        if self.setup.is_published:
            distance = self._distance_from_published()
            passed = distance <= 1e-3
            number += f", config {distance:.2g} from the published one"
            bounds.append("config <= 0.001")
        if self.setup.clip is not None:
            low, high = STD_BAND
            passed = passed is not False and abs(mean) <= MEAN_BAND and low <= std <= high
            bounds.append(f"mean within {MEAN_BAND}, std {low} to {high}")
        return Outcome(passed, number, ", ".join(bounds) or "none for a made-up clip; give --clip")

    def _distance_from_published(self) -> float:
        defaults = inspect.signature(AutoencoderKLWan.__init__).parameters  # Wan 2.1's own
        keys = ("latents_mean", "latents_std")
        tables = [{key: defaults[key].default for key in keys}, LATENTS_22]
        distances = []
        for key in keys:
            mine = torch.tensor(self.vae.config[key])
            theirs = [torch.tensor(table[key]) for table in tables if len(table[key]) == len(mine)]
            distances.append(float((mine - theirs[0]).abs().max()) if theirs else float("inf"))
        return max(distances)

    def check_roundtrip(self) -> Outcome:
        """Decoded again, the clip is there."""
        decoded = self.encoder.decode(self.latents)
        psnr = 10 * float(torch.log10(4.0 / (decoded - self.pixels).square().mean()))
        if not self.setup.is_published:
            return Outcome(None, f"PSNR {psnr:.1f} dB", "none for a VAE that was never published")
        return Outcome(psnr >= PSNR_FLOOR, f"PSNR {psnr:.1f} dB", f">= {PSNR_FLOOR:g} dB")

    @torch.no_grad()
    def check_condition(self) -> Outcome:
        """Mask and grey frames of I2V are those that the stock pipeline builds."""
        last_image = "last_image" in self.setup.variant.conditions
        condition = self._prepare(*([self.pixels[:, -1]] if last_image else []))[1]
        patch = self.setup.variant.dit.patch_size
        found = condition_tokens(
            encode_given_frames(self.encoder, self.pixels, last_image), last_image, patch
        )
        return judge(relative_error(found, patchify(condition[0].cpu(), patch)), 1e-5, FP32)

    @torch.no_grad()
    def check_first_frame(self) -> Outcome:
        """TI2V: the first latent frame of a clip is that of its first frame alone."""
        condition = self._prepare()[1]
        return judge(relative_error(self.encoder.encode(self.pixels)[:, :1], condition[0]), 1e-5, FP32)

    def _prepare(self, *last: Tensor) -> tuple[Tensor, ...]:
        """What the stock pipeline does with its pictures before it samples."""
        pipeline = WanImageToVideoPipeline(
            tokenizer=None,
            text_encoder=None,
            vae=self.vae,
            scheduler=None,
            expand_timesteps="first_frame" in self.setup.variant.conditions,
        )
        _, num_frames, height, width = self.pixels.shape
        device = self.setup.device
        shape = (1, self.vae.config.z_dim, height, width, num_frames, torch.float32, device)
        pictures = [picture[None].to(device) for picture in (self.pixels[:, 0], *last)]
        return pipeline.prepare_latents(pictures[0], *shape, torch.Generator(device), None, *pictures[1:])

    CHECKS: ClassVar[dict[str, Callable[[Any], Outcome]]] = {
        "vae.pixels": check_pixels,
        "vae.latents": check_latents,
        "vae.statistics": check_statistics,
        "vae.roundtrip": check_roundtrip,
        "image.condition": check_condition,
        "first_frame.latents": check_first_frame,
    }


def encode_given_frames(encoder: WanVideoEncoder, pixels: Tensor, last_image: bool) -> Tensor:
    """The latents of a clip of which only the first frame, or first and last, is given, as preprocess makes them.

    Args:
        encoder: the VAE.
        pixels: [3, F, H, W] in [-1, 1].
        last_image: the last frame is given too.

    Returns:
        fp32 [C, f, h, w], normalised.
    """
    return encoder.encode(given_frames(pixels, last_image))


class ClipChecks:
    """What I2V models of Wan 2.1 attend to beside the text."""

    def __init__(self, setup: Setup) -> None:
        """Take what is tested.

        Args:
            setup: of a model with CLIP.
        """
        self.setup = setup
        self.given = [0, -1] if "last_image" in setup.variant.conditions else [0]

    def check_embeds(self) -> Outcome:
        """CLIP's states before its last layer, one picture after the other."""
        right = self._stock()
        free_memory()
        encoder = ImageEncoder.load(self.setup.folder, self.setup.device)
        found = encoder.encode(list(self.setup.frames[self.given]))
        return judge(relative_error(found, right), 1e-5, FP32)

    @torch.no_grad()
    def _stock(self) -> Tensor:
        unused = dict.fromkeys(["vae", "text_encoder", "tokenizer", "transformer", "transformer_2"])
        try:
            with quiet_without_terminal():
                pipeline = WanImageToVideoPipeline.from_pretrained(
                    self.setup.folder, **unused, torch_dtype=torch.float32
                )
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"model={self.setup.folder}: its image encoder cannot be loaded ({reason})."
            ) from None
        pictures = [Image.fromarray(picture) for picture in self.setup.frames[self.given]]
        states: Tensor = pipeline.to(self.setup.device).encode_image(pictures, self.setup.device)
        return states.flatten(0, 1).cpu()

    CHECKS: ClassVar[dict[str, Callable[[Any], Outcome]]] = {"image.embeds": check_embeds}


class TextChecks:
    """Captions to what the DiT attends to."""

    def __init__(self, setup: Setup) -> None:
        """Load tokenizer and UMT5 as the stock pipeline does.

        Raises:
            ConfigError: there is none, or it does not load.
        """
        from transformers import AutoTokenizer, UMT5EncoderModel

        self.setup = setup
        try:
            with quiet_without_terminal():
                self.tokenizer = AutoTokenizer.from_pretrained(find_part(setup.folder, "tokenizer"))
                self.model = UMT5EncoderModel.from_pretrained(
                    find_part(setup.folder, "text_encoder"), dtype=setup.torch_dtype
                )
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"model={setup.folder}: its text encoder cannot be loaded ({reason})."
            ) from None
        self.model = self.model.to(setup.device).eval().requires_grad_(False)
        pipeline = WanPipeline(tokenizer=self.tokenizer, text_encoder=self.model, vae=None, scheduler=None)
        self.encode_prompt = pipeline.encode_prompt

    def check_tied(self) -> Outcome:
        """UMT5's embedding is the one that was trained."""
        used, trained = self.model.encoder.embed_tokens.weight, self.model.shared.weight
        error = float((used - trained).abs().max())
        same = used.data_ptr() == trained.data_ptr()
        number = f"encoder.embed_tokens is {'' if same else 'not '}shared, {error:.2g} from it"
        return Outcome(same and error == 0, number, "the same tensor")

    def _ours(self, caption: str) -> Tensor:
        try:
            return TextEncoder(self.tokenizer, self.model).encode(caption).float()
        except ConfigError as error:
            raise Skipped(f"text.tied fails: {error}") from None

    @torch.no_grad()
    def _stock(self, caption: str) -> Tensor:
        embeds, _ = self.encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=OFFICIAL_TEXT_LEN
        )
        return embeds[0].float().cpu()

    def _errors(self, caption: str) -> float:
        ours = self._ours(caption)
        padded = torch.nn.functional.pad(ours, (0, 0, 0, OFFICIAL_TEXT_LEN - len(ours)))
        return relative_error(padded, self._stock(caption))

    def check_embeds(self) -> Outcome:
        """A caption's embedding, zero-padded."""
        return self._judge(max(map(self._errors, CAPTIONS)))

    def check_pads(self) -> Outcome:
        """Behind the caption there are zeros, and nothing else is."""
        lens = [len(self._ours(caption)) for caption in CAPTIONS]
        stock = [self._stock(caption) for caption in CAPTIONS]
        pads = max(float(rows[length:].abs().max()) for rows, length in zip(stock, lens, strict=True))
        ends = min(float(rows[length - 1].abs().max()) for rows, length in zip(stock, lens, strict=True))
        number = f"captions of {', '.join(map(str, lens))} tokens, the largest pad is {pads:g}"
        whole = {len(rows) for rows in stock} == {OFFICIAL_TEXT_LEN}
        return Outcome(pads == 0 < ends and whole, number, "0 up to row 512")

    def check_length(self) -> Outcome:
        """Long captions are cut at 512 tokens, not at the 226 that diffusers' `encode_prompt` defaults to."""
        each = (len(self.tokenizer(WORDS * 10).input_ids) - len(self.tokenizer(WORDS).input_ids)) / 9
        captions = [WORDS * round(length / each) for length in (350, 700)]
        lens = [len(self._ours(caption)) for caption in captions]
        judged = self._judge(max(map(self._errors, captions)))
        passed = bool(judged.passed) and 226 < lens[0] < lens[1] == OFFICIAL_TEXT_LEN
        number = f"long captions keep {lens[0]} and {lens[1]} tokens, {judged.number}"
        return Outcome(passed, number, f"226 < n < 512 and 512, {judged.bound}")

    def _judge(self, error: float) -> Outcome:
        if self.setup.dtype == "fp32":
            return judge(error, 2**-8, "stored in bf16")
        return judge(error, 0.1, "computed in bf16, padded and unpadded")

    CHECKS: ClassVar[dict[str, Callable[[Any], Outcome]]] = {
        "text.tied": check_tied,
        "text.embeds": check_embeds,
        "text.pads": check_pads,
        "text.length": check_length,
    }

"""What train_tiny_vae.py does to a VAE before training: whole clips in one go, and a linear start.

Letters: B batch, C channels, T frames, H and W pixels, Z latent channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanAttentionBlock,
    WanResample,
    WanResidualBlock,
    WanRMS_norm,
)
from torch import nn


def whole_clip_resample(self: WanResample, x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """WanResample for a whole clip in one go: what the stock class computes chunk by chunk through its cache.

    The stock forward without a cache leaves the temporal convolutions out. Their rule: the first frame passes
    by; downwards the rest is a stride 2 convolution over all frames; upwards it starts from zeros, not from
    frame 0.
    """
    if self.mode == "upsample3d" and x.shape[2] > 1:
        b, c, t, h, w = x.shape
        doubled = self.time_conv(x[:, :, 1:]).reshape(b, 2, c, t - 1, h, w)
        doubled = doubled.permute(0, 2, 3, 1, 4, 5).reshape(b, c, 2 * (t - 1), h, w)
        x = torch.cat([x[:, :, :1], doubled], dim=2)
    b, c, t, h, w = x.shape
    x = self.resample(x.transpose(1, 2).reshape(b * t, c, h, w))
    x = x.view(b, t, *x.shape[1:]).transpose(1, 2)
    if self.mode == "downsample3d" and t > 1:
        x = torch.cat([x[:, :, :1], self.time_conv(x)], dim=2)
    return x


def fast_rms_norm(self: WanRMS_norm, x: torch.Tensor) -> torch.Tensor:
    """WanRMS_norm in the dtype of x: same value up to rounding, without the float32 copies."""
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32)
    scale = self.scale * torch.rsqrt(norm.square() + 1e-12)
    return x * scale.to(x.dtype) * self.gamma.to(x.dtype)


def channels_last(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Store the 3D convolutions' weights channels last: they run two to three times faster on a CPU."""
    for module in vae.modules():
        if isinstance(module, nn.Conv3d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last_3d)
    return vae


def for_whole_clips(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Make vae.encoder and vae.decoder callable on whole clips; its encode() and decode() break."""
    for module in vae.modules():
        if isinstance(module, WanResample):
            module.forward = whole_clip_resample.__get__(module)
        if isinstance(module, WanRMS_norm):
            module.forward = fast_rms_norm.__get__(module)
    return channels_last(vae)


def principal_axes(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean [C], leading variances [count] and their axes [C, count] of rows [N, C]."""
    mean = rows.mean(0)
    variances, axes = torch.linalg.eigh(torch.cov((rows - mean).T))
    return mean, variances.flip(0)[:count].clamp_min(1e-8), axes.flip(1)[:, :count]


def silence_branches(vae: AutoencoderKLWan) -> None:
    """Zero what residual and attention blocks add, let their shortcuts copy: only the linear path stays."""
    for module in vae.modules():
        if isinstance(module, WanResidualBlock):
            nn.init.zeros_(module.conv2.weight)
            nn.init.zeros_(module.conv2.bias)
            if isinstance(module.conv_shortcut, nn.Conv3d):
                weight = module.conv_shortcut.weight.mul_(0.1)
                for i in range(min(weight.shape[:2])):
                    weight[i, i] = 1
                nn.init.zeros_(module.conv_shortcut.bias)
        if isinstance(module, WanAttentionBlock):
            nn.init.zeros_(module.proj.weight)
            nn.init.zeros_(module.proj.bias)


def start_downsample(module: WanResample, features: Sequence[torch.Tensor]) -> None:
    """2x2 pixels -> their principal components; two frames -> their mean, and a quarter of differences."""
    conv = module.resample[1]
    channels = conv.weight.shape[0]
    patches = [nn.functional.unfold(x[0].transpose(0, 1)[::3], 2, stride=2) for x in features]
    mean, _, axes = principal_axes(torch.cat([p.transpose(1, 2).flatten(0, 1) for p in patches]), channels)
    conv.weight.zero_()
    conv.weight[:, :, :2, :2] = axes.T.reshape(channels, -1, 2, 2)
    conv.bias.copy_(-(mean @ axes))
    if module.mode == "downsample3d":
        weight = module.time_conv.weight.zero_()
        module.time_conv.bias.zero_()
        means = channels - channels // 4
        for i in range(channels):
            source = i if i < means else i - means
            weight[i, source, 1] = 0.5 if i < means else -0.5
            weight[i, source, 2] = 0.5


def start_latents(vae: AutoencoderKLWan, features: Sequence[torch.Tensor]) -> None:
    """End the encoder in whitened principal components of its features, through norm and SiLU.

    Each component enters once with either sign, for silu(u) - silu(-u) = u; a large constant channel beside
    them keeps the RMS norm from dividing their amplitude away.
    """
    last, out, num_latents = vae.encoder.down_blocks[-1].conv_shortcut, vae.encoder.conv_out, vae.config.z_dim
    rows = torch.cat([x[0, : last.weight.shape[1]].flatten(1).T for x in features])
    mean, variances, axes = principal_axes(rows, num_latents)
    whiten = (axes / variances.sqrt()).T
    last.weight.mul_(0.01)
    nn.init.zeros_(last.bias)
    for sign, part in ((1, slice(0, num_latents)), (-1, slice(num_latents, 2 * num_latents))):
        last.weight[part, :, 0, 0, 0] = sign * whiten
        last.bias[part] = -sign * (whiten @ mean)
    last.bias[-1] = 8.0
    nn.init.zeros_(out.weight)
    nn.init.zeros_(out.bias)
    for i in range(num_latents):
        out.weight[i, i, 2, 1, 1] = 1.4  # features are scaled by sqrt(48) / sqrt(32 + 8 * 8), about 1 / 1.4
        out.weight[i, num_latents + i, 2, 1, 1] = -1.4
    out.bias[num_latents:] = -6.0  # log variance
    for conv in (vae.quant_conv, vae.post_quant_conv):
        nn.init.zeros_(conv.bias)
        conv.weight.copy_(torch.eye(conv.weight.shape[0])[:, :, None, None, None])


@torch.no_grad()
def start_linear(vae: AutoencoderKLWan, clips: Sequence[torch.Tensor]) -> None:
    """Set initial weights: the encoder is a principal component analysis, the decoder keeps scales.

    A random encoder needs thousands of steps until its latents tell anything; this one starts with 16 numbers
    that hold most of the variance of 4x8x8 pixels, and learns the rest.

    Args:
        vae: prepared by `for_whole_clips`, with at least 2 x 16 + 1 channels before the encoder's end.
        clips: float32 [1, 3, T, H, W] in [-1, 1], T = 4k+1.
    """
    silence_branches(vae)
    encoder, decoder = vae.encoder, vae.decoder
    encoder.conv_in.weight.mul_(0.1)
    encoder.conv_in.weight[:3] = 0
    nn.init.zeros_(encoder.conv_in.bias)
    for colour in range(3):
        encoder.conv_in.weight[colour, colour, 2, 1, 1] = 1
    features = [encoder.conv_in(clip) for clip in clips]
    for block in encoder.down_blocks:
        if isinstance(block, WanResample):
            start_downsample(block, features)
        features = [block(x) for x in features]
    start_latents(vae, features)
    # PyTorch's default halves a signal at every linear convolution (gain 1/sqrt(3)).
    decoder.conv_in.weight.mul_(3**0.5)
    for module in decoder.modules():
        if isinstance(module, WanResample):
            module.resample[1].weight.mul_(3**0.5)
            if module.mode == "upsample3d":  # both frames start as a copy
                weight = module.time_conv.weight.mul_(0.1)
                channels = weight.shape[1]
                for i in range(channels):
                    weight[i, i, 2] += 1
                    weight[channels + i, i, 2] += 1
    channels_last(vae)

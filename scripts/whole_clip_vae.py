"""Prepare a VAE for train_tiny_vae.py: process a whole clip in one call, and compute initial weights with linear algebra.

Letters in shapes: B batch, C channels, T frames, H and W pixels, Z latent channels.
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
    patchify,
    unpatchify,
)
from torch import nn

STRAIGHT = 3.0  # standard deviations above 0; there SiLU is nearly linear


def whole_clip_resample(self: WanResample, x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """Resample a whole clip in one call. This function replaces the `forward` of diffusers' `WanResample`.

    diffusers gets the same result by calling its `forward` on chunks of the clip, with a cache. Without a cache, the `forward` of
    diffusers leaves out the temporal convolution.

    The first frame of the result is the first frame of the clip, resampled only in space. The temporal convolution computes
    all other frames of the result. In a downsampling, the temporal convolution has stride 2 and reads all frames. In an
    upsampling, it does not read the first frame, and reads zeros instead.
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
    """Compute WanRMS_norm in the dtype of `x`, without float32 copies. The result equals the stock class up to rounding."""
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32)
    scale = self.scale * torch.rsqrt(norm.square() + 1e-12)
    return x * scale.to(x.dtype) * self.gamma.to(x.dtype)


def channels_last(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Store the weights of 3D convolutions in channels-last format. They then run two to three times faster on a CPU."""
    for module in vae.modules():
        if isinstance(module, nn.Conv3d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last_3d)
    return vae


def for_whole_clips(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Change `vae`, so that vae.encoder and vae.decoder accept whole clips. vae.encode() and vae.decode() no longer work."""
    for module in vae.modules():
        if isinstance(module, WanResample):
            module.forward = whole_clip_resample.__get__(module)
        if isinstance(module, WanRMS_norm):
            module.forward = fast_rms_norm.__get__(module)
    return channels_last(vae)


def to_patches(vae: AutoencoderKLWan, pixels: torch.Tensor) -> torch.Tensor:
    """Convert pixels to the input of the encoder.

    Args:
        vae: the VAE.
        pixels: [B, 3, T, H, W].

    Returns:
        Patches [B, 3 * p * p, T, H/p, W/p] if the VAE has a patch size p, otherwise `pixels` unchanged.
    """
    size = vae.config.patch_size
    return patchify(pixels, size) if size else pixels


def from_patches(vae: AutoencoderKLWan, patches: torch.Tensor) -> torch.Tensor:
    """Convert the output of the decoder to pixels. Inverse of `to_patches`."""
    size = vae.config.patch_size
    return unpatchify(patches, size) if size else patches


def principal_axes(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean [C], the largest variances [count] and the principal axes [C, count] of rows [N, C]."""
    mean = rows.mean(0)
    variances, axes = torch.linalg.eigh(torch.cov((rows - mean).T))
    return mean, variances.flip(0)[:count].clamp_min(1e-8), axes.flip(1)[:, :count]


def silence_branches(vae: AutoencoderKLWan) -> None:
    """Set weights so that every residual and attention block returns only its shortcut, which is linear.

    The last layer of each block gets zero weights and a zero bias. If a shortcut contains a convolution, the weight from each
    channel to the channel with the same number becomes 1. The other weights of this convolution are multiplied by 0.1, and
    its bias becomes zero.
    """
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
    """Initialize a downsampling layer of the encoder. `features` are the inputs of this layer.

    The spatial convolution returns the principal components of 2x2 pixels. Three quarters of the channels of the temporal
    convolution return the mean of two frames. The last quarter of the channels returns half the difference of two frames.
    """
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


def start_norm(block: WanResidualBlock, norm: WanRMS_norm, features: Sequence[torch.Tensor]) -> None:
    """Make SiLU(norm(block(x))) nearly linear in x. SiLU removes negative values, and the norm removes the amplitude.

    The bias moves each channel to a range in which SiLU is nearly linear. The channel with the smallest standard deviation
    becomes a large constant, which determines the RMS norm.

    Args:
        block: block whose output `norm` reads. `silence_branches` must have set its weights, so that the block adds only
            the bias of its last layer to its shortcut.
        norm: norm whose output SiLU reads.
        features: output of the block for each clip, [1, C, T, H, W].
    """
    rows = torch.cat([x[0].flatten(1).T for x in features])
    mean = rows.mean(0)
    std = rows.std(0)
    std = std.clamp_min(1e-3 * std.max())
    target = STRAIGHT * std
    loud = int(std.argmin())
    target[loud] = 3 * target.norm()
    block.conv2.bias.copy_(target - mean)
    gamma = target.norm() / (len(std) ** 0.5 * std)
    gamma[loud] = 1e-2
    norm.gamma.copy_(gamma.view_as(norm.gamma))


def start_latents(vae: AutoencoderKLWan, features: Sequence[torch.Tensor]) -> None:
    """Initialize the last layers of the encoder, so that the latents are the whitened principal components of `features`."""
    encoder = vae.encoder
    num_latents = vae.config.z_dim
    mean, variances, axes = principal_axes(torch.cat([x[0].flatten(1).T for x in features]), num_latents)
    whitened = [
        torch.einsum("bcthw,cz->bzthw", x - mean.view(-1, 1, 1, 1), axes / variances.sqrt()) for x in features
    ]
    last = encoder.down_blocks[-1]
    start_norm(last, encoder.norm_out, features)
    shift = last.conv2.bias.view(-1, 1, 1, 1)
    nn.init.zeros_(encoder.conv_out.weight)
    nn.init.zeros_(encoder.conv_out.bias)
    fit(encoder.conv_out, [encoder.nonlinearity(encoder.norm_out(x + shift)) for x in features], whitened)
    encoder.conv_out.bias[num_latents:] = -6.0  # log variance
    for conv in (vae.quant_conv, vae.post_quant_conv):
        nn.init.zeros_(conv.bias)
        conv.weight.copy_(torch.eye(conv.weight.shape[0])[:, :, None, None, None])


def neighborhoods(x: torch.Tensor, kernel: Sequence[int]) -> torch.Tensor:
    """Return the inputs that a causal, zero-padded convolution of stride 1 reads for each output position.

    Args:
        x: input of the convolution, [1, C, T, H, W].
        kernel: kernel size in frames, rows and columns.

    Returns:
        [T, H, W, C, *kernel].
    """
    t, h, w = (k // 2 for k in kernel)
    x = nn.functional.pad(x, (w, w, h, h, 2 * t, 0))[0]
    return (
        x.unfold(1, kernel[0], 1).unfold(2, kernel[1], 1).unfold(3, kernel[2], 1).permute(1, 2, 3, 0, 4, 5, 6)
    )


def fit(
    conv: nn.Conv2d | nn.Conv3d,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    first: int = 0,
) -> None:
    """Set the weights of a convolution to the least-squares map from inputs to targets.

    Args:
        conv: convolution of stride 1. The weights of output channels before `first`, or without a target, do not change.
        inputs: input of the convolution for each clip, [1, C, T, H, W].
        targets: wanted output for each clip, [1, target channels, T, H, W]. The first target channel belongs to the output
            channel `first`. Target channels for which the convolution has no output channel are ignored.
        first: index of the first output channel to set.
    """
    kernel = (1, *conv.kernel_size) if len(conv.kernel_size) == 2 else conv.kernel_size
    rows = []
    wanted = []
    for x, y in zip(inputs, targets, strict=True):
        pick = torch.randperm(x[0, 0].numel())[:20_000]
        seen = neighborhoods(x, kernel)[torch.unravel_index(pick, x.shape[2:])].flatten(1)
        rows.append(torch.cat([seen, torch.ones(len(pick), 1)], dim=1))
        wanted.append(y[0].flatten(1).T[pick])
    a = torch.cat(rows).double()
    b = torch.cat(wanted).double()
    gram = a.T @ a / len(a)
    ridge = 1e-4 * gram.diagonal().mean() * torch.eye(len(gram), dtype=a.dtype)
    solution = torch.linalg.solve(gram + ridge, a.T @ b / len(a)).float().T
    solution = solution[: len(conv.weight) - first]
    outputs = slice(first, first + len(solution))
    conv.weight[outputs] = solution[:, :-1].reshape(-1, *conv.weight.shape[1:])
    conv.bias[outputs] = solution[:, -1]


def start_upsample(
    module: WanResample,
    features: list[torch.Tensor],
    doubled: list[torch.Tensor],
    enlarged: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Fit the convolutions of an upsampling in the decoder by least squares. The targets come from the encoder.

    Args:
        module: the upsampling, with the mode upsample2d or upsample3d.
        features: input of `module` for each clip, [1, C, T, H, W].
        doubled: target of the time convolution for each clip, [1, channels, 2T-1, H, W]. Only the first C channels are used.
            The mode upsample2d has no time convolution and ignores this argument.
        enlarged: target of the output of `module` for each clip, [1, channels, frames, 2H, 2W], with 2T-1 frames for
            upsample3d and T frames for upsample2d. Only as many channels are used as `module` returns.

    Returns:
        Output of the fitted `module` for each clip.
    """
    conv = module.resample[1]
    if module.mode == "upsample3d":
        channels = module.dim
        for half in range(2):  # the two halves of the outputs alternate as frames after the first frame
            inputs = [x[:, :, 1:] for x in features]
            wanted = [y[:, :channels, 1 + half :: 2] for y in doubled]
            fit(module.time_conv, inputs, wanted, half * channels)
    module.resample[1] = nn.Identity()
    raised = [module(x) for x in features]
    module.resample[1] = conv
    fit(conv, raised, enlarged)
    return [module(x) for x in features]


def start_encoder(
    vae: AutoencoderKLWan, clips: Sequence[torch.Tensor]
) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """Initialize the encoder by a principal component analysis, one downsampling after the other.

    Returns:
        (spatial, temporal). spatial[i][j] contains the features of clip j before the temporal convolution of downsampling
        layer i. temporal[i][j] contains the features after this convolution. If the layer has no temporal convolution, both
        are equal. The shape is [1, C, T, H, W].
    """
    conv_in = vae.encoder.conv_in
    inputs = vae.config.in_channels
    conv_in.weight.mul_(0.1)
    conv_in.weight[:inputs] = 0
    nn.init.zeros_(conv_in.bias)
    for channel in range(inputs):
        conv_in.weight[channel, channel, 2, 1, 1] = 1
    features = [conv_in(clip) for clip in clips]
    spatial = []
    temporal = []
    for block in vae.encoder.down_blocks:
        if not isinstance(block, WanResample):
            features = [block(x) for x in features]
            continue
        start_downsample(block, features)
        mode = block.mode
        block.mode = "downsample2d"
        spatial.append([block(x) for x in features])
        block.mode = mode
        features = [block(x) for x in features]
        temporal.append(features)
    start_latents(vae, features)
    return spatial, temporal


def leading_first(channels: int, kept: int) -> list[int]:
    """Return an order of the channels after the encoder's temporal convolution, with the `kept` most important channels first.

    The convolution creates two groups of channels: first the means of two frames, then the differences of two frames. Inside a
    group, the channels are sorted by falling variance. The returned order starts with the first channels of both groups: the
    means are three quarters of `kept`, the differences one quarter. The other channels follow.

    `start_decoder` orders both the inputs and the outputs of the decoder's temporal convolution in this way. The first frame
    skips this convolution, so the channels of the first frame stay in the order of the inputs. The channels of all other frames
    are outputs of the convolution, and must have the same order.

    Args:
        channels: number of output channels of the encoder's temporal convolution.
        kept: number of channels that come first. The decoder is fitted to these channels.
    """
    means = channels - channels // 4
    num_differences = min(kept, channels) // 4
    num_means = min(kept, channels) - num_differences
    head = [*range(num_means), *range(means, means + num_differences)]
    return head + [i for i in range(channels) if i not in head]


def start_decoder(
    vae: AutoencoderKLWan,
    clips: Sequence[torch.Tensor],
    spatial: list[list[torch.Tensor]],
    temporal: list[list[torch.Tensor]],
) -> None:
    """Initialize the decoder by least squares: each layer is fitted to the features of the encoder at the same resolution.

    Args:
        vae: VAE after `start_encoder`.
        clips: inputs of the encoder.
        spatial: first result of `start_encoder`.
        temporal: second result of `start_encoder`.
    """
    decoder = vae.decoder
    latents = [vae.quant_conv(vae.encoder(clip))[:, : vae.config.z_dim] for clip in clips]
    deep = leading_first(temporal[2][0].shape[1], len(decoder.conv_in.weight))
    fit(decoder.conv_in, latents, [x[:, deep] for x in temporal[2]])
    features = [decoder.mid_block(decoder.conv_in(z)) for z in latents]
    middle = leading_first(
        temporal[1][0].shape[1], len(decoder.up_blocks[0].upsamplers[0].resample[1].weight)
    )
    targets = [
        ([x[:, deep] for x in spatial[2]], [x[:, middle] for x in temporal[1]]),
        ([x[:, middle] for x in spatial[1]], spatial[0]),
        ([], list(clips)),
    ]
    decoder.up_blocks[2].upsamplers[0].resample[1].weight.mul_(0.1)
    for block, (doubled, enlarged) in zip(decoder.up_blocks[:3], targets, strict=True):
        for resnet in block.resnets:
            features = [resnet(x) for x in features]
        features = start_upsample(block.upsamplers[0], features, doubled, enlarged)
    for resnet in decoder.up_blocks[3].resnets:
        features = [resnet(x) for x in features]
    start_norm(resnet, decoder.norm_out, features)
    shift = resnet.conv2.bias.view(-1, 1, 1, 1)
    fit(decoder.conv_out, [decoder.nonlinearity(decoder.norm_out(x + shift)) for x in features], clips)


@torch.no_grad()
def start_linear(vae: AutoencoderKLWan, clips: Sequence[torch.Tensor]) -> None:
    """Set the initial weights of the encoder by a principal component analysis, and of the decoder by least squares.

    A VAE with random weights needs thousands of training steps until its latents contain information. After this function, the
    latents are principal components of the pixels. Each layer of the decoder is fitted by least squares to the features of the
    encoder at the same resolution.

    Args:
        vae: prepared by `for_whole_clips`, with three downsamplings. The last two downsamplings halve the number of frames.
        clips: float32 [1, 3, T, H, W] in [-1, 1], T = 4k+1.
    """
    clips = [to_patches(vae, clip) for clip in clips]
    silence_branches(vae)
    spatial, temporal = start_encoder(vae, clips)
    start_decoder(vae, clips, spatial, temporal)
    channels_last(vae)

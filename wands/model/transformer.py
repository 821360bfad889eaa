"""Wan's DiT for packed tokens, with the modules and parameter names of diffusers.

Letters: L tokens of this rank, S samples, M timesteps, P noisy channels of a token, P' conditioning channels of a token, D width
of the residual stream, T text tokens, I CLIP tokens of a sample's images, H heads.

The forward pass calls modules and never reads their weights directly, because ZeRO-3 gathers parameters in module hooks. To
change the `forward` of a module, wands therefore replaces its `__class__` by a subclass.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import WanAttention, WanRotaryPosEmbed, WanTransformerBlock
from torch import Tensor, nn
from torch._ops import OpOverload

from wands.attention.packed import PackedMeta
from wands.attention.varlen import Backend, PaddedSegments, Segments, padded_attention, varlen_attention
from wands.model import fused
from wands.model.checkpointing import SelectiveCheckpoint
from wands.model.dropout import RowKeys, add_dropout
from wands.model.fp8 import Fp8Linear
from wands.model.modulation import gated_add, modulate
from wands.model.offload import ActivationOffloader
from wands.model.quantized import StoredFp8Linear
from wands.model.swapping import BlockSwapper, spread
from wands.variants import TEXT_LEN

SelfAttention = Callable[[Tensor, Tensor, Tensor, PackedMeta], Tensor]
"""Maps (q, k, v, meta) to the attention output; q, k, v and the output are [local tokens, heads, head dim].

Every token attends to all tokens of its sample, including those on other ranks."""

Watch = Callable[[], AbstractContextManager[Any]]
"""Type of `SelectiveCheckpoint.watch`."""


class PackedWanTransformer(WanTransformer3DModel):
    """A `WanTransformer3DModel` whose `forward` takes the packed tokens of several samples.

    Under bf16 autocast, matmuls and attention run in bf16. All else stays in fp32, as in official Wan: timesteps, modulation,
    norms, rotary angles, residual stream and head.
    """

    _no_split_modules = ["PackedWanBlock"]  # noqa: RUF012
    _repeated_blocks = ["PackedWanBlock"]  # noqa: RUF012
    selective_checkpoint: SelectiveCheckpoint | None = None
    """Activation checkpointing of the blocks, set by `set_checkpointing`; None without checkpointing."""
    num_recomputed: float = math.inf
    """Number of blocks that run again in the backward pass, counted from the first block. See `set_checkpointing`."""
    swapper: BlockSwapper | None = None
    """Frozen weights of blocks in host memory, set by `set_swapping`; None if all weights are on the device."""
    row_keys: RowKeys | None = None
    """Keys of the dropout masks, set by `set_dropout`; None without dropout."""

    # The decorator keeps the signature, from which diffusers reads the keys of a config.
    @functools.wraps(WanTransformer3DModel.__init__)  # type: ignore[misc]  # of an Any
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._take_tokens()

    @classmethod
    def of_stock(cls, model: WanTransformer3DModel) -> PackedWanTransformer:
        """Change a model of diffusers in place, and return it. Its weights stay the same tensors."""
        model.__class__ = cls
        assert isinstance(model, PackedWanTransformer)
        model._take_tokens()
        return model

    def _take_tokens(self) -> None:
        """Change the classes of the modules to those for packed tokens."""
        assert self.config.cross_attn_norm, "every Wan model normalizes the queries of the cross-attention"
        embedder = self.condition_embedder
        for linear in (embedder.time_embedder.linear_1, embedder.time_embedder.linear_2, embedder.time_proj):
            getattr(linear, "base_layer", linear).__class__ = Fp32Linear  # of a linear layer with a LoRA
        getattr(self.proj_out, "base_layer", self.proj_out).__class__ = Fp32Linear
        self.patch_embedding.__class__ = PatchLinear
        packed = {WanTransformerBlock: PackedWanBlock, FP32LayerNorm: AddNorm, nn.RMSNorm: NormRotate}
        for module in (*self.blocks.modules(), self.norm_out):
            module.__class__ = packed.get(type(module), type(module))

    def set_compile(self, enabled: bool) -> None:
        """Run the pointwise parts of the blocks as compiled operators (fused.py) or as plain PyTorch modules."""
        for module in self.modules():
            if isinstance(module, (PackedWanBlock, AddNorm, NormRotate, Fp8Linear, StoredFp8Linear)):
                module.compiled = enabled

    def set_attention(self, self_attention: SelfAttention, backend: Backend) -> None:
        """Set the self-attention of all blocks, see `context_attention`, and the kernel of their cross-attention."""
        for block in self.blocks:
            block.attn1.set_processor(SelfAttentionProcessor(self_attention))
            block.attn2.set_processor(CrossAttentionProcessor(backend))

    def set_checkpointing(
        self,
        mode: str,
        saved: Sequence[str] = (),
        offloaded: Sequence[str] = (),
        operators: Mapping[str, Sequence[OpOverload]] | None = None,
        offloader: ActivationOffloader | None = None,
        num_blocks: int | None = None,
    ) -> None:
        """Set the activation checkpointing of the blocks. `wands.model.checkpointing` lists the names of tensors to keep.

        Args:
            mode: "none": keep all activations. "full": run every block again. "selective": as "full", but keep the tensors in
                `saved`. "offload": as "selective", and keep the tensors in `offloaded` in host memory.
            saved: names of tensors that stay on the device.
            offloaded: names of tensors that go to host memory.
            operators: operators that compute the tensor of a name, such as `wands.attention.ulysses.OPERATORS`.
            offloader: see `SelectiveCheckpoint`; None makes a new one.
            num_blocks: `mode` applies to the first `num_blocks` blocks, the others keep all activations; None means all.
        """
        assert saved or mode != "selective", "selective checkpointing needs names of tensors to save"
        assert not saved or mode in ("selective", "offload"), f"{mode} checkpointing cannot save {saved}"
        assert bool(offloaded) == (mode == "offload"), f"mode={mode} cannot have offloaded={offloaded}"
        if self.selective_checkpoint is not None:
            self.selective_checkpoint.close()
        self.selective_checkpoint = None
        if mode == "none":
            self.disable_gradient_checkpointing()
            return
        self.num_recomputed = len(self.blocks) if num_blocks is None else num_blocks
        blocks = self.blocks[: self.num_recomputed]
        self.selective_checkpoint = SelectiveCheckpoint(
            blocks=blocks, saved=saved, offloaded=offloaded, operators=operators, offloader=offloader
        )
        self.enable_gradient_checkpointing(self.selective_checkpoint)

    def set_swapping(self, num_blocks: int, device: torch.device) -> None:
        """Move the frozen weights of blocks that run again in the backward pass to host memory.

        Call it after `set_checkpointing`.
        """
        num_recomputed = min(self.num_recomputed, len(self.blocks)) if self.gradient_checkpointing else 0
        assert num_blocks <= num_recomputed, "swapped blocks must run under activation checkpointing"
        numbers = spread(num_blocks, int(num_recomputed))
        self.swapper = BlockSwapper([self.blocks[number] for number in numbers], device)

    def set_dropout(self, p: float, lora_p: float = 0.0) -> None:
        """Set dropout for training. Afterwards, `forward` needs `meta.dropout_keys` in training.

        `p` is the probability for attention outputs and the feed-forward's hidden states, as in diffusers; `lora_p` that for the
        LoRA inputs. The LoRA must exist already.
        """
        self.row_keys = add_dropout(self, p, lora_p)

    def forward(
        self,
        tokens: Tensor,
        meta: PackedMeta,
        timesteps: Tensor,
        text_embeds: Tensor,
        image_embeds: Tensor | None = None,
    ) -> Tensor:
        """Predict the velocity of every token, [L, P] in the dtype of the residual stream.

        Args:
            tokens: [L, P + P']: the noisy channels of the token's patch in the order (latent channel, frame, row, column), then
                the conditioning channels.
            meta: position and sample of each token, and the number of tokens of each sample and timestep.
            timesteps: fp32 [M], 1000 * sigma, for each entry of `meta.timestep_lens`, or for each sample if that is empty.
            text_embeds: [sum of meta.text_lens, text_dim], without padding.
            image_embeds: [S, I, image_dim], CLIP hidden states; None for a model without CLIP.
        """
        assert timesteps.dtype == torch.float32, (
            f"timesteps must be fp32, not {timesteps.dtype}: bf16 represents only 294 of 1000 timesteps"
        )
        assert len(timesteps) == len(meta.padded_timestep_lens), (len(timesteps), meta.padded_timestep_lens)
        if self.row_keys is not None and self.training:
            self.row_keys.set(meta, 0 if image_embeds is None else image_embeds.shape[1])
        patches = self.patch_embedding(tokens)
        compute_dtype = patches.dtype  # autocast's dtype, or the dtype of the weights
        hidden = patches.to(torch.promote_types(compute_dtype, torch.float32))
        temb, table = self._embed_timesteps(timesteps)
        text = self._embed_text(text_embeds.to(compute_dtype))
        image = self._embed_image(image_embeds, compute_dtype)
        rotation = rotations_of(self.rope, meta.positions)
        image_lens = (image_embeds.shape[1],) * len(image_embeds) if image_embeds is not None else ()
        cross_segments = CrossSegments(
            PaddedSegments.build(meta.padded_seq_lens, meta.text_lens, TEXT_LEN, tokens.device),
            None if image is None else Segments.build(meta.padded_seq_lens, image_lens, image.device),
        )
        for number, block in enumerate(self.blocks):
            args = (hidden, text, image, table, rotation, meta, cross_segments, compute_dtype)
            if torch.is_grad_enabled() and self.gradient_checkpointing and number < self.num_recomputed:
                checkpoint = self._gradient_checkpointing_func
                # diffusers' own checkpointing keeps nothing
                hidden = checkpoint(block, *args, getattr(checkpoint, "watch", nullcontext))
            else:
                hidden = block(*args)
        shift, scale = (self.scale_shift_table + temb[:, None]).unbind(1)
        modulation = 1 + scale, shift
        _, normed = self.norm_out(hidden, None, None, modulation, meta.padded_timestep_lens, hidden.dtype)
        prediction = self.proj_out(normed)
        channels = self.config.out_channels or self.config.in_channels
        # The head's channels are in the order (pt, ph, pw, C). Return them in the order (C, pt, ph, pw).
        return prediction.unflatten(1, (-1, channels)).mT.flatten(1)

    def _embed_timesteps(self, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """Embed timesteps; return (embedding [M, D], modulation table of the blocks [M, 6, D])."""
        embedder = self.condition_embedder
        temb = embedder.time_embedder(embedder.timesteps_proj(timesteps))
        return temb, embedder.time_proj(embedder.act_fn(temb)).unflatten(1, (6, -1))

    def _embed_text(self, text_embeds: Tensor) -> Tensor:
        """Embed text tokens [T, text_dim]; return [T + 1, D]. The last row is the zero padding that all samples share."""
        return self.condition_embedder.text_embedder(F.pad(text_embeds, (0, 0, 0, 1)))

    def _embed_image(self, image_embeds: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Embed CLIP hidden states [S, I, image_dim]; return [S * I, D], or None for a model without CLIP."""
        embedder = self.condition_embedder.image_embedder
        assert (embedder is None) == (image_embeds is None), (
            "models with CLIP, and only these, need image_embeds"
        )
        if embedder is None or image_embeds is None:
            return None
        images = image_embeds.to(dtype)
        if embedder.pos_embed is not None:  # this embedder takes the two images of a sample separately
            images = images.unflatten(1, (2, -1)).flatten(0, 1)
        return embedder(images).flatten(0, 1)

    def to_json_string(self) -> str:
        """Return the config as JSON. `_class_name` is "WanTransformer3DModel", so that diffusers can load the config."""
        config = json.loads(super().to_json_string())
        return json.dumps(config | {"_class_name": "WanTransformer3DModel"}, indent=2, sort_keys=True) + "\n"


@dataclass(frozen=True)
class CrossSegments:
    """Segments of the cross-attention, the same in all blocks. A sample's video tokens attend only to the keys of their segment.

    Attributes:
        text: one segment for each sample. The keys are its padded text tokens.
        image: one segment for each sample. The keys are its CLIP tokens. None for a model without CLIP.
    """

    text: PaddedSegments
    image: Segments | None


class PackedWanBlock(WanTransformerBlock):
    """Transformer block for packed tokens, with the same arithmetic and dtype casts as diffusers' block."""

    compiled = False

    def forward(
        self,
        hidden: Tensor,
        text: Tensor,
        image: Tensor | None,
        table: Tensor,
        rotation: Tensor,
        meta: PackedMeta,
        cross_segments: CrossSegments,
        compute_dtype: torch.dtype,
        watch: Watch = nullcontext,
    ) -> Tensor:
        """Run self-attention, cross-attention and the feed-forward, and return the new residual stream [L, D].

        Args:
            hidden: [L, D], residual stream.
            text: [T + 1, D], text embeddings; the last row is the padding, which all samples share.
            image: [S * I, D], image embeddings; None without CLIP.
            table: [M, 6, D], modulation.
            rotation: complex [L, 1, head dim / 2], rotary embedding.
            meta: position and sample of each token, and the number of tokens of each sample.
            cross_segments: for each sample, the rows of `text` and `image` to which its tokens attend.
            compute_dtype: dtype of matmuls and attention.
            watch: returns the context manager in which self-attention runs.
        """
        lens = meta.padded_timestep_lens
        shift, scale, gate, ff_shift, ff_scale, ff_gate = (self.scale_shift_table + table.float()).unbind(1)
        hidden, x = self.norm1(hidden, None, None, (1 + scale, shift), lens, compute_dtype)
        x = self.attn1(x, rotation=rotation, meta=meta, watch=watch)
        hidden, x = self.norm2(hidden, x, gate, None, lens, compute_dtype)
        x = self.attn2(x, text, image=image, cross_segments=cross_segments)
        hidden, x = self.norm3(hidden, x, None, (1 + ff_scale, ff_shift), lens, compute_dtype)
        add = fused.gated_add if self.compiled else gated_add
        return add(_stock_float(hidden), _stock_float(self.ffn(x)), ff_gate, lens)


class AddNorm(FP32LayerNorm):
    """Layer norm that first adds an update to the residual stream, and then modulates the normalized tokens."""

    compiled = False

    def forward(
        self,
        hidden: Tensor,
        update: Tensor | None,
        gate: Tensor | None,
        table: tuple[Tensor, Tensor] | None,
        lens: tuple[int, ...],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Add an update to the residual stream [L, D]; return the sum, and its modulated layer norm in `dtype`.

        `update` None adds nothing. `gate` [M, D] None means 1. `table` is (factor, shift), each [M, D]; None means this module's
        weight and bias.
        """
        if self.compiled:
            factor, shift = table or (x.expand(len(lens), -1) for x in (self.weight, self.bias))
            return fused.add_norm(hidden, update, gate, factor, shift, lens, self.eps, dtype)
        if update is not None:
            hidden = hidden + update if gate is None else gated_add(_stock_float(hidden), update, gate, lens)
        x = super().forward(_stock_float(hidden))
        return hidden, (modulate(x, *table, lens) if table else x).to(dtype)


class NormRotate(nn.RMSNorm):
    """RMS norm over all heads of a query or key, followed by the rotary embedding."""

    compiled = False

    def forward(self, x: Tensor, rotation: Tensor | None = None) -> Tensor:
        """Normalize x [L, D] in at least fp32, rotate it by `rotation` if given, and return it in the dtype of x."""
        if self.compiled:
            return fused.norm_rotate(x, self.weight, rotation, self.eps)
        normed = super().forward(x.to(torch.promote_types(x.dtype, torch.float32)))
        if rotation is not None:
            heads = normed.unflatten(1, (-1, 2 * rotation.shape[-1]))
            normed = rotate(heads, rotation).flatten(1)
        return normed.to(x.dtype)


class SelfAttentionProcessor:
    """Attention processor that projects, normalizes and rotates q, k and v, and calls a given function for attention."""

    def __init__(self, self_attention: SelfAttention) -> None:
        self.self_attention = self_attention

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        *_: None,
        rotation: Tensor,
        meta: PackedMeta,
        watch: Watch = nullcontext,
    ) -> Tensor:
        """Run self-attention on this rank's hidden states [L, D]; return [L, D]. The attention function runs in `watch()`."""
        q = _heads(attn, attn.norm_q(attn.to_q(hidden_states), rotation))
        k = _heads(attn, attn.norm_k(attn.to_k(hidden_states), rotation))
        v = _heads(attn, attn.to_v(hidden_states))
        with watch():
            out = self.self_attention(q, k, v, meta)
        return _project_out(attn, out)


class CrossAttentionProcessor:
    """Attention processor for cross-attention to images and to text. The text is zero-padded to 512 tokens.

    Video tokens also attend to the padding, as in official Wan: equal tokens, therefore one key with a larger weight. Images have
    separate keys and values; both results are added.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        *_: None,
        image: Tensor | None,
        cross_segments: CrossSegments,
    ) -> Tensor:
        """Run cross-attention of `hidden_states` [L, D] to text [T + 1, D], padding last, and to images [S * I, D]."""
        q = _heads(attn, attn.norm_q(attn.to_q(hidden_states)))
        k = _heads(attn, attn.norm_k(attn.to_k(encoder_hidden_states)))
        v = _heads(attn, attn.to_v(encoder_hidden_states))
        out = padded_attention(
            q, k[:-1], v[:-1], k[-1], v[-1], cross_segments.text, self.backend, compiled=attn.norm_q.compiled
        )
        if image is not None:
            assert cross_segments.image is not None
            k = _heads(attn, attn.norm_added_k(attn.add_k_proj(image)))
            v = _heads(attn, attn.add_v_proj(image))
            out = out + varlen_attention(q, k, v, cross_segments.image, self.backend)
        return _project_out(attn, out)


class Fp32Linear(nn.Linear):
    """Linear layer that computes in fp32 under autocast.

    DeepSpeed's torch_autocast reduces gradients and gathers weights in bf16 for `nn.Linear`, but not for this class.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Cast x [..., in_features] to the dtype of the weight, apply the layer, and return [..., out_features]."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class PatchLinear(nn.Conv3d):
    """Patch embedding of tokens: a convolution whose kernel size equals its stride is a linear layer on patches."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens [number of tokens, channels of a token], and return [number of tokens, width]."""
        return F.linear(tokens.to(self.weight.dtype), self.weight.flatten(1), self.bias)


def rotations_of(rope: WanRotaryPosEmbed, positions: Tensor) -> Tensor:
    """Return the rotation of each pair of channels, complex [L, 1, d/2], for `positions`, int64 [L, 3]: (frame, row, column).

    The first channels are for the frame, the next for the row, the last for the column.
    """
    widths = [rope.t_dim, rope.h_dim, rope.w_dim]

    def pick(table: Tensor) -> Tensor:
        columns = zip(table.split(widths, dim=1), positions.unbind(1), strict=True)
        # Every second column, because the table contains each angle twice.
        return torch.cat([part[index, ::2] for part, index in columns], dim=1)

    return torch.complex(pick(rope.freqs_cos), pick(rope.freqs_sin))[:, None]


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair of adjacent channels of x, fp32 or fp64 [L, H, d], by `rotation` from `rotations_of`."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2)


def _stock_float(x: Tensor) -> Tensor:
    """Cast float64 to float32 where diffusers' model casts to it, so that tests in float64 give equal results."""
    return x.float() if x.dtype == torch.float64 else x


def _heads(attn: WanAttention, x: Tensor) -> Tensor:
    return x.unflatten(-1, (attn.heads, -1))


def _project_out(attn: WanAttention, x: Tensor) -> Tensor:
    for module in attn.to_out:
        x = module(x if x.dim() == 2 else x.flatten(1))
    return x

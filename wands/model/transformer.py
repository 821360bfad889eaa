"""Wan's DiT on packed tokens: diffusers' modules and parameter names, a forward of our own.

Letters: L local tokens, S samples, M timesteps, P channels of a token, D width of the residual stream, T text rows,
I rows of each sample's pictures.

Everything is called as a module, never through its bare weights: ZeRO-3 gathers parameters in module hooks.
For the same reason a module that must behave differently gets a class with another forward, and keeps its
parameters.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanTransformerBlock
from torch import Tensor, nn
from torch._ops import OpOverload

from wands.attention.packed import PackedMeta
from wands.attention.varlen import Backend, PaddedSegments, Segments, padded_attention, varlen_attention
from wands.model.checkpointing import SelectiveCheckpoint
from wands.model.dropout import RowKeys, add_dropout
from wands.model.modulation import gated_add, modulate
from wands.model.offload import ActivationOffloader
from wands.model.rope import rotate, rotation_of
from wands.variants import TEXT_LEN

SelfAttention = Callable[[Tensor, Tensor, Tensor, PackedMeta], Tensor]
"""(q, k, v, meta) -> out, all [L, H, head dim]: packed attention, wherever the other tokens are."""


class PackedWanTransformer(WanTransformer3DModel):
    """A `WanTransformer3DModel` whose forward runs on packed tokens of several samples.

    Under bf16 autocast the matmuls and the attention run in bf16; timesteps, modulation, norms, rotary
    angles, the residual stream and the head stay fp32, as in official Wan.
    """

    _no_split_modules = ["PackedWanBlock"]  # noqa: RUF012
    _repeated_blocks = ["PackedWanBlock"]  # noqa: RUF012
    recomputation: SelectiveCheckpoint | None = None
    """How blocks run under checkpointing; see `set_checkpointing`."""
    row_keys: RowKeys | None = None
    """What dropout layers find of the pack; see `set_dropout`."""

    # diffusers reads the keys of a config from this signature.
    @functools.wraps(WanTransformer3DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        embedder = self.condition_embedder
        for linear in (embedder.time_embedder.linear_1, embedder.time_embedder.linear_2, embedder.time_proj):
            linear.__class__ = Fp32Linear
        self.proj_out.__class__ = Fp32Linear
        self.patch_embedding.__class__ = PatchLinear
        for block in self.blocks:
            block.__class__ = PackedWanBlock

    def set_attention(self, self_attention: SelfAttention, backend: Backend) -> None:
        """Say how tokens attend to each other, and with which kernel they attend to their text.

        Args:
            self_attention: attends inside samples; may talk to other ranks.
            backend: kernel of the cross-attention, which is local.
        """
        for block in self.blocks:
            block.attn1.set_processor(SelfAttentionProcessor(self_attention))
            block.attn2.set_processor(TextAttentionProcessor(backend))

    def set_checkpointing(
        self,
        mode: str,
        saved: Sequence[str] = (),
        offloaded: Sequence[str] = (),
        operators: Mapping[str, Sequence[OpOverload]] | None = None,
        store: ActivationOffloader | None = None,
    ) -> None:
        """Choose what backward computes again instead of finding it kept; see `wands.model.checkpointing` for the names.

        Args:
            mode: "none"; "full": all of each block; "selective": all but `saved`; "offload": all but `saved`, with `offloaded`
                on the host.
            saved: names of tensors that stay on the device.
            offloaded: names of tensors that wait on the host.
            operators: name -> operators, such as `wands.attention.ulysses.OPERATORS`.
            store: for what is offloaded; models that run one after the other may share it. One of its own by default.
        """
        assert saved or mode != "selective", "selective checkpointing needs names"
        assert not saved or mode in ("selective", "offload"), f"{mode} checkpointing keeps no {saved}"
        assert bool(offloaded) == (mode == "offload"), f"{mode} checkpointing offloads {offloaded}"
        if self.recomputation is not None:
            self.recomputation.close()
        self.recomputation = None
        if mode == "none":
            self.disable_gradient_checkpointing()
            return
        self.recomputation = SelectiveCheckpoint(self.blocks, saved, offloaded, operators, store)
        self.enable_gradient_checkpointing(self.recomputation)

    def set_dropout(self, p: float, lora_p: float = 0.0) -> None:
        """Drop in training; forward then needs `meta.dropout_keys`.

        Args:
            p: share of what diffusers drops: results of the attentions and hidden states of the feed-forwards.
            lora_p: share of the inputs of the LoRA, which must be there already.
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
        """Predict the velocity of every token.

        Args:
            tokens: [L, P] patches, channels in the order (C, pt, ph, pw): noisy, and behind those of the noisy
                latents the channels of what they are conditioned on.
            meta: where each sample's tokens and text begin, and where each token sits in its sample.
            timesteps: fp32 [M], sigma * 1000 of the rows of `meta.timestep_lens`; of each sample by default.
            text_embeds: [sum of text_lens, text_dim], trimmed.
            image_embeds: [S, I, image_dim], CLIP's states of the pictures, for models that attend to them.

        Returns:
            [L, channels of the latents in a token] in the dtype of the residual stream, in the same order.
        """
        assert timesteps.dtype == torch.float32, (
            f"timesteps are {timesteps.dtype}: bf16 has 294 of 1000 values"
        )
        assert len(timesteps) == len(meta.padded_timestep_lens), (len(timesteps), meta.padded_timestep_lens)
        if self.row_keys is not None and self.training:
            self.row_keys.set(meta, 0 if image_embeds is None else image_embeds.shape[1])
        patches = self.patch_embedding(tokens)
        compute_dtype = patches.dtype  # autocast's, or that of the weights
        hidden = patches.to(torch.promote_types(compute_dtype, torch.float32))
        temb, table = self._embed_timesteps(timesteps)
        text = self._embed_text(text_embeds.to(compute_dtype))
        image = self._embed_image(image_embeds, compute_dtype)
        rotation = rotation_of(self.rope, meta.positions)
        context = Context(
            PaddedSegments.build(meta.padded_seq_lens, meta.text_lens, TEXT_LEN, tokens.device),
            None if image is None else _image_segments(meta, image),
        )
        for block in self.blocks:
            args = (hidden, text, image, table, rotation, meta, context, compute_dtype)
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden = self._gradient_checkpointing_func(block, *args)
            else:
                hidden = block(*args)
        shift, scale = (self.scale_shift_table + temb[:, None]).unbind(1)
        normed = self.norm_out(_stock_float(hidden))
        prediction = self.proj_out(
            modulate(normed, 1 + scale, shift, meta.padded_timestep_lens).to(hidden.dtype)
        )
        channels = self.config.out_channels or self.config.in_channels
        return prediction.unflatten(1, (-1, channels)).mT.flatten(1)  # the head's order is (pt, ph, pw, C)

    def _embed_timesteps(self, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """[M] -> embedding [M, D] and its projection to the modulation of the blocks [M, 6, D]."""
        embedder = self.condition_embedder
        temb = embedder.time_embedder(embedder.timesteps_proj(timesteps))
        return temb, embedder.time_proj(embedder.act_fn(temb)).unflatten(1, (6, -1))

    def _embed_text(self, text_embeds: Tensor) -> Tensor:
        """[T, text_dim] -> [T + 1, D]; the last row is what every zero pad of every sample becomes."""
        return self.condition_embedder.text_embedder(F.pad(text_embeds, (0, 0, 0, 1)))

    def _embed_image(self, image_embeds: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """[S, I, image_dim] -> [S * I, D]; None for a model without pictures."""
        embedder = self.condition_embedder.image_embedder
        assert (embedder is None) == (image_embeds is None), (
            "pictures are for models that attend to them, and must be there"
        )
        if embedder is None or image_embeds is None:
            return None
        pictures = image_embeds.to(dtype)
        if embedder.pos_embed is not None:  # this embedder joins two pictures of one sample itself
            pictures = pictures.unflatten(1, (2, -1)).flatten(0, 1)
        return embedder(pictures).flatten(0, 1)

    def to_json_string(self) -> str:
        """The config as diffusers writes it, under the name of the class that everybody else loads."""
        config = json.loads(super().to_json_string())
        return json.dumps(config | {"_class_name": "WanTransformer3DModel"}, indent=2, sort_keys=True) + "\n"


@dataclass(frozen=True)
class Context:
    """Which rows of the pack attend to which rows of text and pictures: the same in every block.

    Attributes:
        text: rows of each sample against its text and its pads.
        image: rows of each sample against those of its pictures.
    """

    text: PaddedSegments
    image: Segments | None


def _image_segments(meta: PackedMeta, image: Tensor) -> Segments:
    num_samples = len(meta.local_seq_lens)
    return Segments.build(meta.padded_seq_lens, [len(image) // num_samples] * num_samples, image.device)


class PackedWanBlock(WanTransformerBlock):
    """One transformer block; its arithmetic and its casts are those of the stock block."""

    def forward(
        self,
        hidden: Tensor,
        text: Tensor,
        image: Tensor | None,
        table: Tensor,
        rotation: Tensor,
        meta: PackedMeta,
        context: Context,
        compute_dtype: torch.dtype,
    ) -> Tensor:
        """Attend inside samples, to the text, and feed forward.

        Args:
            hidden: [L, D] residual stream.
            text: [T + 1, D], the last row the pad's.
            image: [S * I, D], pictures.
            table: [M, 6, D] modulation, one row per timestep.
            rotation: complex [L, 1, head dim / 2].
            meta: see PackedWanTransformer.forward.
            context: rows of each sample against its text and pictures.
            compute_dtype: dtype of matmuls and attention.
        """
        lens = meta.padded_timestep_lens
        shift, scale, gate, ff_shift, ff_scale, ff_gate = (self.scale_shift_table + table.float()).unbind(1)
        x = modulate(self.norm1(_stock_float(hidden)), 1 + scale, shift, lens).to(compute_dtype)
        x = self.attn1(x, rotation=rotation, meta=meta)
        hidden = gated_add(_stock_float(hidden), x, gate, lens)

        x = self.norm2(_stock_float(hidden)).to(compute_dtype)
        hidden = hidden + self.attn2(x, text, image=image, context=context)

        x = modulate(self.norm3(_stock_float(hidden)), 1 + ff_scale, ff_shift, lens).to(compute_dtype)
        return gated_add(_stock_float(hidden), _stock_float(self.ffn(x)), ff_gate, lens)


class SelfAttentionProcessor:
    """Packed tokens as normalised and rotated queries and keys, given to the model's self-attention."""

    def __init__(self, self_attention: SelfAttention) -> None:
        self.self_attention = self_attention

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        _encoder_hidden_states: None,
        _attention_mask: None,
        _rotary_emb: None,
        rotation: Tensor,
        meta: PackedMeta,
    ) -> Tensor:
        """[L, D] -> [L, D]."""
        q = rotate(_heads(attn, _normed(attn.to_q, attn.norm_q, hidden_states)), rotation)
        k = rotate(_heads(attn, _normed(attn.to_k, attn.norm_k, hidden_states)), rotation)
        v = _heads(attn, attn.to_v(hidden_states))
        q, k = q.to(v.dtype), k.to(v.dtype)
        return _project_out(attn, self.self_attention(q, k, v, meta))


class TextAttentionProcessor:
    """Each sample's tokens attend to its text, zero-padded to 512, the pads attended: merged, not stored.

    To pictures they attend beside it, with keys and values of their own; the two results are added.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        _attention_mask: None,
        _rotary_emb: None,
        image: Tensor | None,
        context: Context,
    ) -> Tensor:
        """[L, D], [T + 1, D], [S * I, D] -> [L, D]."""
        q = _heads(attn, _normed(attn.to_q, attn.norm_q, hidden_states))
        k = _heads(attn, _normed(attn.to_k, attn.norm_k, encoder_hidden_states))
        v = _heads(attn, attn.to_v(encoder_hidden_states))
        q, k = q.to(v.dtype), k.to(v.dtype)
        out = padded_attention(q, k[:-1], v[:-1], k[-1], v[-1], context.text, self.backend)
        if image is not None:
            assert context.image is not None
            k = _heads(attn, _normed(attn.add_k_proj, attn.norm_added_k, image))
            v = _heads(attn, attn.add_v_proj(image))
            out = out + varlen_attention(q, k.to(v.dtype), v, context.image, self.backend)
        return _project_out(attn, out)


class Fp32Linear(nn.Linear):
    """A linear layer that autocast leaves in fp32.

    A class of its own, because DeepSpeed's torch_autocast reduces and gathers `nn.Linear` itself in bf16.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of the weights."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class PatchLinear(nn.Conv3d):
    """The patch convolution on patches that are cut out already: kernel = stride makes it one matmul."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[L, P] -> [L, D]."""
        return F.linear(tokens.to(self.weight.dtype), self.weight.flatten(1), self.bias)


def _stock_float(x: Tensor) -> Tensor:
    """The stock model rounds to fp32 here; only a float64 model notices, and must, to agree with it."""
    return x.float() if x.dtype == torch.float64 else x


def _normed(linear: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    """A projection with the norm over all its heads, which is computed and returned in fp32 at least."""
    projected = linear(x)
    return norm(projected.to(torch.promote_types(projected.dtype, torch.float32)))


def _heads(attn: WanAttention, x: Tensor) -> Tensor:
    """[T, D] -> [T, H, head dim]."""
    return x.unflatten(-1, (attn.heads, -1))


def _project_out(attn: WanAttention, x: Tensor) -> Tensor:
    for module in attn.to_out:
        x = module(x if x.dim() == 2 else x.flatten(1))
    return x

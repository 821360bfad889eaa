"""A stock Wan transformer on tokens that are spread over ranks: diffusers' own forward, for sampling.

Between the first block and the head everything but self-attention works token by token. So the stock modules stay as they
are, in the dtypes that the stock pipeline gives them; tokens and rotary angles are cut where they enter the blocks,
self-attention is replaced, and the head's output is joined again on every rank. A sample then differs from that of one
process by no more than another attention kernel would change it, also in bf16, where `PackedWanTransformer`, whose residual
stream is fp32 as in training, would not give the same one.

Letters: B samples of one size, N tokens of a sample, L of them on this rank with its tail padding, H heads, D head dim.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor

from wands.attention.packed import PackedMeta
from wands.data.patchify import grid_size
from wands.distributed.layout import ContextLayout
from wands.model.transformer import SelfAttention
from wands.variants import TEXT_LEN


def shard_transformer(
    transformer: WanTransformer3DModel,
    self_attention: SelfAttention,
    *,
    ulysses_degree: int,
    ring_degree: int,
    cp_rank: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Make a stock transformer, in place, one of those that predict the velocity of the same latents together.

    Its calls take and return what they did: every rank of the group must make them with the same latents, timesteps and text,
    and every rank gets the whole velocity, the same bits.

    Args:
        transformer: stock, of any variant; its weights stay whole on every rank. Timesteps may be those of tokens.
        self_attention: attends inside a sample that is spread over the group.
        ulysses_degree: ranks that share heads.
        ring_degree: ranks that share tokens.
        cp_rank: ring rank * ulysses_degree + Ulysses rank.
        group: all these ranks, in the order of `cp_rank`; None when there is one.
    """
    cut = _Cut(transformer.config.patch_size, ulysses_degree, ring_degree, cp_rank, group)
    transformer.rope.register_forward_hook(cut.angles)
    transformer.condition_embedder.register_forward_pre_hook(cut.timesteps, with_kwargs=True)
    transformer.blocks[0].register_forward_pre_hook(cut.tokens)
    transformer.proj_out.register_forward_hook(cut.join)
    for block in transformer.blocks:
        block.attn1.set_processor(ShardedAttentionProcessor(self_attention, cut))


class ShardedAttentionProcessor:
    """The stock self-attention round another kernel: the same projections, norms, rotation and casts."""

    def __init__(self, self_attention: SelfAttention, cut: _Cut) -> None:
        self.self_attention, self.cut = self_attention, cut

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        _encoder_hidden_states: None,
        _attention_mask: None,
        rotary_emb: tuple[Tensor, Tensor],
    ) -> Tensor:
        """[B, L, H * D] -> the same."""
        q, k = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, attn.to_v(hidden_states)))
        q, k = _rotate(q, *rotary_emb), _rotate(k, *rotary_emb)
        samples = zip(q, k, v, strict=True)
        out = torch.stack([self.self_attention(*sample, self.cut.meta) for sample in samples])
        for module in attn.to_out:
            out = module(out if out.dim() == 3 else out.flatten(2))
        return out


class _Cut:
    """What goes through a call of the model, and where it is cut and joined."""

    def __init__(
        self,
        patch_size: tuple[int, int, int],
        ulysses_degree: int,
        ring_degree: int,
        cp_rank: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.patch_size, self.degrees = patch_size, (ulysses_degree, ring_degree)
        self.cp_rank, self.group = cp_rank, group
        self.meta: PackedMeta
        self._mine: Tensor
        self._order: Tensor

    def angles(self, _: Any, args: tuple[Tensor], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The first that a call computes: look at its size, then keep this rank's rows of [1, N, 1, D]."""
        grid = grid_size(args[0].shape[2:], self.patch_size)
        self.meta, self._mine, self._order = _places(grid, *self.degrees, self.cp_rank, args[0].device)
        return tuple(table[:, self._mine] for table in output)

    def timesteps(
        self, _: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Those of all tokens, [B * N] with `timestep_seq_len` N, become this rank's; one per sample stays."""
        num_tokens = options.get("timestep_seq_len")
        if num_tokens is None:
            return args, options
        timestep, *others = args
        mine = timestep.unflatten(0, (-1, num_tokens))[:, self._mine]
        return (mine.flatten(), *others), options | {"timestep_seq_len": mine.shape[1]}

    def tokens(self, _: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """[B, N, H * D] -> [B, L, H * D], before the first block."""
        hidden, *others = args
        return hidden[:, self._mine], *others

    def join(self, _: Any, _args: Any, output: Tensor) -> Tensor:
        """[B, L, P] of every rank -> [B, N, P], behind the head."""
        pieces = [output]
        if self.group is not None:
            pieces = [torch.empty_like(output) for _ in range(self.group.size())]
            dist.all_gather(pieces, output.contiguous(), group=self.group)
        return torch.cat(pieces, dim=1)[:, self._order]


@lru_cache(maxsize=16)
def _places(
    grid: tuple[int, int, int], ulysses_degree: int, ring_degree: int, cp_rank: int, device: torch.device
) -> tuple[PackedMeta, Tensor, Tensor]:
    """For a sample of grid (frames, rows, columns): this rank's tokens, [L] and described, and all ranks' in order, [N].

    A pad is a copy of token 0: nothing attends to it, and the order leaves it out.
    """
    num_tokens = grid[0] * grid[1] * grid[2]
    layouts = [
        ContextLayout.build(
            [num_tokens], ulysses_degree=ulysses_degree, ring_degree=ring_degree, cp_rank=rank
        )
        for rank in range(ulysses_degree * ring_degree)
    ]
    everywhere = torch.cat([layout.token_index for layout in layouts])
    order = everywhere.argsort()[len(everywhere) - num_tokens :]
    mine = layouts[cp_rank]
    index = mine.token_index.clamp(min=0)
    positions = torch.cartesian_prod(*map(torch.arange, grid))[index]
    meta = PackedMeta(positions, mine.segment_ids, mine.plan.chunk_lens, mine.local_seq_lens, (TEXT_LEN,))
    return meta.to(device), index.to(device), order.to(device)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The stock rotation [B, L, H, D], rounded where it rounds; theirs is out of reach inside a function."""
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return (
        torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
        .flatten(-2)
        .type_as(x)
    )

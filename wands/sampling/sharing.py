"""Sample each video on all ranks of a launcher, which divide the tokens of diffusers' transformers among themselves.

Between the first block and the head, all modules except self-attention process each token separately and stay unchanged. Hooks
select this rank's tokens and rotary angles before the blocks, a new attention processor attends to the tokens of all ranks, and a
hook after the head joins them.

The video differs from that of one process only by rounding, also in bf16. `PackedWanTransformer`, which wands trains, keeps the
residual stream in fp32, so in bf16 its video would differ more.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor

from wands.attention.kernels.registry import choose_backend, usable_backends
from wands.attention.packed import PackedMeta
from wands.attention.ring import RingAttention
from wands.config.recipe import ParallelConfig
from wands.distributed.bootstrap import init_process_group, ranks_per_node
from wands.distributed.consistency import check_agreement, tensor_checksum
from wands.distributed.dims import ParallelDims, ProcessGroups, choose_degrees, new_group
from wands.errors import ConfigError
from wands.model.transformer import SelfAttention
from wands.patches import grid_size, latent_size
from wands.sampling.pipeline import AnyPipeline
from wands.transfer import to_device
from wands.variants import TEXT_LEN, Variant

log = logging.getLogger(__name__)


def plan_ranks(
    variant: Variant, ulysses_degree: int | None = None, ring_degree: int | None = None, split: bool = False
) -> ParallelDims:
    """Choose the Ulysses degree and the ring degree of the ranks that sample each video. Without a launcher, there is one rank.

    None chooses the largest valid Ulysses degree, and the ring degree that uses all ranks. With `split`, one half of the ranks
    computes each prediction of classifier-free guidance, and the degrees apply to a half, if the number of ranks is divisible by
    2 x (product of the given degrees).

    Raises:
        ConfigError: if the degrees do not fit the model or the number of ranks.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    options = {"--ulysses-degree": ulysses_degree, "--ring-degree": ring_degree}
    given = {flag: value for flag, value in options.items() if value is not None}
    product = (ulysses_degree or 1) * (ring_degree or 1)
    size = world_size // 2 if split and world_size % (2 * product) == 0 else world_size
    if size % product or (len(given) == 2 and product != size):
        text = ", ".join(f"{flag}={value}" for flag, value in given.items())
        raise ConfigError(
            f"{text} must {'have the product' if len(given) == 2 else 'divide'} world_size={world_size}, because "
            f"all processes share each video. Start {product} processes with a launcher, or leave the options out."
        )
    parallel = ParallelConfig(cp_size=size, ulysses_degree=ulysses_degree, ring_degree=ring_degree)
    try:
        degrees = choose_degrees(
            parallel, num_heads=variant.dit.num_heads, ranks_per_node=ranks_per_node(), model=variant.name
        )
    except ConfigError as error:
        text = str(error).replace(f"parallel.cp_size={size}", f"world_size={world_size}")
        for flag in options:
            text = text.replace(f"parallel.{flag[2:].replace('-', '_')}", flag)
        raise ConfigError(text) from None
    return ParallelDims(world_size, rank, ulysses_degree=degrees.ulysses, ring_degree=degrees.ring)


def share_pipeline(
    pipeline: AnyPipeline, dims: ParallelDims, kernel: str = "auto"
) -> dist.ProcessGroup | None:
    """Initialize `torch.distributed`, and change this rank's pipeline so that all ranks sample each video together.

    All ranks must then call the pipeline with the same arguments, and get the same latents. `kernel` is "auto" or "native", see
    `set_attention`.

    Return the process group for `guidance` of `sample_latents`: two ranks with the same tokens, one for each prediction of
    classifier-free guidance; or None if every rank computes both predictions.

    Raises:
        ConfigError: on every rank, if the weights or the scheduler differ between ranks.
    """
    _, _, device = init_process_group()
    check_pipelines(pipeline, device)
    groups = ProcessGroups.build(dims, device)
    sizes = dims.world_size, dims.dp_size, dims.ulysses_degree, dims.ring_degree
    log.info("sampling on %d ranks: guidance %d x Ulysses %d x ring %d", *sizes)
    set_attention(pipeline, device, groups, kernel)
    return new_group([range(i, dims.world_size, dims.cp_size) for i in range(dims.cp_size)], device)


def set_attention(
    pipeline: AnyPipeline, device: torch.device, groups: ProcessGroups, kernel: str = "auto"
) -> None:
    """Change the transformers of a pipeline in place, so that a kernel of wands computes their self-attention.

    If several ranks share the tokens of a video, all transformers are changed. Otherwise a transformer keeps diffusers' attention
    if `kernel` is "native" instead of "auto", or if `usable_backends` finds no kernel, as on a CPU or in fp32.
    """
    for transformer in filter(None, (pipeline.transformer, pipeline.transformer_2)):
        target = device, transformer.dtype, transformer.config.attention_head_dim
        if not groups.cp and (kernel == "native" or not any(usable_backends(*target))):
            continue
        attention: SelfAttention = RingAttention(backend := choose_backend("auto", *target))
        if groups.cp is not None:
            # Imported here because the module imports DeepSpeed, which one process does not need.
            from wands.attention.ulysses import context_attention

            attention = context_attention(backend, groups.ulysses, groups.ring, groups.ring_grad)
        shard_transformer(transformer, attention, groups.dims, groups.cp)


def check_pipelines(pipeline: AnyPipeline, device: torch.device) -> None:
    """Check that the scheduler and the weights are equal on all ranks: each node may have its own copy of the pipeline folder."""
    scheduler = public_config(pipeline.scheduler.config)
    parts: dict[str, Any] = {"pipeline": public_config(pipeline.config) | {"scheduler": scheduler}}
    for name in ("text_encoder", "image_encoder", "transformer", "transformer_2", "vae"):
        if (module := getattr(pipeline, name, None)) is not None:
            parts[name] = _checksums(module, device)
    check_agreement({name: json.dumps(part, sort_keys=True) for name, part in parts.items()}, device)


@torch.no_grad()
def _checksums(module: torch.nn.Module, device: torch.device) -> dict[str, int]:
    """Return a checksum of the values of each parameter, offloaded ones included."""
    sums = {}
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            values = parameter
            if parameter.is_meta:  # between two calls, accelerate's hooks hold the values
                hooks = getattr(owner._hf_hook, "hooks", [owner._hf_hook])
                weights = (getattr(hook, "weights_map", None) for hook in hooks)
                values = next(values for values in weights if values is not None)[name]
            sums[f"{path}.{name}".lstrip(".")] = tensor_checksum(values.to(device))
    return dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True))  # one synchronisation


def public_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a diffusers config without the keys that start with "_", such as "_diffusers_version"."""
    return {key: value for key, value in config.items() if not key.startswith("_")}


def shard_transformer(
    transformer: WanTransformer3DModel,
    self_attention: SelfAttention,
    dims: ParallelDims,
    group: dist.ProcessGroup | None,
) -> None:
    """Change a diffusers transformer in place, so that the ranks of a group divide the tokens of each call.

    All ranks must call it with the same undivided latents, timesteps (which may differ between tokens) and text. Every rank gets
    the same predicted velocity of all tokens, bit for bit. `group` is in the order of `dims.cp_rank`; None for one rank.
    """
    processor = ShardedAttentionProcessor(
        self_attention=self_attention, patch_size=transformer.config.patch_size, dims=dims, group=group
    )
    transformer.rope.register_forward_hook(processor.angles)
    transformer.condition_embedder.register_forward_pre_hook(processor.timesteps, with_kwargs=True)
    transformer.blocks[0].register_forward_pre_hook(processor.tokens)
    transformer.proj_out.register_forward_hook(processor.join)
    for block in transformer.blocks:
        block.attn1.set_processor(processor)


@dataclass(eq=False)
class ShardedAttentionProcessor:
    """Self-attention for a diffusers transformer whose tokens are divided among ranks.

    One object is the attention processor of all blocks. The hooks `angles`, `timesteps` and `tokens` select this rank's tokens
    before the blocks, and `join` gathers the outputs of all ranks after the last layer. Projections, norms, rotation and casts
    are as in diffusers' own processor. `group` is None for one rank.
    """

    self_attention: SelfAttention
    patch_size: tuple[int, int, int]
    dims: ParallelDims
    group: dist.ProcessGroup | None

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        _encoder_hidden_states: None,
        _attention_mask: None,
        rotary_emb: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return the self-attention for the tokens of this rank, `hidden_states` [samples, tokens, channels].

        `rotary_emb` are (cosines, sines) of the rotary angles of this rank's tokens.
        """
        q = attn.norm_q(attn.to_q(hidden_states))
        k = attn.norm_k(attn.to_k(hidden_states))
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, attn.to_v(hidden_states)))
        q = _rotate_as_diffusers(q, *rotary_emb)
        k = _rotate_as_diffusers(k, *rotary_emb)
        samples = zip(q, k, v, strict=True)
        out = torch.stack([self.self_attention(*sample, self.meta) for sample in samples])
        for module in attn.to_out:
            out = module(out if out.dim() == 3 else out.flatten(2))
        return out

    def angles(self, _: Any, args: tuple[Tensor], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Hook after the rotary embedding: keep only the rotary angles of this rank's tokens.

        It runs before the other hooks, and stores the indices of this rank's tokens for them. `args` are the latents.
        """
        grid = grid_size(latent_size(args[0]), self.patch_size)
        self.meta, self._mine, self._order = token_index(grid, self.dims, args[0].device)
        return tuple(table[:, self._mine] for table in output)

    def timesteps(
        self, _: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hook before the timestep embedding: keep only the timesteps of this rank's tokens.

        If all tokens of a sample share one timestep, the arguments are returned unchanged.
        """
        num_tokens = options.get("timestep_seq_len")
        if num_tokens is None:
            return args, options
        timestep, *others = args
        mine = timestep.unflatten(0, (-1, num_tokens))[:, self._mine]
        return (mine.flatten(), *others), options | {"timestep_seq_len": mine.shape[1]}

    def tokens(self, _: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Hook before the first block: keep only the tokens of this rank in `args[0]`, [samples, tokens, channels]."""
        hidden, *others = args
        return hidden[:, self._mine], *others

    def join(self, _: Any, _args: Any, output: Tensor) -> Tensor:
        """Hook after the last layer: gather the outputs of all ranks, and return them in token order without padding."""
        return join_tokens(output, self._order, self.group)


def join_tokens(tokens: Tensor, order: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather the tokens of all ranks, [samples, tokens, channels] in order. Every rank of the group must call this function.

    `tokens` are those of this rank with padding. `order` is the third result of `token_index`.
    """
    pieces = [tokens]
    if group is not None:
        pieces = [torch.empty_like(tokens) for _ in range(group.size())]
        dist.all_gather(pieces, tokens.contiguous(), group=group)
    return torch.cat(pieces, dim=1)[:, order]


@lru_cache(maxsize=16)
def token_index(
    grid: tuple[int, int, int], dims: ParallelDims, device: torch.device
) -> tuple[PackedMeta, Tensor, Tensor]:
    """Return this rank's tokens of a sample: (metadata for attention, their indices in the sample, order).

    `order` has the position of each token of the sample in the gathered tokens of all ranks. Padding consists of copies of token
    0, to which no token attends. `grid` is the number of tokens along (frames, rows, columns).
    """
    num_tokens = grid[0] * grid[1] * grid[2]
    layouts = [replace(dims, rank=rank).layout([num_tokens]) for rank in range(dims.cp_size)]
    everywhere = torch.cat([layout.token_index for layout in layouts])
    order = everywhere.argsort()[len(everywhere) - num_tokens :]
    mine = layouts[dims.cp_rank]
    index = mine.token_index.clamp(min=0)
    positions = torch.cartesian_prod(*map(torch.arange, grid))[index]
    meta = PackedMeta(
        positions=positions,
        segment_ids=mine.segment_ids,
        chunk_lens=mine.plan.chunk_lens,
        local_seq_lens=mine.local_seq_lens,
        text_lens=(TEXT_LEN,),
    )
    return to_device((meta, index, order), device)


def _rotate_as_diffusers(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [samples, tokens, heads, head channels] by their angles, rounding as diffusers does.

    wands cannot import diffusers' function, which is defined inside another function.
    """
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos = cos[..., 0::2]
    sin = sin[..., 1::2]
    rotated = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
    return rotated.flatten(-2).type_as(x)

"""Sample a video chunk by chunk with a causally trained DiT.

Each chunk of frames is denoised by diffusers' own loop. Its tokens attend to themselves and to the cached keys and values of the
chunks that they see (`wands.objectives.chunks`). When a chunk is finished, one more pass at the noise level of the training's
context writes its own keys and values. Memory and time of a chunk are constant once `window_frames` are full.

A cache belongs to a DiT and to a prediction of classifier-free guidance, because the text changes keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from wands.attention.kernels.registry import Backend
from wands.attention.packed import PackedMeta, Segments
from wands.config.recipe import ObjectiveConfig
from wands.distributed.dims import ProcessGroups
from wands.errors import WandsError
from wands.flow.rng import philox
from wands.flow.sigmas import NUM_TRAIN_TIMESTEPS
from wands.model.transformer import CrossAttentionProcessor, PackedWanTransformer, SelfAttentionProcessor
from wands.objectives.chunks import chunk_bounds, seen_chunks
from wands.sampling.dit_adapter import DiTAdapter
from wands.sampling.images import NO_IMAGES, ConditionImages
from wands.sampling.requests import SampleRequest
from wands.sampling.sample import Texts, call_options
from wands.variants import Variant

MAX_FRAMES = 1024
"""Latent frames for which Wan has rotary angles (`rope_max_seq_len`)."""

KeysAndValues = list[tuple[Tensor, Tensor]]
"""For each layer, keys and values of a chunk, each [tokens, heads, head dim]."""


class ChunkAttention:
    """Self-attention of a chunk's tokens to themselves and to the cached keys of earlier chunks.

    With Ulysses, it is the local attention, for some heads of all tokens. The ranks of a ring gather the keys of a chunk, so that
    every rank has those of all tokens.

    Attributes:
        cache: maps the number of a chunk to its keys and values, for one prediction; set before a call of the DiT.
        seen: numbers of the cached chunks that the tokens attend to.
        written: number of the chunk whose keys and values are stored; None stores none.
    """

    def __init__(self, backend: Backend, groups: ProcessGroups) -> None:
        self._backend = backend
        self._groups = groups
        self.cache: dict[int, KeysAndValues] = {}
        self.seen: Sequence[int] = ()
        self.written: int | None = None
        self._layer = 0

    def begin(self, cache: dict[int, KeysAndValues], seen: Sequence[int], written: int | None) -> None:
        """Prepare a call of the DiT, whose layers call this object in their order."""
        self.cache = cache
        self.seen = seen
        self.written = written
        self._layer = 0
        if written is not None:
            cache[written] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, meta: PackedMeta) -> Tensor:
        """Return the output for q, k and v [N, H, D], the tokens of this rank of the ring with padding at the end."""
        lens = [sum(row) for row in meta.chunk_lens]
        keys, values = (self._gather(x, lens) for x in (k, v))
        if self.written is not None:
            # Copies, because with Ulysses these are views of one tensor with the queries.
            self.cache[self.written].append((keys.clone(), values.clone()))
        layers = [self.cache[chunk][self._layer] for chunk in self.seen]
        all_keys = torch.cat([*(layer[0] for layer in layers), keys])
        all_values = torch.cat([*(layer[1] for layer in layers), values])
        own = 0 if self._groups.ring is None else self._groups.ring.rank()
        segments = Segments.build((lens[own],), (len(all_keys),), q.device)
        self._layer += 1
        out, _ = self._backend.forward(q, all_keys, all_values, segments, q.shape[-1] ** -0.5)
        return out

    def _gather(self, x: Tensor, lens: Sequence[int]) -> Tensor:
        """Return the rows of all ranks of the ring, without padding."""
        if self._groups.ring is None:
            return x[: lens[0]]
        parts = [torch.empty_like(x) for _ in lens]
        dist.all_gather(parts, x.contiguous(), group=self._groups.ring)
        return torch.cat([part[:length] for part, length in zip(parts, lens, strict=True)])


class ChunkAdapter(DiTAdapter):
    """Adapter of a DiT for packed tokens, whose self-attention sees cached keys. Call it inside `with adapter.attached():`."""

    def __init__(
        self,
        model: PackedWanTransformer,
        call: Callable[..., Tensor],
        groups: ProcessGroups,
        device: torch.device,
        backend: Backend,
    ) -> None:
        super().__init__(model, call, groups, device)
        self.cache_context = self._predicting
        self._blocks = model.blocks
        self._attention = ChunkAttention(backend, groups)
        self._caches: dict[str, dict[int, KeysAndValues]] = {}
        self._inputs: dict[str, dict[str, Any]] = {}  # of the last call for each prediction
        self._prediction = ""
        self._seen: Sequence[int] = ()

    @property
    def cached_bytes(self) -> int:
        """Bytes of all cached keys and values on this rank."""
        caches = self._caches.values()
        pairs = [pair for cache in caches for layers in cache.values() for pair in layers]
        return sum(x.numel() * x.element_size() for pair in pairs for x in pair)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Replace the self-attention of the DiT, with empty caches, in a `with` block."""
        attention: Any = self._attention
        if self._groups.ulysses is not None:
            # Imported here because the module imports DeepSpeed, which one process does not need.
            from wands.attention.ulysses import UlyssesAttention

            attention = UlyssesAttention(attention, self._groups.ulysses)
        before = [block.attn1.processor for block in self._blocks]
        for block in self._blocks:
            block.attn1.set_processor(SelfAttentionProcessor(attention))
        try:
            yield
        finally:
            for block, processor in zip(self._blocks, before, strict=True):
                block.attn1.set_processor(processor)
            self._caches.clear()
            self._inputs.clear()
            self._attention.begin({}, (), None)

    def begin_chunk(self, first_frame: int, seen: Sequence[int]) -> None:
        """Prepare the calls for a chunk that begins at a latent frame and sees the chunks `seen`. The others are forgotten."""
        self.first_frame = first_frame
        self._seen = seen
        self._inputs.clear()
        for cache in self._caches.values():
            for chunk in cache.keys() - set(seen):
                del cache[chunk]

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **more: Any
    ) -> tuple[Tensor]:
        inputs = {"timestep": timestep, "encoder_hidden_states": encoder_hidden_states, **more}
        self._inputs[self._prediction] = {"hidden_states": hidden_states, **inputs}
        self._attention.begin(self._caches.setdefault(self._prediction, {}), self._seen, None)
        return super().forward(hidden_states, timestep, encoder_hidden_states, **more)

    def write(self, chunk: int, latents: Tensor, noise: Tensor, context_noise: float) -> None:
        """Store the keys and values of a finished chunk, for each prediction that was made of it.

        Args:
            chunk: number of the chunk.
            latents: finished latents [1, C, f, h, w].
            noise: of the same shape.
            context_noise: noise level of the chunk as context. Frames that are given have none.
        """
        for prediction, inputs in self._inputs.items():
            timestep = inputs.pop("timestep")
            hidden = inputs.pop("hidden_states")
            sigma = torch.full_like(timestep.float(), context_noise).masked_fill(timestep == 0, 0.0)
            # One value for all tokens, or one for each token of a model that takes a first frame.
            of_frames = sigma.view(1, latents.shape[2], -1)[..., 0] if sigma.numel() > 1 else sigma.view(1, 1)
            level = of_frames.view(1, 1, -1, 1, 1).to(latents.dtype)
            noisy = (1 - level) * latents + level * noise
            channels = hidden[:, latents.shape[1] :]
            self._attention.begin(self._caches.setdefault(prediction, {}), self._seen, chunk)
            super().forward(torch.cat([noisy, channels], 1), sigma * NUM_TRAIN_TIMESTEPS, **inputs)

    @contextmanager
    def _predicting(self, name: str, **_: Any) -> Iterator[None]:
        self._prediction = name
        yield


@torch.no_grad()
def roll_out(
    pipeline: Any,
    request: SampleRequest,
    config: ObjectiveConfig,
    texts: Sequence[tuple[int, Texts]],
    images: ConditionImages = NO_IMAGES,
) -> Iterator[Tensor]:
    """Yield the normalized latents of each chunk of a request, fp32 [channels, frames, rows, columns] on the CPU.

    Args:
        pipeline: result of `pipeline_for`, whose DiTs are `ChunkAdapter`.
        request: prompt and options.
        config: chunks, window and context noise of the training.
        texts: (first latent frame, embedded texts) pairs in ascending order. The first one is for frame 0.
        images: images that the video starts or ends with.

    Raises:
        WandsError: if the latents are not finite.
    """
    adapters = [one for one in (pipeline.transformer, pipeline.transformer_2) if one is not None]
    num_frames = num_latent_frames(request, pipeline.vae_scale_factor_temporal)
    bounds = chunk_bounds(num_frames, config.chunk_frames, config.independent_first_frame)
    stride = pipeline.vae_scale_factor_spatial
    channels = adapters[0].config.out_channels
    conditions = _ChunkConditions(pipeline, num_frames)
    is_finite = True
    with _attached(adapters):
        for chunk, (first, end) in enumerate(bounds):
            seen = seen_chunks(bounds, chunk, config.window_frames, config.sink_frames)
            numbers = [number for begin, stop in seen for number in range(begin, stop)]
            for adapter in adapters:
                adapter.begin_chunk(first, numbers)
            shape = (1, channels, end - first, request.height // stride, request.width // stride)
            conditions.frames = first, end
            prompt, negative = [own for begin, own in texts if begin <= first][-1]
            latents = pipeline(
                prompt_embeds=prompt,
                negative_prompt_embeds=negative,
                latents=_noise(shape, request.seed, chunk, "chunk"),
                output_type="latent",
                **call_options(request),
                **images,
            ).frames
            is_finite = is_finite and bool(torch.isfinite(latents).all())
            if chunk + 1 < len(bounds):
                noise = _noise(shape, request.seed, chunk, "context").to(latents)
                for adapter in adapters:
                    adapter.write(chunk, latents, noise, config.context_noise)
            yield latents[0].float().cpu()
    # After all passes: with ZeRO-3, the ranks of other videos wait for this rank's passes.
    if not is_finite:
        raise WandsError(
            f"--prompt={request.prompt!r}: the sample has values that are not finite. Use --dtype=fp32. If the error remains, "
            "use the weights of another checkpoint.",
            agreed=True,
        )


def num_latent_frames(request: SampleRequest, stride: int) -> int:
    """Return the number of latent frames of a request. `stride` is the number of frames in a latent frame."""
    return (request.num_frames - 1) // stride + 1


def rollout_problems(requests: Sequence[SampleRequest], variant: Variant, is_causal: bool) -> list[str]:
    """Return error texts for requests that cannot be sampled chunk by chunk, or without `is_causal`, that need it."""
    problems = []
    if is_causal and variant.extra:
        problems.append(
            f"the input {variant.extra[0].name} cannot be used in causal sampling. Use another model."
        )
    for number, request in enumerate(requests, start=1):
        name = f"later_prompts of prompt {number}"
        starts = [first for first, _ in request.later_prompts or ()]
        if late := [first for first in starts if first >= request.num_frames]:
            problems.append(
                f"{name} begin at frame {late[0]}, but the video has {request.num_frames} frames. Remove them, or raise --frames."
            )
        if starts and not is_causal:
            problems.append(f"{name} need causal sampling. Remove them, or use a causally trained model.")
        if starts != sorted(set(starts)):
            problems.append(f"{name} must be in ascending order of their frames. Sort them.")
        frames = num_latent_frames(request, variant.vae_stride[0])
        if is_causal and frames > MAX_FRAMES:
            most = (MAX_FRAMES - 1) * variant.vae_stride[0] + 1
            problems.append(
                f"--frames={request.num_frames} of prompt {number} are {frames:,} latent frames, and Wan has positions for "
                f"{MAX_FRAMES:,}. Use at most {most:,} frames."
            )
    return problems


class _ChunkConditions:
    """Cuts what a pipeline prepares for a whole video to the frames of a chunk.

    It replaces `prepare_latents` of the pipeline: the latents are those that the pipeline was called with, and conditions of
    image-to-video models are prepared once, for the whole video.

    Attributes:
        frames: (first, end) of the chunk in latent frames.
    """

    def __init__(self, pipeline: Any, num_frames: int) -> None:
        self._prepare = pipeline.prepare_latents
        self._num_frames = num_frames
        self._whole: tuple[Tensor, ...] | None = None
        self.frames = (0, num_frames)
        pipeline.prepare_latents = self

    def __call__(self, *args: Any) -> Tensor | tuple[Tensor, ...]:
        if self._whole is None:
            prepared = self._prepare(*args)
            self._whole = () if isinstance(prepared, Tensor) else prepared[1:]
        # The last tensor among the arguments is the latents; an image has fewer dimensions.
        latents = next(x for x in args if isinstance(x, Tensor) and x.dim() == 5)
        device = next(x for x in args if isinstance(x, torch.device))
        latents = latents.to(device, torch.float32)
        first, end = self.frames
        own = [x[:, :, first:end] if x.shape[2] == self._num_frames else x for x in self._whole]
        return (latents, *own) if own else latents


@contextmanager
def _attached(adapters: Sequence[ChunkAdapter]) -> Iterator[None]:
    if not adapters:
        yield
        return
    with adapters[0].attached(), _attached(adapters[1:]):
        yield


def _noise(shape: Sequence[int], seed: int, chunk: int, purpose: str) -> Tensor:
    """Return normal noise that depends only on the seed, the number of the chunk and the purpose."""
    return torch.from_numpy(philox(seed, chunk, purpose).standard_normal(shape, dtype="float32"))


def packed_adapters(
    transformers: Mapping[str, Module], groups: ProcessGroups, device: torch.device, backend: Backend
) -> dict[str, ChunkAdapter]:
    """Return an adapter for each transformer of diffusers, which is changed in place to a DiT for packed tokens."""
    adapters = {}
    for part, transformer in transformers.items():
        model = PackedWanTransformer.of_stock(transformer)
        for block in model.blocks:
            block.attn2.set_processor(CrossAttentionProcessor(backend))
        adapters[part] = ChunkAdapter(model, model, groups, device, backend)
    return adapters

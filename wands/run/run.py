"""Describe a checked training run: recipe, model, data and plan, which are known before the process group starts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from wands.checkpoint.checkpoint_files import Checkpoint
from wands.config.recipe import Recipe
from wands.data.cache.reader import LatentCache
from wands.data.collate import PackingCollator
from wands.data.datasets import CombinedDataset, Dataset, select_sources
from wands.data.packing import Step, imbalance
from wands.data.patchify import grid_size
from wands.data.sampler import PlanSampler, StepPlan
from wands.distributed.dims import ContextDegrees, ParallelDims
from wands.flow.rng import SampleKey
from wands.model.files.loading import sample_weights
from wands.model.files.lora_files import find_lora_file
from wands.model.files.tensor_files import sample_digest
from wands.planning.workload import Weight, Workload
from wands.sampling.requests import SampleRequest
from wands.variants import TEXT_LEN, DiTShape, Expert, Variant


@dataclass(frozen=True)
class TrainingRun:
    """Training run whose recipe, model and data have passed all checks, and whose steps are planned.

    Attributes:
        recipe: recipe with all defaults filled in.
        ds_config: config for `deepspeed.initialize`. Only its learning rate is not final: `build_engine` multiplies it by the
            factor of `optim.scale_lr`.
        transformer_config: diffusers config of the DiT.
        variant: kind of Wan model.
        experts: the trained DiTs. Each step updates these DiTs one after the other.
        weights: names, shapes and bytes per element of the parameters of one trained DiT. They are equal for all trained DiTs.
        data: data set that the recipe names.
        sampler: sampler that plans the bins (packed sequences) of every optimizer step.
        collator: collator that packs samples into batches.
        world_size: number of ranks.
        degrees: Ulysses degree and ring degree.
        checkpoint: checkpoint that the run resumes from; None for a new run.
        held_out: data set that is evaluated and not trained on; None if no clip is held out.
        samples: requests for the sample videos that the run generates during the training.
        has_model_files: False in a dry run of a model that is not downloaded, so that its files cannot be checked. Otherwise
            True.
        data_change: text that says what has changed since the checkpoint: clips were added or removed, or clips are now packed
            differently. None if nothing has changed.
    """

    recipe: Recipe
    ds_config: dict[str, Any]
    transformer_config: dict[str, Any]
    variant: Variant
    experts: tuple[Expert, ...]
    weights: tuple[Weight, ...]
    data: Dataset
    sampler: PlanSampler
    collator: PackingCollator
    world_size: int
    degrees: ContextDegrees
    checkpoint: Checkpoint | None = None
    held_out: Dataset | None = None
    samples: tuple[SampleRequest, ...] = ()
    has_model_files: bool = True
    data_change: str | None = None

    @property
    def shape(self) -> DiTShape:
        """Sizes of the DiT, such as its width and number of layers."""
        return self.variant.dit

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of the DeepSpeed config."""
        return int(self.ds_config["zero_optimization"].get("stage", 0))

    @cached_property
    def num_trained(self) -> int:
        """Number of trained parameter elements in one trained DiT. All trained DiTs have the same number."""
        return sum(weight.numel for weight in self.weights if weight.trained)

    @property
    def dp_size(self) -> int:
        """Number of context-parallel groups. The ranks of a group share clips, and each group trains on different clips."""
        return self.grid(0).dp_size

    def grid(self, rank: int) -> ParallelDims:
        """Return the parallel dimensions of a rank: the Ulysses and ring degrees, and the rank's index in each dimension."""
        return ParallelDims(self.world_size, rank, self.degrees.ulysses, self.degrees.ring)

    @cached_property
    def data_summary(self) -> dict[str, Any]:
        """Numbers about the training data for the model card. A clip counts once, however often an epoch repeats it.

        The keys are "num_samples", "num_tokens" and "licenses". "licenses" is a list of (license, number of clips) pairs with the
        20 most frequent licenses. If needed, pairs for "others" and for "not stated" follow. The list is empty if no clip states
        a license.
        """
        rows = zip(self.data.keys, self.seq_lens.tolist(), self.data.licenses, strict=True)
        clips = {key: rest for key, *rest in rows if key not in self.sampler.excluded}
        counts = Counter(name for _, name in clips.values())
        not_stated, common = counts.pop("", 0), counts.most_common(20)
        rest = {"others": counts.total() - sum(dict(common).values()), "not stated": not_stated}
        licenses = common and common + [pair for pair in rest.items() if pair[1]]
        num_tokens = sum(length for length, _ in clips.values())
        return {"num_samples": len(clips), "num_tokens": num_tokens, "licenses": licenses}

    @property
    def output_dir(self) -> Path:
        """Run folder, which contains checkpoints and metrics."""
        return Path(self.recipe.output_dir)

    @cached_property
    def seq_lens(self) -> np.ndarray:
        """Number of video tokens of every sample, [N]."""
        return self.data.num_tokens(self.shape.patch_size)

    def data_fingerprint(self) -> str:
        """Return a digest of the properties that determine in which order training reads the samples.

        The properties are the keys and lengths of the samples, how often an epoch uses the samples of each cache, and, with
        `packing.buffer_size`, the positions of the samples in the cache. If the digest and the version of wands are
        the same as in the checkpoint, a resumed run plans the same steps.
        """
        rows = zip(self.data.keys, self.seq_lens.tolist(), strict=True)
        text = "".join([f"{key}\0{length}\n" for key, length in rows])
        if isinstance(self.data, CombinedDataset):
            text += repr([str(repeat) for repeat in self.data.schedule.repeats])
        # With a buffer, the bins depend on the positions of the samples in the cache shards.
        if self.recipe.packing.buffer_size is not None:
            text += hashlib.sha256(np.ascontiguousarray(self.data.places).tobytes()).hexdigest()
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]

    @cached_property
    def data_contents(self) -> str:
        """Digest of the contents of the samples that the run uses. The digest changes if a clip is encoded again."""
        digest = hashlib.blake2b(digest_size=16)
        for source in select_sources(self.recipe.data, self.data):
            if isinstance(source.data, LatentCache):
                index = source.data.index
                for array in (index.crc32, index.text_lens, index.latent_shapes):
                    digest.update(np.ascontiguousarray(array[source.chosen]).data)
                digest.update(index.null_text.data)
            else:
                digest.update(repr(self.recipe.data.mock).encode())
        return digest.hexdigest()

    @cached_property
    def base_fingerprint(self) -> str | None:
        """Digest of some values of the base weights and of the merged LoRAs. None for random base weights.

        A resumed LoRA run compares this digest with the digest in its checkpoint, to detect that the base weights have
        changed. A full finetune has the digest None, because its checkpoints contain all weights.
        """
        model = self.recipe.model
        if self.recipe.lora is None or model.init == "random":
            return None
        parts = []
        for expert in self.experts:
            parts.append(sample_weights(model.path, expert.subfolder))
            for merge in model.merge_loras:
                folder = expert.subfolder if expert.name else None
                file = find_lora_file(Path(merge.path), "model.merge_loras", folder)
                parts.append(f"{merge.scale}*{sample_digest([file], 'model.merge_loras')}")
        return hashlib.blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()

    def step_flops(self, bins: Sequence[Sequence[int]]) -> int:
        """Return the matmul FLOPs of one step over all ranks, for the forward and backward pass of each trained DiT.

        A backward pass counts as two forward passes. A frozen weight needs no weight gradient, which saves a third of
        the FLOPs of its linear layer.

        Args:
            bins: bins (packed sequences) of the step, each as the indices of its samples.
        """
        lens = self.seq_lens
        forward = sum(self.shape.forward_flops([int(lens[i]) for i in bin]) for bin in bins)
        squares = sum(int(lens[i]) ** 2 for bin in bins for i in bin)
        linear = forward - squares * self.shape.attention_flops_per_squared_token()
        frozen = 1.0 - min(self.num_trained / self.shape.num_params, 1.0)
        return len(self.experts) * (3 * forward - round(frozen * linear))

    def denominator(self, plan: StepPlan) -> float:
        """Return the number by which the summed loss of a step is divided before the backward pass.

        All steps of an epoch have the same denominator. `data.sources[].loss_weight` does not change the denominator.

        - With `loss.reduction: sample`, the denominator is the mean number of samples per step.
        - With `loss.reduction: token`, the denominator is the mean number of trained tokens per step. If a sample has a mask,
          each token counts with its weight in the mask. Some samples, chosen at random, have their first frame as a condition.
          The tokens of such a first frame are not trained, so the expected number of these tokens is subtracted.
        """
        value = plan.denominators[self.recipe.loss.reduction]
        if self.recipe.loss.reduction == "token":
            rows = self.sampler.rows(plan.epoch)
            untrained = [(1.0, self._masked_tokens)]
            if "first_frame" in self.variant.conditions:
                untrained.append((self.recipe.flow.i2v_ratio, self._first_frames))
            for ratio, tokens in untrained:
                mean = float((tokens if rows is None else tokens[rows]).mean())
                value -= ratio * mean * plan.denominators["sample"]
        return value

    def count(self, plan: StepPlan) -> float:
        """Return the number by which the summed loss of a step is divided before the loss is logged.

        With `loss.reduction: sample`, this is the number of samples in the step. With `loss.reduction: token`, it is
        the number of trained tokens in the step. If a sample has a mask, each token counts with its weight in the mask. The
        number is 1 for a step without trained tokens.
        """
        value: float = plan.counts[self.recipe.loss.reduction]
        if self.recipe.loss.reduction == "token":
            for i in chain.from_iterable(plan.bins):
                key = SampleKey(self.data.keys[i], int(plan.repeat_index_of[i]), plan.epoch)
                grid = grid_size(self.data.latent_shape(i), self.shape.patch_size)
                value -= float(self._masked_tokens[i])
                value -= float(self._first_frames[i]) if self.collator.num_cond_tokens(key, grid) else 0
        return value or 1.0

    def workload(self, device_type: str) -> Workload:
        """Return the sizes of the run that determine its memory and step time.

        Args:
            device_type: "cuda" or "cpu".
        """
        packs, text_len = self.recipe.packing.enabled, TEXT_LEN
        bins = [bin for step in self.sampler.epoch_plan(self.sampler.start[0]).steps for bin in step if bin]
        forwards = bins if packs else [(i,) for bin in bins for i in bin]
        if self.recipe.data.mock is not None:
            text_len = max(self.recipe.data.mock.text_lens)
        elif isinstance(self.data, LatentCache):
            text_len = int(self.data.index.text_lens.max())
        return Workload(
            self.recipe,
            self.shape,
            self.weights,
            len(self.experts),
            self.world_size,
            device_type,
            text_len,
            self.ds_config,
            ulysses_degree=self.degrees.ulysses,
            ring_degree=self.degrees.ring,
            micro_steps=self.recipe.train.bins_per_step // self.dp_size if packs else 2,
            max_tokens=max(sum(int(self.seq_lens[i]) for i in bin) for bin in forwards),
            max_samples=max(map(len, forwards)),
            **sampling_load(self.samples, self.variant),
        )

    @cached_property
    def _masked_tokens(self) -> np.ndarray:
        """For each of the N samples, number of tokens minus the sum of the tokens' weights in the sample's mask, float64 [N].

        The value is 0 for a sample without a mask.
        """
        sums = self.data.mask_sums[:, 0]
        return np.where(sums > 0, self.seq_lens - sums, 0.0)

    @cached_property
    def _first_frames(self) -> np.ndarray:
        """Return the token weight that is missing in each sample's loss if its first latent frame is a condition, float64 [N].

        This weight is the sum of the mask weights of the frame's tokens. Without a mask, every token has weight 1. A sample
        with a single latent frame has the value 0, because its frame always stays in the loss.
        """
        frames, rows, columns = (self.data.latent_shapes // self.shape.patch_size).T
        counts = np.where(frames > 1, rows * columns, 0).astype(float)
        total, first = self.data.mask_sums.T
        return np.where((total > 0) & (counts > 0), first, counts)

    def imbalance(self, bins: Step) -> float:
        """Return how uneven the work of a step is: the cost of the slowest ranks / the mean cost of all ranks. 1 is optimal.

        In each micro step, the slowest rank is the rank with the most expensive bin (packed sequence). Both costs are predicted
        FLOPs, summed over the micro steps of the step.

        Args:
            bins: all bins of the step.
        """
        return imbalance([bins], self.dp_size, self.sampler.bin_cost)


def sampling_load(requests: Sequence[SampleRequest], variant: Variant) -> dict[str, Any]:
    """Return the tokens, FLOPs and memory that the sample videos of a run need, as keyword arguments of `Workload`.

    `Workload` is the input of the predictions of memory and time. Without sample videos, return {}.
    """
    if not requests:
        return {}
    # Tensors of the published VAEs while they decode in fp32, a few frames at a time. The pixels of all frames stay.
    per_pixel, vae_bytes = {16: (19_500, 508e6), 48: (21_800, 2.82e9)}[variant.dit.out_channels]
    decoding = [r.height * r.width * (per_pixel + 12.5 * r.num_frames) for r in requests]
    tokens = [variant.num_tokens(r.num_frames, r.height, r.width) for r in requests]
    forwards = [r.num_inference_steps * (1 + (r.guidance_scale > 1)) for r in requests]
    flops = sum(n * variant.dit.forward_flops([length]) for n, length in zip(forwards, tokens, strict=True))
    sizes = {"vae_bytes": vae_bytes, "decoding_bytes": vae_bytes + max(decoding)}
    return {"video_tokens": max(tokens), "video_flops": flops, **sizes}


Log = Callable[[str], None]
"""Function that prints a line or several lines for the user. It is called on rank 0."""

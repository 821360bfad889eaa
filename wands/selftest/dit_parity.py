"""Checks of a DiT that compare two computations on the same samples.

One kind compares two models: diffusers' stock DiT, which runs the samples one by one and is then deleted, and wands' DiT, which
runs a training step on a bin of the same samples. The other kind runs wands' DiT twice on the same bin, divided among all ranks
and on each rank alone.

The letter P in shapes is the number of channels of a token.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from diffusers import WanTransformer3DModel
from torch import Tensor

from wands.attention.layout import ContextLayout
from wands.attention.ulysses import context_attention
from wands.attention.varlen import choose_backend
from wands.conditions.arrays import ClipSize
from wands.conditions.condition import Channels, Condition, CrossAttention, Entry
from wands.conditions.published import conditions_of
from wands.config.recipe import FlowConfig, MockConfig
from wands.data.collate import PackingCollator, Sample
from wands.data.datasets import MockDataset
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.errors import CheckpointError, ConfigError
from wands.flow.noise import add_noise, draw_noise, draw_sigma
from wands.flow.sigmas import NUM_TRAIN_TIMESTEPS
from wands.model.files.loading import build_empty, load_config, load_transformer
from wands.model.files.name_maps import DIT, rename_all
from wands.model.transformer import PackedWanTransformer
from wands.patches import latent_size, patchify, unpatchify
from wands.sampling.pipeline import DiTSource, load_dit
from wands.sampling.sharing import plan_ranks
from wands.selftest.parity_setup import Result, Setup, Skipped, judge_error, relative_error
from wands.selftest.stock import add_conditions, stock_velocity
from wands.transfer import to_device

GRIDS = ((3, 3, 5), (2, 5, 5), (2, 1, 7))
TEXT_LENS = [9, 40, 1]
SEED = 0
OUTPUT_BOUND = 1e-4
GRADIENT_BOUND = 1e-3
"""Largest relative errors of the velocity and of the gradients in fp32.

Correct code adds the same numbers in a different order, through 40 blocks, which gives errors below these bounds. A mistake gives
1e-2 or more."""
BF16_FACTOR = 1.5
"""Largest ratio of the tested computation's error in bf16 to the reference's, each relative to the reference in fp32."""
PARAMETERS = (
    "patch_embedding.weight",
    "condition_embedder.text_embedder.linear_1.weight",
    "condition_embedder.time_embedder.linear_1.weight",
    "condition_embedder.image_embedder.ff.net.0.proj.weight",
    "blocks.0.scale_shift_table",
    "blocks.0.attn1.to_q.weight",
    "blocks.0.attn2.to_k.weight",
    "blocks.0.attn2.add_k_proj.weight",
    "blocks.0.ffn.net.2.weight",
    "proj_out.weight",
)
"""Parameters whose gradients are compared. The gradients of all parameters would need as much memory as the model."""


Answer = dict[str, Tensor]
"""Result of one computation, as fp32 tensors on the host.

It maps "sample 0", "sample 1", ... to velocities [tokens, P], and the names of the model's parameters in `PARAMETERS` to
gradients."""


class Comparison(NamedTuple):
    """Results of a tested computation and of a reference computation.

    Attributes:
        tested: answer in fp32 or bf16.
        expected: answer of the reference in fp32.
        rounded: answer of the reference in the dtype of `tested`, so that its difference from `expected` is the rounding error.
            In fp32, it is the same dict as `expected`.
        origin: name of the reference, for the report.
    """

    tested: Answer
    expected: Answer
    rounded: Answer
    origin: str


def check_output(found: Comparison) -> Result:
    """Compare the velocity of each sample with that of the reference; raise Skipped if a zero head makes every velocity zero."""
    names = found.expected.keys() - set(PARAMETERS)
    if not any(found.expected[name].any() for name in names):
        raise Skipped("the head of this untrained model is zero, so every output is zero")
    return _judge(found, names, OUTPUT_BOUND)


def check_gradients(found: Comparison) -> Result:
    """Compare the gradient of each parameter in `PARAMETERS` with that of the reference."""
    return _judge(found, found.expected.keys() & set(PARAMETERS), GRADIENT_BOUND)


def _judge(found: Comparison, names: Collection[str], bound: float) -> Result:
    assert found.tested.keys() == found.expected.keys()
    tested, rounded = (
        max(relative_error(answer[name], found.expected[name]) for name in names)
        for answer in (found.tested, found.rounded)
    )
    why = "fp32 sums in a different order"
    if found.rounded is not found.expected:
        bound = BF16_FACTOR * rounded
        why = f"{BF16_FACTOR:g} x the error of a correct answer in bf16"
    return judge_error(tested, bound, why, found.origin)


class PackedSamples:
    """Random samples of different lengths, the same on all ranks, packed into one bin by the code of the training."""

    def __init__(self, setup: Setup, i2v_ratio: float = 0.0) -> None:
        """Draw the samples at noise levels of the tested DiT and pack them.

        `i2v_ratio` of them have a given first frame, for TI2V.
        """
        self.setup = setup
        self.shape = setup.variant.dit
        self.sigma_range = setup.expert.sigma_range
        self.flow = FlowConfig(cfg_dropout=0.0, i2v_ratio=i2v_ratio)
        pt, ph, pw = self.shape.patch_size
        shapes = [(f * pt, h * ph, w * pw) for f, h, w in GRIDS]
        mock = MockConfig(num_samples=len(GRIDS), shapes=shapes, text_lens=TEXT_LENS)
        data = MockDataset(mock=mock, shape=self.shape, seed=SEED, conditions=conditions_of(setup.variant))
        self.samples = [data.read(i) for i in range(len(GRIDS))]
        collator = PackingCollator(
            shape=self.shape,
            flow=self.flow,
            seed=SEED,
            null_text_embeds=data.null_text_embeds,
            conditions=conditions_of(setup.variant),
        )
        self.batch = collator(self.samples, [0] * len(GRIDS), 0)
        self.whole = ContextLayout.build(self.batch.seq_lens)
        generator = torch.Generator().manual_seed(SEED)
        self.directions = torch.randn(self.batch.tokens.shape, generator=generator)

    def run_packed(
        self, model: PackedWanTransformer, dtype: torch.dtype, layout: ContextLayout | None = None
    ) -> Answer:
        """Run the forward and backward pass on the bin, as in a training step; return velocities and gradients of the whole bin.

        Args:
            model: model with its attention function.
            dtype: fp32, or bf16 under autocast.
            layout: tokens of this rank if all ranks share the bin. All ranks must then call this method, and get equal values.
        """
        device = self.setup.device
        mine = layout or self.whole
        part = self.batch.rank_slice(mine)
        noisy = add_noise(
            part.tokens, mine, part.keys, self.flow, SEED, part.num_cond_tokens, self.sigma_range
        )
        part, noisy = to_device((part, noisy), device)
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = model(**part.model_inputs(noisy.tokens, noisy.timesteps))
        out = out[: mine.num_valid].float()
        index = mine.token_index[: mine.num_valid]
        (out * self.directions[index].to(device)).sum().backward()
        outputs = torch.zeros(self.directions.shape, device=device)
        outputs.index_add_(0, index.to(device), out.detach())
        answer = _answer(list(outputs.split(self.batch.seq_lens)), model)
        for tensor in () if layout is None else answer.values():
            dist.all_reduce(tensor)
        return {name: tensor.cpu() for name, tensor in answer.items()}

    def run_stock(self, model: WanTransformer3DModel) -> Answer:
        """Run the forward and backward pass of the stock model on each sample, called as in diffusers' pipelines."""
        batch = self.batch
        device = self.setup.device
        patch = self.shape.patch_size
        has = self.setup.has
        noises = draw_noise(self.whole, batch.keys, SEED, batch.tokens.shape[1]).split(batch.seq_lens)
        directions = self.directions.to(device).split(batch.seq_lens)
        velocities = []
        for i, sample in enumerate(self.samples):
            clean = sample.latents.float()
            sigma = draw_sigma(SEED, batch.keys[i], self.flow, self.sigma_range)
            noise = unpatchify(noises[i], GRIDS[i], self.shape.out_channels, patch)
            latents, timesteps = add_conditions(
                (1 - sigma) * clean + sigma * noise,
                torch.tensor(sigma * NUM_TRAIN_TIMESTEPS),
                first_frame=clean[:, :1] if self.flow.i2v_ratio and has("first_frame") else None,
                image_latents=sample.arrays.get("image_latents"),
                last_image=has("last_image"),
            )
            images = sample.arrays.get("image_embeds")
            for entry in self._extra_entries(sample):
                if isinstance(entry, Channels):
                    channels = entry.rows.shape[1] // math.prod(patch)
                    latents = torch.cat([latents, unpatchify(entry.rows, GRIDS[i], channels, patch)])
                elif isinstance(entry, CrossAttention):
                    images = entry.tokens if images is None else torch.cat([images, entry.tokens])
            velocity = stock_velocity(model, latents, timesteps, sample.text_embeds, images)
            rows = patchify(velocity.float(), patch)
            (rows * directions[i]).sum().backward()
            velocities.append(rows.detach())
        return {name: tensor.cpu() for name, tensor in _answer(velocities, model).items()}

    def _extra_entries(self, sample: Sample) -> list[Entry | None]:
        """Return what the model gets of the conditions of outside code."""
        size = ClipSize(latent_size(sample.latents), self.shape.patch_size)
        conditions: Sequence[Condition] = self.setup.variant.extra
        return [condition.enter(sample.arrays, size) for condition in conditions]


def _answer(velocities: Sequence[Tensor], model: torch.nn.Module) -> Answer:
    """Return velocities [tokens, P] and gradients after the backward pass, and remove the gradients from the model."""
    answer = {f"sample {i}": velocity for i, velocity in enumerate(velocities)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            answer[name] = parameter.grad.float()
            parameter.grad = None
    return answer


def compare_to_stock(setup: Setup, i2v_ratio: float = 0.0) -> Comparison:
    """Run the same samples through a training step and through stock diffusers. `i2v_ratio` is that of `PackedSamples`.

    The stock model is deleted before wands' model is loaded, so that only one model is in memory at a time.
    """
    bin = PackedSamples(setup, i2v_ratio)
    subfolder = setup.expert.subfolder
    answers = []
    source = DiTSource(str(setup.folder), subfolder, f"--model={setup.folder}: {subfolder}")
    for dtype in dict.fromkeys((torch.float32, setup.dtype)):
        stock = load_dit(source, dtype).to(setup.device).eval()
        _choose_trained(stock)
        answers.append(bin.run_stock(stock))
        del stock
        clear_device_cache(garbage_collection=True)
    tested = bin.run_packed(_load_packed(setup, setup.dtype), setup.dtype)
    return Comparison(tested=tested, expected=answers[0], rounded=answers[-1], origin="stock diffusers")


def compare_with_first_frame(setup: Setup) -> Comparison:
    """Run `compare_to_stock` (training step against stock diffusers) on samples whose first frame is given, for TI2V."""
    return compare_to_stock(setup, i2v_ratio=1.0)


def compare_to_one_process(setup: Setup) -> Comparison:
    """Run the same bin shared by all ranks (`tested`), and as a whole on each rank alone (`expected` and `rounded`).

    Raises:
        ConfigError: if the device differs from DeepSpeed's device, or the model cannot be split across the ranks.
    """
    _, _, device = init_process_group()
    if device.type != setup.device.type:
        raise ConfigError(
            f"--device={setup.device.type}, but DeepSpeed runs these processes on {device.type}; set the environment "
            f"variable DS_ACCELERATOR={setup.device.type}.",
            agreed=True,
        )
    dims = plan_ranks(setup.variant)
    groups = ProcessGroups.build(dims, device)
    bin = PackedSamples(setup, i2v_ratio=1.0)
    dtype = setup.dtype
    # If ranks have GPUs, at most one copy of the model at a time is in a node's host memory.
    for turn in range(dist.get_world_size()):
        if turn == int(os.environ["LOCAL_RANK"]):
            model = _load_packed(setup, torch.float32)
        dist.barrier()
    expected = rounded = bin.run_packed(model, torch.float32)
    if dtype == torch.bfloat16:
        _set_attention(setup, model, dtype)
        rounded = bin.run_packed(model, dtype)
    _set_attention(setup, model, dtype, groups.ulysses, groups.ring, groups.ring_grad)
    tested = bin.run_packed(model, dtype, dims.layout(bin.batch.seq_lens))
    origin = f"one process, Ulysses {dims.ulysses_degree} x ring {dims.ring_degree}"
    return Comparison(tested=tested, expected=expected, rounded=rounded, origin=origin)


def _load_packed(setup: Setup, dtype: torch.dtype) -> PackedWanTransformer:
    """Load wands' model with fp32 weights, as in a training run, for a computation in `dtype`.

    In bf16 on a GPU, the attention kernel is the first in `FLASH_BACKENDS` that can run and gives correct results. A training run
    chooses the fastest instead.
    """
    model = load_transformer(setup.folder, subfolder=setup.expert.subfolder, key="--model").to(setup.device)
    _choose_trained(model)
    _set_attention(setup, model, dtype)
    return model


def _set_attention(
    setup: Setup, model: PackedWanTransformer, dtype: torch.dtype, *groups: dist.ProcessGroup | None
) -> None:
    backend = choose_backend("auto", setup.device, dtype, setup.variant.dit.head_dim)
    model.set_attention(context_attention(backend, *groups), backend)


def _choose_trained(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in PARAMETERS)


def check_names(setup: Setup) -> Result:
    """Check that every parameter name is unchanged after the conversion to official Wan's names and back."""
    names = [name for name, _ in build_empty(load_config(setup.folder, key="--model")).named_parameters()]
    try:
        official = rename_all(names, DIT.to_official, "diffusers")
        back = rename_all(official, DIT.to_diffusers, "official")
    except CheckpointError as error:
        return Result.of(False, str(error), "one to one")
    same = sum(official[stored] == name for name, stored in back.items())
    return Result.of(same == len(names), f"{same} of {len(names)} names are unchanged", "all")

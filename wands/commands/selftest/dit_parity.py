"""Checks of a DiT: training's computation on a pack against stock diffusers sample by sample, or against one process.

The stock model is loaded, run and dropped before training's code loads the packed model.

Letters: T tokens of the pack, P channels of a token, C latent channels, f h w latent frames, rows, columns.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor

from wands.attention.ulysses import context_attention
from wands.attention.varlen import choose_backend
from wands.commands.selftest.parity_setup import (
    OFFICIAL_TEXT_LEN,
    Outcome,
    Setup,
    Skipped,
    free_memory,
    judge,
    relative_error,
)
from wands.config.recipe import FlowConfig, MockConfig
from wands.data.collate import PackingCollator
from wands.data.conditions import image_mask
from wands.data.mock import MockDataset
from wands.data.patchify import patchify, unpatchify
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.distributed.layout import ContextLayout
from wands.errors import CheckpointError, ConfigError
from wands.flow.noise import add_noise, draw_noise
from wands.flow.sigmas import NUM_TRAIN_TIMESTEPS
from wands.model.files.loading import build_empty, load_config, load_transformer
from wands.model.files.name_maps import DIT, rename_all
from wands.model.transformer import PackedWanTransformer
from wands.sampling.pipeline import DiTSource, load_dit
from wands.sampling.sharing import plan_ranks
from wands.variants import Expert

GRIDS = ((3, 3, 5), (2, 5, 5), (2, 1, 7))
TEXT_LENS = (9, 40, 1)
SEED = 0
OUTPUT_BOUND, GRADIENT_BOUND = 1e-4, 1e-3
"""Error of fp32 sums in another order, through 40 blocks and back; a mistake gives 1e-2 and more."""
BF16_FACTOR = 1.5
"""Largest ratio of the errors, to fp32, of two correct computations in bf16."""
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
"""Parameters whose gradients are compared; the gradients of the whole model would take as much memory as the model."""


Answer = dict[str, Tensor]
"""On the host in fp32: "sample 0", ... -> velocity [tokens, P]; name of each trained parameter -> gradient."""


@dataclass(frozen=True)
class Comparison:
    """Tested answer, expected answer, and a correct answer with the rounding of the tested one.

    Attributes:
        tested: the answer under test.
        expected: the expected answer, in fp32.
        rounded: answer of the model of `expected` in the dtype of `tested`; `expected` itself in fp32.
        origin: computation of `expected`, for the report.
        degrees: degrees of context parallelism of `tested`, for the report.
    """

    tested: Answer
    expected: Answer
    rounded: Answer
    origin: str
    degrees: str = ""

    def judge_output(self) -> Outcome:
        """Compare the velocity sample by sample.

        Raises:
            Skipped: if the model's head is zero, and with the head every velocity.
        """
        names = [name for name in self.expected if name not in PARAMETERS]
        if not any(self.expected[name].any() for name in names):
            raise Skipped("the head of this untrained model is zero, so every output is zero")
        return self._judge(names, OUTPUT_BOUND)

    def judge_gradients(self) -> Outcome:
        """Compare the gradients parameter by parameter."""
        return self._judge([name for name in self.expected if name in PARAMETERS], GRADIENT_BOUND)

    def _judge(self, names: Sequence[str], bound: float) -> Outcome:
        assert self.tested.keys() == self.expected.keys()
        tested, rounded = (
            max(relative_error(answer[name], self.expected[name]) for name in names)
            for answer in (self.tested, self.rounded)
        )
        why = "fp32 in another order"
        if self.rounded is not self.expected:
            bound, why = BF16_FACTOR * rounded, f"{BF16_FACTOR:g} x the error of {self.origin} in bf16"
        passed, number, text = judge(tested, bound, why)
        degrees = f", {self.degrees}" if self.degrees else ""
        return Outcome(passed, f"{number} to {self.origin}{degrees}", text)


class Pack:
    """Unequal samples of random latents, text and images, packed by training's code; equal on every rank."""

    def __init__(
        self, setup: Setup, expert: Expert, num_samples: int = len(GRIDS), i2v_ratio: float = 0.0
    ) -> None:
        """Draw and pack the samples.

        Args:
            setup: the tested model.
            expert: DiT whose noise levels are drawn.
            num_samples: number of samples, the first of `GRIDS`.
            i2v_ratio: TI2V's share of samples whose first frame is given.
        """
        self.setup, self.shape, self.sigma_range = setup, setup.variant.dit, expert.sigma_range
        self.conditions = setup.variant.conditions
        self.flow = FlowConfig(cfg_dropout=0.0, i2v_ratio=i2v_ratio)
        pt, ph, pw = self.shape.patch_size
        latent_shapes = [(f * pt, h * ph, w * pw) for f, h, w in GRIDS]
        mock = MockConfig(num_samples=num_samples, shapes=latent_shapes, text_lens=list(TEXT_LENS))
        data = MockDataset(mock, self.shape, SEED)
        self.samples = [data.read(i) for i in range(num_samples)]
        null_text = data.null_text_embeds
        collator = PackingCollator(self.shape, self.flow, SEED, null_text, self.conditions)
        self.batch = collator(self.samples, [0] * num_samples, 0)
        self.whole = ContextLayout.build(self.batch.seq_lens)
        generator = torch.Generator().manual_seed(SEED)
        self.directions = torch.randn(self.batch.tokens.shape, generator=generator)

    def run_packed(
        self, model: PackedWanTransformer, dtype: torch.dtype, layout: ContextLayout | None = None
    ) -> Answer:
        """Run forward and backward as in a training step.

        Args:
            model: model with its attention set.
            dtype: dtype of the computation.
            layout: this rank's part, if all ranks share the pack and call this method.
        """
        device, mine = self.setup.device, layout or self.whole
        shard = self.batch.rank_slice(mine).to(device)
        noisy = add_noise(
            shard.tokens, mine, shard.keys, self.flow, SEED, shard.num_cond_tokens, self.sigma_range
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            tokens = shard.model_input(noisy.tokens)
            out = model(tokens, shard.meta, noisy.timesteps, shard.text_embeds, shard.image_embeds)
        index = mine.token_index[: mine.num_valid]
        out = out[: mine.num_valid].float()
        (out * self.directions[index].to(device)).sum().backward()
        outputs = torch.zeros(self.directions.shape, device=device)
        outputs.index_add_(0, index.to(device), out.detach())
        names = [sample.sample_id for sample in self.samples]
        velocities = zip(names, outputs.split(self.batch.seq_lens), strict=True)
        answer = dict(velocities) | _take_gradients(model)
        if layout is not None:
            for tensor in answer.values():
                dist.all_reduce(tensor)
        return {name: value.cpu() for name, value in answer.items()}

    def run_stock(self, model: WanTransformer3DModel, dtype: torch.dtype) -> Answer:
        """Run forward and backward sample by sample, as diffusers' pipelines call the model.

        Args:
            model: model of diffusers.
            dtype: dtype of its linear layers.
        """
        device, directions, answer = self.setup.device, self.directions.split(self.batch.seq_lens), {}
        for i, sample in enumerate(self.samples):
            latents, timestep = self._add_noise_as_stock(i)
            text = torch.nn.functional.pad(
                sample.text_embeds, (0, 0, 0, OFFICIAL_TEXT_LEN - len(sample.text_embeds))
            )
            images = sample.image_embeds
            if images is not None:  # [number of images, rows, channels]
                images = torch.stack(images.chunk(2 if self.shape.image_positions else 1)).to(device, dtype)
            out = model(
                latents[None].to(device, dtype),
                timestep.to(device),
                text[None].to(device, dtype),
                images,
                return_dict=False,
            )[0]
            rows = patchify(out[0].float(), self.shape.patch_size)
            (rows * directions[i].to(device)).sum().backward()
            answer[sample.sample_id] = rows.detach()
        return {name: value.cpu() for name, value in (answer | _take_gradients(model)).items()}

    def _add_noise_as_stock(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a sample's model input [C, f, h, w] and timesteps [1] or [1, tokens] at training's noise level."""
        batch, sample = self.batch, self.samples[number]
        drawn = add_noise(batch.tokens, self.whole, batch.keys, self.flow, SEED, sigma_range=self.sigma_range)
        noise = draw_noise(self.whole, batch.keys, SEED, batch.tokens.shape[1]).split(batch.seq_lens)[number]
        noise = unpatchify(noise, GRIDS[number], self.shape.out_channels, self.shape.patch_size)
        sigma = drawn.sigmas[number]
        clean = sample.latents.float()
        latents = (1 - sigma) * clean + sigma * noise
        timestep = (sigma * NUM_TRAIN_TIMESTEPS)[None]
        if self.flow.i2v_ratio and "first_frame" in self.conditions:
            # The loop of WanImageToVideoPipeline with expand_timesteps, line by line.
            mask = torch.ones(1, *latents.shape[1:])
            mask[:, 0] = 0
            latents = (1 - mask) * clean[:, :1] + mask * latents
            timestep = (mask[0][:, ::2, ::2] * timestep).flatten()[None]
        if sample.image_latents is not None:
            given = image_mask(tuple(latents.shape[1:]), "last_image" in self.conditions)
            latents = torch.cat([latents, given, sample.image_latents])
        return latents, timestep


def _take_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            gradients[name], parameter.grad = parameter.grad.float(), None
    return gradients


class DiTPart:
    """One DiT of the model; weights are loaded when a check needs them."""

    def __init__(self, setup: Setup, expert: Expert) -> None:
        self.setup, self.expert, self.dtype = setup, expert, setup.dtype
        self._comparisons: dict[str, Comparison] = {}
        self._attempts: set[str] = set()

    def compare(self, kind: str) -> Comparison:
        """Return a comparison: of "packed" or "first_frame" with stock diffusers, of "cp" with one process.

        Raises:
            Skipped: if the models of this comparison failed before.
        """
        if kind not in self._comparisons:
            compute = self._compare_to_one_process if kind == "cp" else self._compare_to_stock
            if compute.__name__ in self._attempts:
                raise Skipped("the model does not run, see above")
            self._attempts.add(compute.__name__)
            self._comparisons |= compute()
        return self._comparisons[kind]

    def _compare_to_stock(self) -> dict[str, Comparison]:
        """Run all packs at once, so that each model is loaded once."""
        packs = {"packed": Pack(self.setup, self.expert)}
        if "first_frame" in self.setup.variant.conditions:
            packs["first_frame"] = Pack(self.setup, self.expert, num_samples=1, i2v_ratio=1.0)
        source = DiTSource(
            str(self.setup.folder),
            self.expert.subfolder,
            f"--model={self.setup.folder}: {self.expert.subfolder}",
        )
        answers = []
        for dtype in dict.fromkeys((torch.float32, self.dtype)):
            stock = load_dit(source, dtype).to(self.setup.device).eval()
            _choose_trained(stock)
            answers.append({name: pack.run_stock(stock, dtype) for name, pack in packs.items()})
            del stock
            free_memory()
        expected, rounded = answers[0], answers[-1]
        model = self._load_packed(self.dtype)
        return {
            name: Comparison(
                pack.run_packed(model, self.dtype), expected[name], rounded[name], "stock diffusers"
            )
            for name, pack in packs.items()
        }

    def _compare_to_one_process(self) -> dict[str, Comparison]:
        """Run the whole pack on every rank alone, then shared by all ranks."""
        groups = _meet(self.setup)
        dims, pack = groups.dims, Pack(self.setup, self.expert, i2v_ratio=1.0)
        for turn in range(
            dist.get_world_size()
        ):  # one copy at a time in a node's host memory, if ranks have GPUs
            if turn == int(os.environ["LOCAL_RANK"]):
                model = self._load_packed(torch.float32)
            dist.barrier()
        expected = rounded = pack.run_packed(model, torch.float32)
        if self.dtype == torch.bfloat16:
            self._set_attention(model, torch.bfloat16)
            rounded = pack.run_packed(model, self.dtype)
        self._set_attention(model, self.dtype, groups)
        layout = ContextLayout.build(
            pack.batch.seq_lens,
            ulysses_degree=dims.ulysses_degree,
            ring_degree=dims.ring_degree,
            cp_rank=dims.cp_rank,
        )
        tested = pack.run_packed(model, self.dtype, layout)
        degrees = f"Ulysses {dims.ulysses_degree} x ring {dims.ring_degree}"
        return {"cp": Comparison(tested, expected, rounded, "one process", degrees)}

    def _load_packed(self, dtype: torch.dtype) -> PackedWanTransformer:
        """Load fp32 weights, as in a training run, and set the kernel that a run would choose for `dtype`."""
        model = load_transformer(self.setup.folder, subfolder=self.expert.subfolder).to(self.setup.device)
        _choose_trained(model)
        self._set_attention(model, dtype)
        return model

    def _set_attention(
        self, model: PackedWanTransformer, dtype: torch.dtype, groups: ProcessGroups | None = None
    ) -> None:
        backend = choose_backend("auto", self.setup.device, dtype, self.setup.variant.dit.head_dim)
        rings = () if groups is None else (groups.ulysses, groups.ring, groups.ring_grad)
        model.set_attention(context_attention(backend, *rings), backend)


def _choose_trained(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in PARAMETERS)


def _meet(setup: Setup) -> ProcessGroups:
    """Return the process groups of all ranks as one context-parallel group."""
    _, _, device = init_process_group()
    if device.type != setup.device.type:
        raise ConfigError(
            f"--device={setup.device.type}, but DeepSpeed runs these processes on {device.type}; set DS_ACCELERATOR="
            f"{setup.device.type}.",
            agreed=True,
        )
    dims, problems = plan_ranks(setup.variant)
    if problems:
        raise ConfigError(problems)
    return ProcessGroups.build(dims, device)


def check_names(part: DiTPart) -> Outcome:
    """Check that official Wan's names and diffusers' names are one to one."""
    names = [name for name, _ in build_empty(load_config(part.setup.folder)).named_parameters()]
    try:
        official = rename_all(names, DIT.to_official, "diffusers")
        back = rename_all(official, DIT.to_diffusers, "official")
    except CheckpointError as error:
        return Outcome(False, str(error), "one to one")
    same = sum(official[stored] == name for name, stored in back.items())
    return Outcome(same == len(names), f"{same} of {len(names)} names come back", "all")


DIT_CHECKS = {
    "names": check_names,
    "packed.output": lambda part: part.compare("packed").judge_output(),
    "packed.gradients": lambda part: part.compare("packed").judge_gradients(),
    "first_frame.timesteps": lambda part: part.compare("first_frame").judge_output(),
    "cp.output": lambda part: part.compare("cp").judge_output(),
    "cp.gradients": lambda part: part.compare("cp").judge_gradients(),
}

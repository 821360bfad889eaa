"""One small pack of unequal samples, given to the packed model as training does and to the stock one as its pipelines do.

Letters: T tokens of the pack, L of this rank, P channels of a token, C latent channels, f h w latent frames, rows, columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor

from wands.commands.selftest.parity_setup import (
    OFFICIAL_TEXT_LEN,
    Outcome,
    Setup,
    Skipped,
    judge,
    relative_error,
)
from wands.config.recipe import FlowConfig
from wands.data.collate import PackingCollator, Sample
from wands.data.conditions import image_mask
from wands.data.patchify import patchify, unpatchify
from wands.distributed.layout import ContextLayout
from wands.flow.noise import add_noise, draw_noise
from wands.flow.sigmas import NUM_TRAIN_TIMESTEPS
from wands.model.transformer import PackedWanTransformer
from wands.variants import Expert

GRIDS = ((3, 3, 5), (2, 5, 5), (2, 1, 7))
TEXT_LENS = (9, 40, 1)
SEED = 0
OUTPUT_BOUND, GRADIENT_BOUND = 1e-4, 1e-3
"""fp32 sums in another order, through 40 blocks and back; a mistake shows at 1e-2 and more."""
BF16_FACTOR = 1.5
"""Of two right computations in bf16 neither is much further from fp32 than the other."""


@dataclass(frozen=True)
class Answer:
    """What a model made of the pack, on the host in fp32.

    Attributes:
        outputs: [T, P], the velocity.
        gradients: of the parameters that need one, of the sum of velocity x direction.
    """

    outputs: Tensor
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Comparison:
    """An answer, the right one in fp32, and in bf16 one whose rounding is known to be harmless.

    Attributes:
        found: the answer under test.
        right: in fp32.
        rounded: by the same model as `right`, in the dtype of `found`; `right` itself in fp32.
        whose: what computed `right`.
        how: of `found`, for the report.
    """

    found: Answer
    right: Answer
    rounded: Answer
    whose: str
    how: str = ""

    def judge_output(self) -> Outcome:
        """The velocity, sample by sample.

        Raises:
            Skipped: the head of the model is zero, and so is every velocity.
        """
        if not self.right.outputs.any():
            raise Skipped("the head of this untrained model is zero, so every output is")
        return self._judge(self._per_sample, OUTPUT_BOUND)

    def judge_gradients(self) -> Outcome:
        """The gradients, parameter by parameter."""
        return self._judge(self._per_parameter, GRADIENT_BOUND)

    def _per_sample(self, answer: Answer) -> Iterator[float]:
        lens = [f * h * w for f, h, w in GRIDS]
        lens = lens[: next(i for i in range(len(lens) + 1) if sum(lens[:i]) == len(self.right.outputs))]
        pairs = zip(answer.outputs.split(lens), self.right.outputs.split(lens), strict=True)
        return (relative_error(mine, right) for mine, right in pairs)

    def _per_parameter(self, answer: Answer) -> Iterator[float]:
        assert answer.gradients.keys() == self.right.gradients.keys()
        return (relative_error(answer.gradients[name], right) for name, right in self.right.gradients.items())

    def _judge(self, errors: Callable[[Answer], Iterator[float]], bound: float) -> Outcome:
        error = max(errors(self.found))
        if self.rounded is self.right:
            outcome = judge(error, bound, "fp32 in another order")
        else:
            allowed = BF16_FACTOR * max(errors(self.rounded))
            outcome = judge(error, allowed, f"{BF16_FACTOR:g} x that of {self.whose} in bf16")
        number = f"{outcome.number} to {self.whose}" + (f", {self.how}" if self.how else "")
        return Outcome(outcome.passed, number, outcome.bound)


class Pack:
    """Unequal samples of random latents, text and pictures, the same on every rank."""

    def __init__(
        self, setup: Setup, expert: Expert, num_samples: int = len(GRIDS), i2v_ratio: float = 0.0
    ) -> None:
        """Draw the samples and let training's own code pack them.

        Args:
            setup: what is tested.
            expert: whose noise levels are drawn.
            num_samples: the first of `GRIDS`.
            i2v_ratio: of TI2V, share of the samples whose first frame is given.
        """
        self.setup, self.shape, self.sigma_range = setup, setup.variant.dit, expert.sigma_range
        self.conditions = setup.variant.conditions
        self.flow = FlowConfig(cfg_dropout=0.0, i2v_ratio=i2v_ratio)
        generator = torch.Generator().manual_seed(SEED)
        self.samples = [self._draw(i, generator) for i in range(num_samples)]
        null_text = torch.randn(1, self.shape.text_dim, generator=generator)
        collator = PackingCollator(self.shape, self.flow, SEED, null_text, self.conditions)
        self.batch = collator(self.samples, [0] * num_samples, 0)
        self.whole = ContextLayout.build(self.batch.seq_lens)
        self.directions = torch.randn(self.batch.tokens.shape, generator=generator)

    def _draw(self, number: int, generator: torch.Generator) -> Sample:
        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator)

        shape = self.shape
        sides = (n * p for n, p in zip(GRIDS[number], shape.patch_size, strict=True))
        size = (shape.out_channels, *sides)
        return Sample(
            f"sample {number}",
            normal(*size),
            normal(TEXT_LENS[number], shape.text_dim),
            normal(*size) if "image" in self.conditions else None,
            normal(shape.image_len, shape.image_dim) if shape.image_dim else None,
        )

    def ask_packed(
        self,
        model: PackedWanTransformer,
        layout: ContextLayout | None = None,
        dtype: torch.dtype | None = None,
    ) -> Answer:
        """Forward and backward as in a training step.

        Args:
            model: with its attention set.
            layout: this rank's part, if the pack is spread over all ranks, who must all call this.
            dtype: of the computation; by default the one that is tested.
        """
        device, mine = self.setup.device, layout or self.whole
        shard = self.batch.rank_slice(mine).to(device)
        noisy = add_noise(
            shard.tokens, mine, shard.keys, self.flow, SEED, shard.num_cond_tokens, self.sigma_range
        )
        half = (dtype or self.setup.torch_dtype) == torch.bfloat16
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            tokens = shard.model_input(noisy.tokens)
            out = model(tokens, shard.meta, noisy.timesteps, shard.text_embeds, shard.image_embeds)
        index = mine.token_index[: mine.num_valid]
        out = out[: mine.num_valid].float()
        (out * self.directions[index].to(device)).sum().backward()
        outputs = torch.zeros(self.directions.shape, device=device).index_add_(
            0, index.to(device), out.detach()
        )
        gradients = _take_gradients(model)
        if layout is not None:
            for tensor in (outputs, *gradients.values()):
                dist.all_reduce(tensor)
        return Answer(outputs.cpu(), {name: gradient.cpu() for name, gradient in gradients.items()})

    def ask_stock(self, model: WanTransformer3DModel, dtype: torch.dtype) -> Answer:
        """Forward and backward sample by sample, as diffusers' pipelines call the model.

        Args:
            model: of diffusers.
            dtype: of its linear layers.
        """
        device, patch = self.setup.device, self.shape.patch_size
        directions = self.directions.split(self.batch.seq_lens)
        outputs = []
        for i, sample in enumerate(self.samples):
            latents, timestep = self._corrupt_as_stock(i)
            text = sample.text_embeds
            text = torch.nn.functional.pad(text, (0, 0, 0, OFFICIAL_TEXT_LEN - len(text)))
            pictures = sample.image_embeds
            if pictures is not None:  # the first and the last one each on its own
                pictures = torch.stack(pictures.chunk(2 if self.shape.image_positions else 1)).to(
                    device, dtype
                )
            out = model(
                latents[None].to(device, dtype),
                timestep.to(device),
                text[None].to(device, dtype),
                pictures,
                return_dict=False,
            )[0]
            rows = patchify(out[0].float(), patch)
            (rows * directions[i].to(device)).sum().backward()
            outputs.append(rows.detach().cpu())
        gradients = {name: gradient.cpu() for name, gradient in _take_gradients(model).items()}
        return Answer(torch.cat(outputs), gradients)

    def _corrupt_as_stock(self, number: int) -> tuple[Tensor, Tensor]:
        """The model's input [C, f, h, w] of a sample and its timesteps, [1] or [1, n], at training's noise level."""
        batch, whole, sample = self.batch, self.whole, self.samples[number]
        drawn = add_noise(batch.tokens, whole, batch.keys, self.flow, SEED, sigma_range=self.sigma_range)
        noise = draw_noise(whole, batch.keys, SEED, batch.tokens.shape[1]).split(batch.seq_lens)[number]
        noise = unpatchify(noise, GRIDS[number], self.shape.out_channels, self.shape.patch_size)
        sigma = drawn.sigmas[number]
        latents = (1 - sigma) * sample.latents + sigma * noise
        timestep = (sigma * NUM_TRAIN_TIMESTEPS)[None]
        if self.flow.i2v_ratio and "first_frame" in self.conditions:
            # The loop of WanImageToVideoPipeline with expand_timesteps, line by line.
            mask = torch.ones(1, *latents.shape[1:])
            mask[:, 0] = 0
            latents = (1 - mask) * sample.latents[:, :1] + mask * latents
            timestep = (mask[0][:, ::2, ::2] * timestep).flatten()[None]
        if sample.image_latents is not None:
            given = image_mask(tuple(latents.shape[1:]), "last_image" in self.conditions)
            latents = torch.cat([latents, given, sample.image_latents])
        return latents, timestep


def _take_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            found[name], parameter.grad = parameter.grad.float(), None
    return found

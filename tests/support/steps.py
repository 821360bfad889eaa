"""One optimizer step three ways: stock diffusers clip by clip, one process, and every way of spreading it over ranks."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.support.runs import engine_of, make_run, model_of
from wands.attention.layout import ContextLayout
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.engine.engine import release_engine
from wands.flow.noise import add_noise
from wands.flow.sigmas import sigma_weight
from wands.model.files.loading import build_empty
from wands.model.files.lora_files import LORA_FILE, lora_tensors
from wands.model.files.lora_update import LoraPair
from wands.model.lora import find_targets
from wands.model.tensor_parallel import cut_of
from wands.patches import unpatchify
from wands.plugin import Plugin
from wands.selftest.stock import add_conditions, stock_velocity
from wands.train.prepared_run import PreparedRun
from wands.train.step import train_step

ROOT = Path(__file__).resolve().parents[2]
DS_CONFIGS = {
    path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "ds_configs").glob("*.json"))
}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """A DeepSpeed JSON under whose ZeRO-3 even the smallest parameter is sharded and gathered."""
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more}}


# ---- the cells of the matrix


class Grid(NamedTuple):
    """A way of spreading a step over ranks."""

    dp: int
    ring: int
    ulysses: int
    tensor: int = 1

    def __str__(self) -> str:
        return "x".join(map(str, self if self.tensor > 1 else self[:3]))

    @property
    def world_size(self) -> int:
        return self.dp * self.ring * self.ulysses * self.tensor

    @property
    def overrides(self) -> tuple[str, ...]:
        return (
            f"parallel.ring_degree={self.ring}",
            f"parallel.ulysses_degree={self.ulysses}",
            f"parallel.tensor_degree={self.tensor}",
        )


class Case(NamedTuple):
    """Setting of a step: grid, file of ds_configs/, number of micro steps, and what the backward pass recomputes."""

    grid: Grid
    ds_name: str
    accumulation: int
    checkpointing: str

    def __str__(self) -> str:
        return "-".join(map(str, self))

    @property
    def bins_per_step(self) -> int:
        return self.grid.dp * self.accumulation

    @property
    def overrides(self) -> tuple[str, ...]:
        step = (f"train.bins_per_step={self.bins_per_step}", f"model.checkpointing={self.checkpointing}")
        return *self.grid.overrides, *step


GRIDS = tuple(
    itertools.starmap(Grid, [(1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2), (2, 2, 1), (1, 2, 2)])
)
ACCUMULATIONS = (1, 3)
CHECKPOINTING = ("none", "selective", "full")
MATRIX = tuple(itertools.starmap(Case, itertools.product(GRIDS, DS_CONFIGS, ACCUMULATIONS, CHECKPOINTING)))
# Any two values of any two axes meet in it.
PAIRWISE = tuple(
    Case(grid, name, ACCUMULATIONS[(g + d) % 2], CHECKPOINTING[(g + d) % 3])
    for (g, grid), (d, name) in itertools.product(enumerate(GRIDS), enumerate(DS_CONFIGS))
)


# ---- the step through the trainer


@dataclass(frozen=True)
class Step:
    """One optimizer step as one rank saw it.

    Attributes:
        loss: of the whole step.
        grad_norm: as the trainer reports it.
        gradients: of every trained parameter as DeepSpeed holds them just before its update; on rank 0 only.
        digest: of all parameters after the update.
        clips: error of each clip of this rank's bins.
    """

    loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    digest: str
    clips: dict[str, float]


def optimizer_step(
    model: Path,
    out: Path,
    overrides: tuple[str, ...],
    ds: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    plugin: Plugin | None = None,
) -> Step:
    """The first step of a run through the trainer's own `train_step`, on an engine that is gone afterwards."""
    run = make_run(model, out, overrides, ds, plugin=plugin)
    rank, _, device = init_process_group()
    groups = ProcessGroups.build(run.grid(rank), device)
    with _engine(run, groups, device, dtype) as engine:
        gradients = capture_gradients(engine, groups.tensor)
        plan = run.schedule.sampler.step_plan(0)
        denominator = run.schedule.denominator(plan)
        [batches] = run.reader(groups.dims).micro_batches(plan)
        result = train_step(
            engine, batches, run.objective, groups=groups, device=device, denominator=denominator
        )
        loss = result.loss.double()
        dist.all_reduce(loss)
        return Step(
            float(loss) / denominator,
            result.grad_norm,
            gradients if rank == 0 else {},
            _digest(engine.module, groups.tensor),
            {one["sample_id"]: one["loss"] for one in result.samples},
        )


def whole_of(parameter: Any, values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The values of a whole parameter, from the part of them that each rank of a tensor-parallel group has."""
    cut = cut_of(parameter)
    if cut is None:
        return values
    parts = [torch.empty_like(values).contiguous() for _ in range(cut.degree)]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, dim=cut.dim)


def capture_gradients(engine: Any, group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
    """The whole gradient of every trained parameter, filled when `engine` steps. `group`: the tensor-parallel ranks."""
    from deepspeed.utils import safe_get_full_grad

    gradients: dict[str, torch.Tensor] = {}
    update = engine.step

    def capture() -> None:
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                gradient = safe_get_full_grad(parameter).view(getattr(parameter, "ds_shape", parameter.shape))
                gradients[name] = whole_of(parameter, gradient, group).clone()
        update()

    engine.step = capture
    return gradients


@contextmanager
def _engine(
    run: PreparedRun, groups: ProcessGroups, device: torch.device, dtype: torch.dtype
) -> Iterator[Any]:
    if (
        dtype == torch.float64
    ):  # a model that is made under ZeRO-3 is float32; this one is sharded by the engine
        whole = replace(run, ds_config={**run.ds_config, "zero_optimization": {"stage": 2}})
        module = model_of(whole, groups, device).double()
    else:
        module = model_of(run, groups, device)
    engine = engine_of(run, module, groups)
    del module
    yield engine
    release_engine(engine)


def _digest(module: torch.nn.Module, group: dist.ProcessGroup | None) -> str:
    """A hash of the bits of all parameters, gathered where ZeRO-3 has partitioned them or tensor parallelism has divided them."""
    import deepspeed

    digest = hashlib.sha256()
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        for name, parameter in module.named_parameters():
            values = whole_of(parameter, parameter.detach(), group).contiguous()
            digest.update(name.encode() + values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ---- the dumb way


def stock_gradients(
    model: Path, run: PreparedRun, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    """Stock diffusers, one sample at a time as its pipelines call it, one process, plain autograd."""
    from diffusers import WanTransformer3DModel

    [expert] = run.model.experts
    stock = WanTransformer3DModel.from_pretrained(model / expert.subfolder).to(dtype)
    plan = run.schedule.sampler.step_plan(0)
    channels = run.model.shape.out_channels
    for one in (i for bin_ in plan.bins for i in bin_):
        sample = run.data.read(one)
        batch = run.collator([sample], plan.repeat_indices((one,)), plan.epoch)
        layout = ContextLayout.build(batch.seq_lens)
        noisy = add_noise(
            batch.tokens,
            layout,
            batch.keys,
            run.recipe.flow,
            run.recipe.train.seed,
            sigma_range=expert.sigma_range,
        )
        grid = tuple(batch.grid_sizes[0].tolist())
        patch = run.model.shape.patch_size
        clean, x, target = (
            unpatchify(tokens, grid, channels, patch).to(dtype)
            for tokens in (batch.tokens, noisy.tokens, noisy.target)
        )
        given = batch.num_cond_tokens[0]
        x, timesteps = add_conditions(
            x,
            noisy.timesteps[0],
            first_frame=clean[:, :1] if given else None,
            image_latents=sample.arrays.get("image_latents"),
            last_image=run.model.variant.num_images == 2,
        )
        pred = stock_velocity(stock, x, timesteps, batch.text_embeds, sample.arrays.get("image_embeds"))
        weight = sigma_weight(noisy.sigmas, run.recipe.flow)[0]
        first = 1 if given else 0  # a frame that was given is not trained
        trained = sample.arrays.get("token_weights", torch.ones(grid))
        of_pixels = trained.to(dtype)[first:].repeat_interleave(2, 1).repeat_interleave(2, 2)
        # over the sample's own tokens and channels
        error = ((pred - target)[:, first:].square().mean(dim=0) * of_pixels).sum() / of_pixels.sum()
        if run.recipe.loss.reduction == "token":
            error = error * float(trained[first:].double().sum())
        error = error * sample.loss_weight
        (weight * error / run.schedule.denominator(plan)).backward()
    return {name: parameter.grad for name, parameter in stock.named_parameters()}


def save_random_lora(model: Path, folder: Path) -> Path:
    """A LoRA of rank 4 for all linear layers whose B is not zero: at zero A would get no gradient."""
    config = json.loads((model / "transformer" / "config.json").read_text())
    generator = torch.Generator().manual_seed(5)
    pairs = {
        name: LoraPair(
            torch.randn(4, linear.in_features, generator=generator) / linear.in_features**0.5,
            torch.randn(linear.out_features, 4, generator=generator) / 4,
        )
        for name, linear in find_targets(build_empty(config), "all-linear").items()
    }
    save_file(lora_tensors(pairs), folder / LORA_FILE)
    return folder


# ---- comparing


def errors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Error of every parameter's gradient, relative to the parameter's own largest, or to a thousandth of the largest of all
    where a parameter has hardly any."""
    assert ours.keys() == theirs.keys()
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    return {
        name: float((ours[name] - grad).abs().max()) / max(float(grad.abs().max()), 1e-3 * largest)
        for name, grad in theirs.items()
    }


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest of `errors`."""
    return max(errors(ours, theirs).values())

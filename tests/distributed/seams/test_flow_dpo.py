"""Preference training on pairs equals plain PyTorch, which computes each clip alone: loss and gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

import wands
from examples.flow_dpo import FlowDPO, Rejected
from tests.support.runs import losses, make_run, model_of, run_training
from tests.support.sampling import infer
from tests.support.steps import Step, optimizer_step, save_random_lora, worst, zero
from tests.support.world import WorldPool
from wands.commands.export import export
from wands.conditions.published import Text
from wands.config.options import ExportOptions
from wands.data.collate import Sample
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.flow.noise import add_noise

BETA = 3.0


def plugin() -> wands.Plugin:
    return wands.Plugin(conditions=(Rejected(),), objective=FlowDPO(BETA))


def of_engine(model: Path, out: Path, settings: tuple[str, ...]) -> Step:
    return optimizer_step(model, out, settings, zero(2), torch.float64, plugin())


def alone(model: Path, out: Path, settings: tuple[str, ...]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the first step, and its gradients: every clip of every pair in a sequence by itself, without an engine."""
    run = make_run(model, out, settings, plugin=plugin(), world_size=1)
    rank, _, device = init_process_group()
    groups = ProcessGroups.build(run.grid(rank), device)
    dit: Any = model_of(run, groups, device).double()
    plan = run.schedule.sampler.step_plan(0)
    collator = replace(run.collator, conditions=[Text(run.model.shape.text_dim)], unit_rule=None)
    total = torch.zeros((), dtype=torch.float64)
    for one in (i for bin_ in plan.bins for i in bin_):
        sample = run.data.read(one)
        changes = []
        for name in ("latents", "rejected_latents"):
            arrays = {"latents": sample.arrays[name], "text_embeds": sample.text_embeds}
            batch = collator([Sample(sample.sample_id, arrays)], plan.repeat_indices((one,)), plan.epoch)
            layout = run.grid(rank).layout(batch.seq_lens)
            part = batch.rank_slice(layout)
            noisy = add_noise(part.tokens, layout, part.keys, run.recipe.flow, run.recipe.train.seed)
            inputs = part.model_inputs(noisy.tokens, noisy.timesteps)
            with wands.adapter_off(dit):
                of_base = (dit(**inputs) - noisy.target).square().mean()
            changes.append((dit(**inputs) - noisy.target).square().mean() - of_base)
        total = total - logsigmoid(BETA / 2 * (changes[1] - changes[0]))
    loss = total / run.schedule.denominator(plan)
    loss.backward()
    return float(loss), {name: one.grad for name, one in dit.named_parameters() if one.requires_grad}


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_pairs_are_two_clips_alone(world_size: int, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    settings = (
        *("lora.rank=4", "lora.targets=all-linear", "packing.max_tokens=48", "train.bins_per_step=2"),
        *("flow.cfg_dropout=0", f"lora.init_from={save_random_lora(tiny_pipeline, tmp_path)}"),
    )
    ours = worlds[world_size].run(of_engine, tiny_pipeline, tmp_path / "ours", settings)[0]
    [(loss, gradients)] = worlds[1].run(alone, tiny_pipeline, tmp_path / "alone", settings)
    assert ours.loss == pytest.approx(loss, rel=1e-6)
    assert worst(ours.gradients, gradients) <= 1e-5
    assert ours.clips


def trained(model: Path, out: Path) -> list[dict[str, Any]]:
    settings = ("lora.rank=4", "packing.max_tokens=48", "train.max_steps=3", "checkpoint.every=3")
    return run_training(model, out, settings, plugin=plugin())


@pytest.mark.slow
def test_a_run_exports_a_plain_lora(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    rows = worlds[2].run(trained, tiny_pipeline, tmp_path / "run")[0]
    assert losses(rows)[0] == pytest.approx(0.6931, abs=1e-3)  # the untrained LoRA prefers neither
    export(ExportOptions(checkpoint=tmp_path / "run", out=tmp_path / "lora"))
    options = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 1, "guidance_scale": 1.0}
    [result] = infer(tiny_pipeline, ["a"], out_dir=tmp_path / "out", lora=[tmp_path / "lora"], **options)
    assert result.video.is_file()


def refused(model: Path, out: Path) -> None:
    make_run(model, out, ("parallel.ring_degree=2",), plugin=plugin(), world_size=2)


def test_context_parallelism_is_refused(tiny_pipeline: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="flow_dpo needs whole clips on a rank"):
        refused(tiny_pipeline, tmp_path)

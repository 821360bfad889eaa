"""The command `wands init`: choose settings for clips and a machine, and write a recipe and the commands to run."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch

from wands.commands.check.check import check
from wands.commands.check.check_report import CheckedClip, CheckedSample, CheckReport
from wands.commands.plan import build_task, describe_smallest, find_model, start_command
from wands.config.auto import MAX_PASSES, MIN_PASSES, USUAL_STEPS, usual_interval, usual_steps
from wands.config.options import CheckOptions, ClipOptions, InitOptions, PlanOptions
from wands.config.recipe_loading import load_recipe
from wands.data.clips.clip import ClipSpec
from wands.data.clips.records import shown_key
from wands.data.holdout import HELD_OUT, choose_sides
from wands.encoders.components import read_variant
from wands.errors import ConfigError, DataError
from wands.files import write_text
from wands.model.files.hub import published_name
from wands.objectives.causal import teacher_forcing_costs
from wands.objectives.objective import ClipCosts
from wands.patches import grid_size
from wands.planning.cluster import Cluster, choose_cluster
from wands.planning.hardware import GB, with_measurements
from wands.planning.memory import to_gib
from wands.planning.sampling_load import sampling_load
from wands.planning.search import Candidate, Task, search
from wands.preprocess.clip_rules import count_problems
from wands.preprocess.preprocess_report import SHOWN_REJECTIONS
from wands.sampling.requests import SampleRequest, build_requests
from wands.texts import format_seconds, printable
from wands.variants import VARIANTS, Variant

FILES = ("recipe.yaml", "commands.sh", "deepspeed.json", "prompts.jsonl")
"""Names of the files that the command writes. The first two have a template in this folder."""
MAX_CLIPS = 500
"""Largest number of clips that are decoded. The others are assumed to be similar."""
CLIPS_PER_STEP = 8
"""Mean number of clips in an optimizer step: fewer if the data has fewer clips or a run would take more than `MAX_HOURS`, more
with many GPUs, because each data-parallel rank gets at least one bin."""
MAX_HOURS = 12
"""Largest predicted time of a run in hours, even if it then makes fewer than `MIN_PASSES` passes over the samples. The user can
resume the run with more steps."""
TEXT_ENCODER = 13.4
"""GPU memory in GB for the text encoder in bf16 and the CUDA context."""


def init(options: InitOptions) -> str:
    """Decode the clips of a source, choose the fastest settings that fit a machine, and write a recipe and commands.

    Return the contents of `commands.sh`: the commands to run, with comments.

    Raises:
        ConfigError: if files would be replaced, the machine is unknown, or no settings fit the machine.
        DataError: if the source has no clip that can be used.
    """
    out = Path(os.path.abspath(options.out))
    if not options.force:
        _refuse_existing(out, options.out)
    model = _absolute(options.model)
    name = published_name(model)  # no file of a published model is read
    variant = VARIANTS[name] if name else read_variant(model)
    base = _nearest_recipe(variant, "finetune" if options.full else "lora")
    cluster = _choose_cluster(options)

    given = options.model_dump(include=set(ClipOptions.model_fields), exclude_defaults=True)
    # Without a limit of the frames, the longest sample is known only after all clips are decoded.
    report = check(CheckOptions(**given), variant, MAX_CLIPS if options.max_frames else None)
    if not report.samples:
        first = f"first clip: {report.clips[0].reason}; wands check --html clips.html lists the others."
        raise DataError(f"SOURCE={options.source}: no clip can be used; {first}")
    pairs = ((clip, sample) for clip in report.clips for sample in clip.samples)
    clip, sample = max(pairs, key=lambda pair: pair[1].num_tokens)
    costs = _costs(report, variant, options.chunk_frames)
    mean = float(costs.tokens[: len(report.samples)].mean())

    held = _hold_out(report)
    samples = len(held) - held.sum()

    prompt = _prompt_of(clip, sample, variant)
    load = sampling_load(build_requests([prompt], {"num_inference_steps": 30}, variant)[0], variant)
    has_room = cluster.machine.memory / GB >= TEXT_ENCODER
    loads = [{}, load][: 1 + has_room]
    find = partial(_find_settings, base, model, costs, cluster, loads, samples, options.chunk_frames)
    num_samples = round(len(report.samples) * (1 + report.num_skipped / len(report.clips)))
    tokens = min(CLIPS_PER_STEP, samples) * mean
    task, best = find(tokens)
    if best is None:
        raise ConfigError(describe_smallest(task, _shrink(clip, sample, options.full)))
    epoch, usual = _count_steps(best, num_samples * mean)
    if (share := 3600 * MAX_HOURS / (usual * best.seconds)) < 1:
        best = find(max(tokens * share, mean))[1] or best
        epoch, usual = _count_steps(best, num_samples * mean)
    steps = max(min(usual, int(3600 * MAX_HOURS / best.seconds)), 1)
    rule = f"{USUAL_STEPS:,} steps, but at least {MIN_PASSES} and at most {MAX_PASSES} passes, and at most {MAX_HOURS} h"
    clips = shlex.join([_absolute(options.source), *_flags(given)])
    facts = _describe_input(options, report) | dict(clip=clip, sample=sample, held=held, clips=clips)
    facts |= dict(
        best=best,
        base=base,
        epoch=epoch,
        steps=steps,
        every=usual_interval(steps),
        num_samples=num_samples,
        has_room=has_room,
    )
    facts |= dict(
        variant=variant, model=model, out=str(out), train=start_command(best, PlanOptions(out=out)), rule=rule
    )
    texts = _render(facts)
    ds_config = json.dumps(best.task.ds_configs[best.ds_name], indent=2)
    texts += [ds_config, prompt.model_dump_json(exclude_unset=True)]
    for file, text in zip(FILES, texts, strict=True):
        write_text(out / file, text + "\n")
    return texts[1]


def _describe_input(options: InitOptions, report: CheckReport) -> dict[str, Any]:
    """Return facts for the templates: whether the model is the default, rejected clips, and how many have each warning."""
    warnings = ((clip.path, text) for clip in report.clips for text in clip.warnings)
    return {
        "options": options,
        "report": report,
        "is_default": options.model == InitOptions.model_fields["model"].default,
        "rejected": [clip for clip in report.clips if clip.reason],
        "warnings": count_problems(warnings),
        "shown": SHOWN_REJECTIONS,
    }


def _shrink(clip: CheckedClip, sample: CheckedSample, full: bool) -> str:
    """Return the fix for clips that are too long. `sample` is the longest."""
    fix = f"lower --max-frames or --max-pixels, {'remove --full, ' * full}or use more or larger GPUs."
    return f"the longest sample is {shown_key(clip.key)}, {sample.num_frames} frames of {sample.width}x{sample.height}; {fix}"


def _costs(report: CheckReport, variant: Variant, chunk_frames: int | None) -> ClipCosts:
    """Return the costs of all samples, and of the longest that clips without decoding can have."""
    patch = variant.dit.patch_size
    sizes = [variant.latent_size(s.num_frames, s.height, s.width) for s in report.samples]
    grids = [grid_size(size, patch) for size in sizes]
    if report.num_skipped:
        longest = variant.latent_size(report.spec.legal_frames(report.spec.max_frames or 1), 0, 0)
        frames = grid_size(longest, patch)[0]
        grids.append((frames, 1, _most_tokens(report.spec, variant) // frames))
    tokens = np.array(grids, np.int64).prod(axis=1)
    if chunk_frames is None:
        return ClipCosts(tokens=tokens, pairs=tokens**2)
    return teacher_forcing_costs(np.array(grids, np.int64), chunk_frames)


def _find_settings(
    base: str,
    model: str,
    costs: ClipCosts,
    cluster: Cluster,
    loads: Sequence[dict[str, Any]],
    samples: int,
    chunk_frames: int | None,
    tokens: float,
) -> tuple[Task, Candidate | None]:
    """Return the task without sample videos, and the fastest settings with about so many tokens in a step, None if none fit.

    The tokens are first in larger bins, which are faster than several small bins.
    """
    lens = costs.tokens
    share = float(costs.pairs.sum() / (lens.astype(float) ** 2).sum())
    usual_tokens = load_recipe(base).packing.max_tokens
    max_tokens = max(int(lens.max()), min(usual_tokens, round(tokens / cluster.gpus)))
    bins = f"train.bins_per_step={math.ceil(tokens / max_tokens)}"
    keys = [bins, f"packing.max_tokens={max_tokens}", f"model.path={_to_yaml(model)}"]
    if chunk_frames is not None:
        keys += ["objective.name=teacher_forcing", f"objective.chunk_frames={chunk_frames}"]
    recipe = load_recipe(base, keys)
    parts = find_model(recipe, published_name(model))
    tasks = [build_task(recipe, parts, lens, cluster, load | {"pair_share": share}) for load in loads]
    return tasks[0], _fastest(tasks, samples, cluster.gpus)


def _count_steps(best: Candidate, tokens: float) -> tuple[int, int]:
    """Return the number of steps of a pass over the data, and the usual number of steps of a run. The data has so many tokens."""
    bins = best.workload.recipe.train.bins_per_step
    epoch = max(round(tokens / (bins * sum(best.prediction.plan.seq_lens))), 1)
    return epoch, usual_steps(epoch, bins)


def _refuse_existing(out: Path, given: Path) -> None:
    """Raise a ConfigError if the folder contains files that the command would replace."""
    existing = ", ".join(name for name in FILES if (out / name).exists())
    if existing:
        fix = "choose another folder, or replace these files with --force."
        raise ConfigError(f"--out {given} already contains {existing}; {fix}")


def _nearest_recipe(variant: Variant, kind: str) -> str:
    """Return the name of the shipped recipe for a variant, or else for one of its family."""
    family = variant.name.rpartition("-")[0]
    name = min(VARIANTS, key=lambda known: (known != variant.name, not known.startswith(family)))
    return f"{name}-{kind}"


def _hold_out(report: CheckReport) -> np.ndarray:
    """Return for each sample whether it is held out."""
    keys, seconds = zip(*((s.key, s.num_frames / report.spec.fps) for s in report.samples), strict=True)
    return choose_sides(keys, [np.array(seconds)], "auto") == HELD_OUT


def _most_tokens(spec: ClipSpec, variant: Variant) -> int:
    """Return the largest number of tokens that a sample can have."""
    area = max(spec.max_pixels or 0, (spec.height or 0) * (spec.width or 0), *spec.more_pixels)
    frames = spec.legal_frames(spec.max_frames or 1)
    return variant.num_tokens(frames, spec.size_multiple, area // spec.size_multiple)


def _prompt_of(clip: CheckedClip, sample: CheckedSample, variant: Variant) -> SampleRequest:
    """Return a request for a video like a sample of the data."""
    images = {key: str(clip.path) for key in ("image", "last_image") if key in variant.conditions}
    shape = {"height": sample.height, "width": sample.width, "num_frames": sample.num_frames}
    return SampleRequest.model_validate({"prompt": clip.caption, **shape, **images})


def _fastest(tasks: Sequence[Task], samples: int, gpus: int) -> Candidate | None:
    """Return the fastest settings of tasks of which only the first samples no videos; None if no settings fit the machine."""
    # Settings with more data-parallel ranks than samples come last, because wands train refuses them.
    ranked = [sorted(search(task), key=lambda one: one.workload.cp_size * samples < gpus) for task in tasks]
    candidates = [found[0] for found in ranked if found]
    # The run samples videos, unless that needs settings that are 10 % slower.
    return max(
        candidates,
        key=lambda one: one.tokens_per_second * (1.0 if one.workload.video_tokens else 0.9),
        default=None,
    )


def _render(facts: dict[str, Any]) -> list[str]:
    """Return the texts of the files that have a template."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), trim_blocks=True)
    environment.filters |= {"json": _to_yaml, "quote": shlex.quote, "gib": to_gib, "text": printable}
    environment.filters["name"] = shown_key
    return [environment.get_template(name).render(facts, time=format_seconds) for name in FILES[:2]]


def _to_yaml(value: Any) -> str:
    # YAML does not join the two \u codes with which json.dumps would write a character such as an emoji.
    return json.dumps(value, ensure_ascii=False)


def _choose_cluster(options: InitOptions) -> Cluster:
    """Return the GPUs of `options`, or else of this machine."""
    count = torch.cuda.device_count()
    if not (count or options.hardware or options.gpu_memory):
        fix = "describe the GPU for the training with --gpu-memory GB, or with --hardware and a name such as rtx4090."
        raise ConfigError(f"this machine has no GPU that PyTorch can use; {fix}")
    cluster = choose_cluster(
        options.hardware,
        options.gpus or count or 1,
        gpu_memory=options.gpu_memory,
        host_memory=options.host_memory,
    )
    return replace(cluster, machine=with_measurements(cluster.machine, None))


def _flags(options: dict[str, Any]) -> Iterator[str]:
    """Yield the command-line flags that set options, one for each item of a tuple. `source` has no flag."""
    for name, value in options.items():
        for item in (value if isinstance(value, tuple) else (value,)) if name != "source" else ():
            yield f"--{name.replace('_', '-')}" + ("" if item is True else f"={item or 0}")


def _absolute(name: str) -> str:
    return os.path.abspath(name) if os.path.exists(name) else name

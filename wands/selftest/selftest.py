"""The command `wands tools selftest`: compare wands with stock diffusers, with the user's weights and on the user's machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from accelerate.utils.memory import clear_device_cache

from wands.conditions.condition import Condition
from wands.config.options import SelftestOptions
from wands.encoders.components import quiet_loading
from wands.errors import ConfigError, WandsError, one_line
from wands.plugin import load_plugins
from wands.selftest import dit_parity as dit
from wands.selftest import encoder_parity as encoders
from wands.selftest import expert_ranges as experts
from wands.selftest.parity_setup import Result, Setup, Skipped, load_setup

log = logging.getLogger(__name__)


class Check(NamedTuple):
    """A check of the model, which gives one line of the report.

    Attributes:
        name: name of the check.
        load: loads the part of the model that the check needs; None if it needs none.
        run: maps the result of `load`, or else the `Setup`, to a `Result` without a name.
        condition: input, such as "image", that a model must have for the check; "" checks every model.
    """

    name: str
    load: Callable[[Setup], Any] | None
    run: Callable[[Any], Result]
    condition: str = ""


CHECKS = (
    Check("vae.pixels", encoders.VaePart, encoders.check_pixels),
    Check("vae.latents", encoders.VaePart, encoders.check_latents),
    Check("vae.statistics", encoders.VaePart, encoders.check_statistics),
    Check(name="image.condition", load=encoders.VaePart, run=encoders.check_condition, condition="image"),
    Check(
        name="first_frame.latents",
        load=encoders.VaePart,
        run=encoders.check_first_frame,
        condition="first_frame",
    ),
    Check("text.tied", encoders.TextPart, encoders.check_tied),
    Check("text.embeds", encoders.TextPart, encoders.check_embeds),
    Check("text.length", encoders.TextPart, encoders.check_length),
    Check(name="image.embeds", load=None, run=encoders.check_image_embeds, condition="clip"),
    Check("experts.boundary", None, experts.check_boundary),
    Check("experts.draws", None, experts.check_draws),
)
DIT_CHECKS = (
    Check("names", None, dit.check_names),
    Check("packed.output", dit.compare_to_stock, dit.check_output),
    Check("packed.gradients", dit.compare_to_stock, dit.check_gradients),
    Check(
        name="first_frame.timesteps",
        load=dit.compare_with_first_frame,
        run=dit.check_output,
        condition="first_frame",
    ),
    Check("cp.output", dit.compare_to_one_process, dit.check_output),
    Check("cp.gradients", dit.compare_to_one_process, dit.check_gradients),
)
"""Checks that run once for each DiT of the model."""
NAMES = [check.name for check in (*CHECKS, *DIT_CHECKS)]


def selftest(options: SelftestOptions, conditions: Sequence[Condition] = ()) -> Iterator[Result]:
    """Yield the result of each check that compares a model in wands with the same model in stock diffusers.

    The weights of the DiT are fp32, as in training. Only one large part of the model is in memory at a time. Under a launcher
    such as torchrun, only the checks of context parallelism run, and each rank loads the whole DiT; without one, all others run.
    No files are written or downloaded. `conditions` are added to those of `--import`.

    Raises:
        WandsError: if the model, the clip or a check in `options.only` does not exist, or a part that a check needs is missing or
            damaged.
    """
    for choice in options.only:
        if not any(_is_chosen(name, (choice,)) for name in NAMES):
            raise ConfigError(f"--only={choice} is not a check; use one of {', '.join(NAMES)}.")
    setup = load_setup(options, (*conditions, *load_plugins(options.imports).conditions))
    log.info("selftest of %s: %s on %s in %s", options.model, setup.variant.name, setup.device, setup.dtype)
    # By default cuDNN's convolutions in PyTorch round to TF32, which causes errors of 1e-3.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with quiet_loading():
        yield from _run_checks(setup, CHECKS)
        for expert in setup.variant.experts:
            suffix = f" {expert.subfolder}" if expert.name else ""
            for result in _run_checks(replace(setup, expert=expert), DIT_CHECKS):
                yield replace(result, name=result.name + suffix)


def _run_checks(setup: Setup, checks: Sequence[Check]) -> Iterator[Result]:
    """Run checks and yield their results. Consecutive checks that need the same part of the model load it once."""
    for load, checks_of_part in groupby(checks, key=lambda check: check.load):
        part = None
        problem = ""
        for check in checks_of_part:
            if not _is_chosen(check.name, setup.options.only):
                continue
            try:
                if reason := _inapplicable(check, setup) or problem:
                    raise Skipped(reason)
                if part is None:
                    problem = "the part of the model that this check needs could not be loaded, see the failed check above"
                    part = load(setup) if load else setup
                    problem = ""
                result = check.run(part)
            except Skipped as reason:
                result = Result("skipped", str(reason))
            except WandsError:
                raise
            except Exception as error:
                # An error of a library or GPU, or missing memory, fails only this check.
                log.debug("%s", check.name, exc_info=error)
                result = Result("fail", f"{type(error).__name__}: {one_line(error, 300)}")
            yield replace(result, name=check.name)
        del part
        clear_device_cache(garbage_collection=True)


def _is_chosen(name: str, only: tuple[str, ...]) -> bool:
    return not only or any(f"{name}.".startswith(f"{choice}.") for choice in only)


def _inapplicable(check: Check, setup: Setup) -> str:
    """Return the reason why a check does not apply to this model or this number of processes, or "" if the check applies."""
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    needs_ranks = check.name.startswith("cp.")
    name = setup.variant.name
    command = f"wands tools selftest --model {setup.options.model}"
    if check.condition and not setup.has(check.condition):
        return f"{name} does not take the condition {check.condition}"
    if check.name.startswith("experts") and setup.variant.boundary_ratio is None:
        return f"{name} has only one DiT"
    if needs_ranks and is_alone:
        return f"needs several processes; run torchrun --nproc-per-node 2 -m {command} --only cp"
    if not (needs_ranks or is_alone):
        return f"needs a single process; run {command}"
    return ""

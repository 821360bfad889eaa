"""`wands selftest`: the parity checks of the test suite on the user's weights and machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from accelerate.utils.memory import clear_device_cache

from wands.commands.selftest.dit_parity import DIT_GROUPS
from wands.commands.selftest.encoder_parity import ENCODER_GROUPS
from wands.commands.selftest.expert_ranges import EXPERT_GROUP
from wands.commands.selftest.parity_setup import Group, Result, Setup, Skipped, exact_fp32, load_setup
from wands.config.options import SelftestOptions
from wands.encoders.components import quiet_loading
from wands.errors import ConfigError, WandsError, one_line

log = logging.getLogger(__name__)

GROUPS = (*ENCODER_GROUPS, EXPERT_GROUP)
NAMES = [name for _, checks in (*GROUPS, *DIT_GROUPS) for name in checks]
CONDITIONS = {
    "image.condition": "image",
    "image.embeds": "clip",
    "first_frame.latents": "first_frame",
    "first_frame.timesteps": "first_frame",
}
"""Check -> condition that the model must have."""


def selftest(options: SelftestOptions) -> Iterator[Result]:
    """Compare a model, as wands reads and trains it, with stock diffusers. One big part is in memory at a time.

    The DiT's weights are fp32, as in training. Under a launcher only the checks of context parallelism run, each rank with the
    whole DiT; without a launcher all other checks run. Nothing is written and nothing is downloaded.

    Args:
        options: options of the command.

    Yields:
        The result of each check as soon as it is known.

    Raises:
        WandsError: if the model or the clip does not exist, or a part that a check needs is missing or damaged.
    """
    for name in options.only:
        if not any(_is_chosen(known, [name]) for known in NAMES):
            raise ConfigError(f"--only={name} is not a check; choose from {', '.join(NAMES)}.")
    setup = load_setup(options)
    log.info("selftest of %s: %s on %s in %s", options.model, setup.variant.name, setup.device, setup.dtype)
    with exact_fp32(), quiet_loading():
        for group in GROUPS:
            yield from _run(setup, group, options.only)
        for expert in setup.variant.experts:
            suffix = f" {expert.subfolder}" if expert.name else ""
            for group in DIT_GROUPS:
                for result in _run(replace(setup, expert=expert), group, options.only):
                    yield replace(result, name=result.name + suffix)


def _run(setup: Setup, group: Group, only: Sequence[str]) -> Iterator[Result]:
    """Run the checks of a group on one part of the model, which is loaded for the first check and dropped after the last."""
    load, checks = group
    part, problem = None, ""
    for name, check in checks.items():
        if not _is_chosen(name, only):
            continue
        try:
            if reason := _inapplicable(name, setup) or problem:
                raise Skipped(reason)
            if part is None:
                problem = "its part of the model does not run, see above"
                part = load(setup)
                problem = ""
            passed, number, bound = check(part)
        except Skipped as reason:
            yield Result(name, "skipped", str(reason))
        except WandsError:
            raise
        except Exception as error:  # a failing library, GPU or memory fails its check; the next check runs
            log.debug("%s", name, exc_info=error)
            yield Result(name, "fail", f"{type(error).__name__}: {one_line(error, 300)}")
        else:
            if passed is None:
                yield Result(name, "skipped", f"{number} (no bound: {bound})")
            else:
                yield Result(name, "pass" if passed else "fail", f"{number} ({bound})")
    del part
    clear_device_cache(garbage_collection=True)


def _is_chosen(name: str, only: Sequence[str]) -> bool:
    return not only or any(name == choice or name.startswith(f"{choice}.") for choice in only)


def _inapplicable(name: str, setup: Setup) -> str:
    """Return the reason why a check does not apply to this model or number of processes, or an empty text."""
    is_alone, variant = int(os.environ.get("WORLD_SIZE", "1")) == 1, setup.variant
    condition = CONDITIONS.get(name)
    if condition and condition not in variant.conditions:
        return f"{variant.name} takes no {condition}"
    if name.startswith("experts") and variant.boundary_ratio is None:
        return f"{variant.name} has one DiT"
    if name.startswith("cp.") and is_alone:
        return f"one process; torchrun --nproc-per-node 2 -m {setup.command} --only cp"
    if not (name.startswith("cp.") or is_alone):
        return f"several processes; {setup.command}"
    return ""

"""`wands selftest`: the parities that the tests hold on tiny models, asked of the user's own weights on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wands.commands.selftest.dit_parity import DiTChecks
from wands.commands.selftest.encoder_parity import ClipChecks, TextChecks, VaeChecks
from wands.commands.selftest.expert_ranges import ExpertChecks
from wands.commands.selftest.parity_setup import (
    Outcome,
    Result,
    Setup,
    Skipped,
    exact_fp32,
    free_memory,
    load_setup,
    quiet,
)
from wands.errors import ConfigError, WandsError
from wands.variants import Expert

log = logging.getLogger(__name__)

Checks = Mapping[str, Callable[[Any], Outcome]]
NAMES = [
    name for part in (VaeChecks, TextChecks, ClipChecks, ExpertChecks, DiTChecks) for name in part.CHECKS
]
# What a model must be conditioned on for a check to say anything of it.
NEEDS = {
    "image.condition": "image",
    "image.embeds": "clip",
    "first_frame.latents": "first_frame",
    "first_frame.timesteps": "first_frame",
}


def selftest(
    model: str,
    *,
    clip: Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    only: Sequence[str] = (),
) -> Iterator[Result]:
    """Hold a model, as wands reads and trains it, against stock diffusers, one big part in memory at a time.

    The DiT is held in fp32, as training holds it. Under a launcher only the checks of context parallelism run, each rank
    with the whole DiT, and without one all others. Nothing is written and nothing is fetched.

    Args:
        model: folder of a diffusers pipeline, or a Hub id in this machine's cache.
        clip: video for the checks of the VAE; by default one is made up.
        device: "cuda" or "cpu"; by default a GPU if there is one.
        dtype: "fp32" or "bf16", of the computation of text encoder and DiT; by default bf16 on a GPU and fp32 elsewhere.
        only: names of checks, or what they begin with up to a dot; all by default.

    Yields:
        The result of each check, when it is known.

    Raises:
        WandsError: there is no such model or clip, or a part that a check needs is missing or damaged.
    """
    for name in only:
        if not any(_chosen(known, [name]) for known in NAMES):
            raise ConfigError(f"only={name} is no check; choose from {', '.join(NAMES)}.")
    setup = load_setup(model, clip, device, dtype)
    log.info("selftest of %s: %s on %s in %s", model, setup.variant.name, setup.device, setup.dtype)
    with exact_fp32(), quiet():
        yield from _run(setup, VaeChecks.CHECKS, lambda: VaeChecks(setup), only)
        yield from _run(setup, TextChecks.CHECKS, lambda: TextChecks(setup), only)
        yield from _run(setup, ClipChecks.CHECKS, lambda: ClipChecks(setup), only)
        yield from _run(setup, ExpertChecks.CHECKS, lambda: ExpertChecks(setup), only)
        for expert in setup.variant.experts:
            yield from _run_dit(setup, expert, only)


def _run_dit(setup: Setup, expert: Expert, only: Sequence[str]) -> Iterator[Result]:
    for result in _run(setup, DiTChecks.CHECKS, lambda: DiTChecks(setup, expert), only):
        yield replace(result, name=f"{result.name} {expert.subfolder}") if expert.name else result


def _run(setup: Setup, checks: Checks, load: Callable[[], Any], only: Sequence[str]) -> Iterator[Result]:
    """The checks of one part, which is loaded when the first of them needs it and dropped behind the last."""
    part, broken = None, ""
    for name, check in checks.items():
        if not _chosen(name, only):
            continue
        if reason := _obstacle(name, setup) or broken:
            yield Result(name, "skipped", reason)
            continue
        if part is None:
            try:
                part = load()
            except WandsError:
                raise
            except Exception as error:
                broken = "its part of the model does not run, see above"
                yield _failure(name, error)
                continue
        yield _result(name, check, part)
    del part
    free_memory()


def _result(name: str, check: Callable[[Any], Outcome], part: Any) -> Result:
    try:
        found = check(part)
    except Skipped as reason:
        return Result(name, "skipped", str(reason))
    except WandsError:
        raise
    except Exception as error:
        return _failure(name, error)
    if found.passed is None:
        return Result(name, "skipped", f"{found.number} (no bound: {found.bound})")
    return Result(name, "pass" if found.passed else "fail", f"{found.number} ({found.bound})")


def _failure(name: str, error: Exception) -> Result:
    """What a library, a GPU or its memory does not do is a finding: it is said, and the next check is run."""
    log.debug("%s", name, exc_info=error)
    return Result(name, "fail", " ".join(f"{type(error).__name__}: {error}".split())[:300])


def _chosen(name: str, only: Sequence[str]) -> bool:
    return not only or any(name == one or name.startswith(f"{one}.") for one in only)


def _obstacle(name: str, setup: Setup) -> str:
    """Why a check would say nothing of this model, or in this number of processes; empty if it would."""
    alone, variant = int(os.environ.get("WORLD_SIZE", "1")) == 1, setup.variant
    need = NEEDS.get(name)
    if need and need not in variant.conditions:
        return f"{variant.name} takes no {need}"
    if name.startswith("experts") and variant.boundary_ratio is None:
        return f"{variant.name} has one DiT"
    if name.startswith("cp.") and alone:
        return f"one process; torchrun --nproc-per-node 2 -m {setup.command} --only cp"
    if not (name.startswith("cp.") or alone):
        return f"several processes; {setup.command}"
    return ""

"""Ranks that differ, and what they say about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.runs import Hooked, run_training
from wands.errors import WandsError
from wands.plugin import Plugin
from wands.watch.rank_checks import (
    check_weights_agree,
)

Said = tuple[str, str, bool] | None


def caught(call: Callable[[], Any]) -> Said:
    """(class, message, agreed) of the WandsError that `call` raises; None when it raises none."""
    try:
        call()
    except WandsError as error:
        return type(error).__name__, str(error), error.agreed
    return None


def sentence(results: list[Any]) -> str:
    """The one message that all ranks raised; the class leads."""
    assert results[0] is not None
    assert all(said == results[0] for said in results)
    kind, text, agreed = results[0]
    assert agreed
    return f"{kind}: {text}"


def zero(stage: int, threshold: int = 100) -> dict[str, Any]:
    """Under ZeRO-3, parameters of at most `threshold` elements are kept whole on every rank."""
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": threshold}}


def nudge(values: torch.Tensor, place: int, by: int = 1) -> None:
    """Move one fp32 element by units in its last place, in memory."""
    values.view(torch.int32).view(-1)[place] += by


FOUR_BINS = ("train.bins_per_step=4",)


# ---- weights


def after_step(number: int, look: Callable[[Any], Any], found: list[Any]) -> Plugin:
    """A plugin that calls `look(engine)` right after the update of step `number` (0: after each)."""

    def after(step: int, engines: Mapping[str, Any]) -> None:
        if number in (0, step):
            [engine] = engines.values()
            found.append(look(engine))

    return Plugin(objective=Hooked(after=after))


def drift(model: Path, out: Path, ds: dict[str, Any], odd: int) -> list[Said]:
    """Check the weights after two steps, as they are and with bits changed on rank `odd`."""

    def look(engine: Any) -> list[Said]:
        rank = torch.distributed.get_rank()
        whole = [
            (name, parameter)
            for name, parameter in engine.module.named_parameters()
            if parameter.data.numel() > 1  # ZeRO-3 leaves nothing of what it has sharded
        ]
        first = whole[0]
        last = whole[-1]

        def check_with(*changes: tuple[torch.Tensor, int, int]) -> Said:
            if rank == odd:
                for values, place, by in changes:
                    nudge(values, place, by)
            said = caught(lambda: check_weights_agree(engine, engine.device))
            if rank == odd:
                for values, place, by in changes:
                    nudge(values, place, -by)
            return said

        return [
            first[0],
            last[0],
            check_with(),
            check_with((first[1].data, 0, 1)),
            check_with((last[1].data, last[1].numel() - 1, -1)),
            check_with((first[1].data, 0, 1), (first[1].data, 1, -1)),
            check_with(*((parameter.data, 0, 1) for _, parameter in whole)),
            len(whole),
            check_with(),
        ]

    found: list[Any] = []
    plugin = after_step(2, look, found)
    run_training(model, out, ("train.max_steps=2", *FOUR_BINS), ds, plugin=plugin)
    return found[0]

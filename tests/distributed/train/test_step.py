"""An optimizer step that fails leaves the engine as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.runs import engine_of, make_run, model_of
from tests.support.steps import zero
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.distributed.engine_protocol import EngineOptimizer, EngineSchedule, TrainingEngine
from wands.engine.engine import release_engine
from wands.train.step import train_step


def methods_after_an_error(model: Path, out: Path, stage: int) -> dict[str, bool]:
    """For each method of DeepSpeed's optimizer that a judged step replaces: is it the class's own after an error?"""
    run = make_run(model, out, (), zero(stage))
    rank, _, device = init_process_group()
    groups = ProcessGroups.build(run.grid(rank), device)
    engine = engine_of(run, model_of(run, groups, device))
    optimizer = engine.optimizer
    assert isinstance(engine, TrainingEngine)
    assert isinstance(optimizer, EngineOptimizer)
    assert isinstance(engine.lr_scheduler, EngineSchedule)
    plan = run.schedule.sampler.step_plan(0)
    [batches] = run.reader(groups.dims).micro_batches(plan)
    replaced: set[str] = set()

    def is_bad(loss: torch.Tensor, norm: float) -> bool:
        replaced.update(name for name in vars(optimizer) if callable(getattr(type(optimizer), name, None)))
        raise ArithmeticError("no judgement")

    denominator = run.schedule.denominator(plan)
    with pytest.raises(ArithmeticError, match="no judgement"):
        train_step(
            engine,
            batches,
            run.objective,
            groups=groups,
            device=device,
            denominator=denominator,
            is_bad=is_bad,
        )
    own = {name: getattr(optimizer, name).__func__ is getattr(type(optimizer), name) for name in replaced}
    release_engine(engine)
    return own


@pytest.mark.parametrize("stage", [2, 3])
def test_an_error_leaves_the_optimizer_as_it_was(stage: int, tiny_pipeline: Path, tmp_path: Path, run_world):
    name = "_overflow_check_and_loss_scale_update" if stage == 3 else "scaled_global_norm"
    assert run_world(2, methods_after_an_error, tiny_pipeline, tmp_path, stage) == [{name: True}] * 2

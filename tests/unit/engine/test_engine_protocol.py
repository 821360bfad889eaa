"""DeepSpeed's engine has the methods that `TrainingEngine` names. Attributes are compared with a live engine in test_step.py."""

from __future__ import annotations

import inspect

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

from wands.distributed.engine_protocol import TrainingEngine

METHODS = [
    name for name, value in vars(TrainingEngine).items() if inspect.isfunction(value) and name[0] != "_"
]


@pytest.mark.parametrize("name", METHODS)
def test_the_engine_takes_what_the_protocol_passes(name: str):
    _, *wanted = inspect.signature(getattr(TrainingEngine, name)).parameters.values()
    passed = {one.name: None for one in wanted if one.kind is one.KEYWORD_ONLY}
    positional = [None for one in wanted if one.kind is not one.KEYWORD_ONLY]
    method = getattr(DeepSpeedEngine, name)
    # A decorator of DeepSpeed hides the signature of the function `func` that it calls.
    method = inspect.getclosurevars(method).nonlocals.get("func", method)
    inspect.signature(method).bind(None, *positional, **passed)


def test_no_method_is_left_out():
    assert {"backward", "step", "zero_grad", "zero_optimization_stage", "destroy"} <= {*METHODS}

"""Whether the blocks of the model are compiled."""

from __future__ import annotations

import logging

import pytest
import torch

from wands.engine.engine import use_compile
from wands.errors import ConfigError
from wands.model import fused

CPU = torch.device("cpu")
GPU = torch.device("cuda")


@pytest.mark.parametrize("works", [True, False])
def test_auto_compiles_on_a_gpu_where_the_compiler_works(
    works: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def compile(*_: object) -> None:
        if not works:
            raise RuntimeError("Python.h: no such file\nmore")

    monkeypatch.setattr(fused, "norm_rotate", compile)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)  # there may be no GPU here
    with caplog.at_level(logging.WARNING):
        assert use_compile("auto", GPU) == works
    assert ("does not work on this machine (Python.h: no such file" in caplog.text) != works
    assert not use_compile("auto", CPU)
    assert not use_compile(False, GPU)
    if works:
        assert use_compile(True, CPU)
        return
    with pytest.raises(ConfigError, match=r"model\.compile=true: torch\.compile does not work"):
        use_compile(True, CPU)

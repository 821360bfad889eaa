"""Every independent problem of a run is in one report."""

from __future__ import annotations

from pathlib import Path

import pytest

from wands.errors import ConfigError, WandsError
from wands.train.prepare import load_run


def problems(recipe: str | None, deepspeed: Path | None, *overrides: str, world_size: int = 1) -> list[str]:
    with pytest.raises(WandsError) as caught:
        load_run(
            recipe,
            deepspeed,
            overrides,
            world_size=world_size,
            device_type="cpu",
            encoders=lambda path: {},
        )
    assert str(caught.value).count("\n  - ") in (0, len(caught.value.problems))
    return list(caught.value.problems)


def test_four_independent_problems_are_reported_together(tmp_path: Path):
    (tmp_path / "broken.json").write_text("{")
    found = problems(
        None,
        tmp_path / "broken.json",
        "train.max_stpes=4",
        f"model.path={tmp_path / 'no-model'}",
        f"data.cache={tmp_path / 'no-cache'}",
        f"output_dir={tmp_path / 'run'}",
    )
    assert len(found) == 4
    assert found[0].startswith("train.max_stpes is not a key of the recipe; did you mean train.max_steps?")
    assert "broken.json cannot be read (" in found[1]
    assert "no-model" in found[2]
    assert "no-cache" in found[3]


def test_long_clips_in_fp32_on_a_gpu_are_refused(tiny_pipeline: Path, tmp_path: Path):
    settings = [f"model.path={tiny_pipeline}", f"output_dir={tmp_path}", "packing.max_tokens=5000"]

    def load(tokens: int, compute: str, device_type: str) -> None:
        data = f"data.mock={{num_samples: 1, shapes: [[1,2,{2 * tokens}]]}}"
        overrides = (*settings, data, f"precision.compute={compute}")
        load_run(None, None, overrides, world_size=1, device_type=device_type, encoders=lambda path: {})

    load(4096, "fp32", "cuda")
    load(4097, "bf16", "cuda")
    load(4097, "fp32", "cpu")
    with pytest.raises(
        ConfigError, match=r"^precision\.compute=fp32: on a GPU, .* clip has 4,097\. Set precision"
    ):
        load(4097, "fp32", "cuda")


def test_a_json_is_checked_although_the_recipe_is_wrong(tmp_path: Path):
    (tmp_path / "ds.json").write_text('{"zero_optimisation": {"stage": 2}, "gradient_clipping": "much"}')
    found = problems(None, tmp_path / "ds.json", "optim.lr=-1", f"output_dir={tmp_path}")
    assert "optim.lr=-1" in found[0]
    assert "zero_optimisation is not a key of a DeepSpeed config" in found[1]
    assert 'gradient_clipping="much" must be a number' in found[2]
    assert found[3].startswith("model.path is not set")


def test_a_check_that_needs_a_failed_one_is_skipped(tiny_pipeline: Path, tmp_path: Path):
    """A wrong cp_size leaves no dp_size to compare bins_per_step with."""
    mock = "data.mock={num_samples: 8, shapes: [[1,4,4]]}"
    found = problems(
        None,
        None,
        f"model.path={tiny_pipeline}",
        mock,
        "parallel.cp_size=3",
        "train.bins_per_step=5",
        f"output_dir={tmp_path / 'run'}",
        world_size=4,
    )
    assert len(found) == 1
    assert "parallel.cp_size=3" in found[0]


def test_the_class_is_the_first_problems(tmp_path: Path):
    with pytest.raises(ConfigError, match="is neither a file nor"):
        load_run("nowhere.yaml", None, (), world_size=1, device_type="cpu", encoders=lambda path: {})

"""The training step of every variant in its published width on CUDA tensors without numbers: no tensor is on the wrong device,
no kernel gets what it does not take, and the host never waits for the GPU inside a step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_cuda import build
from wands.engine.attention_choice import LENGTHS
from wands.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
BF16 = "precision.compute=bf16"
FP32 = "precision.compute=fp32"
T2V = "wan2.1-t2v-14b"
I2V = "wan2.1-i2v-14b"
TI2V = "wan2.2-ti2v-5b"
SMALL = [[3, 4, 4], [2, 6, 4], [1, 4, 4]]
LARGE = [[21, 45, 80], [13, 30, 52], [1, 30, 52]]  # 81 frames of 720p, 49 and one of 480p

SETTINGS = {
    "bf16": (BF16, "model.checkpointing=none"),
    "fp32": (FP32, "model.checkpointing=none"),
    "recomputed": (BF16, "model.checkpointing=full"),
    "attention kept": (BF16, "model.checkpointing=selective", "loss.reduction=token"),
    "offloaded": (
        BF16,
        "model.checkpointing=offload",
        "model.offloaded_tensors=[block_input, attn_output, value_proj, ffn_activation]",
    ),
    "dropout": (BF16, "model.dropout=0.1", "flow.weighting=bell"),
    "lora": (BF16, "lora={rank: 4, targets: attention+ffn, dropout: 0.1}"),
}
SWAPPED = (BF16, "lora={rank: 4}", "model.checkpointing=full", "model.swap_blocks=2")
INSIDE = {"one rank in bf16": (1, 1), "one rank in fp32": (1, 1), "ring 2 x ulysses 2 in bf16": (2, 2)}
PLAIN = "attention kept"
CASES = {
    **{f"{name}, {I2V}": (I2V, SETTINGS[name], SMALL) for name in SETTINGS},
    "swapped": ("wan2.1-t2v-1.3b", SWAPPED, SMALL),
    **{f"{PLAIN}, {variant}": (variant, SETTINGS[PLAIN], SMALL) for variant in VARIANTS},
    **{f"{name}, {TI2V}": (TI2V, SETTINGS[name], SMALL) for name in ("fp32", "dropout")},
    **{f"large, {variant}": (variant, SETTINGS[PLAIN], LARGE) for variant in (T2V, TI2V)},
}
MISTAKES = {
    "a tensor of the host": "FakeTensorDeviceMismatchError",
    "a number asked for": "_local_scalar_dense",
    "a choice by value": "DynamicOutputShapeException",
    "a copy to the host": "copies to the CPU",
    "a copy that waits": "copies to the GPU when",
    "a pageable copy": "from pageable memory",
}
KERNELS = ["torch", "cudnn"]
VAE = {"base_dim": 8, "z_dim": 16, "num_res_blocks": 1}
VAES = {
    "vae of wan2.1": VAE,
    "vae of wan2.2": VAE
    | {
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
    },
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def step_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """`step_of(name)`: the result of a case. All cases run in one process, when the first of them is needed."""
    library = build(tmp_path_factory.mktemp("fake_cuda"))
    cases = {
        name: {"variant": variant, "settings": settings, "grids": grids}
        for name, (variant, settings, grids) in CASES.items()
    }
    cases |= {
        name: {"variant": T2V, "settings": SETTINGS["bf16"], "grids": SMALL, "mistake": name}
        for name in MISTAKES
    }
    cases |= {
        name: {"variant": T2V, "settings": SETTINGS[name.split()[-1]], "grids": SMALL, "cp": cp}
        for name, cp in INSIDE.items()
    }
    cases["measure"] = {"kernels": KERNELS}
    cases |= {name: {"vae": config} for name, config in VAES.items()}
    command = [sys.executable, "-m", "tests.support.fake_cuda_steps", str(library)]

    @cache
    def run() -> dict[str, Any]:
        done = subprocess.run(command, cwd=ROOT, input=json.dumps(cases), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return lambda name: run()[name]


@pytest.mark.parametrize("name", [*CASES, *INSIDE])
def test_a_step_stays_on_the_gpu(name: str, step_of: Callable[[str], dict[str, Any]]):
    found = step_of(name)
    assert "error" not in found, found["error"]
    assert found["gradients"] > 20
    assert found["without gradient"] == []
    assert found["devices"] == ["cuda"]
    assert found["dtypes"] == ["torch.float32"]
    assert found["given to attention"] == ["torch.float32" if "fp32" in name else "torch.bfloat16"]
    assert found["steps"] == 1
    # Nothing is read in the step. Whoever uses the norm and the clips' losses reads them, here number by number.
    assert found["reads"] == found["losses"] == 1 + 2 * 3


@pytest.mark.parametrize("name", MISTAKES)
def test_a_step_that_leaves_it_is_found_out(name: str, step_of: Callable[[str], dict[str, Any]]):
    assert MISTAKES[name] in step_of(name)["error"]


def test_kernels_are_measured_at_every_length(step_of: Callable[[str], dict[str, Any]]):
    found = step_of("measure")
    assert "error" not in found, found["error"]
    assert found["times"] == {kernel: {str(length): 1.0 for length in LENGTHS} for kernel in KERNELS}
    # 16 large matmuls are queued before each measurement, so that the GPU is behind the host.
    measurements = len(KERNELS) * len(LENGTHS)
    assert found["queued"] == [16 * number for number in range(1, measurements + 1) for _ in range(2)]


@pytest.mark.parametrize("name", VAES)
def test_windows_are_encoded_on_the_gpu(name: str, step_of: Callable[[str], dict[str, Any]]):
    """Frames reach the GPU as bytes, without a wait; convolutions have the layout that cuDNN's fastest kernels take."""
    found = step_of(name)
    assert "error" not in found, found["error"]
    assert found["given"] == ["torch.uint8 cuda"]
    shape = [16, 3, 8, 12] if name == "vae of wan2.1" else [16, 3, 4, 6]
    assert found["latents"] == [[f"cuda {shape}"] * 2] * 2
    assert found["not channels last"] == 0
    assert found["convolutions"] > 10

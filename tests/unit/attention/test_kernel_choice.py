"""The choice of an attention kernel, and what it says."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.support.kernel_cases import BF16, Wrong
from wands.attention.kernels import registry as backends
from wands.attention.kernels.contract import REFERENCE
from wands.attention.kernels.flash import FlashBackend
from wands.attention.kernels.registry import get_backend
from wands.attention.kernels.self_check import KernelError, check_backend
from wands.attention.varlen import Backend, choose_backend
from wands.errors import ConfigError


class FakeGpu:
    """A GPU that runs nothing: its compute capability, the packages installed, what the check says of each kernel."""

    def __init__(self) -> None:
        self.capability = (9, 0)
        self.installed: set[str] = set()
        self.faults: dict[str, Exception] = {}
        self.checked: list[tuple[str, str, torch.dtype, int]] = []

    def check(self, backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
        self.checked.append((backend.name, str(device), dtype, head_dim))
        if backend.name in self.faults:
            raise self.faults[backend.name]
        return 1e-3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    fake = FakeGpu()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: fake.capability)
    monkeypatch.setattr(backends, "_installed", lambda package: package in fake.installed)
    monkeypatch.setattr(backends, "check_backend", fake.check)
    for cached in (backends._fault, backends._log_once):
        cached.cache_clear()
    yield fake
    backends._fault.cache_clear()


ALL = {"flash-attn", "flash-attn-3", "flash-attn-4"}


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "installed", "expected"),
    [
        ("cpu", torch.float32, (9, 0), set(), "cpu"),
        ("cpu", BF16, (9, 0), ALL, "cpu"),
        ("cuda", torch.float32, (9, 0), ALL, "reference"),
        ("cuda", BF16, (9, 0), set(), "cudnn"),
        ("cuda", torch.float16, (9, 0), {"flash-attn"}, "cudnn"),
        ("cuda", BF16, (9, 0), {"flash-attn", "flash-attn-3"}, "flash3"),
        ("cuda", BF16, (9, 0), {"flash-attn-4"}, "flash4"),
        ("cuda", BF16, (9, 0), ALL, "flash3"),
        ("cuda:1", BF16, (10, 0), ALL, "flash4"),
        ("cuda", BF16, (10, 0), {"flash-attn-3"}, "cudnn"),
        ("cuda", BF16, (8, 0), ALL, "flash2"),
        ("cuda", BF16, (8, 0), set(), "torch"),
        ("cuda", BF16, (13, 0), ALL, "flash2"),
        ("cuda", BF16, (7, 5), ALL, "reference"),
        ("mps", BF16, (9, 0), ALL, "reference"),
    ],
)
def test_auto_names_its_choice(device, dtype, capability, installed, expected, gpu, caplog):
    gpu.capability = capability
    gpu.installed = installed
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert choose_backend("auto", device, dtype).name == expected
    assert caplog.text.count(f"attention.backend=auto: {expected} ({torch.device(device).type} in") == 1
    checked = {"cudnn": "cudnn:64:torch"}.get(expected, expected)
    assert gpu.checked == ([] if expected in ("cpu", "reference") else [(checked, device, dtype, 128)])
    assert ("memory grows with the square of a clip's tokens" in caplog.text) is (expected == "reference")


def test_auto_goes_on_to_the_next_kernel_and_says_why(gpu, caplog):
    gpu.installed = ALL
    gpu.faults = {
        "cudnn:64:torch": RuntimeError("No valid execution plans built."),
        "flash4": TypeError("_flash_attn_fwd() got an unexpected keyword argument 'return_lse'\nand more"),
        "flash3": ImportError("libcudart.so.12: cannot open shared object file"),
        "flash2": KernelError("dk summed over two blocks is off by 0.9, the largest allowed error is 0.02"),
    }
    for _ in range(2):
        assert choose_backend("auto", "cuda", BF16, head_dim=64).name == "torch"
    loss = (
        ". Without cudnn, flash3 and flash4, attention on a Hopper GPU is expected to take 1.7 times as long."
    )
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "attention.backend=auto skips flash3, which fails the check of its results "
        f"(ImportError: libcudart.so.12: cannot open shared object file){loss}",
        "attention.backend=auto skips flash4, which fails the check of its results "
        f"(TypeError: _flash_attn_fwd() got an unexpected keyword argument 'return_lse'){loss}",
        "attention.backend=auto skips cudnn, which fails the check of its results "
        f"(RuntimeError: No valid execution plans built.){loss}",
        "attention.backend=auto skips flash2, which fails the check of its results "
        f"(KernelError: dk summed over two blocks is off by 0.9, the largest allowed error is 0.02){loss}",
    ]
    order = ["flash3", "flash4", "cudnn:64:torch", "flash2", "torch"]
    assert [name for name, *_ in gpu.checked] == order  # once each
    gpu.faults["torch"] = RuntimeError("")
    assert choose_backend("auto", "cuda", BF16).name == "reference"  # another head dim is another check
    assert gpu.checked[5:] == [(name, "cuda", BF16, 128) for name in order]


def test_a_named_kernel_that_is_wrong_is_refused_with_the_numbers(gpu):
    gpu.installed = ALL
    gpu.faults = {"flash3": KernelError("lse is off by 2.1, the largest allowed error is 0.002")}
    with pytest.raises(
        ConfigError,
        match=r"flash3 fails on cuda in bfloat16: .*lse is off by 2.1, .* is 0.002",
    ):
        choose_backend("flash3", "cuda", BF16)
    assert choose_backend("flash4", "cuda", BF16).name == "flash4"


@pytest.mark.parametrize("mistake", ["crashes", "backward recomputes lse"])
def test_the_real_check_stands_before_the_choice(mistake: str, gpu, monkeypatch):
    """On the CPU in the GPU's place: the check's own arithmetic, not a stand-in for it."""
    monkeypatch.setattr(
        backends, "check_backend", lambda backend, device, *rest: check_backend(backend, "cpu", *rest)
    )
    right = REFERENCE
    wrong = Wrong(mistake)
    monkeypatch.setitem(
        backends.BACKENDS, "torch", FlashBackend("torch", right.forward, right.backward, min_major=8)
    )
    monkeypatch.setitem(
        backends.BACKENDS, "flash4", FlashBackend("flash4", wrong.forward, wrong.backward, min_major=8)
    )
    assert choose_backend("auto", "cuda", BF16, head_dim=16).name == "torch"
    with pytest.raises(ConfigError, match=r"flash4 fails on cuda in bfloat16"):
        choose_backend("flash4", "cuda", BF16, head_dim=16)


@pytest.mark.parametrize(
    ("name", "device", "dtype", "capability", "says"),
    [
        ("cpu", "cuda", BF16, (9, 0), "attention.backend=cpu cannot run on cuda in bfloat16"),
        ("torch", "cpu", BF16, (9, 0), "attention.backend=torch cannot run on cpu in bfloat16"),
        ("torch", "cuda", torch.float32, (9, 0), "attention.backend=torch cannot run on cuda in float32"),
        (
            "flash2",
            "cuda",
            BF16,
            (9, 0),
            r"flash-attn is not installed. Run pip install -e '.\[flash2\]' in the folder of wands, or use",
        ),
        (
            "flash3",
            "cuda",
            BF16,
            (9, 0),
            r"flash-attn-3 is not installed. Run pip install flash-attn-3 --index-url https://download.pytorch",
        ),
        (
            "flash4",
            "cuda",
            BF16,
            (9, 0),
            r"flash-attn-4 is not installed. Run pip install -e '.\[flash4\]' in the folder of wands, or use",
        ),
        ("torch", "cuda", BF16, (7, 5), r"the GPU has compute capability 7.5, the kernel needs 8.0 or newer"),
        (
            "flash3",
            "cuda",
            BF16,
            (10, 0),
            r"the GPU has compute capability 10.0, the kernel needs 9.0 to 9.x",
        ),
        ("flash4", "cuda", BF16, (8, 0), r"the GPU has compute capability 8.0, the kernel needs 9.0 to 12.x"),
    ],
)
def test_impossible_choices_are_refused(name, device, dtype, capability, says, gpu):
    gpu.capability = capability
    with pytest.raises(ConfigError, match=says):
        choose_backend(name, device, dtype)
    assert gpu.checked == []


def test_reference_runs_anywhere_unchecked(gpu):
    assert choose_backend("reference", "cuda", torch.float32).name == "reference"
    assert gpu.checked == []


def test_an_installed_package_is_known_by_its_distribution(monkeypatch, tmp_path):
    folder = tmp_path / "flash_attn_3-3.0.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn_3\nVersion: 3.0.0\n")
    assert not backends._installed("flash-attn-3")
    monkeypatch.syspath_prepend(tmp_path)
    assert backends._installed("flash-attn-3")
    assert not backends._installed("flash-attn-4")


def test_the_config_knows_every_backend():
    from wands.config.recipe import AttentionConfig

    for name in ("auto", *backends.BACKENDS):
        assert AttentionConfig(backend=name).backend == name
    assert all(get_backend(name).name == name for name in backends.BACKENDS)

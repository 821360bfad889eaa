"""Host memory that loading a model into ZeRO-3 takes, summed over the ranks of a node."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from wands.distributed.bootstrap import init_process_group
from wands.model.files.loading import load_transformer
from wands.model.files.name_maps import DIT
from wands.model.weight_dtypes import WeightDtypePolicy

# An eighth of the 14B model's widths, half its layers: the largest tensor is 2 % of the whole, there 1 %.
SCALED = {
    "num_attention_heads": 5,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 512,
    "freq_dim": 256,
    "ffn_dim": 1728,
    "num_layers": 20,
}


def write_scaled(folder: Path, official: bool = False) -> int:
    """A DiT of random weights, diffusers' or official layout; returns the bytes of its weights."""
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(**SCALED)
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    if official:
        folder.mkdir()
        save_file(
            {DIT.to_official(n): v for n, v in state.items()}, folder / "diffusion_pytorch_model.safetensors"
        )
        said = {"_class_name": "WanModel", "model_type": "t2v", "num_heads": 5}
        (folder / "config.json").write_text(json.dumps(said))
    else:
        (folder / "transformer").mkdir(parents=True)
        save_file(state, folder / "transformer" / "diffusion_pytorch_model.safetensors")
        model.save_config(folder / "transformer")
    return sum(value.numel() * 4 for value in state.values())


def read_pss(pids: list[int]) -> int:
    """Bytes of the processes, what they share counted once; mapped files count."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def peak_growth(work: Callable[[], Any]) -> tuple[int, int]:
    """Run `work` on every rank; rank 0 returns by how much the ranks' memory grew at most, and the number of samples."""
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    peak = 0
    count = 0
    done = threading.Event()
    before = read_pss(pids)

    def watch() -> None:
        nonlocal peak, count
        while not done.is_set():
            peak = max(peak, read_pss(pids) - before)
            count = count + 1
            time.sleep(0.01)

    dist.barrier()
    watcher = threading.Thread(target=watch)
    if dist.get_rank() == 0:
        watcher.start()
    kept = work()
    dist.barrier()
    done.set()
    if dist.get_rank() == 0:
        watcher.join()
    del kept
    return peak, count


def measure_load(
    small: str,
    folder: str,
    storage: WeightDtypePolicy = WeightDtypePolicy(),  # noqa: B008, frozen
) -> tuple[int, int]:
    """On one rank: what loading `folder` into ZeRO-3 takes, after `small` has been loaded once to warm up."""
    import deepspeed

    init_process_group()
    zero3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}

    def load(path: str) -> Any:
        context = deepspeed.zero.Init(config_dict_or_path=zero3)
        return load_transformer(path, zero_init_context=context, storage=storage)

    load(small)
    return peak_growth(lambda: load(folder))

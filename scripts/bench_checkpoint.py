"""Measure how long a checkpoint takes to save and load, compared with DeepSpeed's pickles, in one run.

    torchrun --nproc-per-node 2 scripts/bench_checkpoint.py                     # some 200 million parameters on a CPU
    torchrun --nproc-per-node 8 scripts/bench_checkpoint.py --layers 30 --stage 3

wands          each rank writes its part as safetensors, and hashes it while it is written
no hash        the files of wands, written without a hash
DeepSpeed      engine.save_checkpoint and engine.load_checkpoint

The last line of each ZeRO stage measures `checkpoint.asynchronous`, which copies the state to host memory and writes the copy in
a thread:

plain copy     time to copy each tensor of the state once, to host memory that was allocated before
stall          time that the training waits while wands lists the tensors of the state and copies them to host memory
save           time to write the files without a thread, while the training waits
step           time of a training step, without a thread and while the thread writes

All files are synced to the disk, and loading reads them from the page cache. Loading with wands includes the comparison of
the hashes. "wands", "no hash" and "DeepSpeed" alternate (a, b, c, a, b, c, ...), so that a busy machine slows down all
three. For the column "ratio", each time is divided by DeepSpeed's time in the same round. The column contains the median over
all rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from wands.checkpoint.buffers import HostBuffers, TensorFile
from wands.checkpoint.engine_state import engine_tensors, load_engine
from wands.checkpoint.fragment_files import FragmentFiles
from wands.distributed.bootstrap import gather_objects, init_process_group
from wands.files import sync
from wands.model.files import tensor_files
from wands.model.files.tensor_files import hash_file, write_safetensors


def build_engine(layers: int, width: int, stage: int, device: torch.device) -> Any:
    """Build a DeepSpeed engine for a stack of linear layers, and train one step, which creates the states of AdamW.

    Args:
        layers: number of linear layers.
        width: number of inputs and outputs of each layer.
        stage: ZeRO stage.
        device: device of the random input of the step.
    """
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-8, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    loss = engine(torch.randn(4, width, device=device)).square().mean()
    engine.backward(loss)
    engine.step()
    return engine


def save_wands(engine: Any, folder: Path, rank: int, stage: int) -> None:
    if rank == 0 or stage:
        tensors, values = engine_tensors(engine)
        write_safetensors(
            folder / f"state_rank_{rank}.safetensors", tensors, {"wands_state": json.dumps(values)}
        )


def load_wands(engine: Any, folder: Path, rank: int, stage: int) -> None:
    hash_file(folder / f"state_rank_{rank if stage else 0}.safetensors")
    load_engine(engine, FragmentFiles(folder, "state"))


def timed(action: Callable[[], Any], folder: Path, rank: int, synced: bool) -> float:
    dist.barrier()
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        action()
    dist.barrier()
    if synced and rank == 0:
        for path in folder.rglob("*"):
            sync(path)
    dist.barrier()
    return time.perf_counter() - start


def measure(
    engine: Any, root: Path, rank: int, stage: int, rounds: int
) -> dict[str, list[tuple[float, float, int]]]:
    """Measure saving and loading with "wands", "no hash" and "DeepSpeed".

    Returns:
        Dictionary that maps each of these names to a list. The list contains, for each round, (seconds to save, seconds to
        load, size of the files in bytes).
    """

    class NoHash:
        def update(self, data: Any) -> None:
            pass

        def hexdigest(self) -> str:
            return ""

    def save_unhashed(folder: Path) -> None:
        with mock.patch.object(tensor_files, "xxhash", SimpleNamespace(xxh3_128=NoHash)):
            save_wands(engine, folder, rank, stage)

    variants: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
        "wands": (
            lambda folder: save_wands(engine, folder, rank, stage),
            lambda folder: load_wands(engine, folder, rank, stage),
        ),
        "no hash": (save_unhashed, lambda folder: None),
        "DeepSpeed": (
            lambda folder: engine.save_checkpoint(str(folder), tag="step", save_latest=False),
            lambda folder: engine.load_checkpoint(str(folder), tag="step"),
        ),
    }
    results: dict[str, list[tuple[float, float, int]]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, (save, load) in variants.items():
            folder = root / name
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            saved = timed(lambda save=save, folder=folder: save(folder), folder, rank, True)  # type: ignore[misc]
            loaded = timed(lambda load=load, folder=folder: load(folder), folder, rank, False)  # type: ignore[misc]
            num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            if number:  # the first round is a warm-up
                results[name].append((saved, loaded, num_bytes))
    return results


def measure_async(
    engine: Any, root: Path, rank: int, stage: int, rounds: int, device: torch.device
) -> dict[str, float]:
    """Measure asynchronous checkpoints.

    Returns:
        Median of each measurement over the rounds: times in seconds, two ratios of times, and the number of training steps
        while a checkpoint is written.
    """
    buffers = HostBuffers()
    thread = ThreadPoolExecutor(1)
    batch = torch.randn(64, engine.module[0].in_features, device=device)

    def own_files() -> list[TensorFile]:
        if rank and not stage:
            return []
        tensors, values = engine_tensors(engine)
        return [TensorFile(f"state_rank_{rank}.safetensors", tensors, {"wands_state": json.dumps(values)})]

    plain = [torch.empty_like(tensor.read(), device="cpu") for file in own_files() for tensor in file.tensors]

    def copy_plainly() -> None:
        for target, tensor in zip(plain, (t for file in own_files() for t in file.tensors), strict=True):
            target.copy_(tensor.read())

    def write(files: list[TensorFile]) -> None:
        for name, tensors, metadata in files:
            write_safetensors(root / name, tensors, metadata)
            sync(root / name)

    def step() -> float:
        start = time.perf_counter()
        engine.backward(engine(batch).square().mean())
        engine.step()
        return time.perf_counter() - start

    rows: list[dict[str, float]] = []
    for _ in range(rounds + 1):
        row = {
            "plain copy": timed(copy_plainly, root, rank, False),
            "save": timed(lambda: write(own_files()), root, rank, False),
            "step": statistics.median(step() for _ in range(5)),
        }
        copies: list[TensorFile] = []
        row["stall"] = timed(
            lambda copies=copies: copies.extend(buffers.copy_files(own_files())), root, rank, False
        )  # type: ignore[misc]
        work = thread.submit(write, copies)
        during = []
        while not all(gather_objects(work.done())):
            during.append(step())
        row["step while writing"] = statistics.median(during or [row["step"]])
        row["steps"] = len(during)
        rows.append(row)
    rows = rows[1:]  # the first round allocates
    result = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    result["stall / plain copy"] = statistics.median(row["stall"] / row["plain copy"] for row in rows)
    result["slower"] = statistics.median(row["step while writing"] / row["step"] for row in rows)
    thread.shutdown()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=48, help="number of linear layers")
    parser.add_argument("--width", type=int, default=2048, help="rows and columns of each layer")
    parser.add_argument("--stage", type=int, nargs="+", default=[0, 2, 3], help="ZeRO stages")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument(
        "--out", type=Path, help="folder on the disk to measure [default: a temporary folder]"
    )
    args = parser.parse_args()
    logging.disable(logging.INFO)
    rank, world_size, device = init_process_group()
    names: list[Any] = [tempfile.mkdtemp(dir=args.out)] if rank == 0 else [None]
    dist.broadcast_object_list(names)
    root = Path(names[0])
    if rank == 0:
        print(f"torch {torch.__version__}, {world_size} processes, {args.layers} x {args.width}^2 parameters")
        print(f"{'ZeRO':>4}  {'variant':<10} {'GB':>6} {'save s':>7} {'ratio':>6} {'load s':>7} {'ratio':>6}")
    for stage in args.stage:
        engine = build_engine(args.layers, args.width, stage, device)
        results = measure(engine, root, rank, stage, args.rounds)
        in_background = measure_async(engine, root, rank, stage, args.rounds, device)
        engine.destroy()
        if rank == 0:
            for name, rows in results.items():
                saves, loads, sizes = zip(*rows, strict=True)
                others = results["DeepSpeed"]
                ratios = [
                    statistics.median(row[i] / other[i] for row, other in zip(rows, others, strict=True))
                    for i in (0, 1)
                ]
                loaded = f"{statistics.median(loads):7.2f} {ratios[1]:6.2f}" if name != "no hash" else ""
                print(
                    f"{stage:>4}  {name:<10} {sizes[0] / 1e9:6.2f} {statistics.median(saves):7.2f} {ratios[0]:6.2f} {loaded}"
                )
            print(
                f"{stage:>4}  asynchronous: stall {in_background['stall']:.3f} s, "
                f"{in_background['stall / plain copy']:.2f} x plain copy ({in_background['plain copy']:.3f} s); "
                f"save {in_background['save']:.2f} s; step {in_background['step']:.3f} s, "
                f"{in_background['slower']:.2f} x while writing ({in_background['steps']:.0f} steps)"
            )
    if rank == 0:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()

"""Run one stage of the GPU measurements of scripts/gpu.sh.

    python scripts/gpu_stages.py attention --device cuda --out gpu_out
    python scripts/gpu_stages.py block --device cpu --out /tmp/out --set model.checkpointing=full    # a test run in seconds

A stage has several parts. After each part, the script writes all results of the stage to STAGE.json and STAGE.txt in the folder
--out. --set changes a key of the recipe. 1.3B and 14B are the text-to-video models of Wan 2.1. Stages:

attention   copy and matmul speed, attention kernels forward and backward, cross-attention backward, copies to the device
block       one transformer block of 1.3B and of 14B: time, operators, bytes and kernels, for one clip and for many clips
step        a training step of 1.3B and of a LoRA of 14B through `wands profile`, also in fp8 and with swapped blocks: time, MFU,
            and the peak of memory next to the estimate
tests       the tests marked gpu
memory      bench_memory.py at the widths of 1.3B and 14B
infer       time of each part of `wands infer` with random weights of 1.3B and of its VAE
encode      the VAE of Wan 2.1 and UMT5-XXL with random weights: clips and captions per second
compare     bench_peers.py: wands, and diffusers + accelerate + DeepSpeed

No stage needs model files or a network. Only `tests` uses clips. A part that fails is recorded with its error, and the next part
starts. On a CPU, all sizes are tiny: the numbers show only that every part runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bench_memory
import bench_peers
import bench_step
import torch
from bench_record import Results, Rows
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wands.attention.kernels.registry import BACKENDS, Backend, choose_backend
from wands.attention.packed import Segments
from wands.attention.varlen import PaddedSegments, padded_attention
from wands.errors import ConfigError
from wands.model.fp8 import MIN_CAPABILITY, fp8_matmul
from wands.variants import TEXT_LEN, VARIANTS

ROOT = Path(__file__).resolve().parents[1]
HEAD_DIM = 128
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
HEADS = {"cpu": (2,), "cuda": (12, 40)}
CLIPS = {  # tokens of the clips of a bin
    "cpu": ((96,), (16, 24)),
    "cuda": ((32760,), (75600,), (1560,) * 21),
}
COPY_BYTES = {"cpu": (2**16,), "cuda": (32760 * 64 * 4, 388 * 10**6)}  # tokens of a clip, pixels of a clip
VARIANT_NAMES = ("wan2.1-t2v-1.3b", "wan2.1-t2v-14b")
# Latent shapes of the clips of a bin.
PACKS = {
    "cpu": {"1 clip": ((3, 8, 8),), "many clips": ((1, 8, 8),) * 3},
    "cuda": {"1 clip": ((21, 60, 104),), "many clips": ((1, 60, 104),) * 21},
}
STEP_PACKS = {
    "cpu": {"3 clips": ((1, 4, 4),) * 3},
    "cuda": {
        "1 clip": ((21, 60, 104),),
        "8 clips": ((3, 52, 104),) * 8,
        "21 clips": ((1, 60, 104),) * 21,
    },
}
LORA = ("lora.rank=32", "precision={compute: bf16, weights: bf16}")
STEP_RUNS = {  # name of a part: model, recipe overrides
    "wan2.1-t2v-1.3b": ("wan2.1-t2v-1.3b", ()),
    "wan2.1-t2v-14b LoRA": ("wan2.1-t2v-14b", LORA),
    "wan2.1-t2v-1.3b fp8": ("wan2.1-t2v-1.3b", ("precision={compute: bf16, linears: fp8}",)),
    "wan2.1-t2v-14b LoRA fp8 base": ("wan2.1-t2v-14b", (*LORA, "lora.quantize=fp8")),
    "wan2.1-t2v-14b LoRA swapped": (
        "wan2.1-t2v-14b",
        (*LORA, "model.checkpointing=full", "model.swap_blocks=40"),
    ),
}
ENCODED = {  # pixels of a clip, text tokens of a caption, captions of a batch
    "cpu": ((3, 5, 16, 16), 8, 2),
    "cuda": ((3, 81, 480, 832), 512, 16),
}
TINY = {"num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 96, "text_dim": 32}
TEXT_TOKENS = 100
PRODUCTS = ("mm", "linear", "conv", "attention", "ring")  # operators whose bytes are not counted
FREE = ("prim", "sym_", "is_contiguous", "detach", "empty")  # operators that move no bytes
TESTS = ("unit/attention", "unit/model", "distributed", "gpu", "launch")
MEMORY = {
    "cpu": {"tiny": {"heads": 1, "layers": 5, "ffn_dim": 64, "tokens": 48, "compute": "fp32"}},
    "cuda": {
        "1.3B": bench_memory.SIZES["cuda"],
        "14B": {**bench_memory.SIZES["cuda"], "heads": 40, "layers": 4, "ffn_dim": 13824},
    },
}
VIDEO = {  # options of `wands infer`
    "cpu": {"height": (16,), "width": (16,), "num_frames": (5,), "num_inference_steps": (2,)},
    "cuda": {"height": (480,), "width": (832,), "num_frames": (81,), "num_inference_steps": (10,)},
}


def wait(device: str) -> None:
    """Wait until all work that was started on a CUDA device is finished. On a CPU, return at once."""
    if device == "cuda":
        torch.cuda.synchronize()


def time_calls(work: Callable[[], Any], device: str, rounds: int = 5) -> tuple[float, float]:
    """Return (seconds of the first call of `work`, median seconds of later calls).

    The first call is slower, because it also compiles and selects kernels. `rounds` is the number of timings for the median. A
    timing of short work is the mean of many calls.
    """
    times = []
    for number in (1, 1, *[0] * rounds):
        number = number or max(
            1, min(50, int(0.02 / times[1]))
        )  # short kernels: many calls between two waits
        wait(device)
        started = time.perf_counter()
        for _ in range(number):
            work()
        wait(device)
        times.append((time.perf_counter() - started) / number)
    return times[0], statistics.median(times[2:])


def ceilings(device: str) -> Rows:
    """Measure upper limits of the speed: a copy in device memory, and matmuls of the feed-forward layers of 1.3B and 14B."""
    size = 2**20 if device == "cpu" else 2**31
    dtype = DTYPES[device]
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    seconds = time_calls(source.clone, device)[1]
    rows: Rows = [{"work": f"copy of {size:,} bytes", "ms": seconds * 1e3, "TB/s": 2 * size / seconds / 1e12}]
    for name in VARIANT_NAMES:
        shape = VARIANTS[name].dit
        tokens = 32760
        m, k, n = (tokens, shape.dim, shape.ffn_dim) if device == "cuda" else (64, 64, 128)
        a, b = (torch.randn(size, dtype=dtype, device=device) for size in ((m, k), (k, n)))
        for title, x, y in (
            ("up", a, b),
            ("weight gradient", a.T, torch.randn(m, n, device=device).to(dtype)),
        ):
            flops = 2e-12 * m * k * n
            seconds = time_calls(lambda x=x, y=y: x @ y, device)[1]
            rows.append({"work": f"{name} {title}", "ms": seconds * 1e3, "TFLOP/s": flops / seconds})
        if device == "cpu" or torch.cuda.get_device_capability() >= MIN_CAPABILITY:
            # With the casts of both factors, as in training.
            rows_of_a, rows_of_b = (factor.to(torch.bfloat16).contiguous() for factor in (a, b.T))
            multiply = partial(fp8_matmul, rows_of_a, rows_of_b, None, False, False, device == "cuda")
            seconds = time_calls(multiply, device)[1]
            rows.append(
                {"work": f"{name} up in fp8", "ms": seconds * 1e3, "TFLOP/s": 2e-12 * m * k * n / seconds}
            )
    return rows


def kernels_here(device: str) -> Iterator[Backend]:
    """Yield each attention kernel that runs on this machine and computes correct results, except the reference kernel."""
    for name in BACKENDS:
        with contextlib.suppress(ConfigError):
            if name != "reference":
                yield choose_backend(name, device, DTYPES[device], HEAD_DIM)


def random_rows(device: str, heads: int, *lens: int) -> list[Tensor]:
    """Return random tensors [rows, heads, HEAD_DIM], one for each number of rows in `lens`."""
    return [torch.randn(rows, heads, HEAD_DIM, device=device).to(DTYPES[device]) for rows in lens]


def attention(device: str, heads: int, lens: Sequence[int]) -> Rows:
    """Measure the forward and backward pass of self-attention with every kernel."""
    rows = []
    total = sum(lens)
    scale = HEAD_DIM**-0.5
    q, k, v, dout = random_rows(device, heads, *[total] * 4)
    segments = Segments.build(lens, device=device)
    flops = 4 * heads * HEAD_DIM * sum(length * length for length in lens)
    for kernel in kernels_here(device):
        out, lse = kernel.forward(q, k, v, segments, scale)
        calls = {
            "forward": (1.0, lambda b=kernel: b.forward(q, k, v, segments, scale)),
            "backward": (
                2.5,
                lambda b=kernel, o=out, s=lse: b.backward(dout, q, k, v, o, s, segments, scale),
            ),
        }
        row: dict[str, Any] = {"kernel": kernel.name}
        for name, (factor, call) in calls.items():
            first, seconds = time_calls(call, device, 3)
            row |= {f"{name} ms": seconds * 1e3, f"{name} TFLOP/s": factor * flops / seconds / 1e12}
            row |= {f"first {name} ms": first * 1e3}
        rows.append(row)
    return rows


def cross_attention(device: str, heads: int) -> Rows:
    """Measure cross-attention with every attention kernel that this machine can run.

    Each kernel is measured in two ways:

    - by itself: only the backward pass, with 1 key and with 100 keys (text tokens)
    - in the cross-attention of the model, which pads the 100 text tokens to 512: the forward pass and the backward pass
    """
    tokens = max(CLIPS[device][0])
    scale = HEAD_DIM**-0.5
    q, dout = random_rows(device, heads, tokens, tokens)
    rows = []
    for kernel in kernels_here(device):
        row: dict[str, Any] = {"kernel": kernel.name}
        for keys in (1, TEXT_TOKENS):
            k, v = random_rows(device, heads, keys, keys)
            segments = Segments.build([tokens], [keys], device)
            out, lse = kernel.forward(q, k, v, segments, scale)
            backward = lambda b=kernel, k=k, v=v, o=out, s=lse, g=segments: b.backward(  # noqa: E731
                dout, q, k, v, o, s, g, scale
            )
            row[f"{keys} keys, backward ms"] = time_calls(backward, device)[1] * 1e3
        leaves = [x.requires_grad_() for x in (q.detach(), *random_rows(device, heads, *[TEXT_TOKENS] * 2))]
        pads = [x[0].requires_grad_() for x in random_rows(device, heads, 1, 1)]
        padded = PaddedSegments.build([tokens], [TEXT_TOKENS], TEXT_LEN, device)
        forward = lambda b=kernel, x=(*leaves, *pads), p=padded: padded_attention(*x, p, b)  # noqa: E731
        result = forward()
        row["padded text, forward ms"] = time_calls(forward, device)[1] * 1e3
        inputs = (*leaves, *pads)
        call = lambda r=result, x=inputs: torch.autograd.grad(r, x, dout, retain_graph=True)  # noqa: E731
        row["padded text, backward ms"] = time_calls(call, device)[1] * 1e3
        rows.append(row)
    return rows


def copies(device: str) -> Rows:
    """Measure how long a copy to a busy device blocks the host: first with pageable host memory, then with pinned memory."""
    side = 8192 if device == "cuda" else 64
    busy = torch.randn(side, side, device=device).to(DTYPES[device])
    rows: Rows = []
    for size in COPY_BYTES[device]:
        for name, pinned in (("pageable", False), ("pinned", True)):
            source = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned and device == "cuda")
            busy @ busy  # the first matmul loads its library, and the first copy allocates memory
            source.to(device, non_blocking=True)
            wait(device)
            started = time.perf_counter()
            for _ in range(40):
                busy @ busy
            queued = time.perf_counter()
            source.to(device, non_blocking=True)
            copied = time.perf_counter()
            wait(device)
            ended = time.perf_counter()
            times = {"host waits ms": copied - queued, "matmuls and copy ms": ended - started}
            rows.append({"bytes": size, "memory": name} | {key: value * 1e3 for key, value in times.items()})
    return rows


def attention_stage(args: argparse.Namespace, results: Results) -> None:
    """Measure copies, matmuls, cross-attention and self-attention, and add the measurements to `results`."""
    results.run("ceilings", lambda: ceilings(args.device))
    for heads in HEADS[args.device]:
        results.run(f"cross-attention, {heads} heads", lambda h=heads: cross_attention(args.device, h))
        for lens in CLIPS[args.device]:
            title = f"{heads} heads, {len(lens)} x {lens[0]} tokens"
            results.run(title, lambda h=heads, n=lens: attention(args.device, h, n))
    results.run("copies to a busy device", lambda: copies(args.device))


def overrides_of(
    device: str, variant: str, shapes: Sequence[Sequence[int]], folder: Path, num_layers: int | None
) -> list[str]:
    """Return recipe overrides for a run with random weights, on random clips that are packed into one sequence (bin).

    Args:
        device: "cuda" or "cpu". On a CPU the model is tiny.
        variant: name of the model.
        shapes: latent shape (frames, rows, columns) of each clip.
        folder: folder for the run, and for the config of a model that differs from the published model.
        num_layers: number of blocks; None for the number of blocks in the published model.
    """
    config = VARIANTS[variant].dit.to_config()
    shape = VARIANTS[variant].dit
    model = variant
    changes = {"num_layers": num_layers} if num_layers else {}
    if changes := changes | (TINY if device == "cpu" else {}):
        (folder / "transformer").mkdir(parents=True, exist_ok=True)
        text = json.dumps({"_class_name": "WanTransformer3DModel", **config, **changes})
        (folder / "transformer" / "config.json").write_text(text)
        model = str(folder)
    tokens = sum(f * h * w for f, h, w in shapes) // shape.patch_size[1] // shape.patch_size[2]
    mock = {"num_samples": len(shapes), "shapes": [list(size) for size in shapes], "text_lens": [TEXT_TOKENS]}
    return [
        *(f"model.path={model}", "model.init=random", "model.checkpointing=selective"),
        *(f"data.mock={json.dumps(mock)}", f"packing.max_tokens={tokens}", f"output_dir={folder / 'run'}"),
        *(f"precision.compute={'fp32' if device == 'cpu' else 'bf16'}", "logging.trackers=[]"),
        *("train.max_steps=6", "optim.warmup=0"),
    ]


class Counter(TorchDispatchMode):
    """Count operators that compute or copy, and the bytes of their inputs and outputs.

    Matmuls, convolutions and attention are counted as operators, but their bytes are not counted.
    """

    operators = bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not any(name in str(func) for name in FREE):
            self.operators += 1
            if not any(name in str(func) for name in PRODUCTS):
                tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
                self.bytes += sum(x.nbytes for x in tensors)
        return result


def block_call(device: str, overrides: Sequence[str]) -> tuple[Callable[[], None], int, int]:
    """Build a model of one block as a training run does. Return a function that runs the block on one bin.

    Returns:
        (function that runs the block's forward and backward pass on one bin (packed sequence), number of tokens of the
        bin, width of the model).
    """
    from wands.distributed.dims import ProcessGroups
    from wands.engine.engine import attention_backend, build_model
    from wands.train.batches import read_rows_of_bin
    from wands.train.prepare import load_run
    from wands.transfer import to_device

    options: dict[str, Any] = {"world_size": 1, "device_type": device, "encoders": lambda path: {}}
    run = load_run(None, None, overrides, ignore_output_dir=True, **options)
    model = build_model(
        run.recipe,
        run.ds_config,
        run.model.experts[0],
        groups=ProcessGroups(run.grid(0)),
        device=torch.device(device),
        backend=attention_backend(run.recipe, run.model.shape.head_dim, torch.device(device)),
    ).to(device)
    samples = [(run.data, i) for i in range(len(run.data.keys))]
    batch = read_rows_of_bin(run.collator, samples, [0] * len(samples), 0, run.grid(0))
    batch = to_device(batch, device)
    torch.set_autocast_cache_enabled(False)  # as the trainer does
    autocast = torch.autocast(device, torch.bfloat16, enabled=run.recipe.precision.compute == "bf16")
    inputs: list[Any] = []
    block = model.blocks[0]
    hook = block.register_forward_pre_hook(lambda _, given: inputs.extend(given))
    timesteps = torch.linspace(20, 980, len(samples), device=device)
    with autocast:
        model(**batch.model_inputs(batch.tokens, timesteps))
    hook.remove()
    inputs = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    call = model._gradient_checkpointing_func if model.gradient_checkpointing else lambda f, *x: f(*x)
    gradient = torch.randn_like(inputs[0])

    def both() -> None:
        with autocast:
            result = call(block, *inputs)
        result.backward(gradient)

    return both, len(batch.tokens), run.model.shape.dim


def block(args: argparse.Namespace, variant: str, shapes: Sequence[Sequence[int]]) -> Rows:
    """Measure one transformer block on packed clips. Return two rows of totals, and a row for each of the 25 slowest kernels."""
    device = args.device
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*overrides_of(device, variant, shapes, Path(folder), 1), *args.overrides]
        both, tokens, dim = block_call(device, overrides)
    _, seconds = time_calls(both, device)
    with Counter() as counter:
        both()
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device == "cuda")]
    with profile(activities=activities) as recorded:
        both()
        wait(device)
    on_cpu = device == "cpu"
    kind = DeviceType.CPU if on_cpu else DeviceType.CUDA
    kernels = [
        {"kernel": event.key[:90], "calls": event.count, "ms": time_us / 1e3}
        for event in recorded.key_averages()
        if event.device_type == kind
        and (time_us := event.self_cpu_time_total if on_cpu else event.self_device_time_total)
    ]
    kernels.sort(key=lambda row: -row["ms"])
    total = {
        "kernel": "the block",
        "calls": sum(row["calls"] for row in kernels),
        "ms": seconds * 1e3,
        "operators": counter.operators,
        "GB": counter.bytes / 1e9,
        "U": counter.bytes / (tokens * dim),
    }
    return [total, {"kernel": "all kernels", "ms": sum(row["ms"] for row in kernels)}, *kernels[:25]]


def block_stage(args: argparse.Namespace, results: Results) -> None:
    """Measure one transformer block of each model size, for one clip and for many clips (stage `block`)."""
    for variant in VARIANT_NAMES if args.device == "cuda" else VARIANT_NAMES[:1]:
        for name, shapes in PACKS[args.device].items():
            results.run(f"{variant}, {name}", lambda v=variant, s=shapes: block(args, v, s))


def run_wands(arguments: Sequence[str]) -> None:
    """Run a command of wands in a new process, so that its peak memory does not include the memory of this script.

    The output of the command is printed.

    Raises:
        RuntimeError: if the command fails.
    """
    done = subprocess.run([sys.executable, "-m", "wands", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    print(done.stdout, flush=True)


def step(
    args: argparse.Namespace,
    shapes: Sequence[Sequence[int]],
    results: Results,
    variant: str = VARIANT_NAMES[0],
    settings: Sequence[str] = (),
) -> Rows:
    """Train six steps with `wands profile`, and return a row of the table.

    The row contains measurements of steps 3 and 4, such as time and peak memory. It also contains the predicted time and the
    predicted peak memory. The profiler records only step 5. If the profiler fails, the error is printed and the stage fails,
    but the measurements are kept.
    """
    from wands.planning.hardware import MACHINES
    from wands.planning.memory import estimate_memory
    from wands.planning.step_time import predict
    from wands.train.prepare import load_run

    device = args.device
    layers = 2 if device == "cpu" else None
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            *overrides_of(device, variant, shapes, Path(folder), layers),
            *(*settings, *args.overrides, "profile.start=5", "profile.steps=1"),
        ]
        world: dict[str, Any] = {"world_size": 1, "device_type": device, "encoders": lambda path: {}}
        run = load_run(None, None, overrides, ignore_output_dir=True, **world)
        out = Path(folder) / "profile"
        options = [part for text in overrides for part in ("--set", text)]
        try:
            run_wands(["profile", "--out", str(out), *options])
        except RuntimeError as error:
            if not (out / "metrics.jsonl").is_file():
                raise
            results.failed = True
            print(error, flush=True)
        lines = (out / "metrics.jsonl").read_text().splitlines()
        scopes = "\n".join(path.read_text() for path in sorted(out.glob("profile/*.txt")))
    print(scopes, flush=True)
    rows = [json.loads(line) for line in lines][2:4]  # step 1 compiles, step 5 is profiled
    workload = run.workload(device)
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    machine = next((m for key, m in MACHINES.items() if key.split("-")[0].upper() in name), MACHINES["h200"])
    lens = [int(length) for length in run.schedule.num_tokens]
    seconds = statistics.median(row["seconds"] for row in rows)
    estimated = estimate_memory(workload).peak
    peak = rows[-1]["device_peak"]
    return [
        {
            "s": seconds,
            "predicted s": predict(workload, machine, lens).seconds,
            "TFLOP/s": statistics.median(row["tflops"] for row in rows),
            "MFU": rows[-1]["mfu"],
            "data wait s": statistics.median(row["data_wait"] for row in rows),
            "peak GiB": peak and peak / 2**30,
            "estimated GiB": estimated / 2**30,
            "peak / estimate": peak and peak / estimated,
            "profile": "written" if scopes else "failed",
        }
    ]


def step_stage(args: argparse.Namespace, results: Results) -> None:
    """Run the stage `step`: measure training steps of each run in `STEP_RUNS`."""
    for label, (variant, settings) in STEP_RUNS.items():
        for name, shapes in STEP_PACKS[args.device].items():
            results.run(
                f"{label}, {name}",
                lambda shapes=shapes, variant=variant, settings=settings: step(
                    args, shapes, results, variant, settings
                ),
            )


def run_tests(args: argparse.Namespace) -> Rows:
    """Run the GPU tests, several at a time, and return a row with the numbers of all, skipped and failed tests.

    When a test finishes, its name and result are written to tests.log. If the run is ended early, these results are kept.

    Raises:
        RuntimeError: if pytest cannot run, or if tests fail. The message contains the names of the failed tests.
    """
    report = args.out / "pytest.xml"
    log = args.out / "tests.log"
    workers = str(min(14, os.cpu_count() or 1))
    command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}", "-n", workers, "-vv"]
    with open(log, "w") as output:
        code = subprocess.run(
            [*command, *(f"tests/{folder}" for folder in TESTS)], cwd=ROOT, stdout=output, stderr=output
        ).returncode
    if code not in (0, 1) or not report.is_file():
        raise RuntimeError(log.read_text()[-2000:])
    suite = ET.parse(report).getroot()[0]
    report.unlink()
    failed = [
        case.get("name")
        for case in suite
        if case.find("failure") is not None or case.find("error") is not None
    ]
    row = {
        "tests": int(suite.get("tests", 0)),
        "skipped": int(suite.get("skipped", 0)),
        "failed": len(failed),
    }
    if failed:
        raise RuntimeError(f"{row}: {', '.join(map(str, failed))}; see {log}")
    return [row]


def tests_stage(args: argparse.Namespace, results: Results) -> None:
    """Run the tests marked `gpu` (stage `tests`)."""
    results.run(", ".join(TESTS), lambda: run_tests(args))


def memory(args: argparse.Namespace, size: dict[str, Any]) -> Rows:
    """Measure all modes of activation checkpointing with bench_memory.py at one model size. Return a row for each mode."""
    options = argparse.Namespace(device=args.device, rounds=2, clock="wall", **size)
    found = bench_memory.measure(options)
    none = found["none"]
    rows = [
        {
            "mode": name,
            "device MiB": one.device / 2**20,
            "device of none": one.device / none.device,
            "host MiB": one.host / 2**20,
            "s": statistics.median(one.seconds),
            "time of none": bench_memory.slower(none, one),
        }
        for name, one in found.items()
    ]
    bench_memory.report(found)
    return rows


def memory_stage(args: argparse.Namespace, results: Results) -> None:
    """Run the stage `memory`: measure activation checkpointing at each model size in `MEMORY`."""
    for name, size in MEMORY[args.device].items():
        results.run(name, lambda s=size: memory(args, s))


def infer(device: str) -> Rows:
    """Sample one video with random weights, and measure the time of each part of `wands infer`.

    On CUDA, the DiT and the VAE have the sizes of 1.3B, and the text encoder is tiny. On a CPU, all models are tiny.
    """
    from diffusers import AutoencoderKLWan
    from make_tiny_pipeline import build_tiny_pipeline

    from wands.commands import infer as command
    from wands.config.options import InferOptions

    seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(owner: Any, name: str, title: str) -> Iterator[None]:
        original = getattr(owner, name)

        def call(*given: Any, **options: Any) -> Any:
            wait(device)
            started = time.perf_counter()
            with (
                timed(given[0], "encode_prompt", "text")
                if title == "text and steps"
                else contextlib.nullcontext()
            ):
                result = original(*given, **options)
            wait(device)
            seconds[title] = seconds.get(title, 0.0) + time.perf_counter() - started
            return result

        setattr(owner, name, call)
        try:
            yield
        finally:
            setattr(owner, name, original)

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        dit = None
        vae_dir = "random"
        if device == "cuda":
            dit = {
                **VARIANTS[VARIANT_NAMES[0]].dit.to_config(),
                "text_dim": 32,
            }  # the width of the tiny text encoder
            vae_dir = str(Path(folder) / "vae")
            AutoencoderKLWan().save_pretrained(vae_dir)
        build_tiny_pipeline(Path(folder) / "model", vae_dir=vae_dir, dit=dit, size="test")
        for owner, name, title in (
            (command, "load_pipeline", "load"),
            (command, "sample_latents", "text and steps"),
            (command, "decode_latents", "decode"),
            (command, "save_video", "write mp4"),
        ):
            stack.enter_context(timed(owner, name, title))
        options = {"model": str(Path(folder) / "model"), "out_dir": Path(folder) / "videos", "device": device}
        started = time.perf_counter()
        command.infer(InferOptions(prompts=("a red kite",), **options, **VIDEO[device]))
        total = time.perf_counter() - started
    seconds["denoising"] = seconds.pop("text and steps") - seconds["text"]
    seconds["one denoising step"] = seconds["denoising"] / VIDEO[device]["num_inference_steps"][0]
    return [{"part": name, "s": value, "of all": value / total} for name, value in seconds.items()]


def infer_stage(args: argparse.Namespace, results: Results) -> None:
    """Sample a video, measure the time of each part of `wands infer`, and add the measurements to `results`."""
    results.run("81 frames of 480 x 832" if args.device == "cuda" else "tiny", lambda: infer(args.device))


def encode_clips(device: str, dtype: torch.dtype, batch: int) -> Rows:
    """Measure the VAE of Wan 2.1 with random weights, on clips of one size. On a CPU, the VAE is tiny."""
    from diffusers import AutoencoderKLWan

    from wands.encoders.vae import WanVideoEncoder

    sizes = {} if device == "cuda" else {"base_dim": 8, "num_res_blocks": 1}
    vae = AutoencoderKLWan(**sizes).to(device, dtype)
    encoder = WanVideoEncoder(vae)
    pixels = torch.rand(batch, *ENCODED[device][0], device=device) * 2 - 1
    seconds = time_calls(lambda: encoder.encode(pixels), device, rounds=2)[1]
    return [{"s": seconds, "clips/s": batch / seconds}]


def encode_texts(device: str) -> Rows:
    """Measure UMT5-XXL with random weights in bf16, on full captions. On a CPU, the model is tiny."""
    from transformers import UMT5Config, UMT5EncoderModel

    sizes = {
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "vocab_size": 256384,
    }
    if device == "cpu":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    _, tokens, captions = ENCODED[device]
    with torch.device(device):
        encoder = UMT5EncoderModel(UMT5Config(**sizes)).to(torch.bfloat16).eval()
        ids = torch.randint(0, sizes["vocab_size"], (captions, tokens))
    with torch.no_grad():
        seconds = time_calls(lambda: encoder(input_ids=ids), device, rounds=2)[1]
    return [{"s": seconds, "captions/s": captions / seconds}]


def encode_stage(args: argparse.Namespace, results: Results) -> None:
    """Run the stage `encode`: measure the VAE and the text encoder of `wands preprocess`."""
    device = args.device
    for dtype in (torch.bfloat16, torch.float32):
        for batch in (1, 2):
            name = f"VAE, {str(dtype).removeprefix('torch.')}, batch {batch}"
            results.run(name, lambda dtype=dtype, batch=batch: encode_clips(device, dtype, batch))
    results.run("UMT5", lambda: encode_texts(device))


def compare_stage(args: argparse.Namespace, results: Results) -> None:
    """Run the stage `compare`: compare the training speed of wands with diffusers + accelerate + DeepSpeed."""
    rounds = 5
    if args.device == "cpu":
        rounds = 1
        bench_step.GRIDS["cpu"] = [(1, 4, 4), (2, 4, 4), (1, 2, 4)]
        bench_step.WIDTHS["cpu"] |= {"num_layers": 1, "ffn_dim": 96, "text_dim": 32}
    for kind in bench_peers.KINDS:
        results.run(kind, lambda k=kind: bench_peers.measure(args.device, k, args.overrides, rounds))


STAGES: dict[str, Callable[[argparse.Namespace, Results], None]] = {
    "attention": attention_stage,
    "block": block_stage,
    "step": step_stage,
    "tests": tests_stage,
    "memory": memory_stage,
    "infer": infer_stage,
    "encode": encode_stage,
    "compare": compare_stage,
}


def main() -> int:
    """Run the stage that the command line names.

    Return the exit code: 1 if a measurement or test of the stage failed, 2 if --part names no part.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_out"), help="folder of the results")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="recipe override for block, step and compare, such as attention.backend=torch",
    )
    parser.add_argument(
        "--part",
        default="",
        metavar="TEXT",
        help="run only the parts whose names contain TEXT, such as '8 clips'",
    )
    args = parser.parse_args()
    results = Results(args.out, args.stage, args.device, args.overrides, args.part)
    STAGES[args.stage](args, results)
    if not results.ran:
        names = "; ".join(results.skipped)
        print(f"--part {args.part}: no part of {args.stage} has this text in its name; use one of: {names}")
        return 2
    return int(results.failed)


if __name__ == "__main__":
    sys.exit(main())

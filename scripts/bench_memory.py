"""Measure peak memory and time of a training step (forward and backward of the DiT) in each mode of activation checkpointing.

    python scripts/bench_memory.py                                  # a small DiT, half a minute on 2 cores
    python scripts/bench_memory.py --clock cpu                      # on a busy machine
    python scripts/bench_memory.py --device cuda                    # ten layers of the width of 1.3B, 32,760 tokens, bf16: 44 GiB
    python scripts/bench_memory.py --device cuda --heads 40 --ffn-dim 13824 --layers 4

Columns:

device   Peak memory during a step, minus the memory before the step (weights and gradients). The difference contains the tensors
         that the forward keeps, and the memory of one block's backward. On CUDA, the numbers are from the statistics of PyTorch's
         allocator. On a CPU, they are from PyTorch's profiler, and the host memory of offloaded tensors is not counted.
host     Peak host memory of offloaded tensors. For a GPU, this memory is pinned.
seconds  Median time of a step, without the memory measurement. The modes alternate (a, b, c, a, b, c, ...).
of none  Memory or time of the mode divided by memory or time of the mode `none`. For times, the ratio is computed in each round,
         and the column shows the median.

The modes `none`, `selective`, `full` and `offload` are values of the recipe key model.checkpointing. The other two
modes list every tensor in the recipe key model.saved_tensors or model.offloaded_tensors:

selective, every name  keeps every named tensor: projections and result of self-attention, and hidden state of the feed-forward
offload, every name    stores the named tensors and the inputs of the blocks in host memory

The last lines show whether the modes are in the expected order, by memory as in `SMALLER`, and by time as in `FASTER`. If the
order by memory is wrong, the exit code is 1. A wrong order by time does not change the exit code, because the machine may be
busy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import diffusers
import torch
from peak_memory import PeakMemory

from wands.attention.packed import PackedMeta, segment_ids_of
from wands.attention.ulysses import OPERATORS, context_attention
from wands.attention.varlen import choose_backend
from wands.model.checkpointing import SelectiveCheckpoint
from wands.model.transformer import PackedWanTransformer
from wands.transfer import to_device

NAMES = ("attn_output", "query_proj", "key_proj", "value_proj", "ffn_activation")
MODES: dict[str, tuple[Sequence[str], Sequence[str]]] = {  # saved names, offloaded names
    "none": ((), ()),
    "selective, every name": (NAMES, ()),
    "selective": (("attn_output",), ()),
    "full": ((), ()),
    "offload": ((), ("block_input",)),
    "offload, every name": ((), ("block_input", *NAMES)),
}
SMALLER = (  # documented order of device memory
    ("selective, every name", "none"),
    ("selective", "selective, every name"),
    ("full", "selective"),
    ("offload", "full"),
    ("offload, every name", "selective, every name"),
)
FASTER = (("none", "selective"), ("selective", "full"), ("full", "offload"))
SIZES = {  # defaults for each device: heads, layers, ffn_dim, tokens, dtype of matmuls and attention
    "cpu": {"heads": 4, "layers": 6, "ffn_dim": 1024, "tokens": 1024, "compute": "fp32"},
    "cuda": {"heads": 12, "layers": 10, "ffn_dim": 8960, "tokens": 32760, "compute": "bf16"},
}
HEAD_DIM = {"cpu": 64, "cuda": 128}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
TEXT_TOKENS = 100
TEXT_DIM = 256


@dataclass
class Measured:
    """Measurements of one mode of activation checkpointing.

    Attributes:
        device: peak device memory during a step minus the memory before the step, in bytes.
        host: peak host memory of offloaded tensors, in bytes.
        seconds: time of the step in each round.
    """

    device: int
    host: int
    seconds: list[float]


def build_step(args: argparse.Namespace) -> tuple[PackedWanTransformer, Callable[[], None]]:
    """Return a DiT with random weights, and a function that runs its forward and backward pass on two packed clips."""
    torch.manual_seed(0)
    device = torch.device(args.device)
    model = PackedWanTransformer(
        num_attention_heads=args.heads,
        attention_head_dim=HEAD_DIM[args.device],
        num_layers=args.layers,
        ffn_dim=args.ffn_dim,
        text_dim=TEXT_DIM,
    ).to(device)
    dtype = torch.bfloat16 if args.compute == "bf16" else torch.float32
    backend = choose_backend("auto", device, dtype, HEAD_DIM[args.device])
    model.set_attention(context_attention(backend), backend)
    lens = (args.tokens - args.tokens // 3, args.tokens // 3)
    positions = torch.zeros(args.tokens, 3, dtype=torch.int64)
    texts = (TEXT_TOKENS,) * len(lens)
    meta = to_device(
        PackedMeta(
            positions=positions,
            segment_ids=segment_ids_of(lens),
            chunk_lens=(lens,),
            local_seq_lens=lens,
            text_lens=texts,
        ),
        device,
    )
    tokens = torch.randn(args.tokens, 64, device=device)
    timesteps = torch.tensor([250.0, 750.0], device=device)
    text = torch.randn(sum(texts), TEXT_DIM, device=device)

    def step() -> None:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.compute == "bf16"):
            output = model(tokens, meta, timesteps, text)
        output.float().square().mean().backward()

    return model, step


def measure(args: argparse.Namespace) -> dict[str, Measured]:
    """Measure a step in every mode of `MODES`: the memory in one step, and the time in one step per round.

    Args:
        args: options of the command line.

    Returns:
        The measurements by name of the mode.
    """
    model, step = build_step(args)
    ways = {
        name: SelectiveCheckpoint(blocks=model.blocks, saved=saved, offloaded=offloaded, operators=OPERATORS)
        for name, (saved, offloaded) in MODES.items()
        if name != "none"
    }
    found = {}
    for name in MODES:
        take(model, ways.get(name))
        step()  # warm-up: allocates gradients and host memory
        with PeakMemory(args.device) as peak:
            step()
        store = ways[name].offloader if name in ways else None
        found[name] = Measured(peak.bytes, store.peak_host_bytes if store else 0, [])
    for _ in range(args.rounds):
        for name in MODES:
            take(model, ways.get(name))
            found[name].seconds.append(seconds(step, args.device, CLOCKS[args.clock]))
    return found


def take(model: PackedWanTransformer, way: SelectiveCheckpoint | None) -> None:
    """Select activation checkpointing for the next steps of a model.

    Args:
        model: the model.
        way: object that checkpoints the blocks; None switches activation checkpointing off. An object that
            is no longer selected keeps its host memory, and reuses it if a later call of `take` selects the object again.
    """
    if way is None:
        model.disable_gradient_checkpointing()
    else:
        model.enable_gradient_checkpointing(way)


def seconds(step: Callable[[], None], device: str, clock: Callable[[], float]) -> float:
    """Run one step, wait until the device has finished, and return the time in seconds."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = clock()
    step()
    wait()
    return clock() - start


def report(found: dict[str, Measured]) -> list[str]:
    """Print the table, and check the order of the modes by memory (`SMALLER`) and by time (`FASTER`).

    A wrong order by time is only printed, because a busy machine changes the times. A wrong order by memory is also returned.

    Returns:
        A text for each pair (a, b) in `SMALLER` for which mode a uses more device memory than mode b.
    """
    print(f"{'':24}{'device MiB':>11}{'of none':>9}{'host MiB':>10}{'seconds':>9}{'of none':>9}")
    none = found["none"]
    for name, one in found.items():
        ratio = slower(none, one)
        print(
            f"{name:24}{one.device / 2**20:11.1f}{one.device / none.device:9.2f}{one.host / 2**20:10.1f}"
            f"{statistics.median(one.seconds):9.3f}{ratio:9.2f}"
        )
    broken = [
        f"{a} > {b} by {found[a].device - found[b].device} bytes"
        for a, b in SMALLER
        if found[a].device > found[b].device
    ]
    late = [
        f"{a} > {b} by {slower(found[b], found[a]) - 1:.0%}"
        for a, b in FASTER
        if slower(found[b], found[a]) > 1
    ]
    print(
        f"\nmemory is {'not in the order promised: ' + ', '.join(broken) if broken else 'in the order promised'}"
    )
    print(f"time is {'not in the order promised: ' + ', '.join(late) if late else 'in the order promised'}")
    return broken


def slower(fast: Measured, slow: Measured) -> float:
    """Return the step time of `slow` divided by the step time of `fast`: the median of the ratios of all rounds."""
    return statistics.median(b / a for a, b in zip(fast.seconds, slow.seconds, strict=True))


def main() -> int:
    """Run the command line. Return 1 if the first mode of a pair in `SMALLER` needs more memory than the second mode, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compute", choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: this process's CPU time")
    for name in ("heads", "layers", "ffn-dim", "tokens"):
        sizes = ", ".join(f"{size[name.replace('-', '_')]} on {device}" for device, size in SIZES.items())
        parser.add_argument(f"--{name}", type=int, help=f"default: {sizes}")
    args = parser.parse_args()
    for name, size in SIZES[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    diffusers.logging.set_verbosity_error()
    print(
        f"{args.device}, {args.compute}, torch {torch.__version__}: {args.layers} layers, {args.heads} heads x "
        f"{HEAD_DIM[args.device]}, ffn {args.ffn_dim}, {args.tokens} tokens"
    )
    return 1 if report(measure(args)) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure time, memory, traffic and error of several variants of self-attention, forward and backward, over several ranks.

    python scripts/bench_attention.py                    # 4 gloo processes on this machine's CPU, one thread each
    python scripts/bench_attention.py --device cuda      # one process per GPU with nccl

Variants:

single kernel       one process computes the whole bin, the other ranks wait
blocks of a ring    one process computes all R x R blocks of a ring of R ranks in turn, and merges the blocks. The difference
                    from the single kernel is the cost of many calls of the kernel, without traffic. The blocks are merged by
                    simple code in attention_variants.py, not by the ring of wands
ulysses, ring,      the context-parallel attention of wands (context_attention). Ulysses and hybrid send q, k and v in one
hybrid              all-to-all
all-gather of k, v  the simplest variant: gather keys and values of all ranks in packed order, call the kernel once, and
                    reduce-scatter the gradients. Each rank has the same queries as in the ring of wands
padded samples      every sample is padded to a multiple of 2 x ranks and cut into 2 x ranks chunks. Rank r has chunks r and
                    2 x ranks - 1 - r, as in TransformerEngine. Pads are masked. The ring is the ring of wands

Before the timing, the output and the gradients of every variant are compared with the single kernel. The error is the largest
absolute difference over the whole bin. If the error of a variant is too large, the run stops.

Columns:

seconds   wall time between two barriers, median over rounds. Variants alternate (a, b, c, a, b, c, ...).
cpu s     CPU seconds of all ranks. With fewer cores than ranks, compare these seconds instead of the wall time.
x single  time of the variant divided by the time of `single kernel` in the same round, median over rounds
peak      largest peak memory of a rank, with q, k, v and the gradient of the output. On CUDA: max_memory_allocated of PyTorch.
          On a CPU: from the allocations that PyTorch reports to the profiler, the smallest of three runs, without the buffers
          of gloo.
sent      bytes that leave a rank, counted at the calls of torch.distributed, for the rank that sends most. An all-to-all keeps
          1 / degree of the data on the rank. All-gather and reduce-scatter count as (ranks - 1) slices, as in a ring.
formula   predicted value of `sent`. For the variants of wands, ContextPlan.comm_bytes predicts it, as in `wands plan`.
ratio     sent / formula
err       largest absolute error of the output (out) and of the gradients of q, k and v (grad)

With one GPU there is no traffic. The program then runs only the single kernel and the blocks of rings of 2, 4 and 8, with every
installed kernel.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler logs every start and stop

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from attention_variants import HEAD_DIM, Variant, make_inputs, variants_of
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from wands.attention.kernels.flash import FLASH_BACKENDS
from wands.attention.kernels.registry import Backend, choose_backend
from wands.distributed.gpu_settings import set_gpu_settings
from wands.errors import ConfigError

# Latent frames x tokens of a frame. On a CPU: an 81-frame clip at 480p with a fifteenth of the tokens per frame.
PACKS = {
    "cpu": {"one video": (21 * 105,), "a mix": (13 * 104, 7 * 108, 9 * 104, 5 * 100, 4 * 108, 104, 104, 117)},
    "cuda": {"one video": (75600,), "a mix": (32760, 13 * 1560, 9 * 1600, 5 * 1610, 1560, 1560, 1600)},
}
HEADS = {"cpu": 4, "cuda": 24}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
KERNELS = {"cpu": ("cpu",), "cuda": tuple(backend.name for backend in FLASH_BACKENDS)}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}  # relative to the largest value


@contextmanager
def counted_bytes() -> Iterator[dict[str, int]]:
    """Return a context manager that counts the bytes that this rank sends.

    Yields:
        A dictionary that maps the name of each function of torch.distributed to the bytes that it has sent.
    """
    sent: dict[str, int] = defaultdict(int)
    leaving: dict[str, Callable[[int, int], int]] = {  # sent bytes per byte of input, in a group of n ranks
        "all_to_all_single": lambda size, n: size - size // n,
        "reduce_scatter_tensor": lambda size, n: size - size // n,
        "all_gather_into_tensor": lambda size, n: size * (n - 1),
    }
    originals = {name: getattr(dist, name) for name in (*leaving, "batch_isend_irecv")}

    def messages(ops: list[dist.P2POp]) -> Any:
        sent["batch_isend_irecv"] += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return originals["batch_isend_irecv"](ops)

    def collective(name: str) -> Callable[..., Any]:
        def call(output: Tensor, input: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            sent[name] += leaving[name](input.nbytes, dist.get_world_size(group))
            return originals[name](output, input, *args, group=group, **kwargs)

        return call

    dist.batch_isend_irecv = messages
    for name in leaving:
        setattr(dist, name, collective(name))
    try:
        yield sent
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def peak_bytes(variant: Variant, inputs: Sequence[Tensor]) -> int:
    """Run a variant once. Return the peak memory of this rank's tensors in bytes, including `inputs`."""
    held = sum(x.nbytes for x in inputs)
    if inputs[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        variant.run(inputs)
        return held + torch.cuda.max_memory_allocated() - before
    peaks = []
    for _ in range(3):  # a tensor that a thread of gloo frees last seems never freed
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            variant.run(inputs)
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
        peaks.append(held + max(accumulate(changes)))
    return min(peaks)


def seconds(variant: Variant, inputs: Sequence[Tensor]) -> tuple[float, float]:
    """Run one implementation of self-attention once.

    Returns:
        (wall time between a barrier before and a barrier after the run, CPU time of this rank), in seconds.
    """
    barrier()
    wall = time.perf_counter()
    cpu = time.process_time()
    variant.run(inputs)
    cpu = time.process_time() - cpu
    barrier()
    return time.perf_counter() - wall, cpu


def barrier() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def over_ranks(value: Any) -> list[Any]:
    """Gather `value` from all ranks, and return the values in rank order."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def measure(lens: Sequence[int], inputs: Sequence[Tensor], backend: Backend, rounds: int) -> list[str]:
    """Measure time, memory, sent bytes and error of each self-attention variant on one bin.

    Args:
        lens: number of tokens of each sample in the bin.
        inputs: result of `make_inputs`.
        backend: attention kernel.
        rounds: number of timed runs of each variant.

    Returns:
        One line of the table for each variant.
    """
    variants = variants_of(inputs, lens, backend)
    shards = [variant.shard(inputs) for variant in variants]
    reference: list[Tensor] = []
    facts = []
    for variant, shard in zip(variants, shards, strict=True):  # the comparison is the warm-up, too
        with counted_bytes() as sent:
            results = variant.run(shard)
        whole = variant.join(results, sum(lens))
        reference = reference or whole
        errors = [(a - b).abs().max().item() for a, b in zip(whole, reference, strict=True)]
        largest = [b.abs().max().item() for b in reference]
        if any(error > TOLERANCE[inputs[0].dtype] * top for error, top in zip(errors, largest, strict=True)):
            raise SystemExit(
                f"{variant.name} differs from {variants[0].name}. Largest errors of out, dq, dk and dv: {errors}. Largest "
                f"values: {largest}. An error may be at most {TOLERANCE[inputs[0].dtype]} of the largest value."
            )
        barrier()
        peak = max(over_ranks(peak_bytes(variant, shard) if variant.attend else 0))
        facts.append((peak, max(over_ranks(sum(sent.values()))), errors[0], max(errors[1:])))
    for _ in range(rounds):
        for variant, shard in zip(variants, shards, strict=True):
            wall, cpu = seconds(variant, shard)
            variant.times.append((wall, sum(over_ranks(cpu))))
    return [line(variant, variants[0], *fact) for variant, fact in zip(variants, facts, strict=True)]


HEADER = (
    f"{'':38}{'seconds':>8}{'x single':>9}{'cpu s':>8}{'x single':>9}{'peak MiB':>9}{'sent MiB':>9}"
    f"{'formula':>9}{'ratio':>7}{'err out':>9}{'err grad':>9}"
)


def line(variant: Variant, single: Variant, peak: int, sent: int, error: float, grad_error: float) -> str:
    cells = f"{variant.name:38}"
    for i in (0, 1):
        values = [times[i] for times in variant.times]
        ratios = [a / b[i] for a, b in zip(values, single.times, strict=True)]
        cells += f"{statistics.median(values):8.3f}{statistics.median(ratios):9.2f}"
    cells += f"{peak / 2**20:9.1f}{sent / 2**20:9.2f}"
    if variant.formula:
        cells += f"{variant.formula / 2**20:9.2f}{sent / variant.formula:7.3f}"
    else:
        cells += f"{'':16}"
    return cells + f"{error:9.1e}{grad_error:9.1e}"


def work(rank: int, world: int, port: int, args: argparse.Namespace) -> None:
    """Run the whole benchmark as one of the processes.

    Args:
        rank: rank of this process.
        world: number of processes.
        port: TCP port of the process group.
        args: options of the command line.
    """
    # torch 2.13 warns of two old names of collectives, torch 2.11 lacks the new ones.
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
    if world > 1:
        from wands.distributed.bootstrap import init_process_group

        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
        os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), MASTER_PORT=str(port))
        init_process_group()
    dtype = DTYPES[args.device]
    packs = {"asked for": tuple(args.lens)} if args.lens else PACKS[args.device]
    for name in KERNELS[args.device]:
        try:
            backend = choose_backend(name, device, dtype, HEAD_DIM)
        except ConfigError as error:
            if rank == 0:
                print(f"\n{error}", flush=True)
            continue
        for pack, lens in packs.items():
            lines = measure(lens, make_inputs(lens, args.heads, device, dtype), backend, args.rounds)
            title = f"{pack}: samples of {', '.join(map(str, lens))} = {sum(lens):,} tokens, {args.heads} heads x {HEAD_DIM}"
            if rank == 0:
                print(f"\n{title}, {dtype}, kernel {name}", HEADER, *lines, sep="\n", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--world", type=int, help="number of processes; default: 4 on a CPU, all GPUs (at most 8) on CUDA"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--heads", type=int, help="attention heads, a multiple of --world; default: 4 on a CPU, 24 on CUDA"
    )
    parser.add_argument("--lens", type=int, nargs="+", help="tokens of each sample; default: two bins")
    args = parser.parse_args()
    args.heads = args.heads or HEADS[args.device]
    world = args.world or (4 if args.device == "cpu" else min(torch.cuda.device_count(), 8))
    if args.heads % world:
        raise SystemExit(f"--heads {args.heads} must be a multiple of the {world} processes")
    set_gpu_settings()  # as in training; one process alone makes no process group
    os.environ["DS_ACCELERATOR"] = args.device
    where = f"{os.cpu_count()} cores" if args.device == "cpu" else torch.cuda.get_device_name()
    talk = {"cpu": f"{world} processes over gloo, one thread each", "cuda": f"{world} GPUs over nccl"}[
        args.device
    ]
    if world == 1:
        talk = "one process, nothing is sent"
    print(f"{where}: {talk}; torch {torch.__version__}, median of {args.rounds} rounds", flush=True)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    if world == 1:
        work(0, 1, port, args)
    else:
        mp.spawn(work, (world, port, args), nprocs=world)


if __name__ == "__main__":
    main()

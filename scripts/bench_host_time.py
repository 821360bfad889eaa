"""Measure the host's time for one block of the DiT: what Python, autograd and the dispatcher cost, without any kernel's work.

    python scripts/bench_host_time.py                # a table of the working tree, two minutes
    python scripts/bench_host_time.py --against REF  # also the commit REF, in turn with the working tree, and the ratio
    python scripts/bench_host_time.py --only compiled/selective/full --profile  # the most expensive functions

The model is so small that its kernels cost almost nothing, and the attention kernel is replaced by one that only allocates its
results. On a GPU, the host has to do the same work for each block before the GPU can start, in bf16 and with several clips in a
bin. A GPU waits for the host if this work takes longer than the block's kernels. Starting a kernel on a GPU (about 4
microseconds each) is not in these times. Neither are the hooks of DeepSpeed.

A block's time is the difference between models with `LAYERS` blocks and with one block, divided by the number of blocks between
them. It is CPU time of the process, the median of all rounds. A ratio is computed in each round, and the table shows the median.

Columns:

1 clip, 21 clips  Time in microseconds: forward pass and backward pass (with the recomputation of the checkpointing mode).
operators         Calls of PyTorch's dispatcher in both passes, with 1 clip and with 21 clips: functions of aten and of wands,
                  also those that other functions call. Compiled code calls none.
python            Calls of Python functions and methods in both passes.

A row is (operators of the blocks)/(activation checkpointing)/(trained weights).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LAYERS = 9
NUM_TOKENS = 42
CLIPS = {"1 clip": 1, "21 clips": 21}
TEXT_TOKENS = 1
TEXT_DIM = 6
MODES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # saved names, offloaded names
    "none": ((), ()),
    "selective": (("attn_output",), ()),
    "full": ((), ()),
    "offload": ((), ("block_input",)),
}
CASES = [
    f"{kind}/{mode}/{weights}"
    for kind in ("compiled", "plain")
    for mode in MODES
    for weights in ("full", "lora")
]
PASSES = ("forward", "backward")


class Bench:
    """Tiny DiT on the CPU with an attention kernel that computes nothing, for one row of the table."""

    def __init__(self, case: str) -> None:
        import torch

        from wands.attention.kernels.contract import Backend
        from wands.attention.kernels.registry import BACKENDS
        from wands.attention.ulysses import OPERATORS, context_attention
        from wands.config.recipe import LoraConfig
        from wands.model import fused
        from wands.model.lora import add_lora
        from wands.model.transformer import PackedWanTransformer

        def forward(q: Any, k: Any, v: Any, *_: Any) -> Any:
            return torch.empty_like(q).zero_(), q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)

        def backward(dout: Any, q: Any, k: Any, v: Any, *_: Any) -> Any:
            return tuple(torch.empty_like(x).zero_() for x in (q, k, v))

        torch.manual_seed(0)
        torch.set_num_threads(1)
        torch.set_autocast_cache_enabled(False)  # as DeepSpeed does
        fused.CHUNK = (
            NUM_TOKENS // CLIPS["21 clips"]
        )  # the chunks of a tiny clip are tiny, or the padding is work
        kind, mode, weights = case.split("/")
        backend = BACKENDS["nothing"] = Backend("nothing", forward, backward)
        model = PackedWanTransformer(
            num_attention_heads=1, attention_head_dim=6, num_layers=LAYERS, ffn_dim=6, text_dim=TEXT_DIM
        )
        model.set_attention(context_attention(backend), backend)
        model.set_compile(kind == "compiled")
        if weights == "lora":
            add_lora(model, LoraConfig(rank=2, alpha=2, targets="attention+ffn"), 0)
        model.set_checkpointing(mode, *MODES[mode], operators=OPERATORS)
        self.model = model.train()
        self.blocks = model.blocks
        self.inputs = {name: self._inputs(number) for name, number in CLIPS.items()}

    def _inputs(self, num_clips: int) -> dict[str, Any]:
        import torch

        from wands.attention.packed import PackedMeta, segment_ids_of

        lens = (NUM_TOKENS // num_clips,) * num_clips
        text_lens = (TEXT_TOKENS,) * num_clips
        meta = PackedMeta(
            positions=torch.zeros(NUM_TOKENS, 3, dtype=torch.int64),
            segment_ids=segment_ids_of(lens),
            chunk_lens=(lens,),
            local_seq_lens=lens,
            text_lens=text_lens,
            timestep_lens=lens,
            timestep_samples=tuple(range(num_clips)),
        )
        return {
            "tokens": torch.randn(NUM_TOKENS, 64),
            "meta": meta,
            "timesteps": torch.rand(num_clips) * 1000,
            "text_embeds": torch.randn(sum(text_lens), TEXT_DIM),
        }

    def run(self, clips: str, num_blocks: int, clock: Callable[[], float]) -> tuple[float, float]:
        """Run both passes with the first `num_blocks` blocks.

        Returns:
            Differences of `clock` over the forward pass and over the backward pass.
        """
        import torch

        self.model.blocks = self.blocks[:num_blocks]
        for parameter in self.model.parameters():
            parameter.grad = None
        start = clock()
        with torch.autocast("cpu", torch.bfloat16):
            output = self.model(**self.inputs[clips])
        middle = clock()
        output.backward(output.detach())
        return middle - start, clock() - middle

    def measure(self, clips: str, clock: Callable[[], float] = time.process_time) -> list[float]:
        """Return the differences of `clock` over the forward and the backward pass of one block."""
        gc.collect()
        gc.disable()
        one = self.run(clips, 1, clock)
        all_blocks = self.run(clips, LAYERS, clock)
        gc.enable()
        return [(many - few) / (LAYERS - 1) for many, few in zip(all_blocks, one, strict=True)]

    def count(self, clips: str) -> dict[str, int]:
        """Return the numbers of calls for one block in both passes, by kind."""
        with counted_python() as calls:
            python = sum(self.measure(clips, lambda: calls[0]))
        operators = [self._count_operators(clips, num_blocks) for num_blocks in (1, LAYERS)]
        return {
            "operators": round((operators[1] - operators[0]) / (LAYERS - 1)),
            "python": round(python),
        }

    def _count_operators(self, clips: str, num_blocks: int) -> int:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.run(clips, num_blocks, time.process_time)
        events = profiler.profiler.kineto_results.events()
        return sum(event.name().startswith(("aten::", "wands::")) for event in events)


@contextmanager
def counted_python() -> Any:
    """Count calls of Python functions; the list that is yielded has the number so far."""
    calls = [0]

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls[0] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def serve() -> None:
    """Measure the checkout from which Python imports wands: one round of a case for each line of the input, as a line of JSON.

    The first answer for a case contains the counts.
    """
    benches: dict[str, Bench] = {}
    for line in sys.stdin:
        case = line.strip()
        if case not in benches:
            bench = benches[case] = Bench(case)
            for clips in CLIPS:
                for _ in range(3):  # compiles, and fills caches
                    bench.measure(clips)
            found: Any = {clips: bench.count(clips) for clips in CLIPS}
        else:
            found = {clips: benches[case].measure(clips) for clips in CLIPS}
        print(json.dumps(found), flush=True)


class Checkout:
    """Process that measures one version of wands.

    Args:
        root: folder of the source code: the working tree, or a worktree of a commit.
    """

    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve"],
            env={**os.environ, "PYTHONPATH": str(root), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.counts: Any = {}
        self.rounds: list[Any] = []

    def start(self, case: str) -> None:
        """Prepare a case, and count its calls."""
        self.counts = self._ask(case)
        self.rounds = []

    def measure(self, case: str) -> None:
        """Measure one round of a case."""
        self.rounds.append(self._ask(case))

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def times(self, clips: str, number: int) -> list[float]:
        """Return the times of a pass (0 for forward, 1 for backward, 2 for their sum) in all rounds, in microseconds."""
        pairs = [one[clips] for one in self.rounds]
        return [1e6 * (sum(pair) if number == 2 else pair[number]) for pair in pairs]

    def _ask(self, case: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{case}\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith("{"):  # DeepSpeed prints lines too
                return json.loads(line)
        raise SystemExit("the measuring process has failed")


def row(name: str, checkout: Checkout) -> str:
    """Return one line of the table."""
    cells = f"{name:36}"
    for clips in CLIPS:
        passes = [statistics.median(checkout.times(clips, number)) for number in range(3)]
        cells += "".join(f"{value:9.0f}" for value in passes)
    for kind in ("operators", "python"):
        counts = [checkout.counts[clips][kind] for clips in CLIPS]
        cells += f"{counts[0]:>11,} / {counts[1]:<6,}"
    return cells


def ratios(new: Checkout, old: Checkout) -> str:
    """Return the line of the ratios of the working tree to the commit."""
    cells = f"{'  ratio':36}"
    for clips in CLIPS:
        for number in range(3):
            pairs = zip(new.times(clips, number), old.times(clips, number), strict=True)
            cells += f"{statistics.median(a / b for a, b in pairs):9.2f}"
    for kind in ("operators", "python"):
        found = [new.counts[clips][kind] / old.counts[clips][kind] for clips in CLIPS]
        cells += f"{found[0]:>11.2f} / {found[1]:<6.2f}"
    return cells


def profile_case(case: str) -> None:
    """Print the functions that cost the most in a bin of 21 clips."""
    bench = Bench(case)
    for _ in range(3):
        bench.measure("21 clips")
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(10):
        bench.run("21 clips", LAYERS, time.process_time)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def git(*words: str) -> str:
    """Run git with the arguments `words` in this repository, and return the output."""
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout


def compare(cases: list[str], rounds: int, against: str | None) -> None:
    """Measure the working tree, and the commit `against` in turn with it; print the table."""
    print(
        f"host's time of one block in microseconds, median of {rounds} rounds; {NUM_TOKENS} tokens, bf16 autocast, CPU"
    )
    header = "".join(f"{clips:>9}{'backward':>9}{'sum':>9}" for clips in CLIPS)
    print(f"{'':36}{header}{'operators, 1 / 21':>20}{'python, 1 / 21':>20}", flush=True)
    tree = Path(tempfile.mkdtemp(prefix="wands-host-")) / "ref"
    checkouts = []
    if against:
        git("worktree", "add", "--quiet", "--detach", str(tree), against)
    try:
        new = Checkout(ROOT)
        old = Checkout(tree) if against else None
        checkouts = [checkout for checkout in (old, new) if checkout]
        for case in cases:
            for checkout in checkouts:
                checkout.start(case)
            for _ in range(rounds):
                for checkout in checkouts:
                    checkout.measure(case)
            if old:
                print(row(f"{case}, {str(against)[:9]}", old))
            print(row(case, new), flush=True)
            if old:
                print(ratios(new, old), flush=True)
    finally:
        for checkout in checkouts:
            checkout.close()
        if against:
            git("worktree", "remove", "--force", str(tree))
        shutil.rmtree(tree.parent, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="REF", help="a commit to compare with")
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="print a profile of each row instead")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = [case for case in CASES if args.only in case]
    if args.serve:
        serve()
    elif args.profile:
        for case in cases:
            profile_case(case)
    else:
        compare(cases, args.rounds, args.against)


if __name__ == "__main__":
    main()

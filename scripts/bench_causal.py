"""Measure causal training and rollouts: forward and backward of teacher forcing, packing, and chunks of a long video.

    python scripts/bench_causal.py                   # some minutes on 2 cores
    python scripts/bench_causal.py --device cuda     # bf16 autocast, fp32 weights

steps      forward and backward of one clip of 21 latent frames in chunks of 3: bidirectional, and with teacher forcing. `time /
           FLOPs` is the ratio of their times divided by the ratio of their counted FLOPs; 1 means that teacher forcing computes
           as efficiently
packing    teacher forcing of clips of unequal length, packed into one sequence and one at a time
rollout    seconds and cached bytes of each chunk of a video of 210 latent frames with a window of 12 and a sink of 3: constant
           once the window is full

The compared variants of a round run one after the other, and ratios are medians over rounds, so a busy machine slows down both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from bench_record import Rows, format_rows
from diffusers import WanTransformer3DModel
from torch.utils.flop_counter import FlopCounterMode

from wands.attention.layout import ContextLayout
from wands.attention.ulysses import context_attention
from wands.attention.units import Unit
from wands.attention.varlen import choose_backend
from wands.config.recipe import FlowConfig, ObjectiveConfig
from wands.data.collate import PackingCollator, RankSlice, Sample
from wands.distributed.dims import ParallelDims, ProcessGroups
from wands.flow.noise import mix_noise
from wands.model.transformer import PackedWanTransformer
from wands.objectives.chunks import chunk_bounds, seen_chunks, teacher_forcing_units
from wands.sampling.rollout import packed_adapters
from wands.transfer import to_device
from wands.variants import TEXT_LEN, DiTShape

Grid = tuple[int, int, int]
WIDTHS = {  # Wan 2.1 1.3B, and the same proportions small
    "cpu": {"num_attention_heads": 2, "num_layers": 2, "ffn_dim": 1536, "text_dim": 680},
    "cuda": {"num_attention_heads": 12, "num_layers": 10, "ffn_dim": 8960, "text_dim": 4096},
}
SIZES: dict[str, list[Grid]] = {
    "cpu": [(21, 5, 8), (21, 15, 26)],  # 840 and 8,190 tokens
    "cuda": [(21, 15, 26), (21, 30, 52)],  # 8,190 and 32,760 tokens
}
MIX: dict[str, list[Grid]] = {
    "cpu": [(5, 4, 6), (9, 4, 6), (21, 4, 6), (13, 6, 4), (1, 5, 5), (7, 5, 5), (17, 4, 6), (3, 6, 4)],
    "cuda": [(5, 30, 52), (9, 30, 52), (21, 30, 52), (13, 52, 30), (1, 40, 40), (7, 40, 40)],
}
TEACHER = ObjectiveConfig(name="teacher_forcing", chunk_frames=3)
ROLLOUT = ObjectiveConfig(name="teacher_forcing", chunk_frames=3, window_frames=12, sink_frames=3)
NUM_FRAMES = 210  # ten times 21
Step = Callable[[], None]


class Bench:
    """A DiT on a device, and steps on clips of given token grids."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.stock = WanTransformer3DModel(attention_head_dim=128, **WIDTHS[device])
        self.shape = DiTShape.from_config(self.stock.config)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.backend = choose_backend("auto", device, dtype)
        self.model = PackedWanTransformer(attention_head_dim=128, **WIDTHS[device]).to(device).train()
        self.model.set_attention(context_attention(self.backend), self.backend)

    def step(self, grids: Sequence[Grid], causal: bool) -> Step:
        """Return the forward and backward pass of clips in one sequence."""
        shape = self.shape
        generator = torch.Generator().manual_seed(0)
        text = torch.randn(100, shape.text_dim, generator=generator)
        samples = [
            Sample(
                str(i),
                {
                    "latents": torch.randn(16, f, 2 * h, 2 * w, generator=generator),
                    "text_embeds": text,
                },
            )
            for i, (f, h, w) in enumerate(grids)
        ]
        collate = PackingCollator(
            shape=shape, flow=FlowConfig(cfg_dropout=0.0), seed=0, null_text_embeds=text
        )
        batch = collate(samples, [0] * len(samples), 0)
        units: list[tuple[Unit, ...]] | None = None
        if causal:
            units = [teacher_forcing_units(grid, TEACHER) for grid in grids]
        layout = ContextLayout.build(batch.seq_lens, units=units)
        host: RankSlice = batch.rank_slice(layout)
        sigmas = [[0.5 + 0.01 * i for i in range(1 + own[-1].chunk)] for own in layout.samples]
        noisy = mix_noise(host.tokens, layout, host.keys, 0, sigmas)
        part, prepared = to_device((host, noisy), self.device)

        def step() -> None:
            prediction = self.model(**part.model_inputs(prepared.tokens, prepared.timesteps))
            rows = prepared.trained
            (prediction[rows].float() - prepared.target[rows]).square().mean().backward()

        return step

    def seconds(self, steps: Sequence[Step]) -> float:
        self.model.zero_grad(set_to_none=True)
        wait = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        wait()
        began = time.perf_counter()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            for step in steps:
                step()
        wait()
        return time.perf_counter() - began

    def flops(self, step: Step) -> int:
        with FlopCounterMode(display=False) as counter:
            self.seconds([step])
        return int(counter.get_total_flops())


def measure_steps(bench: Bench, grid: Grid, rounds: int) -> Rows:
    """Measure one clip bidirectionally and with teacher forcing."""
    plain, causal = (bench.step([grid], is_causal) for is_causal in (False, True))
    flops = bench.flops(causal) / bench.flops(plain)  # also the warm-up
    times = [(bench.seconds([plain]), bench.seconds([causal])) for _ in range(rounds)]
    ratio = statistics.median(b / a for a, b in times)
    first, second = (statistics.median(values) for values in zip(*times, strict=True))
    return [
        {
            "clip": f"{grid[0] * grid[1] * grid[2]:,} tokens",
            "bidirectional s": first,
            "teacher forcing s": second,
            "time": ratio,
            "FLOPs": flops,
            "time / FLOPs": ratio / flops,
        }
    ]


def measure_packing(bench: Bench, rounds: int) -> Rows:
    """Measure clips of unequal length in one sequence and one at a time, with teacher forcing."""
    grids = MIX[bench.device]
    packed = [bench.step(grids, True)]
    alone = [bench.step([grid], True) for grid in grids]
    bench.seconds(packed)
    bench.seconds(alone)
    times = [(bench.seconds(packed), bench.seconds(alone)) for _ in range(rounds)]
    first, second = (statistics.median(values) for values in zip(*times, strict=True))
    ratio = statistics.median(b / a for a, b in times)
    return [
        {
            "clips": f"{len(grids)} clips",
            "packed s": first,
            "one at a time s": second,
            "speed of packing": ratio,
        }
    ]


@torch.no_grad()
def measure_rollout(bench: Bench) -> Rows:
    """Measure the chunks of a long video, in groups of seven, with four denoising steps each."""
    groups = ProcessGroups(ParallelDims(world_size=1, rank=0, ulysses_degree=1, ring_degree=1))
    device = torch.device(bench.device)
    stock = bench.stock.to(device)
    adapter = packed_adapters({"transformer": stock}, groups, device, bench.backend)["transformer"]
    bounds = chunk_bounds(NUM_FRAMES, ROLLOUT.chunk_frames, ROLLOUT.independent_first_frame)
    text = torch.randn(1, TEXT_LEN, bench.shape.text_dim, device=device)
    latents = torch.randn(1, 16, ROLLOUT.chunk_frames, 16, 24, device=device)
    rows: list[tuple[float, int]] = []
    with adapter.attached(), torch.autocast(bench.device, torch.bfloat16, enabled=bench.device == "cuda"):
        for chunk, (first, _) in enumerate(bounds):
            seen = seen_chunks(bounds, chunk, ROLLOUT.window_frames, ROLLOUT.sink_frames)
            adapter.begin_chunk(first, [number for begin, end in seen for number in range(begin, end)])
            began = time.perf_counter()
            timestep = torch.tensor([500.0], device=device)
            for _ in range(4):
                adapter(latents, timestep, text)
            adapter.write(chunk, latents, latents, 0.0)
            if bench.device == "cuda":
                torch.cuda.synchronize()
            rows.append((time.perf_counter() - began, adapter.cached_bytes))
    groups_of_seven = ((begin, rows[begin : begin + 7]) for begin in (0, 7, *range(14, len(rows), 14)))
    return [
        {
            "frames": f"{3 * begin} to {3 * begin + 20}",
            "s per chunk": statistics.median(seconds for seconds, _ in own),
            "cached MiB": own[-1][1] / 2**20,
        }
        for begin, own in groups_of_seven
        if own
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's default)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"{args.device}, {torch.get_num_threads()} threads, torch {torch.__version__}", flush=True)
    bench = Bench(args.device)
    print(
        format_rows([row for grid in SIZES[args.device] for row in measure_steps(bench, grid, args.rounds)])
    )
    print(f"\n{format_rows(measure_packing(bench, args.rounds))}")
    print(f"\nrollout of {NUM_FRAMES} latent frames, chunks of 3, window 12, sink 3, 4 denoising steps")
    print(format_rows(measure_rollout(bench)))


if __name__ == "__main__":
    main()

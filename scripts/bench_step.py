"""Measure the speed of a training step's forward and backward in three variants, on the same clips in one process.

    python scripts/bench_step.py                            # a minute on 2 cores
    python scripts/bench_step.py --threads 1 --clock cpu    # on a busy machine
    python scripts/bench_step.py --device cuda              # bf16 autocast, fp32 weights, full checkpointing

packed          PackedWanTransformer on all clips, packed into one sequence (bin)
one at a time   stock diffusers, a forward and backward per clip, gradients accumulated
padded batch    stock diffusers, one batch, latents padded with zeros to the largest frames, height and width. The loss of the
                pads is masked, but attention to the pads is not

One round runs each variant once (a, b, c), so that a busy machine slows down all three. The column `packed / this` is the speed
of `packed` divided by the speed of the variant. The ratio is computed in each round, and the column is the median over rounds.
tokens/s counts the tokens of the clips without padding. All variants use PyTorch's flash attention. The clips are Wan's 480p
mix (five aspect ratios, up to 81 frames).

Stock diffusers pads every text to 512 tokens. On a CPU the clips have only about 500 video tokens, so the padded texts cost a far
larger share of the time than on a GPU with up to 32,760 video tokens. With --text-len 512 no text has padding, and the ratios
show the gain of packing alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import diffusers
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from wands.attention.layout import ContextLayout
from wands.attention.ulysses import context_attention
from wands.attention.varlen import choose_backend
from wands.config.recipe import FlowConfig
from wands.data.collate import PackingCollator, RankSlice, Sample
from wands.model.transformer import PackedWanTransformer
from wands.transfer import to_device
from wands.variants import TEXT_LEN, DiTShape

# Tokens per (frame, row, column) axis.
GRIDS = {
    "cpu": [(3, 8, 13), (5, 8, 13), (8, 8, 13), (6, 13, 8), (4, 9, 12), (7, 12, 9), (5, 10, 10), (2, 8, 13)],
    "cuda": [(5, 30, 52), (13, 30, 52), (21, 30, 52), (10, 52, 30), (8, 35, 46), (17, 46, 35), (9, 40, 40)],
}
TEXT_LENS = [120, 64, 180, 96, 150, 77, 210, 40]
WIDTHS = {  # Wan 2.1 1.3B, and the same proportions small
    "cpu": {"num_attention_heads": 2, "num_layers": 2, "ffn_dim": 1536, "text_dim": 680},
    "cuda": {"num_attention_heads": 12, "num_layers": 10, "ffn_dim": 8960, "text_dim": 4096},
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Step = Callable[[], None]


def make_samples(device: str, text_len: int | None) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    text_dim = WIDTHS[device]["text_dim"]
    samples = []
    for index, ((f, h, w), length) in enumerate(zip(GRIDS[device], TEXT_LENS, strict=False)):
        latents = torch.randn(16, f, 2 * h, 2 * w, generator=generator)
        text = torch.randn(text_len or length, text_dim, generator=generator)
        samples.append(Sample(str(index), {"latents": latents, "text_embeds": text}))
    return samples


def build_models(device: str) -> tuple[WanTransformer3DModel, PackedWanTransformer]:
    torch.manual_seed(0)
    stock = WanTransformer3DModel(attention_head_dim=128, **WIDTHS[device])
    packed = PackedWanTransformer(attention_head_dim=128, **WIDTHS[device])
    packed.load_state_dict(stock.state_dict())
    name, dtype = ("torch", torch.bfloat16) if device == "cuda" else ("cpu", torch.float32)
    backend = choose_backend(name, device, dtype)
    packed.set_attention(context_attention(backend), backend)
    for model in (stock, packed):
        model.to(device).train()
        if device == "cuda":
            model.enable_gradient_checkpointing()
    return stock, packed


def packed_step(model: PackedWanTransformer, shard: RankSlice, timesteps: Tensor) -> Step:
    def step() -> None:
        model(shard.tokens, shard.meta, timesteps, shard.text_embeds).float().square().sum().backward()

    return step


def single_step(model: WanTransformer3DModel, samples: Sequence[Sample], timesteps: Tensor) -> Step:
    texts = [pad_text(sample.text_embeds) for sample in samples]

    def step() -> None:
        for sample, text, timestep in zip(samples, texts, timesteps, strict=True):
            output = model(sample.latents[None], timestep[None], text[None], return_dict=False)[0]
            output.float().square().sum().backward()

    return step


def padded_step(model: WanTransformer3DModel, samples: Sequence[Sample], timesteps: Tensor) -> Step:
    largest = [max(sample.latents.shape[axis] for sample in samples) for axis in (1, 2, 3)]
    latents = samples[0].latents.new_zeros(len(samples), 16, *largest)
    mask = torch.zeros_like(latents)
    for row, sample in enumerate(samples):
        inside = (row, slice(None), *(slice(size) for size in sample.latents.shape[1:]))
        latents[inside] = sample.latents
        mask[inside] = 1
    text = torch.stack([pad_text(sample.text_embeds) for sample in samples])

    def step() -> None:
        output = model(latents, timesteps, text, return_dict=False)[0]
        (output.float() * mask).square().sum().backward()

    return step


def pad_text(text: Tensor) -> Tensor:
    return torch.cat([text, text.new_zeros(TEXT_LEN - len(text), text.shape[1])])


def seconds(step: Step, model: torch.nn.Module, device: str, clock: Callable[[], float]) -> float:
    model.zero_grad(set_to_none=True)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = clock()
    with (
        torch.autocast(device, torch.bfloat16, enabled=device == "cuda"),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    ):
        step()
    wait()
    return clock() - start


def measure(device: str, rounds: int, text_len: int | None, clock: Callable[[], float]) -> None:
    samples = make_samples(device, text_len)
    stock, packed = build_models(device)
    shape = DiTShape.from_config(stock.config)
    collate = PackingCollator(
        shape=shape, flow=FlowConfig(cfg_dropout=0.0), seed=0, null_text_embeds=samples[0].text_embeds
    )
    batch = collate(samples, [0] * len(samples), 0)
    shard = to_device(batch.rank_slice(ContextLayout.build(batch.seq_lens)), device)
    samples = [
        Sample(sample.sample_id, {name: array.to(device) for name, array in sample.arrays.items()})
        for sample in samples
    ]
    timesteps = torch.linspace(20, 980, len(samples), device=device)
    steps = {
        "packed": (packed_step(packed, shard, timesteps), packed),
        "one at a time": (single_step(stock, samples, timesteps), stock),
        "padded batch": (padded_step(stock, samples, timesteps), stock),
    }
    for step, model in steps.values():
        seconds(step, model, device, clock)  # warm-up
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name, (step, model) in steps.items():
            times[name].append(seconds(step, model, device, clock))
        print(
            f"round {number + 1}: " + ", ".join(f"{name} {times[name][-1]:.2f} s" for name in steps),
            flush=True,
        )
    report(times, batch.seq_lens, GRIDS[device][: len(samples)], shape)


def report(
    times: dict[str, list[float]], lens: Sequence[int], grids: Sequence[Sequence[int]], shape: DiTShape
) -> None:
    tokens = sum(lens)
    longest = torch.tensor(grids).amax(0).prod().item()
    in_tokens = len(lens) * longest / tokens
    in_flops = shape.forward_flops([longest] * len(lens)) / shape.forward_flops(lens)
    print(
        f"\n{len(lens)} clips of {min(lens)} to {max(lens)} tokens, {tokens} in all; padded to {longest} each"
    )
    print(f"{'':15}{'seconds':>9}{'tokens/s':>11}{'packed / this':>15}")
    ratios = {}
    for name, values in times.items():
        ratios[name] = statistics.median(b / a for a, b in zip(times["packed"], values, strict=True))
        median = statistics.median(values)
        print(f"{name:15}{median:9.2f}{tokens / median:11.0f}{ratios[name]:15.2f}")
    print(f"\npadding factor {in_tokens:.2f} in tokens, {in_flops:.2f} in FLOPs")
    print(f"packed / one at a time                      {ratios['one at a time']:.2f}")
    print(f"packed / padded, of the factor in tokens    {ratios['padded batch'] / in_tokens:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's default)")
    parser.add_argument(
        "--text-len", type=int, help="text tokens of every clip, at most 512 (default: between 40 and 210)"
    )
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: this process's CPU time"
    )
    args = parser.parse_args()
    diffusers.logging.set_verbosity_error()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"{args.device}, {torch.get_num_threads()} threads, torch {torch.__version__}", flush=True)
    measure(args.device, args.rounds, args.text_len, CLOCKS[args.clock])


if __name__ == "__main__":
    main()

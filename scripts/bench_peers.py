"""Compare an optimizer step of wands with diffusers + accelerate + DeepSpeed, on the same clips in one process.

    python scripts/bench_peers.py                   # a small model, fp32, a minute on 2 cores
    python scripts/bench_peers.py --device cuda     # ten layers of the width of 1.3B, bf16
    python scripts/bench_peers.py --kind lora --set model.checkpointing=selective
    python scripts/bench_peers.py --compile         # diffusers with torch.compile, some minutes longer

wands           `train_step` on all clips, packed into one sequence (bin)
one at a time   diffusers' WanTransformer3DModel in accelerate's DeepSpeed engine, a forward and backward per clip, one update
padded          the same engine on one batch. Latents are padded to the largest clip, and the loss of the padding is masked

These three variants of the step use ZeRO-2, AdamW and gradient checkpointing of whole blocks. --set changes the settings of
wands. `--kind full` trains all weights. `--kind lora` trains a LoRA of rank 32 on the attention layers, which PEFT adds to the
model of diffusers. In each round, the variants run one after the other. Columns:

s             median time of a step
tokens/s      tokens of the clips, without padding, per second
time ratio    time of wands / time of this variant. The ratio is computed in each round; the column is the median over rounds
peak ratio    peak MiB of wands / peak MiB of this variant
peak MiB      peak memory during a step minus the memory between steps. The difference includes DeepSpeed's buckets. For wands,
              the buckets are at most as large as all gradients together. For the two other variants on CUDA, the buckets have
              DeepSpeed's default size of 2 GB
loss          loss of the first step. All variants start from a head of zeros, so that their losses must be about equal
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_step
import torch
from bench_record import Rows, format_rows
from peak_memory import PeakMemory
from torch import Tensor

KINDS = ("full", "lora")
RANK = 32
ROUNDS = 3
LATENT_CHANNELS = 16
Step = Callable[[], float]
"""Function that runs one optimizer step and returns the loss."""


def wands_step(device: str, kind: str, config: Path, overrides: Sequence[str]) -> Step:
    """Build the training engine of wands, and return a function that runs one step on a bin with all clips of
    bench_step.py.

    Args:
        device: "cuda" or "cpu".
        kind: "full" trains all weights, "lora" trains a LoRA.
        config: folder of a model with transformer/config.json.
        overrides: recipe overrides.
    """
    from wands.distributed.bootstrap import init_process_group
    from wands.distributed.dims import ProcessGroups
    from wands.engine.engine import attention_backend, build_engine, build_model
    from wands.train.prepare import load_run
    from wands.train.step import train_step

    grids = bench_step.GRIDS[device]
    mock = {
        "num_samples": len(grids),
        "shapes": [[f, 2 * h, 2 * w] for f, h, w in grids],
        "text_lens": bench_step.TEXT_LENS[: len(grids)],
    }
    settings = [
        *(
            f"model.path={config}",
            "model.init=random",
            "model.checkpointing=full",
            f"data.mock={json.dumps(mock)}",
        ),
        *(f"packing.max_tokens={sum(f * h * w for f, h, w in grids)}", "flow.cfg_dropout=0"),
        f"data.prefetch={0 if device == 'cpu' else 2}",  # on a CPU, reading ahead slows down the next variant
        *(f"precision.compute={'fp32' if device == 'cpu' else 'bf16'}", "train.max_steps=1000"),
        *([f"lora.rank={RANK}"] if kind == "lora" else []),
        *(["precision.weights=bf16"] if (kind, device) == ("lora", "cuda") else []),
    ]
    _, _, rank_device = init_process_group()
    options: dict[str, Any] = {"world_size": 1, "device_type": device, "encoders": lambda path: {}}
    run = load_run(None, None, [*settings, *overrides], ignore_output_dir=True, **options)
    groups = ProcessGroups.build(run.grid(0), rank_device)
    model = build_model(
        run.recipe,
        run.ds_config,
        run.model.experts[0],
        groups=groups,
        device=rank_device,
        backend=attention_backend(run.recipe, run.model.shape.head_dim, rank_device),
    )
    engine = build_engine(model, run.ds_config, run.recipe, run.schedule.total_steps)
    batches = run.reader(groups.dims).prefetched(0, run.recipe.data.prefetch, pins=device == "cuda")

    def step() -> float:
        plan, [batch] = next(batches)
        result = train_step(
            engine,
            batch,
            run.objective,
            groups=groups,
            device=rank_device,
            denominator=run.schedule.denominator(plan),
        )
        return result.loss.item() / run.schedule.count(plan)

    return step


class Peer:
    """Training with the model of diffusers and the DeepSpeed engine of accelerate, without wands.

    Args:
        device: "cuda" or "cpu".
        kind: "full" for a full finetune, or "lora".
        is_compiled: whether to compile the transformer block, for all sizes of clips at once.
    """

    def __init__(self, device: str, kind: str, is_compiled: bool = False) -> None:
        from accelerate import Accelerator
        from accelerate.state import is_initialized
        from accelerate.utils import DeepSpeedPlugin
        from diffusers import WanTransformer3DModel

        samples = bench_step.make_samples(device, None)
        torch.manual_seed(0)
        model = WanTransformer3DModel(attention_head_dim=128, **bench_step.WIDTHS[device])
        torch.nn.init.zeros_(model.proj_out.weight)
        torch.nn.init.zeros_(model.proj_out.bias)
        model.enable_gradient_checkpointing()
        if kind == "lora":
            from peft import LoraConfig

            model.requires_grad_(False)
            targets = ["to_q", "to_k", "to_v", "to_out.0"]
            model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets))
        if is_compiled:
            model.compile_repeated_blocks(dynamic=True)
        plugin = DeepSpeedPlugin(
            zero_stage=2, gradient_accumulation_steps=len(samples), gradient_clipping=1.0
        )
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        if device == "cpu":  # not 2 GB for a small model
            plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = 10**6
        precision = "no" if device == "cpu" else "bf16"
        self._accelerator = Accelerator(
            mixed_precision=precision, deepspeed_plugin=None if is_initialized() else plugin
        )  # a process has one plugin
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device == "cuda")
        self._model, self._optimizer = self._accelerator.prepare(model.train(), optimizer)
        self._dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self._latents = [sample.latents.to(device) for sample in samples]
        self._texts = [bench_step.pad_text(sample.text_embeds).to(device, self._dtype) for sample in samples]

    def _backward(self, latents: Tensor, mask: Tensor | None, texts: Tensor, is_last: bool) -> Tensor:
        """Run the forward and backward pass of a batch, and return the loss of each clip.

        If `is_last` is true, the optimizer then updates the weights.
        """
        noise = torch.randn_like(latents)
        sigmas = torch.rand(len(latents), device=latents.device)
        levels = sigmas.view(-1, 1, 1, 1, 1)
        noisy = torch.lerp(latents, noise, levels).to(self._dtype)
        prediction = self._model(noisy, 1000 * sigmas, texts, return_dict=False)[0]
        errors = (prediction.float() - (noise - latents)) ** 2
        if mask is None:
            losses = errors.mean((1, 2, 3, 4))
        else:
            losses = (errors * mask).sum((1, 2, 3, 4)) / mask.sum((1, 2, 3, 4)) / LATENT_CHANNELS
        # What accelerator.backward calls; it also makes the update after the last clip.
        self._accelerator.deepspeed_engine_wrapped.backward(losses.mean(), sync_gradients=is_last)
        return losses.detach()

    def one_at_a_time(self) -> float:
        """Train one step with a separate forward and backward pass for each clip, and return the mean loss of the clips."""
        pairs = [*zip(self._latents, self._texts, strict=True)]
        losses = [
            self._backward(latents[None], None, text[None], number == len(pairs))
            for number, (latents, text) in enumerate(pairs, start=1)
        ]
        return torch.cat(losses).mean().item()

    def padded(self) -> float:
        """Train one step on all clips in one padded batch, and return the mean loss of the clips."""
        size = [max(x.shape[axis] for x in self._latents) for axis in (1, 2, 3)]
        latents = self._latents[0].new_zeros(len(self._latents), LATENT_CHANNELS, *size)
        mask = latents.new_zeros(len(latents), 1, *size)
        for row, x in enumerate(self._latents):
            inside = (row, slice(None), *map(slice, x.shape[1:]))
            latents[inside] = x
            mask[inside] = 1
        return self._backward(latents, mask, torch.stack(self._texts), True).mean().item()


def measure(
    device: str, kind: str, overrides: Sequence[str] = (), rounds: int = ROUNDS, is_compiled: bool = False
) -> Rows:
    """Measure an optimizer step of three variants.

    The variants are wands, diffusers with accelerate on one clip at a time, and diffusers with accelerate on one padded batch.

    Args:
        device: "cuda" or "cpu".
        kind: "full" trains all weights, "lora" trains a LoRA.
        overrides: recipe overrides for wands.
        rounds: number of timed steps of each variant.
        is_compiled: whether the variants of diffusers use torch.compile.

    Returns:
        One row of the table for each variant. If a variant of diffusers needs more memory than the device has, its row contains
        "out of memory" and no times.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "transformer").mkdir()
        config = {"attention_head_dim": 128, **bench_step.WIDTHS[device], **FIXED}
        (Path(folder) / "transformer" / "config.json").write_text(json.dumps(config))
        own = wands_step(device, kind, Path(folder), overrides)
        peer = Peer(device, kind, is_compiled)
        steps = {"wands": own, "one at a time": peer.one_at_a_time, "padded": peer.padded}
        # the first calls are the warm-up
        losses = {"wands": own()}
        peaks = {}
        too_large = []
        for name in ("one at a time", "padded"):
            try:
                losses[name] = steps[name]()
            except torch.OutOfMemoryError:
                too_large.append({"variant": f"{kind}, {name}", "peak MiB": "out of memory"})
        if too_large:  # DeepSpeed's engine is unusable after a backward pass that failed
            del steps, peer
            gc.collect()
            peer = Peer(device, kind, is_compiled)
            every = {"wands": own, "one at a time": peer.one_at_a_time, "padded": peer.padded}
            steps = {name: every[name] for name in losses}
            for step in steps.values():
                step()
        for name, step in steps.items():
            with PeakMemory(device) as peak:
                step()
            peaks[name] = peak.bytes / 2**20
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                started = time.perf_counter()
                step()  # reads the loss, and so waits for the device
                times[name].append(time.perf_counter() - started)
    tokens = sum(f * h * w for f, h, w in bench_step.GRIDS[device])
    rows: Rows = [
        {
            "variant": f"{kind}, {name}",
            "s": statistics.median(values),
            "tokens/s": tokens / statistics.median(values),
            "time ratio": statistics.median(a / b for a, b in zip(times["wands"], values, strict=True)),
            "peak MiB": peaks[name],
            "peak ratio": peaks["wands"] / peaks[name],
            "loss": losses[name],
        }
        for name, values in times.items()
    ]
    return rows + too_large


FIXED = {
    "_class_name": "WanTransformer3DModel",
    "patch_size": [1, 2, 2],
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "freq_dim": 256,
}
"""Entries of the DiT's config that are equal for all model sizes."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kind", choices=KINDS, action="append", help="trained weights; default: both")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--compile", action="store_true", help="diffusers uses torch.compile")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="recipe override for wands",
    )
    args = parser.parse_args()
    rows = [
        row
        for kind in args.kind or KINDS
        for row in measure(args.device, kind, args.overrides, args.rounds, args.compile)
    ]
    print(format_rows(rows))


if __name__ == "__main__":
    main()

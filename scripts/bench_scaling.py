"""Predict step time, overlap, MFU and memory of Wan on 8 to 1,024 GPUs. This is a prediction; nothing is measured.

    python scripts/bench_scaling.py                                   # GPUs like the H100; writes scaling.png
    python scripts/bench_scaling.py --published                       # published speeds of other trainers and their prediction
    python scripts/bench_scaling.py --network-bandwidth 12 --frames 241 --checkpointing full

The prediction uses the formulas and assumptions of `wands plan` (wands/planning). Every clip has the same length. A bin
contains the clips of one forward pass: as many clips as fit in --max-tokens, at least one. A step has --bins bins, which the
data-parallel ranks process in several micro steps. cp is the number of ranks that share a bin. As cp, the script chooses the
smallest power of two with which a rank needs at most 90 % of the memory and every data-parallel rank has a bin. Ulysses runs
inside a node, and the ring runs between nodes.

The column `needs L_eff` shows the smallest effective length of a bin at which the transfers of the ring's forward pass overlap
with compute completely. The effective length is sum(L^2) / sum(L), where L is the number of tokens of each clip. The smallest
effective length is R * F / B, with the ring degree R, the speed F of attention in FLOP/s, and the bandwidth B in bytes/s. The
column `fwd hides` shows whether the bin is long enough. The backward pass of a ring of four or more ranks needs an effective
length of 1.2 * R * F2 / B, with the speed F2 of the attention backward. The backward pass of a ring of two or three ranks needs
less.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from wands.config.deepspeed import build_ds_config, load_ds_config
from wands.config.recipe_loading import load_recipe
from wands.distributed.dims import choose_degrees
from wands.planning.hardware import MACHINES, Machine
from wands.planning.memory import estimate_memory, reserved_memory
from wands.planning.step_time import Prediction, Traffic, predict
from wands.planning.weights import list_weights
from wands.planning.workload import Weight, Workload
from wands.variants import VARIANTS, DiTShape

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
H100 = MACHINES["h100"]
SIZES = {"480p": (480, 832), "720p": (720, 1280)}
TI2V_5B = DiTShape(
    num_heads=24, head_dim=128, num_layers=30, ffn_dim=14336, in_channels=48, out_channels=48, text_dim=4096
)
MODELS = {  # VAE stride in frames, height, width
    "1.3B": (VARIANTS["wan2.1-t2v-1.3b"].dit, (4, 8, 8)),
    "TI2V-5B": (TI2V_5B, (4, 16, 16)),
    "14B": (VARIANTS["wan2.1-t2v-14b"].dit, (4, 8, 8)),
}
USABLE = 0.9  # usable share of a GPU's memory
OPTIONS = {  # field of Machine -> unit, help
    "peak": (1e12, "TFLOP/s of one GPU, dense bf16"),
    "linear_flops": (1e12, "TFLOP/s of linear layers"),
    "copy_bandwidth": (1e9, "GB/s that copies in the GPU's memory read and write"),
    "node_bandwidth": (1e9, "GB/s of one GPU inside a node"),
    "network_bandwidth": (1e9, "GB/s of one GPU's network card"),
    "memory": (1e9, "GB of one GPU"),
}


def clip_tokens(shape: DiTShape, stride: Sequence[int], size: tuple[int, int], frames: int) -> int:
    """Return the number of tokens of a clip with `frames` frames and the height and width in `size`.

    Height and width are first rounded down to multiples of VAE stride x patch size.
    """
    steps = [step * patch for step, patch in zip(stride[1:], shape.patch_size[1:], strict=True)]
    rows, columns = (side // step for side, step in zip(size, steps, strict=True))
    return ((frames - 1) // stride[0] + 1) * rows * columns


@cache
def weights_of(shape: DiTShape) -> tuple[Weight, ...]:
    """Return the name, shape and storage size of each parameter of a model. The model is trained in fp32."""
    return list_weights(load_recipe(None), shape.to_config(), ())


@dataclass(frozen=True)
class Setting:
    """Settings of a prediction that do not depend on the model.

    The settings are the GPU, the checkpointing, the communication dtype, and the bins per step.
    """

    machine: Machine = H100
    checkpointing: str = "selective"
    reduce: str = "fp32"
    bins: int = 64


def workload_of(shape: DiTShape, lens: Sequence[int], gpus: int, cp: int, setting: Setting) -> Workload:
    """Return the workload of a full finetune on `gpus` ranks with ds_configs/zero3.json.

    Every `cp` ranks share a bin. Each bin contains clips of `lens` tokens.
    """
    keys = [f"model.checkpointing={setting.checkpointing}", f"packing.max_tokens={sum(lens)}"]
    keys += [f"parallel.cp_size={cp}", f"train.bins_per_step={setting.bins}"]
    recipe = load_recipe(None, [*keys, f"precision.reduce={setting.reduce}"])
    in_node = min(gpus, setting.machine.ranks_per_node)
    degrees = choose_degrees(
        recipe.parallel, num_heads=shape.num_heads, ranks_per_node=in_node, model="the model"
    )
    return Workload(
        recipe,
        shape,
        weights_of(shape),
        num_models=1,
        world_size=gpus,
        ds_config=build_ds_config(load_ds_config("zero3"), recipe, world_size=gpus, device_type="cuda"),
        ulysses_degree=degrees.ulysses,
        ring_degree=degrees.ring,
        micro_steps=setting.bins // (gpus // cp),
        max_tokens=sum(lens),
        max_samples=len(lens),
    )


def prediction(shape: DiTShape, lens: Sequence[int], gpus: int, cp: int, setting: Setting) -> Prediction:
    return predict(workload_of(shape, lens, gpus, cp, setting), setting.machine, lens)


def memory(one: Prediction) -> float:
    """Return the memory that one rank needs, in bytes."""
    return estimate_memory(one.workload).needed


def fits(one: Prediction) -> bool:
    """Return whether a rank needs at most 90 % of the GPU memory that CUDA and NCCL leave free."""
    return memory(one) <= USABLE * (one.machine.memory - reserved_memory(one.workload))


def smallest_fit(shape: DiTShape, lens: Sequence[int], gpus: int, setting: Setting) -> Prediction | None:
    """Return the prediction for the smallest number of ranks per bin with which training fits in memory.

    Return None if no number fits.
    """
    predictions = (prediction(shape, lens, gpus, cp, setting) for cp in cp_sizes(gpus, setting.bins))
    return next(filter(fits, predictions), None)


def effective_len(one: Prediction) -> float:
    """Return the effective length of the bin of a prediction: sum(L^2) / sum(L) over its clips' lengths L.

    A bin whose clips all have this length needs as much attention work per token as the bin of the prediction.
    """
    lens = one.plan.seq_lens
    return sum(length * length for length in lens) / sum(lens)


def needed_len(one: Prediction) -> float:
    """Return the smallest `effective_len` of a bin at which ring attention hides all its forward transfers.

    The transfers are hidden if each takes at most as long as the attention kernel that runs at the same time.
    """
    return (
        one.plan.ring_degree
        * one.machine.attention_speeds()[0]
        / one.machine.ring_bandwidth(one.workload.cp_size)
    )


def hidden(traffic: Traffic) -> float:
    """Return the share of the transfer time that overlaps with compute, from 0 to 1; 1 if nothing is transferred."""
    return 1 - traffic.exposed / traffic.total if traffic.total else 1.0


def cp_sizes(gpus: int, bins: int) -> list[int]:
    """Return the possible numbers of ranks that share a bin (sequence), if a step on `gpus` GPUs has `bins` bins.

    The numbers are the powers of two with which every data-parallel rank gets at least one bin.
    """
    return [cp for cp in (1 << i for i in range(gpus.bit_length())) if gpus // cp <= bins]


def _blackwell(name: str, peak: float, memory: float) -> Machine:
    """Return a machine like the B200, with `peak` in TFLOP/s, `memory` in GB, and 32 instead of 8 GPUs in a node."""
    base = MACHINES["b200"]
    ratio = peak * 1e12 / MACHINES["b200"].peak
    attention = {
        kernel: [ratio * speed for speed in speeds] for kernel, speeds in base.attention_flops.items()
    }
    speeds = {"linear_flops": ratio * base.linear_flops, "attention_flops": attention}
    return replace(base, name=name, peak=peak * 1e12, memory=memory * 1e9, ranks_per_node=32, **speeds)


PUBLISHED = (  # trainer, machine, GPUs, TFLOP/s of the model on each GPU
    ("Megatron-Bridge", H100, 128, 325.8),
    ("Megatron-Bridge", MACHINES["b200"], 32, 804.0),
    ("Megatron-Bridge", _blackwell("GB200 186 GB", 2500, 186), 32, 899.6),
    ("Megatron-Bridge", _blackwell("GB300 288 GB", 2500, 288), 32, 1030.7),
    ("NeMo Automodel FSDP2", H100, 8, 175.9),
    ("NeMo Automodel FSDP2", H100, 64, 228.9),
)
"""Published speeds of pretraining Wan 2.1 14B with clips of `PUBLISHED_TOKENS` tokens."""
PUBLISHED_TOKENS = 37_440


def published_errors() -> list[tuple[str, float, float]]:
    """Return (title of the table row, published TFLOP/s, predicted TFLOP/s) for each speed in `PUBLISHED`.

    The settings of the other trainers are not known in detail. The prediction uses the fastest of the checkpointing modes
    `none`, `selective` and `full`, with the smallest number of ranks per bin that fits in memory.
    A step has one bin per GPU.
    """
    rows = []
    for trainer, machine, gpus, tflops in PUBLISHED:
        found = [
            smallest_fit(MODELS["14B"][0], [PUBLISHED_TOKENS], gpus, Setting(machine, mode, bins=gpus))
            for mode in ("none", "selective", "full")
        ]
        one = min(filter(None, found), key=lambda one: one.seconds)
        mode = f"{one.workload.recipe.model.checkpointing}, cp {one.workload.cp_size}"
        rows.append(
            (f"{trainer:22}{gpus:4} x {machine.name:13}{mode:18}", tflops, one.mfu * machine.peak / 1e12)
        )
    return rows


HEADER = (
    f"{'gpus':>6}{'dp':>5}{'ring x ulysses':>16}{'step s':>9}{'compute':>9}{'a2a':>8}{'ring':>8}{'hidden':>8}"
    f"{'ZeRO':>8}{'hidden':>8}{'needs L_eff':>13}{'fwd hides':>12}{'MFU':>7}{'GB/GPU':>8}{'tokens/s':>12}"
)


def line(one: Prediction) -> str:
    plan = one.plan
    micro_steps = one.micro_steps
    seconds = [micro_steps * x for x in (one.compute, one.all_to_all.total)]
    cells = f"{one.workload.world_size:6}{one.dp:5}{f'{plan.ring_degree} x {plan.ulysses_degree}':>16}{one.seconds:9.2f}"
    cells += f"{seconds[0]:9.2f}{seconds[1]:8.2f}"
    ring = one.ring_traffic * micro_steps
    zero = one.zero * micro_steps
    cells += f"{ring.total:8.2f}{hidden(ring):8.0%}" if ring.total else f"{'':16}"
    cells += f"{zero.total:8.2f}{hidden(zero):8.0%}"
    hides = "yes" if effective_len(one) >= needed_len(one) else "no"
    cells += f"{needed_len(one):13,.0f}{hides:>12}" if ring.total else f"{'':25}"
    tokens = one.workload.recipe.train.bins_per_step * sum(plan.seq_lens) / one.seconds
    return (
        f"{cells}{one.mfu:7.1%}{memory(one) / 1e9:8.1f}{tokens:12,.0f}{'' if fits(one) else '  does not fit'}"
    )


def save_plot(path: Path, rows: dict[str, list[Prediction]], title: str) -> None:
    """Plot step time, MFU and memory over the number of GPUs.

    Args:
        path: image to write.
        rows: maps the name of each line, such as "14B 480p", to the predictions for all numbers of GPUs.
        title: title of the plot.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    for i, (axes, label) in enumerate(zip(panels, ("seconds per step", "MFU, %", "GB per GPU"), strict=True)):
        for name, ones in rows.items():
            values = [(one.seconds, 100 * one.mfu, memory(one) / 1e9)[i] for one in ones]
            style = {"color": f"C{list(MODELS).index(name.split()[0])}", "marker": "o", "markersize": 3}
            dashes = "-" if name.endswith("480p") else "--"
            axes.plot([one.workload.world_size for one in ones], values, dashes, label=name, **style)
        axes.set(xscale="log", xticks=GPUS, xticklabels=list(map(str, GPUS)), xlabel="GPUs", ylabel=label)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_yscale("log")
    panels[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-tokens", type=int, default=75_600, help="largest number of tokens of a bin")
    parser.add_argument("--frames", type=int, default=81, help="frames of a clip")
    parser.add_argument("--bins", type=int, default=64, help="bins of an optimizer step, a power of two")
    parser.add_argument("--checkpointing", choices=["none", "selective", "full"], default="selective")
    parser.add_argument("--reduce", choices=["fp32", "bf16"], default="fp32", help="dtype of ZeRO's traffic")
    parser.add_argument("--every-cp-at", type=int, default=64, help="GPUs in the tables of all cp sizes")
    parser.add_argument("--ranks-per-node", type=int, default=H100.ranks_per_node)
    parser.add_argument("--plot", type=Path, default=Path("scaling.png"))
    for name, (unit, words) in OPTIONS.items():
        default = getattr(H100, name) / unit
        parser.add_argument("--" + name.replace("_", "-"), type=float, default=default, help=words)
    for part, speed in zip(("forward", "backward"), H100.attention_speeds(), strict=True):
        words = "TFLOP/s of the attention kernel"
        parser.add_argument(f"--attention-{part}-flops", type=float, default=speed / 1e12, help=words)
    words = "compare published speeds of other trainers with their prediction, and exit"
    parser.add_argument("--published", action="store_true", help=words)
    args = parser.parse_args()
    if args.published:
        print(f"Wan 2.1 14B, clips of {PUBLISHED_TOKENS:,} tokens: TFLOP/s of a GPU, published and predicted")
        for row, tflops, predicted in published_errors():
            print(f"{row}{tflops:9.1f}{predicted:9.1f}{predicted / tflops - 1:+8.0%}")
        return
    if args.bins & (args.bins - 1):
        parser.error(f"--bins {args.bins} is not a power of two; use 1, 2, 4 or 8, for example")
    rates = {name: getattr(args, name) * unit for name, (unit, _) in OPTIONS.items()}
    attention = {"kernel": (args.attention_forward_flops * 1e12, args.attention_backward_flops * 1e12)}
    machine = replace(H100, **rates, attention_flops=attention, ranks_per_node=args.ranks_per_node)
    setting = Setting(machine, args.checkpointing, args.reduce, args.bins)
    title = (
        f"predicted, not measured: peak {args.peak:g} TFLOP/s, {args.linear_flops:g} in linear layers, attention "
        f"{args.attention_forward_flops:g} forward and {args.attention_backward_flops:g} backward; "
        f"{args.node_bandwidth:g} GB/s in a node of {args.ranks_per_node}, "
        f"{args.network_bandwidth:g} GB/s per card between;\n{args.bins} bins a step, ZeRO-3 in {args.reduce}, "
        f"checkpointing {args.checkpointing}"
    )
    print(f"{title}; seconds are of a whole step. All-to-alls are never hidden;")
    print("no latency, stragglers, input or optimizer time. All assumptions: --help")
    rows: dict[str, list[Prediction]] = {}
    for model, (shape, stride) in MODELS.items():
        for size, sides in SIZES.items():
            tokens = clip_tokens(shape, stride, sides, args.frames)
            lens = [tokens] * max(1, args.max_tokens // tokens)
            print(
                f"\n{model} {size}: L_eff = clips of {tokens:,} tokens, {len(lens)} in a bin of {sum(lens):,}"
            )
            print(f"the smallest cp that fits\n{HEADER}")
            found = {gpus: smallest_fit(shape, lens, gpus, setting) for gpus in GPUS}
            for gpus, one in found.items():
                print(line(one) if one else f"{gpus:6}  no cp fits")
            rows[f"{model} {size}"] = [one for one in found.values() if one]
            print(f"every cp on {args.every_cp_at} GPUs")
            for cp in cp_sizes(args.every_cp_at, args.bins):
                print(line(prediction(shape, lens, args.every_cp_at, cp, setting)))
    save_plot(args.plot, rows, title)
    print(f"\nplot: {args.plot}")


if __name__ == "__main__":
    main()

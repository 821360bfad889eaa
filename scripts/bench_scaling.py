"""Predict step time, overlap, MFU and memory of Wan on 8 to 1,024 GPUs: arithmetic, nothing is measured.

    python scripts/bench_scaling.py                                   # H100-like: tables and scaling.png, no GPU, seconds
    python scripts/bench_scaling.py --network-bandwidth 12 --frames 241 --checkpointing full

It asks the functions that wands itself plans and reports with: DiTShape for FLOPs and parameters, ContextPlan for the cut of
a bin, its balance and its bytes, choose_degrees for the degrees, plan_epoch's LEVEL for the wait for the slowest rank, and
estimate_memory for the memory. Assumptions:

work      Every clip has the same length; a bin holds as many as fit in --max-tokens, at least one. A step is --bins bins, dp
          ranks beside each other, micro steps one after the other. Kernels reach --linear-efficiency and
          --attention-efficiency of --peak. Backward is 2 forwards of the linear layers and 2.5 of attention, whose scores
          are computed again. Checkpointing adds a forward, `selective` one without attention.
cp        The smallest power of two that fits in memory and leaves every dp rank a bin; choose_degrees puts ulysses in the node
          and the ring across.
ulysses   Hidden: nothing. All-to-alls over --node-bandwidth; checkpointing runs the forward's again, `selective` without
          the result's.
ring      The message of a round runs beside that round's kernel: hidden as far as the kernel lasts, but for the last hop, which
          takes the gradients home. Over --network-bandwidth once the group leaves the node. The forward hides where
          L_eff = sum(L^2) / sum(L) is at least R * F / B (F: attention FLOP/s, B: bytes/s of the link); the backward asks 1.2
          times that, less for two or three ranks.
ZeRO-3    Two gathers of the weights and one reduce-scatter of the gradients per micro step, fp32 or bf16 as --reduce. A ring
          over all ranks uses all network cards of a node at once. Hidden in compute that the ring has left over.
memory    estimate_memory. A rank may use 90 %.
left out  Latency, congestion, stragglers, the optimizer's own time, input, padding inside kernels, small-kernel losses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wands.config import ParallelSection, load_recipe
from wands.data.packing import LEVEL
from wands.parallel.layout import ContextPlan
from wands.parallel.mesh import choose_degrees
from wands.train.summary import estimate_memory
from wands.variants import VARIANTS, DiTShape, legal_frames

ROOT = Path(__file__).resolve().parents[1]
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
SIZES = {"480p": (480, 832), "720p": (720, 1280)}
TI2V_5B = DiTShape(24, 128, 30, 14336, in_channels=48, out_channels=48, text_dim=4096)
MODELS = {  # and the VAE's stride in frames, height, width
    "1.3B": (VARIANTS["wan2.1-t2v-1.3b"].dit, (4, 8, 8)),
    "TI2V-5B": (TI2V_5B, (4, 16, 16)),
    "14B": (VARIANTS["wan2.1-t2v-14b"].dit, (4, 8, 8)),
}
BF16, FP32 = 2, 4
LINEAR_BACKWARD, ATTENTION_BACKWARD = 2.0, 2.5  # in forwards
USABLE = 0.9  # of a GPU's memory


@dataclass(frozen=True)
class Machine:
    """One GPU and its links, one direction, as kernels and NCCL sustain them."""

    peak: float = 989e12
    linear_efficiency: float = 0.5
    attention_efficiency: float = 0.4
    node_bandwidth: float = 300e9
    network_bandwidth: float = 45e9
    memory: float = 80e9
    ranks_per_node: int = 8

    def ring_bandwidth(self, cp: int) -> float:
        """A ring waits for its slowest link."""
        return self.node_bandwidth if cp <= self.ranks_per_node else self.network_bandwidth

    def world_bandwidth(self, gpus: int) -> float:
        """Of a gather over all ranks, per rank."""
        cards = self.ranks_per_node * self.network_bandwidth
        return self.node_bandwidth if gpus <= self.ranks_per_node else min(self.node_bandwidth, cards)


OPTIONS = {  # field of Machine -> unit, help
    "peak": (1e12, "TFLOP/s of one GPU, dense bf16"),
    "linear_efficiency": (1, "share of the peak"),
    "attention_efficiency": (1, "share of the peak"),
    "node_bandwidth": (1e9, "GB/s of one GPU inside a node"),
    "network_bandwidth": (1e9, "GB/s of one GPU's network card"),
    "memory": (1e9, "GB of one GPU"),
}


@dataclass(frozen=True)
class Setting:
    """What all rows of a table share."""

    machine: Machine = Machine()
    checkpointing: str = "selective"
    reduce: str = "fp32"
    bins: int = 64


@dataclass(frozen=True)
class Traffic:
    """Seconds of transfer, and those of them that compute does not hide."""

    total: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.total + other.total, self.exposed + other.exposed)

    def __mul__(self, count: int) -> Traffic:
        return Traffic(self.total * count, self.exposed * count)

    @property
    def hidden(self) -> float:
        """Share."""
        return 1 - self.exposed / self.total if self.total else 1.0


@dataclass(frozen=True)
class Prediction:
    """One optimizer step; FLOPs, compute and traffic are of one micro step on one rank, in seconds. Memory in bytes."""

    setting: Setting
    gpus: int
    plan: ContextPlan
    flops: float
    compute: float
    all_to_all: Traffic
    ring_traffic: Traffic
    zero: Traffic
    memory: float

    @property
    def cp(self) -> int:
        return self.plan.ulysses_degree * self.plan.ring_degree

    @property
    def dp(self) -> int:
        return self.gpus // self.cp

    @property
    def seconds(self) -> float:
        slowest = self.compute / (LEVEL if self.dp > 1 else 1.0)
        micro_step = slowest + self.all_to_all.exposed + self.ring_traffic.exposed + self.zero.exposed
        return micro_step * (self.setting.bins // self.dp)

    @property
    def mfu(self) -> float:
        """Share of the peak that the model's own FLOPs make; what is computed twice does not count."""
        flops = self.flops * (self.setting.bins // self.dp)
        return flops / self.seconds / self.setting.machine.peak

    @property
    def l_eff(self) -> float:
        lens = self.plan.seq_lens
        return sum(length * length for length in lens) / sum(lens)

    @property
    def l_needed(self) -> float:
        """For the ring's forward to hide."""
        machine = self.setting.machine
        flops = machine.peak * machine.attention_efficiency
        return self.plan.ring_degree * flops / machine.ring_bandwidth(self.cp)

    @property
    def fits(self) -> bool:
        return self.memory <= USABLE * self.setting.machine.memory


def clip_tokens(shape: DiTShape, stride: Sequence[int], size: tuple[int, int], frames: int) -> int:
    """Tokens of a clip whose sides are cut to what VAE and patches divide."""
    steps = [step * patch for step, patch in zip(stride[1:], shape.patch_size[1:], strict=True)]
    rows, columns = (side // step for side, step in zip(size, steps, strict=True))
    return ((legal_frames(frames) - 1) // stride[0] + 1) * rows * columns


def predict(shape: DiTShape, lens: Sequence[int], gpus: int, cp: int, setting: Setting) -> Prediction:
    """Steps in which every group of `cp` ranks forwards bins of samples of `lens` tokens."""
    machine, layers = setting.machine, shape.num_layers
    in_node = min(gpus, machine.ranks_per_node)
    parallel = ParallelSection(cp_size=cp)
    ulysses, ring = choose_degrees(parallel, num_heads=shape.num_heads, ranks_per_node=in_node, model="")
    plan = ContextPlan.build(lens, ulysses_degree=ulysses, ring_degree=ring)

    pairs = shape.attention_flops_per_squared_token() * sum(length * length for length in lens)
    # Text and time embeddings are computed by every rank of the group.
    whole = len(lens) * shape.linear_flops_per_sample()
    linear = (shape.forward_flops(lens) - pairs - whole) / cp + whole
    linear /= machine.peak * machine.linear_efficiency
    attention = pairs / cp * plan.cost_balance() / (machine.peak * machine.attention_efficiency)
    again = setting.checkpointing != "none"
    attend_again = setting.checkpointing == "full"
    forward = linear + attention
    backward = (LINEAR_BACKWARD + again) * linear + (ATTENTION_BACKWARD + attend_again) * attention

    comm = plan.comm_bytes(shape.dim, BF16)
    sent_again = {"none": 0.0, "selective": 3 / 4, "full": 1.0}[
        setting.checkpointing
    ]  # of q, k, v and the result
    exchanged = layers * ((1 + sent_again) * comm.ulysses_forward + comm.ulysses_backward)
    exchanged /= machine.node_bandwidth
    one_way, back = ring_traffic(plan, shape.dim, attention / layers, machine.ring_bandwidth(cp))
    ring_forward, ring_backward = one_way * layers, (back + one_way * attend_again) * layers

    weights = shape.num_params * (FP32 if setting.reduce == "fp32" else BF16)
    gather = weights * (gpus - 1) / gpus / machine.world_bandwidth(gpus)
    exposed = 0.0
    for zero, compute, messages in ((gather, forward, ring_forward), (2 * gather, backward, ring_backward)):
        left_over = compute - (messages.total - messages.exposed)
        exposed += max(0.0, zero - left_over)
    flops, all_to_all = 3 * shape.forward_flops(lens) / cp, Traffic(exchanged, exchanged)
    ring_both, zero_all = ring_forward + ring_backward, Traffic(3 * gather, exposed)
    held = memory(shape, plan, gpus, setting)
    return Prediction(setting, gpus, plan, flops, forward + backward, all_to_all, ring_both, zero_all, held)


def ring_traffic(plan: ContextPlan, dim: int, attention: float, bandwidth: float) -> list[Traffic]:
    """Forward and backward of one layer, round by round, as wands/attention/ring.py sends and waits.

    `attention` is the seconds of the layer's forward on one rank, `bandwidth` that of the slowest link.
    """
    degree, comm = plan.ring_degree, plan.comm_bytes(dim, BF16)
    if degree == 1:
        return [Traffic(), Traffic()]
    block = comm.ring_forward / (degree - 1) / bandwidth
    grads = (comm.ring_backward - comm.ring_forward) / (degree - 1) / bandwidth
    kernel = attention / degree
    # The gradients of a block begin at the next row, travel beside the round after, and come home beside nothing.
    backward = [block * (step < degree - 1) + grads * (step > 1) for step in range(degree)]
    late = sum(max(0.0, message - ATTENTION_BACKWARD * kernel) for message in backward)
    forward = Traffic(block, max(0.0, block - kernel)) * (degree - 1)
    return [forward, Traffic(sum(backward) + grads, late + grads)]


def memory(shape: DiTShape, plan: ContextPlan, gpus: int, setting: Setting) -> float:
    """Bytes of one rank under ds_configs/zero3.json."""
    asked = [f"model.checkpointing={setting.checkpointing}", f"packing.max_tokens={sum(plan.seq_lens)}"]
    recipe = load_recipe(None, [*asked, f"parallel.cp_size={plan.ulysses_degree * plan.ring_degree}"])
    zero = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())["zero_optimization"]
    parts = estimate_memory(
        shape, recipe, zero_stage=3, world_size=gpus, zero=zero, ring_degree=plan.ring_degree
    )
    return sum(parts.values())


def smallest_fit(shape: DiTShape, lens: Sequence[int], gpus: int, setting: Setting) -> Prediction | None:
    """With the fewest ranks per bin; None where no number fits."""
    predictions = (predict(shape, lens, gpus, cp, setting) for cp in cp_sizes(gpus, setting.bins))
    return next((one for one in predictions if one.fits), None)


def cp_sizes(gpus: int, bins: int) -> list[int]:
    """Powers of two that leave every dp rank a bin."""
    return [cp for cp in (1 << i for i in range(gpus.bit_length())) if gpus // cp <= bins]


HEADER = (
    f"{'gpus':>6}{'dp':>5}{'ring x ulysses':>16}{'step s':>9}{'compute':>9}{'a2a':>8}{'ring':>8}{'hidden':>8}"
    f"{'ZeRO':>8}{'hidden':>8}{'needs L_eff':>13}{'fwd hides':>12}{'MFU':>7}{'GB/GPU':>8}{'tokens/s':>12}"
)


def line(one: Prediction) -> str:
    plan, micro_steps = one.plan, one.setting.bins // one.dp
    seconds = [micro_steps * x for x in (one.compute, one.all_to_all.total)]
    cells = f"{one.gpus:6}{one.dp:5}{f'{plan.ring_degree} x {plan.ulysses_degree}':>16}{one.seconds:9.2f}"
    cells += f"{seconds[0]:9.2f}{seconds[1]:8.2f}"
    ring, zero = one.ring_traffic * micro_steps, one.zero * micro_steps
    cells += f"{ring.total:8.2f}{ring.hidden:8.0%}" if ring.total else f"{'':16}"
    cells += f"{zero.total:8.2f}{zero.hidden:8.0%}"
    hides = "yes" if one.l_eff >= one.l_needed else "no"
    cells += f"{one.l_needed:13,.0f}{hides:>12}" if ring.total else f"{'':25}"
    tokens = one.setting.bins * sum(plan.seq_lens) / one.seconds
    return (
        f"{cells}{one.mfu:7.1%}{one.memory / 1e9:8.1f}{tokens:12,.0f}{'' if one.fits else '  does not fit'}"
    )


def save_plot(path: Path, rows: dict[str, list[Prediction]], title: str) -> None:
    """Seconds, MFU and memory over GPUs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    for i, (axes, label) in enumerate(zip(panels, ("seconds per step", "MFU, %", "GB per GPU"), strict=True)):
        for name, ones in rows.items():
            values = [(one.seconds, 100 * one.mfu, one.memory / 1e9)[i] for one in ones]
            style = {"color": f"C{list(MODELS).index(name.split()[0])}", "marker": "o", "markersize": 3}
            dashes = "-" if name.endswith("480p") else "--"
            axes.plot([one.gpus for one in ones], values, dashes, label=name, **style)
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
    parser.add_argument("--max-tokens", type=int, default=75_600, help="of a bin")
    parser.add_argument("--frames", type=int, default=81, help="of a clip")
    parser.add_argument("--bins", type=int, default=64, help="of an optimizer step; a power of two")
    parser.add_argument("--checkpointing", choices=["none", "selective", "full"], default="selective")
    parser.add_argument("--reduce", choices=["fp32", "bf16"], default="fp32", help="dtype of ZeRO's traffic")
    parser.add_argument("--every-cp-at", type=int, default=64, help="GPUs of the tables over all cp sizes")
    parser.add_argument("--ranks-per-node", type=int, default=Machine.ranks_per_node)
    parser.add_argument("--plot", type=Path, default=Path("scaling.png"))
    for name, (unit, words) in OPTIONS.items():
        default = getattr(Machine, name) / unit
        parser.add_argument("--" + name.replace("_", "-"), type=float, default=default, help=words)
    args = parser.parse_args()
    if args.bins & (args.bins - 1):
        parser.error(f"--bins {args.bins} is no power of two")
    rates = {name: getattr(args, name) * unit for name, (unit, _) in OPTIONS.items()}
    machine = Machine(**rates, ranks_per_node=args.ranks_per_node)
    setting = Setting(machine, args.checkpointing, args.reduce, args.bins)
    title = (
        f"predicted, not measured: {args.peak:g} TFLOP/s, of it {args.linear_efficiency:g} in linear layers and "
        f"{args.attention_efficiency:g} in attention; {args.node_bandwidth:g} GB/s in a node of {args.ranks_per_node}, "
        f"{args.network_bandwidth:g} GB/s per card between;\n{args.bins} bins a step, ZeRO-3 in {args.reduce}, "
        f"checkpointing {args.checkpointing}"
    )
    print(f"{title}; seconds are of a whole step. All-to-alls are never hidden;")
    print("no latency, stragglers, input, optimizer time or losses of small kernels. All assumptions: --help")
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
                print(line(predict(shape, lens, args.every_cp_at, cp, setting)))
    save_plot(args.plot, rows, title)
    print(f"\nplot: {args.plot}")


if __name__ == "__main__":
    main()

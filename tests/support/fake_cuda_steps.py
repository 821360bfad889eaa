"""Training steps on a fake GPU, one for each case: `python -m tests.support.fake_cuda_steps LIBRARY`, JSON in and out."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.fake_cuda import fake_cuda, fake_streams, load, move
from tests.support.fake_cuda_mistakes import objective_with

TEXT_DIM = 64
IMAGE_DIM = 32


def main() -> None:
    load(Path(sys.argv[1]))
    fake_streams()
    found = {}
    for name, case in json.load(sys.stdin).items():
        try:
            call = measure if "kernels" in case else encode_windows if "vae" in case else run_step
            found[name] = call(**case)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    json.dump(found, sys.stdout)


def measure(kernels: list[str]) -> dict[str, Any]:
    """Measure kernels with events whose clock advances by a millisecond at each record. Return times and matmuls before each."""
    import torch

    from wands.engine.attention_choice import measure_backends

    queued: list[int] = []  # matmuls before each record

    class Event:
        now = 0.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = Event.now
            Event.now = Event.now + 1
            queued.append(matmuls)

        def synchronize(self) -> None:
            assert self.time == Event.now - 1  # the last event

        def elapsed_time(self, end: Event) -> float:
            return end.time - self.time

    matmuls = 0
    mm = torch.mm

    def counted(*matrices: torch.Tensor) -> torch.Tensor:
        nonlocal matmuls
        matmuls += 1
        return mm(*matrices)

    torch.cuda.Event = Event
    torch.mm = counted
    with fake_cuda():
        return {"times": measure_backends(kernels, torch.device("cuda"), 2, 64), "queued": queued}


def encode_windows(vae: dict[str, Any]) -> dict[str, Any]:
    """Two windows through the encoder of `wands preprocess`, with a VAE of this config.

    The host may wait in two places, which are left out: the check of the pixels and the copy of the latents to the CPU.
    """
    import torch
    from diffusers import AutoencoderKLWan

    from wands.conditions.published import conditions_of
    from wands.encoders import image
    from wands.encoders.vae import WanVideoEncoder
    from wands.variants import VARIANTS

    to_pixels = image.to_pixels
    given = []

    def watched(frames: Any) -> Any:
        given.append(f"{frames.dtype} {frames.device.type}")
        return to_pixels(frames)

    model = AutoencoderKLWan(**vae)
    image.to_pixels = watched
    aminmax = torch.Tensor.aminmax
    cpu = torch.Tensor.cpu
    torch.Tensor.aminmax = lambda _: (-1.0, 1.0)
    torch.Tensor.cpu = lambda tensor: tensor
    try:
        with fake_cuda(may_wait=True):
            encoder = WanVideoEncoder(move(model))
        with fake_cuda():
            windows = [torch.zeros(9, 64, 96, 3, dtype=torch.uint8).pin_memory() for _ in range(2)]
            encoders: Any = SimpleNamespace(vae=encoder, device=model.device)
            conditions = conditions_of(VARIANTS["wan2.2-i2v-a14b"])
            encoded = image.WindowEncoder(encoders, conditions).encode([(frames, {}) for frames in windows])
    finally:
        image.to_pixels = to_pixels
        torch.Tensor.aminmax = aminmax
        torch.Tensor.cpu = cpu
    convs = [
        module.weight for module in model.modules() if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d)
    ]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return {
        "given": given,
        "latents": [
            [f"{one.device.type} {list(one.shape)}" for one in window.values()] for window in encoded
        ],
        "not channels last": sum(not one.is_contiguous(memory_format=formats[one.ndim]) for one in convs),
        "convolutions": len(convs),
    }


def _two_layers(row: Any) -> dict[str, Any]:
    """Config of a model of two layers in the variant's own width."""
    config = {key: value for key, value in row.dit.to_config().items() if key[0] != "_"}
    config |= {"num_layers": 2, "text_dim": TEXT_DIM}
    if config.get("image_dim"):
        config["image_dim"] = IMAGE_DIM
    return config


def _make_batch(row: Any, recipe: Any, config: dict[str, Any], grids: list[list[int]]) -> Any:
    import torch

    from wands.conditions.published import published_conditions
    from wands.data.collate import PackingCollator
    from wands.variants import DiTShape

    shape = DiTShape.from_config(config)
    collate = PackingCollator(
        shape=shape,
        flow=recipe.flow,
        seed=0,
        null_text_embeds=torch.zeros(1, TEXT_DIM),
        conditions=published_conditions(shape, row.conditions),
        has_dropout=recipe.uses_dropout,
    )
    return collate(make_samples(shape, row.conditions, grids), [0] * len(grids), 0)


def _move_with_swapping(model: Any, recipe: Any) -> None:
    """Move a model to the GPU, its blocks only if they are not swapped."""
    import torch

    from wands.model import swapping
    from wands.model.swapping import BlockSwapper

    if recipe.model.swap_blocks:
        model.blocks.to_empty(device="cpu")
        swapping.new_page = lambda device, size: torch.empty(size, dtype=torch.uint8).pin_memory()
        model.swapper = BlockSwapper(list(model.blocks), torch.device("cuda"))
    move(model)
    if swapper := model.swapper:  # `move` makes new parameters, and torch's `to` keeps them
        swapper._weights = [
            [weight for weight in block.parameters() if not weight.requires_grad] for block in model.blocks
        ]


def _set_attention(model: Any, recipe: Any, groups: Any) -> set[str]:
    """Let a model use a kernel that is watched. Return the set of what the kernel will be given."""
    from wands.attention.kernels.registry import BACKENDS
    from wands.attention.ulysses import context_attention

    given: set[str] = set()
    kernel = "torch" if recipe.precision.compute == "bf16" else "reference"
    backend = BACKENDS[kernel] = watched(BACKENDS[kernel], given)
    model.set_attention(context_attention(backend, **groups), backend)
    return given


def _set_checkpointing(model: Any, recipe: Any) -> None:
    import torch

    from wands.attention.ulysses import OPERATORS
    from wands.model.offload import ActivationOffloader

    store = ActivationOffloader(torch.device("cuda"))  # with pages in place of pinned memory
    store._new_page = lambda: torch.empty(store.page_bytes, dtype=torch.uint8, device="cuda")
    kept = recipe.model.kept_on_device, recipe.model.kept_on_host
    model.set_checkpointing(recipe.model.checkpointing, *kept, operators=OPERATORS, offloader=store)


def _gradients(model: Any, result: Any) -> dict[str, Any]:
    """Devices and dtypes of the gradients of a step."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    tensors = [result.loss, result.errors, *grads.values()]
    return {
        "without gradient": [name for name, grad in grads.items() if grad is None],
        "gradients": len(grads),
        "devices": sorted({one.device.type for one in tensors if one is not None}),
        "dtypes": sorted({str(grad.dtype) for grad in grads.values()}),
    }


def run_step(
    variant: str,
    settings: list[str],
    grids: list[list[int]],
    cp: tuple[int, int] | None = None,
    mistake: str | None = None,
) -> dict[str, Any]:
    """One `train_step` of a model of two layers in the variant's own width.

    Args:
        variant: a name in `VARIANTS`.
        settings: of the recipe, ``section.key=value`` each.
        grids: tokens of each clip.
        cp: degrees of ring and Ulysses, once in a process; of the operators of both the functions are run then, which they
            otherwise only ask for shapes.
        mistake: what the objective does to the errors of its tokens besides, see `MISTAKES`.

    Returns:
        Devices and dtypes of gradients, and dtypes of what the attention kernels were given.
    """
    import torch

    from wands.attention.layout import ContextLayout
    from wands.config.recipe_loading import load_recipe
    from wands.distributed.dims import ParallelDims, ProcessGroups
    from wands.model.files.loading import build_empty
    from wands.model.lora import add_lora
    from wands.train.step import train_step
    from wands.variants import VARIANTS, Expert

    row = VARIANTS[variant]
    recipe = load_recipe(None, settings)
    config = _two_layers(row)
    batch = _make_batch(row, recipe, config, grids)
    ring_degree, ulysses_degree = cp or (1, 1)
    groups = join_groups(*cp) if cp and ring_degree * ulysses_degree > 1 else {}
    layout = ContextLayout.build(
        batch.seq_lens, ring_degree=ring_degree, ulysses_degree=ulysses_degree, cp_rank=0
    )
    shard = batch.rank_slice(layout)
    objective = objective_with(mistake)
    objective.setup(recipe, row)
    prepared = objective.prepare(shard, Expert(name="", subfolder="transformer", sigma_range=(0.0, 1.0)))

    model = build_empty(config)
    if recipe.lora:
        add_lora(model, recipe.lora, 0, None)
    with fake_cuda() as gpu:
        _move_with_swapping(model, recipe)
        given = _set_attention(model, recipe, groups)
        if recipe.uses_dropout:
            model.set_dropout(recipe.model.dropout, 0.0)
        _set_checkpointing(model, recipe)
        engine = Engine(model.train(), recipe.precision.compute)
        with look_inside(torch.ops.wands) if cp else nullcontext():
            result = train_step(
                engine,
                [(shard, prepared)] * 2,
                objective,
                groups=ProcessGroups(ParallelDims(1, 0)),
                device=torch.device("cuda"),
                denominator=1.0,
            )
        gpu.reads = 0
        losses = [result.grad_norm, *result.samples]
    return {
        **_gradients(model, result),
        "given to attention": sorted(given),
        "steps": engine.steps,
        "losses": len(losses),
        "reads": gpu.reads,
    }


def watched(backend: Any, given: set[str]) -> Any:
    """The same kernel; the dtypes of its tensors are noted."""
    real = type(backend)

    class Watched(real):
        def forward(self, q: Any, *others: Any) -> Any:
            out, lse = real.forward(self, q, *others)
            given.update(str(one.dtype) for one in (q, *others[:2], out))
            return out, lse

        def backward(self, dout: Any, *others: Any) -> Any:
            given.update(str(one.dtype) for one in (dout, *others[:4]))
            return real.backward(self, dout, *others)

    same = object.__new__(Watched)
    same.__dict__.update(backend.__dict__)
    return same


@contextmanager
def look_inside(ops: Any) -> Iterator[None]:
    """Run the functions of the ring's and the exchanges' operators; they must return what the operators promise."""
    import torch

    from wands.attention.ring import ring_backward, ring_forward
    from wands.attention.ulysses import to_heads, to_tokens

    functions = (ring_forward, ring_backward, to_heads, to_tokens)
    promised = {one._name: getattr(ops, one._name) for one in functions}

    def call(function: Any, *args: Any) -> Any:
        made = function._init_fn(*args)
        promise = promised[function._name](*args)
        pairs = zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (made, promise)), strict=True)
        for ours, theirs in pairs:
            one, other = ((x.shape, x.dtype, x.is_contiguous()) for x in (ours, theirs))
            assert one == other, f"{function._name} returns {one}, not {other}"
        return made

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            out, lse = call(ring_forward, *args)
            ctx.save_for_backward(*args[:3], out, lse)
            ctx.plan = args[3:]
            ctx.mark_non_differentiable(lse)
            return out, lse

        @staticmethod
        def backward(ctx: Any, dout: Any, _: Any) -> Any:
            grads = call(ring_backward, dout.contiguous(), *ctx.saved_tensors, *ctx.plan)
            return *grads, *(None for _ in ctx.plan)

    def exchange(there: Any, back: Any) -> Any:
        class Exchange(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Any, *peers: Any) -> Any:
                ctx.peers = peers
                return call(there, x, *peers)

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                return call(back, grad, *ctx.peers), None, None

        return Exchange.apply

    inside = {
        "ring_forward": Ring.apply,
        "to_heads": exchange(to_heads, to_tokens),
        "to_tokens": exchange(to_tokens, to_heads),
    }
    for name, function in inside.items():
        called = partial(function)  # which can have an attribute: torch looks for the operator under its name
        called.default = promised[name].default
        setattr(ops, name, called)
    yield
    for name, operator in promised.items():
        setattr(ops, name, operator)


def join_groups(ring: int, ulysses: int) -> dict[str, Any]:
    """Groups of rank 0 in a world of `ring * ulysses` with silent peers: tensors that arrive have a shape and no values."""
    import deepspeed
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ring * ulysses)
    deepspeed.init_distributed(dist_backend="fake", dist_init_required=False, verbose=False)
    row = range(0, ring * ulysses, ulysses)
    return {
        "ulysses": dist.new_group(range(ulysses)),
        "ring": dist.new_group(row),
        "ring_grad": dist.new_group(row),
    }


class Engine:
    """Engine with the parts of DeepSpeed's that `train_step` uses."""

    def __init__(self, module: Any, compute: str) -> None:
        self.module = module
        self.compute = compute
        self.steps = 0

    def __call__(self, **inputs: Any) -> Any:
        import torch

        with torch.autocast("cuda", torch.bfloat16, enabled=self.compute == "bf16"):
            return self.module(**inputs)

    def set_gradient_accumulation_boundary(self, _: bool) -> None:
        pass

    def backward(self, loss: Any, scale_wrt_gas: bool) -> None:
        loss.backward()

    def step(self) -> None:
        self.steps += 1

    def zero_optimization_stage(self) -> int:
        return 2

    def get_global_grad_norm(self) -> Any:
        import torch

        return torch.ones((), device="cuda")


def make_samples(shape: Any, conditions: tuple[str, ...], grids: list[list[int]]) -> list[Any]:
    """Zeros of these token grids, on the CPU, with what the variant is conditioned on."""
    import torch

    from tests.support.samples import sample_of

    samples = []
    for number, (f, h, w) in enumerate(grids):
        latents = torch.zeros(shape.out_channels, f, 2 * h, 2 * w)
        samples.append(
            sample_of(
                str(number),
                latents,
                torch.zeros(7 + number, TEXT_DIM),
                image_latents=latents if "image" in conditions else None,
                image_embeds=torch.zeros(shape.image_len, IMAGE_DIM) if shape.image_dim else None,
            )
        )
    return samples


if __name__ == "__main__":
    main()

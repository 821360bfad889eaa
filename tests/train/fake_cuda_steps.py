"""Training steps on a fake GPU, one for each case: `python -m tests.train.fake_cuda_steps LIBRARY`, cases and results as JSON."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.fake_cuda import fake_cuda, load, move

TEXT_DIM, IMAGE_DIM = 64, 32


def main() -> None:
    load(Path(sys.argv[1]))
    found = {}
    for name, case in json.load(sys.stdin).items():
        try:
            found[name] = run_step(**case)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    json.dump(found, sys.stdout)


def run_step(
    variant: str,
    settings: list[str],
    grids: list[list[int]],
    inside: bool = False,
    mistake: str | None = None,
) -> dict[str, Any]:
    """One `train_step` of a model of two layers in the variant's own width.

    Args:
        variant: a name in `VARIANTS`.
        settings: of the recipe, ``section.key=value`` each.
        grids: tokens of each clip.
        inside: run what the ring's operators run on a GPU, instead of asking them for shapes.
        mistake: what the step does to its noise levels besides, see `MISTAKES`.

    Returns:
        Devices and dtypes of gradients, and dtypes of what the attention kernels were given.
    """
    import torch

    from wands.attention.backends import BACKENDS
    from wands.attention.hybrid import OPERATORS, ContextAttention
    from wands.config import load_recipe
    from wands.data.collate import PackingCollator
    from wands.flow.sigmas import sigma_weight
    from wands.model.host_store import HostStore, _AtOnce
    from wands.model.loading import build_empty
    from wands.model.lora import add_lora
    from wands.parallel.layout import ContextLayout
    from wands.train import step
    from wands.variants import VARIANTS, DiTShape

    row, recipe = VARIANTS[variant], load_recipe(None, settings)
    config = {key: value for key, value in row.dit.to_config().items() if key[0] != "_"}
    config |= {"num_layers": 2, "text_dim": TEXT_DIM}
    if config.get("image_dim"):
        config["image_dim"] = IMAGE_DIM
    shape = DiTShape.from_config(config)
    collate = PackingCollator(shape, recipe.flow, 0, torch.zeros(1, TEXT_DIM), row.conditions, recipe.drops)
    batch = collate(make_samples(shape, row.conditions, grids), [0] * len(grids), 0)
    shard = batch.shard(ContextLayout.build(batch.seq_lens))

    model = build_empty(config)
    if recipe.lora:
        add_lora(model, recipe.lora, 0, None)
    with fake_cuda():
        move(model)
        given: set[str] = set()
        kernel = "torch" if recipe.precision.compute == "bf16" else "reference"
        backend = BACKENDS[kernel] = watched(BACKENDS[kernel], given)
        model.set_attention(ContextAttention(backend), backend)
        if recipe.drops:
            model.set_dropout(recipe.model.dropout, 0.0)
        # Pages in place of pinned memory, copies without a stream.
        store = HostStore(torch.device("cuda"), lane=_AtOnce())
        store._new_page = lambda: torch.empty(store.page_bytes, dtype=torch.uint8, device="cuda")
        kept = recipe.model.kept_on_device, recipe.model.kept_on_host
        model.set_checkpointing(recipe.model.checkpointing, *kept, operators=OPERATORS, store=store)
        engine = Engine(model.train(), recipe.precision.compute)
        job = SimpleNamespace(recipe=recipe, world_size=1, zero_stage=2)
        if mistake is not None:
            step.sigma_weight = lambda sigmas, flow: MISTAKES[mistake](sigma_weight(sigmas, flow))
        step._name_losses = lambda forwarded, groups: forwarded  # it reads the numbers, when the step is over
        try:
            with look_inside(torch.ops.wands) if inside else nullcontext():
                result = step.train_step(engine, [shard, shard], job, None, torch.device("cuda"), 1.0)
        finally:
            step.sigma_weight = sigma_weight
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    tensors = [result.loss, *(errors for _, _, errors in result.samples), *grads.values()]
    return {
        "without gradient": [name for name, grad in grads.items() if grad is None],
        "gradients": len(grads),
        "devices": sorted({one.device.type for one in tensors if one is not None}),
        "dtypes": sorted({str(grad.dtype) for grad in grads.values()}),
        "given to attention": sorted(given),
        "steps": engine.steps,
    }


MISTAKES: dict[str, Any] = {
    "a tensor of the host": lambda weights: weights + on_host(weights),
    "a number asked for": lambda weights: weights * weights.sum().item(),
    "a choice by value": lambda weights: weights[weights > 0],
    "a copy to the host": lambda weights: weights + weights.cpu().sum(),
    "a copy that waits": lambda weights: weights + on_host(weights).to("cuda"),
}


def on_host(weights: Any) -> Any:
    import torch

    return torch.zeros(len(weights))


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
    """Run the functions of the ring's operators; they must return what the operators promise."""
    import torch

    from wands.attention.ring import ring_backward, ring_forward

    promised_forward, promised_backward = ops.ring_forward, ops.ring_backward

    def compare(made: Any, promised: Any) -> Any:
        for ours, theirs in zip(made, promised, strict=True):
            assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        return made

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            out, lse = compare(ring_forward._init_fn(*args), promised_forward(*args))
            ctx.save_for_backward(*args[:3], out, lse)
            ctx.plan = args[3:]
            ctx.mark_non_differentiable(lse)
            return out, lse

        @staticmethod
        def backward(ctx: Any, dout: Any, _: Any) -> Any:
            args = (dout.contiguous(), *ctx.saved_tensors, *ctx.plan)
            grads = compare(ring_backward._init_fn(*args), promised_backward(*args))
            return *grads, *(None for _ in ctx.plan)

    ops.ring_forward = Ring.apply
    yield
    ops.ring_forward = promised_forward


class Engine:
    """What `train_step` asks of DeepSpeed's."""

    def __init__(self, module: Any, compute: str) -> None:
        self.module, self.compute, self.steps = module, compute, 0

    def __call__(self, *args: Any) -> Any:
        import torch

        with torch.autocast("cuda", torch.bfloat16, enabled=self.compute == "bf16"):
            return self.module(*args)

    def set_gradient_accumulation_boundary(self, _: bool) -> None:
        pass

    def backward(self, loss: Any, scale_wrt_gas: bool) -> None:
        loss.backward()

    def step(self) -> None:
        self.steps += 1

    def get_global_grad_norm(self) -> float:
        return 1.0


def make_samples(shape: Any, conditions: tuple[str, ...], grids: list[list[int]]) -> list[Any]:
    """Zeros of these token grids, on the CPU, with what the variant is conditioned on."""
    import torch

    from wands.data.collate import Sample

    samples = []
    for number, (f, h, w) in enumerate(grids):
        latents = torch.zeros(shape.out_channels, f, 2 * h, 2 * w)
        samples.append(
            Sample(
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

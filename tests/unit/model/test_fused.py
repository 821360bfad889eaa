"""Compiled pointwise parts against the plain modules and the stock model. Most tests run the operators without compiling them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from diffusers.models.normalization import FP32LayerNorm
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.packs import KINDS, build_pair, make_meta, make_pack, run_packed, run_stock
from wands.attention import varlen
from wands.attention.kernels.contract import Backend
from wands.attention.kernels.registry import BACKENDS
from wands.attention.ulysses import OPERATORS, context_attention
from wands.attention.varlen import choose_backend
from wands.config.recipe import LoraConfig
from wands.config.recipe_loading import load_recipe
from wands.model import fused
from wands.model.lora import add_lora
from wands.model.modulation import gated_add
from wands.model.transformer import AddNorm, NormRotate, PackedWanTransformer
from wands.planning.memory import Activations
from wands.planning.workload import Workload
from wands.transfer import to_device
from wands.variants import DiTShape

WIDTH = 12
HEAD_DIM = 6


@pytest.fixture
def eager() -> Iterator[None]:
    """Run the functions of the operators as plain PyTorch: the same formulas, and no compiler."""
    with torch.compiler.set_stance("force_eager"):
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def results(function: Callable[..., Any], *args: Tensor) -> list[Tensor]:
    """Outputs of a function, and the gradients of its arguments for random gradients of the outputs."""
    leaves = [x.detach().requires_grad_() for x in args]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    douts = [normal(*x.shape, seed=i) for i, x in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, leaves, douts)]


def same(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    assert len(found) == len(expected)
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lens", [(13,), (5, 1, 7), (0, 9, 4)])
@pytest.mark.parametrize("parts", ["norm", "gate and norm", "add and norm", "gate"])
@pytest.mark.usefixtures("eager")
def test_values_and_gradients_are_those_of_the_plain_module(
    parts: str, lens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fused, "CHUNK", 4)
    fused._timestep_rows.cache_clear()
    # The stock norm would round to float32.
    monkeypatch.setattr("wands.model.transformer._stock_float", lambda x: x)
    monkeypatch.setattr(FP32LayerNorm, "forward", torch.nn.LayerNorm.forward)
    rows = (sum(lens), WIDTH)
    table = (len(lens), WIDTH)
    hidden = normal(*rows)
    update = normal(*rows, seed=1)
    gate = normal(*table, seed=2)
    tables = normal(*table, seed=3), normal(*table, seed=4)
    norm = AddNorm(WIDTH, 1e-6, elementwise_affine=False)

    def run(compiled: bool) -> list[Tensor]:
        norm.compiled = compiled
        add = fused.gated_add if compiled else gated_add
        function, *args = {
            "norm": (lambda h, *t: norm(h, None, None, t, lens, torch.float64)[1], hidden, *tables),
            "gate and norm": (
                lambda h, u, g, *t: norm(h, u, g, t, lens, torch.float64),
                *(hidden, update, gate, *tables),
            ),
            "add and norm": (
                lambda h, u, *t: norm(h, u, None, t, lens, torch.float64),
                *(hidden, update, *tables),
            ),
            "gate": (lambda *args: add(*args, lens), hidden, update, gate),
        }[parts]
        return results(function, *args)

    same(run(True), run(False))
    fused._timestep_rows.cache_clear()


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.usefixtures("eager")
def test_queries_are_those_of_the_plain_module(rotated: bool):
    angles = normal(13, 1, HEAD_DIM // 2)
    rotation = torch.polar(torch.ones_like(angles), angles) if rotated else None
    norm = NormRotate(WIDTH, 1e-6).double()
    torch.nn.init.normal_(norm.weight)
    pair = []
    for norm.compiled in (True, False):
        outputs = results(lambda x: norm(x, rotation), normal(13, WIDTH))
        norm.weight.grad = None
        norm(normal(13, WIDTH), rotation).mul(normal(13, WIDTH, seed=3)).sum().backward()
        pair.append([*outputs, norm.weight.grad])
    same(*pair)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("eager")
def test_the_compiled_model_is_the_stock_model(kind: str):
    """Outputs and every gradient, in float64. Stock norms round to float32, hence the tolerance."""
    stock, packed = build_pair(torch.float64, kind)
    packed.set_compile(True)
    pack = make_pack(7, torch.float64, kind=kind)
    outputs = [run_packed(packed, pack), run_stock(stock, pack)]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-5
    weights = normal(*outputs[0].shape)
    grads = []
    for model, output in zip((packed, stock), outputs, strict=True):
        (output * weights).sum().backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, grad in grads[1].items():
        assert (grads[0][name] - grad).abs().max() <= 2e-5 * max(grad.abs().max(), 1e-2), name


@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
@pytest.mark.usefixtures("eager")
def test_checkpointing_changes_no_bit(mode: str):
    pack = make_pack(3, kind="ti2v")
    grads = []
    for checkpointing in ("none", mode):
        _, packed = build_pair(kind="ti2v")
        packed.set_compile(True)
        saved = ["query_proj"] if checkpointing == "selective" else []
        offloaded = ["block_input"] if checkpointing == "offload" else []
        packed.train().set_checkpointing(checkpointing, saved, offloaded, OPERATORS)
        run_packed(packed, pack).square().sum().backward()
        grads.append([parameter.grad for parameter in packed.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class Operators(TorchDispatchMode):
    """Count the operators that PyTorch dispatches."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("eager")
def test_a_block_dispatches_as_many_operators_for_many_clips_as_for_two(monkeypatch: pytest.MonkeyPatch):
    """On a GPU, each costs the host 5 microseconds or more, and a block with many short clips has little else to do."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    kernel = Backend("one kernel", forward, backward)  # as those of a GPU: one call for all clips
    monkeypatch.setitem(BACKENDS, kernel.name, kernel)
    _, model = build_pair()
    model.set_attention(context_attention(kernel), kernel)
    model.set_compile(True)
    model.set_checkpointing("selective", ["attn_output"], operators=OPERATORS)
    blocks = model.blocks
    counts = {}
    for num_clips, num_blocks in product((2, 7), (1, 2)):
        model.blocks = blocks[:num_blocks]
        for _ in range(2):  # the first step fills caches
            with Operators() as operators:
                run_packed(model, make_pack(num_clips)).sum().backward()
        counts[num_clips, num_blocks] = operators.count
    of_block = {num_clips: counts[num_clips, 2] - counts[num_clips, 1] for num_clips in (2, 7)}
    assert of_block[2] == of_block[7]
    assert of_block[7] < 400  # 361 with torch 2.13


@pytest.mark.usefixtures("eager")
def test_gradients_that_nothing_needs_are_not_computed(monkeypatch: pytest.MonkeyPatch):
    """With a LoRA, the modulation learns nothing: its sums over tokens would be wasted passes over memory."""
    sums = []
    total = fused._sum_timesteps
    monkeypatch.setattr(fused, "_sum_timesteps", lambda *args: sums.append(1) or total(*args))
    _, packed = build_pair()
    packed.set_compile(True)
    counts = []
    for learns in (True, False):
        for name, parameter in packed.named_parameters():
            parameter.requires_grad_(learns or "to_q" in name)
        run_packed(packed, make_pack(2)).sum().backward()
        counts.append(len(sums))
        sums.clear()
    assert counts[0] > 0
    assert counts[1] == 0


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.usefixtures("eager")
def test_a_block_keeps_what_the_memory_estimate_says(compiled: bool, lora: bool):
    """Bytes that autograd keeps of the tokens of a block, from models of two and of three blocks."""
    config = {
        "attention_head_dim": 64,
        "num_attention_heads": 2,
        "ffn_dim": 512,
        "text_dim": 16,
        "freq_dim": 16,
    }
    grid = (4, 8, 8)
    kept = []
    num_tokens = math.prod(grid)
    backend = choose_backend("cpu", "cpu", torch.bfloat16)
    for num_layers in (2, 3):
        model = PackedWanTransformer(**config, num_layers=num_layers)
        model.set_attention(context_attention(backend), backend)
        model.set_compile(compiled)
        if lora:
            add_lora(model, LoraConfig(rank=4, targets="attention"), seed=0)
        sizes = {}

        def pack(x: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            if x.numel() and num_tokens in x.shape:
                sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
            torch.autocast("cpu", torch.bfloat16),
        ):
            inputs = torch.randn(num_tokens, 64), make_meta([grid], [5]), torch.tensor([500.0])
            model(*inputs, torch.randn(5, 16))
        kept.append(sum(sizes.values()))
    settings = [f"model.compile={str(compiled).lower()}", *["lora={rank: 4, targets: attention}"] * lora]
    recipe = load_recipe(None, [*settings, "precision.compute=bf16"])
    shape = DiTShape.from_config(model.config)
    ds_config = {"zero_optimization": {"stage": 2}}
    workload = Workload(
        recipe=recipe,
        shape=shape,
        weights=(),
        num_models=1,
        world_size=1,
        device_type="cpu",
        text_len=0,
        ds_config=ds_config,
        max_tokens=num_tokens,
        max_samples=0,
    )
    activations = Activations(workload)
    assert kept[1] - kept[0] == pytest.approx(activations._block() - activations._copies(), rel=0.02)


def compiled_and_plain(
    dtype: torch.dtype, packs: list, device: str = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs and gradients of both ways, pack by pack, under autocast for bf16."""
    models: list[PackedWanTransformer] = []
    backend = choose_backend("reference", device, dtype)
    for compiled in (True, False):
        models.append(build_pair(torch.float32)[1].to(device))
        models[-1].set_attention(context_attention(backend), backend)
        models[-1].set_compile(compiled)
    for pack in packs:
        ways = []
        for model in models:
            model.zero_grad()
            inputs = pack.tokens, pack.meta, pack.row_timesteps, pack.text_embeds
            with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
                output = model(*to_device(inputs, device))
            output.square().sum().backward()
            ways.append([output.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
        yield from zip(*ways, strict=True)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.full), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_compiled_code_computes_the_same(dtype: torch.dtype, tolerance: float, device: str):
    for ours, plain in compiled_and_plain(dtype, [make_pack(num) for num in (2, 5)], device):
        assert (ours - plain).norm() <= tolerance * plain.norm().clamp(min=1e-3)


def test_other_lengths_compile_nothing_new(monkeypatch: pytest.MonkeyPatch):
    """PyTorch traces each version of an operator, but the versions run as they are traced, which saves a minute."""
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda graph, *args, **options: graph.forward
    )
    torch._dynamo.reset()
    counters.clear()
    packs = [make_pack(num, seed=num) for num in (3, 5, 2, 7, 4)]  # PyTorch compiles sizes of 1 separately
    compiled = [counters["stats"]["unique_graphs"] for _ in compiled_and_plain(torch.float32, packs)]
    torch._dynamo.reset()  # the versions of this test must not run in other tests
    assert compiled[0] > 8
    assert len(set(compiled)) == 1


@pytest.mark.full
def test_compiled_kernels_read_and_write_little_more_than_arguments_and_results(
    monkeypatch: pytest.MonkeyPatch,
):
    """`bench_step_traffic` counts each argument and result once. Inductor's fused kernels must not move much more."""
    from torch._inductor.graph import GraphLowering
    from torch.utils._pytree import tree_leaves

    moved = []
    codegen = GraphLowering.codegen

    def record(graph: Any) -> Any:
        code = codegen(graph)
        moved.append(graph.count_bytes()[0])
        return code

    monkeypatch.setattr(GraphLowering, "codegen", record)
    monkeypatch.setattr(
        torch._inductor.config, "force_disable_caches", True
    )  # a cached kernel is not counted
    lens = (700, 4, 1300)
    width = 1536
    rows = fused._timestep_rows(lens, torch.device("cpu"))
    hidden = torch.randn(sum(lens), width)
    table = torch.randn(len(lens), width)
    update = hidden.bfloat16()
    column = hidden[:, :1]
    norm = table, table, rows[0], 1e-6, torch.bfloat16
    rotation = torch.randn(len(hidden), 1, 64, 2)
    weight = torch.ones(width)
    heads = update.unflatten(1, (12, 128))
    pad = torch.ones(12, 128)
    lse = torch.randn(12, len(hidden))
    pads = pad.bfloat16(), pad.bfloat16()
    calls = {
        "norm": (fused.add_norm_forward, hidden, None, None, *norm),
        "gate and norm": (fused.add_norm_forward, hidden, update, table, *norm),
        "add and norm": (fused.add_norm_forward, hidden, update, None, *norm),
        "gate": (fused.gated_add_forward, hidden, update, table, rows[0]),
        "query": (fused.norm_rotate_forward, update, weight, rotation, 1e-6),
        "pads": (varlen.merge_pads, heads, lse.mT, heads, *pads, lse[0], 0.1),
        "norm, backward": (
            *(fused.add_norm_backward, hidden, update, hidden, column, column, update, table, table),
            *(rows, True, True),
        ),
        "gate, backward": (fused.gated_add_backward, hidden, update, table, rows, True),
        "query, backward": (fused.norm_rotate_backward, update, update, column, weight, rotation, True),
        "pads, backward": (varlen.merge_pads_backward, *[heads] * 3, *pads, heads, lse.mT, lse[0], 0.1),
    }
    for name, (function, *args) in calls.items():
        torch._dynamo.reset()
        results = torch.compile(function)(*args)
        least = sum(x.nbytes for x in tree_leaves((args, results)) if isinstance(x, Tensor))
        # The sums over the tokens of a timestep read their operands a second time.
        assert moved.pop() <= (1.51 if name == "gate, backward" else 1.35) * least, name


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("eager")
def test_a_norm_of_bf16_tokens_is_as_accurate_as_the_plain_module(weight_dtype: torch.dtype):
    """The norm is computed in fp32, also with a bf16 weight."""
    x = normal(64, WIDTH)
    rotation = torch.polar(torch.ones(64, 1, HEAD_DIM // 2), normal(64, 1, 3).float())

    def run(dtype: torch.dtype, compiled: bool = False) -> list[Tensor]:
        norm = NormRotate(WIDTH, 1e-6)
        norm.compiled = compiled
        weight = (1 + normal(WIDTH) / 4).to(weight_dtype)
        norm.weight = torch.nn.Parameter(weight.to(dtype if dtype.itemsize > 2 else weight_dtype))
        leaf = x.bfloat16().to(dtype).requires_grad_()
        out = norm(leaf, rotation.to(torch.promote_types(dtype, torch.float32).to_complex()))
        return [out, *torch.autograd.grad(out, [leaf, norm.weight], normal(64, WIDTH, seed=1).to(dtype))]

    exact = run(torch.float64)
    plain = run(torch.bfloat16)
    ours = run(torch.bfloat16, compiled=True)
    for name, true, theirs, own in zip(("output", "dx", "dweight"), exact, plain, ours, strict=True):
        assert own.dtype == theirs.dtype
        errors = [(value.double() - true).square().mean().sqrt() for value in (theirs, own)]
        assert errors[1] <= 1.1 * errors[0], (name, errors)

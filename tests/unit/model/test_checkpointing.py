"""Recomputation: every mode gives the gradients of none, keeps what it says where it says, and computes nothing else twice."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from peak_memory import PeakMemory
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.packs import CONFIG, Pack, build_pair, make_pack, run_packed
from tests.unit.model.test_offload import CPU, LateLane
from tests.unit.model.test_transformer import weighted_grads
from wands.attention.ulysses import OPERATORS, context_attention
from wands.attention.varlen import choose_backend
from wands.config.recipe import LoraConfig
from wands.model import offload as host_store
from wands.model.checkpointing import PROJECTIONS, SelectiveCheckpoint
from wands.model.lora import add_lora
from wands.model.offload import ActivationOffloader
from wands.model.transformer import PackedWanTransformer
from wands.transfer import to_device


class Mode(NamedTuple):
    name: str
    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join((self.name, *self.saved, *self.offloaded))


NAMES = ("attn_output", *PROJECTIONS)
ONE_NAME = [
    *(Mode("selective", (name,)) for name in NAMES),
    *(Mode("offload", (), (name,)) for name in ("block_input", *NAMES)),
]
MODES = [
    Mode("full"),
    *ONE_NAME,
    Mode("selective", NAMES),
    Mode("offload", NAMES[:2], ("block_input", *NAMES[2:])),
]


def build(kind: str, mode: Mode) -> PackedWanTransformer:
    _, model = build_pair(kind=kind)
    backend = choose_backend("cpu", "cpu", torch.float32)
    model.set_attention(context_attention(backend), backend)
    set_mode(model, mode)
    return model


def set_mode(model: PackedWanTransformer, mode: Mode) -> None:
    model.set_checkpointing(*mode, operators=OPERATORS)


class Calls(TorchDispatchMode):
    """Count how often a step computed each linear layer, and the ring.

    Beneath the modes of checkpointing: what they take from what they kept does not come here.
    """

    def __init__(self, model: PackedWanTransformer) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._names = {
            module.weight.data_ptr(): name
            for name, module in model.blocks[1].named_modules()
            if isinstance(module, torch.nn.Linear)
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.addmm.default:  # every layer has a bias; backward's products have none
            self.counts[self._names.get(args[2].data_ptr(), "")] += 1
        if func is OPERATORS["attn_output"][0]:
            self.counts["ring"] += 1
        return func(*args, **(kwargs or {}))


def step(model: PackedWanTransformer, pack: Pack, *, autocast: bool = False) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = run_packed(model, pack)
    return weighted_grads(model, output)


@pytest.mark.parametrize(
    ("kind", "autocast"), [pytest.param("t2v", True, marks=pytest.mark.slow), ("i2v with clip", False)]
)
def test_every_mode_gives_the_same_bits(kind: str, autocast: bool):
    pack = make_pack(3, kind=kind)
    model = build(kind, Mode("none"))
    right = step(model, pack, autocast=autocast)
    assert all(grad.abs().max() > 0 for grad in right.values())
    for mode in MODES:
        set_mode(model, mode)
        for _ in range(
            2 if mode.offloaded else 1
        ):  # what a step leaves in the store does not disturb the next
            found = step(model, pack, autocast=autocast)
            assert all(torch.equal(found[name], grad) for name, grad in right.items()), mode
        if mode.offloaded:
            assert (
                model.selective_checkpoint.offloader.host_bytes
                == 0
                < model.selective_checkpoint.offloader.peak_host_bytes
            )


@pytest.mark.parametrize("mode", [MODES[0], MODES[-1]], ids=str)
def test_only_the_first_blocks_are_computed_twice(mode: Mode):
    pack = make_pack(2)
    model = build("t2v", Mode("none"))
    right = step(model, pack)
    for num_blocks in (1, 2):
        model.set_checkpointing(mode.name, mode.saved, mode.offloaded, OPERATORS, None, num_blocks)
        with Calls(model) as calls:  # of block 1, the second block
            found = step(model, pack)
        assert all(torch.equal(found[name], grad) for name, grad in right.items())
        assert calls.counts["attn1.to_out.0"] == num_blocks


def test_copies_that_are_late_are_waited_for(monkeypatch: pytest.MonkeyPatch):
    """As on a GPU that is far behind the host."""
    pack = make_pack(2)
    right = step(build("t2v", Mode("none")), pack)
    monkeypatch.setattr(host_store, "CopyStream", LateLane)
    model = build("t2v", Mode("offload", (), ("block_input", *NAMES)))
    for _ in range(2):
        found = step(model, pack)
        assert all(torch.equal(found[name], grad) for name, grad in right.items())
    assert len(model.selective_checkpoint.offloader.copy_stream.log) > 0


@pytest.mark.parametrize("mode", [Mode("none"), *MODES], ids=str)
def test_only_what_is_not_kept_is_computed_twice(mode: Mode):
    model = build("t2v", mode)
    with Calls(model) as calls:
        step(model, make_pack(2))
    kept = {*mode.saved, *mode.offloaded}
    twice = 1 if mode.name == "none" else 2
    for name, layer in PROJECTIONS.items():
        assert calls.counts[layer] == (1 if name in kept else twice), name
    assert calls.counts["ring"] == len(model.blocks) * (1 if "attn_output" in kept else twice)
    for layer in ("attn1.to_out.0", "attn2.to_q", "attn2.to_k"):
        assert calls.counts[layer] == twice


def bytes_after_forward(mode: Mode, pack: Pack, *, autocast: bool) -> tuple[int, int]:
    """On the device and on the host, when everything that backward needs is kept."""
    model = build("t2v", mode)
    with PeakMemory() as peak:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = run_packed(model, pack)
        store = model.selective_checkpoint.offloader if model.selective_checkpoint else None
        host = store.host_bytes if store else 0
    del output
    return peak.kept, host


@pytest.mark.parametrize("autocast", [pytest.param(False, marks=pytest.mark.slow), True])
def test_each_name_costs_what_it_says(autocast: bool):
    """Bytes per token and block: of what is saved on the device, of what is offloaded on the host, and two blocks' there."""
    pack = make_pack(7)
    narrow = 2 if autocast else 4
    tokens = len(pack.tokens)
    layers = CONFIG["num_layers"]
    heads = CONFIG["num_attention_heads"]
    ffn_dim = CONFIG["ffn_dim"]
    dim = heads * CONFIG["attention_head_dim"]
    sizes = {name: narrow * dim for name in ("query_proj", "key_proj", "value_proj")}
    sizes |= {
        "block_input": 4 * dim,
        "attn_output": narrow * dim + 4 * heads,
        "ffn_activation": narrow * ffn_dim,
    }
    none, _ = bytes_after_forward(
        Mode("none"), pack, autocast=autocast
    )  # the first also makes what stays cached
    full, _ = bytes_after_forward(Mode("full"), pack, autocast=autocast)
    assert full < none / 3
    for mode in ONE_NAME:
        [name] = mode.saved + mode.offloaded
        size = tokens * sizes[name]
        device, host = bytes_after_forward(mode, pack, autocast=autocast)
        blocks = layers if mode.saved else 2
        before = layers if name == "block_input" else 0  # of `full`
        assert device - full == (blocks - before) * size, mode
        assert host == (layers * size if mode.offloaded else 0), mode


def test_of_a_lora_the_product_of_the_base_is_kept():
    model = build("t2v", Mode("none"))
    add_lora(model, LoraConfig(rank=2, targets="attention+ffn"), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    pack = make_pack(2)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        run_packed(model, pack).square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    right = gradients()
    assert all(grad.abs().max() > 0 for grad in right.values())
    for mode in (Mode("selective", NAMES), Mode("offload", (), ("block_input", *NAMES))):
        set_mode(model, mode)
        with (
            Calls(model) as calls,
            mock.patch.object(
                SelectiveCheckpoint, "_keep", autospec=True, side_effect=SelectiveCheckpoint._keep
            ) as keep,
        ):
            found = gradients()
        # One of each projection, and the attention's result with its log-sum-exp: none of the LoRA's own.
        assert keep.call_count == len(model.blocks) * (len(PROJECTIONS) + 2)
        assert all(torch.equal(found[name], grad) for name, grad in right.items())
        for layer in PROJECTIONS.values():
            assert calls.counts[f"{layer}.base_layer"] == 1
        assert calls.counts["attn1.to_out.0.base_layer"] == 2


def test_nothing_is_kept_without_gradients():
    model = build("t2v", Mode("offload", ("query_proj",), ("block_input", "ffn_activation")))
    with torch.no_grad():
        run_packed(model, make_pack(2))
    assert model.selective_checkpoint.offloader is None


def test_models_that_take_turns_share_the_pages():
    pack = make_pack(3)
    mode = Mode("offload", (), ("block_input", "value_proj"))
    store = ActivationOffloader(CPU)
    model = build("t2v", Mode("none"))
    twin = build("t2v", Mode("none"))
    right = step(model, pack)
    for one in (model, twin):
        one.set_checkpointing(*mode, operators=OPERATORS, offloader=store)
    reserved = []
    for one in (model, twin, model):
        found = step(one, pack)
        assert all(torch.equal(found[name], grad) for name, grad in right.items())
        reserved.append(store.reserved_bytes)
    assert model.selective_checkpoint.offloader is twin.selective_checkpoint.offloader is store
    assert reserved[0] == reserved[1] == reserved[2] > 0 == store.host_bytes


def test_a_mode_replaces_the_one_before():
    model = build("t2v", Mode("selective", ("query_proj",)))
    set_mode(model, Mode("full"))
    with Calls(model) as calls:
        step(model, make_pack(1))
    assert calls.counts["attn1.to_q"] == 2
    set_mode(model, Mode("none"))
    assert not model.blocks[0].attn1.to_q._forward_pre_hooks


def test_the_end_of_the_second_run_leaves_the_layer():
    """Backward breaks off inside the last layer that it needs, and what other layers compute then is not of its name."""
    block = nn.ModuleDict({"attn1": nn.ModuleDict({"to_q": nn.Linear(4, 4)})})
    again = SelectiveCheckpoint([block], ("query_proj",))
    block.forward = lambda hidden: block["attn1"]["to_q"](hidden)
    again(block, torch.ones(3, 4, requires_grad=True)).sum().backward()
    assert block["attn1"]["to_q"].weight.grad is not None
    assert again._kept_name(torch.ops.aten.addmm.default) is None
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("place", ["saved", "offloaded"])
def test_a_kept_result_that_changes_is_noticed(place: str):
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn1 = torch.nn.ModuleDict({"to_q": torch.nn.Linear(4, 4)})

        def forward(self, hidden: Tensor) -> Tensor:
            return self.attn1["to_q"](hidden).add_(1.0).sin()

    block = Block()
    output = SelectiveCheckpoint([block], **{place: ("query_proj",)})(block, torch.ones(3, 4))
    with pytest.raises(AssertionError, match="changed in place"):
        output.sum().backward()


def test_a_second_backward_is_noticed():
    model = build("t2v", Mode("selective", ("ffn_activation",)))
    loss = run_packed(model, make_pack(1)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="backward pass ran twice"):
        loss.backward()


def test_the_dispatch_mode_sees_only_what_may_be_kept():
    """It is slow: about a hundred operators of a block need not pass through it."""
    model = build("t2v", Mode("selective", ("attn_output",)))
    kept_name = SelectiveCheckpoint._kept_name
    with mock.patch.object(SelectiveCheckpoint, "_kept_name", autospec=True, side_effect=kept_name) as asked:
        step(model, make_pack(2))
    seen = Counter(call.args[1] for call in asked.call_args_list)
    assert seen[OPERATORS["attn_output"][0]] == 2 * len(model.blocks)
    # q, k, v, output and log-sum-exp are detached in the second run, when autograd saves them.
    assert seen.total() <= 7 * len(model.blocks)


def test_a_second_backward_computes_again_what_is_not_kept():
    model = build("t2v", Mode("full"))
    loss = run_packed(model, make_pack(1)).square().sum()
    loss.backward(retain_graph=True)
    once = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(parameter.grad, once[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("change", ["another shape", "fewer tensors"])
def test_a_second_run_that_differs_is_noticed(change: str):
    runs = []

    def block(hidden: Tensor) -> Tensor:
        runs.append(hidden)
        if len(runs) == 1:
            return hidden.sin().exp()
        return hidden[:1].sin() if change == "another shape" else hidden * 2

    output = SelectiveCheckpoint([])(block, torch.ones(3, 4, requires_grad=True))
    with pytest.raises(AssertionError, match="second run"):
        output.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("selective",), "needs names"),
        (("full", ("query_proj",)), "cannot save"),
        (
            ("selective", ("query_proj",), ("block_input",)),
            "mode=selective cannot have offloaded=.*block_input",
        ),
        (("offload",), r"mode=offload cannot have offloaded=\(\)"),
        (("selective", ("hidden",)), "no tensor is called"),
        (("selective", ("block_input",)), "block_input is always saved"),
        (("offload", ("query_proj",), ("query_proj",)), "both saved and offloaded"),
    ],
)
def test_mistakes_of_programmers(arguments: tuple[Any, ...], said: str):
    _, model = build_pair()
    with pytest.raises(AssertionError, match=said):
        model.set_checkpointing(*arguments)


@pytest.mark.gpu
def test_offload_on_a_gpu():
    """The copies run on a stream of their own while the allocator hands memory round: the bits show whether they were in time."""
    pack = make_pack(7)
    results = []
    for mode in (Mode("none"), *MODES):
        model = build("t2v", mode).cuda()
        backend = choose_backend("torch", torch.device("cuda"), torch.bfloat16)
        model.set_attention(context_attention(backend), backend)
        tokens, timesteps, text = (x.cuda() for x in (pack.tokens, pack.row_timesteps, pack.text_embeds))
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                output = model(tokens, to_device(pack.meta, "cuda"), timesteps, text)
            results.append(weighted_grads(model, output.cpu()))
    for found in results[1:]:
        for name, grad in results[0].items():
            assert torch.allclose(found[name], grad, rtol=1e-3, atol=1e-5), (
                name
            )  # some kernels add in any order

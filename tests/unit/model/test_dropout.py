"""Dropout by hash: the right share, independent masks, and the stock model with each sample's masks put in by hand."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.packs import IMAGE_ROWS, Pack, build_pair, make_pack, run_packed, run_stock
from wands.config.recipe import LoraConfig
from wands.model.dropout import KeyedDropout, RowKeys, keep_mask, keep_probability, side_of
from wands.model.lora import add_lora
from wands.variants import TEXT_LEN

P = 0.3
LORA_P = 0.2
KEYS = (-(2**63), 12345, 2**62 + 7, -1, 99, 5, 6)


# ---- the dumb way: unsigned numbers, one sample, one side


def _mix64(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _mix32(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def plain_mask(key: int, side: str, places: list[int], name: str, channels: int, p: float) -> torch.Tensor:
    """[rows, channels] of zeros and of what is kept scaled."""
    number = {"tokens": 1, "text": 2, "image": 3, "time": 4}[side]
    salt = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8).digest(), dtype="<u8")
    sample = _mix64(np.array([key % 2**64], dtype=np.uint64) + np.uint64(number))
    rows = _mix64(_mix64(sample + np.array(places, dtype=np.uint64)) + salt).astype(np.uint32)
    pairs = _mix64(np.arange(-(-channels // 2), dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    bits = _mix32(rows[:, None] ^ pairs.astype(np.uint32)[None])
    halves = np.stack([bits, bits >> np.uint32(16)], -1).astype(np.uint16).reshape(len(places), -1)
    kept = halves[:, :channels].view(np.int16).astype(int) >= round(p * 2**16) - 2**15
    return torch.from_numpy(kept / (1 - round(p * 2**16) / 2**16))


class _Masked(nn.Module):
    """A dropout of the stock model: the mask of the sample that is forwarded."""

    def __init__(self, name: str, p: float, now: dict[str, object]) -> None:
        super().__init__()
        self.name = name
        self.p = p
        self.now = now

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = side_of(self.name)
        places = self.now["places"]
        mask = plain_mask(self.now["key"], side, places[side], self.name, x.shape[-1], self.p)
        if side == "text":
            mask = torch.cat([mask, torch.ones(TEXT_LEN - len(mask), x.shape[-1])])
        return x * mask.view(x.shape)


def _stock_with_masks(stock: nn.Module, pack: Pack) -> torch.Tensor:
    now: dict[str, object] = {}
    for name, module in list(stock.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if name.startswith("blocks.") and isinstance(module, nn.Dropout):
            stock.get_submodule(parent)[int(leaf)] = _Masked(name, P, now)
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = _Masked(f"{name}.lora", LORA_P, now)
    outputs = []
    places = [(f << 42) + (r << 21) + c for f, r, c in pack.meta.positions.tolist()]
    starts = [0, *itertools.accumulate(pack.meta.local_seq_lens)]
    for i, (start, stop) in enumerate(itertools.pairwise(starts)):
        clean = pack.num_cond_tokens[i] if pack.num_cond_tokens else 0
        per_token = bool(pack.num_cond_tokens)  # then the stock model takes a timestep for each
        now["key"] = KEYS[i]
        now["places"] = {
            "tokens": places[start:stop],
            "text": list(range(len(pack.texts[i]))),
            "image": list(range(IMAGE_ROWS)),
            "time": [int(place >= clean > 0) for place in range(stop - start)] if per_token else [0],
        }
        alone = Pack(
            pack.latents[i : i + 1],
            pack.texts[i : i + 1],
            pack.timesteps[i : i + 1],
            replace(
                pack.meta,
                local_seq_lens=(stop - start,),
                timestep_lens=(),
                text_lens=(1,),
                segment_ids=pack.meta.segment_ids[start:stop],
                positions=pack.meta.positions[start:stop],
            ),
            pack.images[i : i + 1],
            (clean,) if per_token else (),
        )
        outputs.append(run_stock(stock, alone))
    return torch.cat(outputs)


@torch.no_grad()
def _draw_lora_b(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["t2v", "flf2v", "ti2v"])
def test_the_stock_model_with_the_masks_of_each_sample(kind: str, lora: bool):
    """Output and every gradient; packed it is as one at a time, since the stock model has one at a time."""
    pack = make_pack(5, torch.float64, kind=kind)
    stock, packed = build_pair(torch.float64, kind)
    if lora:
        section = LoraConfig(rank=3, targets="all-linear")
        for model in (stock, packed):
            add_lora(model, section, seed=0)
            _draw_lora_b(model)
            model.double()
    counts = [2 if clean else 1 for clean in pack.num_cond_tokens or (0,) * 5]
    owners = tuple(i for i, count in enumerate(counts) for _ in range(count))
    meta = replace(pack.meta, dropout_keys=KEYS[:5], timestep_samples=owners)
    packed.set_dropout(P, LORA_P if lora else 0.0)
    wanted = _stock_with_masks(stock.train(), pack)
    found = run_packed(packed.train(), replace(pack, meta=meta))
    torch.testing.assert_close(
        found, wanted, rtol=0, atol=2e-5
    )  # the stock model rounds to fp32 here and there
    direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for out in (wanted, found):
        (out * direction).sum().backward()
    ours = _gradients(packed)
    theirs = _gradients(stock)
    assert ours.keys() == theirs.keys()
    largest = max(float(g.abs().max()) for g in theirs.values())
    for name, grad in theirs.items():
        assert float((ours[name] - grad).abs().max()) <= 1e-5 * max(
            float(grad.abs().max()), 1e-2 * largest
        ), name
    plain = run_packed(packed.eval(), pack)  # evaluation needs no keys and drops nothing
    assert float((plain - found).detach().abs().max()) > 0.1


def test_the_share_and_the_mean():
    rows = torch.arange(4096) * 2654435761
    for p in (0.0, 0.05, 0.3, 0.9):
        mask = keep_mask(rows, 17, 333, p)
        assert float(mask.double().mean()) == pytest.approx(1 - p, abs=4 * (0.25 / mask.numel()) ** 0.5)
        assert keep_probability(p) == pytest.approx(1 - p, abs=2**-17)
    keys = RowKeys(tokens=rows)
    x = torch.ones(4096, 333, requires_grad=True)
    layer = KeyedDropout(0.3, "blocks.0.attn1.to_out.1", keys)
    out = layer(x)
    assert set(out.detach().unique().tolist()) == {0.0, float(torch.tensor(1 / keep_probability(0.3)))}
    assert float(out.detach().double().mean()) == pytest.approx(1, abs=0.005)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())
    assert layer.eval()(x) is x


def test_masks_are_independent():
    """Between layers, rows, neighboring channels and samples: correlations stay in the noise."""
    rows = torch.arange(2048) * 2654435761
    one = keep_mask(rows, 1, 512, 0.5).double() * 2 - 1
    others = {
        "layer": keep_mask(rows, 2, 512, 0.5),
        "sample": keep_mask(rows + 2**40, 1, 512, 0.5),
    }
    found = {name: float((one * (other.double() * 2 - 1)).mean()) for name, other in others.items()}
    found |= {"row": float((one[1:] * one[:-1]).mean()), "channel": float((one[:, 1:] * one[:, :-1]).mean())}
    found["pair"] = float((one[:, 2:] * one[:, :-2]).mean())
    for name, correlation in found.items():
        assert abs(correlation) < 4 / one.numel() ** 0.5, name
    per_row = one.mean(1)
    per_channel = one.mean(0)
    assert float(per_row.abs().max()) < 5 / 512**0.5
    assert float(per_channel.abs().max()) < 5 / 2048**0.5


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch):
    keys = RowKeys(tokens=torch.arange(100))
    layer = KeyedDropout(0.5, "blocks.0.ffn.net.1", keys)
    x = torch.randn(100, 7)
    whole = layer(x)
    monkeypatch.setattr("wands.model.dropout._CHUNK", 64)
    assert torch.equal(layer(x), whole)


@pytest.mark.gpu
def test_a_gpu_has_the_masks_of_a_cpu():
    rows = torch.arange(4096) * 2654435761
    assert torch.equal(keep_mask(rows.cuda(), 3, 777, 0.1).cpu(), keep_mask(rows, 3, 777, 0.1))

"""Frozen weights in host memory: the same bits as without, whatever the copies' timing, and two blocks of device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.unit.model.test_offload import LateLane
from wands.errors import ConfigError
from wands.model import swapping
from wands.model.swapping import BlockSwapper, spread

CPU = torch.device("cpu")
PAGE = 4096  # a block takes several pages, the last one partly
WIDTH = 48


class EarlyLane:
    """Copies at once, as a device that is never behind: who gives a buffer away too early reads the next block's weights."""

    def run(self, copy: Callable[[], None]) -> None:
        copy()

    def wait(self, event: None) -> None:
        pass


class Adapted(nn.Module):
    """Frozen linear layer in bf16 or fp32 with a trained low-rank update."""

    def __init__(self, num_in: int, num_out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(num_in, num_out).to(dtype).requires_grad_(False)
        self.low = nn.Linear(num_in, 4, bias=False)
        self.high = nn.Linear(4, num_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.to(self.base.bias.dtype)).float() + self.high(self.low(x))


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = Adapted(WIDTH, 2 * WIDTH, dtype)
        self.down = Adapted(2 * WIDTH, WIDTH, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, num_blocks: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(num_blocks))

    def forward(self, x: Tensor, checkpoints: bool = True) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if checkpoints else block(x)
        return x


def swapped(num_blocks: int, numbers: list[int], lane: Any = None) -> tuple[Net, BlockSwapper]:
    net = Net(num_blocks)
    return net, BlockSwapper([net.blocks[n] for n in numbers], CPU, lane, PAGE)


def train(net: Net, num_steps: int = 3, forwards: int = 1) -> list[Tensor]:
    """Losses and trained weights of a few steps, with a forward pass without gradients after each."""
    trained = [value for value in net.parameters() if value.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    found = []
    for step in range(num_steps):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = sum((net(x + number).square().mean() for number in range(forwards)), start=torch.zeros(()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found += [loss.detach(), net(x, checkpoints=False)]
    return found + [value.detach().clone() for value in trained]


@pytest.mark.parametrize("lane", [None, LateLane, EarlyLane])
@pytest.mark.parametrize("numbers", [[0], [4], [0, 1, 2, 3, 4], [0, 2, 4], [1, 2]])
@pytest.mark.parametrize("forwards", [1, 2])
def test_the_bits_are_those_of_weights_on_the_device(numbers: list[int], lane: Any, forwards: int):
    net, _ = swapped(5, numbers, lane and lane())
    for found, wanted in zip(train(net, forwards=forwards), train(Net(5), forwards=forwards), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "bug",
    ["no wait", "prefetch into the running block's buffer", "weights of another block"],
)
def test_a_bug_would_be_seen(bug: str, monkeypatch: pytest.MonkeyPatch):
    net, swapper = swapped(5, [0, 1, 2, 3, 4], LateLane())
    fetch = swapper._fetch
    if bug == "no wait":
        monkeypatch.setattr(swapper.copy_stream, "wait", lambda event: None)
    elif bug == "weights of another block":
        swapper._pages.reverse()
    else:
        swapper.copy_stream = EarlyLane()
        monkeypatch.setattr(swapper, "_fetch", lambda number, busy=None: fetch(number))
        swapper._slots = swapper._slots[:1] * 2
    with pytest.raises((AssertionError, RuntimeError)):  # noqa: PT012
        for found, wanted in zip(train(net), train(Net(5)), strict=True):
            assert torch.equal(found, wanted)


def test_each_buffer_is_written_after_its_last_reader_and_read_after_its_copy():
    """In the order in which the work is submitted, which is the order of the computation's stream."""
    lane = LateLane()
    net, swapper = swapped(6, [0, 1, 3, 5], lane)
    log: list[tuple[str, int]] = []
    ready: set[int] = set()
    run = lane.run
    wait = lane.wait

    def logged_run(copy: Callable[[], None]) -> int:
        event = run(copy)
        slot = next(slot for slot in swapper._slots if slot.buffer is copy.args[0])  # type: ignore[attr-defined]
        log.append(("write", swapper._slots.index(slot)))
        ready.discard(event)
        return event

    def logged_wait(event: int) -> None:
        wait(event)
        ready.add(event)

    # type: ignore[method-assign]
    lane.run = logged_run
    lane.wait = logged_wait

    def read(layer: nn.Linear, *_: Any) -> None:
        [slot] = [
            slot
            for slot in swapper._slots
            if slot.buffer.data_ptr() <= layer.weight.data_ptr() < slot.buffer.data_ptr() + len(slot.buffer)
        ]
        assert slot.copied in ready, "read before the copy is done"
        log.append(("read", swapper._slots.index(slot)))

    for number in (0, 1, 3, 5):
        for layer in net.blocks[number].modules():
            if isinstance(layer, Adapted):
                layer.base.register_forward_pre_hook(read)
                layer.base.register_full_backward_hook(read)
    train(net, num_steps=2)
    writes = [index for index, (kind, _) in enumerate(log) if kind == "write"]
    # Forward 4 blocks, backward 4 of which 2 are still here, forward without gradients 4 of which 2 are still here, and block
    # 0 again for the next pass.
    assert len(writes) > 12
    for index in writes:
        slot = log[index][1]
        block = [kind for kind, where in log[index + 1 :] if where == slot]
        assert not block or block[0] == "read", "a buffer was written twice without being used"


def test_the_backward_pass_prefetches_the_block_below():
    """Copies of a step after the first, and the blocks that run: each copy starts one swapped block ahead of its use."""
    net, swapper = swapped(5, [0, 1, 2, 3, 4], LateLane())
    log: list[str] = []
    fetch = swapper._fetch

    def logged(number: int, **how: Any) -> Any:
        if number not in [slot.number for slot in swapper._slots]:
            log.append(f"copy {number}")
        return fetch(number, **how)

    swapper._fetch = logged  # type: ignore[method-assign]
    for number, block in enumerate(net.blocks):
        block.register_forward_hook(lambda *_, number=number: log.append(f"run {number}"), always_call=True)
    net(torch.randn(4, WIDTH)).square().mean().backward()
    forward = ["copy 0", "copy 1", "run 0", "copy 2", "run 1", "copy 3", "run 2", "copy 4", "run 3", "run 4"]
    backward = ["run 4", "copy 2", "run 3", "copy 1", "run 2", "copy 0", "run 1", "run 0"]
    assert log == forward + backward


def test_memory_is_two_blocks_on_the_device_and_the_rest_on_the_host():
    net, swapper = swapped(5, [0, 1, 2, 3, 4])
    one = sum(value.nbytes for value in Net(5).blocks[0].parameters() if not value.requires_grad)
    assert one <= swapper.device_bytes / 2 < one + 4 * swapping.ALIGNMENT
    assert 5 * one <= swapper.host_bytes < 5 * (one + PAGE + 4 * swapping.ALIGNMENT)
    train(net, num_steps=1)
    filled = [
        block for block in net.blocks if block.up.base.weight.numel()
    ]  # the other buffer may have been filled ahead
    assert 1 <= len(filled) <= 2


def test_the_stored_weights_can_be_read():
    net, swapper = swapped(3, [0, 2])
    plain = dict(Net(3).named_parameters())
    for name, value in net.named_parameters():
        stored = swapper.find(value)
        is_swapped = "base" in name and not name.startswith("blocks.1.")
        assert (stored is not None) == is_swapped
        if stored is not None:
            assert torch.equal(stored, plain[name])


def test_blocks_are_spread_evenly():
    assert spread(3, 3) == [0, 1, 2]
    assert spread(4, 10) == [0, 2, 5, 7]
    assert spread(1, 40) == [0]


def test_memory_that_cannot_be_pinned_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    def fail(device: torch.device, num_bytes: int) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(swapping, "new_page", fail)
    with pytest.raises(
        ConfigError, match=r"model\.swap_blocks=2 cannot pin .* \(CUDA error: out of memory\)"
    ):
        swapped(3, [0, 1])

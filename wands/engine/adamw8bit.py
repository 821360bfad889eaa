"""8-bit AdamW of bitsandbytes, whose moments do not depend on how ZeRO flattens the parameters.

bitsandbytes stores a moment as 8-bit codes, with one scale for each block of 256 values. In a flat tensor of DeepSpeed, a block
could contain values of several parameters, and those with small gradients would lose their moments. So each fragment is updated
separately, with the blocks that bitsandbytes uses for the whole parameter. Only a block that is divided between two ranks
differs: it has one scale on each rank. Small parameters have fp32 moments, as in bitsandbytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from bitsandbytes.functional import create_dynamic_map
from bitsandbytes.optim import AdamW8bit
from torch import Tensor

from wands.checkpoint.engine_state import Fragment, cut_flat
from wands.config.optimizer_kinds import BLOCK_8BIT, MIN_8BIT

States = Mapping[str, Tensor]
"""Adam's two moments of N consecutive values of a flattened parameter: the keys "state1" and "state2", each [N].

The moments are fp32 values, or uint8 codes with one fp32 scale for each block of 256 values under "absmax1" and "absmax2". Blocks
start at multiples of 256 in the flattened parameter, so the first and the last may be shorter.
"""


class FragmentAdamW8bit(AdamW8bit):
    """8-bit AdamW that updates each fragment of its flat tensors separately.

    The optimizer state of a flat tensor has the step count under "step", and the `States` of each fragment under the name of its
    parameter. `fragments` maps each flat tensor to its fragments.
    """

    fragments: Mapping[Tensor, Sequence[Fragment]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # DeepSpeed passes no closure
        """Update each flat tensor that has a gradient."""
        for group_number, group in enumerate(self.param_groups):
            for number, flat in enumerate(group["params"]):
                if flat.grad is None:
                    continue
                state = self.state[flat]
                for fragment in self.fragments[flat]:
                    self._update(group, flat, fragment, group_number, number)
                state["step"] = state.get("step", 0) + 1

    def _update(
        self, group: dict[str, Any], flat: Tensor, fragment: Fragment, group_number: int, number: int
    ) -> None:
        """Update one fragment of a flat tensor, which is number `number` in its parameter group."""
        state = self.state[flat]
        assert flat.grad is not None
        values = cut_flat(flat, fragment)
        gradient = cut_flat(flat.grad, fragment)
        if fragment.name not in state:
            state[fragment.name] = _new_states(values, fragment)
        start = fragment.start
        end = fragment.start + values.numel()
        # If the fragment begins inside a block, the rest of this block is updated separately.
        block_start = min(-(-start // BLOCK_8BIT) * BLOCK_8BIT, end)
        for first, last in ((start, block_start), (block_start, end)):
            if first == last:
                continue
            part = values[first - start : last - start]
            part.grad = gradient[first - start : last - start]
            tables = {f"qmap{moment}": _table(moment, part.device) for moment in "12"}
            states = cut_states(state[fragment.name], start, first, last)
            self.state[part] = {"step": state.get("step", 0), **tables, **states}
            self.update_step(group, part, group_number, number)
            del self.state[part]

    def join_states(self, fragment: Fragment, stored: Sequence[tuple[int, States]]) -> States:
        """Join the optimizer states of a fragment from stored (start, states) ranges that overlap with it, in ascending order.

        Stored states of exactly the fragment's range are returned unchanged. Otherwise the moments in the result are fp32.
        """
        first = fragment.start
        last = fragment.start + fragment.numel
        moments = []
        for start, states in stored:
            end = start + len(states["state1"])
            if (start, end) == (first, last):
                return states
            low = max(start, first)
            high = min(end, last)
            moments.append(dequantize(cut_states(states, start, low, high), low))
        return {key: torch.cat([part[key] for part in moments]) for key in ("state1", "state2")}

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Load a state dict, and quantize the fp32 moments that `join_states` returned for large parameters."""
        flats = [flat for group in self.param_groups for flat in group["params"]]
        for number, state in state_dict["state"].items():
            for fragment in self.fragments[flats[number]]:
                states = state[fragment.name]
                if "absmax1" not in states:
                    state[fragment.name] = quantize(states, fragment.shape, fragment.start)
        super().load_state_dict(state_dict, move_to_device)


def cut_states(states: States, start: int, first: int, last: int) -> dict[str, Tensor]:
    """Return views of the states of the range [`first`, `last`) of a flattened parameter, from states that begin at `start`."""
    values = slice(first - start, last - start)
    blocks = slice(first // BLOCK_8BIT - start // BLOCK_8BIT, -(-last // BLOCK_8BIT) - start // BLOCK_8BIT)
    return {key: value[blocks if key.startswith("absmax") else values] for key, value in states.items()}


def dequantize(states: States, start: int) -> States:
    """Return the moments of a range that begins at `start` of a flattened parameter as fp32 values; fp32 ones are unchanged."""
    if "absmax1" not in states:
        return states
    moments = {}
    before = start % BLOCK_8BIT
    for moment in "12":
        codes = states[f"state{moment}"]
        scales = states[f"absmax{moment}"]
        scale_of_code = scales.repeat_interleave(BLOCK_8BIT)[before : before + len(codes)]
        moments[f"state{moment}"] = _table(moment, codes.device)[codes.int()] * scale_of_code
    return moments


def quantize(moments: States, shape: Sequence[int], start: int) -> States:
    """Return fp32 moments of a range that begins at `start` in the format that `FragmentAdamW8bit` stores.

    Those of a parameter (of the whole `shape`) with at least `MIN_8BIT` values become 8-bit codes with scales.
    """
    if not _is_quantized(shape):
        return moments
    states = {}
    for moment in "12":
        values = moments[f"state{moment}"]
        table = _table(moment, values.device)
        before = start % BLOCK_8BIT
        padding = (before, -(before + len(values)) % BLOCK_8BIT)
        blocks = torch.nn.functional.pad(values, padding).view(-1, BLOCK_8BIT)
        scales = blocks.abs().amax(dim=1)
        bounds = (table[1:] + table[:-1]) / 2  # the nearest code is the number of bounds below the value
        codes = torch.bucketize(blocks / scales.clamp(min=1e-38)[:, None], bounds, out_int32=True)
        states[f"state{moment}"] = codes.to(torch.uint8).view(-1)[before : before + len(values)]
        states[f"absmax{moment}"] = scales
    return states


def _is_quantized(shape: Sequence[int]) -> bool:
    return math.prod(shape) >= MIN_8BIT


def _new_states(values: Tensor, fragment: Fragment) -> States:
    if not _is_quantized(fragment.shape):
        return {f"state{moment}": torch.zeros_like(values) for moment in "12"}
    num_blocks = -(-(fragment.start + len(values)) // BLOCK_8BIT) - fragment.start // BLOCK_8BIT
    codes = {f"state{moment}": torch.zeros_like(values, dtype=torch.uint8) for moment in "12"}
    return codes | {f"absmax{moment}": values.new_zeros(num_blocks) for moment in "12"}


@cache
def _table(moment: str, device: torch.device) -> Tensor:
    """Return the values of the 256 codes of an 8-bit moment ("1" or "2", which has no negative values), in ascending order."""
    return create_dynamic_map(signed=moment == "1").to(device)

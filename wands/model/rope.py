"""Rotary position embedding from explicit positions, with the angles of the stock model (diffusers).

Letters: L tokens, H heads, D head dim.
"""

from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor


def rotations_of(rope: WanRotaryPosEmbed, positions: Tensor) -> Tensor:
    """Return the rotation of each pair of channels for each token, as complex numbers with absolute value 1.

    Args:
        rope: the model's table of angles. The first channels are for the frame, the next channels for the row, and the
            last channels for the column.
        positions: int64 [L, 3], (frame, row, column) of each of L tokens.

    Returns:
        complex [L, 1, D/2] for head dim D, to pass to `rotate`.
    """
    widths = [rope.t_dim, rope.h_dim, rope.w_dim]

    def pick(table: Tensor) -> Tensor:
        columns = zip(table.split(widths, dim=1), positions.unbind(1), strict=True)
        # Every second column, because the table contains each angle twice.
        return torch.cat([part[index, ::2] for part, index in columns], dim=1)

    return torch.complex(pick(rope.freqs_cos), pick(rope.freqs_sin))[:, None]


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair of adjacent channels by the angles of the token.

    Args:
        x: fp32 or fp64 [L, H, D], for L tokens, H heads and head dim D.
        rotation: complex [L, 1, D/2], from `rotations_of`.

    Returns:
        [L, H, D].
    """
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2)

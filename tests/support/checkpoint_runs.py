"""A finished run with checkpoints."""

from __future__ import annotations

ZERO2 = {"zero_optimization": {"stage": 2}}

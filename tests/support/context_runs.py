"""Clips and steps for the tests of context parallelism."""

from __future__ import annotations

from tests.support.steps import (
    Grid,
)

TWO_BY_TWO = Grid(1, 2, 2)

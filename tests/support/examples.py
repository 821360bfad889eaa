"""Settings of the property tests. The default tier draws a fifth of the examples that `--all` draws."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

divisor = 1  # set by conftest.py before test modules are imported


def examples(number: int, **more: Any) -> settings:
    """Draw `number` examples, or a fifth of them in the default tier. A test takes as long as it needs."""
    return settings(max_examples=max(5, number // divisor), deadline=None, **more)

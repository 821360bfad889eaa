from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.world import WorldPool


@pytest.fixture(scope="session")
def worlds() -> Iterator[WorldPool]:
    """`worlds[n].run(fn, *args)` runs fn on n gloo ranks that live on for the next case."""
    pool = WorldPool()
    yield pool
    pool.close()

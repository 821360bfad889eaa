"""The list of known bugs stays applicable: a text that a mutation replaces is exactly once in its file."""

from __future__ import annotations


def test_every_mutation_applies():
    from mutate import read_mutations  # conftest.py puts scripts/ on the path

    assert len(read_mutations([])) >= 40

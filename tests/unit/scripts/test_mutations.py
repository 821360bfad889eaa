"""The list of known bugs stays applicable: a text that a mutation replaces is exactly once in its file, and its tests exist."""

from __future__ import annotations

from mutate import ROOT, read_mutations  # conftest.py puts scripts/ on the path


def test_every_mutation_applies():
    assert len(read_mutations([])) >= 40


def test_every_named_test_exists():
    for mutation in read_mutations([]):
        for test in mutation["test"]:
            path, _, name = test.partition("::")
            file = ROOT / path
            assert file.is_file(), (mutation["id"], test)
            assert not name or f"def {name.partition('[')[0]}(" in file.read_text(), (mutation["id"], test)

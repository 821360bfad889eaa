"""Watch a run: hangs, lost launchers, restarts, slow ranks, ranks that differ, and bad steps."""

"""Parity checks of `wands selftest`."""

"""The checks of `wands selftest`, part by part."""

"""The command `wands selftest`: checks that compare wands with stock diffusers."""

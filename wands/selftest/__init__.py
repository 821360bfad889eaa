"""The command `wands tools selftest`: checks that compare wands with stock diffusers."""

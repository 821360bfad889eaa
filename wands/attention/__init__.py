"""Attention on packed sequences: attention kernels, variable-length attention, Ulysses attention and ring attention."""

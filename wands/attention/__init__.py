"""Attention over packed sequences: kernels behind one contract, variable-length attention, Ulysses and ring attention."""

"""Attention over packed sequences: back ends behind one two-function contract, and what is built round them."""

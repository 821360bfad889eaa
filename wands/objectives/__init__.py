"""Objectives: what a training step computes from the clips of a bin, and what it calls its loss."""

"""Checkpoints: one format, written by every rank, and restored on the same or on another grid of ranks."""

"""Objectives: inputs, targets and loss of a training step."""

"""Predict the memory and the step time of a run from tensor shapes, before the run starts and without a device."""

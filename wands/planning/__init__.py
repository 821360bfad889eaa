"""Prediction of memory and step time from shapes, before a run starts and without a device."""

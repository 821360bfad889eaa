"""Inputs of a model in addition to noisy latents: text, conditioning frames, CLIP states, loss masks, inputs of outside code.

A `Condition` (`condition.py`) describes one input. Cache, collator, mock data, checks, planner, evaluation and samples loop over
these objects. `published.py` has the conditions of the published models; its `conditions_of` lists those of a variant.
"""

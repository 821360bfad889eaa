"""Frozen encoders: pixels to latents, captions to text embeddings."""

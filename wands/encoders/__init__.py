"""Frozen encoders: encode video pixels to latents, and captions to text embeddings."""

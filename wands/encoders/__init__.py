"""Frozen encoders: the VAE for video pixels, UMT5 for captions, and CLIP for conditioning images."""

"""wands: train the Wan 2.1 / 2.2 video diffusion transformer with DeepSpeed."""

__version__ = "0.1.0"

"""Training data: clips, the latent cache, packing of samples into bins, and packed batches."""

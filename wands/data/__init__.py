"""The latent cache, the plan of bins and the packed batch."""

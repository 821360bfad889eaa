"""The latent cache: encoded clips on disk."""

"""Small programs for a latent cache: `python -m data_tools.inspect CACHE`."""

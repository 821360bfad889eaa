"""Small programs for latent caches and data sets, such as `python -m data_tools.inspect CACHE`."""

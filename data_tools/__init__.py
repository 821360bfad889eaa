"""Small programs round a latent cache: `python -m data_tools.inspect CACHE`."""

"""Flow matching: sigmas, noise, corruption and loss. Pure functions; no process group, no file."""

"""Flow matching: sigmas, noise and loss, as pure functions without process groups or files."""

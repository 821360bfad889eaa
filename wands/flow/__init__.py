"""Flow matching: noise levels (sigma), noise and loss. Pure functions, without process groups and files."""

"""Flow matching: noise levels (sigma), noise and loss. The functions are pure and use no process group and no file."""

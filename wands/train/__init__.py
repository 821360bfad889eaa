"""Training: the loop, the DeepSpeed engine, checkpoints and metrics. This package connects model, parallelism and data."""

"""The loop, the DeepSpeed engine, checkpoints and metrics. The one place where model, parallel and data meet."""

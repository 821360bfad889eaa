"""The DeepSpeed engine of a DiT: its model, attention kernel, optimizer and learning rate schedule."""

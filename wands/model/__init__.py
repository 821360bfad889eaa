"""The packed Wan transformer, its activation checkpointing, LoRA, dropout and quantization."""

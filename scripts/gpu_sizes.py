"""Sizes of the GPU measurements, on a GPU and for a rehearsal on a CPU."""

from __future__ import annotations

import bench_memory
import torch

HEAD_DIM = 128
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
HEADS = {"cpu": (2,), "cuda": (12, 40)}
CLIPS = {  # tokens of the clips of a bin
    "cpu": ((96,), (16, 24)),
    "cuda": ((32760,), (75600,), (1560,) * 21),
}
SHORT_CLIPS = ((1560,) * 21, (4056,) * 8)  # tokens of the clips of a bin, on a GPU
COPY_BYTES = {"cpu": (2**16,), "cuda": (32760 * 64 * 4, 388 * 10**6)}  # tokens of a clip, pixels of a clip
VARIANT_NAMES = ("wan2.1-t2v-1.3b", "wan2.1-t2v-14b")
# Latent shapes of the clips of a bin.
PACKS = {
    "cpu": {"1 clip": ((3, 8, 8),), "many clips": ((1, 8, 8),) * 3},
    "cuda": {"1 clip": ((21, 60, 104),), "many clips": ((1, 60, 104),) * 21},
}
STEP_PACKS = {
    "cpu": {"3 clips": ((1, 4, 4),) * 3},
    "cuda": {
        "1 clip": ((21, 60, 104),),
        "8 clips": ((3, 52, 104),) * 8,
        "21 clips": ((1, 60, 104),) * 21,
    },
}
LORA = ("lora.rank=32", "precision={compute: bf16, weights: bf16}")
STEP_RUNS = {  # name of a part: model, recipe overrides
    "wan2.1-t2v-1.3b": ("wan2.1-t2v-1.3b", ()),
    "wan2.1-t2v-14b LoRA": ("wan2.1-t2v-14b", LORA),
    "wan2.1-t2v-1.3b fp8": ("wan2.1-t2v-1.3b", ("precision={compute: bf16, linears: fp8}",)),
    "wan2.1-t2v-14b LoRA fp8 base": ("wan2.1-t2v-14b", (*LORA, "lora.quantize=fp8")),
    "wan2.1-t2v-14b LoRA swapped": (
        "wan2.1-t2v-14b",
        (*LORA, "model.checkpointing=full", "model.swap_blocks=40"),
    ),
}
ENCODED = {  # pixels of a clip, text tokens of a caption, captions of a batch
    "cpu": ((3, 5, 16, 16), 8, 2),
    "cuda": ((3, 81, 480, 832), 512, 16),
}
TINY = {"num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 96, "text_dim": 32}
TEXT_TOKENS = 100
MEMORY = {
    "cpu": {"tiny": {"heads": 1, "layers": 5, "ffn_dim": 64, "tokens": 48, "compute": "fp32"}},
    "cuda": {
        "1.3B": bench_memory.SIZES["cuda"],
        "14B": {**bench_memory.SIZES["cuda"], "heads": 40, "layers": 4, "ffn_dim": 13824},
    },
}
VIDEO = {  # options of `wands infer`
    "cpu": {"height": (16,), "width": (16,), "num_frames": (5,), "num_inference_steps": (2,)},
    "cuda": {"height": (480,), "width": (832,), "num_frames": (81,), "num_inference_steps": (10,)},
}

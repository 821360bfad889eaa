"""Work that `bench_step.py --device cuda` gives a GPU, counted without one: `python -m tests.support.bench_step_traffic LIBRARY`.

Of each way, how many operators a forward and backward are, and how many bytes those read and write that are neither matrix
products nor attention, which are the same work in every way that does not pad. "compiled" is the packed way with `model.compile`:
each compiled operator is counted as one operator that reads its arguments and writes its results once
(`tests/unit/model/test_fused.py` compares this with the kernels that torch.compile makes of it).

With a second argument, only the packed ways are counted, on 21 clips: the work of one block on tensors with a row for each token,
from the difference between two and three blocks. `traffic` is then in parts of tokens x width bytes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.fake_cuda import fake_cuda, load, move

CLIPS = [(5, 12, 26)] * 21  # 32,760 tokens, as one clip of 81 frames of 480 x 832
NUM_TOKENS = 32_760
WIDTH = 1536
PRODUCTS = ("mm", "addmm", "bmm", "convolution", "flash_attention", "ring")
FREE = ("prim", "sym_", "is_contiguous", "detach", "empty")  # no work, or no more than a pointer


def counting(one_block: bool) -> Any:
    """Return a mode that counts operators and their bytes on the GPU, of one block only those with a row for each token."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Count(TorchDispatchMode):
        operators = traffic = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **kwargs or {})
            tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, torch.Tensor)]
            on_gpu = [one for one in tensors if one.device.type == "cuda"]
            rows = max((one.numel() // one.shape[-1] for one in on_gpu if one.dim() > 1), default=0)
            counts = rows >= NUM_TOKENS // len(CLIPS) if one_block else bool(on_gpu)
            if counts and not func.is_view and not any(name in str(func) for name in FREE):
                if one_block and any(name in str(func) for name in PRODUCTS):
                    return result
                self.operators += 1
                if not any(name in str(func) for name in PRODUCTS):
                    self.traffic += sum(one.nbytes for one in on_gpu)
            return result

    return Count()


def flash(query: Any, key: Any, value: Any, attn_mask: None = None, **options: Any) -> Any:
    """Call the kernel that `sdpa_kernel` and autocast choose on a GPU; without one torch would write whole matrices."""
    import torch

    q, k, v = (one.to(torch.bfloat16) for one in (query, key, value))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]


def of_one_block(two: dict[str, dict[str, int]], three: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Work of one block, from that of two and of three blocks."""
    unit = {"operators": 1, "traffic": NUM_TOKENS * WIDTH}
    return {name: {key: (three[name][key] - two[name][key]) / unit[key] for key in unit} for name in two}


def main() -> None:
    load(Path(sys.argv[1]))
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
    import bench_step
    import torch
    from diffusers import WanTransformer3DModel

    from wands.attention.kernels.registry import get_backend
    from wands.model.transformer import PackedWanTransformer

    found: dict[str, dict[str, int]] = {}

    one_block = len(sys.argv) > 2
    compiled = False

    def build_models(device: str) -> tuple[Any, Any]:
        models = []
        for kind in (WanTransformer3DModel, PackedWanTransformer):
            with torch.device("meta"):
                model = kind(attention_head_dim=128, **bench_step.WIDTHS[device])
            model.enable_gradient_checkpointing()
            models.append(move(model).train())
        backend = get_backend("torch")
        models[1].set_attention(bench_step.context_attention(backend), backend)
        models[1].set_compile(compiled)
        return models[0], models[1]

    def seconds(step: Callable[[], None], model: Any, device: str, clock: Any) -> float:
        if (compiled or one_block) and model.__class__ is WanTransformer3DModel:
            return 1.0
        model.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16), counting(one_block) as count:
            step()
        name = "compiled" if compiled else step.__qualname__.partition("_step")[0]
        found[name] = {"operators": count.operators, "traffic": count.traffic}
        return 1.0

    bench_step.GRIDS["cuda"] = CLIPS if one_block else [(5, 30, 52), (8, 35, 46), (3, 40, 40)]
    if one_block:
        bench_step.TEXT_LENS = [60] * len(CLIPS)  # fewer rows in all than a clip has
    bench_step.build_models = build_models
    bench_step.seconds = seconds
    bench_step.report = lambda *_: None
    torch.nn.functional.scaled_dot_product_attention = flash
    stdout = sys.stdout
    sys.stdout = sys.stderr
    counts = []
    for num_layers in (2, 3) if one_block else (2,):
        bench_step.WIDTHS["cuda"]["num_layers"] = num_layers
        for compiled in (False, True):  # noqa: B007, read by the functions above
            with fake_cuda(may_wait=True):
                bench_step.measure("cuda", 1, None, bench_step.CLOCKS["wall"])
        counts.append({name: dict(numbers) for name, numbers in found.items()})
    if one_block:
        found = of_one_block(*counts)
    json.dump(found, stdout)
    stdout.flush()
    os._exit(0)  # threads of torch.compile can abort a process that has finished its work


if __name__ == "__main__":
    main()

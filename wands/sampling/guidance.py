"""Compute the two predictions of classifier-free guidance together: as one batch, or on different ranks.

In every denoising step, the pipelines of diffusers call the transformer twice: first with the prompt, then with the negative
prompt. Inside `predict_together`, the first call computes both predictions, and the second call only returns the prediction
for the negative prompt. The pipelines of diffusers stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from wands.sampling.pipeline import AnyPipeline


@contextmanager
def predict_together(
    pipeline: AnyPipeline, texts: Sequence[Tensor], guidance: dist.ProcessGroup | Literal["batched"]
) -> Iterator[None]:
    """Make a pipeline compute both predictions of classifier-free guidance in one call of the transformer.

    In each denoising step, diffusers calls the transformer with the prompt, and then with the negative prompt. Inside
    this context, the first call computes both predictions. The second call only returns the prediction for the negative
    prompt.

    Args:
        pipeline: pipeline that samples with guidance inside this context.
        texts: (embedding of the prompt, embedding of the negative prompt), each [1, tokens, channels].
        guidance: "batched" computes both predictions on this rank, with batch size 2. With a process group of two ranks, the
            first rank computes the prediction for the prompt, and the second rank the prediction for the negative prompt.
            Both ranks get both predictions.
    """
    waiting: list[Tensor] = []

    def forward(own_forward: Callable[..., tuple[Tensor]], **inputs: Any) -> tuple[Tensor]:
        if waiting:
            return (waiting.pop(),)
        text = torch.cat([*texts]).to(inputs["encoder_hidden_states"].dtype)
        if guidance == "batched":
            inputs = {key: torch.cat([x, x]) if isinstance(x, Tensor) else x for key, x in inputs.items()}
            both = list(own_forward(**inputs | {"encoder_hidden_states": text})[0].chunk(2))
        else:
            own = own_forward(**inputs | {"encoder_hidden_states": text[guidance.rank()][None]})[0]
            both = [torch.empty_like(own) for _ in texts]
            dist.all_gather(both, own, group=guidance)
        waiting.append(both[1])
        return (both[0],)

    with ExitStack() as patches:
        for model in filter(None, (pipeline.transformer, pipeline.transformer_2)):
            patches.enter_context(patch.object(model, "forward", partial(forward, model.forward)))
        yield

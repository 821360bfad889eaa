"""Call `wands infer` from a test with plain values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wands.commands import infer as command
from wands.commands.infer import InferResult
from wands.conditions.condition import Condition
from wands.config.options import InferOptions
from wands.sampling.pipeline import PipelineSource
from wands.sampling.requests import SampleRequest


def infer(
    model: str | Path,
    prompts: Sequence[str | SampleRequest],
    *,
    conditions: Sequence[Condition] = (),
    **options: Any,
) -> list[InferResult]:
    """Sample texts, then requests; each field of a request is one value, or a sequence with None where a prompt has none."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    requests = [prompt for prompt in prompts if isinstance(prompt, SampleRequest)]
    sparse: dict[str, tuple[Any, ...]] = {}
    for key in options.keys() & SampleRequest.model_fields.keys():
        value = options[key]
        options[key] = tuple(value) if isinstance(value, list | tuple) else (value,)
        if None in options[key]:
            sparse[key] = options.pop(key)
    if sparse:
        requests = [
            SampleRequest(
                prompt=text, **{key: values[i] for key, values in sparse.items() if values[i] is not None}
            )
            for i, text in enumerate(texts)
        ]
        texts = []
    return command.infer(options_of(model, prompts=texts, **options), requests, conditions)


def source_of(model: str | Path, **options: Any) -> PipelineSource:
    """Find a pipeline as the command does."""
    return command.find_source(options_of(model, **options))


def options_of(model: str | Path, *, out_dir: Path = Path(), **options: Any) -> InferOptions:
    loras = {key: tuple(map(str, options.pop(key))) for key in ("lora", "lora_1", "lora_2") if key in options}
    return InferOptions(model=str(model), out_dir=out_dir, **loras, **options)

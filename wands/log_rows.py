"""Types of the rows in the `.jsonl` files of a run, which anyone may have edited, or a power failure may have damaged.

Every key may be missing or null, except `step` and the keys without a default. A row may have further keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from wands.values import Count, FileName, Norm, Number, Text, is_valid

_Groups = dict[Text, list["_GroupMeans"]]


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Change(_Part):
    mean: Number | None = None
    low: Number | None = None
    high: Number | None = None


class _GroupMeans(_Part):
    sigma: Number
    held_out: Number | None = None
    train: Number | None = None


class _Clip(_Part):
    sample_id: Text | None = None
    sigma: Number | None = None
    loss: Number | None = None


class _DataFacts(_Part):
    num_samples: Count
    num_tokens: Count


class _Row(_Part):
    step: Count


class _Metrics(_Row):
    loss: Number | None = None
    lr: Number | None = None
    grad_norm: Number | None = None
    seconds: Number | None = None
    data_wait: Number | None = None
    tflops: Number | None = None
    tokens_per_second_per_gpu: Number | None = None
    device_peak: Number | None = None
    host_peak: Number | None = None
    eta_seconds: Number | None = None
    loss_by_sigma: list[Number | None] | None = None
    grad_norm_blocks: dict[Text, Norm | None] | None = None
    update_ratio_blocks: dict[Text, Norm | None] | None = None


class _Event(_Row):
    event: Annotated[Text, Field(min_length=1)]
    time: Number | None = None
    skipped: bool | None = None
    loss: Number | None = None
    grad_norm: Number | None = None
    clips: list[_Clip] | None = None
    data: _DataFacts | None = None
    total_steps: Count | None = None
    world_size: Count | None = None
    reason: Text | None = None
    changed: Text | None = None
    variant: Text | None = None
    device: Text | None = None
    wands_version: Text | None = None


class _Evaluation(_Row):
    weights: Text
    held_out: Number | None = None
    train: Number | None = None
    gap: Number | None = None
    change: _Change | None = None
    train_change: _Change | None = None
    by: _Groups | None = None
    losses: list[Number | None] | None = None


class _SampleVideo(_Row):
    weights: Text
    number: Count | None = None
    prompt: Text | None = None
    video: FileName | None = None
    thumbnail: FileName | None = None
    width: Count | None = None
    height: Count | None = None


_KINDS: Mapping[str, type[_Row]] = {
    "metrics.jsonl": _Metrics,
    "events.jsonl": _Event,
    "evaluations.jsonl": _Evaluation,
    "samples.jsonl": _SampleVideo,
}


@cache
def _adapter(name: str) -> TypeAdapter[_Row]:
    return TypeAdapter(_KINDS.get(name, _Row))


def is_sound(name: str, row: Any) -> bool:
    """Return whether a row has the types of the rows in the file `name`, such as "metrics.jsonl"."""
    return is_valid(_adapter(name), row)

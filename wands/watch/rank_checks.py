"""Check that all ranks of a run agree: on its inputs before the first step, and on the plan and the weights after a step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import diffusers
import numpy as np
import torch
from torch import Tensor

from wands.config.recipe import Recipe
from wands.data.packing import Step
from wands.data.sampler import PlanSampler, StepPlan
from wands.distributed.consistency import check_agreement, check_tensors_agree, tensor_checksum
from wands.distributed.dims import ContextDegrees
from wands.distributed.engine_protocol import TrainingEngine
from wands.model.tensor_parallel import cut_of
from wands.objectives.objective import Objective
from wands.run.data_identity import DataIdentity
from wands.sampling.requests import SampleRequest
from wands.version import __version__

FIXES = {
    "recipe": "start every node with the same recipe file and the same --set",
    "DeepSpeed config": "start every node with the same --deepspeed file",
    "software": "install the same versions on every node",
    "model config": "use the same model folder (model.path) on every node",
    "objective": "start every node with the same objective (--import and the arguments of wands.Trainer)",
    "context parallelism": "start the same number of processes on every node, or set parallel.ulysses_degree",
    "data": "use the same cache (data.cache) on every node: one shared folder, or complete copies",
    "plan": "start every node from the same checkpoint, with the same data and recipe",
}
"""Fix for the error message if an input of the run differs between ranks, by the name of the input."""


def run_digests(
    *,
    recipe: Recipe,
    ds_config: Mapping[str, Any],
    model_config: Mapping[str, Any],
    degrees: ContextDegrees,
    objective: Objective,
    identity: DataIdentity,
    sampler: PlanSampler,
    samples: Sequence[SampleRequest],
    step: int = 0,
) -> dict[str, str]:
    """Return the inputs of a run that must be equal on all ranks, as JSON texts for `check_agreement`.

    Short inputs are written in full, so that an error can name the key that differs; inputs that grow with the data are hashed.
    Paths are compared as text, so copies of the model or the cache must have the same path on every node. Call this function
    before the data prefetch thread starts, which uses the same sampler.
    """
    epoch = sampler.epoch_of(step)
    modules = (torch, deepspeed, diffusers, np)
    parts: dict[str, Any] = {
        "recipe": recipe.model_dump(mode="json"),
        "DeepSpeed config": ds_config,
        "software": {"wands": __version__} | {module.__name__: str(module.__version__) for module in modules},
        "model config": model_config,
        "objective": {"name": objective.name, "version": objective.version},
        "context parallelism": {"ulysses_degree": degrees.ulysses, "ring_degree": degrees.ring},
        "data": {
            "num_samples": len(sampler.keys),
            "num_tokens": int(sampler.seq_lens.sum()),
            "keys, lengths and order": identity.fingerprint,
            "contents": identity.contents,
        },
        "plan": {
            "start_step": step,
            "total_steps": sampler.total_steps,
            "bins": bins_digest(sampler.epoch_plan(epoch).steps),
        },
        "samples": [request.model_dump() for request in samples],
    }
    return {name: json.dumps(part, sort_keys=True) for name, part in parts.items()}


def bins_digest(steps: Sequence[Step]) -> str:
    """Return a digest of the bins of some steps, which changes if a sample moves to another step, bin or position."""
    return hashlib.blake2b(json.dumps(steps, default=int).encode(), digest_size=16).hexdigest()


def weights_checksums(
    module: torch.nn.Module, device: torch.device, gather: bool = True
) -> tuple[list[str], Tensor]:
    """Return the names of the parameters, and a checksum of each from the values that this rank uses, int64 [P].

    Every rank must call this function, at the end of a step. Under ZeRO-3, partitioned parameters are gathered one at a time, or
    left out without `gather`. Small parameters, which DeepSpeed keeps whole, are not gathered, because gathering would overwrite
    the copy that is to be checked.
    """
    sums = {}
    swapper = getattr(module, "swapper", None)
    for name, parameter in module.named_parameters():
        if swapper is not None and (stored := swapper.find(parameter)) is not None:
            sums[name] = tensor_checksum(stored).to(device)
        elif gather or not _is_partitioned(parameter):
            with deepspeed.zero.GatheredParameters([parameter], enabled=_is_partitioned(parameter)):
                sums[name] = tensor_checksum(parameter.detach()).to(device)
    return list(sums), torch.stack([*sums.values()]) if sums else torch.empty(0, dtype=torch.int64)


def _is_partitioned(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id") and parameter.ds_status.name != "AVAILABLE"


def check_weights_agree(engine: TrainingEngine, device: torch.device, gather: bool = True) -> int:
    """Compare every parameter between all ranks that have it, bit by bit, after a step. Return the number of parameters.

    Every rank must call this function. The training does not change. Optimizer states and master weights are not compared,
    because ZeRO divides them among the ranks. With `gather`, ZeRO-3's partitioned parameters are compared too; all ranks gather
    them from the same partitions, so a difference shows that the gathering failed.

    Raises:
        ConfigError: if the names, shapes or dtypes of the parameters differ between ranks.
        DataError: if the values of a parameter differ between ranks.
    """
    shapes = {}
    for name, parameter in engine.module.named_parameters():
        shape = list(getattr(parameter, "ds_shape", parameter.shape))
        shapes[name] = f"{parameter.dtype} {shape}" + (" partitioned" if _is_partitioned(parameter) else "")
    check_agreement({"model": json.dumps(shapes)}, device, FIXES)  # otherwise the gathers below would hang
    names, checksums = weights_checksums(engine.module, device, gather)
    if names:
        parameters = dict(engine.module.named_parameters())
        cuts = [cut_of(parameters[name]) for name in names]
        check_tensors_agree(names, checksums, [cut.degree if cut else 1 for cut in cuts])
    return len(names)


def check_step(engine: TrainingEngine, plan: StepPlan, device: torch.device, gather: bool = True) -> int:
    """Compare the plan of the last step between all ranks, and call `check_weights_agree`. Every rank must call this function.

    The plan is an argument because the prefetch thread is using the sampler.

    Raises:
        ConfigError: if the plan, or the names, shapes or dtypes of the parameters differ between ranks.
        DataError: if the values of a parameter differ between ranks.
    """
    digest = {"step": plan.step, "bins": bins_digest((plan.bins,))}
    check_agreement({"plan": json.dumps(digest)}, device, FIXES)
    return check_weights_agree(engine, device, gather)

"""Check that all ranks of a training run agree.

Before the first step, the ranks compare the inputs of the run. After a step, they compare the packing plan and the
weights.
"""

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
"""Maps each input of a run to the fix that the error message contains if this input differs between ranks."""


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
    """Return the inputs of a run that must be equal on all ranks, as a dict from the name of an input to a JSON text.

    `check_agreement` compares these texts before the ranks build their engines. Short inputs are written in full, so that
    an error can name the key that differs. Inputs that grow with the data are hashed. Paths are compared as text:
    if every node has its own copy of the model or the cache, the copies must have the same path.

    Call this function before the data prefetch thread starts, because the thread uses the same data sampler.

    Args:
        recipe: recipe with all defaults filled in.
        ds_config: result of `build_ds_config`.
        model_config: diffusers config of the DiT.
        degrees: Ulysses degree and ring degree.
        objective: objective of the run.
        identity: identity of the training data.
        sampler: sampler of the run.
        samples: requests for the sample videos of the run.
        step: number of optimizer steps that the run has made.
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
    """Return a digest of a packing plan. The digest changes if a sample moves to a different step, packed sequence or position.

    Args:
        steps: steps of the plan. A step is a sequence of bins (packed sequences). A bin is a sequence of sample indices. For one
            StepPlan, pass `(plan.bins,)`.
    """
    return hashlib.blake2b(json.dumps(steps, default=int).encode(), digest_size=16).hexdigest()


def weights_checksums(
    module: torch.nn.Module, device: torch.device, gather: bool = True
) -> tuple[list[str], Tensor]:
    """Return a checksum of each parameter, from the values that this rank uses. Every rank must call this function.

    Under ZeRO-3, a partitioned parameter is gathered for its checksum and then released, one parameter at a time.
    DeepSpeed keeps small parameters whole on each rank. These small parameters are not gathered, because gathering
    would overwrite the copy that is to be checked.

    Args:
        module: module of the engine, at the end of a step.
        device: device of the result. Each checksum is computed on the parameter's own device.
        gather: whether to gather partitioned parameters. If not, the result does not contain these parameters.

    Returns:
        (names of the P parameters, checksums int64 [P]).
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


def _is_partitioned(parameter: torch.nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id") and parameter.ds_status.name != "AVAILABLE"


def check_weights_agree(engine: Any, device: torch.device, gather: bool = True) -> int:
    """Compare every parameter between all ranks, bit by bit, after a step. Every rank must call this function.

    With tensor parallelism, the part of a divided parameter is compared between the ranks that have the same part.

    The check does not change the training. It does not compare optimizer states or fp32 master weights, because ZeRO divides
    them among the ranks.

    Args:
        engine: DeepSpeed engine of a DiT.
        device: device of this rank.
        gather: whether to also compare the parameters that ZeRO-3 has partitioned, after gathering them. All ranks gather a
            parameter from the same partitions, so a difference shows that the gathering failed.

    Returns:
        Number of compared parameters.

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


def check_step(engine: Any, plan: StepPlan, device: torch.device, gather: bool = True) -> int:
    """Compare the packing plan of the last step, and the weights after this step, between all ranks. Every rank must call
    this function.

    Args:
        engine: DeepSpeed engine of a DiT.
        plan: packing plan of the last step: the samples of each packed sequence. It is an argument because this function must
            not use the data sampler, which the prefetch thread is using.
        device: device of this rank.
        gather: whether to also compare the parameters that ZeRO-3 has partitioned, which must be gathered first.

    Returns:
        Number of compared parameters.

    Raises:
        ConfigError: if the plan, or the names, shapes or dtypes of the parameters differ between ranks.
        DataError: if the values of a parameter differ between ranks.
    """
    digest = {"step": plan.step, "bins": bins_digest((plan.bins,))}
    check_agreement({"plan": json.dumps(digest)}, device, FIXES)
    return check_weights_agree(engine, device, gather)

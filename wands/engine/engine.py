"""Build the learning rate schedule, the model and the DeepSpeed engine of a run.

DeepSpeed is not aware of context parallelism: for DeepSpeed, all ranks that have the same weights are data-parallel.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from wands.attention.ulysses import OPERATORS, context_attention
from wands.attention.varlen import Backend, choose_backend
from wands.checkpoint.engine_state import trained_fragments
from wands.config.deepspeed import REDUCE_BUCKET_SIZE, learning_rate, offloads_optimizer, uses_adam
from wands.config.optimizer_kinds import kind_of
from wands.config.recipe import OptimConfig, Recipe
from wands.distributed.bootstrap import accelerator_type
from wands.distributed.dims import ProcessGroups
from wands.distributed.engine_protocol import TrainingEngine
from wands.engine.optimizers import build_optimizer, split_by_decay, split_by_dtype
from wands.engine.tensor_groups import TensorGroups, forget_groups
from wands.errors import ConfigError, one_line
from wands.model import fused
from wands.model.files.loading import load_transformer
from wands.model.fp8 import check_fp8
from wands.model.freezing import freeze_parameters
from wands.model.lora import MergedLoras, add_lora, load_start
from wands.model.offload import ActivationOffloader
from wands.model.weight_dtypes import WeightDtypePolicy
from wands.variants import Expert

_LINEAR = torch.nn.functional.linear


def build_schedule(optim: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Return a function from a number of finished steps to the factor of the peak learning rate."""
    warmup = round(optim.warmup * total_steps) if optim.warmup < 1 else round(optim.warmup)

    def multiplier(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
        if optim.schedule == "constant":
            return 1.0
        falling = 0.5 * (1 + math.cos(math.pi * done)) if optim.schedule == "cosine" else 1 - done
        return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * falling

    return multiplier


def check_offload(ds_config: Mapping[str, Any]) -> None:
    """Compile DeepSpeedCPUAdam on every rank if the run offloads Adam's states to the host and does not use torch's Adam.

    This takes a minute, and is then cached on the machine. DeepSpeed would compile it later, where a failure on one rank would
    leave the other ranks waiting.

    Raises:
        ConfigError: if DeepSpeedCPUAdam cannot be compiled or loaded on this machine.
    """
    torch_adam = ds_config["optimizer"]["params"].get("torch_adam")
    if torch_adam or not (uses_adam(ds_config) and offloads_optimizer(ds_config)):
        return
    from deepspeed.ops.op_builder import CPUAdamBuilder

    try:
        CPUAdamBuilder().load(verbose=False)
    except Exception as error:  # compilers, linkers and version checks raise errors of many classes
        raise ConfigError(
            f"zero_optimization.offload_optimizer needs DeepSpeedCPUAdam, which does not compile on this machine "
            f"({one_line(error, 300)}); install ninja, g++ and the CUDA toolkit of this torch version, or set "
            "optimizer.params.torch_adam to true in the DeepSpeed JSON (slower)."
        ) from error


def attention_backend(recipe: Recipe, head_dim: int, device: torch.device) -> Backend:
    """Return the attention kernel that the recipe selects for a device, without measuring; `auto` means `choose_backend`."""
    dtype = torch.bfloat16 if recipe.precision.compute == "bf16" else torch.float32
    return choose_backend(recipe.attention.backend, device, dtype, head_dim)


def use_compile(setting: bool | str, device: torch.device) -> bool:
    """Return whether to compile the pointwise operations of the blocks; "auto" does so on GPUs if torch.compile works.

    Raises:
        ConfigError: if `setting` is True, and torch.compile does not work on this machine.
    """
    if setting is False or (setting == "auto" and device.type != "cuda"):
        return False
    try:
        # A small fp32 call on purpose: another implementation of this operator must support it, or fall back.
        fused.norm_rotate(torch.ones(2, 8, device=device), torch.ones(8, device=device), None, 1e-6)
    except Exception as error:  # missing compilers, headers and packages raise errors of many classes
        reason = f"torch.compile does not work on this machine ({one_line(error, 300)})"
        if setting != "auto":
            raise ConfigError(f"model.compile=true: {reason}. Set model.compile=false.") from error
        logging.getLogger(__name__).warning(
            f"{reason}. The norms of the blocks run as plain PyTorch, and a step takes longer. Install a C++ compiler "
            "and the headers of Python, or set model.compile=false to turn off this warning."
        )
        return False
    return True


def build_model(
    recipe: Recipe,
    ds_config: Mapping[str, Any],
    expert: Expert,
    *,
    groups: ProcessGroups,
    device: torch.device,
    backend: Backend,
    store: ActivationOffloader | None = None,
    resumes: bool = False,
    config: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Load a DiT and prepare it for training: attention kernel, dropout, activation checkpointing, LoRA or frozen parameters.

    Under ZeRO-3, each tensor is partitioned as soon as it is read.

    Args:
        recipe: recipe of the run.
        ds_config: result of `build_ds_config`.
        expert: DiT to load.
        groups: process groups of this rank.
        device: device of this rank.
        backend: attention kernel, such as the result of `attention_backend`.
        store: host memory for the activations that `model.checkpointing=offload` offloads; None allocates it for this DiT.
        resumes: whether the weights come from a checkpoint. The file in `lora.init_from` is then not read.
        config: config of the DiT, which may have more input channels than `model.path`; None uses the config there.
    """
    sharded = _sharded_init(ds_config, groups)
    policy = WeightDtypePolicy.of(recipe)
    if "fp8" in (policy.linears, policy.quantize):
        check_fp8(device)
    model = load_transformer(
        recipe.model.path,
        subfolder=expert.subfolder,
        init=recipe.model.init,
        seed=recipe.train.seed,
        zero_init_context=sharded,
        merge=MergedLoras.load(recipe.model.merge_loras, expert, recipe.model.experts),
        storage=policy,
        config=config,
        tensor_group=groups.tensor,
    )
    self_attention = context_attention(backend, groups.ulysses, groups.ring, groups.ring_grad)
    model.set_attention(self_attention, backend)
    model.set_compile(use_compile(recipe.model.compile, device))
    if recipe.lora is None:
        freeze_parameters(model, recipe.model.trainable, recipe.model.freeze)
    else:
        # The checkpoint contains the LoRA, and the file in lora.init_from may no longer exist.
        start = None if resumes else load_start(recipe.lora, expert, recipe.model.experts)
        add_lora(model, recipe.lora, recipe.train.seed, start)
    if recipe.uses_dropout:
        model.set_dropout(recipe.model.dropout, recipe.lora.dropout if recipe.lora else 0.0)
    model.set_checkpointing(
        recipe.model.checkpointing,
        recipe.model.kept_on_device,
        recipe.model.kept_on_host,
        OPERATORS,
        store,
        recipe.model.num_recomputed(len(model.blocks)),
    )
    if num_swapped := recipe.model.num_swapped(len(model.blocks)):
        model.set_swapping(num_swapped, device)
    return model.train()


def _sharded_init(ds_config: Mapping[str, Any], groups: ProcessGroups) -> Any:
    """Return the context in which ZeRO-3 partitions each new tensor; None at other stages."""
    import deepspeed
    from deepspeed.utils import groups as ds_groups

    # With zero_hpz_partition_size DeepSpeed makes groups for each model, and fails if another expert's groups are recorded.
    ds_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    if ds_config["zero_optimization"].get("stage", 0) != 3:
        return None
    return deepspeed.zero.Init(
        config_dict_or_path=ds_config, data_parallel_group=groups.zero, mpu=TensorGroups.of(groups)
    )


def build_engine(
    model: torch.nn.Module,
    ds_config: Mapping[str, Any],
    recipe: Recipe,
    total_steps: int,
    *,
    groups: ProcessGroups | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    schedule: Callable[[OptimConfig, int], Callable[[int], float]] | None = None,
) -> TrainingEngine:
    """Wrap a model in a DeepSpeed engine with an optimizer and a learning rate schedule.

    `groups` may be None without tensor parallelism. `optimizer` is a function of (named trained parameters, learning rate) that
    replaces the optimizer of the recipe or DeepSpeed JSON; `schedule` replaces `build_schedule`. If the DeepSpeed JSON has a
    scheduler, DeepSpeed builds the schedule.
    """
    import deepspeed

    config = copy.deepcopy(dict(ds_config))
    zero = config["zero_optimization"]
    peak_lr = learning_rate(ds_config, recipe)
    config["optimizer"]["params"]["lr"] = peak_lr
    lr_lambda = (schedule or build_schedule)(recipe.optim, total_steps)
    scheduler = None if "scheduler" in config else partial(LambdaLR, lr_lambda=lr_lambda)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    # DeepSpeed allocates the whole bucket, 2 GB by default, but it never holds more than all gradients.
    num_trained = sum(getattr(parameter, "ds_numel", parameter.numel()) for _, parameter in trained)
    zero["reduce_bucket_size"] = min(int(zero.get("reduce_bucket_size", REDUCE_BUCKET_SIZE)), num_trained)
    own: Any  # classes of several libraries
    if optimizer is not None:
        own = optimizer(trained, peak_lr)
    else:
        own = build_optimizer(trained, config["optimizer"], fused=accelerator_type() == "cuda")
    param_groups = own.param_groups if own else [{"params": [parameter for _, parameter in trained]}]
    if optimizer is None and not recipe.optim.decay_norms:
        param_groups = split_by_decay(param_groups, trained)
    if recipe.precision.weights == "bf16" and recipe.lora is None:
        param_groups = split_by_dtype(param_groups, zero, recipe.precision.reduce)
    if own is not None:
        del config["optimizer"]
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        own.param_groups = param_groups
    # Autocast's cache would keep a bf16 copy of every weight until the end of the forward pass. With ZeRO-3, every rank would
    # then have a copy of the whole model.
    torch.set_autocast_cache_enabled(False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=own,
        model_parameters=param_groups,
        config=config,
        lr_scheduler=scheduler,
        mpu=TensorGroups.of(groups) if groups else None,
    )
    if int(zero.get("stage", 0)) == 3:
        _share_masters(engine.optimizer)
    if kind_of(ds_config["optimizer"]["type"]) == "adamw8bit":
        own.fragments = defaultdict(list)
        for fragment in trained_fragments(engine):
            own.fragments[fragment.tensor].append(fragment)
    return engine


def release_engine(engine: TrainingEngine) -> None:
    """Take an engine apart, so that this process can make another run.

    ZeRO-3 keeps references to every model in global variables, and replaces torch's linear function by one with other roundings
    in bf16.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    engine.destroy()
    forget_groups()
    parameter_offload.FWD_MODULE_STACK.clear()
    cached = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    for cell in cached.__closure__:  # the cache of a method keeps every model that has made a step
        cell.cell_contents.cache_clear()
    torch.nn.functional.linear = _LINEAR


def _share_masters(optimizer: Any) -> None:
    """Let fp32 weights share memory with their equal fp32 master weights at ZeRO-3, which saves one copy of each partition.

    DeepSpeed 0.19.8 has code for this in stage3.py that never runs, because it compares a torch.device with a string.
    """
    partitions = zip(
        optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True
    )
    for weights, masters in partitions:
        if weights is None or masters.numel() != weights.numel():  # weights or masters are on NVMe
            continue
        if weights.dtype == masters.dtype and weights.device == masters.device:
            masters.data = weights.data

"""Load weights into a `PackedWanTransformer` one tensor at a time, without a second copy of the model.

The model is built without memory: on the meta device, or partitioned by ZeRO-3. Each parameter is then filled from
safetensors files or with official Wan's initial values. Folders of official Wan repositories are read directly: their names
and configs are translated to the names and configs of diffusers.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.modeling_utils import no_init_weights
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor, nn

from wands.errors import CheckpointError, ConfigError
from wands.files import read_json_object
from wands.model.files.hub import fetch_model
from wands.model.files.name_maps import DIT, EXPERTS, check_fit, rename_all
from wands.model.files.official import (
    DIFFUSERS_CLASS,
    DIT_STEM,
    EXPERT_FOLDERS,
    OFFICIAL_CLASS,
    boundary_of,
    dit_config,
    find_expert,
)
from wands.model.files.tensor_files import TensorFiles, find_weights
from wands.model.quantize import QuantizedLinear
from wands.model.transformer import PackedWanTransformer
from wands.model.weight_dtypes import WeightDtypePolicy

logger = logging.getLogger(__name__)
WEIGHTS_NAME = f"{DIT_STEM}.safetensors"
_MODEL_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json")


def load_config(
    path: str | Path, subfolder: str = "transformer", *, key: str = "model.path"
) -> dict[str, Any]:
    """Read the diffusers config of a DiT.

    Args:
        path: folder or Hub id of a diffusers pipeline or an official Wan repository.
        subfolder: folder of the DiT in `path`; "" if `path` is the folder of the DiT. In an official repository
            "transformer" is the only DiT or the high-noise expert, and "transformer_2" is the low-noise expert.
        key: option or recipe key that the user typed, for errors.

    Raises:
        ConfigError: if the model does not exist or is not a Wan DiT.
        CheckpointError: if an official config does not fit its weights.
    """
    return _read_config(f"{key}={path}", _find_folder(path, subfolder, ("config.json",), key))


def load_index(path: str | Path, *, key: str = "model.path") -> dict[str, Any]:
    """Read `model_index.json` of a pipeline; return {} for a folder of one DiT.

    An official repository has no such file. If it has two experts, the result contains boundary_ratio and transformer_2, as
    in diffusers' index of the same model.

    Raises:
        ConfigError: if the model does not exist or the file is damaged.
    """
    file = fetch_model(path, key=key, allow=["model_index.json"]) / "model_index.json"
    if file.is_file():
        return _read_object(f"{key}={path}", file)
    allow = [f"{folder}/config.json" for folder in EXPERT_FOLDERS.values()]
    root = fetch_model(path, key=key, allow=allow)
    low_noise = find_expert(root, EXPERTS[1])
    if low_noise is None:
        return {}
    boundary = boundary_of(_read_object(f"{key}={path}", low_noise / "config.json"))
    return {"boundary_ratio": boundary, EXPERTS[1]: ["diffusers", DIFFUSERS_CLASS]}


def load_transformer(
    path: str | Path,
    *,
    subfolder: str = "transformer",
    init: str = "pretrained",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    zero_init_context: AbstractContextManager[Any] | None = None,
    merge: Callable[[str, Tensor], Tensor] = lambda name, weight: weight,
    storage: WeightDtypePolicy = WeightDtypePolicy(),  # noqa: B008, frozen
    key: str = "model.path",
) -> PackedWanTransformer:
    """Build a DiT and fill its parameters.

    Args:
        path: folder or Hub id of a diffusers pipeline or an official Wan repository.
        subfolder: folder of the DiT, as for `load_config`.
        init: "pretrained" reads the weights; "random" reads only the config and initialises as official Wan does.
        seed: seed of random weights, which are equal at any world size.
        dtype: dtype of the parameters, whatever the dtype in the file; ignored with a ZeRO-3 context.
        zero_init_context: `deepspeed.zero.Init(...)` to partition each parameter when it is created. Every rank
            must then call this function, and rank 0 reads the files.
        merge: function of a parameter's name and fp32 value that returns the value to store, such as
            `wands.model.lora.MergedLoras`.
        storage: dtypes in which the parameters are stored after `merge`. A policy that is not plain replaces `dtype`.
        key: option or recipe key that the user typed, for errors.

    Returns:
        The model in training mode, on the CPU or on the device of the context.

    Raises:
        ConfigError: if the model does not exist or is not a Wan DiT.
        CheckpointError: if the weights are missing, damaged, or do not fit the config.
    """
    assert init in ("pretrained", "random"), init
    assert storage.is_plain or dtype == torch.float32, "the storage policy sets the dtype"
    where = f"{key}={path}"
    folder = _find_folder(path, subfolder, _MODEL_FILES[:1] if init == "random" else _MODEL_FILES, key)
    with _freed_is_returned():
        model = build_empty(_read_config(where, folder), zero_init_context if storage.is_plain else None)
        num_params = sum(torch.Size(_shape(p)).numel() for p in model.parameters())

        def fill(make: Callable[[str, tuple[int, ...]], Tensor]) -> None:
            if storage.is_plain:
                _fill(model, make, dtype)
            else:
                _fill_stored(model, make, storage, zero_init_context)

        if init == "random":
            fill(lambda name, shape: merge(name, _initial_value(name, shape, seed)))
        else:
            with _Weights(where, folder) as weights:
                weights.check_fit(model)
                # Cast to fp32 before merging, because bf16 would lose a small update.
                fill(lambda name, _: merge(name, weights.read(name).to(torch.float32)))
    logger.info("%s: %.1f M parameters, %s", where, num_params / 1e6, init)
    return model


def load_weights(path: str | Path, subfolder: str = "transformer", **options: Any) -> dict[str, Tensor]:
    """Return the weights that `load_transformer` stores in a model: {diffusers name: fp32 tensor}.

    Arguments and errors are explained at `load_transformer`.
    """
    model = load_transformer(path, subfolder=subfolder, **options)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def build_empty(
    config: dict[str, Any], zero_init_context: AbstractContextManager[Any] | None = None
) -> PackedWanTransformer:
    """Return a DiT without values: on the meta device, or partitioned by ZeRO-3."""
    with zero_init_context or torch.device("meta"), no_init_weights():
        model: PackedWanTransformer = PackedWanTransformer.from_config(config)
    # The table of RoPE angles has no values on the meta device, and zero.Init would round its fp64 values to fp32.
    c = model.config
    rope = WanRotaryPosEmbed(c.attention_head_dim, c.patch_size, c.rope_max_seq_len)
    model.rope = rope.to(model.proj_out.weight.device if zero_init_context else "cpu")
    return model.train()


def check_weights(path: str | Path, subfolder: str = "transformer") -> None:
    """Check that `load_transformer` will find every weight. Only the headers of the files are read.

    Raises:
        ConfigError: if the model does not exist or is not a Wan DiT.
        CheckpointError: if the weights are missing, damaged, or do not fit the config.
    """
    where, folder = f"model.path={path}", _find_folder(path, subfolder, _MODEL_FILES, "model.path")
    with _Weights(where, folder) as weights:
        weights.check_fit(build_empty(_read_config(where, folder)))


def _find_folder(path: str | Path, subfolder: str, patterns: Iterable[str], key: str) -> Path:
    """Return the folder of a DiT. From the Hub, only the files that match `patterns` are downloaded."""
    allow = [f"{subfolder}/{pattern}".lstrip("/") for pattern in patterns]
    folder = fetch_model(path, key=key, allow=allow) / subfolder
    if (folder / "config.json").is_file():
        return folder
    if subfolder in EXPERTS:
        # Weights too, because their shapes contain numbers that an official config leaves out.
        files = [f"{EXPERT_FOLDERS[subfolder]}/*"]
        files += ["config.json", f"{DIT_STEM}*"] if subfolder == EXPERTS[0] else []
        official = find_expert(fetch_model(path, key=key, allow=files), subfolder)
        if official is not None:
            return official
    raise ConfigError(
        f"{key}={path} has no {Path(subfolder) / 'config.json'}. Give a Wan pipeline in diffusers layout, or an official "
        "Wan repository."
    )


def _read_config(where: str, folder: Path) -> dict[str, Any]:
    config = _read_object(where, folder / "config.json")
    class_name = config.get("_class_name")
    if class_name == OFFICIAL_CLASS:
        with TensorFiles(find_weights(folder, DIT_STEM), where) as files:
            return dit_config(files.shapes, config, where=where)
    if class_name != DIFFUSERS_CLASS:
        raise ConfigError(f"{where} contains a {class_name}, not a {DIFFUSERS_CLASS}. Give a Wan pipeline.")
    return config


def _read_object(where: str, file: Path) -> dict[str, Any]:
    return read_json_object(file, label=f"{where}: {file}")


def _fill(
    model: PackedWanTransformer, make: Callable[[str, tuple[int, ...]], Tensor], dtype: torch.dtype
) -> None:
    is_reader = not dist.is_initialized() or dist.get_rank() == 0
    for name, param in list(model.named_parameters()):
        shape = _shape(param)
        if hasattr(param, "ds_id"):
            from deepspeed import zero

            # Gathered for the copy; the values that rank 0 writes are kept.
            with zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
                if is_reader:
                    param.copy_(make(name, shape))
        else:
            owner, _, leaf = name.rpartition(".")
            value = make(name, shape).to(dtype, copy=True)  # `make` may return a tensor that it keeps
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value))


def _fill_stored(
    model: PackedWanTransformer,
    make: Callable[[str, tuple[int, ...]], Tensor],
    storage: WeightDtypePolicy,
    zero_init_context: Any,
) -> None:
    """Fill each parameter in its storage dtype. Under ZeRO-3, partition each parameter right after it is filled."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    storage.apply(model)
    if zero_init_context is not None:
        with zero_init_context:  # installs DeepSpeed's linear, which keeps no gathered weight for backward
            pass
    is_reader = zero_init_context is None or dist.get_rank() == 0
    for name, shape in shapes.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        coded = isinstance(owner, QuantizedLinear) and leaf == "weight"
        empty = {key: getattr(owner, key) for key in (("weight", "scale") if coded else (leaf,))}
        if is_reader:
            value = make(name, shape)
            values = owner.encode(value) if coded else {leaf: value}
        else:
            values = {key: torch.empty(like.shape, dtype=like.dtype) for key, like in empty.items()}
        for key, like in empty.items():
            parameter = nn.Parameter(values[key].to(like.dtype, copy=True), requires_grad=like.requires_grad)
            assert parameter.shape == like.shape, (name, key, parameter.shape, like.shape)
            setattr(owner, key, parameter)
            if zero_init_context is not None:
                zero_init_context._convert_to_zero_parameters([parameter])  # partitions rank 0's values


@contextmanager
def _freed_is_returned() -> Iterator[None]:
    """Make the C library return freed tensors to the system at once.

    By default glibc raises its mmap threshold when the first large tensor is freed, and takes later tensors from its
    heap. The partitions that ZeRO-3 allocates in between keep the heap from shrinking: four ranks that load one model
    then use the memory of more than three copies of the model.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        yield  # not glibc
        return
    mmap_threshold, trim_threshold, kib = -3, -1, 1024
    mallopt(mmap_threshold, 128 * kib)
    try:
        yield
    finally:
        # The largest values that glibc would choose. A fixed threshold has switched off the automatic choice.
        mallopt(mmap_threshold, 32 * kib * kib)
        mallopt(trim_threshold, 64 * kib * kib)


def _shape(param: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))


class _Weights(TensorFiles):
    """Safetensors files of one DiT; tensors are read by their diffusers names."""

    def __init__(self, where: str, folder: Path) -> None:
        super().__init__(find_weights(folder, DIT_STEM), where)
        if not self.files:
            raise CheckpointError(
                f"{self.where} has no weights (neither {WEIGHTS_NAME} nor an index of weights). Give a complete pipeline, or "
                "set model.init=random."
            )

    def __enter__(self) -> _Weights:
        super().__enter__()
        rename = DIT.to_diffusers if "head.head.weight" in self.shapes else str
        self._stored = rename_all(self.shapes, rename, self.where)
        return self

    def check_fit(self, model: PackedWanTransformer) -> None:
        """Compare names and shapes with the parameters of a model, from headers.

        Raises:
            CheckpointError: if tensors are missing, unexpected or have another shape.
        """
        shapes = self.shapes
        stored = {name: shapes[stored_name] for name, stored_name in self._stored.items()}
        expected = {name: _shape(param) for name, param in model.named_parameters()}
        check_fit(stored, expected, self.where, model._keys_to_ignore_on_load_unexpected or ())

    def read(self, name: str) -> Tensor:
        """Read one tensor by its diffusers name."""
        return super().read(self._stored[name])


def _initial_value(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return official Wan's initial value of a parameter, which depends only on seed, name and shape. The head is zero.

    Source: `init_weights` of the official Wan 2.1 model.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    owner, _, leaf = name.rpartition(".")
    if leaf == "scale_shift_table":
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    if owner.rpartition(".")[2].startswith("norm"):
        return torch.ones(shape) if leaf == "weight" else torch.zeros(shape)
    if leaf in ("bias", "pos_embed") or owner == "proj_out":
        return torch.zeros(shape)
    if "text_embedder" in owner or "time_embedder" in owner:
        return torch.randn(shape, generator=generator) * 0.02
    fan_out, fan_in = shape[0], torch.Size(shape[1:]).numel()
    bound = (6 / (fan_in + fan_out)) ** 0.5  # Xavier
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)

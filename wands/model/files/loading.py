"""Load weights into a `PackedWanTransformer` one tensor at a time, without a second copy of the model.

The model is built on the meta device. Then each parameter gets its values from safetensors files or from official Wan's random
initialization, and is partitioned at once under ZeRO-3. Folders of official Wan repositories are read directly. A model is named
by a folder, a Hub id or, for its config only, the name of a published model such as "wan2.1-t2v-1.3b".
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers.models.modeling_utils import no_init_weights
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor, nn

from wands.errors import CheckpointError, ConfigError
from wands.files import read_json_object
from wands.model.files import official
from wands.model.files.config_files import read_model_config
from wands.model.files.hub import fetch_model
from wands.model.files.name_maps import DIT, EXPERTS, check_fit, rename_all
from wands.model.files.named_models import named_model
from wands.model.files.tensor_files import TensorFiles, find_weights, sample_digest
from wands.model.quantized import QuantizedLinear
from wands.model.tensor_parallel import cut_of, divide, own_part, set_cut
from wands.model.transformer import PackedWanTransformer
from wands.model.weight_dtypes import WeightDtypePolicy

logger = logging.getLogger(__name__)
WEIGHTS_NAME = f"{official.DIT_STEM}.safetensors"
_MODEL_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json")
_Make = Callable[[str, tuple[int, ...]], Tensor]


def load_config(
    path: str | Path, subfolder: str = "transformer", *, key: str = "model.path"
) -> dict[str, Any]:
    """Return the config of a DiT in the format of diffusers.

    `subfolder` is "" if `path` is the folder of the DiT. In Wan's original layout, "transformer" means the only DiT or the
    high-noise expert, and "transformer_2" the low-noise expert.

    Raises:
        ConfigError: if the model does not exist or is not a Wan DiT.
        CheckpointError: if the config in Wan's original layout contradicts the shapes of the weights.
    """
    if (variant := named_model(path)) is not None:
        return variant.dit.to_config()
    return _read_dit_config(f"{key}={path}", _find_folder(path, subfolder, ("config.json",), key))


def load_index(path: str | Path, *, key: str = "model.path") -> dict[str, Any]:
    """Return the contents of a pipeline's `model_index.json`, or a few known entries for a model without this file.

    These are "boundary_ratio" and "transformer_2" for Wan's original layout with two experts, "boundary_ratio" (None with one
    DiT) for the name of a published model, and none for any other model.

    Raises:
        ConfigError: if the model does not exist, or `model_index.json` or the config of the low-noise expert is damaged.
    """
    if (variant := named_model(path)) is not None:
        return {"boundary_ratio": variant.boundary_ratio}
    file = fetch_model(path, key=key, allow=["model_index.json"]) / "model_index.json"
    if file.is_file():
        return read_json_object(file, label=f"{key}={path}: {file}")
    allow = [f"{folder}/config.json" for folder in official.EXPERT_FOLDERS.values()]
    root = fetch_model(path, key=key, allow=allow)
    low_noise = official.find_expert(root, EXPERTS[1])
    if low_noise is None:
        return {}
    file = low_noise / "config.json"
    boundary = official.boundary_of(read_json_object(file, label=f"{key}={path}: {file}"))
    return {"boundary_ratio": boundary, EXPERTS[1]: ["diffusers", official.DIFFUSERS_CLASS]}


def load_transformer(
    path: str | Path,
    *,
    subfolder: str = "transformer",
    init: str = "pretrained",
    seed: int = 0,
    zero_init_context: Any = None,
    merge: Callable[[str, Tensor], Tensor] = lambda name, weight: weight,
    storage: WeightDtypePolicy = WeightDtypePolicy(),  # noqa: B008, frozen
    key: str = "model.path",
    config: Mapping[str, Any] | None = None,
    tensor_group: dist.ProcessGroup | None = None,
) -> PackedWanTransformer:
    """Build a DiT in training mode, on the CPU or the device of `zero_init_context`, and load or initialize its weights.

    Args:
        path: model. With random weights, also the name of a published model.
        subfolder: folder of the DiT in `path`, see `load_config`.
        init: "pretrained", or "random", which reads only the config and initializes as official Wan does.
        seed: seed of random weights, which do not depend on the number of ranks.
        zero_init_context: `deepspeed.zero.Init(...)`, which partitions each parameter as soon as it has values. Every rank must
            then call this function, and only the first rank of the context's group reads the weights.
        merge: maps a parameter's name and fp32 value to the value to store, such as `wands.model.lora.MergedLoras`.
        storage: policy for the dtypes after `merge`. The dtypes in the files have no influence.
        key: option or recipe key that the user typed.
        config: config that may have more input channels than the one in `path`; their weights are zero, so that the model gives
            the same results. None uses the config in `path`.
        tensor_group: ranks that divide the weights of the blocks.

    Raises:
        ConfigError: if the model does not exist or is not a Wan DiT.
        CheckpointError: if the weights are missing, are damaged, or do not fit the config.
    """
    assert init in ("pretrained", "random"), init
    where = f"{key}={path}"
    folder = None if init == "random" else _find_folder(path, subfolder, _MODEL_FILES, key)
    stored = _read_dit_config(where, folder) if folder else load_config(path, subfolder, key=key)
    model = build_empty(dict(config or stored))
    num_params = sum(parameter.numel() for parameter in model.parameters())
    if folder:
        is_as_stored = config is None or dict(config) == stored
        make = _open_weights(where, folder, model if is_as_stored else build_empty(stored))
    else:
        make = partial(_initial_value, seed=seed)
    num_added = model.config["in_channels"] - stored["in_channels"]
    assert num_added >= 0, (model.config["in_channels"], stored["in_channels"])

    def make_stored(name: str, shape: tuple[int, ...]) -> Tensor:
        if name == "patch_embedding.weight":
            shape = (shape[0], shape[1] - num_added, *shape[2:])
        return make(name, shape)

    def merge_widened(name: str, weight: Tensor) -> Tensor:
        merged = merge(name, weight)
        if name == "patch_embedding.weight" and num_added:
            # The padding of a 5D weight [width, channels, frames, rows, columns] is given from the last dimension on.
            return F.pad(merged, (0, 0, 0, 0, 0, 0, 0, num_added))
        return merged

    with _freed_is_returned():
        _fill(model, make_stored, merge_widened, storage, zero_init_context, tensor_group)
    logger.info("%s: %.1f M parameters, %s", where, num_params / 1e6, init)
    return model


def load_weights(path: str | Path, subfolder: str = "transformer", **options: Any) -> dict[str, Tensor]:
    """Load the weights of a DiT by diffusers name, fp32 by default. Options and errors are those of `load_transformer`."""
    model = load_transformer(path, subfolder=subfolder, **options)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def build_empty(config: dict[str, Any]) -> PackedWanTransformer:
    """Build a DiT in training mode from its diffusers config. The parameters are on the meta device and have no values."""
    with torch.device("meta"), no_init_weights():
        model: PackedWanTransformer = PackedWanTransformer.from_config(config)
    # The table of RoPE angles has no values on the meta device.
    c = model.config
    model.rope = WanRotaryPosEmbed(c.attention_head_dim, c.patch_size, c.rope_max_seq_len)
    return model.train()


def check_weights(path: str | Path, subfolder: str = "transformer") -> None:
    """Check that a DiT's files contain every weight with the right shape; reads only headers.

    For errors, see `load_transformer`.
    """
    where = f"model.path={path}"
    folder = _find_folder(path, subfolder, _MODEL_FILES, "model.path")
    _open_weights(where, folder, build_empty(_read_dit_config(where, folder)))


def sample_weights(path: str | Path, subfolder: str) -> str:
    """Return a digest of a small part of a DiT's weights, see `sample_digest`; names of folder and files do not matter.

    Raises:
        ConfigError: if the model does not exist or is not a Wan DiT.
        CheckpointError: if the weights are damaged.
    """
    folder = _find_folder(path, subfolder, _MODEL_FILES, "model.path")
    return sample_digest(find_weights(folder, official.DIT_STEM), f"model.path={path}")


def _find_folder(path: str | Path, subfolder: str, patterns: Iterable[str], key: str) -> Path:
    """Return the local folder of a DiT. Of a Hub id, download what matches `patterns`, in Wan's original layout all files."""
    allow = [f"{subfolder}/{pattern}".lstrip("/") for pattern in patterns]
    folder = fetch_model(path, key=key, allow=allow) / subfolder
    if (folder / "config.json").is_file():
        return folder
    if subfolder in EXPERTS:
        # Download the weights too, because their shapes contain numbers that an official config leaves out.
        files = [f"{official.EXPERT_FOLDERS[subfolder]}/*"]
        files += ["config.json", f"{official.DIT_STEM}*"] if subfolder == EXPERTS[0] else []
        expert_folder = official.find_expert(fetch_model(path, key=key, allow=files), subfolder)
        if expert_folder is not None:
            return expert_folder
    raise ConfigError(
        f"{key}={path} has no {Path(subfolder) / 'config.json'}. Set {key} to a Wan pipeline in diffusers layout, or to an "
        "official Wan repository."
    )


def _read_dit_config(where: str, folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    config = read_model_config(file, label=f"{where}: {file}")
    class_name = config.get("_class_name")
    if class_name == official.OFFICIAL_CLASS:
        files = TensorFiles(find_weights(folder, official.DIT_STEM), where)
        return official.dit_config(files.shapes, config, where)
    if class_name != official.DIFFUSERS_CLASS:
        raise ConfigError(f"{where}: config.json has _class_name={class_name}. Use a WanTransformer3DModel.")
    return config


@contextmanager
def _freed_is_returned() -> Iterator[None]:
    """Make the C library return the memory of freed tensors to the operating system at once.

    By default, glibc raises its mmap threshold when the first large tensor is freed, and allocates later tensors on its heap,
    which cannot shrink, because ZeRO-3 allocates its partitions between them. Four ranks then use the memory of more than three
    copies of the model.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        yield  # not glibc
        return
    mmap_threshold = -3
    trim_threshold = -1
    kib = 1024
    mallopt(mmap_threshold, 128 * kib)
    try:
        yield
    finally:
        # Set the largest values that glibc would choose itself. It no longer chooses, because the thresholds were set above.
        mallopt(mmap_threshold, 32 * kib * kib)
        mallopt(trim_threshold, 64 * kib * kib)


def _open_weights(where: str, folder: Path, model: PackedWanTransformer) -> _Make:
    """Return a function that maps (diffusers parameter name, shape) to the parameter's value in fp32.

    Raises:
        CheckpointError: if tensors are missing, are unexpected, or have a shape that differs from the model's.
    """
    paths = find_weights(folder, official.DIT_STEM)
    if not paths:
        raise CheckpointError(
            f"{where} has no weights (neither {WEIGHTS_NAME} nor an index of weights). Use a complete pipeline, or train from "
            "random weights with model.init=random."
        )
    files = TensorFiles(paths, where)
    shapes = {name: shape for name, shape in files.shapes.items() if not _is_ignored(name)}
    rename = DIT.to_diffusers if "head.head.weight" in shapes else str
    stored_names = rename_all(shapes, rename, where)
    stored = {name: shapes[stored_name] for name, stored_name in stored_names.items()}
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    check_fit(stored, expected, where)
    return lambda name, _: files.read(stored_names[name]).to(torch.float32)


def load_ignored(folder: Path, where: str) -> dict[str, Tensor]:
    """Load the tensors in the folder of a DiT that diffusers ignores but other programs read, such as `norm_added_q`.

    Files that were not downloaded are left out.

    Raises:
        CheckpointError: if a file is damaged.
    """
    files = TensorFiles([path for path in find_weights(folder, official.DIT_STEM) if path.is_file()], where)
    return {name: files.read(name) for name in files.tensors if _is_ignored(name)}


def _is_ignored(name: str) -> bool:
    return any(part in name for part in PackedWanTransformer._keys_to_ignore_on_load_unexpected or ())


def _fill(
    model: PackedWanTransformer,
    make: _Make,
    merge: Callable[[str, Tensor], Tensor],
    storage: WeightDtypePolicy,
    zero_init_context: Any,
    tensor_group: dist.ProcessGroup | None,
) -> None:
    """Give each parameter of a DiT on the meta device its values, from `make`, then `merge`, in the dtype of `storage`.

    With tensor parallelism, each rank first takes its part of the whole value. ZeRO-3 partitions each parameter at once.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    storage.apply(model)
    if tensor_group is not None:
        divide(model, tensor_group)
    if zero_init_context is not None:
        model.rope.to(zero_init_context.local_device)
        with zero_init_context:  # installs DeepSpeed's linear, which keeps no gathered weight for backward
            pass
    is_reader = zero_init_context is None or zero_init_context.rank == 0
    for name, shape in shapes.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        coded = isinstance(owner, QuantizedLinear) and leaf == "weight"
        empty = {key: getattr(owner, key) for key in (("weight", "scale") if coded else (leaf,))}
        values = {key: torch.empty_like(like, device="cpu") for key, like in empty.items()}
        cut = cut_of(empty.get(leaf))
        if is_reader:
            values = {leaf: own_part(merge(name, make(name, shape)), cut)}
        if is_reader and coded:
            values = owner.encode(values[leaf])
        for key, like in empty.items():
            # The value is copied, because `make` may return a tensor that it still uses. `pop` frees the original before the
            # next tensor is read.
            value = values.pop(key).to(like.dtype, copy=True)
            parameter = nn.Parameter(value, requires_grad=like.requires_grad)
            assert parameter.shape == like.shape, (name, key, parameter.shape, like.shape)
            set_cut(parameter, cut)
            setattr(owner, key, parameter)
            if zero_init_context is not None:
                zero_init_context._convert_to_zero_parameters([parameter])  # partitions the reader's values


def _initial_value(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return an initial value from seed, name and shape, as in official Wan's `init_weights`; `proj_out` is zero."""
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
    fan_out = shape[0]
    fan_in = torch.Size(shape[1:]).numel()
    bound = (6 / (fan_in + fan_out)) ** 0.5  # Xavier
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)

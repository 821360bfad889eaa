"""Weights into a `PackedWanTransformer`, one tensor at a time: no second copy of the model ever exists.

The model is built without memory (on the meta device, or partitioned by ZeRO-3) and then filled, parameter by
parameter, from safetensors files or by Wan's own initialisation. Folders of the official Wan repositories are
read as they are: their names and configs become diffusers' on the way.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
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
from wands.model.files.hub import fetch_model
from wands.model.files.names import EXPERTS, rename_all, shorten, to_diffusers
from wands.model.files.official import (
    DIT_STEM,
    EXPERT_FOLDERS,
    OFFICIAL_CLASS,
    boundary_of,
    config_of,
    find_expert,
)
from wands.model.files.tensor_files import TensorFiles, find_weights
from wands.model.quantize import QuantizedLinear
from wands.model.transformer import PackedWanTransformer
from wands.model.weight_dtypes import WeightDtypePolicy

logger = logging.getLogger(__name__)
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
MODEL_CLASS = "WanTransformer3DModel"


def load_config(path: str | Path, subfolder: str = "transformer") -> dict[str, Any]:
    """Read the DiT's config, as diffusers has it.

    Args:
        path: folder of a diffusers pipeline or an official Wan repository, or the Hub id of one.
        subfolder: where in it the DiT lies; "" when `path` is the DiT itself. In an official repository
            "transformer" is its only DiT or its high-noise expert, and "transformer_2" its low-noise expert.

    Raises:
        ConfigError: there is no such model, or it is not a Wan DiT.
        CheckpointError: an official config does not fit its weights.
    """
    return _read_config(path, _find_folder(path, subfolder, ["config.json"]))


def load_index(path: str | Path) -> dict[str, Any]:
    """Read `model_index.json` of the pipeline, which says how its parts work together; {} for a bare DiT.

    An official repository of two experts has none, and gets what diffusers' index of that model says of them.

    Raises:
        ConfigError: there is no such model, or the file is damaged.
    """
    file = fetch_model(path, allow=["model_index.json"]) / "model_index.json"
    if not file.is_file():
        return _official_index(path)
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.path={path}: model_index.json is not JSON ({error}); mend it.") from None
    return index if isinstance(index, dict) else {}


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
) -> PackedWanTransformer:
    """Build the DiT and fill it.

    Args:
        path: folder of a diffusers pipeline or an official Wan repository, or the Hub id of one.
        subfolder: where in it the DiT lies, as for `load_config`.
        init: `pretrained` reads the weights; `random` takes only the config, and starts as official Wan does.
        seed: of the random weights, which are the same at any world size.
        dtype: of the parameters, whatever the file has; a ZeRO-3 context decides itself.
        zero_init_context: `deepspeed.zero.Init(...)` to partition each parameter when it is made; every rank
            must then call this function, and rank 0 reads.
        merge: changes each weight on its way, by its name, as `wands.model.lora.MergedLoras` does.
        storage: what the parameters become, one by one, once they are merged; any but the plain one decides in place of
            `dtype`.

    Returns:
        The model in training mode, on the CPU or where the context puts it.

    Raises:
        ConfigError: there is no such model, or it is not a Wan DiT.
        CheckpointError: the weights are missing, damaged, or do not fit the config.
    """
    assert init in ("pretrained", "random"), init
    assert storage.is_plain or dtype == torch.float32, "the storage decides"
    patterns = (
        ["config.json"] if init == "random" else ["config.json", "*.safetensors", "*.safetensors.index.json"]
    )
    folder = _find_folder(path, subfolder, patterns)
    config = _read_config(path, folder)
    with _freed_is_returned():
        model = _build_empty(config, zero_init_context if storage.is_plain else None)
        num_params = sum(torch.Size(_shape(p)).numel() for p in model.parameters())

        def fill(make: Callable[[str, tuple[int, ...]], Tensor]) -> None:
            if storage.is_plain:
                _fill(model, make, dtype)
            else:
                _fill_stored(model, make, storage, zero_init_context)

        if init == "random":
            fill(lambda name, shape: merge(name, _initial_value(name, shape, seed)))
        else:
            with _Weights(path, folder) as weights:
                weights.check_fit(model)
                # In fp32 before anything is merged: a small update is lost in the rounding of a bf16 file.
                fill(lambda name, _: merge(name, weights.read(name).to(torch.float32)))
    logger.info("model.path=%s: %.1f M parameters, %s", path, num_params / 1e6, init)
    return model


def load_weights(
    path: str | Path, subfolder: str = "transformer", *, init: str = "pretrained", seed: int = 0
) -> dict[str, Tensor]:
    """The weights that `load_transformer` would fill a model with, in fp32, by diffusers' names.

    Args:
        path: as for `load_transformer`.
        subfolder: likewise.
        init: likewise.
        seed: likewise.

    Raises:
        ConfigError: there is no such model, or it is not a Wan DiT.
        CheckpointError: the weights are missing, damaged, or do not fit the config.
    """
    model = load_transformer(path, subfolder=subfolder, init=init, seed=seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def build_empty(config: dict[str, Any]) -> PackedWanTransformer:
    """The DiT of a config without memory for its weights, to ask for names and shapes."""
    return _build_empty(config, None)


def check_weights(path: str | Path, subfolder: str = "transformer") -> None:
    """Find out, from headers alone, whether `load_transformer` would find every weight in its place.

    Raises:
        ConfigError: there is no such model, or it is not a Wan DiT.
        CheckpointError: the weights are missing, damaged, or do not fit the config.
    """
    folder = _find_folder(path, subfolder, ["config.json", "*.safetensors", "*.safetensors.index.json"])
    with _Weights(path, folder) as weights:
        weights.check_fit(_build_empty(_read_config(path, folder), None))


def _find_folder(path: str | Path, subfolder: str, patterns: Iterable[str]) -> Path:
    """The folder of the DiT; from the Hub, only the files that match are fetched."""
    allow = [f"{subfolder}/{pattern}".lstrip("/") for pattern in patterns]
    folder = fetch_model(path, allow=allow) / subfolder
    if (folder / "config.json").is_file():
        return folder
    if subfolder in EXPERTS:
        # Weights too: official configs leave out what the shapes say.
        own = [f"{EXPERT_FOLDERS[subfolder]}/*"]
        alone = ["config.json", f"{DIT_STEM}*"] if subfolder == EXPERTS[0] else []
        found = find_expert(fetch_model(path, allow=own + alone), subfolder)
        if found is not None:
            return found
    missing = Path(subfolder) / "config.json"
    raise ConfigError(
        f"model.path={path} has no {missing}; give a Wan pipeline in diffusers layout, or a folder of official Wan."
    )


def _official_index(path: str | Path) -> dict[str, Any]:
    root = fetch_model(path, allow=[f"{folder}/config.json" for folder in EXPERT_FOLDERS.values()])
    low = find_expert(root, EXPERTS[1])
    if low is None:
        return {}
    boundary = boundary_of(_read_json(path, low / "config.json"))
    return {"boundary_ratio": boundary, EXPERTS[1]: ["diffusers", MODEL_CLASS]}


def _read_config(path: str | Path, folder: Path) -> dict[str, Any]:
    config = _read_json(path, folder / "config.json")
    found = config.get("_class_name")
    if found == OFFICIAL_CLASS:
        with TensorFiles(find_weights(folder, DIT_STEM), f"model.path={path}") as files:
            return config_of(files.shapes, config, where=f"model.path={path}")
    if found != MODEL_CLASS:
        raise ConfigError(f"model.path={path} holds a {found}, not a {MODEL_CLASS}; give a Wan pipeline.")
    return config


def _read_json(path: str | Path, file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.path={path}: {file} is not JSON ({error}); mend it.") from None
    return found if isinstance(found, dict) else {}


def _build_empty(
    config: dict[str, Any], zero_init_context: AbstractContextManager[Any] | None
) -> PackedWanTransformer:
    with zero_init_context or torch.device("meta"), no_init_weights():
        model: PackedWanTransformer = PackedWanTransformer.from_config(config)
    # The table of angles has no values on meta, and inside zero.Init its fp64 steps are rounded to fp32.
    c = model.config
    rope = WanRotaryPosEmbed(c.attention_head_dim, c.patch_size, c.rope_max_seq_len)
    model.rope = rope.to(model.proj_out.weight.device if zero_init_context else "cpu")
    return model.train()


def _fill(
    model: PackedWanTransformer, make: Callable[[str, tuple[int, ...]], Tensor], dtype: torch.dtype
) -> None:
    is_reader = not dist.is_initialized() or dist.get_rank() == 0
    for name, param in list(model.named_parameters()):
        shape = _shape(param)
        if hasattr(param, "ds_id"):
            with _gathered(param), torch.no_grad():
                if is_reader:
                    param.copy_(make(name, shape))
        else:
            owner, _, leaf = name.rpartition(".")
            value = make(name, shape).to(dtype, copy=True)  # a copy: `make` may give what it keeps
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value))


def _fill_stored(
    model: PackedWanTransformer,
    make: Callable[[str, tuple[int, ...]], Tensor],
    storage: WeightDtypePolicy,
    zero_init_context: Any,
) -> None:
    """Put each parameter in its place as `storage` has it, under ZeRO-3 cut into its partitions there and then."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    storage.apply(model)
    if zero_init_context is not None:
        with (
            zero_init_context
        ):  # its linear, which keeps no gathered weight for backward, takes the place of torch's
            pass
    is_reader = zero_init_context is None or dist.get_rank() == 0
    for name, shape in shapes.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        coded = isinstance(owner, QuantizedLinear) and leaf == "weight"
        wanted = {one: getattr(owner, one) for one in (("weight", "scale") if coded else (leaf,))}
        if is_reader:
            value = make(name, shape)
            values = owner.encode(value) if coded else {leaf: value}
        else:
            values = {one: torch.empty(like.shape, dtype=like.dtype) for one, like in wanted.items()}
        for one, like in wanted.items():
            # A copy: `make` may give what it keeps.
            parameter = nn.Parameter(values[one].to(like.dtype, copy=True), requires_grad=like.requires_grad)
            assert parameter.shape == like.shape, (name, one, parameter.shape, like.shape)
            setattr(owner, one, parameter)
            if zero_init_context is not None:
                zero_init_context._convert_to_zero_parameters([parameter])  # what rank 0 has, partitioned


@contextmanager
def _freed_is_returned() -> Iterator[None]:
    """Let the C library give freed tensors back to the system at once.

    Left alone, glibc learns from the first large tensor that is freed to keep such in its heap, where the partitions
    that ZeRO-3 makes in between pin them: four ranks that load a model then hold more than three copies of it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        yield  # no glibc
        return
    mmap_threshold, trim_threshold, kib = -3, -1, 1024
    mallopt(mmap_threshold, 128 * kib)
    try:
        yield
    finally:
        # Where glibc's learning ends by itself; a fixed threshold has switched it off.
        mallopt(mmap_threshold, 32 * kib * kib)
        mallopt(trim_threshold, 64 * kib * kib)


def _gathered(param: nn.Parameter) -> AbstractContextManager[Any]:
    """The whole of a parameter that ZeRO-3 has partitioned; what rank 0 writes is kept."""
    from deepspeed import zero

    return zero.GatheredParameters([param], modifier_rank=0)


def _shape(param: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))


class _Weights(TensorFiles):
    """The safetensors files of one DiT: a tensor is read, by its diffusers name, when it is asked for."""

    def __init__(self, path: str | Path, folder: Path) -> None:
        super().__init__([], f"model.path={path}")
        self.folder = folder
        self._stored: dict[str, str] = {}

    def __enter__(self) -> _Weights:
        self.files = find_weights(self.folder, DIT_STEM)
        if not self.files:
            raise CheckpointError(
                f"{self.where} has no weights (neither {WEIGHTS_NAME} nor its index); "
                "give a complete pipeline, or set model.init=random."
            )
        super().__enter__()
        official = _read_json(self.where, self.folder / "config.json").get("_class_name") == OFFICIAL_CLASS
        names = self.shapes
        self._stored = (
            rename_all(names, to_diffusers, self.where) if official else {name: name for name in names}
        )
        return self

    def check_fit(self, model: PackedWanTransformer) -> None:
        """Compare names and shapes with the model's, reading only headers.

        Raises:
            CheckpointError: naming what is missing, unexpected or of another shape.
        """
        wanted = {name: _shape(param) for name, param in model.named_parameters()}
        shapes = self.shapes
        found = {name: shapes[stored] for name, stored in self._stored.items()}
        ignored = tuple(model._keys_to_ignore_on_load_unexpected or ())
        problems = {
            "missing": [name for name in wanted if name not in found],
            "unexpected": [
                name for name in found if name not in wanted and not any(i in name for i in ignored)
            ],
            "of another shape": [
                f"{name} {list(found[name])} instead of {list(shape)}"
                for name, shape in wanted.items()
                if found.get(name, shape) != shape
            ],
        }
        report = "; ".join(
            f"{len(names)} {what}: {shorten(names)}" for what, names in problems.items() if names
        )
        if report:
            raise CheckpointError(
                f"{self.where} has weights that do not fit its config.json ({report}); "
                "use weights and config of the same model."
            )

    def read(self, name: str) -> Tensor:
        """One tensor, as it is in the file."""
        return super().read(self._stored[name])


def _initial_value(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Official Wan's initial value of a parameter, a function of (seed, name) alone; the head starts at zero.

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

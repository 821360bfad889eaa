"""Find and load diffusers pipelines for sampling. All configs are checked before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import diffusers
import torch
from diffusers import WanTransformer3DModel

from wands.config.options import InferOptions
from wands.disk_errors import load_patiently
from wands.encoders.components import WEIGHT_STEMS, quiet_loading
from wands.encoders.text import check_embedding
from wands.errors import CheckpointError, ConfigError, one_line
from wands.model.files.config_files import read_model_config
from wands.model.files.hub import fetch_model
from wands.model.files.name_maps import EXPERTS
from wands.model.files.official import DIT_STEM
from wands.model.files.tensor_files import check_model, find_weights
from wands.model.weight_dtypes import stock_dtype
from wands.sampling.loras import Lora, add_loras
from wands.sampling.schedulers import EulerScheduler, shift_key
from wands.variants import ExtraInput, Variant, variant_of

if TYPE_CHECKING:
    from diffusers import WanImageToVideoPipeline, WanPipeline

AnyPipeline: TypeAlias = "WanPipeline | WanImageToVideoPipeline"
CLASSES = ("WanPipeline", "WanImageToVideoPipeline")


@dataclass(frozen=True)
class DiTSource:
    """Place from which a DiT is loaded: a diffusers folder, or a checkpoint of `wands train`.

    Attributes:
        folder: path or Hub id of a diffusers folder, or path of a checkpoint (`step_*`).
        subfolder: subfolder of `folder` that contains the DiT; "" if `folder` contains the DiT itself.
        label: flag and value that the user typed, for error messages.
        config: diffusers config of a checkpoint's DiT; None for a diffusers folder, which contains it.
        load: returns a checkpoint's weights, fp32 CPU tensors by diffusers parameter name; None for a diffusers folder.
    """

    folder: str
    subfolder: str
    label: str
    config: Mapping[str, Any] | None = None
    load: Callable[[], dict[str, torch.Tensor]] | None = None


@dataclass(frozen=True)
class PipelineSource:
    """Checked description of a diffusers pipeline to load.

    Attributes:
        model: folder or Hub id of the pipeline.
        class_name: class of the pipeline, one of `CLASSES`.
        dits: source of "transformer", and for a model with two experts also of "transformer_2".
        config: diffusers config of the DiTs, equal for both experts.
        variant: variant found from the configs.
        loras: LoRAs to add to the DiTs, in this order.
    """

    model: str
    class_name: str
    dits: Mapping[str, DiTSource]
    config: Mapping[str, Any]
    variant: Variant
    loras: tuple[Lora, ...] = ()


def find_pipeline(
    model: str | Path,
    dits: Mapping[str, DiTSource] | None = None,
    loras: Sequence[Lora] = (),
    conditions: Sequence[ExtraInput] = (),
    is_base: bool = False,
) -> PipelineSource:
    """Read the configs of a pipeline, and check that its DiTs, VAE, encoders and LoRAs fit each other. No weight is read.

    `dits` replace DiTs of the pipeline, `loras` are a result of `find_loras`, and `conditions` are from outside code. With
    `is_base`, the DiTs may lack the channels of the conditions, because a training run adds them.

    Raises:
        ConfigError: if the model does not exist or is not a Wan pipeline, or if its components do not fit each other.
    """
    name = str(model)
    replaced = dits or {}
    label = f"--model={name}"
    root = fetch_model(name, key="--model", allow=("model_index.json", "*/config.json"))
    index = _read_pipeline_config(root / "model_index.json", label)
    _check_classes(index, label)
    parts = _find_experts(index, label, replaced)
    sources = {}
    configs = []
    for part in parts:
        dit = sources[part] = replaced.get(part) or DiTSource(name, part, label)
        folder = (Path(dit.folder) if part in replaced else root) / dit.subfolder
        configs.append(dit.config or _read_pipeline_config(folder / "config.json", dit.label))
        find_weights(folder, DIT_STEM)  # refuses pickles
    config = configs[0]
    other = configs[-1]
    origin = sources["transformer"].label
    try:
        variant = variant_of(config, index, conditions)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}. Use a transformer of Wan 2.1 or 2.2.") from None
    if not is_base and variant.dit.in_channels != config["in_channels"]:
        names = ", ".join(condition.name for condition in conditions)
        raise ConfigError(
            f"{origin}: the transformer has no channels for the input {names}. Use a model that was trained with it, or leave "
            "the input out."
        )
    if keys := [key for key in config if key[0] != "_" and key in other and other[key] != config[key]]:
        raise ConfigError(
            f"{label}: the configs of the two experts differ in {', '.join(keys)}. Use two experts of the same model."
        )
    fitting = ["WanImageToVideoPipeline" if variant.num_images else "WanPipeline"]
    if index["_class_name"] not in (CLASSES if "first_frame" in variant.conditions else fitting):
        raise ConfigError(
            f"{label} is a {index['_class_name']}, but the transformer of {origin} ({variant.name}) needs a "
            f"{fitting[0]}. Use the pipeline that the transformer was trained from."
        )
    check_encoders(label, root, variant, origin)
    return PipelineSource(
        model=name,
        class_name=index["_class_name"],
        dits=sources,
        config=config,
        variant=variant,
        loras=tuple(lora.assigned(two_experts=len(parts) > 1) for lora in loras),
    )


def _check_classes(index: Mapping[str, Any], label: str) -> None:
    """Raise a ConfigError if a model_index.json names no Wan pipeline, or classes of other libraries."""
    if index.get("_class_name") not in CLASSES:
        raise ConfigError(
            f"{label} is a {index.get('_class_name')}, not a {' or '.join(CLASSES)}. Set --model to a pipeline of Wan 2.1 or 2.2."
        )
    for part, entry in index.items():
        if isinstance(entry, list) and entry[:1] not in ([], [None], ["diffusers"], ["transformers"]):
            raise ConfigError(
                f"{label} has a wrong model_index.json: {part} is a class of {entry[0]}, but wands runs only code of diffusers "
                "and transformers. Use a pipeline of Wan 2.1 or 2.2."
            )


def _find_experts(index: Mapping[str, Any], label: str, replaced: Mapping[str, DiTSource]) -> Sequence[str]:
    """Return the subfolders of a pipeline's DiTs, and check that it has those in `replaced`."""
    boundary = index.get("boundary_ratio")
    parts = EXPERTS[:1] if boundary is None else EXPERTS
    present = [part for part in EXPERTS if (index.get(part) or [None])[0]]
    if present != list(parts):
        raise ConfigError(
            f"{label} has a wrong model_index.json: boundary_ratio={boundary} and DiTs {', '.join(present) or 'none'}. With a "
            "boundary_ratio, list transformer and transformer_2. Without a boundary_ratio, list only transformer."
        )
    for part, dit in replaced.items():
        if part not in parts:
            raise ConfigError(
                f"{dit.label} is a low-noise expert ({part}), but {label} has only one expert. Pass a DiT of this "
                "pipeline to --transformer, or set --model to a pipeline with two experts."
            )
    return parts


def _read_pipeline_config(path: Path, label: str) -> dict[str, Any]:
    fix = "use a folder in diffusers layout, such as wands export writes, or a Hub id."
    return read_model_config(path, label=f"{label}: {path}", fix=fix)


def check_encoders(label: str, root: Path, variant: Variant, origin: str) -> None:
    """Check that the VAE and the encoders of a pipeline in `root` have the sizes that its DiT needs.

    `label` and `origin` are the flags and values that name the pipeline and the DiT in error messages.

    Raises:
        ConfigError: if a config is missing, or a size in a config differs from the size that the DiT needs.
        CheckpointError: if weights are pickles.
    """
    for part, stem in WEIGHT_STEMS.items():
        find_weights(root / part, stem)  # refuses pickles
    shape = variant.dit
    vae, text = (
        _read_pipeline_config(root / part / "config.json", label) for part in ("vae", "text_encoder")
    )
    # The published VAE configs of Wan 2.1 have no z_dim and no scale factors.
    stride = (vae.get("scale_factor_temporal", 4), *[vae.get("scale_factor_spatial", 8)] * 2)
    rules: list[tuple[str, Any, str, Any]] = [
        ("out_channels", shape.out_channels, "the VAE's z_dim", vae.get("z_dim", 16)),
        ("text_dim", shape.text_dim, "the text encoder's d_model", text.get("d_model")),
        ("stride", variant.vae_stride, "the VAE's scale factors", stride),
    ]
    if shape.image_dim is not None:
        clip = _read_pipeline_config(root / "image_encoder" / "config.json", label)
        width = clip.get("vision_config", clip).get("hidden_size", 768)
        rules.append(("image_dim", shape.image_dim, "the image encoder's hidden_size", width))
    for key, expected, part, value in rules:
        if value != expected:
            raise ConfigError(
                f"{label}: {part}={value} must equal {key}={expected} of the transformer of {origin}. Use the pipeline that the "
                "transformer was trained from."
            )


def load_pipeline(
    source: PipelineSource, *, dtype: torch.dtype = torch.float32, device: str = "cpu", offload: str = "none"
) -> AnyPipeline:
    """Load all weights of a pipeline, add the LoRAs, and move the models to the device.

    `dtype` applies to the DiTs and the text encoder; the VAE, the image encoder and a few layers of the DiTs stay fp32. `offload`
    "model" or "sequential" keeps the weights on the CPU and moves one model or one layer at a time to the device.

    Raises:
        ConfigError: if files are missing or damaged, the tensors do not fit the configs, or a LoRA fits no module.
        CheckpointError: if the weights of a checkpoint do not fit their config.
    """
    with quiet_loading():
        dits = {part: load_dit(dit, dtype) for part, dit in source.dits.items()}
        pipeline = load_components(source, dits, dtype)
    add_loras(pipeline, source.loras)
    if offload == "model":
        pipeline.enable_model_cpu_offload(device=device)
    elif offload == "sequential":
        pipeline.enable_sequential_cpu_offload(device=device)
    else:
        pipeline.to(device)
    return pipeline


def apply_options(pipeline: AnyPipeline, options: InferOptions) -> None:
    """Set the scheduler and the dtype of the VAE's decoder in place, and compile the DiTs. The VAE's encoder stays fp32."""
    if options.scheduler == "euler":
        shift = pipeline.scheduler.config[shift_key(pipeline.scheduler)]
        pipeline.register_modules(scheduler=EulerScheduler(shift=shift))
    if options.vae_dtype == "bf16":
        pipeline.vae.decoder.bfloat16()
        pipeline.vae.post_quant_conv.bfloat16()
    for transformer in filter(None, (pipeline.transformer, pipeline.transformer_2)):
        if options.compile:
            transformer.compile_repeated_blocks()


def load_dit(source: DiTSource, dtype: torch.dtype) -> WanTransformer3DModel:
    """Load one DiT as a model of diffusers on the CPU, in `dtype`. Layers that diffusers keeps in fp32 stay fp32.

    Raises:
        ConfigError: if the weights in a diffusers folder are missing, are damaged, or do not fit the folder's config.
        CheckpointError: if the weights of a checkpoint do not fit their config, or weights contain NaN or infinite values.
    """
    if source.load is not None:
        trained = _load_trained(source, source.load(), dtype)
        check_model(trained, f"{source.label}: the checkpoint {source.folder}")
        return trained
    load = partial(
        WanTransformer3DModel.from_pretrained,
        source.folder,
        subfolder=source.subfolder or None,
        dtype=dtype,
        output_loading_info=True,
        use_safetensors=True,
    )
    try:
        transformer, info = load_patiently(f"{source.label}: the transformer", load)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{source.label}: the transformer cannot be loaded ({one_line(error)}). Export or download its files again."
        ) from error
    # diffusers fills missing tensors with random values and only logs a warning.
    wrong = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if wrong:
        raise ConfigError(
            f"{source.label}: the weights of the transformer do not fit its config.json ({len(wrong)} tensors are missing, "
            f"unexpected or of a wrong shape, such as {wrong[0]}). Export or download the transformer again."
        )
    check_model(transformer, source.label, partial(_cached_folder, source.folder, source.subfolder), DIT_STEM)
    return transformer


def _cached_folder(model: str, part: str) -> Path:
    """Return the folder of a component whose files are on this machine already."""
    return fetch_model(model, key="--model", allow=[f"{part}/*.json"]) / part


def _load_trained(
    source: DiTSource, state: dict[str, torch.Tensor], dtype: torch.dtype
) -> WanTransformer3DModel:
    from accelerate import init_empty_weights

    # The weights are assigned below, so the parameters need no memory yet. The buffers of RoPE are computed here.
    with init_empty_weights(include_buffers=False):
        transformer = WanTransformer3DModel.from_config(source.config)
    for name in state:
        state[name] = state[name].to(stock_dtype(name, dtype))  # as in from_pretrained
    try:
        transformer.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"{source.label}: the tensors of the checkpoint do not fit its config ({one_line(error)}). Use another checkpoint."
        ) from None
    return transformer.eval()


def load_components(
    source: PipelineSource, dits: Mapping[str, torch.nn.Module | None], dtype: torch.dtype
) -> AnyPipeline:
    """Build a pipeline on the CPU from the given DiTs and its other models, which are loaded from its files.

    A DiT may be None. `dtype` applies to the text encoder; the VAE and the image encoder are fp32.

    Raises:
        ConfigError: if files are missing or damaged.
        CheckpointError: if weights contain NaN or infinite values.
    """
    dtypes = {"default": dtype, "vae": torch.float32, "image_encoder": torch.float32}
    label = f"--model={source.model}"
    from_pretrained = getattr(diffusers, source.class_name).from_pretrained
    options = {**dits, "dtype": dtypes, "use_safetensors": True, "trust_remote_code": False}
    try:
        pipeline = load_patiently(label, partial(from_pretrained, source.model, **options))
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{label} cannot be loaded ({one_line(error)}). Fetch the files again.") from error
    for part, stem in WEIGHT_STEMS.items():
        if model := getattr(pipeline, part, None):
            check_model(model, label, partial(_cached_folder, source.model, part), stem)
    check_embedding(pipeline.text_encoder, label)
    scheduler = pipeline.scheduler.config
    if not (scheduler.get("use_flow_sigmas") or "shift" in scheduler):
        raise ConfigError(
            f"{label}: the scheduler {type(pipeline.scheduler).__name__} of the pipeline does not support flow matching. Put "
            "another scheduler into the pipeline, such as UniPCMultistepScheduler with use_flow_sigmas."
        )
    return pipeline

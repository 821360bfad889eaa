"""A pipeline ready to sample: configs are read and judged first, weights only when everything fits."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import diffusers
import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel

from wands.encoders.components import quiet_without_terminal
from wands.errors import CheckpointError, ConfigError
from wands.sampling.loras import Lora, add_loras
from wands.variants import Variant, variant_of

if TYPE_CHECKING:
    from diffusers import WanImageToVideoPipeline

AnyPipeline: TypeAlias = "WanPipeline | WanImageToVideoPipeline"
CLASSES = ("WanPipeline", "WanImageToVideoPipeline")


def pipeline_class(name: str) -> Any:
    """One of `CLASSES`, imported when it is used: that of pictures asks for torchvision, which videos do without."""
    assert name in CLASSES, name
    return getattr(diffusers, name)


def takes_pictures(pipeline: AnyPipeline) -> bool:
    """Whether a pipeline is of the class that samples from pictures."""
    return not isinstance(pipeline, WanPipeline)


@dataclass(frozen=True)
class DiTSource:
    """Where the weights of one DiT come from.

    Attributes:
        folder: folder or Hub id.
        subfolder: in it, "" for none.
        checkpoint: step folder of `wands train` whose weights of this DiT are taken instead; None for those of `folder`.
    """

    folder: str
    subfolder: str
    checkpoint: Path | None = None


@dataclass(frozen=True)
class PipelineSource:
    """Where the parts of a pipeline come from, and their configs.

    Attributes:
        model: diffusers pipeline folder or Hub id.
        class_name: of the pipeline, one of `CLASSES`.
        dits: "transformer", and "transformer_2" where there are two experts.
        dit: config of the DiT, of each expert the same.
        vae_stride: pixels per latent in (frames, height, width).
        variant: what the configs are.
        loras: added to the DiTs, in this order.
        ema: the checkpoint's moving average is taken.
    """

    model: str
    class_name: str
    dits: Mapping[str, DiTSource]
    dit: Mapping[str, Any]
    vae_stride: tuple[int, int, int]
    variant: Variant
    loras: tuple[Lora, ...] = ()
    ema: bool = False

    @property
    def checkpoint(self) -> Path | None:
        """Step folder of `wands train` that weights are taken from."""
        return next((dit.checkpoint for dit in self.dits.values() if dit.checkpoint), None)


def find_pipeline(
    model: str | Path,
    *,
    transformer: Path | None = None,
    transformer_2: Path | None = None,
    checkpoint: Path | None = None,
    ema: bool = False,
    loras: Sequence[Lora] = (),
) -> PipelineSource:
    """Read the configs of a pipeline and check that its parts fit each other; no weight is read.

    Args:
        model: diffusers pipeline folder or Hub id.
        transformer: diffusers folder, of a transformer or a pipeline, that replaces the model's transformer.
        transformer_2: the same for the low-noise expert of a model of two.
        checkpoint: run or step folder of `wands train`; the DiTs that it holds replace the model's.
        ema: as the checkpoint's moving average has them.
        loras: from `find_loras`.

    Raises:
        ConfigError: the model is missing, no Wan pipeline, or its parts do not fit each other.
        CheckpointError: no complete checkpoint there, or one without an average.
    """
    name = str(model)
    index = _pipeline_index(name)
    parts = _parts(name, index)
    folders = {"transformer": transformer, "transformer_2": transformer_2}
    given = {part: folder for part, folder in folders.items() if folder}
    for part in given:
        if part not in parts:
            raise ConfigError(
                f"infer.{part}={given[part]} is the low-noise expert's, and infer.model={name} has one expert; use "
                "infer.transformer."
            )
    if ema and checkpoint is None:
        raise ConfigError(
            "infer.ema is for the weights of a training run; give infer.checkpoint too (what wands export --ema wrote is an "
            "average already)."
        )
    step, trained, config = _checkpoint_parts(checkpoint, given, parts, ema)
    dits = {
        part: DiTSource(name, part, step)
        if part in trained
        else _replacing_folder(part, given[part])
        if part in given
        else DiTSource(name, part)
        for part in parts
    }
    configs = {
        part: config
        if dit.checkpoint
        else _read(WanTransformer3DModel.load_config, dit.folder, dit.subfolder)
        for part, dit in dits.items()
    }
    dit = configs["transformer"]
    chosen = transformer or (checkpoint if "transformer" in trained else None) or name
    try:
        variant = variant_of(dit, index)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{chosen}: {error}; give a transformer of Wan 2.1 or 2.2.") from None
    _check_experts(name, configs)
    _check_class(name, index["_class_name"], variant, str(chosen))
    stride = _check_encoders(name, variant, str(chosen))
    for lora in loras:
        if lora.part not in parts:
            cure = "use infer.lora" if lora.key == "infer.lora_2" else "give a LoRA of this model"
            raise ConfigError(
                f"{lora.key}={lora.path} is for the low-noise expert of two, and infer.model={name} has one expert; {cure}."
            )
    return PipelineSource(name, index["_class_name"], dits, dit, stride, variant, tuple(loras), ema)


def _parts(name: str, index: Mapping[str, Any]) -> tuple[str, ...]:
    """The DiTs that a pipeline samples with."""
    present = [part for part in ("transformer", "transformer_2") if (index.get(part) or [None])[0]]
    boundary = index.get("boundary_ratio")
    wanted = ["transformer"] if boundary is None else ["transformer", "transformer_2"]
    if present != wanted:
        raise ConfigError(
            f"infer.model={name} has the experts {', '.join(present) or 'none'} and boundary_ratio={boundary}, which do not fit; "
            "a pipeline of two experts has both and a boundary_ratio, any other only transformer."
        )
    return tuple(wanted)


def _checkpoint_parts(
    checkpoint: Path | None, given: Mapping[str, Path], parts: Sequence[str], ema: bool
) -> tuple[Path | None, Sequence[str], Mapping[str, Any]]:
    """The step folder, which DiTs it holds, and their config."""
    if checkpoint is None:
        return None, (), {}
    if given and len(parts) == 1:
        raise _double("transformer", given, checkpoint)
    from wands.train.checkpoint import check_average, find_checkpoint

    step, state = find_checkpoint(checkpoint)
    if ema:
        check_average(step, state)
    for part in state.parts:
        if part in given:
            raise _double(part, given, checkpoint)
        if part not in parts:
            raise ConfigError(
                f"infer.checkpoint={checkpoint} holds a {part}, and infer.model has none; give the model that was trained."
            )
    return step, state.parts, state.transformer_config


def _double(part: str, given: Mapping[str, Path], checkpoint: Path) -> ConfigError:
    return ConfigError(
        f"infer.{part}={given[part]} and infer.checkpoint={checkpoint} exclude each other; keep one."
    )


def _replacing_folder(part: str, folder: Path) -> DiTSource:
    source = DiTSource(str(folder), part if (folder / part).is_dir() else "")
    if not (folder / source.subfolder / "config.json").is_file():
        raise ConfigError(
            f"infer.{part}={folder} is no diffusers transformer folder (no config.json); "
            f"give a folder that wands export wrote, or its {part} sub-folder."
        )
    return source


def _check_experts(name: str, configs: Mapping[str, Mapping[str, Any]]) -> None:
    first, *others = configs.values()
    for other in others:
        keys = [key for key in first if key[0] != "_" and key in other and other[key] != first[key]]
        if keys:
            raise ConfigError(
                f"infer.model={name}: its two experts differ in {', '.join(keys)}; give experts of one model."
            )


def _check_class(name: str, class_name: str, variant: Variant, chosen: str) -> None:
    fits = {"WanImageToVideoPipeline" if variant.num_images else "WanPipeline"}
    if "first_frame" in variant.conditions:
        fits = set(CLASSES)
    if class_name not in fits:
        raise ConfigError(
            f"infer.model={name} is a {class_name}, and the transformer of {chosen} is of {variant.name}, which takes a "
            f"{fits.pop()}; use the pipeline that the transformer was trained from."
        )


def _check_encoders(name: str, variant: Variant, chosen: str) -> tuple[int, int, int]:
    """Pixels per latent of the VAE, once it and the other frozen parts fit the DiT."""
    from transformers import CLIPVisionConfig, UMT5Config

    vae = _read(AutoencoderKLWan.load_config, name, "vae")
    text_dim = _read(UMT5Config.get_config_dict, name, "text_encoder")[0].get("d_model")
    rules = [
        ("out_channels", variant.dit.out_channels, "its VAE's z_dim", vae.get("z_dim", 16)),
        ("text_dim", variant.dit.text_dim, "its text encoder's d_model", text_dim),
    ]
    if variant.dit.image_dim is not None:
        clip = _read(CLIPVisionConfig.get_config_dict, name, "image_encoder")[0]
        width = clip.get("vision_config", clip).get("hidden_size", 768)
        rules.append(("image_dim", variant.dit.image_dim, "its image encoder's hidden_size", width))
    for key, ours, part, theirs in rules:
        if ours != theirs:
            raise ConfigError(
                f"infer.model={name}: {part}={theirs} must equal {key}={ours} of the transformer "
                f"of {chosen}; use the pipeline that the transformer was trained from."
            )
    # Wan 2.1's VAE configs on the Hub are older than these two keys.
    spatial = vae.get("scale_factor_spatial", 8)
    return (vae.get("scale_factor_temporal", 4), spatial, spatial)


def load_pipeline(
    source: PipelineSource, *, dtype: torch.dtype = torch.float32, device: str = "cpu", offload: str = "none"
) -> AnyPipeline:
    """Load all weights and place them.

    Args:
        source: from `find_pipeline`.
        dtype: of transformers and text encoder; what diffusers keeps in fp32 stays so, and so do VAE and image encoder.
        device: where sampling runs.
        offload: "none", or accelerate's "model" or "sequential", which bring weights to `device` when needed.

    Raises:
        ConfigError: files are missing or damaged, tensors do not fit the configs, or a LoRA fits nothing.
        CheckpointError: the checkpoint's tensors do not fit its own config.
    """
    dtypes = {"default": dtype, "vae": torch.float32}
    if "clip" in source.variant.conditions:
        dtypes["image_encoder"] = torch.float32
    with quiet_without_terminal():
        dits = {
            part: _dit_from_checkpoint(source, part, dtype)
            if dit.checkpoint
            else _dit_from_folder(dit, part, dtype)
            for part, dit in source.dits.items()
        }
        try:
            pipeline = pipeline_class(source.class_name).from_pretrained(source.model, **dits, dtype=dtypes)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"infer.model={source.model} cannot be loaded ({_first_line(error)})."
            ) from error
    encoder = pipeline.text_encoder
    if not torch.equal(encoder.encoder.embed_tokens.weight, encoder.shared.weight):
        # transformers releases of late 2025 left the embedding random: fluent videos of something else.
        raise ConfigError(
            f"infer.model={source.model}: the text encoder's token embedding is not its shared weight; "
            "upgrade transformers, which loads UMT5 wrongly."
        )
    scheduler = pipeline.scheduler.config
    if not (scheduler.get("use_flow_sigmas") or "shift" in scheduler):
        raise ConfigError(
            f"infer.model={source.model}: its scheduler {type(pipeline.scheduler).__name__} does not do "
            "flow matching; give it one that does, such as UniPCMultistepScheduler with use_flow_sigmas."
        )
    add_loras(pipeline, source.loras)
    if offload == "model":
        pipeline.enable_model_cpu_offload(device=device)
    elif offload == "sequential":
        pipeline.enable_sequential_cpu_offload(device=device)
    else:
        pipeline.to(device)
    return pipeline


def pipeline_for(pipeline: AnyPipeline, *, with_image: bool) -> AnyPipeline:
    """The same parts in the class that samples from a picture, or the one that samples without; TI2V does both.

    Args:
        pipeline: from `load_pipeline`; given back when it is of that class.
        with_image: the request has a picture.
    """
    if takes_pictures(pipeline) == with_image:
        return pipeline
    wanted = pipeline_class("WanImageToVideoPipeline" if with_image else "WanPipeline")
    taken = inspect.signature(wanted.__init__).parameters
    parts = {name: part for name, part in pipeline.components.items() if name in taken}
    options = {key: pipeline.config[key] for key in ("boundary_ratio", "expand_timesteps")}
    other = wanted(**parts, **options)
    if getattr(pipeline, "_all_hooks", None):  # model offload: each class frees what it has brought
        other.enable_model_cpu_offload(device=pipeline._offload_device)
    return other


def _dit_from_folder(source: DiTSource, part: str, dtype: torch.dtype) -> WanTransformer3DModel:
    folder = source.folder
    try:
        transformer, info = WanTransformer3DModel.from_pretrained(
            folder, subfolder=source.subfolder or None, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{folder}: its {part} cannot be loaded ({_first_line(error)}).") from error
    # diffusers fills what is missing with random numbers and a warning.
    wrong = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if wrong:
        raise ConfigError(
            f"{folder}: the weights of its {part} do not fit its config ({len(wrong)} tensors missing "
            f"or too many, first {wrong[0]}); export it again."
        )
    return transformer


def _dit_from_checkpoint(source: PipelineSource, part: str, dtype: torch.dtype) -> WanTransformer3DModel:
    from accelerate import init_empty_weights

    from wands.train.checkpoint import load_state
    from wands.train.checkpoint_weights import load_full_weights

    checkpoint = source.dits[part].checkpoint
    assert checkpoint is not None
    # No memory and no random numbers for weights that are replaced at once; RoPE's buffers are computed.
    with init_empty_weights(include_buffers=False):
        transformer = WanTransformer3DModel.from_config(source.dit)
    # A LoRA run's checkpoint holds nothing of its base: that is the pipeline's, unless the run made it up.
    made_up = load_state(checkpoint).recipe.get("model", {}).get("init") == "random"
    state = load_full_weights(checkpoint, part, None if made_up else source.model, source.ema)
    expected = {name: tuple(tensor.shape) for name, tensor in transformer.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        first = (
            f"{wrong[0]} is {found.get(wrong[0], 'missing')}, should be {expected.get(wrong[0], 'absent')}"
        )
        raise CheckpointError(
            f"checkpoint={checkpoint}: {len(wrong)} of {len(expected)} tensors do not fit its config "
            f"({first}); use another step."
        )
    kept = set(WanTransformer3DModel._keep_in_fp32_modules)  # as from_pretrained treats them
    for name in state:
        state[name] = state[name].to(torch.float32 if kept & set(name.split(".")) else dtype)
    transformer.load_state_dict(state, assign=True)
    return transformer.eval()


def _pipeline_index(name: str) -> Mapping[str, Any]:
    if Path(name).is_dir():
        if not (Path(name) / "model_index.json").is_file():
            raise ConfigError(
                f"infer.model={name} is not a diffusers pipeline (no model_index.json); give a folder that "
                "wands export wrote, or a Hub id."
            )
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ConfigError(
            f"infer.model={name} does not exist; give a diffusers pipeline folder, or a Hub id such as "
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers."
        )
    index = _read(WanPipeline.load_config, name, None)
    if index.get("_class_name") not in CLASSES:
        raise ConfigError(
            f"infer.model={name} is a {index.get('_class_name')}, not a {' or '.join(CLASSES)}; "
            "give a pipeline of Wan 2.1 or 2.2."
        )
    return index


def _read(reader: Any, folder: str, subfolder: str | None) -> Any:
    try:
        return reader(folder, subfolder=subfolder) if subfolder else reader(folder)
    except (OSError, ValueError) as error:
        where = f"{folder}/{subfolder}" if subfolder else folder
        known = "" if Path(folder).is_dir() else " is neither a folder here nor a Hub id that can be read:"
        raise ConfigError(
            f"infer.model={where}{known} its config cannot be read ({_first_line(error)}); check the name, "
            "and network and login for a Hub id."
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

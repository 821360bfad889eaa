"""Options of the subcommands, declared once: names, types, defaults, limits and help.

`wands.config.click_options` builds the click commands from these models, `wands.config.reference` the reference page.
A class docstring is the command's help text, a field docstring the help text of its option.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from wands.config.base import ARGUMENT, Options, Spelling


class RecipeOptions(Options):
    """Options of commands that take a recipe."""

    recipe: Annotated[str | None, ARGUMENT] = None
    """YAML file, or name of a shipped recipe (`wands recipes` lists them). Without RECIPE the defaults of all keys apply."""
    overrides: Annotated[tuple[str, ...], Spelling("--set", metavar="SECTION.KEY=VALUE")] = ()
    """Set a recipe key; repeatable. `wands config` lists the keys."""


def _as_tuple(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value or ())


class ClipOptions(Options):
    """Options that decide which samples the clips of a source become."""

    source: Annotated[str, ARGUMENT]
    """Folder of clips and images with .txt or .json captions of the same name; a table (metadata.csv, .jsonl or .json,
    captions.json) or a folder with a table; tar archives; or a Hugging Face dataset (name or folder)."""
    height: int | None = None
    """Exact frame height in pixels; needs --width."""
    width: int | None = None
    """Exact frame width in pixels; needs --height."""
    center_crop: bool = False
    """Crop clips to the shape of --height x --width instead of stretching them."""
    max_pixels: Annotated[tuple[int, ...], BeforeValidator(_as_tuple)] = ()
    """Largest area of a frame in pixels; larger clips are scaled down and keep their aspect ratio [default: 399360]. Repeat
    the option to store each clip at several sizes; a later run may add or remove any size except the first."""
    max_frames: Annotated[int | None, BeforeValidator(lambda frames: frames or None)] = 81
    """Longest sample in frames; samples are cut to 4k+1 frames. 0 keeps whole clips."""
    clip_mode: Literal["head", "middle", "slide"] = "head"
    """Part of clips longer than --max-frames: the start (head), the middle (middle), or several samples that cover the clip
    (slide)."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    video_column: str | None = None
    """Column of a table or dataset that holds the videos [default: found by its name]."""
    caption_column: str | None = None
    """Column of a table or dataset that holds the captions [default: found by its name]."""
    fps: float | None = None
    """Frame rate to resample clips to [default: the frame rate of the model variant]."""


class RecipesOptions(Options):
    """List the shipped recipes, or print one.

    Examples:
        wands recipes
        wands recipes wan2.1-t2v-1.3b-lora
    """

    name: Annotated[str | None, ARGUMENT] = None
    """Shipped recipe to print as YAML. Without NAME all recipes are listed."""


class ConfigOptions(Options):
    """List the recipe keys with types, defaults and descriptions.

    Examples:
        wands config
        wands config optim.lr
    """

    key: Annotated[str | None, ARGUMENT] = None
    """Section or SECTION.KEY to describe in full. Without KEY all keys are listed."""


class CheckOptions(ClipOptions):
    """Report which clips can be used and why others cannot.

    Takes SOURCE and the clip options of wands preprocess. Needs no model and no GPU. Exit code: 0 if every clip can be
    used, with or without warnings; 1 if a clip is rejected; 2 if SOURCE or an option is wrong.

    Examples:
        wands check clips/
        wands check clips/ --max-frames 121 --html report.html
    """

    model: str | None = None
    """Diffusers pipeline folder or Hub id. Gives the model variant, and the tokenizer that counts caption tokens exactly."""
    max_tokens: Annotated[int, Field(ge=1)] = 32760
    """Bin capacity in tokens (packing.max_tokens) for the predicted fill."""
    bins_per_step: Annotated[int, Field(ge=1)] = 1
    """Bins of an optimizer step (train.bins_per_step) for the predicted number of steps."""
    num_workers: Annotated[int | None, Spelling("--workers"), Field(ge=1)] = None
    """Number of decoding processes [default: one per CPU core]."""
    json_path: Annotated[Path | None, Spelling("--json")] = None
    """Write all findings to this JSON file."""
    html_path: Annotated[Path | None, Spelling("--html")] = None
    """Write a page with thumbnails to this HTML file."""


class PreprocessOptions(ClipOptions):
    """Encode clips and captions into a latent cache.

    The same command resumes an interrupted run. --workers or a launcher such as torchrun start several processes, which share
    the work; all processes must see SOURCE and --out on a shared file system.

    Examples:
        wands preprocess clips/ --out cache/ --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --workers 8
        torchrun --nproc-per-node 8 -m wands preprocess clips/ --out cache/ --model MODEL
        wands preprocess clips/ --out cache/ --model MODEL --part $SLURM_ARRAY_TASK_ID/16
    """

    out: Path
    """Cache folder to create or to continue."""
    model: str
    """Diffusers pipeline folder or Hub id that provides the VAE, the text encoder and the model variant."""
    device: str | None = None
    """Device of the VAE and other encoders, such as cuda:0 [default: cuda if available, else cpu]."""
    text_device: str | None = None
    """Device of the text encoder [default: --device]."""
    text_dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype of the text encoder."""
    vae_dtype: Literal["bf16", "fp32"] = "fp32"
    """Dtype of the VAE. bf16 needs half the memory and changes latents by about 2 % of their standard deviation; storing latents
    in bf16, which always happens, changes them by 0.2 %."""
    vae_tiling: bool = False
    """Encode frames in tiles of 256 pixels that overlap by 64. Memory no longer grows with the frame size, encoding is slower.
    Latents change by about 2 % of their standard deviation, most near the seams."""
    workers: Annotated[int, Field(ge=1)] = 1
    """Number of processes to start. Processes use the GPUs in turn; each encodes a fixed share of the clips."""
    part: Annotated[str | None, Spelling(metavar="I/N")] = None
    """Encode only part I of N, such as 3/16, into the folder part-I-of-N of --out. For many nodes without a common launcher:
    run one part per node, then join the parts with `python -m data_tools.merge CACHE OUT/part-*`."""


class PackOptions(RecipeOptions):
    """Write the packing plan of one epoch to a file.

    The file lists the bins and steps that `wands train RECIPE` forwards in that epoch.

    Examples:
        wands pack wan2.1-t2v-1.3b-lora --set data.cache=cache/ --out plan.jsonl
    """

    out: Path
    """JSON-lines file to write."""
    epoch: Annotated[int, Field(ge=0)] = 0
    """Epoch to plan, counted from 0."""


class PlanOptions(RecipeOptions):
    """Predict which settings fit a machine, before training.

    Prints DeepSpeed configs, context-parallel degrees, checkpointing, bin sizes, memory and step times that fit RECIPE on the
    machine, fastest first. The numbers are predictions; nothing is run.

    Examples:
        wands plan wan2.1-t2v-14b-lora --hardware h100 --gpus 8
        wands plan --table
    """

    variant: str | None = None
    """Plan for this published model, such as wan2.1-t2v-14b, without its files [default: the model of RECIPE]."""
    hardware: str = "h100"
    """GPU type; an unknown name lists the known ones."""
    gpus: Annotated[int, Field(ge=1)] = 8
    """Total number of GPUs on all nodes."""
    gpu_memory: Annotated[float | None, Field(gt=0)] = None
    """Memory of one GPU in GB [default: the data sheet of --hardware]."""
    host_memory: Annotated[float | None, Field(gt=0)] = None
    """Host memory of one node in GB [default: typical for --hardware]."""
    node_bandwidth: Annotated[float | None, Field(gt=0)] = None
    """Bandwidth of one GPU inside a node, in one direction, in GB/s [default: the data sheet of --hardware]."""
    network_bandwidth: Annotated[float | None, Field(gt=0)] = None
    """Bandwidth of one GPU between nodes, in one direction, in GB/s [default: typical for --hardware]."""
    gpus_per_node: Annotated[int | None, Field(ge=1)] = None
    """GPUs per node [default: typical for --hardware]."""
    size: str = "480p"
    """Clip size if RECIPE names no data: 480p, 720p or HEIGHTxWIDTH in pixels."""
    frames: Annotated[int, Field(ge=1)] = 81
    """Frames per clip if RECIPE names no data."""
    clips: Annotated[int, Field(ge=1)] = 1000
    """Number of clips if RECIPE names no data."""
    deepspeed: Path | None = None
    """Use this DeepSpeed JSON (file, or name in ds_configs/) instead of trying all shipped ones."""
    out: Path | None = None
    """Write the best settings to recipe.yaml and deepspeed.json in this folder."""
    table: bool = False
    """Print a table of the published models and the GPUs that they fit, and exit."""


class TrainOptions(RecipeOptions):
    """Train a model or a LoRA from a recipe.

    On several GPUs a launcher such as deepspeed or torchrun starts one process per GPU.

    Examples:
        wands train wan2.1-t2v-1.3b-lora --set data.cache=cache/
        deepspeed --num_gpus 8 --module wands train my.yaml --deepspeed zero3
        torchrun --nproc-per-node 8 -m wands train my.yaml --deepspeed zero3
    """

    deepspeed: Path | None = None
    """DeepSpeed JSON: a file, or a name in ds_configs/ such as zero3 [default: ZeRO-2]."""
    resume: Annotated[str | None, Spelling(metavar="[PATH]", flag_value="auto")] = None
    """Resume from the newest checkpoint in output_dir, or start a new run if there is none. With PATH, resume from this run or
    step folder."""
    dry_run: bool = False
    """Run all checks, print the settings of the run, and exit."""
    force: bool = False
    """Start even if the predicted memory exceeds the available memory."""
    show_timesteps: bool = False
    """Print a histogram of the timesteps that the recipe samples, and exit."""


class InferOptions(Options):
    """Sample videos from prompts and images.

    Under a launcher such as torchrun all processes work on each video together.

    Examples:
        wands infer --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --prompt "a red kite" --out videos/
        torchrun --nproc-per-node 8 -m wands infer --model MODEL --prompts-file prompts.txt --out videos/
    """

    model: str
    """Diffusers pipeline folder or Hub id."""
    out_dir: Annotated[Path, Spelling("--out")]
    """Folder for the mp4 files, the contact sheet and samples.jsonl."""
    prompts: Annotated[tuple[str, ...], Spelling("--prompt")] = ()
    """Prompt; repeatable. At least one prompt is needed, from --prompt or --prompts-file."""
    prompts_file: Path | None = None
    """.txt file with one prompt per line, or .jsonl file with a prompt and its options per line."""
    height: tuple[int, ...] = ()
    """Frame height in pixels; repeat for one value per prompt [default: 480]."""
    width: tuple[int, ...] = ()
    """Frame width in pixels; repeat for one value per prompt [default: 832]."""
    num_frames: Annotated[tuple[int, ...], Spelling("--frames")] = ()
    """Frames, 4k+1; repeat for one value per prompt [default: 81]."""
    num_inference_steps: Annotated[tuple[int, ...], Spelling("--steps")] = ()
    """Denoising steps; repeat for one value per prompt [default: 50]."""
    guidance_scale: Annotated[tuple[float, ...], Spelling("--guidance")] = ()
    """Classifier-free guidance scale, off at 1 or below; repeat for one value per prompt [default: 5]."""
    guidance_scale_2: Annotated[tuple[float, ...], Spelling("--guidance-2")] = ()
    """Guidance scale of the low-noise expert; repeat for one value per prompt [default: --guidance]."""
    flow_shift: Annotated[tuple[float, ...], Spelling("--shift")] = ()
    """Flow shift; repeat for one value per prompt [default: the scheduler's flow shift]."""
    seed: tuple[int, ...] = ()
    """Seed; repeat for one value per prompt. A single seed gives prompt i the seed + i [default: 0]."""
    negative_prompt: tuple[str, ...] = ()
    """Negative prompt; needs --guidance above 1; repeat for one value per prompt [default: empty]."""
    image: tuple[str, ...] = ()
    """First frame: an image, or a video whose first frame is used; cropped to the frame size; repeat for one value per
    prompt."""
    last_image: tuple[str, ...] = ()
    """Last frame: an image, or a video whose last frame is used; repeat for one value per prompt."""
    transformer: Path | None = None
    """Folder of a diffusers transformer, or of a pipeline with one, to use instead of the transformer of --model."""
    transformer_2: Path | None = None
    """Folder of a diffusers transformer to use as the low-noise expert."""
    checkpoint: Path | None = None
    """Run or step folder of wands train whose weights are used."""
    ema: bool = False
    """Use the moving average of the weights in --checkpoint; the recipe must have an ema section."""
    lora: Annotated[tuple[str, ...], Spelling(metavar="PATH[=SCALE]")] = ()
    """LoRA to add: folder, file or Hub id in diffusers, PEFT or ComfyUI layout; repeatable. For a model with two experts,
    high_noise or low_noise in the name of a key, file or folder chooses the expert [default: high-noise]."""
    lora_2: Annotated[tuple[str, ...], Spelling(metavar="PATH[=SCALE]")] = ()
    """LoRA to add to the low-noise expert; repeatable. Of a LoRA for both experts only the low-noise part is used."""
    offload: Literal["none", "model", "sequential"] = "none"
    """Keep weights in host memory and move one model (model) or one layer (sequential) at a time to the GPU."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of transformer and text encoder; auto is bf16 on a GPU and fp32 on the CPU."""
    device: str | None = None
    """Device for a single process [default: cuda if available, else cpu]."""
    fps: int | None = None
    """Frame rate of the mp4 files [default: the frame rate of the model variant]."""
    save_latents: bool = False
    """Save the latents of each sample next to its mp4 file."""
    ulysses_degree: Annotated[int | None, Field(ge=1)] = None
    """Ranks that share attention heads [default: the largest valid degree]."""
    ring_degree: Annotated[int | None, Field(ge=1)] = None
    """Ranks that share tokens [default: world size / ulysses degree]."""


class ExportOptions(Options):
    """Export a checkpoint as a diffusers pipeline or LoRA files.

    A full finetune becomes a pipeline folder, a LoRA run a folder of LoRA files.

    Examples:
        wands export runs/my-finetune --out exported/ --dtype bf16
        wands export runs/my-lora --out merged/ --merge
    """

    checkpoint: Annotated[Path, ARGUMENT]
    """Run folder (its newest checkpoint is exported) or step folder."""
    out: Path
    """Folder to write: new, empty, or an earlier export to replace."""
    base: str | None = None
    """Pipeline folder or Hub id that provides the VAE, text encoder and other untrained parts [default: the model that the run
    started from]; not for LoRA files."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Export dtype of the trained weights. Layers that diffusers keeps in fp32 stay fp32."""
    max_shard_size: str = "5GB"
    """Largest size of a weight file, such as 5GB; not for LoRA files."""
    copy_files: Annotated[bool, Spelling("--copy")] = False
    """Copy the files of --base instead of hard-linking them; not for LoRA files."""
    merge: bool = False
    """Merge the LoRA into the base weights and export the whole pipeline; only for LoRA runs."""
    ema: bool = False
    """Export the moving average of the trained weights; the recipe must have an ema section."""


class PushOptions(Options):
    """Upload an export with a model card to the Hugging Face Hub.

    The token comes from HF_TOKEN or `hf auth login`. After an interrupted upload the same command sends the missing files.

    Examples:
        wands push exported/ my-name/my-model
    """

    directory: Annotated[Path, ARGUMENT]
    """Folder written by wands export."""
    repo_id: Annotated[str, ARGUMENT]
    """Repository as owner/name, or a name in your own account."""
    public: bool = False
    """Make a new repository public [default: private]."""
    revision: str | None = None
    """Branch to commit to; created if missing [default: main]."""
    message: str | None = None
    """Commit message [default: a list of what was uploaded]."""
    endpoint: str | None = None
    """URL of the Hub [default: HF_ENDPOINT, else https://huggingface.co]."""
    training: Path | None = None
    """Run or step folder with training facts for the model card that DIRECTORY does not record."""


class ConvertOptions(Options):
    """Convert a model or a LoRA to another file layout.

    The layouts are diffusers, official (Wan's own repositories) and comfyui.

    Examples:
        wands convert Wan2.1-T2V-1.3B/ --to diffusers --out wan-diffusers/
        wands convert style.safetensors --to comfyui --out comfyui/
    """

    source: Annotated[str, ARGUMENT]
    """Wan model (folder, Hub id or file), or a LoRA of any trainer."""
    to: Literal["diffusers", "official", "comfyui"]
    """Layout to write."""
    out: Path
    """New or empty folder to write."""
    base: Annotated[str | None, Spelling(alias="--rest-of")] = None
    """Folder or Hub id, in the layout of --to, that provides parts which SOURCE lacks, such as a tokenizer."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of the transformer or LoRA [default: as in SOURCE]. Layers that diffusers keeps in fp32 stay fp32."""
    forward: bool = True
    """Compare the outputs of stock diffusers for SOURCE and the result."""


class SelftestOptions(Options):
    """Compare a model with stock diffusers on this machine.

    Prints one line per check. Exit code: 0 if no check fails, 1 if a check fails, 2 if --model or another option is wrong.
    Under a launcher only context parallelism is checked.

    Examples:
        wands selftest --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --only vae
        torchrun --nproc-per-node 4 -m wands selftest --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers
    """

    model: str
    """Diffusers pipeline folder, or Hub id that is already downloaded."""
    clip: Path | None = None
    """Video for the checks of the VAE [default: a synthetic clip]."""
    device: Literal["cuda", "cpu"] | None = None
    """Device to run on [default: cuda if available, else cpu]."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of the text encoder and transformer [default: bf16 on cuda, fp32 on cpu]."""
    only: Annotated[tuple[str, ...], Spelling(metavar="NAME")] = ()
    """Check to run, or a group of checks such as vae; repeatable."""


COMMANDS: tuple[type[Options], ...] = (
    RecipesOptions,
    ConfigOptions,
    CheckOptions,
    PreprocessOptions,
    PackOptions,
    PlanOptions,
    TrainOptions,
    InferOptions,
    ExportOptions,
    PushOptions,
    ConvertOptions,
    SelftestOptions,
)
"""Option models of all subcommands in the order of work."""

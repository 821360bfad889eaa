"""Options of the subcommands, declared once: names, types, defaults, limits and help.

`wands.config.click_options` builds the click commands from these models. `scripts/build_reference.py` writes the
reference page from the commands. A class docstring is the help text of the command. A field docstring is the help
text of the option.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from wands.config.base import ARGUMENT, Heading, Options, Spelling


class PluginOptions(Options):
    """Options of commands that outside code can change."""

    imports: Annotated[tuple[str, ...], Spelling("--import", metavar="MODULE")] = ()
    """Import outside code, such as an objective or an input: a Python file, such as ./robust.py, or a module, such as
    my_package.robust. It must define `plugin = wands.Plugin(...)`. Give the option several times for several modules. Installed
    packages with an entry point in the group wands.plugins are imported without this option."""


class RecipeOptions(PluginOptions):
    """Options of commands that take a recipe."""

    recipe: Annotated[str | None, ARGUMENT] = None
    """Recipe to use: a YAML file, or the name of a recipe that wands ships. `wands recipes` lists the shipped recipes.
    Without RECIPE, every recipe key has its default value."""
    overrides: Annotated[tuple[str, ...], Spelling("--set", metavar="SECTION.KEY=VALUE")] = ()
    """Set a recipe key to a value, such as optim.lr=1e-4. Give the option several times to set several keys. `wands
    recipes --keys` lists all keys."""


class ClipOptions(Options):
    """Options that choose clips from SOURCE (a folder, table or dataset), and the size and length of the samples."""

    source: Annotated[str, ARGUMENT]
    """Clips and images with captions, in one of five forms. (1) A folder: each clip has its caption in a .txt,
    .caption or .json file of the same name. (2) A table of clips and captions (metadata.csv, metadata.jsonl, metadata.json or
    captions.json), or the folder of the table. (3) Tar archives. (4) A Hugging Face dataset: its name or its folder. (5) A
    dataset configuration of musubi-tuner, diffusion-pipe or finetrainers (.toml or .json)."""
    height: int | None = None
    """Exact height of every sample in pixels: a multiple of 16, or of 32 for Wan 2.2 5B. Set --height together with
    --width. Without --height and --width, clips keep their aspect ratio."""
    width: int | None = None
    """Exact width of every sample in pixels: a multiple of 16, or of 32 for Wan 2.2 5B. Set --width together with
    --height. Without --height and --width, clips keep their aspect ratio."""
    center_crop: bool = False
    """Scale each clip until it covers --height x --width, and crop it centrally to this size. Without --center-crop,
    clips are stretched to this size."""
    max_pixels: tuple[int, ...] = ()
    """Largest area of a frame in pixels, height x width [default: 399360, which is 832 x 480]. Clips with larger frames
    are scaled down and keep their aspect ratio. Give the option several times to get each clip at several sizes. For
    an existing latent cache, the first value must stay the same. You may add or remove further values."""
    max_frames: Annotated[int | None, BeforeValidator(lambda frames: frames or None)] = 81
    """Largest number of frames in a sample. The number of frames is always a multiple of 4 plus 1, such as 49 or 81. If a
    clip is longer, --clip-mode chooses its frames. 0 sets no limit: each sample is then a whole clip, shortened by up to
    3 frames."""
    clip_mode: Literal["head", "middle", "slide"] = "head"
    """Choose the frames to use if a clip is longer than --max-frames. With `head`, the first frames are used. With
    `middle`, the central frames are used. With `slide`, the whole clip is divided into several samples."""
    split: str = "train"
    """Name of the split to read from a Hugging Face dataset, such as train or test. If the dataset has one folder per
    split, give the name of the folder."""
    video_column: str | None = None
    """Name of the column that contains the videos, in a table or dataset [default: the first column with a usual name
    such as video or file_name]."""
    caption_column: str | None = None
    """Name of the column that contains the captions, in a table or dataset [default: the first column with a usual name
    such as caption or text]."""
    where: Annotated[str | None, Spelling(metavar="CONDITION")] = None
    """Use only clips whose row in the table of SOURCE meets this condition, such as "motion > 0.2 and sharpness > 100". Clips
    that do not meet the condition are rejected. Valid comparisons are <, <=, >, >=, ==, !=, "in" and "is None". Join comparisons
    by "and" or "or", and negate them by "not"."""
    trigger: str | None = None
    """Word or text that is put in front of each caption, followed by a comma, unless the caption already contains
    this text. If you run `wands preprocess` again with another text, only the captions are encoded again."""
    fps: float | None = None
    """Frame rate of the samples in frames per second. Clips with another frame rate are resampled [default: the frame
    rate of the model variant, such as 16]."""


class RecipesOptions(Options):
    """List the ready recipes, print one of them, or explain a recipe key.

    Examples:
        wands recipes
        wands recipes wan2.1-t2v-1.3b-lora
        wands recipes optim.lr
    """

    name: Annotated[str | None, ARGUMENT] = None
    """Name of a recipe that wands ships, which the command prints as YAML. Or a recipe key, such as optim.lr, or a section of
    keys, such as optim, which the command describes in full. Without NAME, the command lists the shipped recipes."""
    keys: bool = False
    """List all recipe keys with types, defaults and short descriptions."""


class InitOptions(ClipOptions):
    """Choose settings for your clips and GPUs, and write a recipe.

    The command decodes the clips of SOURCE, and predicts the fastest settings that fit the GPUs. It writes the files
    recipe.yaml, deepspeed.json, prompts.jsonl and commands.sh. The commands in commands.sh, which are also printed, check
    and encode the clips, train the model and sample videos. Comments in recipe.yaml give the reasons for the settings.

    Examples:
        wands init clips/
        wands init clips/ --gpus 2 --gpu-memory 24 --max-frames 49
        wands init clips/ --model Wan-AI/Wan2.2-TI2V-5B-Diffusers --hardware h100 --out my-project
    """

    out: Path = Path("wands-project")
    """Folder for the files that `wands init` writes. One of these files, commands.sh, contains commands that write the
    latent cache, the run folder and the samples to --out, too."""
    model: str = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    """Diffusers pipeline folder or Hub id of the model to train. The default is the smallest published Wan model, which trains
    on one GPU. For a published model, this command needs no files of the model."""
    full: bool = False
    """Train all weights of the model. Without --full, the recipe trains a LoRA, which needs less memory and fewer clips."""
    chunk_frames: Annotated[int | None, Field(ge=1)] = None
    """Write a recipe for teacher forcing in chunks of this number of latent frames, so that the model can sample chunk by chunk
    [default: a training without chunks]."""
    gpus: Annotated[int | None, Field(ge=1)] = None
    """Total number of GPUs in all nodes together [default: the GPUs of this machine, or 1 for a machine without a GPU]."""
    gpu_memory: Annotated[float | None, Field(gt=0)] = None
    """Memory of one GPU in GB. A machine without a GPU needs --gpu-memory or --hardware [default: the memory of the
    GPU type in --hardware; without --hardware, the memory of this machine's GPU]."""
    hardware: str | None = None
    """Name of the GPU type, such as h100 or rtx4090. `wands plan --help` lists the names [default: the known GPU type
    whose memory is closest to --gpu-memory; without --gpu-memory, the GPU of this machine]."""
    host_memory: Annotated[float | None, Field(gt=0)] = None
    """Main memory (RAM) of one node in GB [default: the memory of this machine if its GPU is used, or a typical value for
    --hardware]."""
    force: bool = False
    """Replace files that an earlier wands init wrote to --out."""


class SplitOptions(Options):
    """Write the shots of films (long videos) to a table.

    The command finds cuts, dissolves and fades. Black, static and unreadable parts are left out. A shot longer than
    --max-seconds is cut into several clips. The video files do not change. To resume an interrupted run, run the same
    command again.

    Examples:
        wands split films/ --out shots.csv --html shots.html
        wands split film.mp4 --out shots.csv --max-seconds 8
    """

    source: Annotated[str, ARGUMENT]
    """Films to split: one video file, a folder of videos, or a table with a column of videos. Captions are not needed."""
    out: Path
    """Table to write (.csv or .jsonl), with the columns video, start, end, crop and caption. If SOURCE is a table,
    its other columns are copied. A file next to the table, such as shots.films.jsonl, lists the videos that are already
    split, so that a restarted command skips them."""
    min_seconds: Annotated[float, Field(gt=0)] = 1.0
    """Length of the shortest clip in seconds. Shorter shots are left out. If a shot is cut because of --max-seconds, a last
    piece that is shorter than --min-seconds is left out, too."""
    max_seconds: Annotated[float, Field(gt=0)] = 5.0625
    """Length of the longest clip in seconds. Longer shots are cut into pieces of this length. The default is the length
    of 81 frames at 16 fps."""
    num_workers: Annotated[int | None, Spelling("--workers"), Field(ge=1)] = None
    """Number of videos that are decoded at the same time [default: one per CPU core]."""
    html_path: Annotated[Path | None, Spelling("--html")] = None
    """Write the timeline of each video in SOURCE, with a picture of each shot, to this HTML file."""


class CaptionOptions(Options):
    """Write captions for clips with an image-text-to-text model.

    Captions that SOURCE or the table at --out already contains are kept. If the command was interrupted, or some clips
    still have no caption, run the same command again. It then captions only the clips without a caption.

    Examples:
        wands caption shots.csv --model Qwen/Qwen2.5-VL-7B-Instruct --out captioned.csv
        wands caption shots.csv --model MODEL --endpoint http://localhost:8000/v1 --out captioned.csv
    """

    source: Annotated[str, ARGUMENT]
    """Clips in any form that `wands preprocess` reads. Captions may be missing."""
    model: str
    """Folder or Hub id of an image-text-to-text model of transformers. Many of these models need torchvision. With
    --endpoint, the name of the served model."""
    out: Path
    """Table to write: a .csv or .jsonl file. Its column "caption" has the captions. The other columns of SOURCE are copied."""
    where: Annotated[str | None, Spelling(metavar="CONDITION")] = None
    """Caption only clips that meet this condition, such as "motion > 0.01 and duplicate_of is None" for a table of
    `wands measure`. The table at --out has only these clips. The condition is written as for `wands preprocess`."""
    endpoint: str | None = None
    """Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1. Leave out /chat/completions at
    the end. If the environment variable OPENAI_API_KEY is set, the command sends its value as the API key."""
    prompt: tuple[str, ...] = ()
    """Instruction for the model. A column name in braces, such as {film}, is replaced by the clip's value in this
    column of SOURCE. If --captions is above 1, you can give --prompt several times to use several instructions
    [default: describe the video in two to four sentences]."""
    captions: Annotated[int, Field(ge=1)] = 1
    """Number of captions of each clip. If --prompt is given several times, the captions use the prompts in turn. The
    first caption from each prompt is not random. Further captions from the same prompt are sampled at random, and
    change if --batch changes."""
    trigger: str = ""
    """Trigger word to put in front of each new caption, followed by a comma, unless the caption already contains the word."""
    frames: Annotated[int, Field(ge=1)] = 8
    """Number of frames that the model sees of each clip, at equal distances over the clip's time range."""
    max_side: Annotated[int, Field(ge=16)] = 448
    """Limit for the area of a frame, as the side of a square in pixels: 448 means an area of 448 x 448 pixels. Larger frames
    are scaled down to this area before the model sees them."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Largest number of tokens in the model's answer, which becomes the caption. If the answer is cut off at this limit,
    its unfinished last sentence is removed."""
    batch: Annotated[int, Field(ge=1)] = 8
    """Number of clips that the model captions together. With --endpoint, the number of simultaneous requests."""
    workers: Annotated[int | None, Field(ge=1)] = None
    """Number of processes to start on this machine. They are distributed evenly over the GPUs [default: one process per
    GPU]."""
    device: str | None = None
    """Device that runs the model, such as cuda:0 [default: cuda if available, else cpu]."""
    timeout: Annotated[float, Field(gt=0)] = 120.0
    """Longest time in seconds for one request to --endpoint and its answer. If no answer arrives in this time, the
    request is sent once more."""
    overwrite: bool = False
    """Replace existing captions."""


class MeasureOptions(Options):
    """Measure motion, sharpness and brightness of clips.

    The command also finds near-duplicates. It writes a table with the columns motion, sharpness, brightness and
    duplicate_of. It measures the first 10 seconds of each clip. To resume an interrupted run, run the same command again.

    Examples:
        wands measure captioned.csv --out measured.csv
        wands measure captioned.csv --out measured.csv --duplicate-bits 10
    """

    source: Annotated[str, ARGUMENT]
    """Clips to measure: a table, a folder, tar archives or a Hugging Face dataset. Captions are not needed."""
    out: Path
    """Table to write (.csv or .jsonl). It has all columns of SOURCE and the measured values. A file next to the table,
    such as measured.measures.jsonl, lets later runs skip unchanged clips."""
    duplicate_bits: Annotated[int, Field(ge=0, le=64)] = 6
    """Number of bits in which the hashes of near-duplicates may differ. Each clip has three perceptual hashes of 64
    bits, one for each of three frames. Two clips are near-duplicates if their first hashes, their second hashes and
    their third hashes each differ in at most this number of bits."""
    num_workers: Annotated[int | None, Spelling("--workers"), Field(ge=1)] = None
    """Number of clips that are decoded at the same time [default: one per CPU core]."""


class CheckOptions(ClipOptions, PluginOptions):
    """Report which clips can be used, and why other clips cannot.

    SOURCE and the clip options are the same as for wands preprocess. The command needs no model and no GPU. It prints a
    summary; --html and --json list every clip. The exit
    code is 0 if every clip can be used, even if there are warnings. The exit code is 1 if a clip is rejected, and 2
    if SOURCE or an option is wrong.

    Examples:
        wands check clips/
        wands check clips/ --max-frames 121 --html clips.html
    """

    model: str | None = None
    """Diffusers pipeline folder or Hub id of the model to train later. The command reads the model variant from this
    model, and counts caption tokens exactly with the model's tokenizer. Without --model, the command assumes Wan 2.1
    text-to-video and estimates the caption tokens."""
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    """Capacity of a bin in video tokens, as in the recipe key packing.max_tokens. The command predicts the fraction of the
    capacity that the clips fill [default: the default of the recipe key]."""
    bins_per_step: Annotated[int | None, Field(ge=1)] = None
    """Number of bins in one optimizer step, as in the recipe key train.bins_per_step. The command needs this value to
    predict the number of steps in an epoch [default: the default of the recipe key]."""
    chunk_frames: Annotated[int | None, Field(ge=1)] = None
    """Predict the packing for teacher forcing in chunks of this number of latent frames, which has longer sequences
    [default: a training without chunks]."""
    num_workers: Annotated[int | None, Spelling("--workers"), Field(ge=1)] = None
    """Number of processes that decode clips at the same time [default: one per CPU core]."""
    json_path: Annotated[Path | None, Spelling("--json")] = None
    """Write the results of every clip to this JSON file."""
    html_path: Annotated[Path | None, Spelling("--html")] = None
    """Write the results of every clip, with thumbnails, to this HTML file."""


class PreprocessOptions(ClipOptions, PluginOptions):
    """Encode clips and captions into a latent cache.

    Training reads the cache instead of the clips. To resume an interrupted run, run the same command again. --workers or
    a launcher such as torchrun starts several processes, which share the work. All these processes must see SOURCE and
    --out on a shared file system.

    Examples:
        wands preprocess clips/ --out cache/ --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --workers 8
        torchrun --nproc-per-node 8 -m wands preprocess clips/ --out cache/ --model MODEL
        wands preprocess clips/ --out cache/ --model MODEL --part $SLURM_ARRAY_TASK_ID/16
    """

    out: Path
    """Folder of the latent cache. A missing folder is created. If the folder contains the cache of an earlier run, the
    command encodes only the samples that the cache lacks."""
    model: str
    """Diffusers pipeline folder or Hub id of the model to train later. It provides the VAE, the text encoder and the
    model variant."""
    device: str | None = None
    """Device that runs the encoders, such as cuda:0. With --text-device, the text encoder runs on another device
    [default: cuda if available, else cpu]."""
    text_device: str | None = None
    """Device that runs the text encoder. With cpu, the text encoder needs no GPU memory, but is slower. The text encoder is
    deleted from memory before the VAE is loaded [default: the value of --device]."""
    text_dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype in which the text encoder runs. fp32 needs twice the memory of bf16."""
    vae_dtype: Literal["bf16", "fp32"] = "fp32"
    """Dtype in which the VAE runs. bf16 needs half the memory of fp32, and changes the latents by about 2 % of their
    standard deviation. The cache always stores latents in bf16, which changes them by only 0.2 %."""
    vae_batch: Annotated[int, Field(ge=1)] = 1
    """Number of samples that the VAE encodes together, if their sizes and lengths are equal. A larger number, such
    as 8, should be faster for small clips and images, but needs more memory. The latents change by rounding errors."""
    vae_tiling: bool = False
    """Encode each frame in tiles of 256 x 256 pixels that overlap by 64 pixels. Use this option if the VAE runs out of
    memory. With tiles, the memory does not grow with the frame size, but encoding is slower. The latents change by about
    2 % of their standard deviation, mostly where tiles meet."""
    workers: Annotated[int | None, Field(ge=1)] = None
    """Number of processes to start on this machine. They are distributed evenly over the GPUs. Each process loads all
    encoders, and encodes a fixed part of the clips [default: one process per GPU; on a machine without a GPU, one
    process]."""
    limit: Annotated[int | None, Field(ge=1)] = None
    """Largest number of clips to encode: the first clips of SOURCE in the order of their names. Run the command again
    without --limit to add the other clips to the cache."""
    part: Annotated[str | None, Spelling(metavar="I/N")] = None
    """Divide the clips into N parts, and encode only part I into the folder part-I-of-N inside --out. For example, 3/16
    encodes the third of 16 parts. Use this option on a cluster if no launcher starts processes on all nodes. Run one part on
    each node. Then join the parts into the folder CACHE with `python -m data_tools.merge OUT/part-* --out CACHE`, where
    OUT is the value of --out."""


class PackOptions(RecipeOptions):
    """Write the packing plan of one epoch to a file.

    A bin holds the clips of one forward pass. The file lists the clips of each bin and the bins of each optimizer
    step. `wands train RECIPE` plans the same bins and steps by itself. `wands train RECIPE --plan FILE` reads them from
    the file.

    Examples:
        wands tools pack wan2.1-t2v-1.3b-lora --set data.cache=cache/ --out plan.jsonl
    """

    out: Path
    """File to write the bins of the epoch to, in JSON-lines format (.jsonl)."""
    epoch: Annotated[int, Field(ge=0)] = 0
    """Number of the epoch to plan. The first epoch has the number 0."""


class CalibrateOptions(Options):
    """Measure the speeds of this machine's GPU for `wands plan`.

    The command measures the speed of memory copies, matrix products and each attention kernel, and the time to start a
    kernel. It takes less than a minute. Without a GPU, it measures the CPU. The speeds of a CPU are useful only to test the
    command, because `wands plan` predicts runs on GPUs.

    Examples:
        wands tools calibrate
        wands tools calibrate --out h200.json
    """

    out: Path | None = None
    """JSON file to write. The default is a file in ~/.cache/wands/hardware. If the environment variable XDG_CACHE_HOME
    is set, the default file is in $XDG_CACHE_HOME/wands/hardware. `wands plan` finds the default file by itself. For another
    file, use `wands plan --hardware-file FILE`."""


class PlanOptions(RecipeOptions):
    """Predict which settings fit a machine, before training.

    The command prints settings with which RECIPE fits on the machine, the fastest settings first. If speeds differ by
    less than about 2 %, simpler settings come first. Settings that offload to the host are sorted as if they were 15 %
    slower than predicted. Each line contains a DeepSpeed config, context-parallel degrees, activation checkpointing,
    packing.max_tokens (largest number of tokens in a forward pass), the memory and the step time. All numbers are
    predictions; nothing is run.

    Examples:
        wands plan wan2.1-t2v-14b-lora --hardware h100 --gpus 8
        wands plan my.yaml --clips 200 --hardware rtx4090 --gpus 1
        wands plan --table
    """

    variant: str | None = None
    """Plan for this published model, such as wan2.1-t2v-14b. The files of the model are not needed [default: the model of
    RECIPE]."""
    hardware: str | None = None
    """Name of the GPU type: h100, h200, b200, a100-80gb, a100-40gb, l40s, a6000, rtx5090, rtx4090, rtx3090, rtx4080, rtx5080,
    rtx4070 or rtx3060. For another GPU, use the name of a similar GPU together with --gpu-memory [default: the known GPU type
    whose memory is closest to --gpu-memory; without --gpu-memory, the GPU of this machine, or h100 if it has none]."""
    hardware_file: Path | None = None
    """File that `wands tools calibrate` wrote on a GPU of the type in --hardware. Its speeds replace the speeds of the data
    sheet [default: the file that `wands tools calibrate` wrote without --out for this GPU type, if there is one]."""
    gpus: Annotated[int | None, Field(ge=1)] = None
    """Total number of GPUs in all nodes together [default: the GPUs of this machine; without a GPU, 1 for an RTX card and 8 for
    other types]."""
    gpu_memory: Annotated[float | None, Field(gt=0)] = None
    """Memory of one GPU in GB [default: the value in the data sheet of --hardware]."""
    host_memory: Annotated[float | None, Field(gt=0)] = None
    """Main memory (RAM) of one node in GB [default: a typical value for --hardware]."""
    node_bandwidth: Annotated[float | None, Field(gt=0)] = None
    """Speed at which one GPU sends data to the other GPUs of its node, in GB/s [default: the value in the data sheet of
    --hardware]."""
    network_bandwidth: Annotated[float | None, Field(gt=0)] = None
    """Speed at which one GPU sends data to GPUs of other nodes, in GB/s [default: a typical value for --hardware]."""
    gpus_per_node: Annotated[int | None, Field(ge=1)] = None
    """Number of GPUs in one node [default: a typical value for --hardware]."""
    size: str = "480p"
    """Frame size of the clips: 480p, 720p or HEIGHTxWIDTH in pixels. This option has an effect only with --clips, or if RECIPE
    names no data."""
    frames: Annotated[int, Field(ge=1)] = 81
    """Number of frames in each clip. This option has an effect only with --clips, or if RECIPE names no data."""
    clips: Annotated[int | None, Field(ge=1)] = None
    """Plan for this number of clips of equal size, and do not read the cache of RECIPE [default: the clips in the cache of
    RECIPE, or 1,000 clips if RECIPE names no data]."""
    deepspeed: Path | None = None
    """Plan with only this DeepSpeed config: a JSON file, or the name of a config that wands ships, such as zero3. Without
    --deepspeed, all shipped configs are tried."""
    out: Path | None = None
    """Write the fastest settings to the files recipe.yaml and deepspeed.json in this folder."""
    table: bool = False
    """Print tables of the settings with which each published model can be trained on common GPUs, and exit."""


class LauncherOptions(RecipeOptions):
    """Options that `wands train` and `wands tools profile` share."""

    deepspeed: Path | None = None
    """DeepSpeed config to use: a JSON file, or the name of a config that wands ships, such as zero3 [default: a config
    with ZeRO-2]."""
    force: bool = False
    """Start training even if wands predicts that the run needs more memory than is available. Also take over a run folder
    at once from a process on another host, for example a host that was lost."""


class TrainOptions(LauncherOptions):
    """Train a model or a LoRA from a recipe.

    To train on several GPUs, use a launcher such as deepspeed or torchrun, which starts one process per GPU.

    Examples:
        wands train wan2.1-t2v-1.3b-lora --set data.cache=cache/
        deepspeed --num_gpus 8 --module wands train my.yaml --deepspeed zero3
        torchrun --nproc-per-node 8 -m wands train my.yaml --deepspeed zero3
    """

    resume: Annotated[str | None, Spelling(metavar="[PATH]", flag_value="auto")] = None
    """Without PATH, resume from the newest checkpoint in the recipe's output_dir, or start a new run if output_dir has no
    checkpoint. PATH is a step folder (one checkpoint), such as RUN/checkpoints/step_00001000, or a run folder, whose newest
    checkpoint is used."""
    dry_run: bool = False
    """Run all checks, print the settings of the run, and exit without training. If a published model is not on this
    machine yet, its files are neither downloaded nor checked."""
    mock: Annotated[str | None, Spelling(metavar="VARIANT")] = None
    """Test a machine or a cluster without data and weights: train this published model, such as wan2.1-t2v-14b, from
    random weights on random clips of its official size. A tiny model, such as wan2.1-t2v-tiny, needs no GPU. RECIPE and
    --set choose the other settings."""
    plan: Path | None = None
    """File that `wands tools pack --out` wrote for one epoch. In this epoch, training uses exactly the bins
    and steps in the file. Other epochs are packed as usual. The option sets the recipe key packing.plan."""
    show_timesteps: bool = False
    """Print a histogram of the timesteps (noise levels) that the recipe draws in training, and exit."""


class ReportOptions(Options):
    """Write a page about a run, or compare runs on one page.

    The page is one HTML file that needs no network. It shows loss, samples, speed, events and recipe. Training writes the
    page of a run by itself after each evaluation, after samples and at the end.

    Examples:
        wands report runs/my-run
        wands report runs/my-run runs/other --out comparison.html
    """

    runs: Annotated[tuple[Path, ...], ARGUMENT]
    """Run folders to report on. Several run folders are compared on one page."""
    out: Path | None = None
    """HTML file to write [default: report.html in the run folder; for several runs, comparison.html in the first run
    folder]."""


class ProfileOptions(LauncherOptions):
    """Train ten steps and print the time of each part of a step.

    The command profiles steps 6 to 10. It also prints the FLOPs of each part of a step. It writes Chrome traces to
    DIR/profile, where DIR is the value of --out. On a GPU, it also writes snapshots of the GPU memory to this folder.
    No checkpoint is saved.

    Examples:
        wands tools profile wan2.1-t2v-1.3b-lora --set data.cache=cache/
        torchrun --nproc-per-node 8 -m wands tools profile my.yaml --deepspeed zero3 --set profile.ranks=[0,7]
    """

    out: Annotated[Path, Spelling(metavar="DIR")] = Path("runs/profile")
    """Run folder to write. The folder must not contain checkpoints."""

    def train_options(self) -> TrainOptions:
        """Return the options of `wands train` for the short training run that `wands tools profile` makes.

        The run saves no checkpoint, and ends after the profiled steps.
        """
        defaults = ("profile.start=6", "profile.steps=5", "train.max_steps=11")
        off = ("checkpoint={every: 0}", "logging.trackers=[]", "eval=null", "sample=null", "hub=null")
        fixed = ("profile.stop=true", f"output_dir={self.out}", *off)
        shared = self.model_dump(exclude={"out", "overrides"})
        return TrainOptions(**shared, overrides=(*defaults, *self.overrides, *fixed))


class InferOptions(PluginOptions):
    """Sample videos from prompts and images.

    With a launcher such as torchrun, all processes work together on each video. If you leave out a sampling option, such as
    --steps, wands uses the value that the authors of the model use. A table at the end of `wands infer --help` lists these
    values.

    Examples:
        wands infer --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --prompt "a red kite" --out videos/
        torchrun --nproc-per-node 8 -m wands infer --model MODEL --prompts-file prompts.txt --out videos/
    """

    model: str
    """Diffusers pipeline folder or Hub id of the model that samples the videos."""
    out_dir: Annotated[Path, Spelling("--out")]
    """Folder for the results: the mp4 files, a contact sheet with a few frames of each video, and samples.jsonl. The
    file samples.jsonl lists each video with its prompt and options."""
    prompts: Annotated[tuple[str, ...], Spelling("--prompt"), Heading("Prompts and images")] = ()
    """Text prompt for one video. Give the option several times to sample several videos. At least one prompt is needed,
    from --prompt or from --prompts-file."""
    prompts_file: Path | None = None
    """File with prompts. A .txt file contains one prompt per line. A .jsonl file contains one JSON object per line, such as
    {"prompt": "a kite", "seed": 1}."""
    negative_prompt: tuple[str, ...] = ()
    """Text that describes what the video must not show. This option needs --guidance above 1. Give the option several
    times to set one value per prompt [default: the Chinese text of the model's authors; "" sets no text]."""
    image: tuple[str, ...] = ()
    """File with the first frame: an image, or a video whose first frame is used. The frame is scaled and cropped to
    --height x --width. Models that start from an image need this option. Give the option several times to set one
    value per prompt."""
    last_image: tuple[str, ...] = ()
    """File with the last frame: an image, or a video whose last frame is used. The frame is scaled and cropped to
    --height x --width. First-and-last-frame models need this option. Give the option several times to set one value
    per prompt."""
    inputs: Annotated[tuple[str, ...], Spelling(name="--input", metavar="NAME=FILE")] = ()
    """File of a further input of the model, such as control=clip.control.mp4. The file applies to all prompts. Only models that
    were trained with an input of your own code need this option. Give the option several times for several inputs."""
    height: Annotated[tuple[int, ...], Heading("Video")] = ()
    """Height of the video in pixels. Give the option several times to set one value per prompt [default: the official
    value of the model]."""
    width: tuple[int, ...] = ()
    """Width of the video in pixels. Give the option several times to set one value per prompt [default: the official
    value of the model]."""
    num_frames: Annotated[tuple[int, ...], Spelling("--frames")] = ()
    """Number of frames: a multiple of 4 plus 1, such as 49 or 81. Give the option several times to set one value per
    prompt [default: the official value of the model]."""
    fps: int | None = None
    """Frame rate of the mp4 files in frames per second [default: the frame rate of the model variant]."""
    seed: tuple[int, ...] = ()
    """Seed of the noise. If there is one seed and several prompts, the seed increases by 1 from prompt to prompt. Give
    the option several times to set one value per prompt [default: 0]."""
    save_latents: bool = False
    """Save the latents of each video in a file next to its mp4 file."""
    num_inference_steps: Annotated[tuple[int, ...], Spelling("--steps"), Heading("Sampling")] = ()
    """Number of denoising steps. Give the option several times to set one value per prompt [default: the official value
    of the model]."""
    guidance_scale: Annotated[tuple[float, ...], Spelling("--guidance")] = ()
    """Scale of classifier-free guidance. With larger values, the video follows the prompt more strongly. Values up to 1
    turn guidance off. Give the option several times to set one value per prompt [default: the official value of the
    model]."""
    guidance_scale_2: Annotated[tuple[float, ...], Spelling("--guidance-2")] = ()
    """Guidance scale of the low-noise expert, in a model with two experts. Give the option several times to set one
    value per prompt [default: the value of --guidance if you set it, else the official value of the model]."""
    flow_shift: Annotated[tuple[float, ...], Spelling("--shift")] = ()
    """Flow shift of the noise schedule. Larger values spend more steps at high noise. Give the option several times to
    set one value per prompt [default: the official value for published model sizes, else the flow shift of the
    model's scheduler]."""
    scheduler: Literal["model", "euler"] = "model"
    """Scheduler of the denoising steps. With `model`, the scheduler of the pipeline in --model is used. Use
    `euler` for LoRAs that sample in 4 steps."""
    causal: Annotated[bool, Heading("Causal sampling")] = False
    """Sample chunk by chunk with a model that was trained with objective.name=teacher_forcing or diffusion_forcing. Every
    chunk attends to the chunks before it, so that a video can be longer than the trained clips."""
    chunk_frames: Annotated[int | None, Field(ge=1)] = None
    """Latent frames of a chunk [default: the value of the training, from --checkpoint or from wands_export.json of the model or
    LoRA]."""
    independent_first_frame: bool | None = None
    """Whether the first latent frame alone is the first chunk [default: the value of the training]."""
    window_frames: Annotated[int | None, Field(ge=1)] = None
    """Number of latent frames before a chunk to which it attends [default: the value of the training]."""
    sink_frames: Annotated[int | None, Field(ge=0)] = None
    """Number of latent frames at the start to which every chunk attends [default: the value of the training]."""
    context_noise: Annotated[float | None, Field(ge=0, lt=1)] = None
    """Noise level of finished chunks when later chunks attend to them [default: the value of the training]."""
    checkpoint: Annotated[Path | None, Heading("Trained weights")] = None
    """Checkpoint to sample with: a step folder (one checkpoint), such as RUN/checkpoints/step_00001000, or a run folder,
    whose newest checkpoint is used. Trained weights replace the weights of --model. A trained LoRA is added to the
    weights of --model."""
    ema: bool = False
    """Use the moving average of the weights in --checkpoint instead of the weights themselves. The recipe of the training
    must have an ema section."""
    lora: Annotated[tuple[str, ...], Spelling(metavar="PATH[=SCALE]")] = ()
    """LoRA to add to the model: a folder, file or Hub id in diffusers, PEFT or ComfyUI layout. PATH=0.5
    multiplies the LoRA's update by 0.5. Give the option several times to add several LoRAs. A model with two
    experts needs a file for one of them: the metadata, the tensor names, or the word high or low in the file name say
    which. A folder may contain one file for each expert."""
    lora_1: Annotated[tuple[str, ...], Spelling(metavar="PATH[=SCALE]")] = ()
    """LoRA to add to the high-noise expert of a model with two experts, whatever the file says. Of a LoRA for both experts,
    only the part for the high-noise expert is used. Give the option several times to add several LoRAs."""
    lora_2: Annotated[tuple[str, ...], Spelling(metavar="PATH[=SCALE]")] = ()
    """LoRA to add to the low-noise expert of a model with two experts, whatever the file says. Of a LoRA for both experts,
    only the part for the low-noise expert is used. Give the option several times to add several LoRAs."""
    transformer: Path | None = None
    """Folder of a diffusers transformer that replaces the transformer of --model. If --model has two experts, the
    folder replaces the high-noise expert. The folder can also be a pipeline that contains a transformer."""
    transformer_2: Path | None = None
    """Folder of a diffusers transformer that replaces the low-noise expert of --model. The folder can also be a
    pipeline with two experts, whose low-noise expert is then used."""
    device: Annotated[str | None, Heading("Speed and memory")] = None
    """Device to run on, such as cuda:1. Leave this option out if you use a launcher such as torchrun [default: cuda
    if available, else cpu]."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of the transformer and the text encoder. `auto` means bf16 on a GPU and fp32 on the CPU."""
    vae_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which the VAE decodes the latents. bf16 is faster and needs less memory, but changes the video slightly."""
    vae_tiling: bool = False
    """Decode each frame in overlapping tiles. Tiles need less memory, but change the video slightly."""
    offload: Literal["none", "model", "sequential"] = "none"
    """Save GPU memory by keeping weights in host memory. With `model`, one model (such as the VAE) at a time moves
    to the GPU. With `sequential`, one layer at a time moves to the GPU. With `none`, all weights stay on the GPU."""
    compile: bool = False
    """Compile the transformer blocks with torch.compile. The first step takes longer, and later steps are faster."""
    attention_backend: Literal["auto", "native"] = "auto"
    """Kernel of self-attention. In bf16 on a GPU, `auto` uses the first of flash3, flash4, cudnn, flash2 and torch that
    is installed and passes a test. `native` uses the attention of diffusers. On a CPU or in fp32, `auto` means
    `native`. If several processes divide the tokens of a video, this option has no effect."""
    guidance_mode: Literal["auto", "sequential", "batched"] = "auto"
    """Classifier-free guidance needs two predictions: one for the prompt, and one for the negative prompt.
    `sequential` computes one prediction after the other. `batched` computes both as one batch, which needs more
    memory. If a launcher starts an even number of processes and all prompts use guidance, `auto` computes each
    prediction on half of the processes. Otherwise, `auto` means `sequential`."""
    ulysses_degree: Annotated[int | None, Field(ge=1)] = None
    """With a launcher, the number of processes that divide the attention heads among themselves (Ulysses) [default: the
    largest valid degree]."""
    ring_degree: Annotated[int | None, Field(ge=1)] = None
    """With a launcher, the number of processes that divide the tokens among themselves (ring attention) [default: the
    number of processes divided by the Ulysses degree. If --guidance-mode gives the prompt one half of the
    processes and the negative prompt the other half, only one half is counted]."""


class EvaluateOptions(PluginOptions):
    """Measure the loss of a run or a model on the clips of a cache.

    Every clip is evaluated at nine noise levels with fixed noise, so the losses of several checkpoints or models can be
    compared. With a launcher, the processes share the clips.

    Examples:
        wands evaluate runs/my-run --data validation-cache/ --ema
        wands evaluate Wan-AI/Wan2.1-T2V-1.3B-Diffusers --data validation-cache/ --json base.json
    """

    model: Annotated[str, ARGUMENT]
    """Model to evaluate: a diffusers pipeline folder or Hub id, or the weights of a run. For a run, give its run
    folder, a step folder (one checkpoint), or its file checkpoints/best. The noise distribution and the seed then come
    from the run's recipe."""
    data: str
    """Cache folder with the clips to evaluate, written by `wands preprocess`."""
    ema: bool = False
    """Evaluate the moving average of the weights of a run instead of the weights themselves."""
    max_clips: int = Field(default=64, gt=0)
    """Largest number of clips to evaluate. If the cache contains more clips, a hash of the clip names chooses the
    clips. Every evaluation of this cache therefore uses the same clips."""
    json_path: Annotated[Path | None, Spelling("--json")] = None
    """Write all mean losses, and the list of the evaluated clips, to this JSON file."""


class ExportOptions(Options):
    """Export a checkpoint as a diffusers pipeline or LoRA files.

    A checkpoint of a full finetune becomes a pipeline folder. A checkpoint of a LoRA run becomes a folder of LoRA files.

    Examples:
        wands export runs/my-finetune --out exported/ --dtype bf16
        wands export runs/my-lora --out merged/ --merge
    """

    checkpoint: Annotated[Path, ARGUMENT]
    """Step folder (one checkpoint) to export, such as RUN/checkpoints/step_00001000. If you give a run folder, its newest
    checkpoint is exported."""
    out: Path
    """Folder to write. The folder must be new or empty, or contain an earlier export, which is replaced."""
    base: str | None = None
    """Pipeline folder or Hub id that provides the VAE, the text encoder and other components that were not trained. If
    the export writes LoRA files, --base cannot be used [default: the model that the run started from]."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which the trained weights are written. Layers that diffusers keeps in fp32 are always written in fp32."""
    max_shard_size: str = "5GB"
    """Largest size of one weight file, such as 5GB. Larger weights are divided into several files. This option has no
    effect on LoRA files."""
    link: Annotated[bool, Spelling("--link/--copy")] = False
    """With --link, make hard links to the files of --base. With --copy, copy these files. Hard links take no disk
    space, but a program that writes into a linked file also changes --base. If the export writes LoRA files,
    --link cannot be used [default: --copy]."""
    merge: bool = False
    """Merge the trained LoRA into the base weights and export the whole pipeline. This option can be used only for LoRA
    runs."""
    ema: bool = False
    """Export the moving average of the trained weights instead of the weights themselves. The recipe of the training must
    have an ema section."""


class PushOptions(Options):
    """Upload an export or a run to the Hugging Face Hub.

    The command also writes a model card. It uses the Hub token in the environment variable HF_TOKEN, or the token that
    `hf auth login` stored. If an upload is interrupted, run the same command again to upload the missing files.

    Examples:
        wands push exported/ my-name/my-model
        wands push runs/my-lora my-name/my-lora
    """

    directory: Annotated[Path, ARGUMENT]
    """Folder to upload: the result of `wands export`, a run folder, or a step folder such as
    RUN/checkpoints/step_00001000. A step folder, or the newest checkpoint of a run folder, is exported first. To choose
    options of the export, such as --dtype and --ema, run `wands export` yourself."""
    repo_id: Annotated[str, ARGUMENT]
    """Repository on the Hub: OWNER/NAME, or NAME for a repository in your own account."""
    public: bool = False
    """Make a new repository public. Without --public, a new repository is private. The visibility of an existing
    repository never changes."""
    revision: str | None = None
    """Branch to which the files are committed. A missing branch is created [default: main]."""
    message: str | None = None
    """Message of the commit [default: a text with the kind of model, the training step and the version of wands]."""
    endpoint: str | None = None
    """URL of the Hub server [default: the value of the environment variable HF_ENDPOINT, else https://huggingface.co]."""
    training: Path | None = None
    """Run folder of the training that produced DIRECTORY, or a step folder such as RUN/checkpoints/step_00001000. If
    DIRECTORY lacks facts for the model card, such as the training step, wands reads these facts from this folder."""
    dry_run: bool = False
    """List the files that would be uploaded and the files that are left out, show the model card, and stop. Nothing is
    written or sent."""


class ConvertOptions(Options):
    """Convert a model or a LoRA to another file layout.

    The layouts are diffusers, official (Wan's own repositories), comfyui, musubi (LoRAs for musubi-tuner) and self-forcing
    (a generator.pt for the scripts of Self-Forcing).

    Examples:
        wands convert Wan2.1-T2V-1.3B/ --to diffusers --out wan-diffusers/
        wands convert style.safetensors --to comfyui --out comfyui/
    """

    source: Annotated[str, ARGUMENT]
    """Model or LoRA to convert. A Wan model is a folder, a file or a Hub id. A LoRA may come from any trainer."""
    to: Literal["diffusers", "official", "comfyui", "musubi", "self-forcing"]
    """File layout to write: the layout of diffusers, of Wan's own repositories (`official`), of ComfyUI, or of musubi-tuner
    (`musubi`, for LoRAs only). `self-forcing` writes the file that the scripts of Self-Forcing and its relatives read, for
    causal models."""
    out: Path
    """Folder to write. The folder must be new or empty."""
    base: str | None = None
    """Folder or Hub id of a model in the layout of --to. The parts that SOURCE lacks, such as a tokenizer, are copied
    from this model."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Dtype in which the transformer or LoRA is written. Layers that diffusers keeps in fp32 are always written in fp32
    [default: the dtype in SOURCE]."""
    forward: bool = True
    """Run diffusers' transformer with the weights of SOURCE and with the converted weights, and check that both
    give equal outputs. --no-forward skips this check."""


class ScoreOptions(Options):
    """Compare samples with reference clips by SSIM, PSNR and latents.

    A sample is a video of `wands infer` or of a training run. Each sample is compared with the clip that has the same
    file name; the extensions may differ. If no clip has the file name of the sample, the sample is compared with the clip
    whose caption is the prompt of the sample. The clip is first converted to the frame rate and the size of the sample.
    If the numbers of frames then differ, the longer video is cut. SSIM and PSNR are means over the frames. The latent
    correlation is the correlation of the VAE latents of sample and clip. It compares colors and layout, and is less
    sensitive to details than SSIM.

    Examples:
        wands tools score runs/my-run/samples --reference clips/
        wands tools score videos/ --reference clips/ --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --json score.json
    """

    samples: Annotated[Path, ARGUMENT]
    """Folder with sampled videos: the value of --out in `wands infer`, or the folder `samples` of a run. Subfolders
    are searched too."""
    reference: str
    """Real clips with which the sampled videos are compared. They can have any form that `wands preprocess` reads, or be a
    folder of videos without captions."""
    model: str | None = None
    """Diffusers pipeline folder or Hub id of a model. The model's VAE encodes each sample and the clip that the
    sample is compared with, and the correlation of the two latents is computed. Without --model, only SSIM and PSNR
    are computed."""
    json_path: Annotated[Path | None, Spelling("--json")] = None
    """Write the SSIM, PSNR and latent correlation of each sample to this JSON file."""


class VerifyOptions(Options):
    """Find damaged files of a run, a cache or a model.

    The command reads all files, and compares each file with the hash that wands or the Hub stored for it. The hashes find
    accidental damage, but not deliberate changes. The exit code is 0 if all files are intact, else 2. `python -m
    data_tools.verify` checks more parts of a cache.

    Examples:
        wands tools verify runs/my-run
        wands tools verify cache/
    """

    path: Annotated[Path, ARGUMENT]
    """Folder to check: a run folder, a step folder (one checkpoint) of a run, a latent cache, or a model. The model must come
    from wands or from the Hub, because only these models have stored hashes."""


class SelftestOptions(PluginOptions):
    """Compare a model with stock diffusers on this machine.

    The command prints one line per check. The exit code is 0 if no check fails, 1 if a check fails, and 2 if --model or
    another option is wrong. With a launcher, only the checks of context parallelism run.

    Examples:
        wands tools selftest --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --only vae
        torchrun --nproc-per-node 4 -m wands tools selftest --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers
    """

    model: str
    """Diffusers pipeline folder, or the Hub id of a model that is already downloaded."""
    clip: Path | None = None
    """Video file for the checks of the VAE [default: a generated test video]."""
    device: Literal["cuda", "cpu"] | None = None
    """Device to run on [default: cuda if available, else cpu]."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of the text encoder and the transformer [default: bf16 on cuda, fp32 on cpu]."""
    only: Annotated[tuple[str, ...], Spelling(metavar="NAME")] = ()
    """Name of a check to run, or of a group of checks, such as vae, text or packed. For a wrong name, the error
    message lists all names. Give the option several times to run several checks. Without --only, all checks run."""

"""The click group: each command parses, calls one function in `wands.commands`, and a WandsError becomes exit code 2.

Heavy packages are imported inside the commands, so that `wands --help` answers at once.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from wands import __version__
from wands.errors import WandsError


class _Group(click.Group):
    """Turns a WandsError into one printed message and exit code 2, on one rank when all ranks say the same."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except WandsError as error:
            formed = _process_group_formed()
            # Before the process group forms the ranks of a node find the same mistake; afterwards one may be alone with it.
            speaks = (
                os.environ.get("RANK", "0")
                if formed
                else os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
            )
            if speaks == "0" or (formed and not error.agreed):
                rank = os.environ.get("RANK")
                where = f" [rank {rank}]" if rank not in (None, "0") else ""
                click.echo(f"wands{where}: {error}", err=True)
            sys.stdout.flush()
            sys.stderr.flush()
            if speaks != "0":
                time.sleep(1.0)  # a launcher that sees one rank leave stops the others: let the first speak
            if formed:
                os._exit(2)  # the other ranks may wait in a collective: leave without their goodbye
            sys.exit(2)


def _process_group_formed() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="wands")
@click.option("--local_rank", "--local-rank", type=int, default=None, hidden=True, help="Set by launchers.")
@click.option("-v", "--verbose", is_flag=True, help="Show debug messages.")
def main(local_rank: int | None, verbose: bool) -> None:
    """Train the Wan 2.1 / 2.2 video diffusion transformer: raw clips in, a model on the Hub out."""
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    # DeepSpeed calls collectives by names that torch 2.13 renamed; each would be told once per call site and rank.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    rank = os.environ.get("RANK", "0")
    level = logging.DEBUG if verbose else logging.INFO if rank == "0" else logging.ERROR
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("wands").setLevel(level)
    # diffusers imports it where it is installed, and on some CPUs it misses a kernel that wands does not use.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


_CLIP_OPTIONS = (
    click.option("--height", type=int, help="Exact height in pixels; needs --width."),
    click.option("--width", type=int, help="Exact width in pixels; needs --height."),
    click.option(
        "--center-crop", is_flag=True, help="Fill --height x --width by cutting, not by stretching."
    ),
    click.option(
        "--max-pixels",
        type=int,
        multiple=True,
        help="Scale larger clips down to this area; each keeps its aspect [default: 399360]. Given several times, each clip is "
        "kept at every size that comes of it; the first stays with the cache, further ones may come and go.",
    ),
    click.option(
        "--max-frames",
        type=int,
        default=81,
        show_default=True,
        help="Longest sample, in frames (4k+1 is kept); 0 keeps whole clips.",
    ),
    click.option(
        "--clip-mode",
        type=click.Choice(["head", "middle", "slide"]),
        default="head",
        show_default=True,
        help="Which part of a longer clip: its start, its middle, or all of it as several samples.",
    ),
    click.option("--split", default="train", show_default=True, help="Split of a datasets source."),
    click.option("--video-column", help="Column with the video of a datasets source."),
    click.option("--caption-column", help="Column with the caption of a datasets source."),
    click.option("--fps", type=float, help="Frame rate to resample to [default: the variant's]."),
)


def _clip_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a clip becomes, told to `preprocess` and `check` in the same words."""
    for option in reversed(_CLIP_OPTIONS):
        command = option(command)
    return command


_POSITIVE = click.FloatRange(0, min_open=True)
_set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Change a key of the recipe; repeatable.",
)


@main.command()
@click.argument("source")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Cache folder; a run that was cut off goes on.",
)
@click.option(
    "--model", required=True, help="Diffusers pipeline folder or Hub id whose VAE and text encoder are used."
)
@_clip_options
@click.option("--device", help="Where the encoders run [default: cuda if there is one].")
@click.option("--text-device", help="Where the text encoder runs [default: --device].")
@click.option(
    "--text-dtype",
    type=click.Choice(["bf16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Of the text encoder.",
)
@click.option(
    "--vae-dtype",
    type=click.Choice(["bf16", "fp32"]),
    default="fp32",
    show_default=True,
    help="Of the VAE. bf16 takes half the memory; latents differ by about 2 % of their spread from those of fp32, where storing "
    "them in bf16, which is always done, costs 0.2 %.",
)
@click.option(
    "--vae-tiling",
    is_flag=True,
    help="Encode frames in tiles of 256 pixels, 64 of them blended: the memory of one tile at any size, more work; latents "
    "differ by about 2 % of their spread from those of whole frames, most near the seams.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Processes to start; each takes a GPU, in turn, and the next clip that nobody has.",
)
def preprocess(source: str, out: Path, model: str, max_frames: int, **options: Any) -> None:
    """Encode SOURCE into a latent cache, or go on with one.

    Several processes: --workers N, or torchrun --nproc-per-node N -m wands preprocess ... with SOURCE and --out on a shared disk.
    SOURCE is a folder of clips and images with .txt or .json captions of the same name, a table such as metadata.csv / .jsonl /
    .json or captions.json (or a folder that holds one), tar archives, or a Hugging Face datasets name or folder.
    """
    from wands.commands.preprocess.preprocess import preprocess as run

    report = run(source, out, model, max_frames=max_frames or None, **options)
    if report is not None:  # the first rank has it
        click.echo(report.render())


@main.command()
@click.argument("source")
@click.option(
    "--model", help="Pipeline folder or Hub id that tells the variant and counts caption tokens exactly."
)
@_clip_options
@click.option(
    "--max-tokens", type=int, default=32760, show_default=True, help="Bin size whose fill is predicted."
)
@click.option("--bins-per-step", type=int, default=1, show_default=True, help="Bins of an optimizer step.")
@click.option("--workers", "num_workers", type=click.IntRange(1), help="Processes [default: one per core].")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all findings to this file.")
@click.option(
    "--html", "html_path", type=click.Path(path_type=Path), help="Write a page with thumbnails to this file."
)
def check(
    source: str, max_frames: int, json_path: Path | None, html_path: Path | None, **options: Any
) -> None:
    """Say what wands preprocess will make of each clip of SOURCE, and which clips it will reject and why.

    Takes SOURCE and the options of wands preprocess; needs no model and no GPU. Exit code 0 when every clip can be used, with
    or without warnings, 1 when any is rejected, 2 when SOURCE or an option is wrong.
    """
    from wands.commands.check.check import check as run
    from wands.commands.check.check import save_report

    report = run(source, max_frames=max_frames or None, thumbnails=html_path is not None, **options)
    click.echo(report.render())
    save_report(report, json_path, html_path)
    if report.count("rejected"):
        sys.exit(1)


@main.command()
@click.argument("recipe", required=False)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="JSON-lines file to write.")
@_set_option
@click.option(
    "--epoch", type=click.IntRange(0), default=0, show_default=True, help="Pass over the data to plan."
)
def pack(recipe: str | None, out: Path, overrides: tuple[str, ...], epoch: int) -> None:
    """Write the bins and steps of an epoch that wands train RECIPE will forward, to look at."""
    from wands.commands.pack import pack as run

    click.echo(run(recipe, overrides=overrides, out=out, epoch=epoch).render())


@main.command()
@click.argument("recipe", required=False)
@click.option("--variant", help="Plan with the shape of this published model; none of its files is needed.")
@click.option("--hardware", default="h100", show_default=True, help="Kind of GPU; a wrong name lists them.")
@click.option("--gpus", type=click.IntRange(1), default=8, show_default=True, help="All of them.")
@click.option("--gpu-memory", type=_POSITIVE, help="GB of one GPU, instead of the data sheet's.")
@click.option("--host-memory", type=_POSITIVE, help="GB of a node, likewise.")
@click.option(
    "--node-bandwidth", type=_POSITIVE, help="GB/s of one GPU inside a node, one direction, likewise."
)
@click.option("--network-bandwidth", type=_POSITIVE, help="GB/s of one GPU between nodes, likewise.")
@click.option("--gpus-per-node", type=click.IntRange(1), help="Likewise.")
@click.option(
    "--size",
    default="480p",
    show_default=True,
    help="480p, 720p or HEIGHTxWIDTH, where the recipe names no data.",
)
@click.option("--frames", type=click.IntRange(1), default=81, show_default=True, help="Of a clip, likewise.")
@click.option(
    "--clips", type=click.IntRange(1), default=1000, show_default=True, help="Their number, likewise."
)
@click.option("--deepspeed", type=click.Path(path_type=Path), help="Consider this DeepSpeed JSON only.")
@_set_option
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write the best as DIR/recipe.yaml and DIR/deepspeed.json."
)
@click.option("--table", is_flag=True, help="Print which published model fits which GPUs, and stop.")
def plan(recipe: str | None, table: bool, **options: Any) -> None:
    """Say what of RECIPE fits a machine before anything is started: sharding, degrees, recomputation, bin size, memory, time."""
    from wands.commands.plan import plan as run
    from wands.commands.plan import what_fits
    from wands.planning.hardware import machine_named

    own = ("gpu_memory", "host_memory", "node_bandwidth", "network_bandwidth", "gpus_per_node")
    machine = machine_named(options.pop("hardware"), **{key: options.pop(key) for key in own})
    click.echo(what_fits() if table else run(recipe, machine=machine, **options))


@main.command()
@click.argument("recipe", required=False)
@click.option(
    "--deepspeed", "ds_config", type=click.Path(path_type=Path), help="DeepSpeed JSON [default: ZeRO-2]."
)
@_set_option
@click.option(
    "--resume",
    is_flag=False,
    flag_value="auto",
    metavar="[PATH]",
    help="Go on from the newest checkpoint, or from PATH.",
)
@click.option("--dry-run", is_flag=True, help="Print what would happen and stop.")
@click.option("--force", is_flag=True, help="Start although the memory is not expected to be enough.")
@click.option(
    "--show-timesteps",
    is_flag=True,
    help="Print a histogram of the timesteps that training will draw and stop.",
)
def train(
    recipe: str | None,
    ds_config: Path | None,
    overrides: tuple[str, ...],
    resume: str | None,
    dry_run: bool,
    force: bool,
    show_timesteps: bool,
) -> None:
    """Train as RECIPE says: a YAML file or the name of a shipped recipe.

    One process: wands train. Several: deepspeed --num_gpus N --module wands train ..., or torchrun -m wands train ...
    """
    from wands.commands.train import run_train

    run_train(
        recipe,
        deepspeed=ds_config,
        overrides=overrides,
        resume=resume,
        dry_run=dry_run,
        show_timesteps=show_timesteps,
        log=_say,
        force=force,
    )
    _leave()


@main.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder to write: new, empty or an earlier export.",
)
@click.option(
    "--base",
    help="Folder or Hub id of the pipeline whose other parts are taken [default: the model that the run started from]; not for "
    "LoRA files.",
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Of the trained weights, but for what diffusers keeps in fp32; the base's other parts stay as they are.",
)
@click.option(
    "--max-shard-size",
    default="5GB",
    show_default=True,
    help="Largest file of a pipeline's trained weights; not for LoRA files.",
)
@click.option(
    "--copy", is_flag=True, help="Copy the base's files instead of hard-linking them; not for LoRA files."
)
@click.option("--merge", is_flag=True, help="Of a LoRA run: the whole pipeline, the LoRA merged in.")
@click.option("--ema", is_flag=True, help="The moving average of what was trained, of a run with ema.")
def export(checkpoint: Path, out: Path, copy: bool, **options: Any) -> None:
    """Turn CHECKPOINT, a run folder or one of its steps, into a diffusers pipeline folder; of a LoRA run, into LoRA files."""
    from wands.commands.export import export as run

    click.echo(run(checkpoint, out, link=not copy, **options))


@main.command()
@click.argument("source")
@click.option(
    "--to",
    type=click.Choice(["diffusers", "official", "comfyui"]),
    required=True,
    help="Whose names, files and folders.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="New or empty folder to write.")
@click.option(
    "--rest-of",
    help="Folder or Hub id in the layout of --to whose other parts are taken, such as a tokenizer.",
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16"]),
    help="Of the DiT or LoRA, but for what diffusers keeps in fp32 [default: as it is].",
)
@click.option(
    "--forward/--no-forward",
    default=True,
    help="Compare what stock diffusers computes from source and result.",
)
def convert(source: str, out: Path, **options: Any) -> None:
    """Write SOURCE in another layout: a folder, Hub id or file of a Wan model, or a LoRA of any trainer."""
    from wands.commands.convert.convert import convert as run

    click.echo(run(source, out, **options))


@main.command()
@click.option("--model", required=True, help="Diffusers pipeline folder or Hub id.")
@click.option(
    "--prompt", "prompts", multiple=True, help="What to show; repeatable. One at least, here or in a file."
)
@click.option(
    "--prompts-file",
    type=click.Path(path_type=Path),
    help=".txt with a prompt a line, or .jsonl with options per line.",
)
@click.option(
    "--out",
    "out_dir",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder for mp4s, contact sheet and record.",
)
@click.option(
    "--height",
    type=int,
    multiple=True,
    help="Pixels; this and the options down to --last-image once for all prompts or once each [default: 480].",
)
@click.option("--width", type=int, multiple=True, help="Pixels [default: 832].")
@click.option("--frames", "num_frames", type=int, multiple=True, help="4k+1 frames [default: 81].")
@click.option(
    "--steps", "num_inference_steps", type=int, multiple=True, help="Denoising steps [default: 50]."
)
@click.option(
    "--guidance",
    "guidance_scale",
    type=float,
    multiple=True,
    help="Classifier-free guidance; up to 1 is none [default: 5].",
)
@click.option(
    "--guidance-2",
    "guidance_scale_2",
    type=float,
    multiple=True,
    help="Of the low-noise expert of two [default: --guidance].",
)
@click.option(
    "--shift", "flow_shift", type=float, multiple=True, help="Flow shift [default: the scheduler's]."
)
@click.option("--seed", type=int, multiple=True, help="Given once, prompt i gets seed + i [default: 0].")
@click.option(
    "--negative-prompt", multiple=True, help="What not to show; needs --guidance above 1 [default: nothing]."
)
@click.option(
    "--image",
    multiple=True,
    help="Picture to start from, or a video, of which the first frame; cut to the size.",
)
@click.option("--last-image", multiple=True, help="Picture to end at, or a video, of which the last frame.")
@click.option(
    "--transformer",
    type=click.Path(path_type=Path),
    help="Folder of a diffusers transformer, or of a pipeline with one, that replaces the pipeline's.",
)
@click.option(
    "--transformer-2",
    type=click.Path(path_type=Path),
    help="The same for the low-noise expert of two.",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Run or step folder of wands train whose weights are used.",
)
@click.option("--ema", is_flag=True, help="The moving average that --checkpoint holds, of a run with ema.")
@click.option(
    "--lora",
    multiple=True,
    metavar="PATH[=SCALE]",
    help="Folder, file or Hub id of a LoRA to add (diffusers, PEFT or ComfyUI); repeatable. Of two experts it goes to those that "
    "its keys, or the folders or files in its folder, name (high_noise, low_noise), else to the high-noise one.",
)
@click.option(
    "--lora-2",
    multiple=True,
    metavar="PATH[=SCALE]",
    help="The same for the low-noise expert; of one with both, the low-noise half is taken.",
)
@click.option(
    "--offload",
    type=click.Choice(["none", "model", "sequential"]),
    default="none",
    show_default=True,
    help="Keep weights on the host and bring a model, or a layer, at a time to the GPU.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bf16", "fp32"]),
    default="auto",
    show_default=True,
    help="Of DiT and text encoder; auto is bf16 on a GPU and fp32 on the CPU.",
)
@click.option("--device", help="Where to sample, in one process [default: cuda if there is one].")
@click.option("--fps", type=int, help="Of the mp4 [default: the variant's].")
@click.option("--save-latents", is_flag=True, help="Keep each sample's latents beside its mp4.")
@click.option("--ulysses-degree", type=click.IntRange(1), help="Ranks that share heads [default: the most].")
@click.option("--ring-degree", type=click.IntRange(1), help="Ranks that share tokens [default: the rest].")
def infer(model: str, prompts: tuple[str, ...], **options: Any) -> None:
    """Sample videos from prompts, and pictures, with a pipeline or with the weights of a training checkpoint.

    One process: wands infer. Several, which share each video: torchrun --nproc-per-node N -m wands infer ...
    """
    from wands.commands.infer import infer as run

    results = run(model, prompts, **options)
    for result in results:
        click.echo(f"{result.video}  seed {result.request.seed}  {result.seconds:.1f} s")
    if results:  # the first rank has them
        click.echo(f"contact sheet {results[0].contact_sheet}")
    _leave()


@main.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("repo_id")
@click.option("--public", is_flag=True, help="Make a new repository public [default: private].")
@click.option("--revision", help="Branch to commit to, made if missing [default: main].")
@click.option("--message", help="Commit message [default: says what was uploaded].")
@click.option("--endpoint", help="Address of the Hub [default: HF_ENDPOINT, else https://huggingface.co].")
@click.option(
    "--training",
    type=click.Path(path_type=Path),
    help="Run or step folder that the card takes from what DIRECTORY's record lacks.",
)
def push(directory: Path, repo_id: str, **options: Any) -> None:
    """Upload DIRECTORY, written by wands export, to REPO_ID (owner/name, or a name in your own account) with a model card.

    The token comes from HF_TOKEN or `hf auth login`. After an upload that was cut off, the same command sends what is missing.
    """
    from wands.commands.push import push as run

    click.echo(run(directory, repo_id, **options))


@main.command()
@click.option(
    "--model", required=True, help="Diffusers pipeline folder, or a Hub id that is on this machine."
)
@click.option(
    "--clip", type=click.Path(path_type=Path), help="Video for the VAE's checks [default: made up]."
)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="[default: cuda if there is one].")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16"]),
    help="Of text encoder and DiT at work [default: bf16 on cuda, fp32 on cpu].",
)
@click.option("--only", multiple=True, metavar="NAME", help="A check, or a group such as vae; repeatable.")
def selftest(model: str, only: tuple[str, ...], **options: Any) -> None:
    """Hold MODEL's own weights, on this machine, against stock diffusers: a line for each check.

    Exit code 0 when none fails, 1 when one does, 2 when MODEL or an option is wrong. Context parallelism is checked under a
    launcher, which then checks nothing else: torchrun --nproc-per-node N -m wands selftest --model MODEL
    """
    from wands.commands.selftest.selftest import selftest as run

    found = {"pass": 0, "fail": 0, "skipped": 0}
    for result in run(model, only=only, **options):
        found[result.status] += 1
        if os.environ.get("RANK", "0") == "0":
            _say(str(result))
    if os.environ.get("RANK", "0") == "0":
        _say("{pass} passed, {fail} failed, {skipped} skipped".format(**found))
    _leave(int(found["fail"] > 0))


def _leave(code: int = 0) -> None:
    """End a rank at once: its work is on disk.

    Taking the collectives' threads apart at interpreter exit was seen to abort a finished run with gloo.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1" and _process_group_formed():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)


def _say(text: str) -> None:
    click.echo(text)
    sys.stdout.flush()

"""The click group: each command parses, calls one function in `wands.commands`, and a WandsError becomes exit code 2.

Heavy packages are imported inside the commands, so that `wands --help` answers at once.
"""

from __future__ import annotations

import logging
import os
import sys
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
            if _should_print(error):
                rank = os.environ.get("RANK")
                where = f" [rank {rank}]" if rank not in (None, "0") else ""
                click.echo(f"wands{where}: {error}", err=True)
            sys.stdout.flush()
            sys.stderr.flush()
            if os.environ.get("WORLD_SIZE", "1") != "1":
                os._exit(2)  # the other ranks may wait in a collective: leave without their goodbye
            sys.exit(2)


def _should_print(error: WandsError) -> bool:
    if os.environ.get("RANK", "0") == "0":
        return True
    torch = sys.modules.get("torch")
    formed = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    # Before the process group forms every rank finds the same mistake; afterwards one may be alone with it.
    return formed and not error.agreed


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="wands")
@click.option("--local_rank", "--local-rank", type=int, default=None, hidden=True, help="Set by launchers.")
@click.option("-v", "--verbose", is_flag=True, help="Show debug messages.")
def main(local_rank: int | None, verbose: bool) -> None:
    """Train the Wan 2.1 / 2.2 video diffusion transformer: raw clips in, a model on the Hub out."""
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    rank = os.environ.get("RANK", "0")
    level = logging.DEBUG if verbose else logging.INFO if rank == "0" else logging.ERROR
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("wands").setLevel(level)


@main.command()
@click.argument("source")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Cache folder; a run that was cut off goes on.")
@click.option("--model", required=True, help="Diffusers pipeline folder or Hub id whose VAE and text encoder are used.")
@click.option("--height", type=int, help="Exact height in pixels; needs --width.")
@click.option("--width", type=int, help="Exact width in pixels; needs --height.")
@click.option("--center-crop", is_flag=True, help="Fill --height x --width by cutting, not by stretching.")
@click.option("--max-pixels", type=int, help="Scale larger clips down to this area; each keeps its aspect [default: 399360].")
@click.option("--max-frames", type=int, default=81, show_default=True, help="Longest sample, in frames (4k+1 is kept).")
@click.option("--clip-mode", type=click.Choice(["head", "middle", "slide"]), default="head", show_default=True,
              help="Which part of a longer clip: its start, its middle, or all of it as several samples.")
@click.option("--split", default="train", show_default=True, help="Split of a datasets source.")
@click.option("--video-column", help="Column with the video of a datasets source.")
@click.option("--caption-column", help="Column with the caption of a datasets source.")
@click.option("--device", help="Where the encoders run [default: cuda if there is one].")
def preprocess(source: str, out: Path, model: str, **options: Any) -> None:
    """Encode SOURCE into a latent cache.

    SOURCE is a folder of clips with .txt or .json captions of the same name, a metadata.csv / .jsonl / .json (or a folder that
    holds one), or a Hugging Face datasets name or folder.
    """
    from wands.commands.preprocess import preprocess as run

    click.echo(run(source, out, model, **options).render())


@main.command()
@click.argument("recipe", required=False)
@click.option("--deepspeed", "ds_config", type=click.Path(path_type=Path), help="DeepSpeed JSON [default: ZeRO-2].")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Change a key of the recipe; repeatable.")
@click.option("--resume", is_flag=False, flag_value="auto", metavar="[PATH]", help="Go on from the newest checkpoint, or from PATH.")
@click.option("--dry-run", is_flag=True, help="Print what would happen and stop.")
@click.option("--show-timesteps", is_flag=True, help="Print a histogram of the timesteps that training will draw and stop.")
def train(recipe: str | None, ds_config: Path | None, overrides: tuple[str, ...], resume: str | None, dry_run: bool, show_timesteps: bool) -> None:
    """Train as RECIPE says: a YAML file or the name of a shipped recipe.

    One process: wands train. Several: deepspeed --num_gpus N --module wands train ..., or torchrun -m wands train ...
    """
    from wands.commands.train import run_train

    run_train(recipe, deepspeed=ds_config, overrides=overrides, resume=resume, dry_run=dry_run, show_timesteps=show_timesteps, say=_say)


def _say(text: str) -> None:
    click.echo(text)
    sys.stdout.flush()


"""The `wands` command and its subcommands.

Each subcommand parses its options and calls one function. If the function raises a WandsError, `wands` exits with code 2.
Heavy packages are imported inside the functions of the subcommands, so that `wands --help` answers at once.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from typing import Any

import click

from wands import __version__
from wands.config import options as opts
from wands.config.click_options import command
from wands.errors import WandsError


class _CommandGroup(click.Group):
    """Group of the `wands` subcommands. The help page lists the subcommands in the order of their declaration.

    If a subcommand raises a WandsError, the group prints the message and exits with code 2. If all ranks of a node or of the
    process group raise the same error, only one of these ranks prints the message.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except WandsError as error:
            formed = _process_group_formed()
            # Before the process group exists, all ranks of a node raise the same error. Later a single rank may fail.
            local_rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
            printing_rank = os.environ.get("RANK", "0") if formed else local_rank
            if printing_rank == "0" or (formed and not error.agreed):
                rank = os.environ.get("RANK")
                origin = f" [rank {rank}]" if rank not in (None, "0") else ""
                click.echo(f"wands{origin}: {error}", err=True)
            sys.stdout.flush()
            sys.stderr.flush()
            if printing_rank != "0":
                time.sleep(
                    1.0
                )  # a launcher stops all ranks when one exits: let the printing rank finish first
            if formed:
                os._exit(
                    2
                )  # the other ranks may wait in a collective: exit without destroying the process group
            sys.exit(2)


@click.group(
    cls=_CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="wands")
@click.option("--local_rank", "--local-rank", type=int, default=None, hidden=True, help="Set by launchers.")
@click.option("-v", "--verbose", is_flag=True, help="Print debug messages.")
def main(local_rank: int | None, verbose: bool) -> None:
    """Train the Wan 2.1 / 2.2 video diffusion transformers, from raw clips to a model on the Hugging Face Hub."""
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    # DeepSpeed calls collectives by names that torch 2.13 renamed, which would warn once per call site and rank.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    rank = os.environ.get("RANK", "0")
    level = logging.DEBUG if verbose else logging.INFO if rank == "0" else logging.ERROR
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("wands").setLevel(level)
    # diffusers imports bitsandbytes if it is installed; on some CPUs that warns about a kernel which wands does not use.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


@command(main, opts.RecipesOptions)
def _recipes(options: opts.RecipesOptions) -> None:
    from wands.config.reference import describe_recipes

    click.echo(describe_recipes(options.name))


@command(main, opts.ConfigOptions)
def _config(options: opts.ConfigOptions) -> None:
    from wands.config.reference import describe_config

    click.echo(describe_config(options.key))


@command(main, opts.CheckOptions)
def _check(options: opts.CheckOptions) -> None:
    from wands.commands.check.check import check, save_report

    report = check(options)
    click.echo(report.render())
    save_report(report, options.json_path, options.html_path)
    if report.count("rejected"):
        sys.exit(1)


@command(main, opts.PreprocessOptions)
def _preprocess(options: opts.PreprocessOptions) -> None:
    from wands.commands.preprocess.preprocess import preprocess

    if report := preprocess(options):  # only the first rank returns a report
        click.echo(report.render())


@command(main, opts.PackOptions)
def _pack(options: opts.PackOptions) -> None:
    from wands.commands.pack import pack

    click.echo(pack(options))


@command(main, opts.PlanOptions)
def _plan(options: opts.PlanOptions) -> None:
    from wands.commands.plan import plan

    click.echo(plan(options))


@command(main, opts.TrainOptions)
def _train(options: opts.TrainOptions) -> None:
    from wands.commands.train import run_train

    run_train(options, _echo)
    _exit_rank()


@command(main, opts.InferOptions)
def _infer(options: opts.InferOptions) -> None:
    from wands.commands.infer import infer

    results = infer(options)
    for result in results:
        click.echo(f"{result.video}  seed {result.request.seed}  {result.seconds:.1f} s")
    if results:  # only the first rank returns results
        click.echo(f"contact sheet {results[0].contact_sheet}")
    _exit_rank()


@command(main, opts.ExportOptions)
def _export(options: opts.ExportOptions) -> None:
    from wands.commands.export import export

    click.echo(export(options))


@command(main, opts.PushOptions)
def _push(options: opts.PushOptions) -> None:
    from wands.commands.push import push

    click.echo(push(options))


@command(main, opts.ConvertOptions)
def _convert(options: opts.ConvertOptions) -> None:
    from wands.commands.convert.convert import convert

    click.echo(convert(**dict(options)))


@command(main, opts.SelftestOptions)
def _selftest(options: opts.SelftestOptions) -> None:
    from wands.commands.selftest.selftest import selftest

    counts = {"pass": 0, "fail": 0, "skipped": 0}
    echo = _echo if os.environ.get("RANK", "0") == "0" else lambda text: None
    for result in selftest(options):
        counts[result.status] += 1
        echo(str(result))
    echo("{pass} passed, {fail} failed, {skipped} skipped".format(**counts))
    _exit_rank(int(counts["fail"] > 0))


def _process_group_formed() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def _exit_rank(code: int = 0) -> None:
    """Exit this process with an exit code; return to the caller if the code is 0 and this is the only process.

    A process of a distributed run exits without the shutdown of the Python interpreter. During this shutdown, threads of the
    communication library gloo can abort a process that has finished its work.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1" and _process_group_formed():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)


def _echo(text: str) -> None:
    click.echo(text)
    sys.stdout.flush()

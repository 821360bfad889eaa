"""The `wands` command, its subcommands, and the environment and exit code of its process.

The exit code is 3 after a RankError or DiskError, after which a restart may help, and 2 after any other WandsError. Heavy
packages are imported inside the functions of the subcommands, so that `wands --help` answers at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pkgutil
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from wands.config import options as opts
from wands.config.base import Options
from wands.config.click_options import build_command
from wands.disk_errors import disk_number, failed_access
from wands.distributed.gpu_settings import GPU_SETTINGS, set_gpu_settings
from wands.errors import WandsError
from wands.texts import escape_unprintable, log_to_stderr, printable, safe_lines
from wands.variants import sampling_table
from wands.version import __version__


class _OrderedGroup(click.Group):
    """Group whose help page lists the subcommands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class _MainGroup(_OrderedGroup):
    """The command `wands`, which prints an error of a subcommand as one sentence."""

    def invoke(self, ctx: click.Context) -> None:
        try:
            super().invoke(ctx)
            _exit_rank()
        except WandsError as error:
            _exit_with_error(error)
        except OSError as error:
            if not disk_number(error):
                raise
            logging.getLogger(__name__).debug("the file system failed", exc_info=True)
            _exit_with_error(failed_access(error))


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(cls=_MainGroup, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="wands")
@click.option("--local_rank", "--local-rank", type=int, default=None, hidden=True, help="Rank on this node.")
@click.option("-v", "--verbose", is_flag=True, help="Print debug messages, and warnings of other packages.")
def main(local_rank: int | None, verbose: bool) -> None:
    """Train the Wan 2.1 / 2.2 video diffusion transformers, from raw clips to a model on the Hugging Face Hub."""
    rank = os.environ.get("RANK", "0")
    level = logging.DEBUG if verbose else logging.INFO if rank == "0" else logging.ERROR
    escape_unprintable()
    log_to_stderr(layout="%(levelname)s %(name)s: %(message)s" if verbose else "%(message)s")
    if not verbose:
        warnings.simplefilter("ignore")  # of torch and other libraries
        # DeepSpeed sets the level of its logger when it is imported, but keeps the filters.
        logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    logging.getLogger("wands").setLevel(level)
    _set_environment(local_rank)
    # diffusers imports bitsandbytes if it is installed; on some CPUs that warns about a kernel which wands does not use.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def _check(options: opts.CheckOptions) -> None:
    from wands.commands.check.check import check
    from wands.commands.check.check_report import save_report

    report = check(options)
    click.echo(report.render())
    save_report(report, options.json_path, options.html_path)
    if not (options.json_path or options.html_path):
        click.echo("every clip: add --html clips.html, or --json clips.json for programs")
    if report.totals()["rejected"]:
        sys.exit(1)


def _train(options: opts.TrainOptions) -> None:
    from wands.watch.launcher import find_launcher

    launcher = find_launcher()  # now: the imports of the next line take seconds
    from wands.commands.train import run_train

    run_train(options, _echo, launcher)


def _profile(options: opts.ProfileOptions) -> None:
    _train(options.train_options())


def _infer(options: opts.InferOptions) -> None:
    from wands.commands.infer import infer

    results = infer(options)
    for result in results:
        click.echo(f"{printable(str(result.video))}  seed {result.request.seed}  {result.seconds:.1f} s")
    if results:  # only the first rank returns results
        click.echo(f"contact sheet {results[0].contact_sheet}")


def _selftest(options: opts.SelftestOptions) -> None:
    from wands.selftest.selftest import selftest

    counts = {"pass": 0, "fail": 0, "skipped": 0}
    echo = _echo if os.environ.get("RANK", "0") == "0" else lambda text: None
    for result in selftest(options):
        counts[result.status] += 1
        echo(str(result))
    echo("{pass} passed, {fail} failed, {skipped} skipped".format(**counts))
    _exit_rank(int(counts["fail"] > 0))


def _print_result(function: str, options: Options) -> None:
    """Call the function with the name `function` ("module:function") with the options, and print its result."""
    result = pkgutil.resolve_name(function)(options)
    if result is not None:  # in a distributed run, only the first rank returns a result
        # A path is printed as it is, because a shell may use it.
        click.echo(result if isinstance(result, Path) else safe_lines(str(result)))


def _echo(text: str, *, err: bool = False) -> None:
    # A closed terminal or pipe must not end a run before its last checkpoint.
    with contextlib.suppress(OSError):
        click.echo(safe_lines(text), err=err)
        sys.stdout.flush()


def _set_environment(local_rank: int | None) -> None:
    """Set the environment of this process and its children. Variables of the user stay, except PYTHONSAFEPATH.

    `local_rank` is the value of --local_rank, with which some launchers pass the rank on the node.
    """
    # Child processes must not import modules from the current folder: every decoder would import a file numpy.py there.
    os.environ["PYTHONSAFEPATH"] = "1"
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    set_gpu_settings()  # before PyTorch is imported, and for the processes that a command starts
    for name in GPU_SETTINGS:
        logging.getLogger(__name__).debug("%s=%s", name, os.environ[name])


def _exit_with_error(error: WandsError) -> None:
    """Print an error, once if all ranks of a node or of the process group raise it, and exit with its `exit_code`."""
    formed = _process_group_formed()
    # Before the process group exists, all ranks of a node raise the same error. Later a single rank may fail.
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    printing_rank = os.environ.get("RANK", "0") if formed else local_rank
    if printing_rank == "0" or (formed and not error.agreed):
        rank = os.environ.get("RANK")
        origin = f" [rank {rank}]" if rank not in (None, "0") else ""
        _echo(f"wands{origin}: {error}", err=True)
    if printing_rank != "0":
        # A launcher stops all ranks when one exits: let the printing rank finish first.
        time.sleep(1.0)
    _exit_rank(error.exit_code)


def _exit_rank(code: int = 0) -> None:
    """End this process, or return if the code is 0 and no other ranks exist.

    In a process group, the process ends without a shutdown of the interpreter, during which threads of gloo could abort it.
    Destroying the group would wait for ranks that may be stuck in a collective.
    """
    if _process_group_formed() and (code or os.environ.get("WORLD_SIZE", "1") != "1"):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)


def _process_group_formed() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


COMMANDS: dict[type[Options], str | Callable[[Any], None]] = {
    opts.RecipesOptions: "wands.config.reference:describe_recipes",
    opts.InitOptions: "wands.commands.init.init:init",
    opts.SplitOptions: "data_tools.footage.shots:split",
    opts.CaptionOptions: "data_tools.footage.write_captions:caption",
    opts.MeasureOptions: "data_tools.footage.measures:measure_clips",
    opts.CheckOptions: _check,
    opts.PreprocessOptions: "wands.preprocess.preprocess:preprocess",
    opts.PlanOptions: "wands.commands.plan:plan",
    opts.TrainOptions: _train,
    opts.ReportOptions: "wands.report.page:report",
    opts.InferOptions: _infer,
    opts.EvaluateOptions: "wands.commands.evaluate:evaluate",
    opts.ExportOptions: "wands.commands.export:export",
    opts.PushOptions: "wands.commands.push:push",
    opts.ConvertOptions: "wands.convert.convert:convert",
}
"""The function of each subcommand, in the order of the help page. A function that is given by name ("module:function") is
imported when the subcommand runs, and its result is printed."""
TOOLS: dict[type[Options], str | Callable[[Any], None]] = {
    opts.VerifyOptions: "wands.commands.verify:verify",
    opts.ScoreOptions: "wands.commands.score:score",
    opts.SelftestOptions: _selftest,
    opts.CalibrateOptions: "wands.commands.calibrate:calibrate",
    opts.ProfileOptions: _profile,
    opts.PackOptions: "wands.commands.pack:pack",
}
"""The functions of the subcommands of `wands tools`, which a usual run does not need."""


def _add_commands(group: click.Group, functions: dict[type[Options], str | Callable[[Any], None]]) -> None:
    for options, run in functions.items():
        group.add_command(
            build_command(options, partial(_print_result, run) if isinstance(run, str) else run)
        )


@click.group(cls=_OrderedGroup, short_help="Verify, score, self-test, calibrate, profile and pack")
def tools() -> None:
    """Verify, score, self-test, calibrate, profile and pack."""


_add_commands(main, COMMANDS)
_add_commands(tools, TOOLS)
main.add_command(tools)
main.commands["infer"].epilog = f"\b\nSampling options of the models' authors:\n{sampling_table()}"

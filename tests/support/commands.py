"""Call the commands from a test with plain values instead of an option model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from wands.config import options as opts
from wands.config.base import Options
from wands.data.clips.isolated import IsolatedWorker

if TYPE_CHECKING:
    from wands.commands.check.check_report import CheckReport
    from wands.conditions.condition import Condition
    from wands.convert.convert_result import ConvertResult
    from wands.preprocess.preprocess_report import PreprocessReport

Filled = TypeVar("Filled", bound=Options)


def fill(kind: type[Filled], values: Mapping[str, Any]) -> Filled:
    """Return an option model. `values` may contain a path in place of text, and a number or None in place of several numbers."""

    def convert(kind: Any, value: Any) -> Any:
        if kind in (str, str | None) and isinstance(value, Path):
            return str(value)
        if kind == tuple[int, ...] and (value is None or isinstance(value, int)):
            return () if value is None else (value,)
        return value

    fields = kind.model_fields
    return kind(**{name: convert(fields[name].annotation, value) for name, value in values.items()})


def check(source: str | Path, *, thumbnails: bool = True, **values: Any) -> CheckReport:
    from wands.commands.check.check import check as command

    limit = {"limit_seconds": values.pop("limit_seconds")} if "limit_seconds" in values else {}
    html = {"html_path": Path("page.html")} if thumbnails else {}
    return command(fill(opts.CheckOptions, {"source": source, **html, **values}), **limit)


def preprocess(
    source: str | Path,
    out: str | Path,
    model: str | Path,
    *,
    max_samples: int = 512,
    conditions: Sequence[Condition] = (),
    **values: Any,
) -> PreprocessReport | None:
    from wands.preprocess.preprocess import preprocess as command

    given = {"source": source, "out": out, "model": model, **values}
    return command(fill(opts.PreprocessOptions, given), max_samples=max_samples, conditions=conditions)


def pack(recipe: str | None, **values: Any) -> str:
    from wands.commands.pack import pack as command

    return command(fill(opts.PackOptions, {"recipe": recipe, **values}))


def evaluate(model: str | Path, data: Path, **values: Any) -> str | None:
    from wands.commands.evaluate import evaluate as command

    return command(fill(opts.EvaluateOptions, {"model": model, "data": data, **values}))


def plan(recipe: str | None, **values: Any) -> str:
    from wands.commands.plan import plan as command

    return command(fill(opts.PlanOptions, {"recipe": recipe, **values}))


def export(checkpoint: Path, out: Path, **values: Any) -> Path:
    from wands.commands.export import export as command

    return command(fill(opts.ExportOptions, {"checkpoint": checkpoint, "out": out, **values}))


def push(directory: Path, repo_id: str, *, token: str | None = None, **values: Any) -> str:
    from wands.commands.push import push as command

    return command(fill(opts.PushOptions, {"directory": directory, "repo_id": repo_id, **values}), token)


def convert(source: str | Path, out: Path, **values: Any) -> ConvertResult:
    from wands.convert.convert import convert as command

    return command(fill(opts.ConvertOptions, {"source": source, "out": out, **values}))


def record_decoded(patch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list to which `wands preprocess` with one worker appends the path of each clip that it decodes."""
    decoded: list[Path] = []
    run = IsolatedWorker.run

    def recorded(worker: IsolatedWorker, function: Any, path: Path, *arguments: Any, **limit: Any) -> Any:
        decoded.append(path)
        return run(worker, function, path, *arguments, **limit)

    patch.setattr(IsolatedWorker, "run", recorded)
    return decoded

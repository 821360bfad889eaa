"""Line plots of training runs, for the demo, the model card and `scripts/loss_compare.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from wands.files import atomic_path


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return the running mean of `window` values. The first points average fewer values, and only finite values count.

    Args:
        values: float [N].
        window: at least 1.

    Returns:
        float64 [N]; NaN where a window contains no finite value.
    """
    assert window > 0, window
    finite = np.isfinite(values)
    sums = np.cumsum(np.concatenate([[0.0], np.where(finite, values, 0.0)]))
    counts = np.cumsum(np.concatenate([[0], finite]))
    start = np.maximum(np.arange(1, len(values) + 1) - window, 0)
    total, count = sums[1:] - sums[start], counts[1:] - counts[start]
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def save_loss_plot(
    path: Path,
    series: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    *,
    title: str = "Training loss",
    window: int | None = None,
) -> None:
    """Plot loss over steps, raw values thin and their running mean thick, and write one PNG.

    Args:
        path: PNG to create or replace.
        series: name -> (steps, losses) of equal length; at least one series.
        title: heading.
        window: steps of the running mean. None uses a twentieth of each series, at most 200; 1 plots raw values only.

    Raises:
        WandsError: if the file cannot be written.
    """
    # Figure and Agg canvas without pyplot, which would need a display and keep a global list of figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    assert series, "a plot needs a series"
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, (name, (steps, losses)) in enumerate(series.items()):
        values = np.asarray(losses, dtype=np.float64)
        assert len(values) == len(steps), (name, len(steps), len(values))
        width = window or max(1, min(200, len(values) // 20))
        raw = np.where(np.isfinite(values), values, np.nan)
        lone = "o" if len(values) == 1 else ""  # a line of one point is invisible
        if width == 1:
            axes.plot(steps, raw, color=f"C{i}", linewidth=1.2, marker=lone, label=name)
        else:
            axes.plot(steps, raw, color=f"C{i}", linewidth=0.6, alpha=0.35)
            axes.plot(
                steps, smooth(values, width), color=f"C{i}", linewidth=1.8, label=f"{name} (mean of {width})"
            )
    axes.set(title=title, xlabel="optimizer step", ylabel="loss")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")

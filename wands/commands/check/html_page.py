"""The page of `wands check --html`: one file, no network, light and dark, sorted and filtered in the browser."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from string import Template

import numpy as np

from wands.commands.check.check_report import SHOWN_PROBLEMS, CheckedClip, CheckReport, describe_source

MAX_ROWS = 5000
"""Clips on one page: those that are rejected or warned of come first. The JSON has all of them."""

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>wands check: $source</title>
<style>
:root {
  color-scheme: light dark;
  --paper: #fbfbfa; --card: #fff; --ink: #1d1d1f; --faint: #6b6b73; --line: #e3e3e0; --bar: #5b7cc4;
  --bad: #b3261e; --bad-bg: #fbe9e7; --warn: #8a5a00; --warn-bg: #fdf1d8; --good: #1e6b3a; --good-bg: #e4f3e9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #161618; --card: #1f1f22; --ink: #ececee; --faint: #9c9ca6; --line: #34343a; --bar: #7f9fe6;
    --bad: #ff8a80; --bad-bg: #3b1f1d; --warn: #f0c060; --warn-bg: #382d16; --good: #7fd49b; --good-bg: #1b3324;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1500px; padding: 28px 24px 60px; background: var(--paper); color: var(--ink);
  font: 14px/1.45 system-ui, "Segoe UI", "Liberation Sans", sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0 0 10px; }
.faint { color: var(--faint); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px; margin: 20px 0 14px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.card b { display: block; font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums; }
.panels { display: grid; grid-template-columns: 5fr 4fr 4fr; gap: 14px; margin-bottom: 22px; }
.panel { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 4px 10px; align-items: center; }
.bars span { font-variant-numeric: tabular-nums; text-align: right; }
.bars i { display: block; height: 13px; border-radius: 3px; background: var(--bar); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 14px; margin: 0; }
dt { color: var(--faint); } dd { margin: 0; }
dl.counts dt { text-align: right; font-variant-numeric: tabular-nums; }
.tools { display: flex; gap: 8px; flex-wrap: wrap; margin-bottom: 10px; }
button, input { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line); border-radius: 16px;
  padding: 4px 13px; }
button { cursor: pointer; } button[aria-pressed=true] { border-color: var(--bar); box-shadow: 0 0 0 1px var(--bar); }
input { flex: 1; min-width: 160px; max-width: 360px; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 600; border-bottom: 1px solid var(--line); padding: 8px 10px; white-space: nowrap;
  cursor: pointer; user-select: none; }
th[aria-sort=ascending]::after { content: " \\25B2"; } th[aria-sort=descending]::after { content: " \\25BC"; }
td { border-top: 1px solid var(--line); padding: 8px 10px; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.picture { width: 130px; } td.picture img { display: block; max-width: 120px; max-height: 84px; border-radius: 4px; }
td.picture div { width: 120px; height: 62px; border-radius: 4px; border: 1px dashed var(--line); }
td.name { min-width: 170px; max-width: 300px; overflow-wrap: anywhere; }
td.name q { color: var(--faint); display: block; max-height: 4.4em;
  overflow: auto; }
td.is { min-width: 130px; }
td.notes { min-width: 260px; max-width: 460px; overflow-wrap: anywhere; }
td.notes p { margin: 0 0 4px; padding: 3px 8px; border-radius: 5px; }
.rejected p.reason { background: var(--bad-bg); color: var(--bad); }
p.warning { background: var(--warn-bg); color: var(--warn); }
p.fine { background: var(--good-bg); color: var(--good); display: inline-block; }
@media (max-width: 800px) { .panels { grid-template-columns: 1fr; } }
</style>
</head>
<body>
<h1>$source</h1>
<div class="faint">wands check for $variant: $settings</div>
<div class="cards">$cards</div>
<div class="panels">
<section class="panel"><h2>Tokens of a sample</h2>$histogram</section>
<section class="panel"><h2>Training</h2><dl>$training</dl></section>
<section class="panel"><h2>Said of clips</h2><dl class="counts">$problems</dl></section>
</div>
<div class="tools" role="toolbar">$buttons<input type="search" placeholder="name, caption, reason" aria-label="search"></div>
<div class="scroll"><table>
<thead><tr><th data-column="0">verdict</th><th data-column="1">clip</th><th data-column="2">is</th>
<th class="number" data-column="3">frames</th><th class="number" data-column="4">size</th>
<th class="number" data-column="5">tokens</th><th class="number" data-column="6">text tokens</th>
<th data-column="7">notes</th></tr></thead>
<tbody>
$rows
</tbody></table></div>
<p class="faint">$left_out</p>
<script>
const body = document.querySelector("tbody"), rows = [...body.rows], search = document.querySelector("input");
const buttons = [...document.querySelectorAll("button")];
let wanted = "all";
function show() {
  const text = search.value.toLowerCase();
  for (const row of rows) {
    row.hidden = (wanted !== "all" && row.className !== wanted) || !row.textContent.toLowerCase().includes(text);
  }
}
for (const button of buttons) {
  button.onclick = () => {
    wanted = button.dataset.verdict;
    for (const other of buttons) other.setAttribute("aria-pressed", other === button);
    show();
  };
}
search.oninput = show;
const heads = [...document.querySelectorAll("th")];
for (const head of heads) {
  head.onclick = () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = row => row.cells[head.dataset.column].dataset.sort;
    const numeric = head.classList.contains("number");
    rows.sort((a, b) => (up ? 1 : -1) * (numeric ? value(a) - value(b) : value(a).localeCompare(value(b))));
    body.append(...rows);
  };
}
</script>
</body>
</html>
""")


def render_page(report: CheckReport) -> str:
    """The report as one HTML file that needs nothing else; thumbnails are inside it."""
    totals, spec = report.totals(), report.spec
    bounds = " and ".join(f"{pixels:,}" for pixels in (spec.max_pixels or 0, *report.more_pixels))
    size = f"{spec.width}x{spec.height}" if spec.height else f"at most {bounds} pixels"
    frames = f"at most {spec.max_frames} frames" if spec.max_frames else "whole clips"
    cards = [(f"{totals['clips']:,}", "clips"), (f"{totals['rejected']:,}", "rejected")]
    cards += [(f"{totals['warned']:,}", "with warnings"), (f"{totals['samples']:,}", "samples")]
    cards += [(_duration(totals["seconds_of_video"]), "of video"), (f"{totals['tokens']:,}", "tokens")]
    cards += [(_size(totals["cache_bytes"]), "cache, about")]
    buttons = [("all", "all", len(report.clips))]
    buttons += [(name, name, report.count(name)) for name in ("rejected", "warned", "fine")]
    left_out = len(report.clips) - MAX_ROWS
    return _PAGE.substitute(
        source=escape(report.source),
        variant=escape(report.variant),
        settings=escape(f"{spec.fps:g} fps, {size}, {frames}, {spec.clip_mode}"),
        cards="".join(f'<div class="card"><b>{value}</b>{name}</div>' for value, name in cards),
        histogram=_bars(report.tokens) if report.samples else '<p class="faint">no sample</p>',
        training="".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in _training(report)),
        problems="".join(
            f"<dt>{count:,}</dt><dd>{escape(kind)}</dd>" for kind, count in report.problems()[:SHOWN_PROBLEMS]
        )
        or "<dd>nothing</dd>",
        buttons="".join(
            f'<button data-verdict="{key}" aria-pressed="{str(key == "all").lower()}">{name} {count:,}</button>'
            for key, name, count in buttons
        ),
        rows="\n".join(_row(clip) for clip in report.clips[:MAX_ROWS]),
        left_out=f"{left_out:,} more clips without a reason to be shown first are not on this page; --json has them."
        if left_out > 0
        else "",
    )


def _training(report: CheckReport) -> list[tuple[str, str]]:
    text = (
        "counted by the model's tokenizer" if report.exact_text else "estimated; --model counts them exactly"
    )
    rows = [("caption tokens", text)]
    if report.packing is None or report.packing.problem:
        return [*rows, ("packing", report.packing.problem if report.packing else "no sample")]
    plan = report.packing
    rows += [
        ("bins", f"{plan.max_tokens:,} tokens, {plan.bins_per_step:,} a step"),
        ("fill", f"{plan.fill:.1%}"),
    ]
    return [*rows, ("steps an epoch", f"{plan.steps_per_epoch:,}")]


def _bars(tokens: np.ndarray) -> str:
    counts, edges = np.histogram(tokens, bins=min(12, max(1, len(np.unique(tokens)))))
    bars = []
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        label = f"{low:,.0f} - {high:,.0f}" if low != high and len(counts) > 1 else f"{tokens[0]:,}"
        width = 100 * count / counts.max()
        bars.append(
            f'<span>{label}</span><i style="width:max({width:.1f}%, {min(int(count), 1) * 2}px)"></i><span>{count:,}</span>'
        )
    return f'<div class="bars">{"".join(bars)}</div>'


def _row(clip: CheckedClip) -> str:
    first = clip.samples[0] if clip.samples else None
    frames = sum(sample.num_frames for sample in clip.samples)
    tokens = sum(sample.num_tokens for sample in clip.samples)
    many = f"<br><span class='faint'>{len(clip.samples)} samples</span>" if len(clip.samples) > 1 else ""
    size = f"{first.width}x{first.height}" if first else ""
    picture = base64.b64encode(clip.thumbnail).decode()
    image = (
        f'<img alt="" loading="lazy" src="data:image/jpeg;base64,{picture}">' if picture else "<div></div>"
    )
    notes = [f'<p class="reason">{escape(clip.reason)}</p>'] if clip.reason else []
    notes += [f'<p class="warning">{escape(text)}</p>' for text in clip.warnings]
    caption = f"<q>{escape(clip.caption)}</q>" if clip.caption else ""
    order = {"rejected": "0", "warned": "1", "fine": "2"}[clip.verdict]
    cells = (
        ("picture", order, image),
        ("name", clip.key, f"<b>{escape(clip.key)}</b>{caption}"),
        ("is", describe_source(clip), escape(describe_source(clip))),
        ("number", frames, f"{frames:,}{many}" if first else ""),
        ("number", first.width * first.height if first else 0, size),
        ("number", tokens, f"{tokens:,}" if first else ""),
        ("number", clip.text_tokens, f"{clip.text_tokens:,}" if clip.text_tokens else ""),
        ("notes", clip.reason or "; ".join(clip.warnings), "".join(notes) or '<p class="fine">fine</p>'),
    )
    return f'<tr class="{clip.verdict}">{_cells(cells)}</tr>'


def _cells(cells: Sequence[tuple[str, object, str]]) -> str:
    return "".join(
        f'<td class="{kind}" data-sort="{escape(str(sort))}">{content}</td>' for kind, sort, content in cells
    )


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:,.1f} h"


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.4g} TB"

"""The page of memory scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from mosaic_opt.report import grid

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perfmodel.validation.memory_scores import LabelScore, MemoryScores, PeakScore


def _peaks(peaks: Iterable[PeakScore]) -> RenderableType:
    table = grid("peaks", "rows", "median error %", "mean %", "within 5%", "within 10%")
    for score in peaks:
        table.add_row(
            escape(score.group),
            str(score.rows),
            f"{100 * score.median:.2f}",
            f"{100 * score.mean:.2f}",
            f"{100 * score.within_5:.0f}%",
            f"{100 * score.within_10:.0f}%",
        )
    return table


def _labels(labels: Iterable[LabelScore]) -> RenderableType:
    table = grid("fits or not", "rows", "right", "fits", "runs out", "missed", "false alarms")
    for score in labels:
        table.add_row(
            escape(score.group),
            str(score.rows),
            f"{100 * score.accuracy:.2f}%",
            str(score.fit_right),
            str(score.out_right),
            str(score.missed),
            str(score.alarms),
        )
    return table


def render_memory_scores(scores: MemoryScores) -> RenderableType:
    """Return the scores of memory, published runs one by one."""
    rows = grid("run", "model", "stack", "peak", "measured GB", "predicted GB", "error %")
    for row in scores.rows:
        rows.add_row(
            escape(row.name),
            escape(row.model),
            row.stack,
            row.peak,
            f"{row.measured_bytes / 1e9:.1f}",
            f"{row.predicted_bytes / 1e9:.1f}",
            f"{100 * row.error:+.1f}",
        )
    left_out = grid("not compared", "why")
    for name, reason in scores.left_out.items():
        left_out.add_row(escape(name), escape(reason))
    sweep = scores.sweep
    return Group(
        Text("Peaks of memory, published runs", style="bold"),
        _peaks(scores.peaks),
        "",
        _labels(scores.labels),
        "",
        Text(f"{sweep.source}; scored {sweep.date}", style="bold"),
        _peaks(sweep.peaks),
        "",
        _labels(sweep.labels),
        "",
        rows,
        "",
        left_out,
    )

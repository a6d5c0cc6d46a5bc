"""Pages about layouts of one model: why a step takes as long as it does, and which are shortest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mosaic_opt.report import _facts, _flag_lines, _short, grid, render_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perfmodel.explanation import Change, Explanation
    from perfmodel.layout_search import LayoutSearch, PricedLayout
    from perfmodel.uncertainty import Interval

SHOWN_OF_FRONT = 12


def _words(name: str) -> str:
    return name.replace("_", " ")


# ---------------------------------------------------------------- why a step takes so long


def render_explanation(explanation: Explanation) -> RenderableType:
    """Return the page of a step, what binds it, its waterfall, and what changes would do."""
    step = explanation.step
    waterfall = grid("from peak to step", "ms", "% of step", "rests on")
    for loss in explanation.waterfall:
        waterfall.add_row(
            _words(loss.name),
            f"{1e3 * loss.time_s:.1f}",
            f"{100 * loss.share:.1f}",
            loss.source.value,
        )
    waterfall.add_row("step", f"{1e3 * step.step_time_s:.1f}", "100.0", "")
    return Group(
        render_step(step),
        Text(""),
        Text(_binding_line(explanation), style="bold"),
        Text(
            f"The step at the device's peak: {explanation.peak_time_s:.4f} s "
            f"({step.mfu_convention.value}). The work of the devices alone: "
            f"{explanation.device_time_s:.4f} s. The step: {step.step_time_s:.4f} s."
        ),
        Text(""),
        waterfall,
        Text(""),
        _changes(explanation.changes),
        Text(_advice(explanation)),
    )


def _binding_line(explanation: Explanation) -> str:
    step, terms = explanation.step, explanation.terms_s
    largest = max(terms, key=lambda name: terms[name])
    share = 100 * terms[largest] / step.step_time_s
    line = (
        f"The {explanation.pace} sets the pace, on stage {explanation.pace_stage}; the largest "
        f"term is {_words(largest)}: {terms[largest]:.4f} s, {share:.1f}% of the step."
    )
    if step.fits:
        return line
    short = (step.memory_bytes - step.device_memory_bytes) / 1e9
    return f"Memory binds: {short:.1f} GB too much on stage {step.heaviest_stage}. {line}"


def _changes(changes: Sequence[Change]) -> Table:
    table = grid("one change", "step s", "+ s", "GB", "+ GB", "")
    table.columns[-1].justify = "left"
    for change in changes:
        if change.plan is None:
            rule = f"{change.rule}: " if change.rule else ""
            name = f"{_words(change.degree)}, {change.direction}"
            table.add_row(name, "-", "-", "-", "-", escape(f"{rule}{change.reason}"))
            continue
        value = str(change.value)
        if change.degree == "layout" and change.direction == "moved":
            value = "one layer moved"
        table.add_row(
            f"{_words(change.degree)} {value}",
            f"{change.step_time_s or 0.0:.4f}",
            f"{change.step_time_change_s or 0.0:+.4f}",
            f"{(change.memory_bytes or 0.0) / 1e9:.1f}",
            f"{(change.memory_change_bytes or 0.0) / 1e9:+.1f}",
            "" if change.fits else "does not fit",
        )
    return table


def _advice(explanation: Explanation) -> str:
    best = explanation.best_change
    blocked = [
        f"{_words(c.degree)} {c.value}"
        for c in explanation.changes
        if c.fits is False and (c.step_time_change_s or 0.0) < 0.0
    ]
    line = "No change of one degree that fits is faster."
    if best is not None:
        line = f"Best change of one degree that fits: {best.plan}."
    if blocked:
        line += f" Faster, if they fitted: {', '.join(blocked)}."
    return line


# ---------------------------------------------------------------- which layouts are shortest


def render_layouts(search: LayoutSearch) -> RenderableType:
    """Return the page of a search over the layouts of one model."""
    batch = search.batch
    parts: list[RenderableType] = [
        Text(f"{search.architecture['name']}: {search.status.replace('_', ' ').upper()}", "bold"),
        _facts(
            [
                ("on", f"{search.n_devices} devices, {search.hardware}, stack {search.stack}"),
                ("batch", f"{batch.global_batch} x {batch.seq_len} tokens, {batch.optimizer}"),
                ("memory", f"{search.device_memory_bytes / 1e9:.1f} GB of a device"),
            ]
        ),
        Text(""),
    ]
    if search.layouts:
        parts += [_ranked(search.layouts, search), Text(""), *_ties(search)]
    else:
        parts.append(Text(search.reason))
        if search.leanest:
            parts += [Text(""), Text("Least memory:", style="bold"), _lean(search.leanest)]
    if search.pareto_front:
        parts += [Text(""), *_front(search)]
    counts = search.counts
    parts += [
        Text(""),
        Text(
            f"{counts.enumerated:,} layouts tile the cluster and the batch: {counts.legal:,} are "
            f"legal for the model, {counts.priced:,} priced ({counts.refused:,} lie beyond a "
            f"measured range), {counts.fit:,} fit."
        ),
    ]
    if search.layouts:
        parts += _flag_lines(search.layouts[0].flags)
    return Group(*parts)


def _range(interval: Interval, digits: int, scale: float = 1.0) -> str:
    value, low, high = (
        f"{scale * x:,.{digits}f}" for x in (interval.value, interval.low, interval.high)
    )
    return f"{value} ({low}-{high})"


def _ranked(layouts: Sequence[PricedLayout], search: LayoutSearch) -> Table:
    table = grid(
        "", "step s", "tokens/s/device", "TFLOP/s/device", "MFU %", "GB", "stage", "layout"
    )
    table.columns[-1].justify = "left"
    for rank, layout in enumerate(layouts, 1):
        table.add_row(
            f"{rank}{'~' if layout.near_tie else ''}",
            f"{layout.step_time_s:.3f}",
            _range(layout.tokens_per_s_per_device, 0),
            _range(layout.tflops_per_device, 0),
            f"{100 * layout.mfu.value:.1f}",
            f"{layout.memory_bytes / 1e9:.1f}",
            str(layout.heaviest_stage),
            _short(str(layout.plan)),
        )
    return table


def _ties(search: LayoutSearch) -> list[RenderableType]:
    errors = sorted({layout.interval_error for layout in search.layouts})
    return [
        Text(
            f"~ {search.near_ties:,} layouts that fit are within "
            f"{100 * search.near_tie_tolerance:.1f}% of the shortest step, the error of "
            f"{search.stack} on a run left out of its fit: the model cannot tell them apart."
        ),
        Text(
            f"FLOPs are those of {search.mfu_convention.value}. Ranges: 5-95% of {search.draws} "
            f"draws of the stack's fitted constants and of its error ({', '.join(errors)})."
        ),
    ]


def _lean(layouts: Sequence[PricedLayout]) -> Table:
    table = grid("GB", "short by GB", "step s", "layout")
    table.columns[-1].justify = "left"
    for layout in layouts:
        table.add_row(
            f"{layout.memory_bytes / 1e9:.1f}",
            f"{layout.shortfall_bytes / 1e9:.1f}",
            f"{layout.step_time_s:.3f}",
            _short(str(layout.plan)),
        )
    return table


def _front(search: LayoutSearch) -> list[RenderableType]:
    """Show the front's fastest layouts that fit, or its leanest where none does."""
    front = search.pareto_front
    fitting = [layout for layout in front if layout.fits]
    shown = fitting[-SHOWN_OF_FRONT:] or list(front[:SHOWN_OF_FRONT])
    table = grid("GB", "tokens/s/device", "step s", "layout")
    table.columns[-1].justify = "left"
    for layout in shown:
        table.add_row(
            f"{layout.memory_bytes / 1e9:.1f}",
            _range(layout.tokens_per_s_per_device, 0),
            f"{layout.step_time_s:.3f}",
            _short(str(layout.plan)),
        )
    title = (
        f"Throughput against memory: {len(front)} layouts that no other beats in both, "
        f"{len(fitting)} of them fit"
    )
    more = f"; {len(shown)} shown, the others in the JSON" if len(shown) < len(front) else ""
    return [Text(f"{title}{more}.", style="bold"), table]

"""The page of a relaxation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mosaic_opt.report import grid, number

if TYPE_CHECKING:
    from mosaic_opt.relaxation_result import Elasticity, Relaxation

_MFU = {
    "exact": "MFU of the best layout of each candidate",
    "partial": "MFU of the best layouts as far as the search came, the device's peak for the rest",
    "bound": "the device's peak alone",
    "given": "the MFU values that were given",
}


def render_relaxation(found: Relaxation) -> RenderableType:
    """Return the page of a relaxation."""
    parts: list[RenderableType] = [
        Text(f"{found.name}: {found.status.value.upper()}", style="bold"),
        Text(found.words),
        Text(
            f"Over {found.points:,} of {found.candidates:,} candidates; rests on "
            f"{_MFU[found.mfu]}.  [{found.source.value}]"
        ),
    ]
    split, point = found.split, found.point
    if split is not None:
        table = grid("gap to the exact optimum", "nats", "of the gap")
        whole = split.gap or 1.0
        table.add_row("integrality", f"{split.integrality:.6f}", f"{split.integrality / whole:.0%}")
        table.add_row("envelope of MFU", f"{split.envelope:.6f}", f"{split.envelope / whole:.0%}")
        table.add_row("total", f"{split.gap:.6f}", "100%")
        parts += [
            Text(""),
            Text(
                f"Exact optimum {split.exact:.6f}, bound of the convex hull {split.hull:.6f}, "
                f"bound {found.lower_bound:.6f} nats/token."
            ),
            table,
        ]
    if point is not None:
        parts += [
            Text(""),
            Text(
                f"Relaxed point, no architecture of the space: {number(point.n_total)} total, "
                f"{number(point.n_active)} active, sparsity {point.sparsity:.3f}, split "
                f"{point.expert_split:.2f}, {number(point.tokens)} tokens "
                f"({point.tokens_per_parameter:.1f} a parameter), useful MFU "
                f"{100 * point.mfu:.1f}%."
            ),
            Text(f"Binding: {', '.join(found.binding) or 'nothing'}."),
        ]
    if found.elasticities:
        parts += [Text(""), _worth(found.elasticities)]
    parts += [Text(""), _solvers(found)]
    return Group(*parts)


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:+.6f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value + 0.0:.5f}"


def _worth(rows: tuple[Elasticity, ...]) -> Group:
    table = grid("budget", "is", "d log L / d log", "exact", "nats a unit", "one more", "one less")
    for row in rows:
        table.add_row(
            escape(row.budget),
            f"{number(row.value)} {_SHORT[row.unit]}",
            _ratio(row.relaxed),
            _ratio(row.exact),
            "-" if row.relaxed_per_unit is None else f"{row.relaxed_per_unit + 0.0:.3e}",
            _nats(row.one_more),
            _nats(row.one_less),
        )
    note = (
        "What a budget is worth. From the relaxation: d log L / d log budget, and nats a day, "
        "token or ratio. From the exact optimum: the same slope, and the change of its loss with "
        "one day, 1 % of tokens or 1 GB more or less."
    )
    return Group(Text(note), table)


_SHORT = {"day": "days", "token": "tokens", "token/parameter": "a parameter", "GB": "GB"}


def _solvers(found: Relaxation) -> Table:
    table = grid("solver", "program", "status", "its value", "checked bound")
    for run in found.solvers:
        table.add_row(
            escape(run.solver),
            run.program,
            escape(run.words or run.status),
            "-" if run.value is None else f"{run.value:.9f}",
            "none" if run.bound is None else f"{run.bound:.9f}",
        )
    return table

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
    "partial": "the lower level as far as it came, the device's peak for the rest",
    "bound": "bounds of blocks of layouts alone",
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
    parts += [Text(""), _solvers(found), *_agreements(found)]
    return Group(*parts)


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:+.5f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value + 0.0:.5f}"


def _worth(rows: tuple[Elasticity, ...]) -> Group:
    table = grid("budget", "is", "relaxed", "exact", "±10 %", "nats/unit", "one more", "one less")
    for row in rows:
        table.add_row(
            escape(row.budget),
            f"{number(row.value)}{_SHORT[row.unit]}",
            _ratio(row.relaxed),
            _ratio(row.exact),
            _ratio(row.exact_wide),
            "-" if row.relaxed_per_unit is None else f"{row.relaxed_per_unit + 0.0:.2e}",
            _nats(row.one_more),
            _nats(row.one_less),
        )
    ones = dict.fromkeys(_ONE[row.unit] for row in rows)
    note = (
        "What a budget is worth, as d log L / d log budget: of the relaxation (nats/unit is the "
        "same, d L / d budget), of the exact optimum over a small step (exact) and over 10 % to "
        "either side. One more, one less: change of the exact optimum's loss in nats with "
        f"{', '.join(ones)}."
    )
    remarks = (Text(f"{row.budget}: {r.words}") for row in rows for r in row.remarks)
    return Group(Text(note), table, *remarks)


_SHORT = {
    "day": " days",
    "token": " tokens",
    "token/parameter": "/param",
    "GB": " GB",
    "cost": "",
    "kWh": " kWh",
}

_ONE = {
    "day": "one day",
    "token": "1 % of a cap on tokens",
    "token/parameter": "1 % of a cap on tokens",
    "GB": "one GB",
    "cost": "1000 of cost",
    "kWh": "1000 kWh",
}


def _agreements(found: Relaxation) -> list[RenderableType]:
    """Say where the optima of two solvers differ, or that they do not."""
    lines = []
    for seen in found.agreements:
        first, second = seen.solvers
        if seen.difference is None:
            said = "cannot be compared: one of them reports no optimum"
        elif seen.agree:
            said = f"agree within {seen.tolerance:g} nats/token"
        else:
            said = (
                f"DIFFER by {seen.difference:.2e} nats/token, more than {seen.tolerance:g}; each "
                "checked bound holds, and prices are those of the better one"
            )
        lines.append(Text(f"{first} and {second} on the {seen.program} program {said}."))
    return list(lines)


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

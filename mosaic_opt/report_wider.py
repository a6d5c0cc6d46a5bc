"""Lines of a solution's page that are there only where an envelope asks for more than the least."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mosaic_opt.result import Solution
    from mosaic_opt.spending import Spend


def dropped_points(solution: Solution) -> list[RenderableType]:
    """Return a line where points of a grid are no candidate."""
    if not solution.dropped_points:
        return []
    reasons = "; ".join(f"{why}: {n:,}" for why, n in solution.dropped_points.items())
    points = solution.counts.grid_points
    return [Text(f"Of {points:,} points of the grid some are no candidate: {reasons}.")]


def spend_row(spend: Spend | None) -> list[tuple[str, str]]:
    """Return a row where a budget stands in place of days."""
    if spend is None:
        return []
    taken = [] if spend.cost is None else [f"costs {spend.cost:,.6g}"]
    taken += [] if spend.energy_j is None else [f"draws {spend.energy_j / 3.6e9:.4g} MWh"]
    return [
        (
            "budget",
            f"of {spend.set_by}, buys {spend.window_days:.4g} days; the run takes "
            f"{spend.days:.4g} of them, {spend.gpu_hours:,.0f} GPU-hours, and "
            f"{' and '.join(taken)}  [{spend.source.value}]",
        )
    ]

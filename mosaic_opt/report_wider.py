"""Lines of a solution's page that are there only where an envelope asks for more than the least."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mosaic_opt.result import Solution
    from mosaic_opt.spending import Spend
    from mosaic_opt.token_efficiency import TokenEfficiency


def dropped_points(solution: Solution) -> list[RenderableType]:
    """Return a line where points of a grid are no candidate."""
    if not solution.dropped_points:
        return []
    reasons = "; ".join(f"{why}: {n:,}" for why, n in solution.dropped_points.items())
    points = solution.counts.grid_points
    return [Text(f"Of {points:,} points of the grid some are no candidate: {reasons}.")]


def efficiency_row(worth: TokenEfficiency | None) -> list[tuple[str, str]]:
    """Return a row where tokens are worth more or less at the batch."""
    if worth is None:
        return []
    origin = f"; {worth.origin}" if worth.origin else ""
    return [
        (
            "worth",
            f"{worth.tokens_effective:.4g} tokens of the law's, "
            f"{100 * worth.tokens_effective / worth.tokens:.1f}%: batch {worth.batch_tokens:.4g}, "
            f"critical batch {worth.critical_batch_tokens:.4g}, batch of the law's runs "
            f"{worth.reference_batch_tokens:.4g} tokens  [{worth.source.value}{origin}]",
        )
    ]


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

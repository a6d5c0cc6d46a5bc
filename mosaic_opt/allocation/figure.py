"""The allocation path as a figure; plotly is imported when one is asked for."""

from __future__ import annotations

from typing import Any

from mosaic_opt.allocation.regime import AllocationLaw, PathPoint
from mosaic_opt.plotting import require_plotly

PANELS = (
    ("n_total", "N_tot [parameter]"),
    ("one_minus_s", "1 - S [-]"),
    ("tokens", "D [token]"),
    ("expert_split", "G [-]"),
)


def path_figure(law: AllocationLaw) -> Any:
    """Draw exact optima and the predicted path against the budget, each axis logarithmic.

    Parameters
    ----------
    law : AllocationLaw

    Returns
    -------
    plotly.graph_objects.Figure
        Four panels; filled markers are inside the regime.

    Raises
    ------
    MosaicError
        plotly is not installed.
    """
    graph_objects, make_subplots = require_plotly()
    figure = make_subplots(rows=2, cols=2, subplot_titles=[title for _, title in PANELS])
    budgets = [row.budget_flop for row in law.path]
    symbols = ["circle" if row.in_regime else "circle-open" for row in law.path]
    for i, (field, _) in enumerate(PANELS):
        place = {"row": i // 2 + 1, "col": i % 2 + 1}
        figure.add_trace(
            graph_objects.Scatter(
                x=budgets,
                y=[_of(row.exact, field) for row in law.path],
                text=[row.architecture for row in law.path],
                mode="markers",
                marker={"symbol": symbols, "color": "#1f77b4"},
                name="exact optimum",
                showlegend=i == 0,
            ),
            **place,
        )
        predicted = [(b, r.predicted) for b, r in zip(budgets, law.path, strict=True)]
        known = [(b, p) for b, p in predicted if p is not None]
        if known:
            figure.add_trace(
                graph_objects.Scatter(
                    x=[b for b, _ in known],
                    y=[_of(p, field) for _, p in known],
                    mode="lines",
                    line={"color": "#d62728"},
                    name="path (30)",
                    showlegend=i == 0,
                ),
                **place,
            )
    figure.update_xaxes(type="log", title_text="C_peak [FLOP]")
    figure.update_yaxes(type="log")
    figure.update_layout(title_text=f"{law.name}: allocation path at {law.architecture}")
    return figure


def _of(point: PathPoint, field: str) -> float:
    return float(getattr(point, field))

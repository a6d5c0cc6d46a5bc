"""A fit as one HTML file that needs nothing else; plotly is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil
from typing import TYPE_CHECKING, Any

from lawfit import FitResult, FloatArray, ProfileCurve, Runs
from mosaic_opt.plotting import require_plotly
from mosaic_opt.report_fit import COLUMNS, coefficient_rows, facts, headline, notes

if TYPE_CHECKING:
    from mosaic_opt.fit_report import FitReport

__all__ = ["fit_page", "parity_figure", "profile_figure", "residual_figure"]

COVARIATES = (
    ("n_total", "N_tot [parameter]", "log"),
    ("n_active", "N_act [parameter]", "log"),
    ("sparsity", "S = 1 - N_act / N_tot [-]", "linear"),
    ("tokens", "D [token]", "log"),
    ("expert_split", "G [-]", "log"),
    ("tokens_per_parameter", "D / N_act [token/parameter]", "log"),
)
"""What residuals are drawn against: name, title and kind of the axis."""

_TRAIN, _HELD, _LINE = "#1f77b4", "#d62728", "#7f7f7f"

_STYLE = (
    "body{font-family:sans-serif;margin:2em auto;max-width:75em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2em 1em .2em 0;text-align:left;"
    "vertical-align:top}table.numbers td:not(:first-child):not(:last-child){text-align:right}"
)


def parity_figure(found: FitResult) -> Any:
    """Draw predicted against measured losses, runs of the fit and held-out runs told apart.

    Returns
    -------
    plotly.graph_objects.Figure
        Losses in nats/token; the line is where both are equal.

    Raises
    ------
    MosaicError
        plotly is not installed.
    """
    graph_objects, _ = require_plotly()
    figure = graph_objects.Figure()
    measured = found.train.loss + (() if found.held is None else found.held.loss)
    ends = [min(measured), max(measured)]
    line = {"color": _LINE, "width": 1}
    figure.add_trace(
        graph_objects.Scatter(
            x=ends, y=ends, mode="lines", line=line, name="equal", hoverinfo="skip"
        )
    )
    for name, runs, marker in _groups(found):
        figure.add_trace(
            graph_objects.Scatter(
                x=list(runs.loss),
                y=_predicted(found, runs).tolist(),
                text=_names(runs),
                mode="markers",
                marker=marker,
                name=name,
            )
        )
    figure.update_xaxes(title_text="measured loss [nats/token]")
    figure.update_yaxes(title_text="predicted loss [nats/token]")
    figure.update_layout(height=550, margin={"t": 30})
    return figure


def residual_figure(found: FitResult) -> Any:
    """Draw residuals, predicted minus measured, against each of `COVARIATES`.

    Returns
    -------
    plotly.graph_objects.Figure
        Six panels, residuals in nats/token.

    Raises
    ------
    MosaicError
        plotly is not installed.
    """
    graph_objects, make_subplots = require_plotly()
    figure = make_subplots(rows=2, cols=3, shared_yaxes=True, vertical_spacing=0.15)
    for i, (field, title, kind) in enumerate(COVARIATES):
        place = {"row": i // 3 + 1, "col": i % 3 + 1}
        for name, runs, marker in _groups(found):
            figure.add_trace(
                graph_objects.Scatter(
                    x=_covariate(runs, field).tolist(),
                    y=(_predicted(found, runs) - runs.column("loss")).tolist(),
                    text=_names(runs),
                    mode="markers",
                    marker=marker,
                    name=name,
                    showlegend=i == 0,
                ),
                **place,
            )
        figure.add_hline(y=0.0, line={"color": _LINE, "width": 1}, **place)
        figure.update_xaxes(type=kind, title_text=title, **place)
    figure.update_yaxes(title_text="predicted - measured [nats/token]", col=1)
    figure.update_layout(height=700, margin={"t": 30})
    return figure


def profile_figure(curves: Mapping[str, ProfileCurve]) -> Any:
    """Draw the squared profile t of each coefficient, and the threshold of its interval.

    Parameters
    ----------
    curves : mapping
        As `lawfit.profile` returns them, at least one.

    Returns
    -------
    plotly.graph_objects.Figure
        One panel for each coefficient; a dashed line at the threshold, a dot at the estimate.

    Raises
    ------
    MosaicError
        plotly is not installed.
    """
    graph_objects, make_subplots = require_plotly()
    rows = ceil(len(curves) / 3)
    figure = make_subplots(
        rows=rows, cols=3, subplot_titles=[name.rstrip("_") for name in curves], shared_yaxes=True
    )
    for i, curve in enumerate(curves.values()):
        place = {"row": i // 3 + 1, "col": i % 3 + 1}
        figure.add_trace(
            graph_objects.Scatter(
                x=list(curve.values),
                y=[t * t for t in curve.statistic],
                mode="lines",
                line={"color": _TRAIN},
                showlegend=False,
            ),
            **place,
        )
        figure.add_trace(
            graph_objects.Scatter(
                x=[curve.estimate],
                y=[0.0],
                mode="markers",
                marker={"color": _TRAIN},
                showlegend=False,
            ),
            **place,
        )
        threshold = {"color": _HELD, "width": 1, "dash": "dash"}
        figure.add_hline(y=curve.threshold**2, line=threshold, **place)
        for end in (curve.low, curve.high):
            if end is not None:
                figure.add_vline(x=end, line={"color": _LINE, "width": 1, "dash": "dot"}, **place)
        figure.update_xaxes(type="log" if _is_wide(curve.values) else "linear", **place)
    figure.update_yaxes(title_text="t^2 [-]", col=1)
    figure.update_layout(height=80 + 280 * rows, margin={"t": 50})
    return figure


def fit_page(
    report: FitReport, found: FitResult, curves: Mapping[str, ProfileCurve] | None = None
) -> str:
    """Return one HTML file with the tables and the figures of a fit.

    Parameters
    ----------
    report : FitReport
        The tables.
    found : FitResult
        The runs.
    curves : mapping, optional
        Profiles by coefficient; without them that figure is left out.

    Returns
    -------
    str
        It loads nothing from elsewhere. Texts of the user are escaped.

    Raises
    ------
    MosaicError
        plotly is not installed.
    """
    figures = [("Predicted and measured loss", parity_figure(found))]
    figures.append(("Residuals", residual_figure(found)))
    if curves:
        level = next(iter(curves.values())).level
        title = f"Profiles; below the dashed line is the {100.0 * level:g}% interval"
        figures.append((title, profile_figure(curves)))
    parts = [
        f"<h1>{escape(headline(report))}</h1>",
        f"<p>{escape(report.law.equation)}</p>",
        _table(facts(report)),
        "<h2>Coefficients</h2>",
        _table(list(coefficient_rows(report)), COLUMNS),
        *(f"<p>{escape(note)}</p>" for note in notes(report)),
    ]
    if report.warnings:
        parts.append("<h2>Notes and warnings</h2>")
        parts.append(_table([(w.reason, w.sentence) for w in report.warnings]))
    for i, (title, figure) in enumerate(figures):
        # the library stands in the file once, so that it can be read anywhere
        body = figure.to_html(full_html=False, include_plotlyjs=i == 0, div_id=f"figure-{i}")
        parts.append(f"<h2>{escape(title)}</h2>\n{body}")
    head = f'<meta charset="utf-8"><title>{escape(headline(report))}</title>'
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    lines = []
    if head:
        lines.append("".join(f"<th>{escape(cell)}</th>" for cell in head))
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    kind = ' class="numbers"' if head else ""
    return f"<table{kind}>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _groups(found: FitResult) -> list[tuple[str, Runs, dict[str, object]]]:
    groups: list[tuple[str, Runs, dict[str, object]]] = [
        ("in the fit", found.train, {"color": _TRAIN, "symbol": "circle", "size": 6})
    ]
    if found.held is not None:
        groups.append(("held out", found.held, {"color": _HELD, "symbol": "diamond", "size": 8}))
    return groups


def _predicted(found: FitResult, runs: Runs) -> FloatArray:
    return found.law.loss(**runs.point())


def _covariate(runs: Runs, name: str) -> FloatArray:
    if name == "sparsity":
        return 1.0 - runs.column("n_active") / runs.column("n_total")
    if name == "tokens_per_parameter":
        return runs.column("tokens") / runs.column("n_active")
    return runs.column(name)


def _names(runs: Runs) -> list[str]:
    """Return ids as the labels of points; plotly reads some tags in them."""
    return [escape(name) for name in runs.id]


def _is_wide(values: Sequence[float]) -> bool:
    return min(values) > 0.0 and max(values) > 10.0 * min(values)

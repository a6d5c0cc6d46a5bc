"""The page of a fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from mosaic_opt.report import _facts, grid, number

if TYPE_CHECKING:
    from mosaic_opt.fit_report import FitReport, FittedCoefficient

__all__ = ["coefficient_rows", "facts", "headline", "notes", "render_fit"]

COLUMNS = ("coefficient", "value", "low", "high", "the runs say")


def render_fit(found: FitReport) -> RenderableType:
    """Return the law, whether it is the optimum, its coefficients, and what speaks against it."""
    parts: list[RenderableType] = [
        Text(headline(found), style="bold"),
        Text(found.law.equation),
        Text(""),
        _facts(facts(found)),
        Text(""),
    ]
    table = grid(*COLUMNS)
    for row in coefficient_rows(found):
        table.add_row(*row)
    parts.append(table)
    parts += [Text(line) for line in notes(found)]
    if found.warnings:
        parts += [Text(""), Text(f"Notes and warnings ({len(found.warnings)}):", style="bold")]
        parts += [Text(f"  - {w.reason}: {w.sentence}") for w in found.warnings]
    return Group(*parts)


def headline(found: FitReport) -> str:
    """Return the first line: which law, how many runs, and whether it is the optimum."""
    held = f", {found.n_holdout} held out" if found.n_holdout else ""
    verdict = "CONVERGED" if found.converged else "NOT CONVERGED"
    return f"{found.law.kind} law, {found.n_train} runs of {found.source}{held}: {verdict}"


def facts(found: FitReport) -> list[tuple[str, str]]:
    """Return what is known of the fit, as names and sentences."""
    width = "least squares" if found.delta is None else f"Huber's function, delta = {found.delta:g}"
    rmse = f"{found.rmse_train:.4g} nats/token in the fit"
    if found.rmse_holdout is not None:
        rmse += f", {found.rmse_holdout:.4g} on the runs held out"
    return [
        ("objective", f"{found.objective:.7g}, sum of {width} over log L  [{found.basis}]"),
        (
            "optimum",
            f"{found.starts_agreeing} of {found.starts} starts agree; relative projected gradient "
            f"{found.gradient_norm:.1g}",
        ),
        ("rmse", rmse),
        ("held out", found.holdout_rule),
        ("outliers", found.outlier_rule),
        ("N counts", found.convention),
        ("valid range", ", ".join(_ranges(found)) or "not stated"),
    ]


def _ranges(found: FitReport) -> Iterator[str]:
    for name, ends in found.law.valid_range:
        if ends is not None:
            yield f"{name} {number(ends[0])} to {number(ends[1])}"


def coefficient_rows(found: FitReport) -> Iterable[tuple[str, str, str, str, str]]:
    """Return a row for each coefficient, under the names of `COLUMNS`."""
    for name, one in found.coefficients.items():
        yield name.rstrip("_"), _digits(one.value), _digits(one.low), _digits(one.high), _say(one)


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _say(one: FittedCoefficient) -> str:
    if one.fixed:
        return "held by the user"
    words = {None: "", True: "identified", False: "ridge"}[one.identified]
    if one.at_bound is not None:
        words = f"at its {one.at_bound} bound"
    flags = ", ".join(dict.fromkeys(remark.reason for remark in one.remarks))
    return f"{words} ({flags})".strip() if flags else words


def notes(found: FitReport) -> list[str]:
    """Return what the columns of the coefficients mean."""
    lines = []
    if found.intervals is None:
        lines.append("low, high: no intervals were made.")
    else:
        i = found.intervals
        kept = i.draws - i.refits_not_converged
        lines.append(
            f"low, high: {100.0 * i.level:g}% {i.method}; {kept} of {i.draws} converged and "
            f"count; seed {i.seed}."
        )
    if found.identified_rule is not None:
        lines.append(f"{found.identified_rule}.")
    return lines

"""The page of a choice under uncertainty."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from mosaic_opt.report import _short, grid

if TYPE_CHECKING:
    from mosaic_opt.studies.robust_result import Quantiles, RestsOn, Robust, RobustCandidate

SHOWN = 15
"""Candidates on a page; all are in the JSON."""


def render_robust(found: Robust) -> RenderableType:
    """Return the choices, the candidates that matter, and the sets that the draws cannot part."""
    short = "" if found.draws == found.draws_asked else f" of the {found.draws_asked} asked for"
    title = f"{found.name}: the choice in {found.draws} draws{short}, seed {found.rests_on.seed}"
    parts: list[RenderableType] = [Text(title, style="bold")]
    if not found.draws_without_optimum:
        answered = "In each of them a candidate is feasible."
    elif found.draws_without_optimum == found.draws:
        parts.append(Text("No candidate is feasible in any draw."))
        return Group(*parts, *_rests(found.rests_on))
    else:
        answered = f"In {found.draws_without_optimum} of them no candidate is feasible."
    counts = found.counts
    parts.append(
        Text(
            f"{answered} Of {counts['candidates']:,} candidates {counts['feasible']:,} are "
            f"feasible in some draw and {counts['optimum']:,} are the optimum of some."
        )
    )
    parts += [Text(""), _choices(found), Text(""), _table(found)]
    left = len(found.candidates) - SHOWN
    if left > 0:
        parts.append(Text(f"... and {left} more, in the JSON"))
    return Group(*parts, Text(""), *_sets(found), *_rests(found.rests_on))


def _choices(found: Robust) -> RenderableType:
    table = grid(
        "choice", "candidate", "P(best)", "feasible", "mean regret", "max regret", "layout"
    )
    choices = (
        ("as solve has it", found.point_optimum),
        ("most probable", found.most_probable),
        ("least expected regret", found.least_expected_regret),
        ("minimax regret", found.minimax_regret),
    )
    for label, name in choices:
        if name is None:
            why = "infeasible" if label.startswith("as") else "none is feasible in every draw"
            table.add_row(label, f"({why})", "", "", "", "", "")
            continue
        c = found.candidate(name)
        plan = "" if c.plan is None else _short(str(c.plan))
        table.add_row(label, _model(name), _probability(c), *_regrets(c), plan)
    return table


def _table(found: Robust) -> RenderableType:
    table = grid(
        "candidate",
        "P(best)",
        "P(near)",
        "feasible",
        "mean regret",
        "max",
        "loss 5..95%",
        "days 5..95%",
    )
    for c in found.candidates[:SHOWN]:
        feasible, mean, largest = _regrets(c)
        table.add_row(
            escape(("= " if c.near_tie else "  ") + c.name.removeprefix("ladder:")),
            _probability(c),
            f"{100 * c.probability_near:.1f}%",
            feasible,
            mean,
            largest,
            _range(c.loss, ".4f"),
            _range(c.days, ".1f"),
        )
    return table


def _sets(found: Robust) -> list[RenderableType]:
    tolerance = found.tolerance or 0.0
    promised = (
        "Days are not counted: the stated constants promise no loss."
        if found.promised_loss is None
        else f"Days until {found.promised_loss:.4f} nats, which the stated constants promise."
    )
    return [
        Text(
            f"P(near): within {tolerance:.4f} nats of the draw's optimum, what the envelope's "
            f"error in MFU moves. = marks a near-tie of solve. {promised}"
        ),
        Text(
            f"solve's {len(found.near_ties)} near-ties hold the optimum in "
            f"{100 * found.near_ties_hold:.1f}% of the draws; {len(found.indistinguishable)} "
            f"candidates are near it in 5% of them, and it takes {len(found.likely_optima)} to "
            "hold it in 90%.",
            style="bold",
        ),
    ]


def _rests(on: RestsOn) -> list[RenderableType]:
    lines = []
    if on.law is None:
        lines.append("Law: as stated.")
    else:
        lines.append(f"Law [{on.law.value}]: {on.law_method}.")
    if on.stack is None:
        lines.append("Stack: its constants as stated.")
    else:
        drawn = ", ".join(on.constants) or "none"
        lines.append(f"Stack [{on.stack.value}]: drawn within their intervals: {drawn}.")
    if on.residual is None:
        lines.append("Error of the step time: none.")
    else:
        shares = ", ".join(f"{100 * v:g}% {k}" for k, v in on.residual_shares.items())
        errors = ", ".join(on.residual_errors) or "none"
        lines.append(f"Error of the step time [{on.residual.value}]: {errors}; variance {shares}.")
    return [Text(line) for line in lines]


def _model(name: str) -> str:
    return escape(name.removeprefix("ladder:"))


def _probability(c: RobustCandidate) -> str:
    return f"{100 * c.probability:.1f}+-{100 * c.probability_error:.1f}%"


def _regrets(c: RobustCandidate) -> tuple[str, str, str]:
    mean = "-" if c.expected_regret is None else f"{c.expected_regret:.4f}"
    largest = "inf" if c.max_regret is None else f"{c.max_regret:.4f}"
    return f"{100 * c.feasible:.1f}%", mean, largest


def _range(q: Quantiles, form: str) -> str:
    low, high = ("inf" if x is None else format(x, form) for x in (q.low, q.high))
    return f"{low}..{high}"

"""Pages of backends: which there are, and what they say of one envelope side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from mosaic_opt.report import _short, grid, number

if TYPE_CHECKING:
    from mosaic_opt.backends.registry import Listed
    from mosaic_opt.comparison import Comparison, Row


def render_backends(listed: Sequence[Listed]) -> RenderableType:
    """Return every registered backend as a table, and what is wrong with any."""
    table = grid("backend", "provides", "here")
    table.add_column("from", no_wrap=True)
    for each in listed:
        table.add_row(
            escape(each.name),
            "-" if each.provides is None else str(each.provides.name).lower(),
            "yes" if each.availability else "no",
            escape(each.origin),
        )
    reasons = [Text(f"{each.name}: {each.reason}.") for each in listed if each.reason]
    notes = [Text(each.note) for each in listed if each.note]
    return Group(table, *reasons, *notes)


def render_comparison(found: Comparison) -> RenderableType:
    """Return what each backend found, what it took, and whether they agree."""
    limit = "" if found.time_limit_s is None else f", at most {found.time_limit_s:g} s each"
    title = (
        f"{found.name}: {_count(len(found.rows), 'backend')} on {found.candidates} candidates x "
        f"{found.layouts} layouts{limit}"
    )
    ran = [row for row in found.rows if row.effort is not None]
    parts: list[RenderableType] = [Text(title, style="bold")]
    if ran:
        parts += [Text(""), _answers(ran), Text(""), _efforts(ran), Text("")]
    parts += [Text(f"{r.backend} {_fate(r)}: {r.words}.") for r in found.rows if r.words]
    parts += [Text(row.note) for row in found.rows if row.note]
    parts += [Text(line) for line in _verdict(found, ran)]
    if ran:
        sources = sorted({r.incumbent.step_source.value for r in ran if r.incumbent is not None})
        steps = f"; tokens follow from steps [{', '.join(sources)}]" if sources else ""
        parts.append(
            Text(
                f"Loss [{found.loss_source}], bound and gap in nats/token{steps}. "
                "Seconds are of this run."
            )
        )
    return Group(*parts)


def _answers(rows: Sequence[Row]) -> RenderableType:
    table = grid("backend", "status", "candidate", "tokens", "loss", "bound", "gap")
    table.add_column("layout", no_wrap=True)
    for row in rows:
        best = row.incumbent
        found = (
            ["-", "-", "-"]
            if best is None
            else [
                escape(best.name.removeprefix("ladder:")),
                number(best.tokens),
                f"{best.loss:.6f}",
            ]
        )
        table.add_row(
            escape(row.backend),
            "-" if row.status is None else row.status.value.upper(),
            *found,
            "infeasible" if row.claims_infeasible else _nats(row.bound),
            _nats(row.gap),
            "-" if best is None else escape(_short(str(best.plan))),
        )
    return table


def _efforts(rows: Sequence[Row]) -> RenderableType:
    columns = ("examined", "priced", "illegal", "discarded", "unexamined", "search s", "checks s")
    table = grid("backend", *columns)
    table.add_column("stopped", no_wrap=True)
    for row in rows:
        effort = row.effort
        if effort is None:
            continue
        table.add_row(
            escape(row.backend),
            str(effort.candidates),
            str(effort.priced),
            str(effort.infeasible),
            str(effort.discarded),
            str(effort.unexamined),
            _seconds(row.search_s),
            _seconds(row.checks_s),
            str(row.termination).replace("_", " "),
        )
    return table


def _verdict(found: Comparison, ran: Sequence[Row]) -> list[str]:
    verdict = found.agreement
    lines = []
    if found.interrupted:
        lines.append("Interrupted: what was done is shown.")
    if not ran:
        return [*lines, "No backend gave an answer."]
    if not verdict.agree:
        count = _count(len(verdict.disagreements), "contradiction")
        return [*lines, f"DISAGREE ({count}):", *(f"  {d.detail}" for d in verdict.disagreements)]
    exact = verdict.exact
    if len(exact) > 1:
        what = "name one optimum" if verdict.best_of else "find nothing feasible"
        first = f"{', '.join(exact[:-1])} and {exact[-1]} {what}"
    elif exact:
        first = f"{exact[0]} alone is exact and done"
    else:
        first = "no exact search is done"
    return [*lines, f"AGREE: {first}; no bound is above the best incumbent."]


def _fate(row: Row) -> str:
    return {
        "unavailable": "cannot run here",
        "refused": "refuses",
        "failed": "failed",
        "not run": "has no answer",
    }.get(row.state.value, row.state.value)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

"""The scores on published runs as tables of a page of documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, median

from perfmodel.calibration.published_stacks import SPECS
from perfmodel.calibration.stacks import load_stack, shipped_stacks
from perfmodel.errors import PerfmodelError
from perfmodel.validation.published_scores import GroupScore, PublishedScores

__all__ = ["scores_tables", "with_tables"]

BEGIN, END = "<!-- scores: begin -->\n", "<!-- scores: end -->"
"""What stands around the tables on the page."""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _percent(value: float, signed: bool = False) -> str:
    return f"{100 * value:+.1f}" if signed else f"{100 * value:.1f}"


def _groups(name: str, scores: Iterable[GroupScore]) -> str:
    head = (name, "rows", "median APE %", "mean APE %", "bias %", "in the 90 % interval %")
    return _table(
        head,
        (
            (
                g.name,
                str(g.rows),
                _percent(g.median),
                _percent(g.mean),
                _percent(g.bias, signed=True),
                f"{100 * g.inside:.0f}",
            )
            for g in scores
        ),
    )


def _constants() -> str:
    rows = []
    for name in (spec.name for spec in SPECS):
        if name not in shipped_stacks():
            continue
        profile = load_stack(name)
        found = [("", profile.constants), *((v, x.constants) for v, x in profile.variants.items())]
        for variant, constants in found:
            for key, c in constants.items():
                label = f"`{variant}.{key}`" if variant else f"`{key}`"
                shown = (f"{value:.3g}" for value in (c.value, c.low, c.high))
                rows.append((f"`{name}`", label, *shown, c.unit))
    return _table(("stack", "constant", "value", "5 %", "95 %", "unit"), rows)


def scores_tables(scores: PublishedScores) -> str:
    """Write the tables in Markdown."""
    scored = [g for g in scores.groups if g.role == "score"]
    fitted = [g for g in scores.groups if g.role == "fit"]
    parts = ["## Runs that took part in no fit\n"]
    for by in ("all", "stack", "source", "device", "kind", "precision"):
        parts.append(_groups(by, (g for g in scored if g.by == by)))
    rho = [rank.spearman for rank in scores.ranks]
    ranks = ((r.model, r.hardware, str(r.rows), f"{r.spearman:+.2f}") for r in scores.ranks)
    peers = (
        (
            p.peer,
            p.rows,
            p.theirs,
            str(p.ours_rows),
            f"{100 * p.ours_mean:.2f}",
            f"{100 * p.ours_worst:.2f}",
            p.source,
        )
        for p in scores.peers
    )
    parts += [
        "## Order inside groups\n",
        "Spearman's rank correlation of throughput inside each group of one model on one device,\n"
        "of four layouts or more, those that fitted included; a layout counts once: "
        f"{len(rho)} groups, median {median(rho):.2f}, mean\n{mean(rho):.2f}; "
        f"{sum(r >= 0.8 for r in rho)} of them at least 0.8.\n",
        _table(("model", "device", "layouts", "Spearman"), ranks),
        "## Peers on the same rows\n",
        _table(("peer", "rows", "theirs", "ours: rows", "mean %", "worst %", "source"), peers),
        "Rows that fitted our constants are among ours, as those that calibrated a peer are among\n"
        "theirs.\n",
        "## The nanotron sweep\n",
        "Its rows are not ours to ship; `perfmodel/validation/data/time_nanotron.json` has the\n"
        "scores and the command that printed them.\n",
        _groups("role", (g.model_copy(update={"name": g.role}) for g in scores.sweep)),
        "## Constants\n",
        _constants(),
        "## Runs that fitted the constants\n",
        _groups("stack", (g for g in fitted if g.by in ("all", "stack"))),
    ]
    if scores.left_out:
        left = ", ".join(f"{source} ({n})" for source, n in scores.left_out.items())
        parts.append(f"No stack takes: {left}.\n")
    return "\n".join(parts)


def with_tables(page: str, scores: PublishedScores) -> str:
    """Return a page with its tables written anew.

    Raises
    ------
    PerfmodelError
        The page lacks the two comments between which the tables stand.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise PerfmodelError(f"The page lacks {BEGIN.strip()!r} and {END!r}.")
    return before + BEGIN + scores_tables(scores) + END + after

"""The page of scores on published runs."""

from __future__ import annotations

from statistics import mean, median
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from mosaic_opt.report import grid

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perfmodel.validation.published_scores import GroupScore, PublishedScores, RankScore

STRONG = 0.8


def _groups(title: str, scores: Iterable[GroupScore]) -> RenderableType:
    table = grid(title, "rows", "median APE %", "mean APE %", "bias %", "in 90% interval")
    for score in scores:
        table.add_row(
            escape(score.name),
            str(score.rows),
            f"{100 * score.median:.1f}",
            f"{100 * score.mean:.1f}",
            f"{100 * score.bias:+.1f}",
            f"{100 * score.inside:.0f}%",
        )
    return table


def _ranks(ranks: Iterable[RankScore]) -> RenderableType:
    table = grid("model", "device", "layouts", "Spearman")
    for rank in ranks:
        table.add_row(escape(rank.model), rank.hardware, str(rank.rows), f"{rank.spearman:+.2f}")
    return table


def render_published_scores(scores: PublishedScores) -> RenderableType:
    """Return the scores of published runs, those that fitted nothing first."""
    peers = grid("peer", "rows", "theirs", "ours, mean %", "worst %")
    for peer in scores.peers:
        peers.add_row(
            escape(peer.peer),
            escape(f"{peer.rows} ({peer.ours_rows})"),
            escape(peer.theirs),
            f"{100 * peer.ours_mean:.2f}",
            f"{100 * peer.ours_worst:.2f}",
        )
    parts: list[RenderableType] = [
        Text("Published runs that took part in no fit: error of the step time", style="bold")
    ]
    for by in ("all", "stack", "source", "device", "kind", "precision"):
        mine = [g for g in scores.groups if g.by == by and g.role == "score"]
        parts += [_groups(by, mine), ""]
    fitted = [g for g in scores.groups if g.by in ("all", "stack") and g.role == "fit"]
    rho = [rank.spearman for rank in scores.ranks]
    strong = sum(r >= STRONG for r in rho)
    parts += [
        Text("Runs that fitted the constants", style="bold"),
        _groups("stack", fitted),
        "",
        Text("The nanotron sweep, whose rows do not ship", style="bold"),
        _groups("role", [g.model_copy(update={"name": g.role}) for g in scores.sweep]),
        "",
        peers,
        "",
        Text(
            f"Ranks of throughput inside {len(rho)} groups of one model on one device, of 4 "
            f"layouts or more: Spearman median {median(rho):.2f}, mean {mean(rho):.2f}; "
            f"at least {STRONG} in {strong}."
        ),
        _ranks(scores.ranks),
    ]
    if scores.left_out:
        left = ", ".join(f"{source} {n}" for source, n in scores.left_out.items())
        parts += ["", Text(f"No stack takes: {left}.")]
    return Group(*parts)

"""What intervals of the joint law mean: widths, coverage and ridge. Prints Markdown.

The figures of `docs/theory/intervals.md`, on simulated runs with the design of arXiv 2608.10605 at
its noise, fitted as there (Huber's function at 0.1, a tenth held out). `widths`, `ridge` or
`coverage` prints one of them; `--figure FILE` draws the widths (needs plotly).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lawfit import (
    MOSAIC_TABLE2,
    MOSAIC_TABLE2_PRINTED,
    Bootstrap,
    FitResult,
    bootstrap,
    fit,
    interval_coverage,
    profile,
    ridge_scan,
    sample_runs,
)
from lawfit.published_runs import NOISE

OPTIONS: dict[str, Any] = {"delta": 0.1, "holdout": "nact:0.1"}
PREFACTORS = ("a", "b", "c", "j", "e")
NAMES = (*PREFACTORS, "alpha", "beta", "lambda_", "delta", "gamma", "eta")
METHODS = ("percentile", "bca", "profile", "covariance", "early_stop")
TABLES = ("widths", "ridge", "coverage")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")
    print()


def fitted(seed: int) -> FitResult:
    """Fit one simulated set of runs."""
    return fit("joint", sample_runs(seed=seed), starts=100, **OPTIONS)


def printed_width(name: str) -> float:
    """Return the width of the printed interval, of the logarithm for a prefactor."""
    low, high = (float(end) for end in MOSAIC_TABLE2_PRINTED[name].interval)
    return math.log(high / low) if name in PREFACTORS else high - low


def width(refits: Bootstrap, name: str, method: str) -> float:
    """Return the width of an interval of refits."""
    interval = refits.interval(name, method=method)  # type: ignore[arg-type]
    low, high = interval.low, interval.high
    return math.log(high / low) if name in PREFACTORS else high - low


def widths(sets: int, figure: Path | None) -> None:
    """Print the printed widths beside those of refits that stop early and that converge."""
    found = [fitted(seed) for seed in range(sets)]
    early = [bootstrap(each, mode="paper") for each in found]
    late = [bootstrap(each) for each in found]
    curves = [profile(each) for each in found]

    def middle(values: Sequence[float]) -> str:
        return f"{median(values):.2g}"

    rows = []
    for name in NAMES:
        printed = printed_width(name)
        stopped = median(width(each, name, "bca") for each in early)
        ends = [(each[name].low or 0.0, each[name].high or math.inf) for each in curves]
        if name in PREFACTORS:
            along = [math.log(high / low) if low > 0.0 else math.inf for low, high in ends]
        else:
            along = [high - low for low, high in ends]
        rows.append(
            [
                name.rstrip("_"),
                f"{printed:.2g}",
                f"{stopped:.2g}",
                middle([width(each, name, "percentile") for each in late]),
                middle(along) if median(along) < math.inf else "open",
            ]
        )
    table(["", "printed", "early stop", "converged", "profile"], rows)
    above = [e.objective / f.objective - 1.0 for e, f in zip(early, found, strict=True)]
    gradients = [each.gradient_median for each in early]
    print(
        f"medians of {sets} sets; early stop: {sum(e.not_converged for e in early)} of "
        f"{sum(e.draws for e in early)} refits not converged, relative gradient "
        f"{min(gradients):.1g} to {max(gradients):.1g}, the fit itself {min(above):.0%} to "
        f"{max(above):.0%} above the optimum; converged: {sum(e.not_converged for e in late)} not "
        f"converged, gradient at most {max(e.gradient_largest for e in late):.1g}\n"
    )
    if figure is not None:
        draw(early[1], late[1], figure)


def draw(early: Bootstrap, late: Bootstrap, path: Path) -> None:
    """Write the intervals, each over the truth, as a page of HTML."""
    import plotly.graph_objects as go

    drawn: Any = go.Figure()
    for name, color, refits, method in (
        ("refits that stop early, BCa", "#d62728", early, "bca"),
        ("converged refits, percentiles", "#1f77b4", late, "percentile"),
    ):
        x, low, high = [], [], []
        for each in NAMES:
            truth = float(getattr(MOSAIC_TABLE2, each))
            interval = refits.interval(each, method=method)  # type: ignore[arg-type]
            middle = refits.estimate[refits.names.index(each)] / truth
            x.append(max(middle, 1e-3))
            low.append(x[-1] - max(interval.low / truth, 1e-3))
            high.append(interval.high / truth - x[-1])
        error = {"type": "data", "symmetric": False, "array": high, "arrayminus": low}
        drawn.add_scatter(
            x=x,
            y=[each.rstrip("_") for each in NAMES],
            mode="markers",
            name=name,
            error_x=error,
            marker={"color": color},
        )
    drawn.add_vline(x=1.0, line={"color": "grey", "width": 1})
    drawn.update_layout(
        title="95 % intervals of one simulated set of runs; the truth is 1",
        xaxis={"title": "coefficient over its true value", "type": "log"},
        yaxis={"title": "", "autorange": "reversed"},
        scattermode="group",
    )
    page = drawn.to_html(include_plotlyjs="cdn", div_id="law-intervals")
    path.write_text(str(page), encoding="utf-8")


def ridge(sets: int) -> None:
    """Print the scan of the ridge on several sets of runs."""
    scans = [ridge_scan(fitted(seed)) for seed in range(sets)]
    rows = []
    for k, row in enumerate(scans[0].rows):
        mine = [scan.rows[k] for scan in scans]
        spreads = sorted(each.spread for each in mine)
        halves = sorted(each.half_width or math.inf for each in mine)
        rows.append(
            [
                row.name.rstrip("_"),
                f"{spreads[len(spreads) // 2]:.0%} ({spreads[0]:.0%} to {spreads[-1]:.0%})",
                f"{halves[len(halves) // 2]:.0%} ({halves[0]:.0%} to {halves[-1]:.0%})",
                f"{sum(each.identified for each in mine)} of {sets}",
            ]
        )
    table(["", "spread of restarts", "1.96 standard errors", "identified"], rows)
    print(scans[0].rule + "\n")


def coverage(sets: int, draws: int) -> None:
    """Print how often intervals hold the truth; early stops on a tenth of the sets."""
    found = {
        methods: interval_coverage(
            MOSAIC_TABLE2,
            sample_runs(),
            noise=NOISE,
            sets=number,
            draws=draws,
            methods=methods,  # type: ignore[arg-type]
            starts=10,
            seed=1000,
            progress=lambda done, all_: print(f"{done}/{all_}", end="\r", file=sys.stderr),
            **OPTIONS,
        )
        for methods, number in ((METHODS[:4], sets), (METHODS[4:], max(sets // 10, 20)))
    }
    shares = {m: each.of(m) for methods, each in found.items() for m in methods}  # type: ignore[arg-type]
    rows = [
        [name.rstrip("_"), *(f"{100.0 * shares[method][name]:.1f}" for method in METHODS)]
        for name in NAMES
    ]
    rows.append(["all", *(f"{100.0 * sum(shares[m].values()) / len(NAMES):.1f}" for m in METHODS)])
    table(["", *METHODS], rows)
    for methods, each in found.items():
        print(
            f"{', '.join(methods)}: {each.sets} sets, {each.draws} refits each; "
            f"{each.not_converged} fits and {each.refits_not_converged} refits did not converge; "
            f"a share is sure to {196.0 * math.sqrt(0.05 * 0.95 / each.sets):.1f} points"
        )
    print()


def main() -> None:
    """Print the tables asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], default=list(TABLES))
    parser.add_argument("--figure", type=Path, help="an HTML file for the widths")
    parser.add_argument("--sets", type=int, default=300)
    parser.add_argument("--draws", type=int, default=200)
    chosen = parser.parse_args()
    if "widths" in chosen.tables:
        widths(12, chosen.figure)
    if "ridge" in chosen.tables:
        ridge(12)
    if "coverage" in chosen.tables:
        coverage(chosen.sets, chosen.draws)


if __name__ == "__main__":
    main()

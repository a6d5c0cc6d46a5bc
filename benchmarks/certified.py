"""How long a certified answer takes with bounds and without. Prints figures, asserts nothing.

``table3`` with the enumerator and with branch and bound, search and checks, in one run; then a
space of billions of pairs with every degree allowed.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import pairwise
from statistics import median
from typing import Any

from mosaic_opt import BranchAndBound, Enumerate, Problem, Solution, certify, example, solve
from mosaic_opt.backends.base import Limits
from mosaic_opt.envelope import Envelope, parse_envelope
from mosaic_opt.solver import assemble

REPEATS = 5


def every_degree() -> Envelope:
    """Return table3 with a finer ladder and every degree, ETP, VPP and micro-batch allowed."""
    spec: dict[str, Any] = example("table3").model_dump(mode="json")
    eighths = [2**k * m // 4 for k in range(2, 8) for m in (4, 5, 6, 7)]
    spec["candidates"] |= {
        "q": list(range(6, 21)),
        "n_experts": sorted({*eighths, 512, 6}),
        "top_k": [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16],
        "expert_split": [1, 2, 4, 5, 8, 10, 16, 20],
    }
    spec["plans"] |= {
        "max_tp": None,
        "max_cp": None,
        "etp": [1, 2, 4],
        "vpp": [1, 2, 3, 4],
        "micro_batch": [1, 2, 4, 8, 16],
    }
    return parse_envelope(spec)


def phases_of(envelope: Envelope, backend: BranchAndBound) -> tuple[Solution, list[float]]:
    """Return the solution, and seconds of problem, search, checks and document."""
    marks = [time.perf_counter()]
    problem = Problem(envelope)
    marks.append(time.perf_counter())
    report = backend.search(problem, Limits())
    marks.append(time.perf_counter())
    certificate = certify(problem, report)
    marks.append(time.perf_counter())
    solution = assemble(problem, report, certificate, backend.name)
    marks.append(time.perf_counter())
    return solution, [b - a for a, b in pairwise(marks)]


def line(name: str, solution: Solution, times: list[float]) -> None:
    """Print one case."""
    counts = solution.counts
    parts = ", ".join(
        f"{part} {seconds:.3f}"
        for part, seconds in zip(("problem", "search", "checks", "document"), times, strict=True)
    )
    print(
        f"{name}: {solution.status.value}, {counts.plans:.3g} pairs, {counts.priced:,} priced "
        f"({counts.priced / counts.plans:.3%}); {sum(times):.3f} s ({parts})"
    )


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="table3 alone")
    small = parser.parse_args().small
    cores = os.cpu_count() or 1
    envelope = example("table3")
    for backend in (Enumerate(), BranchAndBound()):
        solve(envelope, backend=backend)  # compiles
    runs = [phases_of(envelope, BranchAndBound()) for _ in range(REPEATS)]
    solution, times = min(runs, key=lambda run: sum(run[1]))
    line(f"table3, branch, {cores} workers", solution, times)
    exhaustive = []
    for _ in range(3):
        start = time.perf_counter()
        solve(envelope, backend=Enumerate())
        exhaustive.append(time.perf_counter() - start)
    ratio = median(exhaustive) / median(sum(run[1]) for run in runs)
    print(f"table3, enumerate: {median(exhaustive):.3f} s, {ratio:.1f} times as long")
    if small:
        return
    line("every degree, branch", *phases_of(every_degree(), BranchAndBound()))


if __name__ == "__main__":
    main()

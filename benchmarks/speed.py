"""How fast plans are priced and envelopes are solved here. Prints figures, asserts nothing."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median

import numpy as np
from peers import PEERS, seconds_per_plan

from mosaic_opt import Enumerate, Problem, Solution, example, robust, solve

REPEATS = 3
DRAWS = 500

FRESH = """
import time
start = time.perf_counter()
from mosaic_opt import example, solve
solution = solve(example("table3"))
print(time.perf_counter() - start)
"""


def timed(function: Callable[[], object]) -> float:
    """Return the median of a few timings of a call [s]."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return median(times)


def fresh_process(code: str, environment: dict[str, str]) -> tuple[float, str]:
    """Run code in a new interpreter; return its wall time [s] and what it prints."""
    start = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return time.perf_counter() - start, run.stdout.strip()


def kernel(problem: Problem) -> tuple[float, float, int]:
    """Return plans a second of the compiled kernel and of the scalar estimate, one core each."""
    sample = range(0, len(problem.architectures), 25)
    rows = {i: problem.legal_rows(i) for i in sample}
    n = sum(len(r) for r in rows.values())
    batch = n / timed(lambda: [problem.price(i, r) for i, r in rows.items()])

    rng = np.random.default_rng(0)
    picks = [(i, problem.table.plan(int(rng.choice(rows[i])))) for i in list(sample)[:40]]
    scalar = len(picks) / timed(lambda: [problem.reprice(i, plan) for i, plan in picks])
    return batch, scalar, n


def compare(interpreter: str | None, batch: float, scalar: float) -> None:
    """Print the time that other cost models take for a plan, and the ratios to it."""
    if interpreter is None:
        print("other cost models           skipped: --peers names no interpreter that has them")
        return
    for name in PEERS:
        found = seconds_per_plan(interpreter, name)
        if isinstance(found, str):
            print(f"{name:27s} skipped: {found}")
            continue
        print(
            f"{name:27s} {1e3 * found:10.3f} ms/plan   "
            f"(scalar {found * scalar:,.1f}, kernel {found * batch:,.0f} times as fast)"
        )


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", help="a Python interpreter with dlcalc and llm-analysis")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"{platform.machine()}, {cores} cores, python {platform.python_version()}\n")

    envelope = example("table3")
    problem = Problem(envelope)
    problem.solve_candidate(0)  # compiles, or loads the cache

    batch, scalar, n = kernel(problem)
    print(f"compiled kernel, one core   {batch:12,.0f} plans/s   ({n:,} plans of table3)")
    print(f"scalar estimate, full report{scalar:12,.0f} plans/s   (ratio {batch / scalar:,.0f})")
    print(
        f"time of one plan            {1e9 / batch:8,.0f} ns kernel, {1e3 / scalar:.3f} ms scalar"
    )
    compare(options.peers, batch, scalar)

    solutions: list[Solution] = []
    for workers in dict.fromkeys((1, cores or 1)):
        backend = Enumerate(workers=workers)
        seconds = timed(lambda b=backend: solutions.append(solve(envelope, backend=b)))
        counts = solutions[-1].counts
        print(
            f"table3, {workers} worker(s), warm  {seconds:8.2f} s   "
            f"{counts.priced:,} pairs priced, {counts.priced / seconds:,.0f} pairs/s"
        )
        warm = seconds
    robust(envelope, draws=1)  # compiles, or loads the cache
    start = time.perf_counter()
    study = robust(envelope, draws=DRAWS)
    seconds = time.perf_counter() - start
    print(
        f"table3, {study.draws} draws        {seconds:8.2f} s   "
        f"(a solve in each draw: {DRAWS * warm / seconds:,.0f} times as long)"
    )
    answers = {s.to_json() for s in solutions}
    print(f"answers of all runs         {'identical' if len(answers) == 1 else 'DIFFER'}")

    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        cold, _ = fresh_process(FRESH, environment)
        filled = median(fresh_process(FRESH, environment)[0] for _ in range(REPEATS))
    print(f"fresh process, empty cache  {cold:8.2f} s   ({cold - warm:+.2f} s over warm)")
    print(f"fresh process, filled cache {filled:8.2f} s   ({filled - warm:+.2f} s over warm)")

    environment = dict(os.environ)
    empty = median(fresh_process("pass", environment)[0] for _ in range(2 * REPEATS))
    loaded = median(fresh_process("import mosaic_opt", environment)[0] for _ in range(2 * REPEATS))
    print(f"import mosaic_opt           {loaded - empty:8.3f} s   over an empty interpreter")


if __name__ == "__main__":
    main()

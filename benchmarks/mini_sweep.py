"""The paper's story on a laptop: sweep, law, solve, and whether the picks keep their order.

    python -m benchmarks.mini_sweep text          # fetch the text (Debian's apt-get)
    python -m benchmarks.mini_sweep pilot         # learning rates; a minute or two
    python -m benchmarks.mini_sweep train         # the grid and the repeats; resumable

``docs/mini-sweep.md`` walks through it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks import mini_sweep_design as design
from benchmarks.mini_sweep_text import fetch
from moe_ref import SweepRow, SweepRun, sweep

DATA = Path(__file__).parent / "data" / "mini_sweep"


def trained(runs: list[SweepRun], name: str, given: argparse.Namespace) -> list[SweepRow]:
    """Train what a table lacks, and say what ends."""
    begun = time.perf_counter()

    def say(row: SweepRow, ended: int, known: int) -> None:
        print(
            f"{ended}/{known} {row.id}: {row.loss:.4f} nat/byte, {row.cpu_s:.0f} s of processor, "
            f"{time.perf_counter() - begun:.0f} s since the start",
            flush=True,
        )

    table = given.data / f"{name}.csv"
    return sweep(runs, given.text, table, workers=given.workers, on_row=say)


def main() -> None:
    """Do one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("text", "pilot", "train"))
    parser.add_argument("--text", type=Path, default=Path("anarchism.txt"))
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    if given.part == "text":
        fetch(given.text)
    elif given.part == "pilot":
        for factor in design.PILOT_FACTORS:
            trained(design.pilot(factor), f"pilot_{factor:g}", given)
    else:
        trained(design.grid(), "runs", given)
        trained(design.repeats(), "repeats", given)


if __name__ == "__main__":
    main()

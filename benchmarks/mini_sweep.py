"""The paper's story on a laptop: sweep, law, solve, and whether the picks keep their order.

    python -m benchmarks.mini_sweep text          # fetch the text (apt-get download)
    python -m benchmarks.mini_sweep pilot         # learning rates
    python -m benchmarks.mini_sweep train         # the grid and its repeats
    python -m benchmarks.mini_sweep fit           # the law, its errors and intervals
    python -m benchmarks.mini_sweep solve         # the orderings by time and by FLOPs
    python -m benchmarks.mini_sweep picks         # train the picks under both budgets
    python -m benchmarks.mini_sweep report        # all tables of docs/mini-sweep.md

Parts that train append to CSV tables and go on where they were interrupted. A step is priced by
the hardware pack and the stack profile that `mosaic calibrate --validate` made of the machine; with
``--timings`` by the sweep's own timings. Two runs train at once: the stack is its variant ``busy``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks import mini_sweep_design as design
from benchmarks import mini_sweep_report as report
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


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("text", "pilot", "train", "fit", "solve", "picks", "report")
    parser.add_argument("part", choices=parts)
    parser.add_argument("--text", type=Path, default=Path("anarchism.txt"))
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the tables")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--pack", default=str(DATA / "pack.toml"), help="by name or path")
    parser.add_argument("--stack", default=f"{DATA / 'stack.toml'}+busy", help="stack profile")
    parser.add_argument("--timings", action="store_true", help="no pack: the sweep's own timings")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Do one part."""
    given = parsed(arguments)
    if given.part == "text":
        fetch(given.text)
        return
    if given.part == "pilot":
        for factor in design.PILOT_FACTORS:
            trained(design.pilot(factor), f"pilot_{factor:g}", given)
        return
    if given.part == "train":
        trained(design.grid(), "runs", given)
        trained(design.repeats(), "repeats", given)
        return
    found = report.Found(given.data)
    if given.part in ("fit", "report"):
        print(report.law_part(found))
    if given.part == "fit":
        return
    ordered = found.ordered(None if given.timings else given.pack, given.stack)
    if given.part == "picks":
        for by, runs in report.pick_runs(ordered).items():
            trained(runs, f"picks_{by}", given)
    else:
        if given.part == "solve":
            print(found.page)
        print(report.price_part(found, given.pack, given.stack))
        print(report.order_part(found, ordered))
    if given.part != "solve":
        print(report.picks_part(found, ordered))


if __name__ == "__main__":
    main()

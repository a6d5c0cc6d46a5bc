"""Measure, fit a pack, and say what was measured and what the pack cannot price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from moe_ref.microbench.campaign import FULL, QUICK, Effort, Progress, measure
from moe_ref.microbench.errors import CalibrationError
from moe_ref.microbench.families import FAMILIES, chosen_families
from moe_ref.microbench.files import refused
from moe_ref.microbench.machine import FILE as SIDECAR
from moe_ref.microbench.machine import Facts, facts_of, read_sidecar
from perfmodel.calibration.fit import fit_command, fit_pack
from perfmodel.calibration.measured import known_datasheet, measured_datasheet, write_datasheet
from perfmodel.calibration.packs import HardwarePack
from perfmodel.calibration.report import report_markdown
from perfmodel.calibration.tables import TableError, Tables, UnreadableTableError
from perfmodel.calibration.writer import record_toml

__all__ = ["Calibration", "calibrate", "fit_folder"]

PACK, DATASHEET, REPORT = "pack.toml", "datasheet.toml", "report.md"


@dataclass(frozen=True)
class Calibration:
    """What came of a calibration.

    Attributes
    ----------
    folder : Path
        Tables, ``machine.json``, and where a pack was fitted ``pack.toml``, ``datasheet.toml`` and
        ``report.md``.
    facts : Facts
        The device.
    rows : dict of str to (int, int)
        Rows that are there and rows of the grid, by family that was asked for.
    pack : HardwarePack or None
        None where the tables do not suffice for one.
    unpriced : tuple of str
        What the pack cannot price, or why there is none; one sentence each.
    """

    folder: Path
    facts: Facts
    rows: dict[str, tuple[int, int]]
    pack: HardwarePack | None
    unpriced: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Where the pack is, or would be."""
        return self.folder / PACK


def calibrate(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    threads: int | None = None,
    only: Sequence[str] | None = None,
    quick: bool = False,
    budget_s: float | None = None,
    seed: int = 0,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Measure what the folder lacks, and fit a pack to what it then has.

    Parameters
    ----------
    folder : Path
        Where tables, sidecar and pack go; rows that are there are not measured again.
    device : {"cpu", "cuda"}
    dtype : {"bf16", "fp16", "fp32"}, optional
        Of products; fp32 on a CPU and bf16 on CUDA unless given.
    threads : int, optional
        Threads that are one device, on a CPU; what torch uses unless given.
    only : sequence of str, optional
        Families to measure; all unless given. A pack needs all, from this run or another.
    quick : bool
        Fewer and smaller calls.
    budget_s : float, optional
        Time for measuring, above 0; rows that it leaves are for the next run. 45 where ``quick``,
        else without an end [s].
    seed : int
        Of the order of the rows and of the operands.
    effort : Effort, optional
        In place of what ``quick`` stands for.
    progress : callable, optional
        Told the family, the rows done and the rows of this run.

    Raises
    ------
    CalibrationError
        No such device, number format or family, a budget that is not above 0, or a folder that
        holds something else or cannot be read or written.
    """
    families = chosen_families(only)
    facts = facts_of(device, dtype or ("bf16" if device == "cuda" else "fp32"), threads)
    rows = measure(
        folder,
        facts,
        families,
        effort=effort or (QUICK if quick else FULL),
        seed=seed,
        budget_s=budget_s,
        progress=progress,
    )
    return fit_folder(folder, facts, rows)


def fit_folder(folder: Path, facts: Facts, rows: dict[str, tuple[int, int]]) -> Calibration:
    """Fit a pack to the tables of a folder, and write it with its datasheet and report.

    Where the tables do not suffice there is no pack: neither a new one nor the one of an earlier
    run, which would pass for one of these rows.

    Raises
    ------
    CalibrationError
        A table cannot be read, or a file cannot be written.
    """
    tables = Tables(folder, facts.key)
    for name in (PACK, DATASHEET, REPORT):
        with refused(folder / name, "written"):
            (folder / name).unlink(missing_ok=True)
    origin = _origin(folder, facts)
    try:
        lacking = [f for f in FAMILIES.values() if not tables.has(f.table)]
        if lacking:
            names = ", ".join(family.name for family in lacking)
            said = f"No pack: nothing was measured of {names}, and every step has them."
            return Calibration(folder, facts, rows, None, (said,))
        sheet = known_datasheet(facts.machine) or measured_datasheet(tables, facts.machine)
        pack = fit_pack(tables, sheet, facts.key, origin, one_device=True)
    except UnreadableTableError as error:
        raise CalibrationError(str(error)) from None
    except TableError as error:
        return Calibration(folder, facts, rows, None, (f"No pack: {error}",))
    command = fit_command(
        facts.key, pack.name, origin, PACK, datasheet=f"DIR/{DATASHEET}", one_device=True
    )
    text = record_toml(pack, f"Written by `mosaic calibrate`; to fit it again:\n{command}")
    with refused(folder / PACK, "written"):
        write_datasheet(sheet, folder / DATASHEET)
        (folder / REPORT).write_text(report_markdown(pack), "utf-8")
        (folder / PACK).write_text(text, "utf-8")
    return Calibration(folder, facts, rows, pack, tuple(_unpriced(pack, facts)))


def _origin(folder: Path, facts: Facts) -> str:
    """Say where the rows are from, and how busy the machine was beside them."""
    campaign = read_sidecar(folder).campaign(facts)
    runs = () if campaign is None else campaign.runs
    loads = [run.load_before for run in runs if run.rows and run.load_before is not None]
    text = f"measurements of this machine with torch {facts.torch_version} ({SIDECAR})"
    if not loads:
        return text
    busy = f"{min(loads):g}" if len(set(loads)) == 1 else f"{min(loads):g} to {max(loads):g}"
    return f"{text}, begun at a load average of {busy} on {facts.cores} cores"


def _unpriced(pack: HardwarePack, facts: Facts) -> list[str]:
    said = []
    if pack.lacking:
        said.append(
            f"More than one device: {', '.join(pack.lacking)} were not measured. They take several "
            "processes: torchrun --nproc-per-node N -m moe_ref.microbench.collectives --out DIR."
        )
        if facts.device == "cpu" and facts.devices_per_node == 1:
            said.append(
                f"One device is all {facts.cores} cores: for several, --threads with fewer."
            )
    elif pack.most_devices < inf:
        said.append("More than one node: no collective across nodes was measured.")
    said.append("Precisions below bf16: no product in fp8 or fp4 was measured.")
    return said

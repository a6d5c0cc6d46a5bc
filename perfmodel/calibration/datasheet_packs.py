"""Make the packs of machines that were measured in part or not at all.

``python -m perfmodel.calibration.datasheet_packs --tables DIR --out DIR [NAME ...]``

A datasheet says of each surface whether rows of the tables are fitted, whether it is that of the
same device in another machine, or which pack it is taken over from
(:mod:`perfmodel.calibration.transfer`). Without ``--tables`` the fitted surfaces are
those of the shipped packs.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perfmodel.calibration.fit import (
    Datasheet,
    assemble,
    load_datasheet,
    shipped_datasheets,
    surface_fits,
)
from perfmodel.calibration.packs import HardwarePack, Surface, load_pack
from perfmodel.calibration.records import PackError
from perfmodel.calibration.report import overview_markdown
from perfmodel.calibration.surfaces import OPTIONAL, SURFACES
from perfmodel.calibration.tables import Tables
from perfmodel.calibration.transfer import Machine, Transfer
from perfmodel.calibration.writer import record_toml
from perfmodel.errors import PerfmodelError

REFERENCE = "p6-b200"
"""The pack of which every surface was measured."""

TABLES = "benchmark tables released with dmlc/ScalePlan, CC BY-NC 4.0"


@dataclass
class Maker:
    """Makes packs; what is fitted is fitted once, for the pack itself and for all that use it."""

    tables: Path | None = None
    fitted: dict[str, dict[str, Surface]] = field(default_factory=dict)  # by pack

    def pack(self, name: str) -> HardwarePack:
        """Return the pack of a shipped datasheet."""
        sheet = load_datasheet(None, name)
        if not _is_made(sheet):
            return load_pack(name)
        stated = sorted([*sheet.measured, *sheet.same, *sheet.transferred])
        wanted = [*SURFACES, *(OPTIONAL if sheet.device.peak_flops_fp8 is not None else ())]
        if stated != sorted(wanted):
            raise PackError(
                f"Datasheet {name} must name each surface once, in measured, same or transferred."
            )
        surfaces = dict(self.measured(name))
        for surface, other in sheet.same.items():
            if load_datasheet(None, other).device.rates != sheet.device.rates:
                raise PackError(f"The device of {name} has other rates than that of {other}.")
            surfaces[surface] = self._of(other, surface)
        origin = f"{TABLES}; datasheets where nothing was measured" if surfaces else "datasheets"
        for surface, other in sheet.transferred.items():
            there = load_datasheet(None, other)
            transfer = Transfer(
                Machine(other, there.device, there.node), Machine(name, sheet.device, sheet.node)
            )
            surfaces[surface] = transfer.surface(surface, self._of(other, surface))
        return assemble(name, origin, sheet, {surface: surfaces[surface] for surface in wanted})

    def measured(self, name: str) -> dict[str, Surface]:
        """Return the surfaces of a pack that are fitted to rows of its own device."""
        if name not in self.fitted:
            sheet = load_datasheet(None, name)
            if not _is_made(sheet):
                self.fitted[name] = load_pack(name).surfaces
            elif not sheet.measured:
                self.fitted[name] = {}
            elif self.tables is None:
                shipped = load_pack(name).surfaces
                self.fitted[name] = {surface: shipped[surface] for surface in sheet.measured}
            else:
                self.fitted[name] = self._fit(sheet, self.tables)
        return self.fitted[name]

    def _of(self, name: str, surface: str) -> Surface:
        found = self.measured(name).get(surface)
        if found is None:
            raise PackError(f"{surface} of {name} was not measured itself.")
        return found

    def _fit(self, sheet: Datasheet, tables: Path) -> dict[str, Surface]:
        floor_s = None  # the tables that the elementwise surface is fitted to have it
        if "elementwise" not in sheet.measured:
            floor_s = self._of(REFERENCE, "gemm").params["floor_s"]
        return {
            fit.surface: fit.fit(Tables(tables, sheet.measured[fit.surface]), sheet.device)
            for fit in surface_fits(sheet.node.devices_per_node, floor_s)
            if fit.surface in sheet.measured
        }


def made_packs() -> tuple[str, ...]:
    """Return the names of the packs that this module makes."""
    return tuple(n for n in shipped_datasheets() if _is_made(load_datasheet(None, n)))


def pack_text(pack: HardwarePack) -> str:
    """Return the pack as a file, with the command that writes it on top."""
    words = ["--tables", "DIR", "--out", "DIR", pack.name]
    command = f"python -m perfmodel.calibration.datasheet_packs {shlex.join(words)}"
    return record_toml(pack, f"Written by a program:\n{command}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    options = _parser().parse_args(arguments)
    maker = Maker(options.tables)
    try:
        for name in options.names or made_packs():
            pack = maker.pack(name)
            path = options.out / f"{name}.toml"
            path.write_text(pack_text(pack), "utf-8")
            _say(f"wrote {path} (digest {pack.digest[:12]})")
        if options.report is not None:
            packs = (maker.pack(name) for name in shipped_datasheets())
            options.report.write_text(overview_markdown(packs), "utf-8")
            _say(f"wrote {options.report}")
    except PerfmodelError as error:
        _say(str(error))
        return 2
    return 0


def _is_made(sheet: Datasheet) -> bool:
    return bool(sheet.measured or sheet.same or sheet.transferred)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perfmodel.calibration.datasheet_packs",
        description="Make the packs of machines that were measured in part or not at all.",
    )
    parser.add_argument("--tables", type=Path, help="folder of the CSV tables")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--report", type=Path, help="Markdown file for an overview of all packs")
    parser.add_argument("names", nargs="*", metavar="NAME", help="packs (default: all)")
    return parser


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())

"""Make a hardware pack from tables of measurements: ``python -m perfmodel.calibration.fit``.

The format of the tables and a worked example are in ``docs/howto/calibrate.md``.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from perfmodel.calibration.fit_collectives import collective_fits, has_collective
from perfmodel.calibration.fit_gemms import Fp8GemmFit, gemm_fits, has_fp8
from perfmodel.calibration.fit_kernels import kernel_fits
from perfmodel.calibration.machines import Device, Node
from perfmodel.calibration.packs import SCHEMA_VERSION, HardwarePack, Surface
from perfmodel.calibration.records import FrozenRecord, PackError, Text, shipped
from perfmodel.calibration.report import report_markdown
from perfmodel.calibration.surface_fit import SurfaceFit
from perfmodel.calibration.surfaces import COLLECTIVES, GEMM_FP8
from perfmodel.calibration.tables import Tables
from perfmodel.calibration.writer import record_toml
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import explain

FOLDER = "datasheets"


class Datasheet(FrozenRecord):
    """What the vendors state of a machine; nothing in it can be fitted.

    ``measured``, ``same`` and ``transferred`` say where each surface of a pack without a full set
    of tables comes from: the device whose rows are fitted, the pack of the same device in another
    machine, or the pack of another device whose efficiencies are taken over.
    """

    device: Device
    node: Node
    remark: Text | None = None  # what the user of the pack must know
    measured: dict[str, str] = Field(default_factory=dict)  # surface -> device in the tables
    same: dict[str, str] = Field(default_factory=dict)  # surface -> pack of the same device
    transferred: dict[str, str] = Field(default_factory=dict)  # surface -> pack


def shipped_datasheets() -> tuple[str, ...]:
    """Return the names of the datasheets that come with the library: those of the packs."""
    return shipped(FOLDER)


def load_datasheet(path: Path | None, *names: str) -> Datasheet:
    """Read a datasheet: the file given, or the first of the names that is shipped."""
    known = shipped_datasheets()
    found = [name.lower() for name in names if name.lower() in known]
    if path is None and not found:
        raise PackError(
            f"There is no datasheet {' or '.join(names)}; give one with --datasheet FILE.toml."
        )
    folder = resources.files("perfmodel.calibration") / "data" / FOLDER
    file = path if path is not None else folder / f"{found[0]}.toml"
    if not file.is_file():
        raise PackError(f"There is no datasheet {file.name}; give one with --datasheet FILE.toml.")
    try:
        return Datasheet.model_validate(tomllib.loads(file.read_text("utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise PackError(f"Datasheet {file.name} is not valid TOML: {error}.") from None
    except ValidationError as error:
        raise PackError(f"Datasheet {file.name} is invalid: {explain(error)}.") from None


def surface_fits(devices_per_node: int, floor_s: float | None = None) -> tuple[SurfaceFit, ...]:
    """Return the fits of every surface of a pack, in its order.

    ``floor_s`` is the shortest time of any kernel, where no chains of kernels were timed [s].
    """
    return (
        *gemm_fits(floor_s),
        *kernel_fits(floor_s),
        *collective_fits(devices_per_node),
        Fp8GemmFit(floor_s=floor_s),
    )


def fit_pack(
    tables: Tables,
    datasheet: Datasheet,
    name: str,
    origin: str,
    *,
    one_device: bool = False,
    progress: Callable[[str], None] = lambda surface: None,
) -> HardwarePack:
    """Fit every surface to the tables of one device.

    Parameters
    ----------
    tables
        The folder of tables, and the device whose rows count.
    datasheet
        Datasheet rates and the size of a node.
    name
        Name of the pack.
    origin
        Where the tables are from, with their licence.
    one_device
        Leave out the collectives that the tables lack; the pack then prices a single device.
    progress
        Called with the name of each surface before its fit.
    """
    node = datasheet.node
    surfaces: dict[str, Surface] = {}
    for fit in surface_fits(node.devices_per_node):
        if fit.surface == GEMM_FP8 and not has_fp8(tables, datasheet.device):
            continue
        if one_device and fit.surface in COLLECTIVES and not has_collective(tables, fit.surface):
            continue
        progress(fit.surface)
        surfaces[fit.surface] = fit.fit(tables, datasheet.device)
    return assemble(name, origin, datasheet, surfaces)


def assemble(
    name: str, origin: str, datasheet: Datasheet, surfaces: Mapping[str, Surface]
) -> HardwarePack:
    """Put a pack together."""
    text = f"Kernels and collectives of {datasheet.device.name} in {datasheet.node.name}."
    content: Mapping[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "description": f"{text} {datasheet.remark}" if datasheet.remark else text,
        "origin": origin,
        "device": datasheet.device,
        "node": datasheet.node,
        "surfaces": surfaces,
    }
    try:
        return HardwarePack.model_validate(content)
    except ValidationError as error:
        raise PackError(f"The fitted pack {name} is invalid: {explain(error)}.") from None


def fit_command(
    device: str,
    name: str,
    origin: str,
    out: str,
    *,
    datasheet: str | None = None,
    one_device: bool = False,
) -> str:
    """Return the command that fits a pack again, for its header.

    The folder of the tables is ``DIR`` in it. ``out`` and ``datasheet`` are files; the others are
    arguments of `fit_pack`.
    """
    words = ["--tables", "DIR", "--device", device, "--name", name]
    words += ["--origin", origin, "--out", out]
    words += [] if datasheet is None else ["--datasheet", datasheet]
    words += ["--one-device"] if one_device else []
    return f"python -m perfmodel.calibration.fit {shlex.join(words)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    options = _parser().parse_args(arguments)
    if not options.out.absolute().parent.is_dir():
        _say(f"{options.out} cannot be written: its folder does not exist.")
        return 2
    try:
        sheet = load_datasheet(options.datasheet, options.name, options.device)
        pack = fit_pack(
            Tables(options.tables, options.device),
            sheet,
            options.name,
            options.origin,
            one_device=options.one_device,
            progress=lambda surface: _say(f"fitting {surface}"),
        )
    except PerfmodelError as error:
        _say(str(error))
        return 2
    command = fit_command(
        options.device,
        options.name,
        options.origin,
        options.out.name,
        datasheet=None if options.datasheet is None else options.datasheet.name,
        one_device=options.one_device,
    )
    options.out.write_text(record_toml(pack, f"Written by a program:\n{command}"), "utf-8")
    _say(f"wrote {options.out} (digest {pack.digest[:12]})")
    if options.report is not None:
        options.report.write_text(report_markdown(pack), "utf-8")
        _say(f"wrote {options.report}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perfmodel.calibration.fit",
        description="Fit a hardware pack to tables of measurements.",
    )
    parser.add_argument("--tables", type=Path, required=True, help="folder of the CSV tables")
    parser.add_argument("--device", required=True, help="device whose rows count, e.g. b200")
    parser.add_argument("--name", required=True, help="name of the pack")
    parser.add_argument("--out", type=Path, required=True, help="TOML file to write")
    parser.add_argument("--report", type=Path, help="Markdown file for parameters and errors")
    parser.add_argument("--datasheet", type=Path, help="TOML file with the device and the node")
    parser.add_argument(
        "--one-device", action="store_true", help="leave out collectives that the tables lack"
    )
    parser.add_argument("--origin", default="own measurements", help="where the tables are from")
    return parser


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())

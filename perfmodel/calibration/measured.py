"""The datasheet of a machine that no vendor's numbers are at hand for: its rates as measured.

A peak is then the fastest product of the tables and a bandwidth the fastest copy, so that
efficiencies are fractions of what the machine was seen to do, and MFU is of that too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import Field

from perfmodel.calibration.fit import Datasheet, load_datasheet, shipped_datasheets
from perfmodel.calibration.fit_elementwise import ELEMENTWISE, STREAM
from perfmodel.calibration.fit_gemms import GEMM
from perfmodel.calibration.machines import Datum, Device, Node, NumberFormat
from perfmodel.calibration.records import FrozenRecord, Text
from perfmodel.calibration.tables import Tables
from perfmodel.calibration.writer import record_toml
from perfmodel.kernels import BF16_BYTES, FP32_BYTES
from perfmodel.sources import Source

__all__ = ["Machine", "known_datasheet", "measured_datasheet", "write_datasheet"]

LARGE_SHARE = 0.5
"""Copies of at least this share of the largest one's bytes count as out of the caches [-]."""


class Machine(FrozenRecord):
    """What a machine says of itself.

    Attributes
    ----------
    name : str
        The device, as its maker calls it.
    dtype : {"bf16", "fp16", "fp32"}
        Number format of the products that were timed.
    blocking : bool
        The caller computes, as on a CPU.
    memory_bytes : float
        Memory of one device [B].
    devices_per_node : int
        Devices in the machine [-].
    """

    name: Text
    dtype: NumberFormat
    blocking: bool
    memory_bytes: float = Field(gt=0, allow_inf_nan=False)
    devices_per_node: int = Field(ge=1)


def measured_datasheet(tables: Tables, machine: Machine) -> Datasheet:
    """Return a datasheet whose rates are the fastest rows of the tables.

    Raises
    ------
    TableError
        A table or the rows of the number format are missing.
    """
    sources = "read off the machine"
    device = Device(
        name=machine.name,
        peak_flops=_fastest_product(tables, machine.dtype),
        fp32_flops=_fastest_product(tables, "fp32"),
        memory_bytes=Datum(value=machine.memory_bytes, source=Source.MEASURED, note=sources),
        memory_bw=_fastest_copy(tables, machine.dtype),
        number_format=machine.dtype,
        blocking=machine.blocking or None,
    )
    node = Node(name="this machine", devices_per_node=machine.devices_per_node)
    return Datasheet(device=device, node=node, remark=_remark(machine))


def known_datasheet(machine: Machine) -> Datasheet | None:
    """Return the shipped datasheet of the device, by its name; None where there is none."""
    words = set(machine.name.lower().replace("-", " ").split())
    found = [name for name in shipped_datasheets() if name in words]
    if len(found) != 1 or machine.dtype != "bf16":
        return None
    sheet = load_datasheet(None, found[0])
    node = Node(name="this machine", devices_per_node=machine.devices_per_node)
    return Datasheet(device=sheet.device, node=node)


def write_datasheet(sheet: Datasheet, path: Path) -> None:
    """Write a datasheet as TOML, which `load_datasheet` reads."""
    path.write_text(record_toml(sheet, "Rates of this machine; efficiencies are of them."), "utf-8")


def _remark(machine: Machine) -> str:
    text = (
        f"Rates are the fastest that were seen, not a datasheet's: MFU is of the fastest "
        f"{machine.dtype} product."
    )
    if machine.dtype == "fp32":
        text += " Bytes of activations and weights are counted at 2 an element, as in bf16."
    return text


def _fastest_product(tables: Tables, dtype: str) -> Datum:
    table = tables.load(GEMM).where(dtype=dtype)
    rates = 2.0 * table["M"] * table["N"] * table["K"] / (table["time_ms_med"] * 1e-3)
    best = int(np.argmax(rates))
    shape = " x ".join(f"{table[side][best]:g}" for side in ("M", "N", "K"))
    return Datum(
        value=float(f"{rates[best]:.6g}"),
        source=Source.MEASURED,
        note=f"the fastest of {len(table)} {dtype} products [FLOP/s]: {shape}",
    )


def _fastest_copy(tables: Tables, dtype: str) -> Datum:
    element = FP32_BYTES if dtype == "fp32" else BF16_BYTES
    table = tables.load(ELEMENTWISE).where(dtype=dtype, op=STREAM)
    moved = element * (table["elements_read"] + table["elements_written"])
    rates = moved / (table["time_ms_med"] * 1e-3)
    rates = np.where(moved >= LARGE_SHARE * moved.max(), rates, 0.0)
    best = int(np.argmax(rates))
    return Datum(
        value=float(f"{rates[best]:.6g}"),
        source=Source.MEASURED,
        note=f"read and written by a copy of {moved[best] / 2e6:.4g} MB [B/s]",
    )

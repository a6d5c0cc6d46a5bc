"""Hardware packs: what one kind of machine was measured to do, as a small file of fitted numbers.

A pack holds, for each surface of :mod:`perfmodel.kernels` and :mod:`perfmodel.collectives`, its
parameters, what they rest on, the ranges that the measurements covered, what to do beyond them,
and the errors of the fit on rows that it saw and on rows that were held out. Packs are TOML;
:mod:`perfmodel.calibration.fit` writes them from tables of measurements.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, FiniteFloat, field_validator, model_validator

from perfmodel.calibration.records import FrozenRecord, PackError, Text, read_record, shipped
from perfmodel.calibration.surfaces import SURFACES, SurfaceKind
from perfmodel.collectives import Fabric
from perfmodel.hardware import Hardware
from perfmodel.kernels import DeviceRates
from perfmodel.sources import Source

SCHEMA_VERSION = 1
FOLDER = "hardware"

# Traffic is counted as if no cache helped, so a little above 1 is possible.
LARGEST_EFFICIENCY = 1.5

Policy = Literal["flag", "refuse"]
Positive = Annotated[FiniteFloat, Field(gt=0)]
Percent = Annotated[FiniteFloat, Field(ge=0)]


class Datum(FrozenRecord):
    """One number of a machine, with what it rests on."""

    value: Positive
    source: Source
    note: Text


class Device(FrozenRecord):
    """One accelerator: rates and memory, each with its source."""

    name: Text
    peak_flops: Datum  # dense bf16 [FLOP/s]
    fp32_flops: Datum  # dense fp32, no tensor cores [FLOP/s]
    memory_bytes: Datum  # usable by the program [B]
    memory_bw: Datum  # [B/s]

    @property
    def rates(self) -> DeviceRates:
        """The device's rates, in the form that the formulas take."""
        return DeviceRates(self.peak_flops.value, self.fp32_flops.value, self.memory_bw.value)


class Node(FrozenRecord):
    """One machine: how many devices share its fast links."""

    name: Text
    devices_per_node: Annotated[int, Field(ge=1)]


class FitErrors(FrozenRecord):
    """Absolute relative errors of a fit [%]; ``out`` rows took no part in the fit they test.

    ``median_out`` and ``p90_out`` are absent where no row was held out.
    """

    n: Annotated[int, Field(ge=1)]  # rows
    median_in: Percent
    p90_in: Percent
    median_out: Percent | None = None
    p90_out: Percent | None = None
    held_out: Text


class Surface(FrozenRecord):
    """Parameters of one surface, what they rest on and how far they reach."""

    source: Source
    provenance: Text
    tables: dict[str, str]  # table file -> sha256 of the file that was fitted
    params: dict[str, FiniteFloat]
    # Of how a single call was timed, not of the machine in a run.
    nuisance: dict[str, FiniteFloat] = Field(default_factory=dict)
    ranges: dict[str, tuple[FiniteFloat, FiniteFloat]]
    beyond: dict[str, Policy]
    errors: FitErrors
    regimes: dict[str, FitErrors] = Field(default_factory=dict)  # errors by part of the surface

    @field_validator("ranges")
    @classmethod
    def _ordered(cls, ranges: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for variable, (low, high) in ranges.items():
            if low > high:
                raise ValueError(f"the range of {variable} runs from {low:g} down to {high:g}")
        return ranges


class RangeFlag(NamedTuple):
    """A value outside the range that a surface was measured on."""

    surface: str
    variable: str
    value: float
    low: float
    high: float
    policy: Policy

    @property
    def message(self) -> str:
        """One sentence for a person."""
        verdict = "is an extrapolation"
        if self.policy == "refuse":
            verdict += ", which a search refuses"
        return (
            f"{self.surface}: {self.variable} = {self.value:g} is outside the measured range "
            f"[{self.low:g}, {self.high:g}], so the price {verdict}."
        )


class HardwarePack(FrozenRecord):
    """Everything that is known about one kind of machine; see the module's docstring."""

    schema_version: Literal[1]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    description: Text
    origin: Text  # of the tables that were fitted, with their licence
    device: Device
    node: Node
    surfaces: dict[str, Surface]

    @model_validator(mode="after")
    def _surfaces_are_complete(self) -> Self:
        _same_keys("surfaces", self.surfaces, SURFACES)
        for name, surface in self.surfaces.items():
            _check_surface(name, surface, SURFACES[name])
        return self

    def constants(self) -> Hardware:
        """Return the constants in the form that the formulas take."""
        built = {name: self._parameters(name) for name in SURFACES}
        collectives = {name: built.pop(name) for name in list(built) if name in Fabric._fields}
        fabric = Fabric(devices_per_node=float(self.node.devices_per_node), **collectives)
        return Hardware(device=self.device.rates, fabric=fabric, **built)

    def check(self, surface: str, **values: float) -> tuple[RangeFlag, ...]:
        """Return a flag for each value outside the range that the surface was measured on.

        Parameters
        ----------
        surface
            Name of the surface, such as ``"gemm"``.
        values
            Sizes by the name of the formula's argument (``m=4096, n=...``); those left out are
            not checked. NaN is outside of every range.
        """
        record = self._surface(surface)
        flags = []
        for variable, value in values.items():
            if variable not in record.ranges:
                known = ", ".join(record.ranges)
                raise PackError(f"Surface {surface} has no variable {variable!r}; it has {known}.")
            low, high = record.ranges[variable]
            if not low <= value <= high:
                policy = record.beyond[variable]
                flags.append(RangeFlag(surface, variable, float(value), low, high, policy))
        return tuple(flags)

    def source(self, surface: str) -> Source:
        """Return what the parameters of a surface rest on."""
        return self._surface(surface).source

    def _surface(self, name: str) -> Surface:
        if name not in self.surfaces:
            raise PackError(f"No surface is called {name!r}; there are {', '.join(SURFACES)}.")
        return self.surfaces[name]

    def _parameters(self, name: str) -> Any:
        return SURFACES[name].constants(**self.surfaces[name].params)


def shipped_packs() -> tuple[str, ...]:
    """Return the names of the hardware packs that come with the library."""
    return shipped(FOLDER)


def load_pack(name_or_path: str | Path) -> HardwarePack:
    """Load a pack: the name of a shipped one, or the path of a TOML file.

    Raises
    ------
    PackError
        In one sentence: no such pack, not TOML, or a key whose value breaks a rule.
    """
    return read_record(name_or_path, FOLDER, "hardware pack", HardwarePack)


def _same_keys(what: str, given: Iterable[str], wanted: Iterable[str]) -> None:
    missing = [key for key in wanted if key not in given]
    unknown = [key for key in given if key not in wanted]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    if unknown:
        raise ValueError(f"{what} has unknown {', '.join(unknown)}; it takes {', '.join(wanted)}")


def _check_surface(name: str, surface: Surface, kind: SurfaceKind) -> None:
    where = f"surfaces.{name}"
    _same_keys(f"{where}.params", surface.params, kind.constants._fields)
    _same_keys(f"{where}.ranges", surface.ranges, kind.variables)
    _same_keys(f"{where}.beyond", surface.beyond, kind.variables)
    for parameter, value in surface.params.items():
        positive = parameter not in kind.may_be_zero
        key = f"{where}.params.{parameter} = {value:g}"
        if value < 0 or (positive and value == 0):
            raise ValueError(f"{key}: must be {'greater than 0' if positive else '0 or more'}")
        if parameter.startswith("eff_") or parameter.endswith("_eff"):
            limit = LARGEST_EFFICIENCY
            if value > limit:
                raise ValueError(f"{key}: an efficiency is a fraction, at most {limit:g}")

"""Hardware packs: what one kind of machine was measured to do, as a small file of fitted numbers.

A pack holds, for each surface of :mod:`perfmodel.kernels` and :mod:`perfmodel.collectives`, its
parameters, what they rest on, the ranges that the measurements covered, what to do beyond them,
and the errors of the fit on rows that it saw and on rows that were held out. A surface that nobody
measured has parameters and a source and nothing else; whoever asks it is told so. Packs are TOML:
:mod:`perfmodel.calibration.fit` writes them from tables of measurements, and
:mod:`perfmodel.calibration.datasheet_packs` from datasheets and other packs.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, FiniteFloat, field_validator, model_validator

from perfmodel.calibration.machines import Device, Node
from perfmodel.calibration.records import FrozenRecord, PackError, Text, read_record, shipped
from perfmodel.calibration.surfaces import (
    COLLECTIVES,
    GEMM_FP8,
    KINDS,
    OPTIONAL,
    SURFACES,
    SurfaceKind,
)
from perfmodel.collectives import Fabric
from perfmodel.hardware import Hardware
from perfmodel.precision import RECIPES, Precision
from perfmodel.sources import Source

SCHEMA_VERSION = 1
FOLDER = "hardware"

ALIASES = {"a100": "a100-80"}
"""Other names of shipped packs."""

# Traffic is counted as if no cache helped, so a little above 1 is possible.
LARGEST_EFFICIENCY = 1.5

Policy = Literal["flag", "refuse"]

PRODUCTS = frozenset({"gemm", "grouped_forward", "grouped_backward"})
"""The surfaces that depend on the precision."""

REFUSABLE = frozenset({("all_to_all", "size")})
"""The ranges beyond which a pack may keep a search from choosing a plan."""

Percent = Annotated[FiniteFloat, Field(ge=0)]


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
    """Parameters of one surface, what they rest on and how far they reach.

    Where nothing was measured (``DATASHEET``, ``ASSUMED``) there are no tables, ranges or errors.
    """

    source: Source
    provenance: Text
    tables: dict[str, str] = Field(default_factory=dict)  # file -> sha256 of what was fitted
    params: dict[str, FiniteFloat]
    # Of how a single call was timed, not of the machine in a run.
    nuisance: dict[str, FiniteFloat] = Field(default_factory=dict)
    ranges: dict[str, tuple[FiniteFloat, FiniteFloat]] = Field(default_factory=dict)
    beyond: dict[str, Policy] = Field(default_factory=dict)
    errors: FitErrors | None = None
    regimes: dict[str, FitErrors] = Field(default_factory=dict)  # errors by part of the surface

    @property
    def measured(self) -> bool:
        """Whether the parameters rest on measurements of this kind of machine."""
        return self.source in (Source.MEASURED, Source.FITTED)

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


class UnmeasuredFlag(NamedTuple):
    """A surface whose parameters rest on no measurement of this kind of machine."""

    surface: str
    pack: str
    policy: Policy = "flag"

    @property
    def variable(self) -> str:
        """No variable in particular: whatever is asked, nothing was measured."""
        return ""

    @property
    def message(self) -> str:
        """One sentence for a person."""
        return (
            f"{self.surface} on {self.pack} is a datasheet roofline with assumed efficiencies: "
            "nothing was measured."
        )


Flag = RangeFlag | UnmeasuredFlag


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
        lacked = {*OPTIONAL, *COLLECTIVES} - self.surfaces.keys()
        _same_keys("surfaces", self.surfaces, [name for name in KINDS if name not in lacked])
        for name, surface in self.surfaces.items():
            _check_surface(name, surface, KINDS[name])
        if GEMM_FP8 in self.surfaces and self.device.peak_flops_fp8 is None:
            raise ValueError(f"surfaces.{GEMM_FP8} needs device.peak_flops_fp8, which is missing")
        return self

    @property
    def lacking(self) -> tuple[str, ...]:
        """Collectives of which the pack has no surface, so that it prices a single device."""
        return tuple(name for name in COLLECTIVES if name not in self.surfaces)

    @property
    def most_devices(self) -> float:
        """Devices beyond which the pack has no price; inf where it prices any number [-]."""
        if self.lacking:
            return 1.0
        measured = (self.surfaces[name].params for name in COLLECTIVES)
        if all(KINDS[n].across[0] in p for n, p in zip(COLLECTIVES, measured, strict=True)):
            return inf
        return float(self.node.devices_per_node)

    def check_devices(self, devices: int) -> None:
        """Refuse a number of devices whose exchanges nobody measured.

        Raises
        ------
        PackError
            There are more than `most_devices`.
        """
        if devices <= self.most_devices:
            return
        what = f"no {', '.join(self.lacking)}" if self.lacking else "no collective across nodes"
        raise PackError(
            f"{devices} devices have no price on {self.name}: {what} was measured; nearest: "
            f"{self.name}:{self.most_devices:g}gpus."
        )

    def constants(self, precision: Precision = Precision.BF16) -> Hardware:
        """Return the constants in the form that the formulas take.

        Below bf16 ``gemm`` is the fp8 surface at the precision's peak, and the grouped products
        keep of their bf16 fraction of the peak what dense products keep: the ratio of the two
        dense ``flop_eff``. What is no linear layer and no expert does not depend on it.

        Raises
        ------
        PackError
            The device has no hardware for the precision, or the pack no surface to price it by.
        """
        if precision not in RECIPES:
            return self._bf16()
        ratio, recipe = self.device.peak_ratio(precision), RECIPES[precision]
        if GEMM_FP8 not in self.surfaces:
            raise PackError(
                f"precision={precision} has no price on {self.name}: the pack has no surface "
                f"{GEMM_FP8}; nearest: bf16."
            )
        hw, gemm = self._bf16(), self._parameters(GEMM_FP8)
        reached = recipe.share * ratio
        changes = {"operand_bytes": recipe.operand_bytes}
        factor = reached * gemm.flop_eff / hw.gemm.flop_eff
        forward, backward = hw.grouped_forward, hw.grouped_backward
        return hw._replace(
            gemm=gemm._replace(flop_eff=gemm.flop_eff * reached, **changes),
            grouped_forward=forward._replace(flop_eff=forward.flop_eff * factor, **changes),
            grouped_backward=backward._replace(flop_eff=backward.flop_eff * factor, **changes),
            cast=recipe.cast,
        )

    def _bf16(self) -> Hardware:
        built = {name: self._parameters(name) for name in SURFACES}
        collectives = {name: built.pop(name) for name in list(built) if name in Fabric._fields}
        fabric = Fabric(devices_per_node=float(self.node.devices_per_node), **collectives)
        return Hardware(
            device=self.device.rates,
            fabric=fabric,
            host=self.node.host,
            blocking=float(bool(self.device.blocking)),
            **built,
        )

    def check_at(self, precision: Precision, surface: str, **values: float) -> tuple[Flag, ...]:
        """Return :meth:`check` of the surface that prices ``surface`` in a precision.

        Below bf16 the dense product in fp8 is a surface of its own; of the other products of
        linear layers and experts nothing was measured.
        """
        if precision not in RECIPES or surface not in PRODUCTS:
            return self.check(surface, **values)
        if precision is Precision.FP8 and surface == "gemm":
            return self.check(GEMM_FP8, **values)
        return (UnmeasuredFlag(f"{surface} in {precision}", self.name),)

    def check(self, surface: str, **values: float) -> tuple[Flag, ...]:
        """Return a flag for each value outside the range that the surface was measured on.

        A surface that was not measured has one flag, whatever the values.

        Parameters
        ----------
        surface
            Name of the surface, such as ``"gemm"``.
        values
            Sizes by the name of the formula's argument (``m=4096, n=...``); those left out are
            not checked. NaN is outside of every range.
        """
        record = self._surface(surface)
        known = KINDS[surface].variables
        for variable in values:
            if variable not in known:
                raise PackError(
                    f"Surface {surface} has no variable {variable!r}; it has {', '.join(known)}."
                )
        if not record.measured:
            return (UnmeasuredFlag(surface, self.name),)
        flags = []
        for variable, value in values.items():
            low, high = record.ranges[variable]
            if not low <= value <= high:
                policy = record.beyond[variable]
                flags.append(RangeFlag(surface, variable, float(value), low, high, policy))
        return tuple(flags)

    def refused_above(self, surface: str, variable: str) -> float:
        """Return the value beyond which a search is refused the price; inf where nowhere."""
        if surface in self.lacking:
            return 1.0
        record = self._surface(surface)
        if record.beyond.get(variable) != "refuse":
            return inf
        return float(record.ranges[variable][1])

    def source(self, surface: str, precision: Precision = Precision.BF16) -> Source:
        """Return what the parameters of a surface rest on.

        Below bf16 products are ``ASSUMED``: those in fp8 were measured with part of what
        quantising moves, and the rest is assumed. A collective that the pack lacks is never asked
        for, and rests on nothing either.
        """
        if surface in self.lacking or (precision in RECIPES and surface in PRODUCTS):
            return Source.ASSUMED
        return self._surface(surface).source

    def _surface(self, name: str) -> Surface:
        if name not in self.surfaces:
            raise PackError(f"No surface is called {name!r}; there are {', '.join(self.surfaces)}.")
        return self.surfaces[name]

    def _parameters(self, name: str) -> Any:
        """Return the constants; those that nobody measured are never read, and price nothing."""
        kind = KINDS[name]
        never = {p: inf if p in kind.may_be_zero else 1.0 for p in kind.parameters}
        stated = self.surfaces[name].params if name in self.surfaces else {}
        return kind.constants(**{**never, **stated})


def shipped_packs() -> tuple[str, ...]:
    """Return the names of the hardware packs that come with the library."""
    return shipped(FOLDER)


def load_pack(name_or_path: str | Path) -> HardwarePack:
    """Load a pack: the name of a shipped one in any case, an alias, or the path of a TOML file.

    Raises
    ------
    PackError
        In one sentence: no such pack, not TOML, or a key whose value breaks a rule.
    """
    return read_record(pack_name(name_or_path), FOLDER, "hardware pack", HardwarePack)


def pack_name(name_or_path: str | Path) -> str | Path:
    """Return the name of the shipped pack that is meant, or what was given if none is."""
    if not isinstance(name_or_path, str):
        return name_or_path
    name = ALIASES.get(name_or_path.lower(), name_or_path.lower())
    return name if name in shipped_packs() else name_or_path


def _same_keys(what: str, given: Iterable[str], wanted: Iterable[str]) -> None:
    missing = [key for key in wanted if key not in given]
    unknown = [key for key in given if key not in wanted]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    if unknown:
        raise ValueError(f"{what} has unknown {', '.join(unknown)}; it takes {', '.join(wanted)}")


def _check_surface(name: str, surface: Surface, kind: SurfaceKind) -> None:
    where = f"surfaces.{name}"
    across = set(kind.across) if any(p in surface.params for p in kind.across) else set()
    inside = [p for p in kind.parameters if p in across or p not in kind.across]
    _same_keys(f"{where}.params", surface.params, inside)
    if surface.measured:
        _same_keys(f"{where}.ranges", surface.ranges, kind.variables)
        _same_keys(f"{where}.beyond", surface.beyond, kind.variables)
        if surface.errors is None:
            raise ValueError(f"{where}.errors is missing: what is {surface.source} states them")
        for variable, policy in surface.beyond.items():
            if policy == "refuse" and (name, variable) not in REFUSABLE:
                raise ValueError(
                    f"{where}.beyond.{variable} = 'refuse': a search honours it for "
                    "all_to_all.size only; nearest: 'flag'"
                )
    else:
        for key in ("tables", "nuisance", "ranges", "beyond", "errors", "regimes"):
            if getattr(surface, key):
                raise ValueError(f"{where}.{key} must be absent: {surface.source} is not measured")
    for parameter, value in surface.params.items():
        positive = parameter not in kind.may_be_zero
        key = f"{where}.params.{parameter} = {value:g}"
        if value < 0 or (positive and value == 0):
            raise ValueError(f"{key}: must be {'greater than 0' if positive else '0 or more'}")
        if parameter.startswith("eff_") or parameter.endswith("_eff"):
            limit = LARGEST_EFFICIENCY
            if value > limit:
                raise ValueError(f"{key}: an efficiency is a fraction, at most {limit:g}")

"""Stack profiles: what a training stack does with a machine, as a few fitted constants.

The same device under two stacks differs by tens of percent, so a stack is an input of every
estimate. A profile holds the constants fitted to measured runs with their intervals, the stated
assumptions, the ranges that those runs covered, and the errors of the fit. Profiles are TOML;
:mod:`perfmodel.calibration.fit_stack` writes them from a table of measured runs.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from perfmodel.calibration.packs import RangeFlag
from perfmodel.calibration.records import FrozenRecord, PackError, Text, read_record, shipped
from perfmodel.sources import Source
from perfmodel.stack import HIDDEN_SHARES, MAX_FITTED, Stack

FOLDER = "stacks"


class Constant(FrozenRecord):
    """A constant of the stack with its interval (5-95% of a seeded bootstrap over runs).

    ``identified`` is the share of resamples that hold a run which responds to the constant; the
    interval is taken over these.
    """

    value: Annotated[FiniteFloat, Field(ge=0)]
    low: Annotated[FiniteFloat, Field(ge=0)]
    high: Annotated[FiniteFloat, Field(ge=0)]
    identified: Annotated[FiniteFloat, Field(ge=0, le=1)]
    unit: Text
    source: Source
    meaning: Text


class Assumption(FrozenRecord):
    """A constant that no measured run identifies."""

    value: Annotated[FiniteFloat, Field(ge=0)]
    source: Source
    note: Text


class Variant(FrozenRecord):
    """A switch of the stack, and the constants that it changes."""

    description: Text
    constants: dict[str, Constant] = Field(default_factory=dict)
    assumptions: dict[str, Assumption] = Field(default_factory=dict)


class StackErrors(FrozenRecord):
    """Errors on the runs that fitted the profile, and on others [-].

    ``low`` and ``high`` are the 5% and 95% quantiles of measured over predicted step time, each run
    predicted by constants fitted without it. The scored runs took no part in any fit.
    """

    rows: Annotated[int, Field(ge=1)]
    mape_in_sample: Annotated[FiniteFloat, Field(ge=0)]
    mape_leave_one_out: Annotated[FiniteFloat, Field(ge=0)]
    mape_leave_one_sweep_out: Annotated[FiniteFloat, Field(ge=0)]
    low: Annotated[FiniteFloat, Field(gt=0)]
    high: Annotated[FiniteFloat, Field(gt=0)]
    scored_rows: Annotated[int, Field(ge=0)] = 0
    scored_median: Annotated[FiniteFloat, Field(ge=0)] | None = None
    scored_mean: Annotated[FiniteFloat, Field(ge=0)] | None = None


class StackProfile(FrozenRecord):
    """A software stack; see the module's docstring."""

    schema_version: Literal[1]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    description: Text
    hardware: tuple[Text, ...]  # packs whose surfaces the constants were fitted with
    provenance: Text
    constants: dict[str, Constant]
    assumptions: dict[str, Assumption]
    ranges: dict[str, tuple[FiniteFloat, FiniteFloat]]
    errors: StackErrors
    covers: tuple[Text, ...] = ()  # parts of fitted runs that plain ones lack (perfmodel.ranges)
    variants: dict[str, Variant] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        fitted = len(self.constants) + sum(len(v.constants) for v in self.variants.values())
        if fitted > MAX_FITTED:
            raise ValueError(f"constants has {fitted}, and at most {MAX_FITTED} fit")
        if twice := sorted(set(self.constants) & set(self.assumptions)):
            raise ValueError(f"{', '.join(twice)} cannot be both constants and assumptions")
        _same_names(
            "constants and assumptions", {*self.constants, *self.assumptions}, set(Stack._fields)
        )
        parts: list[StackProfile | Variant] = [self, *self.variants.values()]
        for part in parts:
            most = [(name, c.high) for name, c in part.constants.items()]
            most += [(name, a.value) for name, a in part.assumptions.items()]
            for name, value in most:
                if name in HIDDEN_SHARES and value > 1.0:
                    raise ValueError(f"{name}={value:g} is a share, at most 1; nearest: 1")
        every = [*self.constants.items()]
        for variant in self.variants.values():
            every += variant.constants.items()
            if unknown := sorted({*variant.constants, *variant.assumptions} - {*Stack._fields}):
                raise ValueError(f"variants has unknown {', '.join(unknown)}")
        for name, constant in every:
            if not constant.low <= constant.value <= constant.high:
                raise ValueError(
                    f"constants.{name}.value={constant.value:g} must lie in its interval "
                    f"[{constant.low:g}, {constant.high:g}]"
                )
        return self

    def stack(self) -> Stack:
        """Return the constants in the form that the formulas take."""
        return self._stack

    @cached_property
    def _stack(self) -> Stack:
        values = {name: constant.value for name, constant in self.constants.items()}
        values |= {name: assumed.value for name, assumed in self.assumptions.items()}
        return Stack(**values)

    def varied(self, *names: str) -> StackProfile:
        """Return the profile with some of its switches on, in the order of the profile.

        Raises
        ------
        PackError
            The profile has no such variant.
        """
        if not names:
            return self
        if unknown := sorted(set(names) - set(self.variants)):
            known = ", ".join(sorted(self.variants)) or "none"
            raise PackError(
                f"Stack profile {self.name} has no variant {unknown[0]!r}; it has {known}."
            )
        constants, assumptions = dict(self.constants), dict(self.assumptions)
        on = [name for name in self.variants if name in names]
        for variant in (self.variants[name] for name in on):
            for field in (*variant.constants, *variant.assumptions):
                constants.pop(field, None)
                assumptions.pop(field, None)
            constants |= variant.constants
            assumptions |= variant.assumptions
        update = {
            "name": "+".join((self.name, *on)),
            "constants": constants,
            "assumptions": assumptions,
            "variants": {},
        }
        return self.model_copy(update=update)

    def source(self, name: str) -> Source:
        """Return what a constant rests on, fitted or assumed."""
        fitted = self.constants.get(name)
        return self.assumptions[name].source if fitted is None else fitted.source

    def check(self, **values: float) -> tuple[RangeFlag, ...]:
        """Return a flag for each value that no fitted run had; names that have no range pass."""
        flags = []
        for variable, value in values.items():
            if variable in self.ranges:
                low, high = self.ranges[variable]
                if not low <= value <= high:
                    flags.append(RangeFlag(self.name, variable, float(value), low, high, "flag"))
        return tuple(flags)


def _same_names(table: str, given: set[str], wanted: set[str]) -> None:
    if missing := sorted(wanted - given):
        raise ValueError(f"{table} lack {', '.join(missing)}")
    if unknown := sorted(given - wanted):
        raise ValueError(f"{table} has unknown {', '.join(unknown)}")


def shipped_stacks() -> tuple[str, ...]:
    """Return the names of the profiles that ship with the package."""
    return shipped(FOLDER)


@cache
def fitted_stacks(hardware: str) -> tuple[str, ...]:
    """Return the names of the shipped profiles that were fitted with a hardware pack."""
    return tuple(name for name in shipped_stacks() if hardware in load_stack(name).hardware)


def load_stack(name_or_path: str) -> StackProfile:
    """Read a shipped stack profile by name, or a user's by path.

    Variants follow the name, each behind a plus: ``megatron-bridge+graphs+overlap``.

    Raises
    ------
    PackError
        No such profile, or a file that is not a valid one; one sentence.
    """
    name, *variants = name_or_path.split("+")
    return read_record(name, FOLDER, "stack profile", StackProfile).varied(*variants)

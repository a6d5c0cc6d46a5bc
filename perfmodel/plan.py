"""A training layout, the meshes that it makes, and the spaces that it is chosen from.

Degrees follow Megatron-Core: tensor (`tp`), expert tensor (`etp`), expert (`ep`), pipeline
(`pp`), virtual pipeline (`vpp`), context (`cp`) and data (`dp`) parallelism. What makes a
plan legal is declared in `perfmodel.rules`; nothing here repeats it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, StrictInt

from perfmodel._integers import divisors
from perfmodel.constraints import Constraint, Quotient, compile_order
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen
from perfmodel.ranks import Mesh
from perfmodel.rules import (
    ARCHITECTURE_VARIABLES,
    DERIVED,
    LAYOUT_CODES,
    LAYOUT_VARIABLES,
    RULES,
    architecture_values,
    explain,
    run_values,
)
from perfmodel.stages import BALANCED, Stage, StageLayout, counts_of, layout_numbers, stages_of

__all__ = ["MAX_DEGREE", "Mesh", "Plan", "PlanSpace", "PlanTable", "Recompute", "legal_mask"]

MAX_LAYOUTS = 20_000_000
"""The most rows of a skeleton on the way to its last column."""

MAX_DEGREE = 2**20
"""The largest degree, micro-batch and world that make sense to this package."""

Column = NDArray[np.int64]
Degree = Annotated[StrictInt, Field(ge=1, le=MAX_DEGREE)]


class Recompute(StrEnum):
    """Which activations the backward pass computes again."""

    NONE = "none"
    SELECTIVE = "selective"
    SUPER_SELECTIVE = "super-selective"
    FULL = "full"

    @property
    def code(self) -> int:
        """The integer that stands for it in columns, 0 to 3 from least to most."""
        return tuple(Recompute).index(self)


def _canonical(text: str | None) -> str | None:
    """Read a layout and write it in the one form that has no choices left."""
    if text is None or text == BALANCED:
        return text
    counts = counts_of(text)
    if counts is not None:
        return "/".join(map(str, counts))
    stages = stages_of(text)
    return str(StageLayout(len(stages), stages))


Layout = Annotated[str | None, AfterValidator(_canonical)]


class Plan(Frozen):
    """One layout of a training step over a cluster.

    Attributes
    ----------
    tp, etp, ep, pp, vpp, cp, dp : int
        Degrees of parallelism. `etp` is 1 unless given: it never follows `tp` in silence.
    micro_batch : int
        Sequences in a microbatch.
    recompute : Recompute
        Activation recomputation.
    layout : str, optional
        What lies on each virtual stage: ``balanced``; decoder layers of each such as
        ``16/16/16/13``, prediction layers on the last; or a layout string of Megatron-Core
        (:mod:`perfmodel.stages`). None asks for equal stages.
    """

    tp: Degree = 1
    etp: Degree = 1
    ep: Degree = 1
    pp: Degree = 1
    vpp: Degree = 1
    cp: Degree = 1
    dp: Degree
    micro_batch: Degree = 1
    recompute: Recompute = Recompute.NONE
    layout: Layout = None

    @classmethod
    def parse(cls, text: str, world: int | None = None) -> Plan:
        """Read a plan such as ``"ep=8,pp=8,mbs=4,recompute=full"``.

        Parameters
        ----------
        text : str
            Comma-separated ``key=value``; keys are the fields, or `mbs` for `micro_batch`. A
            value with commas in it stands in quotes.
        world : int, optional
            Number of devices, from which `dp` follows where the text does not give it.
        """
        given: dict[str, int | Recompute | str | None] = {}
        for item in filter(None, (part.strip() for part in _ITEM.findall(text))):
            written, equals, value = (part.strip() for part in item.partition("="))
            if not equals:
                raise PerfmodelError(f"{_quote(item)} is not key=value, as in ep=8,pp=4.")
            name = _ALIASES.get(written, written)
            if name not in cls.model_fields:
                raise PerfmodelError(_unknown_key(written))
            if name in given:
                raise PerfmodelError(f"{written} is given twice; keep one.")
            given[name] = _value_of(name, written, value)
        if "dp" not in given:
            if world is None:
                raise PerfmodelError("dp is missing; give dp, or the number of devices.")
            given["dp"] = _derive_dp(cls.model_validate({**given, "dp": 1}), world)
        return cls.model_validate(given)

    @property
    def mesh(self) -> Mesh:
        """The device meshes of this plan."""
        return Mesh.of(self)

    def stages(self, mtp_layers: int) -> tuple[Stage, ...] | None:
        """Return the virtual stages of an explicit layout.

        None where they follow from the numbers of layers and stages.

        Parameters
        ----------
        mtp_layers : int
            Prediction layers of the model, which counts of decoder layers do not mention.
        """
        if self.layout is None or self.layout == BALANCED:
            return None
        counts = counts_of(self.layout)
        if counts is None:
            return stages_of(self.layout)
        return StageLayout.from_counts(counts, mtp=mtp_layers).stages

    def layout_variables(self, mtp_layers: int) -> dict[str, int]:
        """Return what the rules read of the layout."""
        stages = self.stages(mtp_layers)
        if stages is None:
            return {"layout": LAYOUT_CODES[self.layout or "equal"]}
        return {"layout": LAYOUT_CODES["explicit"], **layout_numbers(stages, self.pp)}

    def __str__(self) -> str:
        """Write every field, defaults too and a layout if there is one, as `parse` reads it."""
        shown = {_SHORT.get(name, name): value for name, value in self if value is not None}
        return ",".join(f"{name}={value}" for name, value in shown.items())


_ITEM = re.compile(r"""(?:"[^"]*"|'[^']*'|[^,"'])+|["']""")
_ALIASES = {"mbs": "micro_batch"}
_SHORT = {name: alias for alias, name in _ALIASES.items()}
_DP = Quotient(("world",), ("tp", "cp", "pp"))


def _quote(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _unknown_key(key: str) -> str:
    keys = [_SHORT.get(name, name) for name in Plan.model_fields]
    close = get_close_matches(key, [*keys, *_SHORT], n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    return f"{_quote(key)} is not a key of a plan, which are {', '.join(keys)}{hint}"


def _value_of(name: str, written: str, value: str) -> int | Recompute | str | None:
    if name == "recompute":
        return _recompute(value)
    if name == "layout":
        bare = value[1:-1] if value[:1] in ("'", '"') and value[-1:] == value[:1] else value
        return _canonical(bare)
    return _degree(written, value)


def _degree(key: str, value: str) -> int:
    number = int(value) if re.fullmatch(r"[0-9]{1,18}", value) else 0
    if not 1 <= number <= MAX_DEGREE:
        raise PerfmodelError(
            f"{key}={_quote(value)} must be a whole number from 1 to {MAX_DEGREE}."
        )
    return number


def _recompute(value: str) -> Recompute:
    try:
        return Recompute(value)
    except ValueError:
        modes = ", ".join(Recompute)
        raise PerfmodelError(f"recompute={_quote(value)} must be one of {modes}.") from None


def _derive_dp(plan: Plan, world: int) -> int:
    factors = {"tp": plan.tp, "cp": plan.cp, "pp": plan.pp}
    values = {**factors, "world": _checked_world(world)}
    if not _DP.defined.holds(values):
        largest = max(factors, key=lambda name: factors[name])
        raise PerfmodelError(explain(_DP.defined, values, largest)[0])
    return int(_DP.value(values))


def _checked_world(world: int) -> int:
    checked = run_values(world, 1, 1)["world"]
    if checked > MAX_DEGREE:
        raise PerfmodelError(f"world={checked} must be at most {MAX_DEGREE}.")
    return checked


@dataclass(frozen=True, eq=False)
class PlanTable:
    """Many plans as columns of equal length; `recompute` and `layout` hold codes."""

    tp: Column
    etp: Column
    ep: Column
    pp: Column
    vpp: Column
    cp: Column
    dp: Column
    micro_batch: Column
    recompute: Column
    n_microbatches: Column
    edp: Column
    layout: Column
    _memo: dict[tuple[object, ...], NDArray[np.bool_]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __len__(self) -> int:
        """Count the plans."""
        return len(self.tp)

    @property
    def columns(self) -> dict[str, Column]:
        """Every column by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    @cached_property
    def both_layouts(self) -> bool:
        """Say whether some plans have equal stages and some a balanced layout."""
        return bool(len(self)) and bool(self.layout.min() < self.layout.max())

    def plan(self, i: int) -> Plan:
        """Read one row back as a plan."""
        row = {name: int(self.columns[name][i]) for name in Plan.model_fields}
        recompute = tuple(Recompute)[row["recompute"]]
        layout = BALANCED if row["layout"] == LAYOUT_CODES[BALANCED] else None
        return Plan.model_validate({**row, "recompute": recompute, "layout": layout})

    def select(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> PlanTable:
        """Keep the rows of a mask or of an index."""
        return PlanTable(**{name: column[rows] for name, column in self.columns.items()})


_EXPLICIT = {*LAYOUT_VARIABLES}  # a table has no explicit layouts
_READS = {
    r.constraint: r.constraint.variables & {*ARCHITECTURE_VARIABLES}
    for r in RULES
    if not r.constraint.variables & _EXPLICIT
}
_RUN_CONSTRAINTS = tuple(constraint for constraint, reads in _READS.items() if not reads)
_ARCHITECTURE_CONSTRAINTS = tuple((c, tuple(sorted(reads))) for c, reads in _READS.items() if reads)


def legal_mask(table: PlanTable, architecture_vars: Mapping[str, int]) -> NDArray[np.bool_]:
    """Mark the rows of a skeleton that are legal for an architecture.

    The rules that no architecture enters hold already in a table that `PlanSpace.skeleton`
    made. A rule is evaluated once per table and per set of values that it reads, so that a
    whole ladder of architectures costs little more than its distinct widths. Where the table has
    equal stages as well, a balanced layout that comes to the same is left out.
    """
    values = architecture_values(architecture_vars)
    legal = np.ones(len(table), dtype=np.bool_)
    if table.both_layouts:
        equal = values["n_layers"] % (table.pp * table.vpp) == 0
        legal &= ~(equal & (table.layout == LAYOUT_CODES[BALANCED]))
    for constraint, reads in _ARCHITECTURE_CONSTRAINTS:
        key = (constraint, *(values[variable] for variable in reads))
        if key not in table._memo:
            table._memo[key] = np.asarray(constraint.holds({**table.columns, **values}))
        legal &= table._memo[key]
    return legal


def _sorted_unique(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))


def _least_first(modes: tuple[Recompute, ...]) -> tuple[Recompute, ...]:
    return tuple(mode for mode in Recompute if mode in modes)


Degrees = Annotated[
    tuple[Degree, ...], Field(min_length=1, max_length=256), AfterValidator(_sorted_unique)
]
Layouts = Annotated[
    tuple[Literal["equal", "balanced"], ...],
    Field(min_length=1),
    AfterValidator(lambda kinds: tuple(kind for kind in LAYOUT_CODES if kind in kinds)),
]
Modes = Annotated[tuple[Recompute, ...], Field(min_length=1), AfterValidator(_least_first)]


class PlanSpace(Frozen):
    """The values that each degree may take; `dp` follows from the number of devices.

    Attributes
    ----------
    tp, ep, pp, cp : tuple of int, optional
        Allowed degrees; None allows every divisor of the number of devices.
    max_tp, max_ep, max_pp, max_cp : int, optional
        A cap on each of these.
    etp, vpp, micro_batch : tuple of int
        Allowed values, in full.
    recompute : tuple of Recompute
        Allowed modes.
    layouts : tuple of str
        ``equal`` stages, ``balanced`` ones for other numbers of layers, or both.
    """

    tp: Degrees | None = None
    ep: Degrees | None = None
    pp: Degrees | None = None
    cp: Degrees | None = None
    max_tp: Degree | None = None
    max_ep: Degree | None = None
    max_pp: Degree | None = None
    max_cp: Degree | None = None
    etp: Degrees = (1,)
    vpp: Degrees = (1,)
    micro_batch: Degrees = (1, 2, 4)
    recompute: Modes = tuple(Recompute)
    layouts: Layouts = ("equal",)

    def domain(self, variable: str, world: int) -> Column:
        """List the values that a degree may take on some number of devices, ascending."""
        allowed = getattr(self, variable)
        values = np.array(divisors(world) if allowed is None else allowed, dtype=np.int64)
        return values[values <= (getattr(self, f"max_{variable}", None) or MAX_DEGREE)]

    def skeleton(self, world: int, seq_len: int, global_batch: int) -> PlanTable:
        """Enumerate the plans that are legal whatever the architecture.

        One loop per degree, each over whole columns, and each pruned by every rule that the
        degrees bound so far can decide. Rows are in ascending order of (tp, etp, cp, ep,
        micro_batch, pp, vpp, dp, recompute, layout).
        """
        run = run_values(_checked_world(world), seq_len, global_batch)
        columns: dict[str, Column] = {"": np.zeros(1, dtype=np.int64)}
        levels = compile_order(_RUN_CONSTRAINTS, _BINDING_ORDER, run)
        for variable, constraints in zip(_BINDING_ORDER, levels, strict=True):
            if quotient := _QUOTIENTS.get(variable):
                columns = _where(columns, run, quotient.defined)
                columns[variable] = np.asarray(quotient.value({**columns, **run}), dtype=np.int64)
            else:
                columns = _times(columns, variable, self.domain(variable, world))
            columns = _where(columns, run, *constraints)
        codes = np.array([mode.code for mode in self.recompute], dtype=np.int64)
        columns = _times(columns, "recompute", codes)
        kinds = np.array([LAYOUT_CODES[kind] for kind in self.layouts], dtype=np.int64)
        columns = _times(columns, "layout", kinds)
        del columns[""]
        for column in columns.values():
            column.flags.writeable = False
        return PlanTable(**columns)

    def plans(
        self, architecture_vars: Mapping[str, int], world: int, seq_len: int, global_batch: int
    ) -> Iterator[Plan]:
        """Iterate over the plans that are legal for an architecture, in the same order."""
        table = self.skeleton(world, seq_len, global_batch)
        return (table.plan(int(i)) for i in np.flatnonzero(legal_mask(table, architecture_vars)))


_QUOTIENTS: Mapping[str, Quotient] = {"dp": _DP, **DERIVED}
_BINDING_ORDER = (
    *("tp", "etp", "cp", "ep", "micro_batch", "pp"),
    *("dp", "edp", "n_microbatches", "vpp"),
)


def _times(columns: dict[str, Column], variable: str, domain: Column) -> dict[str, Column]:
    """Pair every row with every value of one more variable, the new one fastest."""
    rows = len(columns[""])
    if rows * len(domain) > MAX_LAYOUTS:
        raise PerfmodelError(
            f"The space has {rows * len(domain)} layouts at {variable}, which must be at most "
            f"{MAX_LAYOUTS}; list fewer values."
        )
    longer = {name: np.repeat(column, len(domain)) for name, column in columns.items()}
    return {**longer, variable: np.tile(domain, rows)}


def _where(
    columns: dict[str, Column], run: Mapping[str, int], *constraints: Constraint
) -> dict[str, Column]:
    """Keep the rows on which every constraint holds."""
    for constraint in constraints:
        kept = np.broadcast_to(constraint.holds({**columns, **run}), columns[""].shape)
        columns = {name: column[kept] for name, column in columns.items()}
    return columns

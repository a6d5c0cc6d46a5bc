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
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, StrictInt, model_validator

from perfmodel._integers import divisors
from perfmodel.constraints import Constraint, Quotient, compile_order
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen
from perfmodel.kernels import BF16_BYTES
from perfmodel.mesh import PlanDims
from perfmodel.ranks import Mesh
from perfmodel.replay import FIRST_MODULE_CODE, MODULE_BITS
from perfmodel.rules import (
    ARCHITECTURE_VARIABLES,
    DERIVED,
    LAYOUT_CODES,
    LAYOUT_VARIABLES,
    RULES,
    architecture_values,
    explain,
    option_values,
    run_values,
)
from perfmodel.stages import BALANCED, Stage, StageLayout, counts_of, layout_numbers, stages_of

__all__ = [
    "MAX_DEGREE",
    "Mesh",
    "Plan",
    "PlanSpace",
    "PlanTable",
    "Recompute",
    "RuleMasks",
    "legal_mask",
    "plan_dims",
]

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


class Module(StrEnum):
    """A part of a layer that Megatron-Core can recompute by itself."""

    CORE_ATTN = "core_attn"
    LAYERNORM = "layernorm"
    MOE_ACT = "moe_act"
    MLA_UP_PROJ = "mla_up_proj"
    MLP = "mlp"
    MOE = "moe"
    SHARED_EXPERTS = "shared_experts"


Modules = Annotated[
    tuple[Module, ...],
    AfterValidator(lambda given: tuple(module for module in Module if module in given)),
]
ZeroStage = Annotated[StrictInt, Field(ge=0, le=3)]
CpComm = Literal["p2p", "a2a"]
Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]


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
    recompute_modules : tuple of Module
        With `recompute` selective: the modules that are computed again, in place of attention
        alone (Megatron-Core's ``--recompute-modules``).
    sequence_parallel : bool
        Whether what lies between the blocks that TP splits is split over TP as well.
    zero : int
        ZeRO stage: what is sharded over the replicas. 0 nothing; 1 the optimizer's state
        (Megatron-Core's distributed optimizer); 2 gradients too; 3 weights too (FSDP).
    optimizer_instances : int
        Groups of replicas that each hold a whole copy of what `zero` shards
        (``--num-distributed-optimizer-instances``; with `zero` 3, HSDP).
    cp_comm : str
        ``p2p``: keys and values go round a ring; ``a2a``: heads are exchanged (Ulysses).
    optimizer_offload : float
        Share of the optimizer's state and step that is on the host [-].
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
    recompute_modules: Modules = ()
    sequence_parallel: bool = True
    zero: ZeroStage = 1
    optimizer_instances: Degree = 1
    cp_comm: CpComm = "p2p"
    optimizer_offload: Share = 0.0

    @model_validator(mode="after")
    def _modules_of_selective(self) -> Self:
        if self.recompute_modules and self.recompute is not Recompute.SELECTIVE:
            raise ValueError(
                f"recompute_modules={'+'.join(self.recompute_modules)} needs recompute=selective, "
                f"not {self.recompute}"
            )
        return self

    @property
    def recompute_code(self) -> int:
        """The integer that stands for what is computed again (:mod:`perfmodel.replay`)."""
        if not self.recompute_modules:
            return self.recompute.code
        return FIRST_MODULE_CODE + sum(MODULE_BITS[module] for module in self.recompute_modules)

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
        given: dict[str, Value] = {}
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
        """Write every degree, defaults too, and what else is not default, as `parse` reads it."""
        plain = {name for name in OPTIONS if getattr(self, name) == _default(name)}
        shown = {
            _SHORT.get(name, name): _written(value)
            for name, value in self
            if value is not None and name not in plain
        }
        return ",".join(f"{name}={value}" for name, value in shown.items())


ROW_COLUMNS = (
    *("tp", "etp", "ep", "pp", "vpp", "cp", "dp"),
    *("micro_batch", "recompute", "layout"),
)
"""What tells the rows of a table apart."""

_ITEM = re.compile(r"""(?:"[^"]*"|'[^']*'|[^,"'])+|["']""")
_ALIASES = {"mbs": "micro_batch"}
_SHORT = {name: alias for alias, name in _ALIASES.items()}
OPTIONS = (
    "recompute_modules",
    "sequence_parallel",
    "zero",
    "optimizer_instances",
    "cp_comm",
    "optimizer_offload",
)
"""Fields of a plan that are alike in all plans of a space."""
_DP = Quotient(("world",), ("tp", "cp", "pp"))


def _quote(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _unknown_key(key: str) -> str:
    keys = [_SHORT.get(name, name) for name in Plan.model_fields]
    close = get_close_matches(key, [*keys, *_SHORT], n=1)
    if close:
        return f"{_quote(key)} is not a key of a plan; did you mean {close[0]}?"
    return f"{_quote(key)} is not a key of a plan, which are {', '.join(keys)}."


def _default(name: str) -> object:
    return Plan.model_fields[name].default


def _written(value: object) -> object:
    if isinstance(value, tuple):
        return "+".join(value)
    return str(value).lower() if isinstance(value, bool) else value


Value = int | float | bool | Recompute | str | tuple[str, ...] | None


def _value_of(name: str, written: str, value: str) -> Value:
    if name == "recompute":
        return _recompute(value)
    if name == "recompute_modules":
        return tuple(_one_of(written, part, tuple(Module)) for part in value.split("+") if part)
    if name == "sequence_parallel":
        return _one_of(written, value, ("true", "false")) == "true"
    if name == "cp_comm":
        return _one_of(written, value, ("p2p", "a2a"))
    if name == "zero":
        return int(_one_of(written, value, ("0", "1", "2", "3")))
    if name == "optimizer_offload":
        return _share(written, value)
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


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise PerfmodelError(f"{key}={_quote(value)} must be one of {', '.join(allowed)}.")
    return value


def _share(key: str, value: str) -> float:
    if re.fullmatch(r"[0-9.]{1,18}", value) and value.count(".") <= 1 and value != ".":
        number = float(value)
        if number <= 1.0:
            return number
    raise PerfmodelError(f"{key}={_quote(value)} must be a number from 0 to 1.")


def _recompute(value: str) -> Recompute:
    return Recompute(_one_of("recompute", value, tuple(Recompute)))


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


def plan_dims(plan: Plan, load: float = 1.0, saved_bytes: float = BF16_BYTES) -> PlanDims:
    """Return the plan as the formulas take it.

    ``load`` is the routing's on the plan's EP; ``saved_bytes`` what one element of a linear
    layer's saved input takes in the precision of the run.
    """
    return PlanDims(
        tp=float(plan.tp),
        etp=float(plan.etp),
        ep=float(plan.ep),
        pp=float(plan.pp),
        vpp=float(plan.vpp),
        cp=float(plan.cp),
        dp=float(plan.dp),
        micro_batch=float(plan.micro_batch),
        recompute=float(plan.recompute_code),
        load=load,
        sequence_parallel=float(plan.sequence_parallel),
        zero=float(plan.zero),
        instances=float(plan.optimizer_instances),
        heads_over_cp=float(plan.cp_comm == "a2a"),
        offload=plan.optimizer_offload,
        saved_bytes=saved_bytes,
    )


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
    options: dict[str, object] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """Count the plans."""
        return len(self.tp)

    @property
    def columns(self) -> dict[str, Column]:
        """Every column by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init and f.repr}

    @cached_property
    def codes(self) -> dict[str, int]:
        """What the rules read of the options."""
        return option_values(PlanSpace.model_validate(self.options))

    @cached_property
    def rule_masks(self) -> RuleMasks:
        """The rules that an architecture enters, on the rows of the table."""
        alike = {name: np.full(len(self), value) for name, value in self.codes.items()}
        return RuleMasks({**self.columns, **alike})

    def legal(self, values: Mapping[str, int]) -> NDArray[np.bool_]:
        """:func:`legal_mask` of values that are known to be right."""
        legal = self.rule_masks.mask(values)
        if self.both_layouts:
            equal = values["n_layers"] % (self.pp * self.vpp) == 0
            legal &= ~(equal & (self.layout == LAYOUT_CODES[BALANCED]))
        return legal

    @cached_property
    def both_layouts(self) -> bool:
        """Say whether some plans have equal stages and some a balanced layout."""
        return bool(len(self)) and bool(self.layout.min() < self.layout.max())

    def plan(self, i: int) -> Plan:
        """Read one row back as a plan."""
        names = (name for name in Plan.model_fields if name not in OPTIONS)
        row = {name: int(self.columns[name][i]) for name in names}
        recompute = tuple(Recompute)[row["recompute"]]
        layout = BALANCED if row["layout"] == LAYOUT_CODES[BALANCED] else None
        return Plan.model_validate(
            {**row, **self.options, "recompute": recompute, "layout": layout}
        )

    @cached_property
    def _places(self) -> dict[tuple[int, ...], int]:
        columns = [self.columns[name].tolist() for name in ROW_COLUMNS]
        return {key: row for row, key in enumerate(zip(*columns, strict=True))}

    def row(self, plan: Plan) -> int:
        """Return the row that :meth:`plan` reads as a plan.

        Raises
        ------
        PerfmodelError
            The table does not have it.
        """
        values = {**dict(plan), "recompute": plan.recompute_code}
        values["layout"] = LAYOUT_CODES["equal" if plan.layout is None else BALANCED]
        alike = all(getattr(plan, name) == value for name, value in self.options.items())
        row = self._places.get(tuple(int(values[name]) for name in ROW_COLUMNS))
        if row is None or not alike or plan.layout not in (None, BALANCED):
            raise PerfmodelError(f"The plan {plan} is not in the space.")
        return row

    def select(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> PlanTable:
        """Keep the rows of a mask or of an index."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return PlanTable(**columns, options=self.options)


_EXPLICIT = {*LAYOUT_VARIABLES}  # a table has no explicit layouts
_READS = {
    r.constraint: r.constraint.variables & {*ARCHITECTURE_VARIABLES}
    for r in RULES
    if not r.constraint.variables & _EXPLICIT
}
_RUN_CONSTRAINTS = tuple(constraint for constraint, reads in _READS.items() if not reads)
_ARCHITECTURE_CONSTRAINTS = tuple((c, tuple(sorted(reads))) for c, reads in _READS.items() if reads)


class RuleMasks:
    """Rules that read some columns and the architecture, on rows of these columns.

    A rule is evaluated once for each set of values that it reads of an architecture, so that a
    whole ladder of architectures costs little more than its distinct widths.

    Parameters
    ----------
    columns : mapping of str to column
        Variables of a plan, all of one length; a rule that reads others is left out.
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = dict(columns)
        self._rows = len(next(iter(columns.values())))
        self._rules = tuple(
            (number, constraint, reads)
            for number, (constraint, reads) in enumerate(_ARCHITECTURE_CONSTRAINTS)
            if constraint.variables <= columns.keys() | {*reads}
        )
        self._masks: dict[tuple[int, ...], NDArray[np.bool_] | None] = {}

    @property
    def evaluated(self) -> int:
        """How many times a rule was evaluated so far [-]."""
        return len(self._masks)

    def mask(self, values: Mapping[str, int]) -> NDArray[np.bool_]:
        """Mark the rows that break none of the rules.

        ``values`` are those of :func:`perfmodel.rules.architecture_values`.
        """
        legal = np.ones(self._rows, dtype=np.bool_)
        for holds in self._each(values):
            legal &= holds
        return legal

    def broken(self, values: Mapping[str, int]) -> NDArray[np.int64]:
        """Count the rules that each row breaks; ``values`` as in `mask`."""
        count = np.zeros(self._rows, dtype=np.int64)
        for holds in self._each(values):
            count += ~holds
        return count

    def _each(self, values: Mapping[str, int]) -> Iterator[NDArray[np.bool_]]:
        """Yield where a rule holds, for each rule that does not hold everywhere."""
        for number, constraint, reads in self._rules:
            key = (number, *[values[variable] for variable in reads])
            if key not in self._masks:
                holds = np.asarray(constraint.holds({**self._columns, **values}))
                self._masks[key] = None if holds.all() else holds
            found = self._masks[key]
            if found is not None:
                yield found


def legal_mask(table: PlanTable, architecture_vars: Mapping[str, int]) -> NDArray[np.bool_]:
    """Mark the rows of a skeleton that are legal for an architecture.

    The rules that no architecture enters hold already in a table that `PlanSpace.skeleton`
    made. Where the table has equal stages as well, a balanced layout that comes to the same is left
    out.
    """
    return table.legal(architecture_values(architecture_vars))


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
    sequence_parallel, zero, optimizer_instances, cp_comm, optimizer_offload
        Of every plan in the space; see `Plan`.
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
    sequence_parallel: bool = True
    zero: ZeroStage = 1
    optimizer_instances: Degree = 1
    cp_comm: CpComm = "p2p"
    optimizer_offload: Share = 0.0

    @property
    def options(self) -> dict[str, object]:
        """What every plan of the space has in common."""
        return {name: getattr(self, name) for name in OPTIONS if name in type(self).model_fields}

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
        run = {**run_values(_checked_world(world), seq_len, global_batch), **option_values(self)}
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
        return PlanTable(**columns, options=self.options)

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

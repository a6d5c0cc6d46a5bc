"""The spaces that plans are chosen from, and their enumeration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Field

from perfmodel._integers import divisors
from perfmodel.constraints import Constraint, Quotient, compile_order
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen
from perfmodel.plan import (
    DP,
    MAX_DEGREE,
    OPTIONS,
    Column,
    CpComm,
    Degree,
    Plan,
    Recompute,
    Share,
    ZeroStage,
    checked_world,
)
from perfmodel.plan_table import RUN_CONSTRAINTS, PlanTable, legal_mask
from perfmodel.rules import DERIVED, LAYOUT_CODES, option_values, run_values

__all__ = ["PlanSpace"]

MAX_LAYOUTS = 20_000_000
"""The most rows of a skeleton on the way to its last column."""


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
        run = {**run_values(checked_world(world), seq_len, global_batch), **option_values(self)}
        columns: dict[str, Column] = {"": np.zeros(1, dtype=np.int64)}
        levels = compile_order(RUN_CONSTRAINTS, _BINDING_ORDER, run)
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


_QUOTIENTS: Mapping[str, Quotient] = {"dp": DP, **DERIVED}
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

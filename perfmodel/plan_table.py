"""Many plans as columns, and the rules over all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfmodelError
from perfmodel.plan import OPTIONS, Column, Plan, Recompute
from perfmodel.rules import (
    ARCHITECTURE_VARIABLES,
    LAYOUT_CODES,
    LAYOUT_VARIABLES,
    RULES,
    architecture_values,
    option_values,
)
from perfmodel.stages import BALANCED

__all__ = ["RUN_CONSTRAINTS", "PlanTable", "RuleMasks", "legal_mask"]

ROW_COLUMNS = (
    *("tp", "etp", "ep", "pp", "vpp", "cp", "dp"),
    *("micro_batch", "recompute", "layout"),
)
"""What tells the rows of a table apart."""


_EXPLICIT = {*LAYOUT_VARIABLES}  # a table has no explicit layouts
_READS = {
    r.constraint: r.constraint.variables & {*ARCHITECTURE_VARIABLES}
    for r in RULES
    if not r.constraint.variables & _EXPLICIT
}
RUN_CONSTRAINTS = tuple(constraint for constraint, reads in _READS.items() if not reads)
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
        return option_values(Plan.model_validate({"dp": 1, **self.options}))

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

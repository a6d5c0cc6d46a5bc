"""A training layout and the meshes that it makes.

Degrees follow Megatron-Core: tensor (`tp`), expert tensor (`etp`), expert (`ep`), pipeline
(`pp`), virtual pipeline (`vpp`), context (`cp`) and data (`dp`) parallelism. What makes a
plan legal is declared in `perfmodel.rules`; nothing here repeats it.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from enum import StrEnum
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, StrictInt, model_validator

from perfmodel.constraints import Quotient
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen
from perfmodel.kernels import BF16_BYTES
from perfmodel.mesh import PlanDims
from perfmodel.ranks import Mesh
from perfmodel.replay import FIRST_MODULE_CODE, MODULE_BITS
from perfmodel.rules import (
    LAYOUT_CODES,
    explain,
    run_values,
)
from perfmodel.stages import BALANCED, Stage, StageLayout, counts_of, layout_numbers, stages_of

__all__ = [
    "MAX_DEGREE",
    "Mesh",
    "Plan",
    "Recompute",
    "plan_dims",
]

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
DP: Quotient = Quotient(("world",), ("tp", "cp", "pp"))
"""What data parallelism is left of the world."""


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
    values = {**factors, "world": checked_world(world)}
    if not DP.defined.holds(values):
        largest = max(factors, key=lambda name: factors[name])
        raise PerfmodelError(explain(DP.defined, values, largest)[0])
    return int(DP.value(values))


def checked_world(world: int) -> int:
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

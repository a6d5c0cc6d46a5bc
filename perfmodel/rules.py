"""Every legality rule of a plan, declared once.

A rule is a constraint with a name, a reason and an origin. Adding one to `RULES` enforces it
in the enumerator, explains it in `violations`, and prints it in the documentation.

Variables: the degrees of a `Plan` (`PLAN_VARIABLES`); its `layout`
(:mod:`perfmodel.layout_rules`); what follows from them (`DERIVED`); the
shape of the model (`ARCHITECTURE_VARIABLES`, where 0 says that there is no such part); and
`world`, `seq_len`, `global_batch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from perfmodel.constraints import (
    AnyOf,
    AtLeast,
    AtMost,
    Constraint,
    Divides,
    Implies,
    ProductIs,
    Quotient,
)
from perfmodel.errors import IllegalPlanError, PerfmodelError
from perfmodel.frozen import Frozen
from perfmodel.layout_rules import (
    LAYOUT_CODES,
    LAYOUT_RULES,
    LAYOUT_VARIABLES,
    layout_note,
    said,
)
from perfmodel.rule import Rule

if TYPE_CHECKING:
    from perfmodel.plan import Plan
    from perfmodel.plan_space import PlanSpace

__all__ = [
    "ARCHITECTURE_VARIABLES",
    "DERIVED",
    "LAYOUT_CODES",
    "LAYOUT_VARIABLES",
    "OPTION_VARIABLES",
    "PLAN_VARIABLES",
    "RULES",
    "Rule",
    "Violation",
    "architecture_values",
    "explain",
    "option_values",
    "require_legal",
    "rules_table",
    "run_values",
    "violations",
]

PLAN_VARIABLES = ("tp", "etp", "ep", "pp", "vpp", "cp", "dp", "micro_batch")
OPTION_VARIABLES = (
    "zero",
    "optimizer_instances",
    "sequence_parallel",
    "heads_over_cp",
    "mla_up_proj",
)
"""What all plans of a space have in common; the last three are 1 for yes and 0 for no, and
`mla_up_proj` says whether that module is computed again."""
ARCHITECTURE_VARIABLES = (
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "d_ff",
    "n_experts",
    "d_expert",
    "d_shared",
    "first_k_dense",
    "mtp_layers",
    "latent",
)
_AT_LEAST_ONE = ("n_layers", "n_heads", "n_kv_heads")
_MAY_BE_ABSENT = ("mtp_layers", "latent")
DERIVED: Mapping[str, Quotient] = MappingProxyType(
    {
        "edp": Quotient(("tp", "cp", "dp"), ("etp", "ep")),
        "n_microbatches": Quotient(("global_batch",), ("dp", "micro_batch")),
        "layers_per_chunk": Quotient(("n_layers",), ("pp", "vpp")),
    }
)
"""The variables that follow from the others, each defined only where its division is exact."""

_WIDEST_SEARCH = 2**20


class Violation(Frozen):
    """One broken rule of one plan.

    Attributes
    ----------
    rule : str
        Name of the rule.
    message : str
        One sentence: what, which value, which rule, the nearest legal values.
    value, limit : int
        The two numbers that the rule compares.
    nearest : tuple of int
        The nearest legal values, below and above, of the rule's remedy variable with the
        other degrees held; empty where none exists.
    """

    rule: str
    message: str
    value: int
    limit: int
    nearest: tuple[int, ...]


RULES: tuple[Rule, ...] = (
    Rule(
        "world_size",
        ProductIs(("tp", "cp", "pp", "dp"), ("world",)),
        "the dense mesh uses every device exactly once",
        "dp",
        "megatron/core/parallel_state.py",
    ),
    Rule(
        "expert_mesh",
        Divides(("etp", "ep"), ("tp", "cp", "dp")),
        "the expert mesh folds over the devices of one pipeline stage, so EP may exceed DP",
        "ep",
        "megatron/core/parallel_state.py; Megatron-LM #5958, Megatron-Bridge #546",
    ),
    Rule(
        "global_batch",
        Divides(("dp", "micro_batch"), ("global_batch",)),
        "every replica runs the same whole number of microbatches",
        "micro_batch",
        "megatron/core/num_microbatches_calculator.py; verl #1811",
    ),
    *LAYOUT_RULES,
    Rule(
        "interleaving_needs_pipeline",
        Implies(AtLeast(("vpp",), (2,)), AtLeast(("pp",), (2,))),
        "there is nothing to interleave in one stage; PP=2 needs overlapped point-to-point",
        "vpp",
        "megatron/training/arguments.py; Megatron-LM #750",
    ),
    Rule(
        "interleaving_group",
        Implies(AtLeast(("vpp",), (2,)), Divides(("pp",), ("n_microbatches",))),
        "the interleaved schedule runs microbatches in groups of PP, its default group size",
        "n_microbatches",
        "megatron/core/pipeline_parallel/schedules.py; NeMo #14288",
    ),
    Rule(
        "attention_heads",
        Divides(("tp",), ("n_heads",)),
        "query heads are split over TP",
        "tp",
        "megatron/core/transformer/transformer_config.py",
    ),
    Rule(
        "kv_heads",
        AnyOf((Divides(("tp",), ("n_kv_heads",)), Divides(("n_kv_heads",), ("tp",)))),
        "key-value heads are split over TP, or each is replicated evenly",
        "tp",
        "megatron/core/transformer/transformer_config.py; transformers #48307",
    ),
    Rule(
        "dense_width",
        Implies(
            AnyOf((AtLeast(("first_k_dense",), (1,)), AtMost(("n_experts",), (0,)))),
            Divides(("tp",), ("d_ff",)),
        ),
        "the feed-forward width of dense layers is split over TP",
        "tp",
        "megatron/core/transformer/mlp.py",
    ),
    Rule(
        "shared_width",
        Divides(("tp",), ("d_shared",)),
        "the shared expert is split over TP, not over ETP",
        "tp",
        "megatron/core/transformer/moe/shared_experts.py",
    ),
    Rule(
        "experts",
        Divides(("ep",), ("n_experts",)),
        "every rank of EP holds the same number of whole experts",
        "ep",
        "megatron/core/transformer/moe/moe_layer.py; megablocks #160, DeepSpeed #1838",
    ),
    Rule(
        "dense_model",
        Implies(AtMost(("n_experts",), (0,)), AtMost(("etp", "ep"), (1,))),
        "a model without experts has no expert mesh",
        "ep",
        "megatron/core/transformer/transformer_config.py",
    ),
    Rule(
        "expert_width",
        Divides(("etp",), ("d_expert",)),
        "the width of a routed expert is split over ETP",
        "etp",
        "megatron/core/transformer/moe/experts.py",
    ),
    Rule(
        "sequence_halves",
        Implies(AtLeast(("cp",), (2,)), Divides((2, "cp"), ("seq_len",))),
        "causal balance gives every rank of CP two chunks of the sequence",
        "cp",
        "megatron/training/arguments.py; Megatron-LM #708, Megatron-Bridge #1982",
    ),
    Rule(
        "sequence_parallel",
        Implies(AtLeast(("sequence_parallel",), (1,)), Divides(("cp", "tp"), ("seq_len",))),
        "sequence parallelism splits the tokens of a CP rank over TP",
        "tp",
        "megatron/core/tensor_parallel/mappings.py; NeMo-RL #3563",
    ),
    Rule(
        "experts_need_sequence_parallel",
        Implies(
            AtMost(("sequence_parallel",), (0,)),
            AnyOf((AtMost(("tp",), (1,)), AtMost(("n_experts",), (0,)))),
        ),
        "without sequence parallelism every rank of TP would route the same tokens",
        "tp",
        "megatron/core/transformer/moe/moe_layer.py",
    ),
    Rule(
        "heads_over_cp",
        Implies(AtLeast(("heads_over_cp",), (1,)), Divides(("tp", "cp"), ("n_heads",))),
        "all-to-all context parallelism gives every rank whole heads",
        "cp",
        "arXiv 2309.14509; megatron/core/transformer/transformer_config.py (cp_comm_type)",
    ),
    Rule(
        "kv_heads_over_cp",
        Implies(AtLeast(("heads_over_cp",), (1,)), Divides(("tp", "cp"), ("n_kv_heads",))),
        "all-to-all context parallelism exchanges whole key-value heads and replicates none",
        "cp",
        "arXiv 2309.14509",
    ),
    Rule(
        "optimizer_instances",
        Divides(("optimizer_instances",), ("dp", "cp")),
        "every instance of the sharded optimizer spans the same number of replicas",
        "optimizer_instances",
        "megatron/core/parallel_state.py",
    ),
    Rule(
        "expert_optimizer_instances",
        Implies(
            AtLeast(("optimizer_instances",), (2,)),
            Divides(("optimizer_instances", "etp", "ep"), ("tp", "cp", "dp")),
        ),
        "every instance spans the same number of replicas of the experts",
        "optimizer_instances",
        "megatron/core/parallel_state.py; Megatron-LM #4342",
    ),
    Rule(
        "instances_need_shards",
        Implies(AtLeast(("optimizer_instances",), (2,)), AtLeast(("zero",), (1,))),
        "there is nothing to replicate where nothing is sharded",
        "optimizer_instances",
        "megatron/training/arguments.py",
    ),
    Rule(
        "sharding_in_pipeline",
        Implies(AtLeast(("zero",), (2,)), AtMost(("pp",), (1,))),
        "sharded gradients would be exchanged at every microbatch of every stage",
        "zero",
        "arXiv 1910.02054; DeepSpeed's PipelineEngine refuses ZeRO-2 and ZeRO-3",
    ),
    Rule(
        "latent_recompute",
        Implies(AtLeast(("mla_up_proj",), (1,)), AtLeast(("latent",), (1,))),
        "without latent attention there is no projection to compute again",
        "mla_up_proj",
        "megatron/core/transformer/transformer_config.py (recompute_modules)",
        "leave mla_up_proj out of recompute_modules",
    ),
)
"""Every rule of a plan. The two on the sequence together say ``cp*lcm(2, tp)`` divides it."""


def _at_least(name: str, value: object, least: int) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise PerfmodelError(f"{name}={value!r} must be a whole number, at least {least}.")
    return int(value)


def architecture_values(architecture_vars: Mapping[str, int]) -> dict[str, int]:
    """Take the architecture variables that the rules read, or say which is missing or wrong."""
    given = {**dict.fromkeys(_MAY_BE_ABSENT, 0), **architecture_vars}
    missing = [name for name in ARCHITECTURE_VARIABLES if name not in given]
    if missing:
        raise PerfmodelError(f"The architecture variables lack {', '.join(missing)}.")
    return {
        name: _at_least(name, given[name], int(name in _AT_LEAST_ONE))
        for name in ARCHITECTURE_VARIABLES
    }


def option_values(options: Plan | PlanSpace) -> dict[str, int]:
    """Take what the rules read of a plan, or of all plans of a space, beside its degrees."""
    return {
        "zero": options.zero,
        "optimizer_instances": options.optimizer_instances,
        "sequence_parallel": int(options.sequence_parallel),
        "heads_over_cp": int(options.cp_comm == "a2a"),
        "mla_up_proj": int("mla_up_proj" in getattr(options, "recompute_modules", ())),
    }


def run_values(world: int, seq_len: int, global_batch: int) -> dict[str, int]:
    """Take the variables of the run, or say which is wrong."""
    given = {"world": world, "seq_len": seq_len, "global_batch": global_batch}
    return {name: _at_least(name, value, 1) for name, value in given.items()}


def explain(
    constraint: Constraint, values: Mapping[str, int], remedy_variable: str, note: str = ""
) -> tuple[str, tuple[int, ...]]:
    """Write the sentence for a constraint that does not hold, and find its remedy.

    Returns
    -------
    message : str
        What, which value, which rule, and the nearest legal values. Where the remedy variable
        has none, those of the first other degree that has some.
    nearest : tuple of int
        The nearest legal values of the remedy variable.
    """
    sentence = constraint.sentence(values)
    widest = min(2 * max(values[name] for name in constraint.variables), _WIDEST_SEARCH)
    domain = np.arange(1, widest + 1)
    nearest = constraint.nearest(values, remedy_variable, domain)
    variable, offered = remedy_variable, nearest
    others = (v for v in PLAN_VARIABLES if v in constraint.variables and v != remedy_variable)
    while not offered and (other := next(others, None)):
        variable, offered = other, constraint.nearest(values, other, domain)
    subject = "" if sentence.startswith(f"{variable}=") else f" {variable}"
    remedy = "no change of one degree repairs it"
    if offered:
        remedy = f"nearest{subject}: {', '.join(map(str, offered))}"
    return "; ".join(filter(None, (sentence, remedy, note))) + ".", nearest


def _broken(values: Mapping[str, int]) -> Iterator[Violation]:
    for rule in RULES:
        known = rule.constraint.variables <= values.keys()  # else the parent rule is broken
        if known and not rule.constraint.holds(values):
            note = layout_note(values) if rule.name == "equal_stages" else rule.note
            shown = said(rule.constraint)
            message, nearest = explain(shown, values, rule.remedy_variable, note)
            value, limit = rule.constraint.numbers(values)
            yield Violation(
                rule=rule.name, message=message, value=value, limit=limit, nearest=nearest
            )


def violations(
    architecture_vars: Mapping[str, int], plan: Plan, world: int, seq_len: int, global_batch: int
) -> tuple[Violation, ...]:
    """Name every rule that a plan breaks.

    Parameters
    ----------
    architecture_vars : mapping of str to int
        At least the names of `ARCHITECTURE_VARIABLES`.
    plan : Plan
        The layout to judge.
    world : int
        Number of devices.
    seq_len : int
        Tokens per sequence.
    global_batch : int
        Sequences per optimiser step.

    Returns
    -------
    tuple of Violation
        In the order of `RULES`; empty for a legal plan. A rule on a derived variable is left
        out where that variable has no value, because the rule that makes it undefined is in.
    """
    values = {
        **architecture_values(architecture_vars),
        **run_values(world, seq_len, global_batch),
        **{name: int(getattr(plan, name)) for name in PLAN_VARIABLES},
        **option_values(plan),
    }
    values |= plan.layout_variables(values["mtp_layers"])
    derived = {n: int(q.value(values)) for n, q in DERIVED.items() if q.defined.holds(values)}
    return tuple(_broken({**values, **derived}))


def require_legal(
    architecture_vars: Mapping[str, int], plan: Plan, world: int, seq_len: int, global_batch: int
) -> None:
    """Raise `IllegalPlanError` with every violation of a plan, or return."""
    broken = violations(architecture_vars, plan, world, seq_len, global_batch)
    if broken:
        raise IllegalPlanError(broken)


def rules_table() -> str:
    """Write the rules as a Markdown table."""
    head = ("| rule | constraint | why | source |", "|---|---|---|---|")
    rows = (f"| `{r.name}` | `{r.constraint}` | {r.reason} | {r.source} |" for r in RULES)
    return "\n".join((*head, *rows)) + "\n"

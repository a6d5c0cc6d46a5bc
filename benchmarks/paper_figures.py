"""The tables and figures of arXiv 2608.10605 under this model. Prints Markdown, asserts nothing.

python benchmarks/paper_figures.py [rows] [table3] [fig1] [fig11] [listing]

Without a name, all of them. The paper's own figures are printed beside ours for comparison only;
no constant of the model is fitted to a prediction of the paper.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

from mosaic_opt import Envelope, Solution, example, solve
from mosaic_opt.problem import Problem
from mosaic_opt.result import Candidate
from perfmodel import Cluster, MfuConvention, Plan, StackProfile, estimate, load_stack
from perfmodel.calibration.writer import record_toml
from perfmodel.ladders import ladder
from perfmodel.plan import Recompute
from perfmodel.step import DEFAULT_STACK
from perfmodel.validation.runs import layout_sweeps

PAPER_GEOMETRY = "ladder:q=12,E=96,K=2,G=4"
PAPER_PLAN = "tp=1,ep=8,pp=8,cp=1,mbs=4,recompute={}"
PAPER_TABLE4 = ("14.5", "", "0.956", "1.42", "98", "12.38", "1.3898", "ep8 pp8 mbs4")
MODES = ("none", "selective", "super-selective", "full")
FIG1_MODEL_FLOP = 3.3e21
TOO_FAST = 0.1
LISTING_PLAN = "tp=1,ep=8,pp=16,cp=1,dp=32,mbs=2,recompute=full"


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in lines:
        print("| " + " | ".join(row) + " |")
    print()


def geometry(name: str) -> str:
    """Write a ladder model without its prefix."""
    return name.removeprefix("ladder:").replace(",", " ")


def layout(plan: Plan) -> str:
    """Write the degrees of a plan that are not 1."""
    degrees = {"tp": plan.tp, "cp": plan.cp, "ep": plan.ep, "pp": plan.pp, "dp": plan.dp}
    shown = [f"{name}{value}" for name, value in degrees.items() if value > 1]
    return " ".join([*shown, f"mbs{plan.micro_batch}", plan.recompute.value])


def candidate_row(c: Candidate) -> list[str]:
    """Return the columns that every table of candidates has."""
    return [
        geometry(c.name),
        f"{c.n_active / 1e9:.1f}",
        f"{c.n_total / 1e9:.1f}",
        f"{c.sparsity:.3f}",
        f"{c.tokens / 1e12:.3f}",
        f"{c.tokens_per_parameter:.1f}",
        f"{100 * c.mfu:.2f}",
        f"{c.loss:.4f}",
        layout(c.plan),
    ]


CANDIDATE_HEADER = ("geometry", "N_act (B)", "N_tot (B)", "S", "D (T)", "TPP", "MFU %", "loss")


def model_flop(c: Candidate) -> float:
    """Return 6 N_act D, what a candidate realises [FLOP]."""
    return 6.0 * c.n_active * c.tokens


def splits(candidates: Iterable[Candidate]) -> str:
    """Return how often each G occurs."""
    found = [int(c.expert_split or 0) for c in candidates]
    return ", ".join(f"G={g}: {found.count(g)}" for g in sorted(set(found)))


def rows() -> None:
    """Print the measured rows whose MFU is predicted far too low, under every recompute mode."""
    found = []
    for run in layout_sweeps():
        steps = [
            estimate(
                run.architecture,
                run.plan.model_copy(update={"recompute": mode}),
                run.cluster,
                run.batch,
                mfu_convention=run.mfu_convention,
            )
            for mode in Recompute
        ]
        errors = [step.mfu / run.measured_mfu - 1.0 for step in steps]
        if errors[-1] > -TOO_FAST:
            continue
        full = steps[-1]
        measured_s = full.step_time_s * full.mfu / run.measured_mfu
        device_s = sum(s for part, s in full.breakdown_s.items() if part.startswith("compute_"))
        device_s += full.breakdown_s["all_to_all"]
        n_mb = run.batch.global_batch // (run.plan.dp * run.plan.micro_batch)
        device_s *= (n_mb + run.plan.pp - 1) / n_mb
        device_s += full.breakdown_s["head"]
        found.append(
            [f"{run.sweep} {layout(run.plan)}", f"{100 * run.measured_mfu:.2f}"]
            + [f"{measured_s:.2f}", f"{device_s:.2f}", f"{full.step_time_s:.2f}"]
            + [f"{100 * error:+.1f}" for error in errors]
        )
    print(f"### Measured rows whose MFU is predicted over {TOO_FAST:.0%} too low\n")
    seconds = ("measured step (s)", "device, all-to-all and bubble (s)", "predicted step (s)")
    modes = [f"error %, {mode.value}" for mode in Recompute]
    table(("row", "measured MFU %", *seconds, *modes), found)
    print(f"Stack profile {DEFAULT_STACK}.\n")


def table3() -> None:
    """Print Tables 3 and 4: the paper's optimum under this model, and ours."""
    envelope = example("table3")
    solution = solve(envelope)
    first = solution.candidates[0]
    theirs = next(c for c in solution.candidates if c.name == PAPER_GEOMETRY)
    print("### Tables 3 and 4: 32 nodes, 20 days\n")
    table(
        ("", *CANDIDATE_HEADER, "layout"),
        (
            ["our optimum", *candidate_row(first)],
            [f"the paper's geometry, rank {theirs.rank}", *candidate_row(theirs)],
            ["the paper's Table 4", geometry(PAPER_GEOMETRY), *PAPER_TABLE4],
        ),
    )
    tolerance = solution.near_tie_rule.loss_tolerance or 0.0
    print(
        f"{len(solution.candidates)} feasible candidates. The paper's geometry is "
        f"{theirs.delta_loss:.4f} nats/token above our optimum; {envelope.mfu_error:.0%} of MFU "
        f"moves {tolerance:.4f}, which {len(solution.near_ties)} candidates are within "
        f"({splits(solution.near_ties)}; S {span(solution.near_ties)}).\n"
    )
    paper_plan(envelope)
    most = max(solution.candidates, key=model_flop)
    print(
        f"Most model FLOPs: {geometry(most.name)}, {model_flop(most):.3g} FLOP at loss "
        f"{most.loss:.4f}, rank {most.rank} (paper: E=32 G=2, 1.94e+23, not the optimum). "
        f"Our optimum realises {model_flop(first):.3g} (paper's optimum: 1.23e+23).\n"
    )
    by_split: dict[int, list[float]] = {}
    for c in solution.candidates:
        by_split.setdefault(int(c.expert_split or 0), []).append(c.mfu)
    table(
        ("G", "feasible candidates", "median MFU %", "largest MFU %"),
        (
            [str(g), str(len(v)), f"{100 * median(v):.1f}", f"{100 * max(v):.1f}"]
            for g, v in sorted(by_split.items())
        ),
    )
    flagged = solve(envelope.model_copy(update={"extrapolation": "flag"}))
    beyond = flagged.candidates[0]
    print("Our optimum under other assumptions:\n")
    lines = [["as shipped", *candidate_row(first)]]
    lines.append(
        ["`extrapolation: flag`: all-to-all over more than 32 ranks", *candidate_row(beyond)]
    )
    profile = load_stack(envelope.stack)
    host = profile.constants["host_layer_s"].value
    half = with_constant(profile, "host_layer_s", host / 2.0)
    none = with_constant(with_constant(profile, "host_layer_s", 0.0), "host_microbatch_s", 0.0)
    for label, changed in (("half of A", half), ("A = H = 0", none)):
        lines.append([label, *candidate_row(under(envelope, changed).candidates[0])])
    table(("", *CANDIDATE_HEADER, "layout"), lines)


def under(envelope: Envelope, profile: StackProfile) -> Solution:
    """Solve an envelope under a stack profile that is in no file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stack.toml"
        file.write_text(record_toml(profile), "utf-8")
        return solve(envelope.model_copy(update={"stack": str(file)}))


def span(candidates: Sequence[Candidate]) -> str:
    """Return the range of sparsity."""
    found = [c.sparsity for c in candidates]
    return f"{min(found):.3f}-{max(found):.3f}"


def paper_plan(envelope: Envelope) -> None:
    """Print the paper's optimum at the paper's plan, by recompute mode."""
    architecture = ladder(q=12, n_experts=96, top_k=2, expert_split=4)
    problem = Problem(envelope)
    index = problem.architectures.index(architecture)
    lines = []
    for mode in MODES:
        plan = Plan.parse(PAPER_PLAN.format(mode), world=envelope.cluster.n_devices)
        step = problem.reprice(index, plan)
        embedded = estimate(
            architecture,
            plan,
            envelope.cluster,
            envelope.batch,
            stack=envelope.stack,
            mfu_convention=MfuConvention.SIX_N_EMBEDDING,
        )
        tokens = problem.tokens(index, step.step_time_s).tokens
        lines.append(
            [
                mode,
                f"{100 * step.mfu:.2f}",
                f"{100 * embedded.mfu:.2f}",
                f"{step.step_time_s:.3f}",
                f"{step.memory_bytes / 1e9:.1f}",
                f"{tokens / 1e12:.3f}",
                f"{problem.loss(index, tokens):.4f}",
            ]
        )
    print("The paper's geometry at the paper's plan (pp8 ep8 mbs4; the paper: 12.38 %):\n")
    conventions = ("MFU % (6n-nonembedding)", "MFU % (6n-embedding)")
    table(("recompute", *conventions, "step (s)", "GB", "D (T)", "loss"), lines)


def fig1() -> None:
    """Print Figure 1: the best loss by sparsity on 4 nodes for 5 days."""
    envelope = example("fig1")
    solution = solve(envelope)
    best = solution.candidates[0]
    print("### Figure 1: 4 nodes, 5 days\n")
    bands: list[tuple[str, Callable[[Candidate], bool]]] = [
        ("any S", lambda c: True),
        ("S <= 0.90", lambda c: c.sparsity <= 0.90),
        ("S <= 0.96", lambda c: c.sparsity <= 0.96),
        ("S > 0.96", lambda c: c.sparsity > 0.96),
        ("S > 0.97", lambda c: c.sparsity > 0.97),
        ("S > 0.98", lambda c: c.sparsity > 0.98),
    ]
    lines = []
    for label, inside in bands:
        c = next(c for c in solution.candidates if inside(c))
        lines.append([label, *candidate_row(c), f"{c.loss - best.loss:.4f}"])
    table(("best with", *CANDIDATE_HEADER, "layout", "above the optimum"), lines)
    goodput = envelope.goodput_of(envelope.candidates.architectures()[0]).value
    ceiling = envelope.peak_compute_flop * goodput
    able = [c for c in solution.candidates if c.mfu * ceiling >= FIG1_MODEL_FLOP]
    sparsest = max(able, key=lambda c: c.sparsity)
    print(
        f"C_peak is {ceiling:.3g} FLOP, so {FIG1_MODEL_FLOP:g} model FLOPs need an MFU of "
        f"{FIG1_MODEL_FLOP / ceiling:.1%}. {len(able)} of {len(solution.candidates)} feasible "
        f"candidates deliver that; the sparsest of them has S = {sparsest.sparsity:.3f} "
        f"({geometry(sparsest.name)}, MFU {sparsest.mfu:.1%}). The paper: none past 0.96.\n"
    )


def fig11() -> None:
    """Print Figure 11: the optimum by window and by nodes."""
    base = example("fig11")
    print("### Figure 11\n")
    cases = [(f"32 nodes, {days} days", {"window_days": float(days)}) for days in (10, 20, 30, 40)]
    header = ("budget", *CANDIDATE_HEADER, "layout", "near ties", "G of the ties", "S of the ties")
    table(header, (fig11_row(label, base.model_copy(update=change)) for label, change in cases))
    clusters = [Cluster(hardware=base.cluster.hardware, nodes=n) for n in (16, 32, 64, 128)]
    table(
        header,
        (
            fig11_row(f"{c.nodes} nodes, 30 days", base.model_copy(update={"cluster": c}))
            for c in clusters
        ),
    )


def fig11_row(label: str, envelope: Envelope) -> list[str]:
    """Solve one budget of Figure 11."""
    solution: Solution = solve(envelope)
    ties = solution.near_ties
    best = candidate_row(solution.candidates[0])
    return [label, *best, str(len(ties)), splits(ties), span(ties)]


def listing() -> None:
    """Print Listing 2: one layout of one model."""
    envelope = example("listing")
    problem = Problem(envelope)
    plan = Plan.parse(LISTING_PLAN, world=envelope.cluster.n_devices)
    profile = load_stack(envelope.stack)
    depth = profile.constants["pipeline_node_cost"]
    lines: list[list[str]] = []
    heaviest: dict[str, float] = {}
    for label, value in (
        ("as fitted", depth.value),
        ("left out", 0.0),
        ("5 % of its interval", depth.low),
        ("95 % of its interval", depth.high),
    ):
        step = estimate(
            problem.architectures[0],
            plan,
            envelope.cluster,
            envelope.batch,
            stack=with_constant(profile, "pipeline_node_cost", value),
            mfu_convention=envelope.mfu_convention,
        )
        heaviest = step.memory_buckets_bytes[step.heaviest_stage]
        lines.append(
            [
                f"c {label}, {value:.3g}",
                f"{100 * step.mfu:.2f}",
                f"{step.step_time_s:.1f}",
                f"{step.memory_bytes / 1e9:.1f}",
            ]
        )
    lines.append(["the paper's Listing 2", "13.69", "44.892", "21.30"])
    print("### Listing 2: tp1 ep8 pp16 cp1 dp32, micro-batch 2, full recompute\n")
    table(("", "MFU % (6n-embedding)", "step (s)", "GB"), lines)
    buckets = ", ".join(f"{name} {b / 1e9:.1f}" for name, b in heaviest.items() if b > 0.0)
    print(f"Memory of the heaviest stage (GB): {buckets}.\n")
    best = solve(envelope).candidates[0]
    print(
        f"Best layout of the same model here: {layout(best.plan)}, {best.step_time_s:.1f} s, "
        f"MFU {best.mfu:.2%}, {best.memory_bytes / 1e9:.1f} GB.\n"
    )


def with_constant(profile: StackProfile, name: str, value: float) -> StackProfile:
    """Return a profile with another value of a fitted constant."""
    update = {"value": value, "low": value, "high": value}
    constant = profile.constants[name].model_copy(update=update)
    return profile.model_copy(update={"constants": profile.constants | {name: constant}})


FIGURES: dict[str, Callable[[], None]] = {
    "rows": rows,
    "table3": table3,
    "fig1": fig1,
    "fig11": fig11,
    "listing": listing,
}


def main(names: Sequence[str]) -> int:
    """Print the figures that are named, or all."""
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        print(f"{unknown[0]} is none of {', '.join(FIGURES)}", file=sys.stderr)
        return 2
    for name in names or FIGURES:
        FIGURES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

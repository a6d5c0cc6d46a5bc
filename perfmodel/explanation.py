"""Why a plan's step takes as long as it does: what binds, what is lost, what a change would do.

The waterfall starts from the step in which every device works at its peak,

    t_peak = model FLOPs / (N_dev F_peak)

and adds, one by one, what the model of the step adds, until it has reached the step time. With
``n`` microbatches, a mean over the stages of the pipeline, and the stage that sets the pace:

    kernels            n mean(device work in one forward and one backward, head) - t_peak
    recompute          n mean(device work that is done again)
    tensor_parallel    n mean(exchanges of tensor parallelism)
    context_parallel   n mean(exchanges of context parallelism)
    imbalance          n (device work of the pace stage) - n mean(device work)
    host_dispatch      n max(0, host - device) of the pace stage
    jitter             n max(0, min(jitter, host + jitter - device)) of the pace stage
    all_to_all, sharding, bubble, pipeline_depth, hand_off, data_parallel, optimizer, step_host:
                       what is exposed of each, as in the breakdown of a step

A loss is negative where the numerator of MFU counts work that is not done. The model is that of
:mod:`perfmodel.iteration`: no loss is measured, and removing one would change others.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import fsum
from typing import Literal

from perfmodel._integers import divisors
from perfmodel.architecture import Architecture, MfuConvention
from perfmodel.calibration.stacks import StackProfile, load_stack
from perfmodel.cluster import Batch, Cluster
from perfmodel.frozen import Frozen
from perfmodel.layer import OperatorTimes
from perfmodel.modes import layer_times
from perfmodel.plan import Plan, Recompute
from perfmodel.replay import latent_up_share, replay_of
from perfmodel.rules import Violation
from perfmodel.sources import Source, weakest
from perfmodel.stages import BALANCED, StageLayout
from perfmodel.step import DEFAULT_STACK, StepEstimate, StepModel, check, estimate

__all__ = ["Change", "Explanation", "Loss", "explain"]

Direction = Literal["smaller", "larger", "equal", "balanced", "moved"]

_EXCHANGES = ("tensor_parallel", "context_parallel")
_MESH_DEGREES = ("tp", "pp", "ep", "etp", "cp")
_OF_HOST_AND_DEVICE = ("head", "dispatch")


class Loss(Frozen):
    """One bar of the waterfall.

    Attributes
    ----------
    name : str
        See the module's docstring; the first is ``peak``, which is no loss.
    time_s : float
        What it adds to the step [s]; negative where MFU's numerator counts work that is not done.
    share : float
        Of the step time [-].
    source : Source
        What it rests on.
    """

    name: str
    time_s: float
    share: float
    source: Source


class Change(Frozen):
    """What a plan would cost with one degree at its next legal value, or why there is none.

    Attributes
    ----------
    degree : str
        Field of the plan.
    direction : str
        ``smaller`` or ``larger`` (for `recompute`: less or more of it). For `layout`: ``equal``,
        ``balanced``, or ``moved``, one layer from the slowest device to the fastest that
        may take it.
    value : int or str, optional
        The next legal value; None where there is none.
    plan : Plan, optional
        With that value, `dp` derived again and all else as before.
    step_time_s, step_time_change_s : float, optional
        Its step time, and how much more than the plan's [s].
    memory_bytes, memory_change_bytes : float, optional
        Its heaviest stage, and how much more than the plan's [B].
    fits : bool, optional
        Whether it fits the device.
    rule, reason : str
        Where there is no legal value: the rule that the nearest value breaks, and its sentence.
        `rule` is empty where there is no value in that direction at all.
    """

    degree: str
    direction: Direction
    value: int | str | None = None
    plan: Plan | None = None
    step_time_s: float | None = None
    step_time_change_s: float | None = None
    memory_bytes: float | None = None
    memory_change_bytes: float | None = None
    fits: bool | None = None
    rule: str = ""
    reason: str = ""


class Explanation(Frozen):
    """What binds a plan's step, what it loses to the peak, and what a change would do (SI units).

    Attributes
    ----------
    step : StepEstimate
        The estimate that is explained.
    binding : str
        The largest of `terms_s`; ``memory`` where the plan does not fit.
    pace : {"host", "device"}
        Which of the two a microbatch on the pace stage waits for.
    pace_stage : int
        The stage whose microbatches make the steady part.
    terms_s : dict
        ``host_dispatch`` (the host's launches and the wait for the slowest rank) or ``device``,
        whichever sets the pace (both where the host computes), ``all_to_all`` and the parts
        outside of the steady part. They add up to the step time [s].
    peak_time_s : float
        The step at the device's bf16 peak: model FLOPs of `step.mfu_convention` over the peak [s].
    device_time_s : float
        The step if there were only the work of the devices, at the efficiencies of the kernels and
        evenly over the stages: recompute, head and exchanges of TP and CP included [s].
    waterfall : tuple of Loss
        From the peak to the step; the times add up to the step time.
    changes : tuple of Change
        Two for each degree; two or three more for the layout of a plan that has one.
    best_change : Change, optional
        The fastest change that fits, if it is faster than the plan or the plan does not fit.
    """

    schema_version: Literal[1] = 1
    step: StepEstimate
    binding: str
    pace: Literal["host", "device"]
    pace_stage: int
    terms_s: dict[str, float]
    peak_time_s: float
    device_time_s: float
    waterfall: tuple[Loss, ...]
    changes: tuple[Change, ...]
    best_change: Change | None


def explain(
    architecture: Architecture,
    plan: Plan,
    cluster: Cluster,
    batch: Batch,
    *,
    stack: str | StackProfile = DEFAULT_STACK,
    mfu_convention: MfuConvention = MfuConvention.SIX_N_NONEMBEDDING,
) -> Explanation:
    """Explain one optimizer step: its terms, its losses from the peak, and its neighbours.

    Takes what :func:`perfmodel.estimate` takes; a neighbour's numbers are what `estimate` says of
    its plan.

    Raises
    ------
    IllegalPlanError
        The plan breaks a rule; the error carries every violation.
    PackError
        No such hardware pack or stack profile.
    """
    profile = load_stack(stack) if isinstance(stack, str) else stack
    step = estimate(
        architecture, plan, cluster, batch, stack=profile, mfu_convention=mfu_convention
    )
    model = StepModel(architecture, plan, cluster, batch, profile)
    pace, terms = _terms(model, step)
    peak_s = step.mfu * step.step_time_s  # by the definition of MFU
    work = _mean_work(model)
    changes = tuple(_changes(model, step))
    return Explanation(
        step=step,
        binding=max(terms, key=lambda name: terms[name]) if step.fits else "memory",
        pace=pace,
        pace_stage=model.pace_stage,
        terms_s=terms,
        peak_time_s=peak_s,
        device_time_s=fsum(work.values()),
        waterfall=_waterfall(model, step, peak_s, work),
        changes=changes,
        best_change=_best(changes, step),
    )


def _waited_for(step: StepEstimate) -> dict[str, float]:
    """Parts of a step that are neither the host's nor the device's own work [s]."""
    return {
        name: seconds
        for name, seconds in step.breakdown_s.items()
        if not name.startswith("compute_") and name not in _OF_HOST_AND_DEVICE
    }


def _terms(
    model: StepModel, step: StepEstimate
) -> tuple[Literal["host", "device"], dict[str, float]]:
    """Split the step by what it waits for [s]."""
    pace, n = model.time_of(model.pace_stage), float(model.n_microbatches)
    host, device = pace.host + pace.jitter, pace.device + pace.head
    if model.hardware.blocking:
        both = {"device": float(n * device), "host_dispatch": float(n * host)}
        return "host" if host > device else "device", {**both, **_waited_for(step)}
    if host > device:
        return "host", {"host_dispatch": float(n * host), **_waited_for(step)}
    return "device", {"device": float(n * device), **_waited_for(step)}


def _mean_work(model: StepModel) -> dict[str, float]:
    """Work of a device in a step, a mean over the stages, by why it is done [s]."""
    stages, n = len(model.contents), float(model.n_microbatches)
    dense = fsum(c.dense for c in model.contents) / stages
    moe = fsum(c.moe for c in model.contents) / stages
    cost, stack = model.cost, model.profile.stack()
    up = latent_up_share(model.architecture.dims)

    def of_layers(mode: float) -> OperatorTimes:
        per_moe = layer_times(cost, stack, replay_of(mode), 1.0, up)
        per_dense = layer_times(cost, stack, replay_of(mode), 0.0, up)
        pairs = zip(per_moe, per_dense, strict=True)
        return OperatorTimes(*(n * (moe * x + dense * y) for x, y in pairs))

    once, done = of_layers(0.0)._asdict(), of_layers(model.dims.recompute)._asdict()
    own = [name for name in once if name not in _EXCHANGES]
    head = n * fsum(model.time_of(i).head for i in range(stages)) / stages
    return {
        "kernels": fsum(once[name] for name in own) + head,
        "recompute": fsum(done[name] - once[name] for name in own),
        **{name: done[name] for name in _EXCHANGES},
    }


def _waterfall(
    model: StepModel, step: StepEstimate, peak_s: float, work: dict[str, float]
) -> tuple[Loss, ...]:
    pace, n = model.time_of(model.pace_stage), float(model.n_microbatches)
    device = pace.device + pace.head
    hidden = 0.0 if model.hardware.blocking else device
    times = {
        "peak": peak_s,
        **work,
        "imbalance": n * device - fsum(work.values()),
        "host_dispatch": n * max(0.0, pace.host - hidden),
        "jitter": n * max(0.0, min(pace.jitter, pace.host + pace.jitter - hidden)),
        **_waited_for(step),
    }
    times["kernels"] -= peak_s
    rests = step.sources
    operators = [f"compute_{name}" for name in OperatorTimes._fields if name not in _EXCHANGES]
    kernels = weakest([rests["head"], *(rests[name] for name in operators)])
    sources = {
        "peak": model.cluster.pack.device.peak_flops.source,
        **dict.fromkeys(("kernels", "recompute", "imbalance"), kernels),
        **{name: rests[f"compute_{name}"] for name in _EXCHANGES},
        **dict.fromkeys(("host_dispatch", "jitter"), rests["dispatch"]),
        **{name: rests[name] for name in _waited_for(step)},
    }
    return tuple(
        Loss(
            name=name,
            time_s=float(time_s),
            share=float(time_s) / step.step_time_s,
            source=sources[name],
        )
        for name, time_s in times.items()
    )


def _best(changes: tuple[Change, ...], step: StepEstimate) -> Change | None:
    fitting = [(c.step_time_s, i) for i, c in enumerate(changes) if c.fits and c.step_time_s]
    if not fitting:
        return None
    fastest = changes[min(fitting)[1]]
    faster = (fastest.step_time_change_s or 0.0) < 0.0
    return fastest if faster or not step.fits else None


# ---------------------------------------------------------------- one degree changed


def _changes(model: StepModel, step: StepEstimate) -> Iterator[Change]:
    world, plan = model.cluster.n_devices, model.plan
    mesh = divisors(world)  # the rules world_size and expert_mesh admit no other
    values = {
        **dict.fromkeys(_MESH_DEGREES, mesh),
        "vpp": list(range(1, model.architecture.n_layers + 1)),
        "micro_batch": divisors(model.batch.global_batch),
    }
    for degree, domain in values.items():
        current = int(getattr(plan, degree))
        below = [v for v in reversed(domain) if v < current]
        above = [v for v in domain if v > current] or [2 * current]
        yield _change(model, step, degree, "smaller", below)
        yield _change(model, step, degree, "larger", above)
    modes = tuple(Recompute)
    at = modes.index(plan.recompute)
    yield _change(model, step, "recompute", "smaller", modes[:at][::-1])
    yield _change(model, step, "recompute", "larger", modes[at + 1 :])
    if plan.layout is not None:
        yield _change(model, step, "layout", "equal", [None])
        if plan.layout != BALANCED:
            yield _change(model, step, "layout", "balanced", [BALANCED])
        yield _change(model, step, "layout", "moved", _moved(model))


def _change(
    model: StepModel,
    step: StepEstimate,
    degree: str,
    direction: Direction,
    nearest: list[int] | list[str] | list[None] | tuple[Recompute, ...],
) -> Change:
    """Price the first of the values, nearest first, that is legal."""
    plans = [_with(model, degree, value) for value in nearest]
    legal = next((p for p in plans if not _broken(model, p)), None)
    if legal is None:
        if not plans:
            given = getattr(model.plan, degree)
            reason = f"{degree}={given} has no {direction} value."
            if degree == "layout":
                reason = "No layer can be moved from the slowest device to a faster one."
            return Change(degree=degree, direction=direction, reason=reason)
        first = _broken(model, plans[0])[0]
        return Change(degree=degree, direction=direction, rule=first.rule, reason=first.message)
    priced = estimate(model.architecture, legal, model.cluster, model.batch, stack=model.profile)
    value = getattr(legal, degree)
    return Change(
        degree=degree,
        direction=direction,
        value=int(value) if isinstance(value, int) else str(value or "equal"),
        plan=legal,
        step_time_s=priced.step_time_s,
        step_time_change_s=priced.step_time_s - step.step_time_s,
        memory_bytes=priced.memory_bytes,
        memory_change_bytes=priced.memory_bytes - step.memory_bytes,
        fits=priced.fits,
    )


def _with(model: StepModel, degree: str, value: object) -> Plan:
    """Change one field; where no dp fills the devices take the one below, which a rule names."""
    modules: dict[str, object] = {"recompute_modules": ()} if degree == "recompute" else {}
    plan = model.plan.model_copy(update={degree: value, **modules})
    dp = max(1, model.cluster.n_devices // (plan.tp * plan.cp * plan.pp))
    return plan.model_copy(update={"dp": dp})


def _broken(model: StepModel, plan: Plan) -> tuple[Violation, ...]:
    return check(model.architecture, plan, model.cluster, model.batch)


def _moved(model: StepModel) -> list[str]:
    """Move a layer from the slowest device of the pipeline to a faster one, the fastest first."""
    plan, times = model.plan, [model.time_of(i).time for i in range(model.plan.pp)]
    layout = model.layout or StageLayout.balanced(model.architecture, plan.pp, plan.vpp)
    slowest = max(range(plan.pp), key=lambda i: times[i])
    giver = _chunk(layout, slowest, most=True)
    if not layout.stages[giver].layers:
        return []
    found = []
    for faster in sorted(range(plan.pp), key=lambda i: times[i]):
        if times[faster] < times[slowest]:
            stages = list(layout.stages)
            taker = _chunk(layout, faster, most=False)
            stages[giver] = stages[giver]._replace(layers=stages[giver].layers - 1)
            stages[taker] = stages[taker]._replace(layers=stages[taker].layers + 1)
            found.append(str(StageLayout(plan.pp, tuple(stages))))
    return found


def _chunk(layout: StageLayout, device: int, *, most: bool) -> int:
    """Return the virtual stage of a device with the most, or the fewest, decoder layers."""
    chunks = range(device, len(layout.stages), layout.pp)
    pick = max if most else min
    return pick(chunks, key=lambda s: layout.stages[s].layers)

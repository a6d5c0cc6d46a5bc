"""What a target loss takes: days, GPU-hours, nodes, cost or energy, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, isfinite, log
from typing import Any, Literal, get_args

from pydantic import ConfigDict

from mosaic_opt.allocation.curves import Curve, levels, survey, token_form
from mosaic_opt.allocation.variants import node_counts, with_nodes
from mosaic_opt.backends.base import ProgressCallback
from mosaic_opt.envelope import MAX_WINDOW_DAYS, Envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.problem import Problem
from mosaic_opt.solver import provenance
from mosaic_opt.spending import cost, energy_j, gpu_hours
from perfmodel.frozen import Frozen
from perfmodel.plan import Plan
from perfmodel.sources import Source

Objective = Literal["days", "gpu_hours", "nodes", "cost", "energy"]
UNITS: dict[str, str] = {
    "days": "day",
    "gpu_hours": "h",
    "nodes": "-",
    "cost": "of the price given",
    "energy": "J",
}


class _Finite(Frozen):
    model_config = ConfigDict(allow_inf_nan=False)


class Reach(_Finite):
    """The fastest way to the target on one number of nodes.

    ``loss`` is at or below the target [nats/token]. ``goodput`` is the share of the days that
    trains on so many devices [-]. ``cost`` and ``energy_j`` [J] are None where no price, or no
    power, was given; with them they rest on what the user said (ASSUMED).
    """

    nodes: int
    n_devices: int
    days: float
    goodput: float
    goodput_source: Source
    gpu_hours: float
    cost: float | None
    energy_j: float | None
    architecture: str
    n_active: int
    n_total: int
    plan: Plan
    tokens: float
    tokens_per_parameter: float
    loss: float
    mfu: float
    step_time_s: float
    step_source: Source
    memory_bytes: float


class Missed(_Finite):
    """A number of nodes that does not reach the target, and why."""

    nodes: int
    n_devices: int
    detail: str
    lowest_loss: float | None  # of any window; None if no candidate has any


class Inverse(_Finite):
    """What a target loss takes.

    Attributes
    ----------
    name : str
        The envelope's.
    objective : str
        What is least: "days", "gpu_hours", "nodes", "cost" or "energy".
    target_loss : float
        [nats/token].
    within_days : float or None
        Limit on the days [day]; None where there is none, or where the envelope's budget sets one
        for each number of nodes.
    price_per_gpu_hour, watts_per_device : float or None
        As given.
    unit : str
        Unit of ``value``.
    value : float or None
        The least of the objective; None if nothing reaches the target.
    best : Reach or None
        Where it is least; between equals the fewest nodes.
    by_nodes : tuple of Reach
        Every number of nodes that reaches the target in time, ascending.
    missed : tuple of Missed
        The others.
    loss_source, price_source : str
        What the losses rest on, and the price or power.
    provenance : dict
        Packs, law, versions, and the envelope.
    """

    schema_version: Literal[1] = 1
    name: str
    objective: Objective
    target_loss: float
    within_days: float | None
    price_per_gpu_hour: float | None
    watts_per_device: float | None
    unit: str
    value: float | None
    best: Reach | None
    by_nodes: tuple[Reach, ...]
    missed: tuple[Missed, ...]
    loss_source: str
    price_source: Source
    provenance: dict[str, Any]


def invert(
    envelope: Envelope,
    target_loss: float,
    objective: Objective = "days",
    *,
    nodes: Sequence[int] | None = None,
    within_days: float | None = None,
    price_per_gpu_hour: float | None = None,
    watts_per_device: float | None = None,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> Inverse:
    """Find the least of something that reaches a target loss.

    For each candidate ``T = (B / (L_target - A))^(1/beta) / k``, not less than what the token rule
    asks for; the least over the candidates is the least number of days on those nodes, and with
    them the least of GPU-hours, cost and energy. Node counts are tried one by one.

    Parameters
    ----------
    envelope : Envelope
    target_loss : float
        [nats/token].
    objective : {"days", "gpu_hours", "nodes", "cost", "energy"}
        What to make least.
    nodes : sequence of int, optional
        Node counts to try. Unless given: the envelope's own for "days", else the powers of two
        below it and itself; for "nodes" then every count between the last of these that misses
        the target and the first that does not, up to one that reaches it.
    within_days : float, optional
        Only node counts that reach the target in so many days; unless given, the envelope's window
        for "nodes", and no limit for the others.
    price_per_gpu_hour : float, optional
        In any currency; that of the envelope's budget unless given, and no other default.
    watts_per_device : float, optional
        Mean draw of one device with its share of all else [W]; that of the envelope's budget unless
        given, and no other default.
    workers : int, optional
        Threads; all cores unless given.
    progress : callable, optional
        Called after each candidate, from the start for each node count.

    Returns
    -------
    Inverse

    Raises
    ------
    MosaicError
        A number that is not above 0, a missing price or power, an impossible node count, or a law
        that is not of the form ``A(Z) + B(Z) D^-beta``.
    """
    if envelope.budget is not None:
        price_per_gpu_hour = price_per_gpu_hour or envelope.budget.price_per_gpu_hour
        watts_per_device = watts_per_device or envelope.budget.site_watts_per_device
    _check(objective, target_loss, within_days, price_per_gpu_hour, watts_per_device)
    by_window = objective == "nodes" and within_days is None
    own = envelope.cluster.nodes
    fill = nodes is None and objective == "nodes"
    if nodes is None:
        nodes = [own] if objective == "days" else [*(1 << i for i in range(own.bit_length())), own]
        nodes = [n for n in nodes if n <= own]
    reached: list[Reach] = []
    missed: list[Missed] = []

    def try_out(count: int) -> bool:
        problem = Problem(envelope if count == own else with_nodes(envelope, count))
        curves = survey(problem, workers=workers, progress=progress)
        limit = problem.envelope.window_days if by_window else within_days
        found = _on_cluster(problem, curves, target_loss, limit)
        if isinstance(found, Missed):
            missed.append(found)
            return False
        reached.append(_priced(found, price_per_gpu_hour, watts_per_device))
        return True

    for count in node_counts(nodes):
        try_out(count)
    if fill and reached:  # between the last count that misses and the first that does not
        first = reached[0].nodes
        below = max((m.nodes for m in missed if m.nodes < first), default=0)
        any(try_out(count) for count in range(below + 1, first))
        reached.sort(key=lambda r: r.nodes)
        missed.sort(key=lambda m: m.nodes)
    best = min(reached, key=lambda r: (amount(r, objective), r.nodes), default=None)
    return Inverse(
        name=envelope.name,
        objective=objective,
        target_loss=target_loss,
        within_days=envelope.window_days if by_window and not envelope.budget else within_days,
        price_per_gpu_hour=price_per_gpu_hour,
        watts_per_device=watts_per_device,
        unit=UNITS[objective],
        value=None if best is None else amount(best, objective),
        best=best,
        by_nodes=tuple(reached),
        missed=tuple(missed),
        loss_source=envelope.loss_source,
        price_source=Source.ASSUMED,
        provenance=provenance(Problem(envelope), "enumerate"),
    )


def amount(reach: Reach, objective: Objective) -> float:
    """Return how much of the objective a way to the target takes, in its unit."""
    of = {
        "days": reach.days,
        "gpu_hours": reach.gpu_hours,
        "nodes": float(reach.nodes),
        "cost": reach.cost,
        "energy": reach.energy_j,
    }[objective]
    return inf if of is None else of


def least_days(problem: Problem, curve: Curve, target_loss: float, beta: float) -> float:
    """Return the shortest window in which a candidate reaches the target; inf if none does [day].

    The closed form, lengthened by as many roundings as the loss needs to be at or below the target
    when `solve` computes it.
    """
    rule = levels(problem, curve)
    gap = target_loss - curve.floor
    if gap <= 0.0 or rule.empty:
        return inf
    power = log(curve.data / gap) / beta
    needed = exp(power) if power < 700.0 else inf
    tokens = rule.at_least(needed)
    if tokens == inf and rule.largest < inf:  # the cap may do, by a rounding
        tokens = rule.largest
    if tokens == inf:
        return inf
    k, longer = curve.tokens_per_day, 1e-15
    while longer < 1e-6:
        days = tokens / k * (1.0 + longer)
        trained = rule.at_most(k * days * (1.0 - 5e-16))
        if trained and problem.loss(curve.candidate, trained) <= target_loss:
            return days
        longer *= 2.0
    return inf


def _on_cluster(
    problem: Problem, curves: Sequence[Curve], target_loss: float, limit: float | None
) -> Reach | Missed:
    envelope = problem.envelope
    nodes, n_devices = envelope.cluster.nodes, envelope.cluster.n_devices
    beta = token_form(envelope.law).beta
    if not curves:
        detail = "no candidate has a layout that is legal and fits"
        return Missed(nodes=nodes, n_devices=n_devices, detail=detail, lowest_loss=None)
    times = [least_days(problem, curve, target_loss, beta) for curve in curves]
    days, curve = min(
        zip(times, curves, strict=True), key=lambda pair: (pair[0], pair[1].candidate)
    )
    if days > MAX_WINDOW_DAYS:
        lowest = _lowest_loss(problem, curves)
        detail = f"no candidate reaches {target_loss:g} nats/token in {MAX_WINDOW_DAYS:g} days"
        if lowest is None:
            detail += ", nor the least tokens of the rule"
        else:
            detail += f"; the lowest that any reaches is {lowest:.6g}"
        return Missed(nodes=nodes, n_devices=n_devices, detail=detail, lowest_loss=lowest)
    if limit is not None and days > limit:
        return Missed(
            nodes=nodes,
            n_devices=n_devices,
            detail=f"it takes {days:.6g} days, more than the {limit:g} allowed",
            lowest_loss=_lowest_loss(problem, curves),
        )
    plan = problem.table.plan(curve.row)
    step = problem.reprice(curve.candidate, plan)
    tokens = levels(problem, curve).at_most(curve.tokens_per_day * days)
    goodput = envelope.goodput_of(problem.architectures[curve.candidate])
    return Reach(
        nodes=nodes,
        n_devices=n_devices,
        days=days,
        goodput=goodput.value or 0.0,
        goodput_source=goodput.source,
        gpu_hours=gpu_hours(n_devices, days),
        cost=None,
        energy_j=None,
        architecture=problem.architectures[curve.candidate].name,
        n_active=problem.n_active(curve.candidate),
        n_total=problem.n_total(curve.candidate),
        plan=plan,
        tokens=tokens,
        tokens_per_parameter=tokens / curve.n_active,
        loss=problem.loss(curve.candidate, tokens),
        mfu=step.mfu,
        step_time_s=curve.step_s,
        step_source=step.sources["step_time_s"],
        memory_bytes=curve.memory_bytes,
    )


def _lowest_loss(problem: Problem, curves: Sequence[Curve]) -> float | None:
    """Return the lowest loss of any candidate in the longest window, if any meets the rule."""
    trained = ((c, levels(problem, c).at_most(c.tokens_per_day * MAX_WINDOW_DAYS)) for c in curves)
    return min((problem.loss(c.candidate, tokens) for c, tokens in trained if tokens), default=None)


def _priced(reach: Reach, price: float | None, watts: float | None) -> Reach:
    run = reach.n_devices, reach.days
    return reach.model_copy(
        update={
            "cost": None if price is None else cost(price, *run),
            "energy_j": None if watts is None else energy_j(watts, *run),
        }
    )


def _check(
    objective: str,
    target_loss: float,
    within_days: float | None,
    price: float | None,
    watts: float | None,
) -> None:
    known = get_args(Objective)
    if objective not in known:
        raise MosaicError(f"objective={objective!r} must be one of {', '.join(known)}.")
    given = {
        "target_loss": target_loss,
        "within_days": within_days,
        "price_per_gpu_hour": price,
        "watts_per_device": watts,
    }
    for name, number in given.items():
        if number is not None and not (isfinite(number) and number > 0.0):
            raise MosaicError(f"{name}={number:g} must be a finite number above 0.")
    if objective == "cost" and price is None:
        raise MosaicError(
            "objective 'cost' needs price_per_gpu_hour, which has no default: prices differ and "
            "change."
        )
    if objective == "energy" and watts is None:
        raise MosaicError(
            "objective 'energy' needs watts_per_device, the mean draw of a device with its share "
            "of all else, which has no default."
        )

"""Tables of runs that others published, as columns for `fit_general`, and laws for them."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lawfit import AbnarLaw, GeneralFit, LudziejewskiLaw, PosynomialLaw, PowerTerm, fit_general


class Table(NamedTuple):
    columns: dict[str, np.ndarray]
    loss: np.ndarray


class ComputeLaw(PosynomialLaw):
    """A loss, or a size, as a power of compute."""

    equation: ClassVar[str] = "y = a C^alpha + e"
    variables: ClassVar[Mapping[str, str]] = {"compute": "C: compute [FLOP]"}
    a: float
    alpha: float
    e: float

    @property
    def terms(self) -> tuple[PowerTerm, ...]:
        power = PowerTerm("power", self.a, {"compute": self.alpha})
        return power, PowerTerm("constant", self.e, {})


# ---------------------------------------------------------------- Clark et al.

CLARK_TOKENS = 130e9


def clark(folder: Path, router: str) -> Table:
    """Return the last evaluation of the runs with one router, and of the five dense ones.

    Every other layer routed, one expert a token, seed 42, loss on the validation set.
    """
    with gzip.open(folder / "laws/clark_routing/curves.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    last: dict[str, dict[str, str]] = {}
    for row in rows:
        run = row["hyper_id"]
        if run not in last or float(row["step"]) > float(last[run]["step"]):
            last[run] = row
    kept = [
        row
        for row in last.values()
        if row["router_type"] in (router, "Dense")
        and float(row["routing_frequency"]) == 0.5
        and float(row["k"]) == 1.0
        and row["seed"] == "42"
    ]
    column = {
        name: np.array([float(row[source]) for row in kept])
        for name, source in (
            ("n", "dense_parameter_count"),
            ("n_total", "total_parameter_count"),
            ("experts", "num_experts"),
        )
    }
    return Table(column, np.array([float(row["loss_validation"]) for row in kept]))


def clark_by_abnar(table: Table, kind: type[AbnarLaw] = AbnarLaw, starts: int = 60) -> GeneralFit:
    """Fit Abnar's law with density = N_act/N; at one number of tokens their term is constant."""
    column = table.columns
    return fit_general(
        kind,
        {
            "n_total": column["n_total"],
            "tokens": CLARK_TOKENS,
            "density": column["n"] / column["n_total"],
        },
        table.loss,
        objective="least_squares",
        starts=starts,
        fixed={"b": 1e-12, "beta": 1.0},
    )


def clark_by_ludziejewski(table: Table, starts: int = 30) -> GeneralFit:
    """Fit the size term of Ludziejewski's law, that of the tokens held at nothing."""
    column = table.columns
    return fit_general(
        LudziejewskiLaw,
        {"n_active": column["n"], "tokens": CLARK_TOKENS, "experts": column["experts"]},
        table.loss,
        objective="least_squares",
        starts=starts,
        fixed={"b": 1e-30, "beta": 0.0, "zeta": 0.0, "omega": 0.0},
    )


# ---------------------------------------------------------------- Porian et al.


def porian_optima(folder: Path, file: str, config: int) -> Table:
    """Return the compute-optimal sizes of one configuration, as the paper takes them.

    At each compute the log losses are interpolated in log size (Akima) on 25 points between
    neighbours; a least loss at either end is no optimum. The paper then takes the median over
    1000 draws of seed noise of 0.005, which is left out here.
    """
    from scipy.interpolate import Akima1DInterpolator

    with (folder / "laws/porian/isoflop_points.csv").open() as handle:
        rows = [
            r for r in csv.DictReader(handle) if r["file"] == file and r["config"] == str(config)
        ]
    compute, size = [], []
    for flops in sorted({float(row["flops"]) for row in rows}):
        points = sorted(
            (float(r["N"]), float(r["loss"])) for r in rows if float(r["flops"]) == flops
        )
        if len(points) < 3:
            continue
        n, loss = (np.array(column) for column in zip(*points, strict=True))
        grid = np.geomspace(n[0], n[-1], 25 * (len(n) - 1))
        curve = Akima1DInterpolator(np.log(n), np.log(loss))(np.log(grid))
        best = int(np.nanargmin(curve))
        if 0 < best < len(grid) - 1:
            compute.append(flops)
            size.append(float(grid[best]))
    return Table({"compute": np.array(compute)}, np.array(size))


def porian_exponent(table: Table) -> GeneralFit:
    return fit_general(
        ComputeLaw,
        table.columns,
        table.loss,
        objective="least_squares",
        fixed={"e": 0.0},
        starts=10,
    )


# ---------------------------------------------------------------- Marin, step-law


def marin(folder: Path) -> Table:
    """Return compute and Paloma loss of the best model at each budget, 1e18 to 1e21 FLOP."""
    with (folder / "laws/marin_moe/isoflop_v16_best_per_budget.csv").open() as file:
        rows = list(csv.DictReader(file))
    compute = np.array([float(row["budget_flops"]) for row in rows])
    return Table({"compute": compute}, np.array([float(row["paloma_macro_loss"]) for row in rows]))


def steplaw_cells(folder: Path) -> Table:
    """Return the 16 cells, four mixtures at four numbers of tokens.

    The loss of a cell is the least smoothed one over its grid of learning rates and batch sizes.
    """
    with (folder / "laws/steplaw/moe_lr_bs_loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    least: dict[tuple[float, ...], float] = {}
    for row in rows:
        split = float(row["ffnh"]) / float(row["moeh"])
        cell = (*(float(row[name]) for name in ("N", "Na", "D", "nume")), split)
        least[cell] = min(float(row["smooth loss"]), least.get(cell, np.inf))
    columns = np.array(sorted(least)).T
    names = ("n_total", "n_active", "tokens", "experts", "expert_split")
    table: dict[str, Any] = dict(zip(names, columns, strict=True))
    return Table(table, np.array([least[cell] for cell in sorted(least)]))


def chosen(table: Table, *names: str) -> dict[str, np.ndarray]:
    return {name: table.columns[name] for name in names}


# ---------------------------------------------------------------- isoFLOP collections


def isoflops(folder: Path) -> dict[str, Table]:
    """Return the experiments that Open-Athena collected, without the outliers they mark."""
    path = folder / "laws/openathena_isoflops/isoflops/transform/isoflops.csv"
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["outlier"] != "True"]
    found = {}
    for name in sorted({row["experiment"] for row in rows}):
        kept = [row for row in rows if row["experiment"] == name]
        size, tokens, loss = (
            np.array([float(row[column]) for row in kept])
            for column in ("params", "tokens", "loss")
        )
        found[name] = Table({"n": size, "tokens": tokens}, loss)
    return found

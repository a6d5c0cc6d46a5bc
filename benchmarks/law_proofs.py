"""Print the tables of docs/law-proofs.md: fits of public data beside what was published.

Run from the root of a checkout as ``python -m benchmarks.law_proofs [part ...]``, with parts of
nist, clark, porian, marin, steplaw, isoflops. All but nist read the folder that MOSAIC_DATA names.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lawfit import (
    CLARK_HASH,
    CLARK_RLR,
    CLARK_SBASE,
    AbnarLaw,
    ChinchillaLaw,
    ClarkLaw,
    GadreLaw,
    GeneralFit,
    KaplanLaw,
    LudziejewskiLaw,
    fit_general,
)
from tests.lawfit import public_tables as tables
from tests.lawfit.nist_models import agreement, fit_from, problems

CLARK = {"S-Base": CLARK_SBASE, "RL-R": CLARK_RLR, "Hash": CLARK_HASH}


def row(*cells: object) -> None:
    """Print a row of a table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def head(*cells: str) -> None:
    """Print the head of a table."""
    row(*cells)
    print("|" + "---|" * len(cells))


def with_error(found: GeneralFit, name: str, digits: int = 3) -> str:
    """Return a coefficient with its standard error, or its bound."""
    each = found.coefficients[name]
    if each.at_bound is not None:
        return f"{each.value:.{digits}g} (bound)"
    if found.covariance is None or name not in found.covariance.names:
        return f"{each.value:.{digits}g}"
    return f"{each.value:.{digits}g} ± {found.covariance.std_error(name):.2g}"


def agree(found: GeneralFit) -> str:
    """Return how many starts agree."""
    return f"{found.starts_agreeing}/{found.starts}"


def percent(found: GeneralFit) -> str:
    """Return the root mean square of the residuals of log L [%]."""
    return "-" if found.rmse_log is None else f"{100.0 * found.rmse_log:.3f}"


def nist(_: Path) -> None:
    """Print the digits that agree with the certified values, from start 1 and from start 2."""
    head("problem", "level", "parameters", "deviations", "squares", "parameters", "deviations")
    for name, problem in problems().items():
        first, second = (agreement(name, fit_from(name, f"start_{k}")) for k in (1, 2))
        cells = [f"{x:.1f}" for x in (*first, *second[:2])]
        row(name, problem["level"].lower(), *cells)


def clark(folder: Path) -> None:
    """Print the unified law of Clark et al., and the errors of other laws on the same runs."""
    head("router", "", "runs", "objective", "a", "b", "c", "d", "E_start", "E_max", "rms log10")
    for router, printed in CLARK.items():
        table = tables.clark(folder, router)
        columns = tables.chosen(table, "n", "experts")
        found = fit_general(ClarkLaw, columns, table.loss, objective="least_squares", starts=40)
        for what, law in (("published", printed), (f"here, {agree(found)}", found.law)):
            assert isinstance(law, ClarkLaw)
            miss = np.log(law.loss(**columns) / table.loss)
            row(
                router,
                what,
                found.n_runs,
                f"{0.5 * (miss**2).sum():.4e}",
                *(f"{getattr(law, name):.4f}" for name in "abcd"),
                f"{law.start:.3f}",
                f"{law.most:.1f}",
                f"{np.sqrt((miss**2).mean()) / math.log(10.0):.5f}",
            )
    print()
    head("router", "Clark", "Abnar, N_act/N", "Abnar, K/E", "Ludziejewski")
    for router in CLARK:
        table = tables.clark(folder, router)
        columns = tables.chosen(table, "n", "experts")
        dense = tables.Table(
            {**table.columns, "n": table.columns["n_total"] / table.columns["experts"]}, table.loss
        )
        row(
            router,
            percent(fit_general(ClarkLaw, columns, table.loss, objective="least_squares")),
            percent(tables.clark_by_abnar(table)),
            percent(tables.clark_by_abnar(dense)),
            percent(tables.clark_by_ludziejewski(table)),
        )


def porian(folder: Path) -> None:
    """Print the exponent of the optimal size in compute of each configuration."""
    published = (0.8338, 0.7009, 0.6035, 0.5714, 0.4970)
    head("configuration", "RefinedWeb, published", "here", "OpenWebText2, here")
    for config, printed in enumerate(published):
        web, text = (
            tables.porian_exponent(tables.porian_optima(folder, file, config))
            for file in ("summary_df", "summary_df_owt2")
        )
        row(
            config,
            f"{printed:.4f}",
            *(with_error(found, "alpha", 4) for found in (web, text)),
        )


def marin(folder: Path) -> None:
    """Print what six optima predict at a compute beyond them."""
    table = tables.marin(folder)
    compute, loss = table.columns["compute"], table.loss
    before = compute < 9e20
    head("fit to six optima", "a", "alpha", "e", "at 1e21", "objective")
    for what, target, fixed, shift in (
        ("log(L - 1.6), least squares", loss - 1.6, {"e": 0.0}, 1.6),
        ("log L, e = 1.6", loss, {"e": 1.6}, 0.0),
        ("log L", loss, {}, 0.0),
    ):
        found = fit_general(
            tables.ComputeLaw,
            {"compute": compute[before]},
            target[before],
            objective="least_squares",
            fixed=fixed,
        )
        row(
            what,
            with_error(found, "a"),
            with_error(found, "alpha"),
            "1.6" if fixed else with_error(found, "e"),
            f"{shift + float(found.law.loss(compute=1e21)):.4f}",  # type: ignore[call-arg]
            f"{found.objective:.3e}",
        )
    print(f"\nmeasured at 1e21: {loss[-1]}")


def steplaw(folder: Path) -> None:
    """Print what laws make of 16 cells of mixtures."""
    table = tables.steplaw_cells(folder)
    column = table.columns
    four = tables.chosen(table, "n_total", "n_active", "tokens", "expert_split")
    size = {"n": column["n_active"], "tokens": column["tokens"]}
    ratio = {
        "compute": 6.0 * column["n_active"] * column["tokens"],
        "tokens_per_parameter": column["tokens"] / column["n_active"],
    }
    density = {**tables.chosen(table, "n_total", "tokens")}
    density["density"] = column["n_active"] / column["n_total"]
    held = {"gamma": 0.0, "zeta": 0.0, "omega": 0.0, "start": 1.0, "most": 1e9}
    head("law", "free", "rms %", "agree", "token exponent", "constant", "others", "flags")
    for what, kind, columns, fixed, beta, constant, others in (
        ("Kaplan, N_act", KaplanLaw, size, {}, "alpha_d", None, ["alpha_n"]),
        ("Gadre, N_act", GadreLaw, ratio, {}, "eta", "e", []),
        ("Chinchilla, N_act", ChinchillaLaw, four, {}, "beta", "e", ["alpha"]),
        (
            "Abnar, without N",
            AbnarLaw,
            density,
            {"a": 0.0, "alpha": 1.0, "d": 0.0, "delta": 0.0, "gamma": 0.0},
            "beta",
            "e",
            ["lambda_"],
        ),
        (
            "Ludziejewski, E_hat = E, on the size term only",
            LudziejewskiLaw,
            tables.chosen(table, "n_active", "tokens", "experts"),
            held,
            "beta",
            "c",
            ["alpha", "delta"],
        ),
    ):
        found = fit_general(kind, columns, table.loss, objective="least_squares", fixed=fixed)
        flags = sorted({remark.reason for remark in found.warnings})
        row(
            what,
            sum(not each.fixed for each in found.coefficients.values()),
            percent(found),
            agree(found),
            f"{beta} {with_error(found, beta)}",
            "-" if constant is None else with_error(found, constant),
            ", ".join(f"{name} {with_error(found, name)}" for name in others) or "-",
            ", ".join(flags) or "-",
        )


def isoflops(folder: Path) -> None:
    """Print the law of Chinchilla on collections of isoFLOP points."""
    head("experiment", "points", "objective", "agree", "rms %", "alpha", "beta", "e")
    for name, table in tables.isoflops(folder).items():
        size = table.columns["n"]
        found = fit_general(
            ChinchillaLaw,
            {
                "n_total": size,
                "n_active": size,
                "tokens": table.columns["tokens"],
                "expert_split": 1.0,
            },
            table.loss,
        )
        row(
            name.split("__chinchilla")[0].replace("__", ", "),
            found.n_runs,
            f"{found.objective:.4e}",
            agree(found),
            percent(found),
            *(with_error(found, each) for each in ("alpha", "beta", "e")),
        )


PARTS: dict[str, Callable[[Path], None]] = {
    "nist": nist,
    "clark": clark,
    "porian": porian,
    "marin": marin,
    "steplaw": steplaw,
    "isoflops": isoflops,
}


def main(names: Sequence[str]) -> None:
    """Print the parts named, or all."""
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        sys.exit(f"There is no part {unknown[0]!r}; there are {', '.join(PARTS)}.")
    data = os.environ.get("MOSAIC_DATA")
    if data is None and set(names or PARTS) != {"nist"}:
        sys.exit("MOSAIC_DATA must name the folder of the tables of runs; nist needs none.")
    for name in names or PARTS:
        print(f"\n## {name}\n")
        PARTS[name](Path(data or "."))


if __name__ == "__main__":
    main(sys.argv[1:])

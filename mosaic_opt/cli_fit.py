"""The command of fits: fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mosaic_opt.case_options import Json
from mosaic_opt.console import EXIT_INFEASIBLE, EXIT_INTERRUPTED, Bar, check_target, emit, write
from mosaic_opt.errors import MosaicError

if TYPE_CHECKING:
    from lawfit import Bootstrap, FitResult, ProfileCurve, Remark, RidgeScan, Runs

RunsFile = Annotated[Path, typer.Argument(help="CSV, TSV, JSON or JSON lines; a row is a run.")]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="NAME=COLUMN",
        help="Which column is n_total, n_active, tokens, expert_split, loss, weight, id or flops; "
        "a unit behind a colon, as in n_active=params:B.",
    ),
]
Rule = Annotated[
    str | None, typer.Option(help="nact:0.1 or future:0.1, or ids:NAME,NAME; none unless given.")
]
Outliers = Annotated[
    str | None, typer.Option(help="Runs to drop: highest:5 or ids:NAME,NAME; none unless given.")
]
Fixed = Annotated[
    list[str] | None, typer.Option("--fix", metavar="NAME=VALUE", help="Hold a coefficient.")
]


class _Learnt(NamedTuple):
    """What was learnt of a fit beyond itself; None where it was not asked for, or not reached."""

    bootstrap: Bootstrap | None
    scan: RidgeScan | None
    curves: dict[str, ProfileCurve] | None
    warnings: list[Remark]
    interrupted: bool


def fit(
    runs: RunsFile,
    law: Annotated[str, typer.Option(help="joint, per_split or chinchilla.")] = "joint",
    holdout: Rule = None,
    outliers: Outliers = None,
    objective: Annotated[str, typer.Option(help="huber or least_squares.")] = "huber",
    delta: Annotated[float, typer.Option(help="Half-width of Huber's function, in log L.")] = 1e-3,
    starts: Annotated[int, typer.Option(help="Random starts.")] = 100,
    fix: Fixed = None,
    noise: Annotated[
        float | None, typer.Option(help="Known deviation of log L between seeds.")
    ] = None,
    draws: Annotated[int, typer.Option(help="Refits for the intervals; 0: none.")] = 500,
    bootstrap: Annotated[str, typer.Option(help="How runs are drawn: wild or pairs.")] = "wild",
    level: Annotated[float, typer.Option(help="Nominal coverage of the intervals.")] = 0.95,
    restarts: Annotated[int, typer.Option(help="Restarts that look for a ridge; 0: none.")] = 400,
    seed: Annotated[int, typer.Option(help="Of the generators.")] = 0,
    column: Columns = None,
    expert_split: Annotated[
        float | None, typer.Option(help="Fit the runs of this expert split alone.")
    ] = None,
    convention: Annotated[
        str | None,
        typer.Option(help="What N counts, as in without_embedding_and_head; the law keeps it."),
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Where the runs come from; the file's name unless given.")
    ] = None,
    loss_unit: Annotated[str, typer.Option(help="Of the losses: nats or bits, a token.")] = "nats",
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="A page with figures; needs plotly.")
    ] = None,
    law_file: Annotated[
        str | None, typer.Option(metavar="FILE.json", help="The law, for an envelope's `law`.")
    ] = None,
    json_to: Json = None,
) -> None:
    """Fit a scaling law to runs: coefficients, intervals, and whether it is the optimum.

    Exit code 1 says that the fit did not converge; its report is written all the same.
    """
    from lawfit import fit as fit_law
    from lawfit import read_runs
    from mosaic_opt.fit_report import FitReport
    from mosaic_opt.report_fit import render_fit

    _check_options(json_to, html, law_file, draws, restarts, seed, level, bootstrap)
    held = _numbers(fix)
    table = read_runs(
        runs,
        columns=dict(_pair("--column", text) for text in column or ()),
        convention=convention,
        source=source,
        loss_unit=loss_unit,  # type: ignore[arg-type]  # any other word is refused there
    )
    if expert_split is not None:
        table = _at_split(table, expert_split)
    _check_kind(law, table, held)
    with Bar() as bar:
        found = fit_law(
            law,
            table,
            objective=objective,  # type: ignore[arg-type]  # any other word is refused there
            delta=delta,
            starts=starts,
            holdout=_rule(holdout),
            outliers=_rule(outliers),
            fixed=held,
            noise=noise,
            rng=seed,
            progress=lambda done, of: bar.count("starts", done, of),
        )
        learnt = _learn(
            found, bar, draws, bootstrap, restarts, seed, level if html is not None else None
        )
    report = FitReport.of(
        found,
        bootstrap=learnt.bootstrap,
        scan=learnt.scan,
        curves=learnt.curves,
        level=level,
        seed=seed,
        warnings=learnt.warnings,
    )
    if law_file is not None:
        write(report.law_file() + "\n", law_file)
    if html is not None:
        from mosaic_opt.figure_fit import fit_page

        write(fit_page(report, found, learnt.curves), html)
    emit(lambda: render_fit(report), report.to_json, json_to)
    if learnt.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not report.converged:
        raise typer.Exit(EXIT_INFEASIBLE)


def _learn(
    found: FitResult,
    bar: Bar,
    draws: int,
    kind: str,
    restarts: int,
    seed: int,
    profile_level: float | None,
) -> _Learnt:
    """Refit, restart and profile; what fails or is interrupted is said in a warning."""
    from lawfit import LawError, Remark, profile, ridge_scan
    from lawfit import bootstrap as resample

    if not found.converged:
        sentence = "No intervals, restarts or profiles: they would be of a fit that is no optimum."
        return _Learnt(None, None, None, [Remark(reason="not_learnt", sentence=sentence)], False)
    warnings: list[Remark] = []

    def attempt(reason: str, wanted: bool, work: Any) -> Any:
        try:
            return work() if wanted else None
        except LawError as error:
            warnings.append(Remark(reason=reason, sentence=str(error)))
            return None

    def count(what: str) -> Any:
        return lambda done, of: bar.count(what, done, of)

    refits = scan = curves = None
    interrupted = False
    try:
        refits = attempt(
            "no_intervals",
            draws > 0,
            lambda: resample(
                found,
                kind=kind,  # type: ignore[arg-type]  # checked with the options
                draws=draws,
                seed=seed,
                progress=count("refits"),
            ),
        )
        scan = attempt(
            "no_scan",
            restarts > 0,
            lambda: ridge_scan(found, starts=restarts, seed=seed, progress=count("restarts")),
        )
        curves = attempt(
            "no_profile",
            profile_level is not None,
            lambda: profile(found, level=profile_level or 0.95, progress=count("profiles")),
        )
    except KeyboardInterrupt:
        interrupted = True
        sentence = "The command was interrupted after the fit; what is missing was not reached."
        warnings.append(Remark(reason="interrupted", sentence=sentence))
    return _Learnt(refits, scan, curves, warnings, interrupted)


# ---------------------------------------------------------------- options


def _check_options(
    json_to: str | None,
    html: str | None,
    law_file: str | None,
    draws: int,
    restarts: int,
    seed: int,
    level: float,
    bootstrap: str,
) -> None:
    """Refuse, before anything long, what would be refused after it."""
    for target in (json_to, html, law_file):
        check_target(target)
    if html is not None:
        from mosaic_opt.plotting import require_plotly

        require_plotly()
    if law_file is not None and not law_file.endswith(".json"):
        raise MosaicError(
            f"--law-file {law_file} must end in .json, by which an envelope reads it."
        )
    if draws < 0:
        raise MosaicError(f"--draws {draws} must be at least 0, which makes no intervals.")
    if restarts < 0 or restarts == 1:
        raise MosaicError(f"--restarts {restarts} must be 0, for none, or at least 2.")
    if seed < 0:
        raise MosaicError(f"--seed {seed} must be at least 0.")
    if not 0.0 < level < 1.0:
        raise MosaicError(f"--level {level:g} must lie between 0 and 1, such as 0.95.")
    if bootstrap not in ("wild", "pairs"):
        raise MosaicError(f"--bootstrap {bootstrap!r} must be wild or pairs.")


def _pair(option: str, text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (sign and name.strip() and value.strip()):
        example = "n_active=params" if option == "--column" else "eta=0.5"
        raise MosaicError(f"{option} {text!r} must be NAME=VALUE, as in {option} {example}.")
    return name.strip(), value.strip()


def _numbers(texts: Sequence[str] | None) -> dict[str, float]:
    found = {}
    for text in texts or ():
        name, value = _pair("--fix", text)
        try:
            found["lambda_" if name == "lambda" else name] = float(value)
        except ValueError:
            raise MosaicError(f"--fix {text!r} must hold a number, as in --fix eta=0.5.") from None
    return found


def _rule(text: str | None) -> str | list[str] | None:
    """Return a rule as it is, or the ids behind ``ids:``."""
    if text is None or not text.startswith("ids:"):
        return text
    return [name.strip() for name in text.removeprefix("ids:").split(",") if name.strip()]


def _splits(table: Runs) -> list[float]:
    return sorted(set(table.expert_split))


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _at_split(table: Runs, split: float) -> Runs:
    keep = [each == split for each in table.expert_split]
    if not any(keep):
        raise MosaicError(
            f"--expert-split {split:g} is that of no run; there are {_listed(_splits(table))}."
        )
    return table.where(keep)


def _check_kind(law: str, table: Runs, held: dict[str, float]) -> None:
    """Refuse a law that the runs cannot be of, and say which they can."""
    splits = _splits(table)
    if law == "per_split" and len(splits) > 1:
        raise MosaicError(
            f"--law per_split is for one expert split, and the runs have {len(splits)} "
            f"({_listed(splits)}); take one, as in --expert-split {splits[0]:g}, or --law joint."
        )
    if law in ("joint", "per_split") and table.n_total == table.n_active:
        raise MosaicError(
            f"--law {law} is for sparse models, and all runs are dense (n_total is n_active); "
            "take --law chinchilla, or name the columns of n_total, n_active and expert_split."
        )
    if law == "joint" and len(splits) == 1 and "eta" not in held:
        raise MosaicError(
            f"--law joint needs several expert splits, and all runs have {splits[0]:g}, which says "
            "nothing of eta; take --law per_split, or hold it, as in --fix eta=0.5."
        )


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(fit)

"""What `mosaic fit` returns, and its JSON: a public contract (``schema_version`` 1, SI units).

A report holds its law under the key ``law``, so an envelope takes its file as that of a law.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from lawfit import (
    AnyLaw,
    Bootstrap,
    FitResult,
    LawEnsemble,
    LawError,
    ProfileCurve,
    Remark,
    RidgeScan,
)
from lawfit.documents import read_document
from mosaic_opt.errors import MosaicError
from mosaic_opt.solver import own_version
from perfmodel.frozen import Frozen, explain

__all__ = ["FitReport", "FittedCoefficient", "Intervals"]


_NUMBERS = re.compile(r"\[\n\s*([-+.\deE,\s]+?)\n\s*\]")
"""A list of numbers over several lines; no text of a JSON document holds a line's end."""


class _Finite(Frozen):
    # NaN and infinities have no JSON; what is unknown or without end is None.
    model_config = ConfigDict(allow_inf_nan=False)


class FittedCoefficient(_Finite):
    """A coefficient of a law, and how sure it is.

    Attributes
    ----------
    value : float
        In the units of the law.
    low, high : float or None
        Ends of its interval, by the rule of the report's `Intervals`; None where there is none.
    identified : bool or None
        Whether the runs determine it, by the report's rule; None where that was not looked at.
    fixed : bool
        Whether the user held it.
    at_bound : {"lower", "upper"} or None
        The bound of the fit that it stands at.
    spread : float or None
        Over restarts nearly as good as the fit, relative to the value [-].
    profile_low, profile_high : float or None
        Ends of its profile's interval; None where that is open, or no profile was made.
    remarks : tuple of Remark
        What speaks against its interval or its profile.
    """

    value: float
    low: float | None
    high: float | None
    identified: bool | None
    fixed: bool
    at_bound: Literal["lower", "upper"] | None
    spread: float | None
    profile_low: float | None
    profile_high: float | None
    remarks: tuple[Remark, ...]


class Intervals(_Finite):
    """How the intervals of a report were made.

    Attributes
    ----------
    method : str
        Percentiles of which bootstrap.
    level : float
        Nominal coverage [-].
    draws, refits_not_converged : int
        Refits, and those of them that did not converge and do not count.
    seed : int
        Of their generator.
    """

    method: str
    level: float
    draws: int
    refits_not_converged: int
    seed: int


class FitReport(_Finite):
    """A fitted law and what is known of the fit.

    Attributes
    ----------
    law : JointLaw, PerSplitLaw or ChinchillaLaw
        The law. Its source says so where the fit did not converge.
    coefficients : dict of str to FittedCoefficient
        By the field of the law.
    objective : float
        Sum over the runs of weight times the loss function of ``log L`` [-].
    converged : bool
        Whether the fit is the optimum, by its gradient and by the starts that agree.
    starts, starts_agreeing : int
        Starts, and those that ended at the best objective.
    rmse_train, rmse_holdout : float or None
        Of predicted minus measured loss [nats/token], runs of the fit and runs held out.
    loss_function, delta, gradient_norm, n_train, n_holdout, held_out, holdout_rule, outlier_rule
        As in `lawfit.FitResult`.
    convention, source : str
        What the counts of the runs count, and where the runs come from.
    seed : int
        Of the starts, refits and restarts.
    intervals : Intervals or None
        None where there are none; a warning says why.
    identified_rule : str or None
        What "identified" means here.
    warnings : tuple of Remark
        What speaks against the runs, the fit or this report.
    version : str
        Of this package.
    refits : dict of str to tuple of float, or None
        Coefficients of the refits that converged, by the field of the law: draws of the law, which
        `ensemble` returns. None where there are no intervals.
    """

    schema_version: Literal[1] = 1
    basis: Literal["FITTED"] = "FITTED"
    law: AnyLaw
    coefficients: dict[str, FittedCoefficient]
    objective: float
    converged: bool
    starts: int
    starts_agreeing: int
    rmse_train: float
    rmse_holdout: float | None
    loss_function: Literal["huber", "least_squares"]
    delta: float | None
    gradient_norm: float
    n_train: int
    n_holdout: int
    held_out: tuple[str, ...]
    holdout_rule: str
    outlier_rule: str
    convention: str
    source: str
    seed: int
    intervals: Intervals | None
    identified_rule: str | None
    warnings: tuple[Remark, ...]
    version: str
    refits: dict[str, Annotated[tuple[float, ...], Field(min_length=1)]] | None = None

    @model_validator(mode="after")
    def _refits_are_laws(self) -> FitReport:
        if self.refits is not None and set(self.refits) != set(self.coefficients):
            raise ValueError("refits must have the names of coefficients")
        if len({len(column) for column in (self.refits or {}).values()}) > 1:
            raise ValueError("refits must have one length in all coefficients")
        return self

    @classmethod
    def of(
        cls,
        found: FitResult,
        *,
        bootstrap: Bootstrap | None = None,
        scan: RidgeScan | None = None,
        curves: Mapping[str, ProfileCurve] | None = None,
        level: float = 0.95,
        seed: int = 0,
        warnings: Sequence[Remark] = (),
    ) -> FitReport:
        """Put a fit and what was learnt of it into one report.

        Parameters
        ----------
        found : FitResult
            The fit.
        bootstrap : Bootstrap, optional
            Its refits, for intervals.
        scan : RidgeScan, optional
            Its restarts, for what is identified.
        curves : mapping, optional
            Profiles by coefficient.
        level : float
            Nominal coverage of the intervals, between 0 and 1.
        seed : int
            Of the starts.
        warnings : sequence of Remark
            More of them, after those of the fit.

        Raises
        ------
        LawError
            The level is illegal.
        """
        more = list(warnings)
        ends: dict[str, tuple[float | None, float | None, tuple[Remark, ...]]] = {}
        intervals = refits = None
        if bootstrap is not None:
            try:
                ends = {name: _ends(bootstrap, name, level) for name in found.moving}
                intervals = Intervals(
                    method=f"percentiles of converged refits, {bootstrap.kind} bootstrap",
                    level=level,
                    draws=bootstrap.draws,
                    refits_not_converged=bootstrap.not_converged,
                    seed=bootstrap.seed,
                )
                columns = zip(*bootstrap.values, strict=True)
                refits = dict(zip(bootstrap.names, columns, strict=True))
            except LawError as error:
                more.append(Remark(reason="no_intervals", sentence=f"No intervals: {error}"))
        rows = {} if scan is None else {row.name: row for row in scan.rows}
        coefficients = {}
        for name, one in found.coefficients.items():
            low, high, remarks = ends.get(name, (None, None, ()))
            curve = (curves or {}).get(name)
            row = rows.get(name)
            coefficients[name] = FittedCoefficient(
                value=one.value,
                low=low,
                high=high,
                identified=None if row is None else row.identified,
                fixed=one.fixed,
                at_bound=one.at_bound,
                spread=None if row is None else _finite(row.spread),
                profile_low=None if curve is None else _finite(curve.low),
                profile_high=None if curve is None else _finite(curve.high),
                remarks=(*remarks, *(() if curve is None else curve.remarks)),
            )
        law = found.law
        if not found.converged:
            law = law.model_copy(update={"source": f"{law.source}; the fit did NOT converge"})
        shared = {
            name: getattr(found, name)
            for name in cls.model_fields
            if name in type(found).model_fields and name not in ("law", "coefficients", "warnings")
        }
        return cls(
            law=law,
            coefficients=coefficients,
            source=found.train.source,
            seed=seed,
            intervals=intervals,
            identified_rule=None if scan is None else scan.rule,
            warnings=(*found.warnings, *more),
            version=own_version(),
            refits=refits,
            **shared,
        )

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the JSON document; a list of numbers is one line of it."""
        return _one_line(self.model_dump_json(indent=indent))

    @classmethod
    def from_json(cls, text: str) -> FitReport:
        """Read a JSON document.

        Raises
        ------
        MosaicError
            The document is no such report; one sentence.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise MosaicError(f"Not a report of fit: {explain(error, cls)}.") from None

    @classmethod
    def from_file(cls, path: str | Path) -> FitReport:
        """Read the JSON file of a report, or of a law that `law_file` wrote.

        Raises
        ------
        LawError
            The file cannot be read.
        MosaicError
            It holds neither; one sentence.
        """
        content: Any = read_document(path)
        if isinstance(content, dict) and isinstance(content.get("provenance"), dict):
            content = {**content["provenance"], "law": content.get("law")}
        try:
            return cls.from_json(json.dumps(content, default=str))
        except MosaicError as error:
            raise MosaicError(f"{path}: {error}") from None

    def law_file(self) -> str:
        """Return the JSON of a law's file: the law, and what it rests on."""
        rests_on = json.loads(self.to_json())
        law = rests_on.pop("law")
        document = {"schema_version": 1, "law": law, "provenance": rests_on}
        return _one_line(json.dumps(document, indent=2))

    def ensemble(self) -> LawEnsemble:
        """Return the refits as draws of the law, equally likely.

        Raises
        ------
        MosaicError
            The report has none, or one of them is no law.
        """
        if self.refits is None or self.intervals is None:
            raise MosaicError(
                f"The report of the law ({self.law.source}) holds no refits, and so no draws of "
                "it: it was made without, or the fit did not converge."
            )
        fields, names = self.law.model_dump(), list(self.refits)
        rows = zip(*self.refits.values(), strict=True)
        kind = self.intervals.method.removeprefix("percentiles of ")
        try:
            laws = tuple(
                type(self.law).model_validate({**fields, **dict(zip(names, row, strict=True))})
                for row in rows
            )
        except ValidationError as error:
            raise MosaicError(f"A refit of the report is no law: {explain(error)}.") from None
        return LawEnsemble(
            laws=laws,
            source=self.law.source,
            method=f"{kind} of {self.n_train} runs",
            basis=self.basis,
            seed=self.intervals.seed,
        )

    def __str__(self) -> str:
        """Return the page."""
        from mosaic_opt.report import as_text
        from mosaic_opt.report_fit import render_fit

        return as_text(render_fit(self), width=120)


def _one_line(document: str) -> str:
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", document)


def _ends(
    bootstrap: Bootstrap, name: str, level: float
) -> tuple[float | None, float | None, tuple[Remark, ...]]:
    found = bootstrap.interval(name, level=level)
    return _finite(found.low), _finite(found.high), found.remarks


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None

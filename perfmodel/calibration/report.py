"""A pack's fitted parameters and errors as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterator

from perfmodel.calibration.packs import FitErrors, HardwarePack


def report_markdown(pack: HardwarePack) -> str:
    """Return the report on a pack."""
    return "\n".join(_lines(pack)) + "\n"


def _lines(pack: HardwarePack) -> Iterator[str]:
    yield f"# Fit of {pack.name}"
    yield ""
    yield f"{pack.description} Fitted to {pack.origin}."
    yield ""
    yield "Errors are |predicted / measured - 1| in percent: median / 90th percentile."
    yield ""
    yield "| surface | part | rows | all rows | held out | which rows were held out |"
    yield "|---|---|---|---|---|---|"
    for name, surface in pack.surfaces.items():
        yield _errors(name, "all", surface.errors)
        for regime, errors in surface.regimes.items():
            yield _errors("", regime, errors)
    yield ""
    yield "| surface | parameters |"
    yield "|---|---|"
    for name, surface in pack.surfaces.items():
        params = {**surface.params, **{f"{k} (nuisance)": v for k, v in surface.nuisance.items()}}
        yield f"| {name} | {', '.join(f'{key} {value:.4g}' for key, value in params.items())} |"


def _errors(surface: str, part: str, errors: FitErrors) -> str:
    outside = "-"
    if errors.median_out is not None and errors.p90_out is not None:
        outside = f"{errors.median_out:.2f} / {errors.p90_out:.2f}"
    inside = f"{errors.median_in:.2f} / {errors.p90_in:.2f}"
    return f"| {surface} | {part} | {errors.n} | {inside} | {outside} | {errors.held_out} |"

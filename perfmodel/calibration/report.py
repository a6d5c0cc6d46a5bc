"""What packs hold and rest on, as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from perfmodel.calibration.packs import FitErrors, HardwarePack


def report_markdown(pack: HardwarePack) -> str:
    """Return the report on a pack."""
    return "\n".join(_lines(pack)) + "\n"


def overview_markdown(packs: Iterable[HardwarePack]) -> str:
    """Return two tables over several packs: their rates, and what each surface rests on."""
    packs = list(packs)
    lines = [
        "| pack | device | bf16, fp8, fp4 [1e12 FLOP/s] | fastest product [of bf16 peak] "
        "| memory [GB], [TB/s] | link, NIC [GB/s] | devices per node |",
        "|---|---|---|---|---|---|---|",
        *(_rates(pack) for pack in packs),
        "",
        "| pack | surface | source | rows | all rows | held out |",
        "|---|---|---|---|---|---|",
        *(row for pack in packs for row in _evidence(pack)),
    ]
    return "\n".join(lines) + "\n"


def _rates(pack: HardwarePack) -> str:
    d, n = pack.device, pack.node
    peaks = (d.peak_flops, d.peak_flops_fp8, d.peak_flops_fp4)
    flops = ", ".join("-" if peak is None else f"{peak.value / 1e12:g}" for peak in peaks)
    product = "-" if d.matmul_flops is None else f"{d.matmul_flops.value / d.peak_flops.value:.3f}"
    memory = f"{d.memory_bytes.value / 1e9:.1f}, {d.memory_bw.value / 1e12:g}"
    network = ", ".join(
        "-" if bw is None else f"{bw.value / 1e9:g}" for bw in (n.link_bw, n.nic_bw)
    )
    return (
        f"| `{pack.name}` | {d.name} | {flops} | {product} | {memory} | {network} "
        f"| {n.devices_per_node} |"
    )


def _evidence(pack: HardwarePack) -> Iterator[str]:
    unmeasured: dict[str, list[str]] = {}
    for name, surface in pack.surfaces.items():
        if surface.errors is None:
            reference = surface.provenance.partition("taken over from ")[2].partition(";")[0]
            unmeasured.setdefault(reference, []).append(f"`{name}`")
            continue
        e = surface.errors
        yield (
            f"| `{pack.name}` | `{name}` | {surface.source} | {e.n} "
            f"| {e.median_in:.2f} / {e.p90_in:.2f} | {_outside(e)} |"
        )
    for reference, names in unmeasured.items():
        yield (
            f"| `{pack.name}` | {', '.join(names)} | ASSUMED, from `{reference}` "
            "| 0 | not measured | not measured |"
        )


def _outside(errors: FitErrors) -> str:
    if errors.median_out is None or errors.p90_out is None:
        return "-"
    return f"{errors.median_out:.2f} / {errors.p90_out:.2f}"


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
        if surface.errors is None:
            yield f"| {name} | all | - | not measured | - | {surface.provenance} |"
            continue
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
    inside = f"{errors.median_in:.2f} / {errors.p90_in:.2f}"
    return (
        f"| {surface} | {part} | {errors.n} | {inside} | {_outside(errors)} | {errors.held_out} |"
    )

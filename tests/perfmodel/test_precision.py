"""Products below bf16: what devices can do, what they cost, and what that rests on."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.architecture import Architecture
from perfmodel.attention import linear_time
from perfmodel.batch import plan_matrix, price
from perfmodel.calibration import HardwarePack, PackError, load_pack, shipped_packs
from perfmodel.calibration.fit import load_datasheet
from perfmodel.calibration.fit_gemms import Fp8GemmFit, fp8_rates, fp8_rows, has_fp8
from perfmodel.calibration.packs import UnmeasuredFlag
from perfmodel.calibration.regression import evaluate
from perfmodel.calibration.surfaces import GEMM_FP8
from perfmodel.calibration.tables import Tables
from perfmodel.cluster import Batch, Cluster
from perfmodel.exchange import update_time
from perfmodel.hardware import Hardware
from perfmodel.kernels import Cast, GemmSurface, cast_time, gemm_time, grouped_gemm_time
from perfmodel.layer import expert_time
from perfmodel.memory import dense_parameters, expert_parameters
from perfmodel.mesh import stage_content
from perfmodel.models import catalogue
from perfmodel.plan import Plan
from perfmodel.precision import RECIPES, Precision, saved_activation_bytes, weight_bytes
from perfmodel.ranges import range_flags, unmeasured_parts
from perfmodel.sources import Source
from perfmodel.step import estimate

from .strategies import (
    Run,
    architectures,
    batches,
    cluster,
    dims,
    fast_profile,
    ideal_hardware,
    ideal_stack,
    legal_rows,
    moe,
    profile,
    runs,
    skeleton,
)
from .test_ranges import run_of

FP8 = {"bf16", "fp8", "fp8-block"}
MX = FP8 | {"mxfp8"}
CAN = {
    **{name: {"bf16"} for name in ("a100-40", "a100-80")},
    **{name: FP8 for name in ("h100", "h200", "h800", "mi300x")},
    "mi355x": MX,
    **{name: MX | {"nvfp4"} for name in ("b200", "p6-b200", "gb200", "b300", "gb300")},
}
LOW = sorted(RECIPES)
POSSIBLE = [(name, p) for name in CAN for p in LOW if p in CAN[name]]
low = pytest.mark.parametrize("precision", LOW)
possible = pytest.mark.parametrize(("name", "precision"), POSSIBLE)
sizes = st.floats(10.0, 18.0).map(lambda exponent: 2.0**exponent)


def in_precision(run: Run, precision: Precision) -> Run:
    return run._replace(batch=run.batch.model_copy(update={"precision": precision}))


# ---------------------------------------------------------------- what devices can do


def test_every_pack_says_what_it_can_do() -> None:
    assert set(CAN) == set(shipped_packs())


@pytest.mark.parametrize("name", CAN)
@pytest.mark.parametrize("precision", Precision)
def test_a_rate_that_the_device_lacks_is_one_sentence(name: str, precision: Precision) -> None:
    machines = Cluster(hardware=name, nodes=1)
    if precision in CAN[name]:
        hw = machines.constants_for(precision)
        assert hw.device == machines.constants.device
        assert hw.fabric == machines.constants.fabric
        return
    device = machines.pack.device
    known = ", ".join(p for p in Precision if p in CAN[name])
    sentence = f"precision={precision} has no rate on {device.name}; it has {known}."
    with pytest.raises(PackError, match=f"^{re.escape(sentence)}$"):
        machines.constants_for(precision)


def test_a_pack_without_the_surface_has_no_price() -> None:
    content = load_pack("h100").model_dump(mode="json", exclude_none=True)
    del content["surfaces"][GEMM_FP8]
    pack = HardwarePack.model_validate(content)
    assert pack.constants() == load_pack("h100").constants()
    with pytest.raises(
        PackError, match=r"^precision=fp8 has no price on h100: .* nearest: bf16\.$"
    ):
        pack.constants(Precision.FP8)


def test_a_precision_needs_its_peak() -> None:
    content = load_pack("h100").model_dump(mode="json", exclude_none=True)
    content["device"]["precisions"].append("nvfp4")
    with pytest.raises(ValueError, match="precisions names nvfp4 and peak_flops_fp4 is missing"):
        HardwarePack.model_validate(content)
    content = load_pack("a100-80").model_dump(mode="json", exclude_none=True)
    content["surfaces"][GEMM_FP8] = content["surfaces"]["gemm"]
    with pytest.raises(ValueError, match=r"gemm_fp8 needs device\.peak_flops_fp8"):
        HardwarePack.model_validate(content)


# ---------------------------------------------------------------- products


@possible
def test_the_peak_is_reached_as_stated(name: str, precision: Precision) -> None:
    """Worked by hand: a product so large that nothing but the rate counts."""
    pack = load_pack(name)
    hw, recipe = pack.constants(precision), RECIPES[precision]
    peak = pack.device.peak_flops_fp4 if precision == "nvfp4" else pack.device.peak_flops_fp8
    assert peak is not None
    fp8, bf16 = pack.surfaces[GEMM_FP8].params, pack.surfaces["gemm"].params
    reached = peak.value * recipe.share * fp8["flop_eff"]
    assert hw.device.peak_flops * hw.gemm.flop_eff == pytest.approx(reached)
    for way, backward in (("grouped_forward", 0.0), ("grouped_backward", 1.0)):
        surface = getattr(hw, way)._replace(bw_eff=float("inf"))
        eff = pack.surfaces[way].params["flop_eff"] * fp8["flop_eff"] / bf16["flop_eff"]
        time = grouped_gemm_time(hw.device, surface, 4.0, 1e4, 1e4, 1e4, backward)
        flop = (2.0 + 2.0 * backward) * 4e12
        assert time == pytest.approx(flop / (peak.value * recipe.share * eff))


@possible
@given(m=sizes, n=sizes, k=sizes)
def test_a_large_product_is_no_slower_than_in_bf16(
    name: str, precision: Precision, m: float, n: float, k: float
) -> None:
    pack = load_pack(name)
    hw, bf16 = pack.constants(precision), pack.constants()
    slack = bf16.gemm.launch_s
    low_s, high_s = (gemm_time(h.device, h.gemm, m, n, k) for h in (hw, bf16))
    assert low_s <= high_s + slack
    assert low_s < 0.9 * high_s or 2.0 * m * n * k < 1e12 or min(m, n, k) < 4096.0


@possible
@given(
    shape=st.tuples(*[st.floats(1.0, 2e5)] * 3),
    more=st.floats(1.0, 64.0),
    which=st.integers(0, 2),
    backward=st.sampled_from((0.0, 1.0)),
)
def test_a_layer_never_gets_faster_as_a_size_grows(
    name: str,
    precision: Precision,
    shape: tuple[float, ...],
    more: float,
    which: int,
    backward: float,
) -> None:
    hw = load_pack(name).constants(precision)
    a = moe().dims
    grown = tuple(x * more if i == which else x for i, x in enumerate(shape))
    slack = 1.0 + 1e-12
    assert 0.0 < linear_time(hw, *shape, backward) <= linear_time(hw, *grown, backward) * slack
    small, large = (expert_time(a, hw, *s, backward) for s in (shape, grown))
    assert 0.0 < small <= large * slack


def test_the_order_of_the_precisions_on_a_wide_layer() -> None:
    pack = load_pack("p6-b200")

    def pass_s(precision: Precision) -> float:
        hw = pack.constants(precision)
        return sum(linear_time(hw, 16384.0, 16384.0, 16384.0, way) for way in (0.0, 1.0))

    order = (Precision.NVFP4, Precision.MXFP8, Precision.FP8, Precision.FP8_BLOCK, Precision.BF16)
    times = [pass_s(precision) for precision in order]
    assert times == sorted(times)
    assert times[-1] / times[2] > 1.4


# ---------------------------------------------------------------- quantising


def quantising(moved: float = 3.0, kernels: float = 2.0, weight: float = 5.0) -> Hardware:
    """Build a machine that computes at its peak, and moves a byte in a nanosecond."""
    hw = ideal_hardware()
    return hw._replace(
        device=hw.device._replace(memory_bw=1e9),
        gemm=hw.gemm._replace(bw_eff=1e12),
        grouped_forward=hw.grouped_forward._replace(bw_eff=1e12),
        grouped_backward=hw.grouped_backward._replace(bw_eff=1e12),
        elementwise=hw.elementwise._replace(fixed_s=1e-3),
        cast=Cast(moved, kernels, weight),
    )


def test_quantising_by_hand() -> None:
    hw = quantising()
    without = hw._replace(cast=Cast(0.0, 0.0, 0.0))
    m, n, k = 1000.0, 2000.0, 3000.0
    forward, backward = (
        linear_time(hw, m, n, k, way) - linear_time(without, m, n, k, way) for way in (0.0, 1.0)
    )
    assert forward == pytest.approx(2e-3 + 3.0 * m * k * 1e-9)
    assert backward == pytest.approx(2e-3 + 3.0 * m * n * 1e-9)
    a = moe().dims
    up = (a.ffn_matrices - 1.0) * 96.0
    for way, inner in ((0.0, 96.0), (1.0, up)):
        added = expert_time(a, hw, 4.0, 500.0, 96.0, way)
        added -= expert_time(a, without, 4.0, 500.0, 96.0, way)
        assert added == pytest.approx(4e-3 + 3.0 * 2000.0 * (a.d_model + inner) * 1e-9)


def test_weights_are_quantised_once_a_step() -> None:
    hw = quantising()
    without = hw._replace(cast=Cast(3.0, 2.0, 0.0))
    a, p = moe().dims, dims(tp=2, ep=2, dp=4)
    content = stage_content(a, p, 0.0)
    optimizer = Batch(global_batch=8, seq_len=64).optimizer.dims
    added = update_time(a, hw, ideal_stack(), optimizer, p, content)
    added -= update_time(a, without, ideal_stack(), optimizer, p, content)
    held = dense_parameters(a, p, content) + expert_parameters(a, p, content)
    assert added == pytest.approx(5.0 * held * 1e-9)


def test_bf16_quantises_nothing() -> None:
    for name in shipped_packs():
        hw = load_pack(name).constants(Precision.BF16)
        assert hw == load_pack(name).constants()
        assert cast_time(hw.device, hw.elementwise, hw.cast, 1e12) == 0.0
        assert hw.gemm.operand_bytes == hw.grouped_forward.operand_bytes == 2.0


def test_bytes_follow_from_the_formats() -> None:
    saved = {
        "bf16": 2.0,
        "fp8": 1.0,
        "fp8-block": 1.0 + 4.0 / 128.0,
        "mxfp8": 1.0 + 1.0 / 32.0,
        "nvfp4": 0.5 + 1.0 / 16.0,
    }
    for precision in Precision:
        assert saved_activation_bytes(precision) == saved[precision]
        copies = 0.0 if precision == "bf16" else 2.0 * saved[precision]
        assert weight_bytes(precision) == 2.0 + copies
    for precision, recipe in RECIPES.items():
        reads = 4.0 if precision in ("fp8", "nvfp4") else 2.0  # a scale of the tensor: two
        assert recipe.cast.element_bytes == reads + 2.0 * saved[precision]


# ---------------------------------------------------------------- a step


@given(runs(), st.sampled_from(LOW))
def test_only_linear_layers_and_experts_change(run: Run, precision: Precision) -> None:
    bf16, other = run.model.cost, in_precision(run, precision).model.cost
    for name in ("moe_forward", "moe_backward", "dense_forward", "dense_backward"):
        one, two = getattr(bf16, name)._asdict(), getattr(other, name)._asdict()
        for operator in set(one) - {"attention_linear", "experts", "dense_ffn"}:
            assert one[operator] == two[operator], operator
        assert (one["attention_linear"] != two["attention_linear"]) is (sum(one.values()) > 0.0)
    assert bf16.dispatch == other.dispatch
    assert bf16.launch_forward == other.launch_forward
    if run.architecture.mtp_layers == 0:
        assert bf16.head == other.head


@low
@given(architectures(), batches, st.randoms(use_true_random=False))
def test_the_kernel_prices_what_the_scalar_estimate_does(
    precision: Precision, a: Architecture, batch: Batch, random: Random
) -> None:
    machines, stack = cluster(2), fast_profile()
    batch = batch.model_copy(update={"precision": precision})
    table = skeleton(2, batch.seq_len, batch.global_batch)
    legal = legal_rows(a, table).tolist()
    rows = np.array(random.sample(legal, min(8, len(legal))), dtype=np.int64)
    step_s, _ = price(
        a,
        plan_matrix(table),
        rows,
        hardware=machines.constants_for(precision),
        stack=stack.stack(),
        optimizer=batch.optimizer.dims,
        seq_len=batch.seq_len,
        global_batch=batch.global_batch,
    )
    expected = [Run(a, table.plan(int(r)), machines, batch).under(stack).step_s for r in rows]
    np.testing.assert_allclose(step_s, expected, rtol=1e-12, atol=0)


def test_mfu_is_of_the_bf16_peak_whatever_the_precision() -> None:
    run = run_of()
    found = [estimate(*in_precision(run, p), stack=profile()) for p in Precision]
    for step in found[1:]:
        assert step.mfu * step.step_time_s == pytest.approx(found[0].mfu * found[0].step_time_s)
        assert step.memory_buckets_bytes  # a price for memory is there as well


@low
def test_what_was_not_measured_is_said(precision: Precision) -> None:
    run = in_precision(run_of(), precision)
    step = estimate(*run, stack=profile())
    for part in ("compute_attention_linear", "compute_experts", "compute_dense_ffn"):
        assert step.sources[part] is Source.ASSUMED
    bf16 = estimate(*run_of(), stack=profile()).sources
    changed = {"compute_attention_linear", "compute_experts", "compute_dense_ffn"}
    kept = set(bf16) - changed - {"step_time_s", "mfu", "tokens_per_s"}
    assert {k: step.sources[k] for k in kept} == {k: bf16[k] for k in kept}
    unmeasured = {f.surface for f in range_flags(run.model) if isinstance(f, UnmeasuredFlag)}
    grouped = {f"grouped_{way} in {precision}" for way in ("forward", "backward")}
    assert unmeasured == grouped | (set() if precision == "fp8" else {f"gemm in {precision}"})
    (said,) = (text for text in unmeasured_parts(run.model) if "precision" in text)
    assert f"precision={precision}: no run that the stack was fitted on had it" in said
    assert not any("precision" in text for text in unmeasured_parts(run_of().model))


def test_the_ranges_are_those_of_the_fp8_surface() -> None:
    pack = load_pack("p6-b200")
    (flag,) = pack.check_at(Precision.FP8, "gemm", m=32.0, n=128.0, k=128.0)
    assert (flag.surface, flag.variable) == (GEMM_FP8, "m")
    assert pack.check_at(Precision.FP8, "gemm", m=64.0, n=128.0, k=128.0) == ()
    assert pack.check_at(Precision.FP8, "topk", tokens=4096.0) == pack.check("topk", tokens=4096.0)
    (flag,) = load_pack("h100").check_at(Precision.FP8, "gemm", m=4096.0)
    assert flag.message == (
        "gemm_fp8 on h100 is a datasheet roofline with assumed efficiencies: nothing was measured."
    )


# ---------------------------------------------------------------- against the tables


def b200_tables(shared_data: Path) -> Tables:
    return Tables(shared_data / "kernel_measurements", "b200")


def test_the_fp8_surface_against_its_table(shared_data: Path) -> None:
    """Predicted as the pack says that a call was timed, row by row."""
    pack, table = load_pack("p6-b200"), fp8_rows(b200_tables(shared_data))
    record = pack.surfaces[GEMM_FP8]
    surface = GemmSurface(**record.params, operand_bytes=1.0)._replace(floor_s=0.0)
    m, n, k = table["M"], table["N"], table["K"]
    rates = fp8_rates(pack.device)
    busy = evaluate(partial(gemm_time, rates, surface), m, n, k)
    cast = 3.0 * (m * k + k * n) / (0.92 * rates.memory_bw)
    wall = np.maximum(surface.launch_s, record.nuisance["lead_s"] + cast + busy)
    errors = 100.0 * np.abs(wall / (table["time_ms_med"] * 1e-3) - 1.0)
    assert record.errors is not None
    assert record.errors.n == len(table)
    assert record.errors.median_in == pytest.approx(np.median(errors), abs=0.01)
    assert record.errors.p90_in == pytest.approx(np.quantile(errors, 0.9), abs=0.01)
    assert np.median(errors) < 4.0
    assert np.quantile(errors, 0.9) < 20.0
    assert record.errors.median_out is not None
    assert record.errors.median_out < 5.0
    large = (2.0 * m * n * k > 1e12) & (np.minimum(np.minimum(m, n), k) >= 512.0)
    assert np.median(errors[large]) < 10.0


@pytest.mark.slow
def test_the_fp8_surface_is_what_the_table_gives(shared_data: Path) -> None:
    record = load_pack("p6-b200").surfaces[GEMM_FP8]
    again = Fp8GemmFit().fit(b200_tables(shared_data), load_pack("p6-b200").device)
    assert again.params == pytest.approx(record.params, rel=1e-6)
    assert again.nuisance == pytest.approx(record.nuisance, rel=1e-6)
    assert again.errors == record.errors


def test_only_one_device_has_fp8_rows(shared_data: Path) -> None:
    folder = shared_data / "kernel_measurements"
    assert has_fp8(Tables(folder, "b200"), load_datasheet(None, "p6-b200").device)
    assert not has_fp8(Tables(folder, "h100"), load_datasheet(None, "h100").device)
    assert not has_fp8(Tables(folder, "b200"), load_datasheet(None, "a100-80").device)


NAMES = {"FP8": "fp8", "FP8-CS": "fp8", "MXFP8": "mxfp8", "FP8-MX": "mxfp8", "NVFP4": "nvfp4"}


def test_published_runs_of_a_dense_model(shared_data: Path) -> None:
    """Llama-3-70B in the Megatron-Bridge summaries; no row of them took part in a fit."""
    found: dict[str, list[float]] = defaultdict(list)
    with (shared_data / "published_runs" / "published_runs.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    for r in rows:
        bridge = r["source"].startswith("Megatron-Bridge perf")
        if not bridge or r["model"] != "LLAMA3_70B" or r["precision"] not in NAMES:
            continue
        text = f"tp={r['tp']},pp={r['pp']},vpp={r['vpp'] or 1},mbs={r['mbs']},cp={r['cp'] or 1}"
        step = estimate(
            catalogue["Llama-3-70B"],
            Plan.parse(text, world=int(r["n_gpus"])),
            Cluster.parse(f"{r['gpu'].lower()}:{r['n_gpus']}gpus"),
            Batch(
                global_batch=int(r["global_batch"]),
                seq_len=int(r["seq_len"]),
                precision=Precision(NAMES[r["precision"]]),
            ),
            stack=profile(),
        )
        ratio = step.tokens_per_s_per_device / float(r["measured_value"])
        found[NAMES[r["precision"]]].append(ratio)
    for name, rows_read in (("fp8", 15), ("mxfp8", 6), ("nvfp4", 8)):
        assert len(found[name]) >= rows_read
        assert 0.85 < median(found[name]) < 1.05

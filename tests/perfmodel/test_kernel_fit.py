"""Laws of the fitted surfaces, and the fits: known parameters come back, shipped ones reproduce."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, isfinite
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.calibration import HardwarePack, load_pack, shipped_packs
from perfmodel.calibration.fit import fit_pack, load_datasheet, main
from perfmodel.calibration.regression import Bound, Regression
from perfmodel.calibration.tables import TableError, Tables, UnreadableTableError
from perfmodel.cluster import Cluster
from perfmodel.collectives import all_to_all_time, point_to_point_time, ring_over_nodes_time
from perfmodel.hardware import Hardware
from perfmodel.kernels import (
    attention_time,
    elementwise_time,
    gemm_time,
    grouped_gemm_launch,
    grouped_gemm_time,
    head_time,
    linear_backward_time,
    router_time,
    topk_time,
)

HW = load_pack("p6-b200").constants()
FABRIC = HW.fabric
RINGS = {name: getattr(FABRIC, name) for name in ("all_reduce", "reduce_scatter", "all_gather")}

Sizes = tuple[float, ...]
Priced = tuple[Callable[..., float], Sizes]

GROUPED = {
    "grouped_forward": (HW.grouped_forward, 0.0),
    "grouped_backward": (HW.grouped_backward, 1.0),
}


def kernels(hw: Hardware) -> dict[str, Priced]:
    """Return the time of the sizes, and the largest value of each size, by name of the kernel."""
    device = hw.device
    return {
        "gemm": (lambda *s: gemm_time(device, hw.gemm, *s), (1e6, 1e6, 1e6)),
        "linear_backward": (lambda *s: linear_backward_time(device, hw.gemm, *s), (1e6, 1e6, 1e6)),
        **{
            name: (
                lambda *s, c=constants, b=backward: grouped_gemm_time(device, c, *(*s, b)),
                (512.0, 1e5, 3e4, 3e4),
            )
            for name, constants, backward in (
                ("grouped_forward", hw.grouped_forward, 0.0),
                ("grouped_backward", hw.grouped_backward, 1.0),
            )
        },
        "grouped_launch": (lambda n: grouped_gemm_launch(hw.grouped_forward, n), (512.0,)),
        **{
            name: (
                lambda *s, c=constants, b=backward: attention_time(device, c, *(*s, b)),
                (64.0, 256.0, 1e6, 512.0),
            )
            for name, constants, backward in (
                ("attention_forward", hw.attention_forward, 0.0),
                ("attention_backward", hw.attention_backward, 1.0),
            )
        },
        "head": (lambda *s: head_time(device, hw.head, *s), (1e6, 3e4, 5e5)),
        "topk": (lambda *s: topk_time(hw.topk, *s), (1e6, 4096.0)),
        "elementwise": (lambda *s: elementwise_time(device, hw.elementwise, *s), (1e12, 64.0)),
        "router": (lambda *s: router_time(device, hw.elementwise, *s), (1e6, 3e4, 4096.0)),
    }


HARDWARE = {name: load_pack(name).constants() for name in shipped_packs()}
HARDWARE |= {  # some devices of each node in use
    "h100, 4 of 8": Cluster(hardware="h100", nodes=4, devices=16).constants,
    "gb200, 64 of 72": Cluster(hardware="gb200", nodes=4, devices=256).constants,
}
KERNELS = {pack: kernels(hw) for pack, hw in HARDWARE.items()}
packs = pytest.mark.parametrize("pack", HARDWARE)


@packs
@pytest.mark.parametrize("name", KERNELS["p6-b200"])
@given(data=st.data())
def test_kernel_never_gets_faster_as_a_size_grows(
    pack: str, name: str, data: st.DataObject
) -> None:
    time, limits = KERNELS[pack][name]
    sizes = [data.draw(st.floats(1.0, limit), label="size") for limit in limits]
    grown = data.draw(st.integers(0, len(limits) - 1), label="which")
    larger = list(sizes)
    larger[grown] = data.draw(st.floats(sizes[grown], limits[grown]), label="grown")
    small, large = time(*sizes), time(*larger)
    assert 0.0 < small <= large * (1.0 + 1e-12)
    assert isfinite(large)


@packs
@pytest.mark.parametrize("name", KERNELS["p6-b200"])
def test_kernel_does_get_slower(pack: str, name: str) -> None:
    time, limits = KERNELS[pack][name]
    middle = [limit / 8.0 for limit in limits]
    for i, limit in enumerate(limits):
        larger = [limit if j == i else size for j, size in enumerate(middle)]
        # attention with wider heads may take as long: it is more efficient
        assert time(*larger) > time(*middle)


# Most draws are where the regimes meet: a few nodes, and any order of magnitude of volume.
volumes = st.floats(0.0, 11.0).map(lambda exponent: 10.0**exponent)
sizes = st.one_of(st.integers(1, 24), st.integers(1, 24), st.integers(1, 4096)).map(float)
strides = st.sampled_from([1.0, 1.0, 2.0, 4.0, 8.0, 64.0])


@packs
@given(size=sizes, more=sizes, stride=strides, volume=volumes, further=volumes)
def test_all_to_all_never_gets_faster(
    pack: str, size: float, more: float, stride: float, volume: float, further: float
) -> None:
    fabric = HARDWARE[pack].fabric
    time = all_to_all_time(fabric, size, stride, volume)
    slack = 1.0 + 1e-12
    assert time <= all_to_all_time(fabric, size, stride, volume + further) * slack
    assert time <= all_to_all_time(fabric, size + more, stride, volume) * slack


@packs
@pytest.mark.parametrize("name", RINGS)
@given(size=sizes, more=sizes, stride=strides, volume=volumes, further=volumes)
def test_ring_never_gets_faster(
    pack: str, name: str, size: float, more: float, stride: float, volume: float, further: float
) -> None:
    fabric = HARDWARE[pack].fabric
    ring, devices = getattr(fabric, name), fabric.devices_per_node
    time = ring_over_nodes_time(ring, devices, size, stride, volume)
    slack = 1.0 + 1e-12
    assert time <= ring_over_nodes_time(ring, devices, size, stride, volume + further) * slack
    assert time <= ring_over_nodes_time(ring, devices, size + more, stride, volume) * slack


def test_group_of_one_and_nothing_to_send_cost_nothing() -> None:
    for ring in RINGS.values():
        assert ring_over_nodes_time(ring, 8.0, 1.0, 1.0, 1e9) == 0.0
        assert ring_over_nodes_time(ring, 8.0, 8.0, 1.0, 0.0) == 0.0
    assert all_to_all_time(FABRIC, 1.0, 1.0, 1e9) == 0.0
    assert point_to_point_time(FABRIC, 8.0, 0.0, 16.0) == 0.0


def test_leaving_the_node_costs_more() -> None:
    assert all_to_all_time(FABRIC, 16.0, 1.0, 1e8) > 3.0 * all_to_all_time(FABRIC, 8.0, 1.0, 1e8)
    for ring in RINGS.values():
        inside, across = (
            ring_over_nodes_time(ring, 8.0, 4.0, stride, 1e9) for stride in (1.0, 8.0)
        )
        assert across > 5.0 * inside


def test_shapes_that_nobody_measured_have_prices() -> None:
    # 12 local experts of width 3200, up (with a gate) and down; measured were 8 and 16 of them.
    # The expected prices are those of other forms fitted to the same tables, to 5%.
    for (constants, backward), expected in zip(GROUPED.values(), (0.95e-3, 2.59e-3), strict=True):
        pair = sum(
            grouped_gemm_time(HW.device, constants, 12.0, 1024.0, n, k, backward)
            for n, k in ((6400.0, 5120.0), (5120.0, 3200.0))
        )
        assert pair == pytest.approx(expected, rel=0.05)
    assert isfinite(gemm_time(HW.device, HW.gemm, 1.0, 1.0, 1.0))
    assert all_to_all_time(FABRIC, 12.0, 1.0, 3e7) > 0.0


# ---------------------------------------------------------------- fits without the tables


def write(path: Path, header: str, rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(header.split(","))
        writer.writerows(rows)


def norm4(a: float, b: float) -> float:
    return float((a**4 + b**4) ** 0.25)


FP8 = HW.gemm._replace(
    launch_s=1.5e-4, flop_eff=0.55, bw_eff=0.75, k_half=300.0, mn_half=0.0, droop=0.06, norm=2.5
)
LEAD_S = 1.1e-4


def fp8_shapes() -> list[Sizes]:
    powers = [2.0**e for e in (6, 8, 11, 13, 16)]
    return list(itertools.product(powers, powers, powers))


def fp8_call(hw: Hardware, m: float, n: float, k: float) -> float:
    """Time of one call that quantises both operands and multiplies them; fp8 at twice bf16 [s]."""
    rates = hw.device._replace(peak_flops=2.0 * hw.device.peak_flops)
    cast = 3.0 * (m * k + k * n) / (0.92 * rates.memory_bw)
    product = gemm_time(rates, FP8._replace(floor_s=0.0, operand_bytes=1.0), m, n, k)
    return max(FP8.launch_s, LEAD_S + cast + product)


WAIT_S = {"attention_forward": 9e-5, "attention_backward": 1.1e-4}


def synthetic_tables(folder: Path, hw: Hardware) -> None:
    """Write the tables that a machine with these constants would give, to the last digit."""
    d, ms = hw.device, 1e3
    powers = [2.0**e for e in (6, 8, 11, 13, 16)]
    bare = hw.gemm._replace(floor_s=0.0)
    write(
        folder / "dense_gemm.csv",
        "M,N,K,GPU_MODEL,dtype,time_ms_med,tflops",
        [
            (m, n, k, gpu, dtype, ms * (hw.gemm.launch_s + gemm_time(d, bare, m, n, k)) * off, 0)
            for m, n, k in itertools.product(powers, powers, powers)
            # other types and devices are wrong on purpose: they must not count
            for gpu, dtype, off in (("TOY", "bf16", 1), ("TOY", "fp16", 0.5), ("H100", "bf16", 3))
        ]
        + [(*s, "TOY", "fp8", ms * fp8_call(hw, *s), 0) for s in fp8_shapes()],
    )
    chains = [(2.0**e, 2048.0, 2048.0) for e in range(0, 15, 2)]
    tiny = hw.gemm._replace(flop_eff=0.9)
    busy = {
        shape: hw.gemm.floor_s if shape[0] == 1.0 else gemm_time(d, tiny, *shape)
        for shape in chains
    }
    write(
        folder / "dispatch_gap.csv",
        "device,mode,M,N,K,dtype,gpu_active_us_per_kernel",
        [
            ("toy", mode, *shape, "bf16", 1e6 * (busy[shape] + extra))
            for shape in chains
            for mode, extra in (
                ("gemm", 0.0),
                ("gemm_relu", elementwise_time(d, hw.elementwise, 4.0 * shape[0] * shape[1], 1.0)),
            )
        ],
    )

    def grouped(n: float, rows: float, out: float, inner: float) -> list[float]:
        passes = ((hw.grouped_forward, 0.0), (hw.grouped_backward, 1.0))
        return [
            ms * max(grouped_gemm_launch(s, n), grouped_gemm_time(d, s, n, rows, out, inner, b))
            for s, b in passes
        ]

    write(
        folder / "grouped_gemm.csv",
        "device,distribution,num_gemms,tokens_per_expert,hidden,ffn,in_features,out_features,dtype,"
        "fwd_ms,bwd_ms",
        [
            ("toy", "balanced", n, rows, k, out / 2, k, out, "bf16", *grouped(n, rows, out, k))
            for n in (2.0, 16.0, 64.0)
            for rows in (64.0, 1024.0, 8192.0)
            for out, k in ((2560.0, 1024.0), (7680.0, 6144.0))
        ],
    )

    def attention(name: str, backward: float, *size: float) -> float:
        s = getattr(hw, name)
        return ms * norm4(s.launch_s, WAIT_S[name] + attention_time(d, s, *(*size, backward)))

    write(
        folder / "sdpa.csv",
        "device,seq_len,micro_bs,n_q_heads,n_kv_heads,head_dim,backend,fwd_time_ms_med,"
        "bwd_time_ms_med",
        [
            (
                *("toy", length, batch, heads, 8, width, "te"),
                attention("attention_forward", 0.0, batch, heads, length, width),
                attention("attention_backward", 1.0, batch, heads, length, width),
            )
            for length in (512.0, 2048.0, 8192.0, 16384.0)
            for batch in (1.0, 4.0)
            for heads in (8.0, 64.0)
            for width in (64.0, 128.0)
        ],
    )
    off = {
        "forward_eff": inf,
        "backward_eff": inf,
        "ce_forward_passes": 0.0,
        "ce_backward_passes": 0.0,
    }

    def head(keep: str, *size: float) -> float:
        only = hw.head._replace(**{**off, keep: getattr(hw.head, keep)})
        return ms * head_time(d, only, *size)

    write(
        folder / "vocab_gemm_ce.csv",
        "device,op,m_tokens,hidden,vocab_padded,dtype,fwd_ms_p50,bwd_ms_p50",
        [
            ("toy", op, *size, dtype, head(forward, *size), head(backward, *size))
            for size in itertools.product((4096.0, 8192.0), (2048.0, 4096.0), (128000.0,))
            for op, dtype, forward, backward in (
                ("lm_head_gemm", "bf16", "forward_eff", "backward_eff"),
                ("cross_entropy", "fp32", "ce_forward_passes", "ce_backward_passes"),
            )
        ],
    )
    write(
        folder / "topk.csv",
        "device,num_tokens,num_experts,k,dtype,event_time_ms",
        [
            ("toy", tokens, experts, k, "fp32", ms * norm4(hw.topk.launch_s, one) * factor)
            for tokens in (256.0, 8192.0, 131072.0)
            for experts in (8.0, 64.0, 512.0)
            for one in (topk_time(hw.topk, tokens, experts),)
            for k, factor in ((1, 0.5), (2, 1.0))
        ],
    )
    buffers = [1e5, 1e6, 1e7, 6.4e7, 1e8, 5.12e8, 2e9]
    write(
        folder / "all_to_all.csv",
        "device,group_size,buffer_bytes,time_ms_p50",
        [
            ("toy", size, volume, ms * all_to_all_time(hw.fabric, size, 1.0, volume))
            for size in (2.0, 3.0, 4.0, 8.0, 16.0)
            for volume in buffers
        ],
    )
    devices = hw.fabric.devices_per_node
    write(
        folder / "dp_collectives.csv",
        "device,layout,group_size,collective,payload_bytes,time_ms_p50",
        [
            (
                *("toy", layout, size, name, volume),
                ms * ring_over_nodes_time(ring, devices, size, stride, volume),
            )
            for name in RINGS
            for ring in (getattr(hw.fabric, name),)
            for layout, stride, group in (
                ("contiguous", 1.0, (4.0, 8.0, 16.0)),
                ("stride4", 4.0, (2.0, 4.0)),
            )
            for size in group
            for volume in buffers
        ],
    )


def toy_hardware() -> Hardware:
    """Return a machine unlike the shipped one: half as fast, four devices a node."""
    fabric = FABRIC._replace(
        devices_per_node=4.0,
        all_to_all=FABRIC.all_to_all._replace(nic_bw=3e10, link_bw=3e11, inter_exponent=0.7),
        **{
            name: ring._replace(
                intra_bw=3e11, intra_ramp_bytes=2e6, inter_bw=1.1e11, inter_ramp_bytes=4e6
            )._replace(strided_bw=3e10, strided_ramp_bytes=3e6, two_node_gain=1.0)
            for name, ring in RINGS.items()
        },
    )
    fabric = fabric._replace(all_reduce=fabric.all_reduce._replace(two_node_gain=1.7))
    return HW._replace(
        gemm=HW.gemm._replace(launch_s=1e-5, flop_eff=0.6, bw_eff=0.7, k_half=90.0, droop=0.08),
        grouped_forward=HW.grouped_forward._replace(flop_eff=0.5, bw_eff=0.9, launch_s=5e-5),
        grouped_backward=HW.grouped_backward._replace(flop_eff=0.45, bw_eff=0.8),
        attention_forward=HW.attention_forward._replace(eff_d128=0.55, eff_d64=0.4),
        attention_backward=HW.attention_backward._replace(eff_d128=0.42, seq_half=300.0),
        head=HW.head._replace(forward_eff=0.5, ce_forward_passes=5.0),
        topk=HW.topk._replace(elements_per_s=5e10),
        elementwise=HW.elementwise._replace(bw_eff=0.8),
        fabric=fabric,
    )


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Hardware]:
    folder = tmp_path_factory.mktemp("tables")
    hw = toy_hardware()
    synthetic_tables(folder, hw)
    sheet = load_datasheet(None, "p6-b200").model_dump(mode="json", exclude_none=True)
    lines = []
    for key, value in sheet["device"].items():
        if isinstance(value, dict):
            lines += [f"[device.{key}]"] + [f"{k} = {v!r}" for k, v in value.items()]
        else:
            lines.insert(0, f"{key} = {('TOY' if key == 'name' else value)!r}")
    lines.insert(0, "[device]")
    lines += ["[node]", "name = 'toy-node'", "devices_per_node = 4"]
    (folder / "toy.toml").write_text("\n".join(lines), "utf-8")
    return folder, hw


@pytest.fixture(scope="module")
def refitted(toy: tuple[Path, Hardware]) -> HardwarePack:
    folder, _ = toy
    arguments = ["--tables", str(folder), "--device", "toy", "--name", "toy"]
    arguments += ["--datasheet", str(folder / "toy.toml"), "--out", str(folder / "pack.toml")]
    assert main([*arguments, "--report", str(folder / "report.md")]) == 0
    return load_pack(folder / "pack.toml")


def parameters(hw: Hardware) -> dict[str, dict[str, float]]:
    named = {**hw._asdict(), **hw.fabric._asdict()}
    return {name: c._asdict() for name, c in named.items() if name in load_pack("p6-b200").surfaces}


def test_fit_recovers_the_parameters_that_made_the_tables(
    toy: tuple[Path, Hardware], refitted: HardwarePack
) -> None:
    truth = parameters(toy[1])
    assert len(truth) == 12
    for surface, params in parameters(refitted.constants()).items():
        for name, value in params.items():
            assert value == pytest.approx(truth[surface][name], rel=2e-3), (surface, name)
    for name, value in refitted.surfaces["gemm_fp8"].params.items():
        truth_fp8 = FP8._replace(floor_s=toy[1].gemm.floor_s)
        assert value == pytest.approx(getattr(truth_fp8, name), rel=2e-3), name
    assert refitted.surfaces["gemm_fp8"].nuisance["lead_s"] == pytest.approx(LEAD_S, rel=2e-3)
    for name, wait_s in WAIT_S.items():
        assert refitted.surfaces[name].nuisance["wait_s"] == pytest.approx(wait_s, rel=2e-3)


def test_errors_of_a_perfect_fit_are_nothing(refitted: HardwarePack) -> None:
    for name, surface in refitted.surfaces.items():
        assert surface.errors is not None
        assert surface.errors.p90_in <= 0.05, name
        if surface.errors.p90_out is not None:
            assert surface.errors.p90_out <= 0.2, name


def test_report_has_every_surface(toy: tuple[Path, Hardware], refitted: HardwarePack) -> None:
    report = (toy[0] / "report.md").read_text("utf-8")
    for name in refitted.surfaces:
        assert report.count(f"| {name} |") == 2


def test_missing_table_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tables", str(tmp_path), "--device", "b200", "--name", "x"]
    assert main([*arguments, "--out", str(tmp_path / "x.toml")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("dense_gemm.csv cannot be read: No such file or directory.")
    assert not (tmp_path / "x.toml").exists()


def test_tables_refuse_what_they_lack(tmp_path: Path) -> None:
    write(
        tmp_path / "t.csv", "device,a,b", [("toy", 1.5, "x"), ("toy", "", "y"), ("other", 7, "x")]
    )
    table = Tables(tmp_path, "TOY").load("t.csv")
    assert len(table) == 2
    assert np.isnan(table["a"][1])
    assert len(table.where(b="X")) == 1
    with pytest.raises(TableError, match=r"^Table t.csv has no column c\.$"):
        table["c"]
    with pytest.raises(TableError, match=r"^Column b of t.csv must hold numbers\.$"):
        table["b"]
    with pytest.raises(TableError, match=r"^Table t.csv has no row with b=z\.$"):
        table.where(b="z")
    with pytest.raises(TableError, match=r"no row with device=nine"):
        Tables(tmp_path, "nine").load("t.csv")


def test_a_table_that_cannot_be_read_is_not_taken_for_none(tmp_path: Path) -> None:
    tables = Tables(tmp_path, "toy")
    assert not tables.has("t.csv")
    for content, why in [
        (b"device,a\ntoy,\xff\n", "it is not UTF-8"),
        (b"device,a\ntoy,1\n\ntoy\n", "line 4 has 1 cells, but must have the 2 of the header"),
    ]:
        (tmp_path / "t.csv").write_bytes(content)
        for ask in (tables.has, tables.load):
            with pytest.raises(UnreadableTableError, match=rf"t.csv cannot be read: {why}\.$"):
                ask("t.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(UnreadableTableError, match=r"folder.csv cannot be read: Is a directory\.$"):
        tables.has("folder.csv")


def line(x: np.ndarray, factors: np.ndarray, held: np.ndarray | None = None) -> Regression:
    bounds = {"a": Bound(1e-3, 1e-6, 1.0), "b": Bound(1e-2, 1e-6, 10.0)}
    truth = 2e-4 + 0.5 * x
    none = np.zeros(len(x), dtype=np.bool_)
    held_out = none if held is None else held
    return Regression(bounds, lambda p: p["a"] + p["b"] * x, truth * factors, held_out, "some rows")


def test_one_wild_row_does_not_move_the_fit() -> None:
    x = np.geomspace(1e-5, 1e-1, 40)
    factors = np.ones(40)
    factors[17] = 4.0
    fit = line(x, factors).solve()
    assert fit.params["a"] == pytest.approx(2e-4, rel=0.02)
    assert fit.params["b"] == pytest.approx(0.5, rel=0.02)
    assert fit.errors.median_in < 1.0
    assert fit.errors.median_out is None


def test_held_out_rows_do_not_touch_the_fit_that_they_test() -> None:
    x = np.geomspace(1e-5, 1e-1, 40)
    held = np.arange(40) % 4 == 0
    fit = line(x, np.where(held, 2.0, 1.0), held).solve()
    assert fit.errors.median_out == pytest.approx(50.0, abs=0.01)


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(TableError, match=r"^1 rows cannot determine 2 parameters \(a, b\)\.$"):
        line(np.array([1.0]), np.ones(1)).solve()


# ---------------------------------------------------------------- fits to the tables

# Largest median error on held-out rows [%]; the documents state the values themselves.
MEDIAN_OUT = {
    "gemm": 6.0,
    "gemm_fp8": 4.0,
    "grouped_forward": 1.5,
    "grouped_backward": 2.5,
    "attention_forward": 2.5,
    "attention_backward": 2.5,
    "head": 1.0,
    "topk": 2.5,
    "elementwise": 15.0,
    "all_to_all": 4.0,
    "all_reduce": 6.0,
    "reduce_scatter": 3.0,
    "all_gather": 3.0,
}


@pytest.mark.slow
def test_shipped_pack_is_what_the_tables_give(shared_data: Path) -> None:
    shipped = load_pack("p6-b200")
    tables = Tables(shared_data / "kernel_measurements", "b200")
    again = fit_pack(tables, load_datasheet(None, "p6-b200"), shipped.name, shipped.origin)
    assert again.device == shipped.device
    assert again.node == shipped.node
    for name, surface in again.surfaces.items():
        record = shipped.surfaces[name]
        assert surface.params == pytest.approx(record.params, rel=1e-6), name
        assert surface.nuisance == pytest.approx(record.nuisance, rel=1e-6), name
        assert surface.tables == record.tables
        assert surface.ranges == record.ranges
        assert flat(surface.errors) == pytest.approx(flat(record.errors), abs=0.011)
        assert surface.errors is not None
        assert surface.errors.median_out is not None
        assert surface.errors.median_out <= MEDIAN_OUT[name], name


def flat(errors: object) -> Mapping[str, float]:
    return {key: value for key, value in vars(errors).items() if isinstance(value, float)}

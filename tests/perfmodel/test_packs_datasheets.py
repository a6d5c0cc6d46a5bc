"""Packs that were measured in part or not at all: what they rest on, and that they say so."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.calibration import HardwarePack, PackError, load_pack, shipped_packs
from perfmodel.calibration.datasheet_packs import Maker, made_packs, main, pack_text
from perfmodel.calibration.fit import shipped_datasheets
from perfmodel.calibration.packs import ALIASES, UnmeasuredFlag
from perfmodel.calibration.report import overview_markdown, report_markdown
from perfmodel.calibration.surfaces import KINDS, SURFACES
from perfmodel.calibration.transfer import RINGS, Machine, Transfer
from perfmodel.cluster import Batch, Cluster
from perfmodel.ranges import range_flags
from perfmodel.sources import Source
from perfmodel.step import estimate

from .strategies import Run, moe, profile
from .test_ranges import run_of

HARDWARE = (
    *("a100-40", "a100-80", "h100", "h200", "h800"),
    *("b200", "p6-b200", "gb200", "b300", "gb300"),
    *("mi300x", "mi355x"),
)
FITTED = {
    "a100-40": {"attention_forward", "attention_backward", "topk"},
    "a100-80": {"attention_forward", "attention_backward", "topk"},
    "h100": {"gemm"},
    "h200": {"attention_forward", "attention_backward", "topk"},
    "b200": set(KINDS) - {"all_to_all", *RINGS},
    "p6-b200": set(KINDS),
}
DOCUMENT = Path(__file__).parents[2] / "docs" / "theory" / "hardware.md"

packs = pytest.mark.parametrize("name", HARDWARE)


def test_the_packs_that_are_shipped() -> None:
    assert set(shipped_packs()) == set(HARDWARE)
    assert set(shipped_datasheets()) == set(HARDWARE)
    assert set(made_packs()) == set(HARDWARE) - {"p6-b200"}
    assert len({load_pack(name).digest for name in HARDWARE}) == len(HARDWARE)


@packs
def test_fitted_surfaces_have_errors_and_the_others_have_none(name: str) -> None:
    pack = load_pack(name)
    fitted = FITTED.get(name, set())
    for surface, record in pack.surfaces.items():
        assert record.measured is (surface in fitted), surface
        assert record.source is (Source.FITTED if surface in fitted else Source.ASSUMED)
        assert (record.errors is None) is (surface not in fitted)
        assert bool(record.tables) is bool(record.ranges) is (surface in fitted)
        if surface not in fitted:
            assert record.provenance.startswith("Not measured: taken over from ")


@packs
@given(value=st.floats(allow_infinity=True, allow_nan=True))
def test_a_surface_that_nobody_measured_is_flagged_once_whatever_is_asked(
    name: str, value: float
) -> None:
    pack = load_pack(name)
    for surface in set(SURFACES) - FITTED.get(name, set()):
        variables = dict.fromkeys(SURFACES[surface].variables, value)
        (flag,) = pack.check(surface, **variables)
        assert flag.policy == "flag"
        assert flag.message == (
            f"{surface} on {name} is a datasheet roofline with assumed efficiencies: "
            "nothing was measured."
        )
        assert pack.refused_above(surface, SURFACES[surface].variables[0]) == float("inf")
        with pytest.raises(PackError, match=f"^Surface {surface} has no variable 'colour'"):
            pack.check(surface, colour=value)


def test_only_what_was_measured_can_be_refused() -> None:
    assert load_pack("p6-b200").refused_above("all_to_all", "size") == 32.0
    assert load_pack("p6-b200").refused_above("gemm", "m") == float("inf")


@packs
def test_names_in_any_case_and_aliases(name: str) -> None:
    assert load_pack(name.upper()) == load_pack(name)
    for alias, meant in ALIASES.items():
        assert load_pack(alias) == load_pack(meant)
        assert alias not in shipped_packs()


@packs
def test_every_datum_says_where_it_is_from(name: str) -> None:
    pack = load_pack(name)
    device, node = pack.device, pack.node
    assert node.link_bw is not None
    assert node.nic_bw is not None
    assert device.matmul_flops is not None
    assert device.peak_flops.source is Source.DATASHEET
    assert 0.4 < device.matmul_flops.value / device.peak_flops.value < 0.9
    assert node.nic_bw.value < node.link_bw.value < device.memory_bw.value
    assert node.devices_per_node == (72 if name.startswith("gb") else 8)
    for lower in (device.peak_flops_fp8, device.peak_flops_fp4):
        if lower is not None:
            assert lower.value >= 1.99 * device.peak_flops.value
    assert (device.peak_flops_fp8 is None) is name.startswith("a100")


def test_every_number_of_an_unmeasured_surface_is_a_transfer() -> None:
    """Worked by hand for one machine: fractions of rates, and times as they are."""
    pack, reference = load_pack("gb200"), load_pack("p6-b200")
    here, there = (p.surfaces["gemm"].params for p in (pack, reference))
    ratio = (1.822e15 / 2.5e15) / (1.745e15 / 2.25e15)
    assert here["flop_eff"] == pytest.approx(there["flop_eff"] * ratio)
    assert {k: v for k, v in here.items() if k != "flop_eff"} == {
        k: v for k, v in there.items() if k != "flop_eff"
    }
    here, there = (p.surfaces["all_gather"].params for p in (pack, reference))
    assert here["intra_bw"] == there["intra_bw"]  # the links are the same
    assert here["inter_bw"] == here["intra_bw"]  # 72 NICs carry more than the links of one device
    assert here["inter_latency_s"] == pytest.approx(9.0 * there["inter_latency_s"])  # per rank
    slow = load_pack("h800").surfaces
    fast = load_pack("h100").surfaces
    assert slow["gemm"].params == fast["gemm"].params
    for name in ("intra_bw", "intra_ramp_bytes"):
        ratio = slow["all_gather"].params[name] / fast["all_gather"].params[name]
        assert ratio == pytest.approx(200.0 / 450.0)


@pytest.mark.parametrize("name", [n for n in HARDWARE if n not in ("p6-b200", "b200")])
def test_no_ring_over_nodes_is_faster_than_inside_one(name: str) -> None:
    for ring in RINGS:
        params = load_pack(name).surfaces[ring].params
        assert params["inter_bw"] <= params["intra_bw"]


def machine(pack: HardwarePack) -> Machine:
    return Machine(pack.name, pack.device, pack.node)


def test_nothing_is_taken_over_from_what_was_not_measured() -> None:
    h800, h100 = load_pack("h800"), load_pack("h100")
    with pytest.raises(PackError, match=r"^gemm of h800 was not measured itself\.$"):
        Transfer(machine(h800), machine(h100)).surface("gemm", h800.surfaces["gemm"])


def test_a_network_that_no_datasheet_states_is_not_made_up() -> None:
    reference = load_pack("p6-b200")
    node = reference.node.model_copy(update={"name": "bare", "nic_bw": None})
    bare = machine(reference)._replace(node=node)
    with pytest.raises(PackError, match=r"^The datasheet of bare lacks node\.nic_bw\.$"):
        Transfer(machine(reference), bare).surface("all_to_all", reference.surfaces["all_to_all"])


def test_a_machine_taken_over_to_itself_is_itself() -> None:
    pack = load_pack("p6-b200")
    same = Transfer(machine(pack), machine(pack))
    for name, record in pack.surfaces.items():
        assert same.surface(name, record).params == record.params


@pytest.mark.parametrize("name", made_packs())
def test_the_program_writes_the_shipped_packs(name: str, tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), name]) == 0
    written = (tmp_path / f"{name}.toml").read_text("utf-8")
    assert load_pack(tmp_path / f"{name}.toml") == load_pack(name)
    assert written == pack_text(load_pack(name))
    assert written.splitlines()[1].endswith(f"--out DIR {name}")


def test_an_unknown_datasheet_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", ".", "h900"]) == 2
    assert capsys.readouterr().err == (
        "There is no datasheet h900; give one with --datasheet FILE.toml.\n"
    )


def test_a_report_names_what_was_not_measured() -> None:
    report = report_markdown(load_pack("h100"))
    assert report.count("not measured") == len(KINDS) - 1
    assert "| gemm | all | " in report


# ---------------------------------------------------------------- estimates


@packs
def test_an_estimate_names_what_was_not_measured_and_the_stack(name: str) -> None:
    devices = load_pack(name).node.devices_per_node * 8
    run = run_of(plan={"dp": devices // 4})
    run = Run(run.architecture, run.plan, Cluster(hardware=name, nodes=8), run.batch)
    run = run._replace(batch=Batch(global_batch=devices, seq_len=8192))
    flags = range_flags(run.model)
    unmeasured = [flag.surface for flag in flags if isinstance(flag, UnmeasuredFlag)]
    # the forward pass is what is asked; a step has no all-reduce
    asked = set(SURFACES) - {"all_reduce"} - FITTED.get(name, set())
    assert set(unmeasured) <= asked
    assert asked - set(unmeasured) <= {"gemm"} if name != "p6-b200" else not unmeasured
    assert len(unmeasured) == len(set(unmeasured))
    step = estimate(*run, stack=profile())
    assert step.hardware == name
    mismatch = [flag for flag in step.flags if "were fitted with hardware pack p6-b200" in flag]
    assert len(mismatch) == (name != "p6-b200")
    assert step.sources["compute_experts"] is load_pack(name).source("grouped_forward")


def test_a_faster_device_is_faster() -> None:
    def seconds(name: str) -> float:
        machines = Cluster.parse(f"{name}:64gpus")
        plan = run_of(plan={"ep": 8, "pp": 1, "dp": 64}).plan
        run = Run(
            moe(n_layers=8, d_model=4096, n_experts=32, d_expert=4096),
            plan,
            machines,
            Batch(global_batch=256, seq_len=4096),
        )
        model = run.model
        return sum(model.cost.moe_forward) + sum(model.cost.moe_backward)

    assert seconds("b200") < seconds("h200") <= seconds("h100") < seconds("a100-80")
    assert seconds("a100-80") < seconds("a100-40")


# ---------------------------------------------------------------- against the tables


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a100-40", "a100-80", "h100", "h200"])
def test_fitted_surfaces_are_what_the_tables_give(name: str, shared_data: Path) -> None:
    again = Maker(shared_data / "kernel_measurements").measured(name)
    assert set(again) == FITTED[name]
    for surface, new in again.items():
        record = load_pack(name).surfaces[surface]
        assert new.params == pytest.approx(record.params, rel=1e-6), surface
        assert new.tables == record.tables
        assert new.ranges == record.ranges
        assert new.errors is not None
        assert new.errors.median_out is not None
        assert new.errors.median_out <= (7.0 if surface == "gemm" else 5.0)


def test_the_document_has_the_overview_that_the_program_writes(tmp_path: Path) -> None:
    report = tmp_path / "overview.md"
    assert main(["--out", str(tmp_path), "--report", str(report), "h800"]) == 0
    overview = report.read_text("utf-8")
    assert overview == overview_markdown(load_pack(name) for name in shipped_datasheets())
    assert overview in DOCUMENT.read_text("utf-8")

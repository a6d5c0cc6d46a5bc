"""Published runs: what is read of them, what is left out, and whether their figures agree."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from perfmodel.architecture import Architecture
from perfmodel.errors import PerfmodelError
from perfmodel.models import catalogue
from perfmodel.plan import Recompute
from perfmodel.step import check
from perfmodel.validation.published import (
    COLUMNS,
    ExcludedRun,
    PublishedRun,
    excluded_runs,
    published_runs,
    read_runs,
)
from perfmodel.validation.published_notes import canonical, facts_of, number
from perfmodel.validation.published_times import CountedFlops, flops_per_token

# Usable and excluded rows of each source group.
COUNTS = {
    "Megatron-Bridge perf summary": (156, 28),
    "Megatron-Bridge skills": (14, 4),
    "Megatron-LM dev": (11, 5),
    "Megatron-MoE-ModelZoo": (10, 4),
    "NeMo Automodel": (4, 7),
    "NeMo docs v2.0.0": (12, 2),
    "NeMo docs v2.1.0": (8, 3),
    "NeMo docs long-sequence": (0, 23),
    "NVIDIA NeMo docs": (0, 8),
    "TorchTitan": (26, 0),
    "llm-foundry": (168, 0),
    "InternEvo": (44, 9),
    "BigScience": (101, 1),
    "vTrain": (88, 0),
    "SimuMax": (37, 0),
    "Korthikanti et al. 2022 (Table 5)": (8, 0),
    "Korthikanti et al. 2022 (text)": (1, 0),
    "Korthikanti et al. 2022 (Fig 1 memory)": (0, 9),
    "Narayanan": (19, 0),
    "MegaScale (NSDI": (8, 7),
    "MegaScale-MoE": (0, 7),
    "MoE Parallel Folding": (7, 16),
    "Megatron-Core MoE report": (0, 3),
    "Llama 3 Herd": (1, 0),
    "AMD Primus": (0, 15),
    "RAPID-LLM": (0, 12),
    "Megatron-LM README": (0, 2),
    "TPU recipes": (0, 28),
    "mbridge": (0, 3),
}


def group_of(source: str) -> str:
    [group] = [name for name in COUNTS if source.startswith(name)]
    return group


def of(prefix: str) -> list[PublishedRun]:
    return [run for run in published_runs() if run.source.startswith(prefix)]


def reasons(prefix: str) -> list[ExcludedRun]:
    return [run for run in excluded_runs() if run.source.startswith(prefix)]


def test_every_row_is_usable_or_excluded() -> None:
    rows = [run.row for run in published_runs()] + [run.row for run in excluded_runs()]
    assert sorted(rows) == list(range(1, 920))


def test_counts_by_source() -> None:
    usable = Counter(group_of(run.source) for run in published_runs())
    excluded = Counter(group_of(run.source) for run in excluded_runs())
    assert {name: (usable[name], excluded[name]) for name in COUNTS} == COUNTS


def test_every_exclusion_has_one_reason() -> None:
    for run in excluded_runs():
        assert run.reason.endswith(".")
        assert "\n" not in run.reason
        assert len(run.reason) < 300


def test_every_plan_is_legal() -> None:
    for run in published_runs():
        assert run.plan.dp * run.tp * run.pp * run.cp == run.devices == run.cluster.n_devices
        assert not check(run.architecture, run.plan, run.cluster, run.batch)


def test_times_are_positive_and_mfu_is_below_one() -> None:
    timed = [run for run in published_runs() if not run.oom]
    assert len(timed) == len(published_runs()) - 4
    for run in timed:
        assert run.step_time_s is not None
        assert run.step_time_s > 0.0
        assert run.mfu is not None
        assert 0.01 < run.mfu < 0.8, (run.row, run.model)
    for run in published_runs():
        assert (run.step_time_s is None) == run.oom == (run.metric == "status")


@pytest.mark.parametrize(
    "name", ["DeepSeek-V3", "Kimi-K2", "Qwen3-30B-A3B", "Qwen3-235B-A22B", "Llama-3-70B"]
)
def test_printed_tflops_are_megatrons_count(name: str) -> None:
    # The tables round tokens/s, and print three or four digits of TFLOP/s.
    tolerance = 0.03 if name.startswith("Llama") else 0.009
    rows = [run for run in of("Megatron-Bridge perf") if run.architecture.name == name]
    assert len(rows) >= 2
    for run in rows:
        printed = number(run.facts, "tflops_per_gpu")
        assert printed is not None
        assert run.tflops_per_gpu == pytest.approx(printed, rel=tolerance), run.row


def test_gpt_oss_tables_before_26_08_counted_ungated_experts() -> None:
    # Two matrices in place of three, and all of attention: Megatron-Bridge PR #3029 mended both.
    rows = [run for run in of("Megatron-Bridge perf") if run.architecture.name == "gpt-oss-120b"]
    ungated = catalogue["gpt-oss-120b"].model_dump() | {"gated": False, "window": None}
    as_counted = Architecture.model_validate(ungated).flops_per_token("megatron", 4096) / 1e12
    wrong = [run for run in rows if run.container != "26.08"]
    assert len(wrong) == 20
    for run in rows:
        printed = number(run.facts, "tflops_per_gpu")
        rate = run.tokens_per_s_per_gpu
        assert printed is not None
        assert rate is not None
        if run.container == "26.08":
            assert run.tflops_per_gpu == pytest.approx(printed, rel=0.003)
            assert not run.disagreements
        else:
            assert rate * as_counted == pytest.approx(printed, rel=0.012)
            assert len(run.disagreements) == 1


def test_rows_whose_figures_contradict_each_other_are_listed() -> None:
    found = Counter(group_of(run.source) for run in published_runs() if run.disagreements)
    assert found == {
        "Megatron-Bridge perf summary": 20,  # gpt-oss, above
        "NeMo docs v2.0.0": 2,  # fine-tuning on packed sequences
        "NeMo docs v2.1.0": 1,
        "InternEvo": 1,
        "BigScience": 1,  # the row without ZeRO, on a branch with the older calculator
    }


def test_conventions_of_sources_give_their_printed_figures() -> None:
    """A convention is right if the other figure of a row follows from it."""
    for run in of("llm-foundry"):
        assert run.counted is CountedFlops.PARAMETERS
        flops = flops_per_token(run.architecture, run.seq_len, run.counted)
        printed = number(run.facts, "tflops_per_gpu")
        assert run.tokens_per_s_per_gpu is not None
        assert printed is not None
        assert run.tokens_per_s_per_gpu * flops / 1e12 == pytest.approx(printed, abs=1.0)
    for run in of("BigScience"):
        printed = number(run.facts, "tflops_per_gpu")
        if run.metric != "step_time" or printed is None or run.disagreements:
            continue
        flops = flops_per_token(run.architecture, run.seq_len, run.counted)
        assert run.tokens_per_s_per_gpu is not None
        assert run.tokens_per_s_per_gpu * flops / 1e12 == pytest.approx(printed, rel=0.002)
    for run in of("NeMo docs v2.0.0"):
        if run.phase == "pretrain":
            assert run.counted is CountedFlops.FULL
            assert not run.disagreements


def test_narayanan_formula() -> None:
    # arXiv 2104.04473, eq. 3: 96 B s l h^2 (1 + s/6h + V/16lh).
    [run] = [run for run in of("Narayanan") if run.model == "GPT-145.6B"]
    layers, h, s, v = 80, 12288, 2048, 51200
    total = 96 * 2304 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert run.step_time_s == pytest.approx(total / (148e12 * 1536), rel=1e-6)
    assert (run.micro_batch, run.vpp) == (2, 2)


def test_bigscience_first_calculator_gives_the_logged_time() -> None:
    # The chronicle logs 769.99 s an iteration beside the 108.47 TFLOPs of this row.
    run = of("BigScience")[0]
    assert run.metric == "tflops_per_gpu"
    assert run.step_time_s == pytest.approx(769.99, rel=1e-3)


def test_bigscience_depth_follows_from_its_tflops() -> None:
    depths = {run.model: run.architecture.n_layers for run in of("BigScience")}
    assert (depths["GPT-194B"], depths["GPT-183B"], depths["GPT-181B"]) == (78, 72, 72)


def test_korthikanti_points() -> None:
    rows = of("Korthikanti et al. 2022 (Table 5)")
    assert [run.step_time_s for run in rows] == [
        *(1.42, 1.1, 18.13, 13.75),
        *(49.05, 37.83, 94.42, 71.49),
    ]
    for run in rows:
        assert run.sequence_parallel is (run.recompute == "selective")
        assert run.recompute_modules == (("core_attn",) if run.sequence_parallel else ())
        assert run.plan.recompute is Recompute(run.recompute)
        assert (run.hardware, run.precision, run.zero_stage) == ("a100-80", "fp16", None)
        assert not run.disagreements
    assert [run.vpp for run in rows] == [1, 1, 3, 3, 3, 3, 1, 1]


def test_known_faults_are_excluded_with_their_reasons() -> None:
    assert sum("dp=" in run.reason for run in reasons("NeMo docs long-sequence")) == 6
    [misprint] = reasons("BigScience")
    assert "dp=8 does not multiply out to 320" in misprint.reason
    assert all("not a measurement" in run.reason for run in reasons("Korthikanti"))
    assert all("MegaScale" in run.reason for run in reasons("MegaScale (NSDI"))
    assert all("TPU" in run.reason for run in reasons("TPU"))
    assert all("PCIe" in run.reason for run in reasons("RAPID"))
    folded = reasons("MoE Parallel Folding (arXiv 2504.14960) Table 5")
    assert all("counts attention" in run.reason for run in folded)
    assert sum("(LoRA)" in run.model for run in excluded_runs()) == 9
    assert all("LoRA" in run.reason for run in excluded_runs() if "(LoRA)" in run.model)
    mamba = [run for run in excluded_runs() if "Mamba" in run.reason]
    assert all("emotron" in run.model for run in mamba)
    assert "Nemotron-340B" not in {run.model for run in mamba}
    assert not [run for run in published_runs() if "(LoRA)" in run.model]


def test_out_of_memory_runs_are_kept_without_a_time() -> None:
    rows = [run for run in published_runs() if run.oom]
    assert [(run.tp, run.pp, run.micro_batch) for run in rows] == [
        *((2, 6, 2), (2, 6, 1)),
        *((4, 6, 2), (4, 6, 1)),
    ]


def test_unstated_recomputation_is_not_none() -> None:
    bridge = [run for run in of("Megatron-Bridge perf") if run.recompute is None]
    assert bridge
    assert all(run.recompute_modules is None for run in bridge)
    stated = [run for run in published_runs() if run.recompute == "none"]
    assert all(run.recompute_modules == () for run in stated)
    [partial] = {run.recompute_layers for run in published_runs()} - {None}
    assert partial == 5


def test_precisions_are_in_one_vocabulary() -> None:
    pairs = {(run.precision_label, run.hardware[:1], run.precision) for run in published_runs()}
    assert ("FP8-CS", "h", "fp8") in pairs
    assert ("FP8-MX", "g", "mxfp8") in pairs
    assert ("FP8 (alternate granularity)", "b", "mxfp8") in pairs
    assert ("amp_fp8", "h", "fp8") in pairs
    assert ("NVFP4", "b", "nvfp4") not in pairs  # all on GB200 and GB300
    assert [run.model for run in published_runs() if run.precision == "fp8-block"] == [
        "Qwen3-30B-A3B"
    ]
    tests = {run.precision for run in of("BigScience") if run.facts["date"] == "02-28"}
    assert tests == {"bf16"}


def test_layouts() -> None:
    by_layout = {(run.architecture.name, run.pp, run.vpp): run.layout for run in published_runs()}
    assert by_layout["DeepSeek-V3", 16, 1] == "4/4/4/4/4/4/4/4/4/4/4/4/4/4/4/1"
    assert by_layout["Qwen3-235B-A22B", 4, 1] == "23/24/24/23"
    assert by_layout["GPT-182B", 12, 1] == "7/7/7/7/7/7/7/7/7/7/7/1"
    assert by_layout["Llama-3-70B", 4, 5] is None
    printed = [run for run in of("Megatron-LM dev") if run.architecture.name == "DeepSeek-V3"]
    assert [(run.pp, run.vpp) for run in printed] == [(8, 2), (4, 4), (4, 4)]
    assert all(run.layout == "Et*4|(tttt|)*14tmL" for run in printed)


def test_prediction_layers_follow_the_label_and_the_source() -> None:
    by_label = {
        (run.source[:15], run.model): run.architecture.mtp_layers
        for run in published_runs()
        if run.architecture.name == "DeepSeek-V3"
    }
    assert by_label["Megatron-Bridge", "DeepSeekV3"] == 1
    assert by_label["Megatron-Bridge", "DeepSeekV3 (w/o MTP)"] == 0
    assert by_label["NeMo Automodel ", "DeepSeek V3 671B"] == 0
    assert by_label["SimuMax B200 v1", "DeepSeek-V3 (4 layers)"] == 0


def test_memory_says_who_counted() -> None:
    kinds = {group_of(run.source): run.memory_kind for run in published_runs() if run.memory_kind}
    assert kinds["SimuMax"] == "allocated"
    assert kinds["TorchTitan"] == "reserved"
    assert kinds["BigScience"] == "device"
    [run] = [run for run in of("SimuMax") if "deepseekv3_l4_tp1_ep4_pp2_dp4_mbc4" in str(run.facts)]
    assert run.memory_bytes == pytest.approx(114.0 * 2**30)
    assert run.architecture.first_k_dense == 1
    assert run.global_batch == 16


def test_sharding() -> None:
    stages = {(run.source[:11], run.zero_stage) for run in published_runs()}
    assert ("llm-foundry", 2) in stages
    assert ("llm-foundry", 3) in stages
    assert ("TorchTitan ", 3) in stages
    assert ("Narayanan e", None) in stages
    fsdp = [run for run in of("Megatron-Bridge perf") if "fsdp" in run.facts]
    assert all(run.zero_stage == 3 for run in fsdp)
    assert {run.zero_group for run in of("InternEvo")} == {None, 4, 8}


def test_notes_are_read_in_words_and_in_pairs() -> None:
    words = "NeMo container 26.04; force-balanced routing; dropless; peak_alloc_gib=62.2; odd one"
    facts = facts_of(words)
    assert facts == {
        "container": "26.04",
        "routing": "balanced",
        "dropless": "yes",
        "peak_alloc_gib": "62.2",
        "remark": "odd one",
    }
    assert facts_of(canonical(words)) == facts
    assert number(facts, "peak_alloc_gib") == 62.2
    assert number(facts, "container") == 26.04
    assert number(facts, "routing") is None


ROW = {
    "source": "BigScience tr11 prequel",
    "model": "GPT-181B",
    "n_layers": "72",
    "hidden": "14336",
    "seq_len": "2048",
    "global_batch": "2048",
    "gpu": "A100-80GB",
    "n_gpus": "384",
    "tp": "8",
    "pp": "12",
    "mbs": "2",
    "recompute": "full",
    "measured_metric": "step_time",
    "measured_value": "134.02",
    "unit": "s",
    "notes": "date 02-21; tflops_per_gpu=120.29",
}


def written(folder: Path, **changes: str) -> Path:
    path = folder / "runs.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, restval="")
        table.writeheader()
        table.writerow(ROW | changes)
    return path


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    [run] = read_runs(written(tmp_path)).runs
    assert (run.dp, run.step_time_s, run.disagreements) == (4, 134.02, ())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"notes": "seconds and TFLOPs swapped in the table"}, "changed places"),
        ({"dp": "8"}, "dp=8 does not multiply out"),
        ({"gpu": "A800"}, "no hardware pack of A800"),
        ({"gpu": "Z1"}, "no hardware pack describes it"),
        ({"tp": "x"}, "tp='x' must be a whole number"),
        ({"mbs": ""}, "does not state its micro-batch"),
        ({"global_batch": ""}, "does not state its global batch"),
        ({"mbs": "3"}, "dp*micro_batch=12 must divide global_batch=2048"),
        ({"notes": "heads=37"}, "heads=37 must divide"),
        ({"measured_value": "-1"}, "must be a number above 0"),
        ({"unit": "h", "notes": ""}, "has no time"),
        ({"precision": "int4"}, "precision='int4' is not known"),
        ({"measured_metric": "status", "measured_value": "Other"}, "status 'Other'"),
    ],
)
def test_a_faulty_row_has_its_reason(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    table = read_runs(written(tmp_path, **changes))
    assert not table.runs
    [run] = table.excluded
    assert reason in run.reason


def test_a_table_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PerfmodelError, match="cannot be read"):
        read_runs(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("source,model\na,b\n", encoding="utf-8")
    with pytest.raises(PerfmodelError, match="lacks the columns"):
        read_runs(tmp_path / "other.csv")


def test_shipped_table_is_the_full_one(shared_data: Path) -> None:
    whole = read_runs(shared_data / "published_runs" / "published_runs.csv")
    assert [run.row for run in whole.runs] == [run.row for run in published_runs()]
    for one, other in zip(whole.runs, published_runs(), strict=True):
        assert one.step_time_s == other.step_time_s
        assert one.plan == other.plan
        assert one.memory_bytes == other.memory_bytes
    assert [run.row for run in whole.excluded] == [run.row for run in excluded_runs()]


def test_nanotron_sweep(shared_data: Path) -> None:
    table = read_runs(shared_data / "published_runs" / "hf_ultrascale_h100.csv")
    assert len(table.runs) + len(table.excluded) == 2627
    assert sum(run.oom for run in table.runs) > 1150
    timed = [run for run in table.runs if not run.oom]
    assert len(timed) > 1100
    assert not [run for run in timed if run.disagreements]  # the printed TFLOP/s follow
    assert {run.zero_stage for run in table.runs} == {0, 1}
    assert all(run.memory_kind == "allocated" for run in timed)
    assert all(run.mfu is not None and run.mfu < 0.7 for run in timed)
    assert all(run.global_batch <= 8192 for run in table.runs)


def test_vtrain_single_node(shared_data: Path) -> None:
    table = read_runs(shared_data / "published_runs" / "vtrain_single_node_a100.csv")
    assert (len(table.runs), len(table.excluded)) == (999, 0)
    assert {run.architecture.n_heads for run in table.runs} == {16}
    assert all(run.plan.recompute is Recompute.FULL for run in table.runs)

"""Envelopes: read, checked once, and frozen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from pydantic import ValidationError

from mosaic_opt.envelope import (
    MAX_CANDIDATES,
    Envelope,
    example,
    examples,
    json_schema,
    load_envelope,
    parse_envelope,
)
from mosaic_opt.errors import EnvelopeError
from perfmodel.cluster import Cluster
from perfmodel.goodput import Goodput, expected_goodput

from .strategies import TINY, small_envelopes, tiny, tiny_envelope, tiny_ladder

# ---------------------------------------------------------------- reading


@given(small_envelopes())
def test_json_round_trip(spec: dict[str, Any]) -> None:
    envelope = parse_envelope(spec)
    again = parse_envelope(json.loads(envelope.model_dump_json()))
    assert again == envelope
    assert again.model_dump_json() == envelope.model_dump_json()


def test_yaml_toml_and_json_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text(json.dumps(TINY), "utf-8")
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(TINY), "utf-8")
    (tmp_path / "e.yml").write_text(yaml.safe_dump(TINY), "utf-8")
    (tmp_path / "e.toml").write_text(_toml(TINY), "utf-8")
    found = [load_envelope(tmp_path / f"e.{kind}") for kind in ("json", "yaml", "yml", "toml")]
    assert found == [tiny_envelope()] * 4


def _toml(content: dict[str, Any]) -> str:
    scalars = {k: v for k, v in content.items() if not isinstance(v, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in scalars.items()]
    for name, table in content.items():
        if isinstance(table, dict):
            lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def test_cluster_as_text_is_the_cluster() -> None:
    assert tiny_envelope(cluster="p6-b200:1") == tiny_envelope()


def test_example_files_are_envelopes_of_their_own_name() -> None:
    for name in examples():
        assert example(name).name == name


def test_envelope_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        tiny_envelope().window_days = 2.0


def test_defaults_are_the_stated_ones() -> None:
    envelope = parse_envelope(
        {k: TINY[k] for k in ("cluster", "window_days", "batch", "candidates")}
    )
    assert envelope.memory_fraction == 0.92
    assert envelope.goodput == 1.0
    assert envelope.mfu_error == 0.06
    assert envelope.extrapolation == "refuse"
    assert envelope.stack == "megatron-eager"
    assert envelope.law == tiny_envelope().law


# ---------------------------------------------------------------- what follows from the fields


def test_derived_quantities() -> None:
    envelope = tiny_envelope(window_days=2.0, memory_fraction=0.5)
    assert envelope.window_s == 2 * 86400
    assert envelope.memory_cap_bytes == 0.5 * envelope.cluster.device_memory_bytes
    assert envelope.peak_compute_flop == pytest.approx(2.25e15 * 8 * 2 * 86400)


FACTS = {"mtbf_device_hours": 1e4, "checkpoint_s": 30.0, "restart_s": 600.0, "source": "MEASURED"}


def test_goodput_from_failures_of_the_cluster() -> None:
    envelope = tiny_envelope(goodput=FACTS)
    (first, *_) = envelope.candidates.architectures()
    found = envelope.goodput_of(first)
    assert found.source == "MEASURED"
    assert found.mtbf_s == 1e4 * 3600 / envelope.cluster.n_devices
    assert found.value == expected_goodput(found.interval_s, 30.0, 600.0, found.mtbf_s)
    assert parse_envelope(json.loads(envelope.model_dump_json())) == envelope
    assert tiny_envelope().goodput_of(first) == Goodput(value=1.0, source="ASSUMED")


def test_goodput_of_a_candidate_by_the_size_of_its_checkpoint() -> None:
    by_size = {k: v for k, v in FACTS.items() if k != "checkpoint_s"}
    envelope = tiny_envelope(goodput=by_size | {"storage_bytes_per_s": 1e9})
    models = envelope.candidates.architectures()
    for model in models:
        stored = model.n_total("with_embedding") + model.mtp_parameters
        assert envelope.goodput_of(model).checkpoint_s == 14 * stored / 1e9
    small, large = (f(models, key=lambda m: m.n_total()) for f in (min, max))
    assert envelope.goodput_of(small).value > envelope.goodput_of(large).value


def test_memory_of_the_cluster_replaces_the_pack() -> None:
    cluster = {"hardware": "p6-b200", "nodes": 1, "memory_bytes": 8e10}
    assert tiny_envelope(cluster=cluster, memory_fraction=1.0).memory_cap_bytes == 8e10


def test_grid_size_counts_before_anything_is_dropped() -> None:
    space = tiny_envelope(candidates=tiny_ladder(top_k=[1, 8, 64])).candidates
    assert space.grid_size == 2 * 2 * 3 * 2
    assert len(space.architectures()) < space.grid_size


# ---------------------------------------------------------------- refusals, each by name

REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"windw_days": 3}, r"windw_days is not a field; did you mean window_days"),
    ({"window_days": 0}, r"window_days=0: .*greater than 0"),
    ({"window_days": -1}, r"window_days=-1"),
    ({"window_days": float("nan")}, r"window_days=nan"),
    ({"window_days": float("inf")}, r"window_days=inf"),
    ({"window_days": 1e9}, r"window_days=1000000000.0"),
    ({"window_days": None}, r"window_days=NoneType"),
    ({"window_days": []}, r"window_days=list"),
    ({"goodput": 0.0}, r"goodput=0.0"),
    ({"goodput": 1.01}, r"goodput=1.01"),
    ({"goodput": None}, r"goodput=NoneType: .*valid number"),
    ({"goodput": {"restart_s": 60}}, r"goodput: checkpoint_s or storage_bytes_per_s must be given"),
    ({"goodput": {"restart_s": 60, "checkpoint_s": 5}}, r"mtbf_device_hours or .* is missing"),
    ({"goodput": {"checkpont_s": 5}}, r"checkpont_s is not a field; did you mean checkpoint_s"),
    (
        {"goodput": {"restart_s": 60, "checkpoint_s": 5, "mtbf_device_hours": 1e-5}},
        r"goodput: with 0.0045 s between failures, .* next to none of the window trains",
    ),
    ({"memory_fraction": 0}, r"memory_fraction=0"),
    ({"memory_fraction": 92}, r"memory_fraction=92"),
    ({"mfu_error": 1.0}, r"mfu_error=1.0"),
    ({"mfu_error": -0.1}, r"mfu_error=-0.1"),
    ({"extrapolation": "ignore"}, r"extrapolation='ignore': .*'refuse' or 'flag'"),
    ({"name": ""}, r"name=''"),
    ({"stack": ""}, r"stack=''"),
    ({"cluster": "p6-b200"}, r"cluster: .*PACK:NODES"),
    ({"cluster": "p6-b200:0"}, r"nodes=0"),
    ({"cluster": "p6-b200:131073"}, r"nodes=131073 must be from 1 to 131072"),
    ({"cluster": "h900:1"}, r"no hardware pack 'h900'"),
    ({"cluster": {"hardware": "h900", "nodes": 1}}, r"no hardware pack 'h900'"),
    ({"cluster": {"hardware": "p6-b200", "nodes": 1.5}}, r"cluster.nodes=1.5"),
    ({"cluster": {"hardware": "p6-b200", "nodes": True}}, r"cluster.nodes=True"),
    ({"cluster": {"hardware": "p6-b200", "nodes": 1, "memory_bytes": 0}}, r"memory_bytes=0"),
    ({"batch": {"global_batch": 0, "seq_len": 1}}, r"batch.global_batch=0"),
    ({"batch": {"global_batch": 8}}, r"batch.seq_len is missing"),
    ({"batch": {"global_batch": 8, "seq_len": 1, "optimizer": "sgd"}}, r"batch.optimizer='sgd'"),
    ({"batch": {"global_batch": 8, "seq_len": 1, "precision": "fp6"}}, r"batch.precision='fp6'"),
    (
        {"cluster": "a100:1", "batch": {"global_batch": 8, "seq_len": 1, "precision": "fp8"}},
        r"precision=fp8 has no rate on A100-SXM4-80GB; it has bf16\.",
    ),
    ({"law": "kaplan"}, r"law: .*'kaplan'.*chinchilla"),
    ({"law": {"kind": "joint"}}, r"law: .*'alpha' is missing"),
    ({"candidates": {"kind": "grid"}}, r"candidates=?.*'ladder', 'explicit'"),
    ({"candidates": {"kind": "explicit", "models": []}}, r"candidates.explicit.models"),
    ({"candidates": tiny_ladder(q=[])}, r"candidates.ladder.q"),
    ({"candidates": tiny_ladder(q=[0])}, r"candidates.ladder.q.0=0"),
    ({"candidates": tiny_ladder(q=[4097])}, r"candidates.ladder.q.0=4097"),
    ({"candidates": tiny_ladder(max_sparsity=0)}, r"candidates.ladder.max_sparsity=0"),
    ({"candidates": tiny_ladder(experts=[1])}, r"candidates.ladder.experts is not a field"),
    ({"tokens": {"kind": "grid"}}, r"tokens: tokens_per_parameter=\(\)"),
    ({"tokens": {"tokens_per_parameter": [1.0]}}, r"tokens: .*for kind 'grid'"),
    (
        {"tokens": {"min_tokens_per_parameter": 5, "max_tokens_per_parameter": 4}},
        r"tokens: min_tokens_per_parameter=5 must be at most .*=4; nearest: 4",
    ),
    ({"tokens": {"max_tokens": float("inf")}}, r"tokens.max_tokens=inf"),
    ({"plans": {"tp": [0]}}, r"plans.tp.0=0"),
    ({"plans": {"tp": []}}, r"plans.tp"),
    ({"plans": {"mbs": [1]}}, r"plans.mbs is not a field"),
    ({"plans": {"recompute": ["some"]}}, r"plans.recompute.0='some'"),
    ({"parameter_convention": "all"}, r"parameter_convention='all'"),
    ({"mfu_convention": "hfu"}, r"mfu_convention='hfu'"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSALS, ids=lambda v: str(v)[:50])
def test_refusal_names_the_field(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EnvelopeError, match=sentence) as caught:
        parse_envelope(tiny(**changes), "mine.yaml")
    message = str(caught.value)
    assert message.startswith("mine.yaml: ")
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize("field", ["cluster", "window_days", "batch", "candidates"])
def test_missing_field_is_named(field: str) -> None:
    with pytest.raises(EnvelopeError, match=f"^envelope: {field} is missing.$"):
        parse_envelope({k: v for k, v in TINY.items() if k != field})


@pytest.mark.parametrize("content", [None, [], "text", 3, [TINY]])
def test_content_of_another_kind_is_said(content: Any) -> None:
    with pytest.raises(EnvelopeError, match=r"holds a .*, not a table of fields"):
        parse_envelope(content)


def test_largest_grid_is_accepted_and_one_more_is_not() -> None:
    side = list(range(1, 101))
    grid = tiny_ladder(q=side, n_experts=side, top_k=side, expert_split=[1])
    assert tiny_envelope(candidates=grid).candidates.grid_size == MAX_CANDIDATES
    with pytest.raises(EnvelopeError, match="2000000 points, which must be at most 1000000"):
        tiny_envelope(candidates=grid | {"expert_split": [1, 2]})


def test_nearest_legal_value_is_legal() -> None:
    with pytest.raises(EnvelopeError, match=r"plans.tp.0=1048577: .*; nearest: 1048576\b"):
        tiny_envelope(plans={"tp": [2**20 + 1]})


def test_hint_of_an_unknown_field_is_about_the_kind_in_use() -> None:
    model = json.loads(tiny_envelope().candidates.architectures()[0].model_dump_json())
    with pytest.raises(EnvelopeError) as caught:
        tiny_envelope(candidates={"kind": "explicit", "models": [model], "q": [1]})
    message = str(caught.value)
    assert "candidates.explicit.q is not a field" in message
    assert "models" in message
    assert "n_experts" not in message


def test_split_that_does_not_divide_is_said_with_the_nearest() -> None:
    """At the latest when the candidates are made, in one sentence."""
    with pytest.raises(ValueError, match="G=7 must divide d_ff=1280; nearest: 8"):
        tiny_envelope(candidates=tiny_ladder(expert_split=[7])).candidates.architectures()


# ---------------------------------------------------------------- schema and import


def test_schema_has_every_field() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == set(Envelope.model_fields)
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {"cluster", "batch", "candidates"}
    assert schema["anyOf"] == [{"required": ["window_days"]}, {"required": ["budget"]}]
    json.dumps(schema)


def test_reading_an_envelope_compiles_nothing() -> None:
    code = (
        "import sys\n"
        "from mosaic_opt import example\n"
        "example('table3')\n"
        "sys.exit(any(m.startswith('mosaic_opt.backends.') for m in sys.modules))"
    )
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_cluster_of_every_size_up_to_the_largest() -> None:
    assert Cluster.parse("p6-b200:131072").n_devices == 2**20


@pytest.mark.parametrize("written", ["1.5e12", "1.5e+12", "15e11", "1500000000000.0"])
def test_numbers_of_yaml_are_numbers(written: str, tmp_path: Path) -> None:
    """PyYAML alone reads an exponent without a sign as text."""
    file = tmp_path / "e.yaml"
    spec = json.loads(tiny_envelope().model_dump_json())
    text = json.dumps(spec | {"tokens": {"max_tokens": "HERE"}}).replace('"HERE"', written)
    file.write_text(text, "utf-8")
    assert load_envelope(file).tokens.max_tokens == 1.5e12

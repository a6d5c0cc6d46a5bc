"""Hardware packs: what is shipped is sound, what is broken is refused in one sentence."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from perfmodel.calibration import HardwarePack, PackError, load_pack, shipped_packs
from perfmodel.calibration.surfaces import SURFACES
from perfmodel.calibration.writer import record_toml
from perfmodel.errors import PerfmodelError
from perfmodel.hardware import Hardware
from perfmodel.sources import Source

SHIPPED = resources.files("perfmodel.calibration") / "data" / "hardware" / "p6-b200.toml"

Content = dict[str, Any]


@pytest.fixture(scope="module")
def pack() -> HardwarePack:
    return load_pack("p6-b200")


@pytest.fixture
def content() -> Content:
    return tomllib.loads(SHIPPED.read_text("utf-8"))


def test_every_shipped_pack_loads_under_its_own_name() -> None:
    assert "p6-b200" in shipped_packs()
    for name in shipped_packs():
        assert load_pack(name).name == name


def test_constants_are_the_numbers_of_the_file(pack: HardwarePack, content: Content) -> None:
    constants = pack.constants()
    assert isinstance(constants, Hardware)
    assert constants.fabric.devices_per_node == content["node"]["devices_per_node"]
    assert constants.device.memory_bw == content["device"]["memory_bw"]["value"]
    for name in SURFACES:
        owner = constants.fabric if name in constants.fabric._fields else constants
        stated = content["surfaces"][name]["params"]
        given = getattr(owner, name)._asdict()
        assert {key: given[key] for key in stated} == stated
        # what no pack states is the format of the operands
        assert {key: given[key] for key in set(given) - set(stated)} in ({}, {"operand_bytes": 2.0})


def test_every_surface_says_what_it_rests_on(pack: HardwarePack) -> None:
    for name, surface in pack.surfaces.items():
        assert pack.source(name) is Source.FITTED
        assert surface.errors is not None
        assert surface.errors.n >= 10
        assert all(len(sha) == 64 for sha in surface.tables.values())
        assert surface.tables
    for datum in (pack.device.peak_flops, pack.device.memory_bytes):
        assert datum.source is Source.DATASHEET


def test_round_trip_through_toml(pack: HardwarePack, tmp_path: Path) -> None:
    path = tmp_path / "copy.toml"
    path.write_text(record_toml(pack, "a comment\n\nof three lines"), "utf-8")
    copy = load_pack(path)
    assert copy == pack
    assert copy.digest == pack.digest
    assert copy.constants() == pack.constants()


def test_digest_follows_the_content(pack: HardwarePack, content: Content) -> None:
    assert HardwarePack.model_validate(content).digest == pack.digest
    content["surfaces"]["gemm"]["params"]["flop_eff"] *= 1.0 + 1e-12
    assert HardwarePack.model_validate(content).digest != pack.digest


def test_a_pack_is_frozen(pack: HardwarePack) -> None:
    with pytest.raises(ValueError, match="frozen"):
        pack.name = "other"  # type: ignore[misc]


class TestCheck:
    def test_inside_says_nothing(self, pack: HardwarePack) -> None:
        assert pack.check("grouped_forward", n_gemms=12, rows=1536, n=3840, k=3072) == ()
        assert pack.check("all_to_all", size=32, volume=1e8) == ()

    def test_ends_of_the_range_are_inside(self, pack: HardwarePack) -> None:
        low, high = pack.surfaces["attention_forward"].ranges["seq_len"]
        assert (low, high) == (2048, 16384)
        assert pack.check("attention_forward", seq_len=low) == ()
        assert pack.check("attention_forward", seq_len=high) == ()
        (flag,) = pack.check("attention_forward", seq_len=high + 1)
        assert (flag.surface, flag.variable, flag.value) == ("attention_forward", "seq_len", 16385)
        assert flag.policy == "flag"

    def test_message_is_one_sentence_with_the_numbers(self, pack: HardwarePack) -> None:
        (flag,) = pack.check("all_to_all", size=64)
        assert flag.policy == "refuse"
        assert flag.message == (
            "all_to_all: size = 64 is outside the measured range [2, 32], "
            "so the price is an extrapolation, which a search refuses."
        )

    def test_only_large_all_to_all_groups_are_refused(self, pack: HardwarePack) -> None:
        refused = {
            (name, variable)
            for name, surface in pack.surfaces.items()
            for variable, policy in surface.beyond.items()
            if policy == "refuse"
        }
        assert refused == {("all_to_all", "size")}

    def test_nan_is_outside(self, pack: HardwarePack) -> None:
        assert len(pack.check("gemm", m=math.nan, n=128, k=128)) == 1

    def test_unknown_names_are_refused(self, pack: HardwarePack) -> None:
        with pytest.raises(
            PackError, match=r"^Surface gemm has no variable 'rows'; it has m, n, k"
        ):
            pack.check("gemm", rows=3)
        with pytest.raises(PackError, match=r"^No surface is called 'conv'; there are gemm, "):
            pack.check("conv")


def remove(*path: str) -> Callable[[Content], None]:
    def tamper(content: Content) -> None:
        *parents, last = path
        for key in parents:
            content = content[key]
        del content[last]

    return tamper


def put(value: object, *path: str) -> Callable[[Content], None]:
    def tamper(content: Content) -> None:
        *parents, last = path
        for key in parents:
            content = content[key]
        content[last] = value

    return tamper


GEMM = ("surfaces", "gemm", "params")


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (remove("surfaces", "topk"), "surfaces lacks topk"),
        (remove(*GEMM, "k_half"), "surfaces.gemm.params lacks k_half"),
        (remove("device", "memory_bw"), "device.memory_bw is missing"),
        (remove("surfaces", "gemm", "ranges", "k"), "surfaces.gemm.ranges lacks k"),
        (remove("surfaces", "head", "beyond", "vocab"), "surfaces.head.beyond lacks vocab"),
        (put(1.0, *GEMM, "warp"), "surfaces.gemm.params has unknown warp; it takes launch_s"),
        (put("x", "colour"), "colour is not a field"),
        (put(2, "schema_version"), "schema_version=2: input should be 1"),
        (put(math.nan, *GEMM, "norm"), "surfaces.gemm.params.norm=nan: input should be a finite"),
        (put(math.inf, *GEMM, "norm"), "surfaces.gemm.params.norm=inf: input should be a finite"),
        (
            put(-1e-6, *GEMM, "launch_s"),
            "surfaces.gemm.params.launch_s = -1e-06: must be 0 or more",
        ),
        (put(0.0, *GEMM, "flop_eff"), "surfaces.gemm.params.flop_eff = 0: must be greater than 0"),
        (put(86.0, *GEMM, "bw_eff"), "bw_eff = 86: an efficiency is a fraction, at most 1.5"),
        (put("fast", *GEMM, "bw_eff"), "bw_eff='fast': input should be a valid number"),
        (
            put(-8e12, "device", "memory_bw", "value"),
            "memory_bw.value=-8000000000000.0: input should be greater than 0",
        ),
        (remove("surfaces", "gemm", "errors"), "surfaces.gemm.errors is missing: what is FITTED"),
        (
            put("ASSUMED", "surfaces", "gemm", "source"),
            "surfaces.gemm.tables must be absent: ASSUMED is not measured",
        ),
        (put("GUESSED", "surfaces", "gemm", "source"), "source='GUESSED': input should be 'MEA"),
        (put([9.0, 3.0], "surfaces", "gemm", "ranges", "m"), "range of m runs from 9 down to 3"),
        (put("ignore", "surfaces", "gemm", "beyond", "m"), "beyond.m='ignore': input should be"),
        (put(0, "node", "devices_per_node"), "node.devices_per_node=0: input should be greater"),
    ],
)
def test_broken_pack_is_one_sentence(
    content: Content, tmp_path: Path, tamper: Callable[[Content], None], said: str
) -> None:
    tamper(content)
    path = tmp_path / "broken.toml"
    path.write_text(as_toml(content), "utf-8")
    with pytest.raises(PackError) as caught:
        load_pack(path)
    message = str(caught.value)
    assert said in message
    assert str(path) in message
    assert message.endswith(".")
    assert "\n" not in message
    assert caught.value.__suppress_context__  # no pydantic traceback behind it


def as_toml(table: Content, path: str = "") -> str:
    """Write nested tables whatever is in them; dots in keys are quoted."""
    lines = [f"[{path}]"] if path else []
    for key, value in table.items():
        if not isinstance(value, dict):
            lines.append(f'"{key}" = {toml_value(value)}')
    for key, value in table.items():
        if isinstance(value, dict):
            lines.append(as_toml(value, f'{path}."{key}"' if path else f'"{key}"'))
    return "\n".join(lines)


def toml_value(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else str(value)


def test_tampering_is_what_breaks_them(content: Content, tmp_path: Path) -> None:
    path = tmp_path / "whole.toml"
    path.write_text(as_toml(content), "utf-8")
    assert load_pack(path) == load_pack("p6-b200")


def test_several_faults_are_counted(content: Content) -> None:
    content["a"] = content["b"] = 1
    del content["name"]
    with pytest.raises(ValueError, match="3 validation errors"):
        HardwarePack.model_validate(content)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("p5-h100", "There is no hardware pack 'p5-h100': give the path of a .toml file or one of"),
        ("../p6-b200", "There is no hardware pack '../p6-b200'"),
        ("", "There is no hardware pack ''"),
    ],
)
def test_unknown_name_lists_the_packs(name: str, said: str) -> None:
    with pytest.raises(PackError) as caught:
        load_pack(name)
    assert str(caught.value).startswith(said)
    assert "p6-b200" in str(caught.value)
    assert isinstance(caught.value, PerfmodelError)


def test_unreadable_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"cannot be read: No such file or directory\.$"):
        load_pack(tmp_path / "absent.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("name = ", "utf-8")
    with pytest.raises(PackError, match=r"is not valid TOML: .*\.$"):
        load_pack(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(PackError, match=r"cannot be read: it is not UTF-8 text\.$"):
        load_pack(bad)


def test_the_documents_state_the_errors_of_the_pack(pack: HardwarePack) -> None:
    text = (Path(__file__).parents[2] / "docs" / "theory" / "kernels.md").read_text("utf-8")
    for name, surface in pack.surfaces.items():
        fitted = [
            e for part, e in surface.regimes.items() if "fit" not in part and "floor" not in part
        ]
        assert surface.errors is not None
        for errors in fitted or [surface.errors]:
            assert f"| {errors.n} | {errors.median_in:.2f} / {errors.p90_in:.2f} |" in text, name
            assert f"{errors.median_out:.2f}" in text, name

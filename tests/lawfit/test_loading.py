"""Laws from names and mappings, JSON, the learning rate, and the import."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter

import lawfit
from lawfit import (
    CHINCHILLA_EPOCH,
    CHINCHILLA_HOFFMANN,
    MOSAIC_TABLE2,
    AnyLaw,
    JointLaw,
    LawError,
    law_from_mapping,
    load_law,
    peak_learning_rate,
)

LAWS = [MOSAIC_TABLE2, MOSAIC_TABLE2.at_split(8.0), CHINCHILLA_EPOCH, CHINCHILLA_HOFFMANN]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.source)
def test_law_survives_json(law: AnyLaw) -> None:
    adapter: TypeAdapter[AnyLaw] = TypeAdapter(AnyLaw)
    back = adapter.validate_json(law.model_dump_json())
    assert back == law
    assert type(back) is type(law)
    assert type(law).model_validate_json(law.model_dump_json()) == law


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.source)
def test_law_survives_as_a_field_and_as_a_mapping(law: AnyLaw) -> None:
    class Problem(BaseModel):
        law: AnyLaw

    problem = Problem(law=law)
    assert Problem.model_validate_json(problem.model_dump_json()) == problem
    assert law_from_mapping(law.model_dump(mode="json")) == law
    assert load_law(law.model_dump()) == law
    assert load_law(law) is law


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("joint", MOSAIC_TABLE2),
        ("mosaic-table2", MOSAIC_TABLE2),
        ("chinchilla-epoch", CHINCHILLA_EPOCH),
        ("chinchilla-hoffmann", CHINCHILLA_HOFFMANN),
    ],
)
def test_known_names(name: str, law: AnyLaw) -> None:
    assert load_law(name) is law


@pytest.mark.parametrize("bad", ["Joint", "", 3, ["joint"]])
def test_unknown_name_lists_the_known_ones(bad: Any) -> None:
    with pytest.raises(LawError) as caught:
        load_law(bad)
    message = str(caught.value)
    assert message.startswith(f"law is {bad!r}, ")
    for name in ("joint", "mosaic-table2", "chinchilla-epoch", "chinchilla-hoffmann"):
        assert repr(name) in message


def test_mapping_takes_lambda_as_the_paper_writes_it() -> None:
    mapping = MOSAIC_TABLE2.model_dump()
    mapping["lambda"] = mapping.pop("lambda_")
    law = law_from_mapping(mapping)
    assert law == MOSAIC_TABLE2
    assert "lambda" in mapping


def test_both_spellings_of_lambda_are_an_error() -> None:
    with pytest.raises(LawError, match="the key 'lambda' is unknown"):
        law_from_mapping({**MOSAIC_TABLE2.model_dump(), "lambda": 0.1})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kind": "jointly"}, "kind is 'jointly', and it must be one of 'joint', 'per_split'"),
        ({"kind": None}, "kind is 'None', and it must be one of"),
        ({"a": -1.0}, "in 'a' -1 is no prefactor, which must be a finite number of at least 0"),
        ({"a": "x"}, "'a' is 'x', where input should be a valid number"),
        ({"zeta": 1.0}, "the key 'zeta' is unknown"),
        ({"valid_range": {"tokens": (2, 1)}}, "in 'valid_range.tokens' the interval runs from 2"),
    ],
)
def test_illegal_mapping_gets_one_sentence(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(LawError) as caught:
        law_from_mapping({**MOSAIC_TABLE2.model_dump(), **change})
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message
    assert message.endswith(".")


def test_missing_keys_are_named() -> None:
    mapping = MOSAIC_TABLE2.model_dump()
    del mapping["eta"], mapping["source"]
    with pytest.raises(LawError, match=r"'source' is missing; .*'eta' is missing"):
        law_from_mapping(mapping)
    del mapping["kind"]
    with pytest.raises(LawError, match="the key 'kind' is missing"):
        law_from_mapping(mapping)


def test_schema_tells_laws_apart_by_kind() -> None:
    schema = TypeAdapter(AnyLaw).json_schema()
    assert set(schema["discriminator"]["mapping"]) == {"joint", "per_split", "chinchilla"}
    assert JointLaw.model_fields["kind"].default == "joint"


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.source)
@pytest.mark.parametrize("ending", ["json", "yaml", "yml"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_file_holds_a_law(tmp_path: Path, law: AnyLaw, ending: str, wrapped: bool) -> None:
    content = law.model_dump(mode="json")
    content = {"schema_version": 1, "law": content, "objective": 1.0} if wrapped else content
    file = tmp_path / f"law.{ending}"
    file.write_text((json.dumps if ending == "json" else yaml.safe_dump)(content), "utf-8")
    assert load_law(file) == load_law(str(file)) == load_law(file.name, folder=tmp_path) == law
    assert load_law(file, folder="/elsewhere") == law


def test_a_law_in_toml_with_its_convention(tmp_path: Path) -> None:
    text = """
    kind = "chinchilla"
    a = 482.0
    alpha = 0.348
    b = 2.085e3
    beta = 0.366
    e = 1.817
    source = "a fit"
    convention = "with_embedding"
    """
    (tmp_path / "law.toml").write_text(text, "utf-8")
    law = load_law(tmp_path / "law.toml")
    assert (law.b, law.convention) == (2085.0, "with_embedding")


def test_a_name_goes_before_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("joint").write_text("{}", "utf-8")
    assert load_law("joint") is MOSAIC_TABLE2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        ("[1]", "holds a list, and not a law's mapping"),
        ("{}", "holds no law: it needs the key 'law', or .* but has no key at all"),
        ('{"a": 1, "beta": 2}', "holds no law: .* but has 'a', 'beta'"),
        ('{"law": "mosaic-table2"}', "has 'mosaic-table2' under the key 'law', but"),
        ('{"law": {"kind": "cubic"}}', "law.json: the mapping is no law, because kind is 'cubic'"),
        ('{"kind": "joint", "a": NaN}', "is not valid JSON: NaN is not a number"),
        ("{", "is not valid JSON"),
        ("\0", "is not valid JSON"),
    ],
)
def test_a_file_without_a_law_is_one_sentence(
    tmp_path: Path, content: str | None, words: str
) -> None:
    file = tmp_path / "law.json"
    if content is not None:
        file.write_text(content, "utf-8")
    with pytest.raises(LawError, match=words) as caught:
        load_law(file)
    assert "\n" not in str(caught.value)


def test_a_file_of_yaml_runs_no_code(tmp_path: Path) -> None:
    file = tmp_path / "law.yaml"
    file.write_text("law: !!python/object/apply:os.getcwd []\n", "utf-8")
    with pytest.raises(LawError, match="is not valid YAML: could not determine a constructor"):
        load_law(file)


@pytest.mark.parametrize(
    ("n_active", "tokens", "expected"),
    [(1.0 / 6.0, 1.0, 3.30), (1e9, 1e12 / 6.0, 3.30 * 10 ** (-0.199 * 21))],
)
def test_peak_learning_rate_is_rule_17(n_active: float, tokens: float, expected: float) -> None:
    assert peak_learning_rate(n_active=n_active, tokens=tokens) == pytest.approx(expected)


@pytest.mark.parametrize(("n_active", "tokens"), [(0.0, 1e9), (1e9, -1.0)])
def test_peak_learning_rate_refuses_bad_input(n_active: float, tokens: float) -> None:
    with pytest.raises(LawError, match="finite number above 0"):
        peak_learning_rate(n_active=n_active, tokens=tokens)


def test_public_names_exist() -> None:
    assert sorted(lawfit.__all__) == sorted(set(lawfit.__all__))
    for name in lawfit.__all__:
        assert hasattr(lawfit, name)


def test_import_stays_light() -> None:
    code = (
        "import sys, lawfit;"
        "heavy = {'scipy', 'perfmodel', 'mosaic_opt', 'torch', 'numba'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Whatever comes in, what goes out is an answer or one sentence: no traceback, no hang."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from math import inf, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lawfit import LawError
from mosaic_opt import cli
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.envelope import Envelope, load_envelope, parse_envelope
from mosaic_opt.errors import EnvelopeError, MosaicError
from mosaic_opt.problem import Problem
from mosaic_opt.result import Solution
from mosaic_opt.solver import solve
from perfmodel.errors import PerfmodelError

from .strategies import TINY, tiny, tiny_ladder

T = TypeVar("T")
EXPECTED = (MosaicError, PerfmodelError, LawError)


def run(*arguments: str) -> tuple[int, str, str]:
    """Run the command line in this process; any exception but SystemExit gets out."""
    out, err = StringIO(), StringIO()
    with (
        mock.patch.object(sys, "argv", ["mosaic", *arguments]),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as left,
    ):
        cli.main()
    return int(left.value.code or 0), out.getvalue(), err.getvalue()


def assert_one_sentence(code: int, out: str, err: str) -> None:
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert len(err) > len("error: x\n")
    assert "Traceback" not in err


# ---------------------------------------------------------------- one field of an envelope

BAD = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 0.0, -0.5, nan, inf, -inf, 1e308, 5e-324]),
    st.sampled_from([2**31, 2**63, 2**64, 10**30, 10**400, -(10**400)]),
    st.sampled_from(["", " ", "nan", "p6-b200:1", "p6-b200:999999", "../x.toml", "x" * 400, "é"]),
    st.sampled_from([[], {}, [[]], [{}], {"a": 1}, [0], [-1], [1.5], [nan], ["x"], [None], [True]]),
    st.text(max_size=20),
    st.integers(),
    st.floats(),
    st.binary(max_size=5),
)


def paths(content: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Path of every value in nested dicts and lists."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        yield (*prefix, key)
        if isinstance(value, dict | list):
            yield from paths(value, (*prefix, key))


FULL = tiny(
    goodput=0.9,
    stack="megatron-eager",
    mfu_error=0.06,
    extrapolation="refuse",
    parameter_convention="without_embedding_and_head",
    mfu_convention="6n-nonembedding",
    tokens={
        "kind": "saturate",
        "min_tokens_per_parameter": 1.0,
        "max_tokens_per_parameter": 100.0,
        "max_tokens": 1e12,
    },
    plans={"tp": [1, 2], "max_cp": 2, "micro_batch": [1, 2], "recompute": ["none", "full"]},
    candidates=tiny_ladder(vocab_size=50257, min_sparsity=0.1, max_sparsity=0.9),
)
FACTS = {
    "mtbf_device_hours": 1e4,
    "mtbf_node_hours": 1e5,
    "checkpoint_s": 10.0,
    "restart_s": 600.0,
    "interval_s": 1000.0,
    "source": "MEASURED",
    "origin": "by hand",
}
SITE = {
    "name": "site",
    "devices": 8,
    "bandwidth_bytes_per_s": 1e9,
    "latency_s": 1e-3,
    "source": "DATASHEET",
}
LAW = {
    "kind": "chinchilla",
    "a": 400.0,
    "alpha": 0.34,
    "b": 400.0,
    "beta": 0.28,
    "e": 1.7,
    "source": "by hand",
}
MODEL = {
    "name": "m",
    "n_layers": 4,
    "d_model": 512,
    "n_heads": 4,
    "n_kv_heads": 4,
    "head_dim": 128,
    "d_ff": 1280,
    "vocab_size": 50257,
    "n_experts": 4,
    "top_k": 1,
    "d_expert": 640,
    "d_shared": 640,
    "first_k_dense": 1,
}
BASES = [
    FULL,
    FULL | {"law": LAW},
    FULL | {"candidates": {"kind": "explicit", "models": [MODEL]}},
    FULL | {"goodput": FACTS, "cluster": {"hardware": "p6-b200", "nodes": 2, "levels": [SITE]}},
    FULL | {"tokens": {"kind": "grid", "tokens_per_parameter": [1.0, 20.0]}},
]


def replaced(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(content)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


@st.composite
def mutations(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[Any, ...]]:
    base = draw(st.sampled_from(BASES))
    path = draw(st.sampled_from(list(paths(base))))
    return replaced(base, path, draw(BAD)), path


def attempt(call: Callable[[], T]) -> tuple[str, T | None]:
    """Return the message of an expected error, or the value; any other error gets out."""
    try:
        return "", call()
    except EXPECTED as error:
        return str(error), None


@settings(max_examples=400)
@given(mutations())
def test_changed_envelope_is_an_envelope_or_a_sentence(
    mutation: tuple[dict[str, Any], tuple[Any, ...]],
) -> None:
    content, path = mutation
    message, envelope = attempt(lambda: parse_envelope(content))
    if envelope is None:
        assert message.startswith("envelope: ")
        assert message.endswith((".", "?"))
        assert len(message.splitlines()) == 1
        named = [key for key in path if isinstance(key, str) and key in message.lower()]
        assert named, message
    else:
        assert isinstance(envelope, Envelope)


@settings(max_examples=150)
@given(mutations())
def test_changed_envelope_is_answered_or_refused(
    mutation: tuple[dict[str, Any], tuple[Any, ...]],
) -> None:
    content, _ = mutation
    message, solution = attempt(
        lambda: solve(parse_envelope(content), backend=Enumerate(workers=1))
    )
    if solution is None:
        assert len(message.splitlines()) == 1
        assert message.endswith((".", "?"))
    else:
        assert solution.certificate.certified
        assert Solution.from_json(solution.to_json()) == solution


@given(st.sampled_from(BASES), st.data())
def test_unknown_field_is_refused_anywhere(base: dict[str, Any], data: st.DataObject) -> None:
    tables = [(), *(p for p in paths(base) if isinstance(_at(base, p), dict))]
    path = data.draw(st.sampled_from(tables))
    key = data.draw(st.from_regex(r"\A[a-z_]{3,12}\Z").filter(lambda k: k not in _at(base, path)))
    message, envelope = attempt(lambda: parse_envelope(replaced(base, (*path, key), 1)))
    if envelope is None:
        assert key in message
    else:
        known = set(Envelope.model_fields) | {"tp", "ep", "pp", "cp", "etp", "vpp", "max_tp"}
        known |= {"max_ep", "max_pp", "memory_bytes", "max_tokens", "valid_range"}
        assert key in known


def _at(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        content = content[key]
    return content


@given(
    st.recursive(
        BAD,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.one_of(st.text(max_size=8), st.sampled_from([*TINY])), inner, max_size=4
            )
        ),
    )
)
def test_any_content_at_all(content: Any) -> None:
    with pytest.raises(EnvelopeError):
        parse_envelope(content)


def test_key_with_a_line_break_is_one_line() -> None:
    with pytest.raises(EnvelopeError) as caught:
        parse_envelope(tiny(**{"a\nb": 1}))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "changes",
    [{"cluster": {"hardware": "\0.toml", "nodes": 1}}, {"stack": "\0.toml"}],
    ids=["hardware", "stack"],
)
def test_name_that_is_no_path(changes: dict[str, Any]) -> None:
    with pytest.raises(EXPECTED):
        Problem(parse_envelope(tiny(**changes)))


@pytest.mark.parametrize("law", ["list", "field", "name"])
def test_message_about_a_law_is_short(law: str) -> None:
    nested: Any = ["lol"] * 9
    for _ in range(4):
        nested = [nested] * 9
    value = {"list": nested, "field": LAW | {"a": nested}, "name": "x" * 10**5}[law]
    with pytest.raises(EnvelopeError) as caught:
        parse_envelope(tiny(law=value))
    assert len(str(caught.value)) < 2000


# ---------------------------------------------------------------- files

BOMB = "a: &a [lol,lol,lol,lol,lol,lol,lol,lol,lol]\n" + "".join(
    f"{y}: &{y} [{','.join([f'*{x}'] * 9)}]\n" for x, y in zip("abcdefgh", "bcdefghi", strict=True)
)
FILES: dict[str, bytes] = {
    "empty.yaml": b"",
    "empty.json": b"",
    "empty.toml": b"",
    "blank.yaml": b"\n\n  \n",
    "comment.yaml": b"# nothing\n",
    "list.yaml": b"- 1\n- 2\n",
    "list.json": b"[1, 2]",
    "scalar.yaml": b"3\n",
    "text.yaml": b"window_days\n",
    "null.json": b"null",
    "two.yaml": b"a: 1\n---\nb: 2\n",
    "tab.yaml": b"a:\n\t- 1\n",
    "open.yaml": b"a: [1, 2\n",
    "open.json": b'{"a": ',
    "open.toml": b"a = [1,\n",
    "nan.json": b'{"window_days": NaN}',
    "inf.json": b'{"window_days": -Infinity}',
    "big.json": b'{"window_days": ' + b"9" * 5000 + b"}",
    "big.yaml": b"window_days: " + b"9" * 5000 + b"\n",
    "date.yaml": b"window_days: 2026-99-99\n",
    "moment.toml": b"window_days = 2026-01-01\n",
    "key.yaml": b"{[1]: 2}\n",
    "number.yaml": b"1: 2\n",
    "object.yaml": b"!!python/object/apply:os.system ['true']\n",
    "object2.yaml": b"window_days: !!python/object:os.PathLike {}\n",
    "name.yaml": b"window_days: !!python/name:os.system\n",
    "tag.yaml": b"window_days: !mine 3\n",
    "merge.yaml": b"<<: 3\n",
    "alias.yaml": b"a: *b\n",
    "self.yaml": b"&a [*a]\n",
    "selfmap.yaml": b"&a {window_days: *a}\n",
    "bomb.yaml": BOMB.encode(),
    "bombq.yaml": BOMB.encode() + b"window_days: *i\nname: *i\ncandidates: *i\n",
    "deep.yaml": b"[" * 1000,
    "deep.json": b"[" * 200000,
    "deep.toml": b"a = " + b"[" * 20000,
    "latin.yaml": "name: né\n".encode("latin-1"),
    "utf16.yaml": "name: x\n".encode("utf-16"),
    "binary.yaml": bytes(range(256)),
    "zero.yaml": b"\0\0\0\0",
    "zero.json": b"\0",
    "control.yaml": b"name: \x07\n",
    "elf.toml": b"\x7fELF\x02\x01\x01",
    "bom.json": b"\xef\xbb\xbf{}",
}


@pytest.mark.parametrize("name", FILES)
def test_file_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    with pytest.raises(EnvelopeError) as caught:
        load_envelope(path)
    assert name in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert_one_sentence(*run("solve", str(path)))
    assert_one_sentence(*run("check", "--model", str(path), *REST))


REST = (
    *("--plan", "ep=1", "--cluster", "p6-b200:1"),
    *("--global-batch", "8", "--seq", "1024"),
)


@pytest.mark.parametrize("name", ["a.yaml", "a.json", "a.toml"])
def test_folder_and_missing_file_are_refused(name: str, tmp_path: Path) -> None:
    for path in (tmp_path / name, tmp_path / "missing" / name, tmp_path / ("x" * 300 + name)):
        assert_one_sentence(*run("solve", str(path)))
    (tmp_path / name).mkdir()
    assert_one_sentence(*run("solve", str(tmp_path / name)))
    assert_one_sentence(*run("check", "--model", str(tmp_path / name), *REST))


@pytest.mark.parametrize("name", ["a", "a.txt", "a.YAML", ".yaml", "", "/"])
def test_other_endings_are_refused(name: str, tmp_path: Path) -> None:
    assert_one_sentence(*run("solve", str(tmp_path / name)))


@given(st.binary(max_size=200), st.sampled_from(["yaml", "json", "toml"]))
def test_random_bytes_are_refused(content: bytes, kind: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"x.{kind}"
        path.write_bytes(content)
        with pytest.raises(EnvelopeError):
            load_envelope(path)


def test_tagged_object_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(f"name: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n", "utf-8")
    assert_one_sentence(*run("solve", str(path)))
    assert not (tmp_path / "made").exists()


def test_one_bad_value_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text(json.dumps(tiny(window_days=-1)), "utf-8")
    code, out, err = run("solve", str(path))
    assert_one_sentence(code, out, err)
    assert "window_days=-1" in err


# ---------------------------------------------------------------- arguments

GOOD = {
    "--model": "ladder:q=1,E=4,K=1,G=1",
    "--plan": "ep=1",
    "--cluster": "p6-b200:1",
    "--global-batch": "8",
    "--seq": "1024",
}
PIECES = st.sampled_from(
    [
        *"=,:-.0123456789/ \n٣qEKGV",
        *("tp", "ep", "pp", "dp", "mbs", "recompute", "full", "ladder:", "p6-b200"),
        *(".toml", ".yaml", "inf", "nan", "1e9", "[x]"),
    ]
)
WORDS = st.one_of(
    st.lists(PIECES, max_size=8).map("".join),
    st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=12),
    st.integers().map(str),
    st.floats().map(str),
)


@settings(max_examples=300)
@given(st.sampled_from(["step", "check"]), st.sampled_from([*GOOD]), WORDS)
def test_any_argument_is_answered_or_refused(command: str, option: str, word: str) -> None:
    words = [f"{name}={value}" for name, value in (GOOD | {option: word}).items()]
    code, out, err = run(command, *words, "--json", "-")
    if code == 2:
        assert_one_sentence(code, out, err)
    else:
        assert code in (0, 1)
        assert err == ""
        json.loads(out)


@pytest.mark.parametrize(
    "model",
    [
        "ladder:q=1000000,E=4,K=1,G=1",
        "ladder:q=999999999,E=4,K=1,G=7",
        "ladder:q=1,E=4,K=5,G=1",
        "ladder:q=1,E=4,K=1,G=3",
        "ladder:q=0,E=4,K=1,G=1",
        "ladder:q=1,E=999999999,K=1,G=1,V=0",
        "ladder:",
    ],
)
def test_impossible_ladder_is_refused(model: str) -> None:
    words = [word for pair in (GOOD | {"--model": model}).items() for word in pair]
    assert_one_sentence(*run("check", *words))


# ---------------------------------------------------------------- large, and legal

LARGE: dict[str, dict[str, Any]] = {
    "devices": {"cluster": "p6-b200:131072"},
    "devices and batch": {
        "cluster": "p6-b200:131072",
        "batch": {"global_batch": 2**30, "seq_len": 2**20},
    },
    "batch": {"batch": {"global_batch": 2**30, "seq_len": 2**30}},
    "prime batch": {"batch": {"global_batch": 2**30 - 35, "seq_len": 2**30 - 35}},
    "model": {
        "candidates": tiny_ladder(q=[4096], n_experts=[65536], top_k=[65536], expert_split=[1])
    },
    "window": {"window_days": 36500.0},
    "tiny window": {"window_days": 1e-300},
    "memory": {"cluster": {"hardware": "p6-b200", "nodes": 1, "memory_bytes": 1e300}},
    "vocabulary": {"candidates": tiny_ladder(vocab_size=2**30)},
    "ratio": {"tokens": {"kind": "saturate", "min_tokens_per_parameter": 1e300}},
    "tokens": {"tokens": {"kind": "saturate", "max_tokens": 1e-300}},
}


@pytest.mark.parametrize("what", LARGE)
def test_large_is_answered(what: str) -> None:
    one = tiny_ladder(q=[1], n_experts=[8], top_k=[1], expert_split=[1])
    envelope = parse_envelope(tiny(**({"candidates": one} | LARGE[what])))
    solution = solve(envelope, backend=Enumerate(workers=1))
    assert solution.certificate.certified
    assert Solution.from_json(solution.to_json()) == solution
    assert str(solution)


@pytest.mark.parametrize(
    "changes",
    [
        {"cluster": "p6-b200:131073"},
        {"cluster": "p6-b200:9999999"},
        {"candidates": tiny_ladder(q=list(range(1, 4097)), n_experts=list(range(1, 4097)))},
        {"batch": {"global_batch": 2**30 + 1, "seq_len": 1}},
        {"window_days": 36501},
    ],
    ids=["nodes", "more nodes", "grid", "batch", "window"],
)
def test_too_large_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(EnvelopeError):
        parse_envelope(tiny(**changes))

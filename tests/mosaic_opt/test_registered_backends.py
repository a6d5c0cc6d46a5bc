"""Backends of other distributions: listed by name alone, used if sound, and never in the way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from mosaic_opt import cli
from mosaic_opt.backends.base import Availability, Capability
from mosaic_opt.backends.entries import BACKENDS, entries, names
from mosaic_opt.backends.registry import availability, backend_class, listing, made, resolve
from mosaic_opt.errors import MosaicError
from mosaic_opt.solver import solve

from .distributions import BACKEND, install
from .strategies import solved_tiny, tiny_envelope

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "howto" / "backends.md"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder on the path, whose modules are forgotten after the test."""
    before = set(sys.modules)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for module in {*sys.modules} - before:
        if str(folder) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]


def python(code: str, *paths: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(p) for p in (*paths, ROOT))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


# ---------------------------------------------------------------- one that is sound


def test_it_is_there_by_name(site: Path) -> None:
    install(site, "sound")
    assert names() == (*BACKENDS, "mine")
    assert entries()["mine"].origin == "sound 1.0"
    kind = backend_class("mine")
    assert (kind.__module__, kind.name) == ("sound", "mine")
    assert resolve("mine") == kind()
    assert availability()["mine"] is Availability.AVAILABLE
    (listed,) = listing(["mine"])
    assert (listed.provides, listed.reason, listed.note) == (Capability.EXACT, "", "")


def test_it_solves(site: Path) -> None:
    install(site, "solves")
    solution = solve(tiny_envelope(), backend="mine")
    assert solution.status == "optimal"
    assert solution.optimum == solved_tiny().optimum
    assert solution.provenance["backend"] == "mine"


def test_an_unknown_name_lists_it(site: Path) -> None:
    install(site, "known")
    with pytest.raises(MosaicError, match=r"no backend 'x'; there are enumerate, .*, mine\.$"):
        resolve("x")


def test_names_import_no_code_of_others_and_little_of_ours(tmp_path: Path) -> None:
    install(tmp_path, "loud", f"import sys\nsys.stdout.write('imported ')\n{BACKEND}")
    code = (
        "import sys\n"
        "from mosaic_opt.backends.entries import names\n"
        "found = names()\n"
        "heavy = {'loud', 'numba', 'pydantic', 'ortools', 'cvxpy'} & set(sys.modules)\n"
        "sys.stdout.write(' '.join([*found, *heavy]))"
    )
    done = python(code, tmp_path)
    assert (done.stdout, done.stderr) == (" ".join([*BACKENDS, "mine"]), "")


def test_another_name_imports_no_code_of_others(tmp_path: Path) -> None:
    install(tmp_path, "loud", f"import sys\nsys.stdout.write('imported ')\n{BACKEND}")
    code = (
        "import sys\n"
        "from mosaic_opt.backends.registry import listing, resolve\n"
        "resolve('enumerate'), listing(['gp'])\n"
        "sys.stdout.write(str('loud' in sys.modules))"
    )
    assert python(code, tmp_path).stdout == "False"


# ---------------------------------------------------------------- those that are not

UNSOUND = {
    "raises": ("raise RuntimeError('no\\nlicence.')", "fails with RuntimeError: no licence"),
    "leaves": ("import sys\nsys.exit(3)", "fails with SystemExit: 3"),
    "syntax": ("def", "fails with SyntaxError"),
    "imports": ("import no_such_module", "fails with ModuleNotFoundError: No module named"),
    "lacks": ("Other = 1", "fails with AttributeError"),
    "number": ("Mine = 1", "is no subclass of mosaic_opt.Backend"),
    "plain": ("class Mine:\n    name = 'mine'", "is no subclass of mosaic_opt.Backend"),
    "other": (
        BACKEND.replace('"mine"', '"yours"'),
        "its name is 'yours', and it is registered as 'mine'",
    ),
    "half": (BACKEND.replace("def search", "def find"), "it has no search"),
    "nothing": (
        BACKEND.replace("= Capability.EXACT", "= Capability(0)"),
        "its `provides` is no Capability",
    ),
    "asks": (
        BACKEND.replace("return Availability.AVAILABLE", "raise OSError('no disk')"),
        "its availability fails with OSError: no disk",
    ),
    "truthy": (
        BACKEND.replace("return Availability.AVAILABLE", "return True"),
        "its availability is True, which is no Availability",
    ),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_an_unsound_one_is_a_sentence_and_leaves_the_others(site: Path, case: str) -> None:
    source, words = UNSOUND[case]
    before = {name: state for name, state in availability().items() if name != "mine"}
    install(site, f"unsound_{case}", source)
    listed = {each.name: each for each in listing()}
    assert listed["mine"].availability is Availability.BROKEN
    assert words in listed["mine"].reason
    assert "\n" not in listed["mine"].reason
    assert {name: state for name, state in availability().items() if name != "mine"} == before
    with pytest.raises(MosaicError, match=re.escape(words)) as caught:
        resolve("mine")
    assert str(caught.value).count("\n") == 0
    assert str(caught.value).endswith(".")
    assert resolve("enumerate") == backend_class("enumerate")()


def test_one_that_needs_options_says_so(site: Path) -> None:
    needs = BACKEND.replace("    @classmethod", "    licence: str\n\n    @classmethod", 1)
    install(site, "needs", needs)
    with pytest.raises(MosaicError, match="cannot be made with its default options: TypeError"):
        made("mine")


def test_one_that_cannot_run_says_why(site: Path) -> None:
    install(site, "absent", BACKEND.replace("Availability.AVAILABLE", "Availability.NOT_INSTALLED"))
    assert availability()["mine"] is Availability.NOT_INSTALLED
    with pytest.raises(MosaicError, match=r"Backend mine cannot run here: not installed\.$"):
        resolve("mine")


def test_two_that_share_a_name_are_both_named(site: Path) -> None:
    install(site, "first")
    install(site, "second")
    said = "registered by each of first 1.0 and second 1.0: keep one of them"
    assert listing(["mine"])[0].reason == said
    with pytest.raises(MosaicError, match=said):
        resolve("mine")


def test_of_one_distribution_twice_on_the_path_the_first_counts(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "twice", version="1.0")
    newer = tmp_path / "newer"
    newer.mkdir()
    install(newer, "twice", version="2.0")
    monkeypatch.syspath_prepend(str(newer))
    assert entries()["mine"].origin == "twice 2.0"
    assert entries()["mine"].clash == ""


@pytest.mark.parametrize("spoiled", ["entry_points.txt", "METADATA"])
def test_metadata_that_cannot_be_read_is_in_nobody_s_way(site: Path, spoiled: str) -> None:
    install(site, "sound2")
    install(site, "spoiled", name="other")
    (site / "spoiled-1.0.dist-info" / spoiled).write_bytes(b"[mosaic_opt.backends]\nother\n\xff")
    assert set(names()) >= {*BACKENDS, "mine"}
    assert resolve("mine").name == "mine"


# ---------------------------------------------------------------- the name of a built-in one


def test_a_built_in_name_is_not_taken_over(site: Path) -> None:
    install(site, "taker", BACKEND.replace('"mine"', '"enumerate"'), name="enumerate")
    note = (
        "taker 1.0 registers a backend under the name 'enumerate', which is built in: "
        "the built-in one is used."
    )
    assert names() == tuple(BACKENDS)
    assert {each.name: each.note for each in listing() if each.note} == {"enumerate": note}
    with pytest.warns(UserWarning, match=re.escape(note)):
        found = resolve("enumerate")
    assert type(found).__module__ == "mosaic_opt.backends.enumerate"
    assert "taker" not in sys.modules
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve("gp")


# ---------------------------------------------------------------- on the command line


def mosaic(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["mosaic", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0), *capsys.readouterr()


def test_backends_lists_all_of_them(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "shown")
    install(site, "shown_broken", "raise RuntimeError('no')", name="broken")
    install(site, "shown_taker", name="gp")
    code, out, err = mosaic(monkeypatch, capsys, "backends")
    assert (code, err) == (0, "")
    for words in (
        *BACKENDS,
        "shown 1.0",
        "broken: shown_broken:Mine fails with RuntimeError: no.",
        "shown_taker 1.0 registers a backend under the name 'gp'",
    ):
        assert words in out
    code, out, _ = mosaic(monkeypatch, capsys, "backends", "--json", "-")
    rows = {row["name"]: row for row in json.loads(out)["backends"]}
    assert list(rows) == [*BACKENDS, "broken", "mine"]
    assert rows["mine"] == {
        "name": "mine",
        "origin": "shown 1.0",
        "provides": "exact",
        "available": True,
        "reason": "",
        "note": "",
    }
    assert rows["broken"]["provides"] is None
    assert not rows["broken"]["available"]
    assert rows["gp"]["note"]


def test_help_and_refusals_list_all_of_them(tmp_path: Path) -> None:
    install(tmp_path, "helped")
    run = "import sys; sys.argv = ['mosaic', {}]; from mosaic_opt.cli import main; main()"
    env_wide = "import os; os.environ['COLUMNS'] = '200'; "
    for command in ("'solve', '--help'", "'compare', '--help'"):
        done = python(env_wide + run.format(command), tmp_path)
        assert ", ".join([*BACKENDS, "mine"]) in done.stdout
    done = python(run.format("'solve', '--example', 'table5', '--backend', 'x'"), tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(r"error: There is no backend 'x'; there are .*, mine\.\n", done.stderr)


def test_a_shadowed_name_is_one_note_on_stderr(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "noted", name="enumerate")
    code, out, err = mosaic(monkeypatch, capsys, "solve", "--example", "table5")
    assert code == 0
    assert "OPTIMAL" in out
    assert err.startswith("note: noted 1.0 registers a backend under the name 'enumerate'")
    assert err.count("\n") == 1


# ---------------------------------------------------------------- the page that shows how


def run_tests(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '.']))"
    return python(code, site, cwd=folder)


def test_the_page_s_backend_keeps_the_contract(tmp_path: Path) -> None:
    text = PAGE.read_text("utf-8")
    module, tests = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len([line for line in module.splitlines() if line.strip()]) <= 40
    (points,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    name, value = re.search(r'^(\w+) = "(.*)"$', points, re.MULTILINE).groups()
    assert '[project.entry-points."mosaic_opt.backends"]' in points
    install(tmp_path, "mosaic_random", module, name=name, value=value)
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_mosaic_random.py").write_text(tests, "utf-8")
    done = run_tests(folder, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d\d passed in", done.stdout.splitlines()[-1]), done.stdout


def test_the_contract_fails_one_that_breaks_it(tmp_path: Path) -> None:
    """The worst of all candidates, called the optimum."""
    search = "return Enumerate(workers=1).search(problem, limits, progress=progress)"
    worst = (
        "import dataclasses\n"
        f"        report = {search.removeprefix('return ')}\n"
        "        worst = max((o for o in report.outcomes if o.feasible), key=lambda o: o.loss,"
        " default=None)\n"
        "        return report if worst is None else"
        " dataclasses.replace(report, incumbent=worst, dual_bound=worst.loss)"
    )
    assert search in BACKEND
    install(tmp_path, "worst", BACKEND.replace(search, worst))
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_worst.py").write_text(
        "from mosaic_opt.testing import BackendContract\n\n\n"
        'class TestWorst(BackendContract):\n    name = "mine"\n',
        "utf-8",
    )
    done = run_tests(folder, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    for broken in (
        "test_incumbent_is_the_scalar_optimum",
        "test_bound_is_below_the_scalar_optimum",
        "test_exact_search_is_certified",
    ):
        assert f"FAILED test_worst.py::TestWorst::{broken}" in done.stdout

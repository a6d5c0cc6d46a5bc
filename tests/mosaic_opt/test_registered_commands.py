"""Commands of other packages: listed, called, and never in the way of the others."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from mosaic_opt import cli, cli_registered
from mosaic_opt.entry_points import registered

COMMAND = """
import sys
import typer

def command(name: str = "you", code: int = 0) -> None:
    \"\"\"Greet.\"\"\"
    typer.echo(f"hello {name}")
    raise typer.Exit(code)
"""


def install(folder: Path, module: str, source: str = COMMAND, *, name: str = "greet") -> None:
    """Write a distribution that registers ``module:command`` as a command."""
    (folder / f"{module}.py").write_text(textwrap.dedent(source), "utf-8")
    meta = folder / f"{module}-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    points = f"[mosaic_opt.commands]\n{name} = {module}:command\n"
    (meta / "entry_points.txt").write_text(points, "utf-8")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder on the path, whose modules and commands are forgotten after the test."""
    before = set(sys.modules)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    cli_registered._by_name.cache_clear()
    yield folder
    cli_registered._by_name.cache_clear()
    for module in {*sys.modules} - before:
        if str(folder) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["mosaic", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


Output = pytest.CaptureFixture[str]


def test_it_is_called_with_its_options(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    install(site, "greeter")
    assert run(monkeypatch, "greet", "--name", "there") == 0
    assert capsys.readouterr().out == "hello there\n"
    assert run(monkeypatch, "greet", "--code", "1") == 1


def test_help_lists_it(site: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    install(site, "greeter")
    assert run(monkeypatch, "--help") == 0
    out = capsys.readouterr().out
    assert "greet" in out
    assert "Greet." in out
    assert "solve" in out


def test_no_other_command_loads_it(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    install(site, "greeter")
    assert run(monkeypatch, "schema") == 0
    capsys.readouterr()
    assert "greeter" not in sys.modules


def test_a_command_of_ours_is_used_in_spite_of_it(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    install(site, "rival", name="examples")
    assert run(monkeypatch, "examples") == 0
    assert "hello" not in capsys.readouterr().out


def test_one_that_cannot_be_loaded_says_why(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    install(site, "broken", "raise RuntimeError('no\\nlicence.')")
    assert run(monkeypatch, "greet", "--name", "x") == 2
    assert capsys.readouterr().err == (
        "error: Command 'greet' of broken 1.0 cannot be loaded: RuntimeError: no licence.\n"
    )
    assert run(monkeypatch, "--help") == 0
    assert run(monkeypatch, "schema") == 0


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import a_package_that_is_not_there", "ModuleNotFoundError: No module named"),
        ("raise ImportError", "ImportError.\n"),
        ("raise SystemExit(3)", "SystemExit: 3.\n"),
        ("def command(:", "SyntaxError: "),
        ("other = 1", "AttributeError: module 'broken' has no attribute 'command'.\n"),
        ("command = 1", "TypeError: "),
        ("def command(x: list[list[int]]) -> None: ...", "AssertionError: "),
    ],
)
def test_whatever_it_raises_the_others_go_on(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, source: str, words: str
) -> None:
    install(site, "broken", source)
    assert run(monkeypatch, "--help") == 0
    out = capsys.readouterr().out
    assert "greet" in out
    assert "solve" in out
    assert run(monkeypatch, "schema") == 0
    capsys.readouterr()
    assert run(monkeypatch, "greet", "--help") == 0
    assert "cannot be loaded" in capsys.readouterr().out
    assert run(monkeypatch, "greet") == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: Command 'greet' of broken 1.0 cannot be loaded: {words}")
    assert err.count("\n") == 1


def test_two_of_one_name_are_neither(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    install(site, "one")
    install(site, "two")
    assert [point.origin for point in registered("mosaic_opt.commands") if point.name == "greet"]
    assert run(monkeypatch, "greet") == 2
    assert "registered by each of one 1.0 and two 1.0: keep one" in capsys.readouterr().err


def test_an_unknown_command_is_one_sentence(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    assert run(monkeypatch, "gret") == 2
    assert capsys.readouterr().err.startswith("error: No such command 'gret'.")

"""Who may import whom, what an import may load, and who may print."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("perfmodel", "lawfit", "moe_ref", "mosaic_opt")
HEAVY = ("torch", "ortools", "cvxpy", "numba", "scipy.optimize", "networkx")
PRINTERS = (ROOT / "mosaic_opt" / "cli.py", ROOT / "mosaic_opt" / "studio")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def python(code: str, *args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that sees the packages in `cwd` first."""
    env = os.environ | {"PYTHONPATH": str(cwd), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


# ---------------------------------------------------------------- what an import loads


@pytest.mark.parametrize("package", PACKAGES)
def test_import_loads_no_heavy_module(package: str) -> None:
    result = python(f"import sys, {package}; sys.stdout.write(' '.join(sys.modules))")
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert package in loaded
    assert loaded.isdisjoint(HEAVY), (
        f"`import {package}` loads {sorted(loaded & set(HEAVY))}: import them where they are used"
    )


def test_import_mosaic_opt_prints_nothing() -> None:
    result = python("import mosaic_opt")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


# ---------------------------------------------------------------- who imports whom

LINT = (
    "import sys; from importlinter.cli import lint_imports; "
    "sys.exit(lint_imports(config_filename=sys.argv[1], no_cache=True))"
)

# The smallest tree that keeps every contract: module -> what it imports.
TREE: dict[str, list[str]] = {
    "perfmodel.__init__": [],
    "perfmodel.step": ["numpy", "numba", "networkx"],
    "lawfit.__init__": [],
    "lawfit.fit": ["numpy", "scipy.optimize"],
    "moe_ref.__init__": [],
    "moe_ref.model": ["torch", "perfmodel.step"],
    "mosaic_opt.__init__": ["mosaic_opt.solver"],
    "mosaic_opt.__main__": ["mosaic_opt.cli"],
    "mosaic_opt.cli": ["typer", "rich", "mosaic_opt.solver"],
    "mosaic_opt.problem": ["perfmodel.step", "lawfit.fit", "mosaic_opt.backends.base"],
    "mosaic_opt.certificate": ["mosaic_opt.problem", "mosaic_opt.backends.base"],
    "mosaic_opt.solver": ["mosaic_opt.certificate", "mosaic_opt.backends.registry"],
    "mosaic_opt.backends.__init__": [],
    "mosaic_opt.backends.base": [],
    "mosaic_opt.backends.registry": ["mosaic_opt.backends.base", "mosaic_opt.backends.enumerate"],
    "mosaic_opt.backends.enumerate": ["mosaic_opt.backends.base", "mosaic_opt.problem"],
    "mosaic_opt.backends.cpsat": ["ortools.sat", "mosaic_opt.backends.base", "mosaic_opt.problem"],
    "mosaic_opt.backends.gp": ["cvxpy", "mosaic_opt.backends.base", "mosaic_opt.problem"],
}


def lint_tree(root: Path, module: str | None = None, imports: str | None = None) -> str:
    """Write the smallest tree, with one more import in one module, and return the verdicts."""
    for name, imported in TREE.items():
        path = root / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        extra = [imports] if name == module and imports else []
        path.write_text("".join(f"import {each}\n" for each in imported + extra))
    result = python(LINT, str(ROOT / "pyproject.toml"), cwd=root)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return re.sub(r"\x1b\[[0-9;]*m", "", result.stdout + result.stderr)  # colours


def broken(report: str) -> list[str]:
    """Return the names of the contracts that the report calls broken."""
    return [line.rsplit(" BROKEN", 1)[0] for line in report.splitlines() if " BROKEN" in line]


def test_repository_keeps_the_import_contracts() -> None:
    result = python(LINT, "pyproject.toml")
    assert result.returncode == 0, result.stdout + result.stderr


def test_smallest_tree_keeps_the_import_contracts(tmp_path: Path) -> None:
    report = lint_tree(tmp_path)
    assert broken(report) == []
    assert "0 broken" in report


@pytest.mark.parametrize(
    ("module", "imports", "contract"),
    [
        ("perfmodel.step", "lawfit.fit", "mosaic_opt and moe_ref stand on"),
        ("lawfit.fit", "perfmodel.step", "mosaic_opt and moe_ref stand on"),
        ("perfmodel.step", "mosaic_opt.problem", "mosaic_opt and moe_ref stand on"),
        ("lawfit.fit", "moe_ref", "mosaic_opt and moe_ref stand on"),
        ("mosaic_opt.problem", "moe_ref.model", "mosaic_opt and moe_ref stand on"),
        ("moe_ref.model", "lawfit.fit", "moe_ref uses perfmodel only"),
        ("perfmodel.step", "torch", "torch only in"),
        ("mosaic_opt.solver", "torch", "torch only in"),
        ("mosaic_opt.solver", "ortools.sat.python.cp_model", "ortools only in"),
        ("mosaic_opt.backends.gp", "ortools", "ortools only in"),
        ("perfmodel.step", "cvxpy", "cvxpy only in"),
        ("mosaic_opt.backends.cpsat", "cvxpy", "cvxpy only in"),
        ("mosaic_opt.certificate", "mosaic_opt.backends.enumerate", "mosaic_opt.certificate"),
        ("mosaic_opt.certificate", "mosaic_opt.backends.registry", "mosaic_opt.certificate"),
        ("mosaic_opt.problem", "mosaic_opt.backends.cpsat", "mosaic_opt.certificate"),
        ("mosaic_opt.backends.cpsat", "mosaic_opt.backends.enumerate", "no backend imports"),
        ("mosaic_opt.backends.gp", "mosaic_opt.backends.registry", "no backend imports"),
        ("mosaic_opt.backends.base", "mosaic_opt.backends.enumerate", "no backend imports"),
    ],
)
def test_each_contract_notices_a_breach(
    tmp_path: Path, module: str, imports: str, contract: str
) -> None:
    names = broken(lint_tree(tmp_path, module, imports))
    assert any(name.startswith(contract) for name in names), names


# ---------------------------------------------------------------- who prints


def printed_lines(source: str) -> list[int]:
    """Return the lines that name the built-in `print`, called or handed on."""
    return sorted(
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name) and node.id == "print"
    )


def test_only_the_command_line_and_the_studio_print() -> None:
    quiet = [p for p in SOURCES if not any(p == o or o in p.parents for o in PRINTERS)]
    assert quiet
    found = [f"{p.relative_to(ROOT)}:{n}" for p in quiet for n in printed_lines(p.read_text())]
    assert found == []


def test_printed_lines_sees_a_call_and_an_alias() -> None:
    assert printed_lines("x = 1\nprint(x)\nemit = print\n") == [2, 3]
    assert printed_lines("def show(printer):\n    printer('print')\n") == []

"""The command line, as a user runs it."""

from __future__ import annotations

import sys

import pytest

from mosaic_opt import cli

from .strategies import Run


@pytest.fixture
def mosaic(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs ``mosaic`` and returns exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mosaic", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return int(left.value.code or 0), *capsys.readouterr()

    return run

"""Profiles and fixtures that every test shares."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# Both are deterministic: a law that fails, fails on every machine. `ci` looks at more cases.
settings.register_profile("dev", derandomize=True, deadline=None, max_examples=50)
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=200,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_configure() -> None:
    """Take interrupts, which some tests send: a shell starts what runs behind it without them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `data` on whatever asks for the measurement tables."""
    for item in items:
        if "shared_data" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.data)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of the measurement tables, which are not part of the repository.

    `MOSAIC_DATA` names it; without it a checkout may have them beside it. Where there are none,
    the tests that need them are skipped; a `MOSAIC_DATA` that leads nowhere is an error.
    """
    named = os.environ.get("MOSAIC_DATA")
    if named:
        path = Path(named).expanduser()
        if not path.is_dir():
            pytest.fail(f"MOSAIC_DATA={named} is not a folder: unset it, or name one")
        return path
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("no measurement tables: MOSAIC_DATA names their folder")
    return path

"""The frameworks whose own releases the tests of the adapters use."""

import os
import sys
from importlib.util import find_spec

import pytest

from tests.e2e.harness import ROOT

TITAN = ROOT / ".venv-torchtitan" / "bin" / "python"
"""torchtitan needs older packages than the other frameworks, and so an environment of its own."""


def need(package: str) -> None:
    """Skip the test if ``package`` is missing. Where CI runs, that is a failure."""
    if find_spec(package) is not None:
        return
    _miss(f"{package} is not installed: run make frameworks")


def torchtitan() -> str:
    """The interpreter that has torchtitan; skips as :func:`need` does."""
    if find_spec("torchtitan") is not None:
        return sys.executable
    if not TITAN.exists():
        _miss("torchtitan is not installed: run make torchtitan")
    return str(TITAN)


def _miss(why: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)

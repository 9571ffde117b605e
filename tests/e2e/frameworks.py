"""The frameworks whose own releases the tests of the adapters use."""

import os
from importlib.util import find_spec

import pytest


def need(package: str) -> None:
    """Skip the test if ``package`` is missing. Where CI runs, that is a failure."""
    if find_spec(package) is not None:
        return
    missing = f"{package} is not installed: run make frameworks"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)

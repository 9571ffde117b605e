"""Fixtures of the daemon's tests. Everything started is stopped through its own handle."""

from __future__ import annotations

import os

import pytest

from tests import values
from tests.daemon.redises import guarded, member_url
from tmd import embedded
from tmd.daemon.store import RedisStore
from tmd.testing import MemoryStore

URLS = {
    "redis": "redis_url",
    "guarded redis": "guarded_url",
    "guarded valkey": "valkey_url",
    "fakeredis": "fake_url",
}
"""Fixture of each server that must serve a store."""


@pytest.fixture(scope="session")
def fake_url():
    """fakeredis behind TCP: the demo's last resort must pass the same tests."""
    pytest.importorskip("fakeredis")
    with embedded.fake() as server:
        yield server.url


@pytest.fixture(scope="session")
def guarded_url(redis_binary, tmp_path_factory):
    """A Redis where members may do only what the shipped ACL allows."""
    with guarded(redis_binary, tmp_path_factory.mktemp("guarded")) as port:
        yield member_url(port)


@pytest.fixture(scope="session")
def valkey_url(valkey_binary, tmp_path_factory):
    """A Valkey where members may do only what the shipped ACL allows."""
    with guarded(valkey_binary, tmp_path_factory.mktemp("valkey")) as port:
        yield member_url(port)


@pytest.fixture
def redis(redis_binary, tmp_path):
    """A Redis of the test's own, which it may kill."""
    (tmp_path / "redis").mkdir()
    with embedded.redis(tmp_path / "redis", binary=redis_binary) as server:
        yield server


@pytest.fixture(params=["memory", "redis", "guarded redis", "guarded valkey", "fakeredis"])
async def clients(request):
    """A function that opens connections to one fresh store."""
    opened = []
    if request.param == "memory":
        memory = MemoryStore()
        opener = memory.client
    else:
        url = request.getfixturevalue(URLS[request.param])
        cluster = f"t{os.urandom(4).hex()}"

        def opener():
            return RedisStore(url, cluster, b"key")

    def client():
        opened.append(opener())
        return opened[-1]

    yield client
    for store in opened:
        await store.close()


@pytest.fixture
def store(clients):
    return clients()


@pytest.fixture
def record():
    """A function that makes records of a job of two ranks."""

    def make(revision=1, lease_epoch=1, **changes):
        return values.record("h1", "h2", revision=revision, lease_epoch=lease_epoch, **changes)

    return make

"""The error about Redis names the true cause, the place without its login, and what to do."""

from __future__ import annotations

import contextlib
import socket

import pytest

from tests.daemon.redises import encrypted, guarded
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import HostStatus
from tmd.daemon.redis_client import connect
from tmd.daemon.redis_errors import explained, misplaced, shown
from tmd.daemon.store import RedisStore

LOGIN_HINT = "mend the login in [redis] url"


async def refusal(url):
    """What a heartbeat says that Redis does not take."""
    store = RedisStore(url, "c", b"key", timeout_s=2.0)
    async with contextlib.aclosing(_Closing(store)):
        with pytest.raises(StoreUnavailable) as refused:
            await store.put_host(HostStatus("h1", "i"), ttl_s=5, wake=False)
    return str(refused.value)


class _Closing:
    def __init__(self, store):
        self._store = store

    async def aclose(self):
        await self._store.close()


async def configured(url, *command):
    operator = connect(url, 2.0)
    await operator.execute_command(*command)
    await operator.aclose()


async def test_out_of_memory(redis):
    await configured(redis.url, "CONFIG", "SET", "maxmemory", "1")

    assert "out of memory and refuses writes; raise its maxmemory" in await refusal(redis.url)


async def test_a_read_only_replica(redis):
    await configured(redis.url, "REPLICAOF", "127.0.0.1", "1")

    assert "read-only replica; point [redis] url at the master" in await refusal(redis.url)


async def test_a_wrong_password_is_named_and_not_shown(redis_binary, tmp_path):
    with guarded(redis_binary, tmp_path) as port:
        said = await refusal(f"redis://tmd:s3cret@127.0.0.1:{port}/0")

    assert said.startswith(f"redis at 127.0.0.1:{port}/0: Redis does not accept")
    assert LOGIN_HINT in said
    assert "s3cret" not in said


async def test_a_login_is_missing(redis_binary, tmp_path):
    with guarded(redis_binary, tmp_path) as port:
        assert LOGIN_HINT in await refusal(f"redis://127.0.0.1:{port}/0")


async def test_a_user_without_the_rights(redis_binary, tmp_path):
    with guarded(redis_binary, tmp_path) as port:
        said = await refusal(f"redis://tmd-alerts:subscriber@127.0.0.1:{port}/0")

    assert "not permitted to do this; give it the rights listed in the redis.acl" in said


async def test_a_certificate_nobody_vouches_for(redis_binary, tmp_path):
    with encrypted(redis_binary, tmp_path) as (port, _):
        said = await refusal(f"rediss://127.0.0.1:{port}/0")

    assert "certificate of Redis is not trusted; name the authority" in said


async def test_a_port_without_tls(redis_binary, tmp_path):
    with guarded(redis_binary, tmp_path) as port:
        said = await refusal(f"rediss://127.0.0.1:{port}/0")

    assert "rediss:// meets a port without TLS" in said


async def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    assert "nothing listens there; start Redis" in await refusal(f"redis://127.0.0.1:{port}/0")


async def test_a_socket_that_is_not_there(tmp_path):
    said = await refusal(f"unix://{tmp_path}/none.sock")

    assert said.startswith(f"redis at {tmp_path}/none.sock: a file that is needed does not exist")
    assert "of unix:// it is the socket: start Redis" in said


async def test_something_that_does_not_answer():
    """It takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = await refusal(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")

    assert "does not answer in time" in said


@pytest.mark.parametrize("error", [TimeoutError(), OSError(), ConnectionResetError(), KeyError()])
def test_an_error_without_a_text_has_a_sentence_all_the_same(error):
    said = explained(error, "redis at x")

    assert not said.rstrip().endswith(":")
    assert len(said) > len("redis at x: ")


def test_what_the_system_said_beneath_counts():
    error = RuntimeError("Error connecting")
    error.__context__ = ConnectionRefusedError(111, "Connection refused")

    assert "nothing listens there" in explained(error, "redis at x")


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://user:pw@h:1/2", "redis at h:1/2"),
        ("rediss://:pw@h:1/2?ssl_ca_certs=/x", "redis at h:1/2"),
        ("redis+sentinel://u:p@a:1,b:2/main/0", "redis at a:1,b:2/main/0"),
        ("unix:///run/redis.sock?db=1", "redis at /run/redis.sock"),
        ("unix://u:p@/run/redis.sock", "redis at /run/redis.sock"),
    ],
)
def test_a_place_is_shown_without_its_login(url, place):
    assert shown(url) == place


def test_a_type_that_is_gone_when_one_looks_is_still_an_error():
    assert "delete it" in misplaced({}, "redis at x")

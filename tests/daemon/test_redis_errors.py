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

LOGIN_HINT = "correct the login in [redis] url"


async def refusal(url):
    """The error of a heartbeat that Redis refuses."""
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


async def test_redis_out_of_memory_is_explained(redis):
    await configured(redis.url, "CONFIG", "SET", "maxmemory", "1")

    assert "out of memory and refuses writes; raise its maxmemory" in await refusal(redis.url)


async def test_a_read_only_replica_is_explained(redis):
    await configured(redis.url, "REPLICAOF", "127.0.0.1", "1")

    assert "read-only replica; point [redis] url at the master" in await refusal(redis.url)


async def test_a_wrong_password_is_named_and_not_shown(redis_binary, tmp_path):
    with guarded(redis_binary, tmp_path) as port:
        message = await refusal(f"redis://tmd:s3cret@127.0.0.1:{port}/0")

    assert message.startswith(f"redis at 127.0.0.1:{port}/0: Redis does not accept")
    assert LOGIN_HINT in message
    assert "s3cret" not in message


async def test_a_missing_login_is_explained(redis_binary, tmp_path):
    with guarded(redis_binary, tmp_path) as port:
        assert LOGIN_HINT in await refusal(f"redis://127.0.0.1:{port}/0")


async def test_missing_rights_are_explained(redis_binary, tmp_path):
    with guarded(redis_binary, tmp_path) as port:
        message = await refusal(f"redis://tmd-alerts:subscriber@127.0.0.1:{port}/0")

    assert "not permitted to do this; give it the rights listed in the redis.acl" in message


async def test_an_untrusted_certificate_is_explained(redis_binary, tmp_path):
    with encrypted(redis_binary, tmp_path) as (port, _):
        message = await refusal(f"rediss://127.0.0.1:{port}/0")

    assert "certificate of Redis is not trusted; name its certificate authority" in message


async def test_a_port_without_tls_is_explained(redis_binary, tmp_path):
    with guarded(redis_binary, tmp_path) as port:
        message = await refusal(f"rediss://127.0.0.1:{port}/0")

    assert "the port does not use TLS" in message


async def test_a_refused_connection_is_explained():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    assert "the connection is refused; start Redis" in await refusal(f"redis://127.0.0.1:{port}/0")


async def test_a_missing_socket_is_explained(tmp_path):
    message = await refusal(f"unix://{tmp_path}/none.sock")

    assert message.startswith(f"redis at {tmp_path}/none.sock: a required file does not exist")
    assert "for unix:// it is the socket: start Redis" in message


async def test_a_server_that_does_not_answer_is_explained():
    """It accepts the connection and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        message = await refusal(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")

    assert "does not answer in time" in message


@pytest.mark.parametrize("error", [TimeoutError(), OSError(), ConnectionResetError(), KeyError()])
def test_an_error_without_text_still_gives_a_sentence(error):
    message = explained(error, "redis at x")

    assert not message.rstrip().endswith(":")
    assert len(message) > len("redis at x: ")


def test_the_underlying_system_error_is_explained():
    error = RuntimeError("Error connecting")
    error.__context__ = ConnectionRefusedError(111, "Connection refused")

    assert "the connection is refused" in explained(error, "redis at x")


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://user:pw@h:1/2", "redis at h:1/2"),
        ("rediss://:pw@h:1/2?ssl_ca_certs=/x", "redis at h:1/2"),
        ("redis+sentinel://u:p@a:1,b:2/main/0", "redis at a:1,b:2/main/0"),
        ("unix:///run/redis.sock?db=1", "redis at /run/redis.sock"),
        ("unix://u:p@/run/redis.sock", "redis at /run/redis.sock"),
        ("redis://?password=hunter2", "redis"),
        ("redis://tmd:77/hunter2@127.0.0.1:6399/0", "redis at 127.0.0.1:6399/0"),
        ("redis://tmd:hunt?er2@127.0.0.1:6399/0", "redis"),
    ],
)
def test_a_url_is_shown_without_its_login(url, place):
    assert shown(url) == place


def test_a_wrong_type_that_has_vanished_is_still_an_error():
    assert "delete it" in misplaced({}, "redis at x")

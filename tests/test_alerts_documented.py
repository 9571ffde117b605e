"""The page on alerts: its schema is the struct, its example runs, its promises hold."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest

from docs.generate.parts import filled
from tests.values import alert
from tmd import embedded
from tmd.config import store_key
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import Alert
from tmd.daemon.store import RedisStore

ROOT = Path(__file__).parents[1]
PAGE = filled((ROOT / "docs" / "operate" / "alerts.md").read_text())
EXAMPLE = ROOT / "examples" / "follow_alerts.py"
WITHIN_S = 30.0
SECRET = "0123456789abcdef"


def schema() -> str:
    return json.dumps(msgspec.json.schema(Alert), indent=2)


def test_the_schema_is_current():
    (shown,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)

    assert shown.strip() == schema()


def test_the_example_is_the_file():
    (shown,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

    assert shown == EXAMPLE.read_text()


@contextmanager
def lasting_redis(binary, folder):
    """A Redis on a socket that keeps its data over restarts."""
    path = folder / "redis.sock"
    arguments = ["--port", "0", "--unixsocket", str(path), "--dir", str(folder), "--save", ""]
    server = subprocess.Popen(
        [binary, *arguments, "--appendonly", "yes", "--appendfsync", "always"],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield f"unix://{path}"
    finally:
        server.kill()
        server.wait()
        path.unlink(missing_ok=True)


def empty_redis(binary, folder):
    return embedded.redis(folder, binary=binary)


@asynccontextmanager
async def subscriber(*arguments):
    """Lines of a program; closed by the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        stdout=asyncio.subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if not k.startswith("TMD_")},
    )

    async def line():
        async with asyncio.timeout(WITHIN_S):
            return (await process.stdout.readline()).decode()

    try:
        yield line
    finally:
        process.kill()
        await process.wait()


async def publish(store, *numbers):
    """As a daemon does: until Redis has taken it."""
    async with asyncio.timeout(WITHIN_S):
        for number in numbers:
            while True:
                try:
                    await store.publish_alert(alert(id=f"h1-{number}"))
                    break
                except StoreUnavailable:
                    await asyncio.sleep(0.01)


def id_of(line):
    return json.loads(line[line.index("{") :])["id"]


@pytest.fixture
def subscribe(tmp_path):
    """The ways to follow that must lose nothing, by name."""
    url = f"unix://{tmp_path}/redis.sock"
    config = tmp_path / "tmd.toml"
    config.write_text(f"[cluster]\nname = 'c'\nsecret = '{SECRET}'\n[redis]\nurl = '{url}'\n")
    verb = ("-m", "tmd.cli", "events", "--follow", "--json", "-c", str(config))
    ways = {"example": (str(EXAMPLE), url, "c"), "verb": verb}
    return lambda way: subscriber(*ways[way])


@pytest.mark.parametrize("way", ["example", "verb"])
async def test_a_subscriber_loses_nothing_over_a_restart_of_redis(
    way, subscribe, redis_binary, tmp_path
):
    """Redis is killed and comes back with its data: all that came since, nothing twice."""
    store = RedisStore(f"unix://{tmp_path}/redis.sock", "c", store_key(SECRET.encode(), "c"))
    try:
        async with AsyncExitStack() as stack:
            with lasting_redis(redis_binary, tmp_path):
                await publish(store, 1, 2)
                line = await stack.enter_async_context(subscribe(way))
                received = [id_of(await line()) for _ in range(2)]
            with lasting_redis(redis_binary, tmp_path):
                await publish(store, 2, 3, 4)
                received += [id_of(await line()) for _ in range(2)]
    finally:
        await store.close()

    assert received == ["h1-1", "h1-2", "h1-3", "h1-4"]


@pytest.mark.parametrize("words", [(), ("redis://h",)])
def test_the_example_without_arguments_says_how_it_is_called(words):
    done = subprocess.run(
        [sys.executable, EXAMPLE, *words], capture_output=True, text=True, timeout=60
    )

    assert (done.returncode, done.stderr.split()[0]) == (1, "usage:")


def test_the_example_ends_with_a_wrong_password(redis_binary, tmp_path):
    """It must not wait for ever, as while Redis is away."""
    with embedded.redis(tmp_path, binary=redis_binary) as server:
        url = server.url.replace("://", "://nobody:wrong@", 1)
        done = subprocess.run(
            [sys.executable, EXAMPLE, url, "c"], capture_output=True, text=True, timeout=60
        )

    assert done.returncode == 1
    assert "check user and password" in done.stderr


async def test_after_an_emptied_redis_the_verb_says_only_what_is_new(
    subscribe, redis_binary, tmp_path
):
    """The daemons publish their journals again: ids that were printed are not printed again."""
    store = RedisStore(f"unix://{tmp_path}/redis.sock", "c", store_key(SECRET.encode(), "c"))
    try:
        async with AsyncExitStack() as stack:
            with empty_redis(redis_binary, tmp_path):
                await publish(store, 1, 2)
                line = await stack.enter_async_context(subscribe("verb"))
                received = [id_of(await line()) for _ in range(2)]
            with empty_redis(redis_binary, tmp_path):
                await publish(store, 1, 2, 3)
                received.append(id_of(await line()))
    finally:
        await store.close()

    assert received == ["h1-1", "h1-2", "h1-3"]

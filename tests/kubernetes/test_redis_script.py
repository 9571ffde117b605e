"""The three Redis of the chart with their Sentinels, as its script starts them: real servers."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.kubernetes.conftest import SECRET, until
from tests.marks import program
from tests.slurm import free_ports
from tmd.config import parse
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.requests import DrainRequest
from tmd.daemon.store import RedisStore, open_store

SCRIPT = Path(__file__).parents[2] / "packaging" / "helm" / "tmd" / "files" / "redis.sh"
WITHIN_S = 60.0
PASSWORD = """hunter 2'"\\# $HOME `id` \\n%@:/?&=*"""
"""With every sign that a shell, a configuration of Redis or an address takes for its own."""


class Pods:
    """Of each of three addresses of the loopback a server and a Sentinel."""

    def __init__(self, folder: Path) -> None:
        for name in ("redis-server", "redis-cli"):
            program(name, "redis-server")
        self.folder = folder
        net = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
        self.hosts = [f"{net}.{number}" for number in (1, 2, 3)]
        self.redis, self.sentinel = map(str, free_ports(2))
        self.processes: dict[tuple[str, str], subprocess.Popen[bytes]] = {}

    def start(self, host: str) -> None:
        """With an empty folder, as of a new pod."""
        for part in ("sentinel", "redis"):
            data = self.folder / host / part
            shutil.rmtree(data, ignore_errors=True)
            data.mkdir(parents=True)
            known = {"HOSTS": " ".join(self.hosts), "ME": host, "BIND": host, "DATA": str(data)}
            known |= {"REDIS_PORT": self.redis, "SENTINEL_PORT": self.sentinel}
            known |= {"REDIS_PASSWORD": PASSWORD, "DOWN_AFTER_MS": "1000", "FAILOVER_MS": "3000"}
            with (self.folder / f"{host}-{part}.log").open("ab") as log:
                self.processes[host, part] = subprocess.Popen(
                    ["sh", str(SCRIPT), part], env={**os.environ, **known}, stdout=log, stderr=log
                )

    def stop(self, host: str) -> None:
        for part in ("sentinel", "redis"):
            process = self.processes.pop((host, part), None)
            if process is not None:
                process.kill()
                process.wait()

    def ask(self, host: str, port: str, *words: str, password: str = PASSWORD) -> str:
        known = {**os.environ, **({"REDISCLI_AUTH": password} if password else {})}
        done = subprocess.run(
            ["redis-cli", "-h", host, "-p", port, *words], env=known, capture_output=True, text=True
        )
        return done.stdout

    def answers(self, host: str, port: str) -> bool:
        return "PONG" in self.ask(host, port, "ping")

    def masters(self) -> set[str]:
        return {h for h in self.hosts if "role:master" in self.ask(h, self.redis, "info")}

    def replicas(self) -> int:
        return sum("master_link_status:up" in self.ask(h, self.redis, "info") for h in self.hosts)

    def holders(self) -> int:
        """How many servers have a key."""
        return sum(self.ask(h, self.redis, "dbsize").strip() not in ("", "0") for h in self.hosts)

    def both_known(self, host: str) -> bool:
        """Whether the Sentinel there knows both replicas."""
        answer = self.ask(host, self.sentinel, "sentinel", "replicas", "tmd")
        return answer.splitlines().count("name") == 2


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    found = Pods(tmp_path)
    try:
        yield found
    finally:
        for host in found.hosts:
            found.stop(host)


@asynccontextmanager
async def store_of(pods: Pods) -> AsyncIterator[RedisStore]:
    places = ",".join(f"{host}:{pods.sentinel}" for host in pods.hosts)
    word = quote(PASSWORD, safe="")
    url = f"redis+sentinel://:{word}@{places}/tmd/0?sentinel_password={word}"
    settings, _ = parse({"cluster": {"name": "c", "secret": SECRET}, "redis": {"url": url}})
    assert settings is not None
    store = open_store(settings)
    try:
        yield store
    finally:
        await store.close()


@pytest.mark.thorough
async def test_a_master_that_is_lost_is_followed_by_one_that_has_its_data(pods: Pods) -> None:
    """Also where its pod comes back at once, empty: it becomes a replica."""
    for host in pods.hosts:
        pods.start(host)
    first = pods.hosts[0]
    await until(lambda: pods.masters() == {first}, "the first is the master", WITHIN_S)
    await until(lambda: pods.replicas() == 2, "the others follow", WITHIN_S)
    for host in pods.hosts:
        await until(partial(pods.both_known, host), "they are known", WITHIN_S)
    async with store_of(pods) as store:
        await until(lambda: asked(store), "tmd finds the master", WITHIN_S)
        await until(lambda: pods.holders() == 3, "the others have it", WITHIN_S)
        pods.stop(first)
        pods.start(first)
        await until(lambda: pods.masters() - {first}, "another is the master", WITHIN_S)
        await until(lambda: pods.replicas() == 2, "the first follows", WITHIN_S)
        await until(lambda: kept(store), "tmd finds the new master", WITHIN_S)

        assert [d.host for d in (await store.snapshot()).drains] == ["n1"]
    assert len(pods.masters()) == 1


async def test_nobody_without_the_password_is_answered(pods: Pods) -> None:
    """Neither by a server nor by a Sentinel. Whoever knows it is, whatever signs it has."""
    first = pods.hosts[0]
    pods.start(first)
    for port in (pods.redis, pods.sentinel):
        await until(partial(pods.answers, first, port), "it answers", WITHIN_S)

        assert "NOAUTH" in pods.ask(first, port, "info", password="")
    async with store_of(pods) as store:
        await until(lambda: asked(store), "tmd finds the master", WITHIN_S)


@pytest.mark.parametrize(("password", "says"), [("", "it is empty"), ("a\n", "has a line break")])
def test_a_password_that_cannot_be_used_is_refused(
    tmp_path: Path, password: str, says: str
) -> None:
    known = {"HOSTS": "h", "ME": "h", "DATA": str(tmp_path), "REDIS_PASSWORD": password}
    command = ["sh", str(SCRIPT), "redis"]
    done = subprocess.run(command, env={**os.environ, **known}, capture_output=True, text=True)

    assert done.returncode != 0
    assert says in done.stderr
    assert "redis-password" in done.stderr


async def asked(store: RedisStore) -> bool:
    try:
        await store.drain(DrainRequest("n1", "r", by="ann"))
    except StoreUnavailable:
        await asyncio.sleep(0.1)
        return False
    return True


async def kept(store: RedisStore) -> bool:
    try:
        return bool((await store.snapshot()).drains)
    except StoreUnavailable:
        await asyncio.sleep(0.1)
        return False


def test_the_script_is_one_of_the_plain_shell() -> None:
    done = subprocess.run(["sh", "-n", str(SCRIPT)], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")

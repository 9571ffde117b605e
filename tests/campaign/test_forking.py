"""Processes of a campaign start by fork: a worker that imports torch costs seconds of a core."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tmd.campaign import faulty_detector
from tmd.campaign.faults.process import state_of
from tmd.campaign.forking import fork_server
from tmd.demo.cluster import kill, pids
from tmd.testing.clients import until


@pytest.fixture(scope="module")
def prefix() -> Iterator[tuple[str, ...]]:
    with fork_server(compiler=False) as found:
        yield found


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tmd.toml"
    path.write_text(
        f'[cluster]\nname = "forking"\nsecret = "{"k" * 32}"\n'
        f'[host]\nname = "h1"\nsocket = "{tmp_path}/tmd.sock"\nstate_dir = "{tmp_path}"\n'
    )
    return path


def launched(
    prefix: tuple[str, ...], config: Path, script: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` as the only worker of a launcher, all by fork."""
    file = config.with_name("script.py")
    file.write_text(script)
    verb = ("-P", "-m", "tmd.cli", "launch", "--job", "j", "--nnodes", "1", *options)
    return subprocess.run(
        (*prefix, sys.executable, *verb, "--", str(file)),
        env={**os.environ, "TMD_CONFIG": str(config)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_launched_worker_inherits_torch(prefix: tuple[str, ...], config: Path) -> None:
    """The launcher is tmd's own, and its worker has torch before the script's first line."""
    script = "import os, sys; print('torch' in sys.modules, os.getppid())"
    done = launched(prefix, config, script, "--max-restarts", "0")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True "), done.stderr


def test_a_worker_that_ends_removes_nothing_of_its_launcher(
    prefix: tuple[str, ...], config: Path
) -> None:
    """The launcher knows by a file in its own folder that a worker has joined."""
    script = "from tmd.joining import mark; mark(); raise RuntimeError"
    done = launched(prefix, config, script, "--max-restarts", "2", "--restart-delay", "0")

    ends = [line for line in done.stderr.splitlines() if "worker ended" in line]
    assert len(ends) == 3, done.stderr
    assert all("joined=True" in line or '"joined": true' in line for line in ends), ends


@asynccontextmanager
async def daemon(
    prefix: tuple[str, ...], config: Path, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A daemon that a fork server was asked for, once it serves."""
    process = await asyncio.create_subprocess_exec(
        *(*prefix, sys.executable, "-P", "-m", "tmd.daemon", "-c", str(config)),
        # It serves without a Redis that answers.
        env={**os.environ, "TMD_REDIS__URL": f"unix://{config.parent}/none", **environment},
        process_group=0,
    )
    try:
        await until(config.with_name("tmd.sock").exists, within_s=30)
        yield process
    finally:
        await kill(process)


def libraries_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def test_a_daemon_is_killed_with_its_client(prefix: tuple[str, ...], config: Path) -> None:
    """It is forked, and no signal to the group of its client reaches only one of the two."""
    async with daemon(prefix, config) as client:
        (forked,) = [pid for pid in pids(client) if pid != client.pid]
        libraries = libraries_of(forked)
        await kill(client)

        assert "libtorch" in libraries
        await until(lambda: state_of(forked) in ("", "Z"), within_s=30)


async def test_a_daemon_ends_with_the_status_of_its_fork(
    prefix: tuple[str, ...], config: Path
) -> None:
    async with daemon(prefix, config) as client:
        client.terminate()

        assert await client.wait() == 0
        assert pids(client) == []


async def test_a_daemon_finds_the_plug_ins_of_its_own_path(
    prefix: tuple[str, ...], config: Path
) -> None:
    """The fork server has another one."""
    plugins = config.with_name("plugins")
    faulty_detector.install(plugins)
    with config.open("a") as file:
        file.write(f'[detectors.{faulty_detector.NAME}]\norders = "{config.parent}/orders"\n')
    async with daemon(prefix, config, PYTHONPATH=str(plugins)) as client:
        assert client.returncode is None


async def test_a_daemon_with_a_clock_of_its_own_is_executed(
    prefix: tuple[str, ...], config: Path
) -> None:
    """A library is preloaded only by the dynamic linker."""
    async with daemon(prefix, config, LD_PRELOAD="") as client:
        assert pids(client) == [client.pid]

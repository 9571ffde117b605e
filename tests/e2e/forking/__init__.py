"""Starts the launchers and workers of the fault tests by fork, from a process that has imported
torch once.

A worker spends more than a second of a core on importing torch, a test starts four or more, and CI
has two cores. What is tested stays what it is: the launcher is tmd's own, each worker is a process
of its own, and the one is the parent of the other. The demo's tests start theirs by exec, as users
do.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tmd.lifeline import die_with_parent

ROOT = Path(__file__).parents[3]
CLIENT = Path(__file__).with_name("client.py")
FORK = "TMD_TEST_FORK"
"""Environment: what stands before the command of a process that is to be started by fork."""
COMPILER = "TMD_TEST_COMPILER"


def prefix() -> tuple[str, ...]:
    """What to put before a command now."""
    return tuple(shlex.split(os.environ.get(FORK, "")))


@contextmanager
def fork_server(*, compiler: bool) -> Iterator[None]:
    """Within: the harness starts what it starts by fork. ``compiler``: from a whole torch."""
    with tempfile.TemporaryDirectory(prefix="tmd-fork-") as folder:  # short: for a Unix socket
        address = Path(folder, "s")
        with _served(address, compiler), pytest.MonkeyPatch.context() as patch:
            patch.setenv(FORK, shlex.join((sys.executable, "-IS", str(CLIENT), str(address))))
            yield


@contextmanager
def _served(address: Path, compiler: bool) -> Iterator[None]:
    server = subprocess.Popen(
        (sys.executable, "-m", "tests.e2e.forking.server", str(address)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            COMPILER: str(compiler),
        },
        cwd=ROOT,
        process_group=0,
        preexec_fn=die_with_parent,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        if not server.stdout.readline():
            raise RuntimeError(f"the fork server ended with status {server.wait()}")
        yield
    finally:
        server.stdin.close()
        server.stdout.close()
        server.wait()

"""Starts the launchers and workers of the fault tests by fork, from a process that has imported
torch once.

A worker spends more than a second of a core on importing torch, a test starts four or more, and CI
has two cores. What is tested stays what it is: the launcher is tmd's own, each worker is a process
of its own, and the one is the parent of the other. The demo's tests, and all scripts that need the
compiler, start theirs by exec, as users do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tmd.lifeline import die_with_parent

ROOT = Path(__file__).parents[3]
CLIENT = Path(__file__).with_name("client.py")


@contextmanager
def fork_server(folder: Path) -> Iterator[tuple[str, ...]]:
    """What to put before a command so that it is started by fork."""
    address = folder / "fork.sock"
    server = subprocess.Popen(
        (sys.executable, "-m", "tests.e2e.forking.server", str(address)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        process_group=0,
        preexec_fn=die_with_parent,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        if not server.stdout.readline():
            raise RuntimeError(f"the fork server ended with status {server.wait()}")
        yield (sys.executable, "-IS", str(CLIENT), str(address))
    finally:
        server.stdin.close()
        server.stdout.close()
        server.wait()

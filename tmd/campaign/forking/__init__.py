"""Starts daemons, launchers and workers by fork, from a process that has imported torch once.

A worker needs more than a second of a core to import torch, a daemon half a second for its own
imports, and a campaign starts hundreds. The processes under test stay real: daemon and launcher are
tmd's own, each worker is a separate process, and the launcher is its parent. The demo starts its
processes by exec, as users do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tmd import lifeline

CLIENT = Path(__file__).with_name("client.py")
COMPILER = "TMD_FORK_COMPILER"
FIRST = "TMD_FORK_FIRST"
"""Environment of the server: a module that it imports before all others; may be empty."""
NETWORK = "TMD_FORK_NETWORK"
"""Environment of a new process: the network namespace that it enters."""


@contextmanager
def fork_server(
    *, compiler: bool, python: str = sys.executable, first: str = ""
) -> Iterator[tuple[str, ...]]:
    """Yields the prefix of a command that is to be started by fork.

    Args:
        compiler: whether with torch's compiler.
        python: the interpreter of all processes.
        first: a module that is imported before all others; none if empty.

    Raises:
        RuntimeError: the server did not start.
    """
    with tempfile.TemporaryDirectory(prefix="tmd-fork-") as folder:  # short: for a Unix socket
        address = Path(folder, "s")
        with _served(python, address, {COMPILER: str(compiler), FIRST: first}):
            yield (sys.executable, "-IS", str(CLIENT), str(address))


@contextmanager
def _served(python: str, address: Path, more: Mapping[str, str]) -> Iterator[None]:
    server = subprocess.Popen(
        (*lifeline.prefix(), python, "-P", "-m", "tmd.campaign.forking.server", str(address)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **more},
        process_group=0,
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

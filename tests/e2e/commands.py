"""Long-running commands as people use them: at a terminal, until interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LINGER_S = 10.0
"""Longest time for which processes of a command may outlive it."""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """``tmd ARGUMENTS`` in a separate process group, with all its files below ``folder``."""
    return subprocess.Popen(
        (sys.executable, "-m", "tmd.cli", *arguments),
        env={**os.environ, "TMPDIR": str(folder), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


def left_behind(folder: Path) -> list[str]:
    """Command lines of processes that use ``folder``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            environment = (process / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in command + environment and int(process.name) != os.getpid():
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


def assert_leaves_nothing(
    folder: Path,
    *arguments: str,
    interrupted_at: str,
    by: int,
    look: Callable[[str], None] = lambda _: None,
) -> None:
    """Start the command, send it the signal ``by`` once it says ``interrupted_at``: it ends as one
    that was interrupted, and so does all that it has started. ``look`` gets each line until then.
    """
    run = start(folder, *arguments)
    assert run.stdout is not None
    for line in run.stdout:
        look(line)
        if interrupted_at in line:
            break
    run.send_signal(by)
    run.communicate(timeout=60)
    deadline = time.monotonic() + LINGER_S
    while left_behind(folder) and time.monotonic() < deadline:
        time.sleep(0.05)

    assert left_behind(folder) == []
    assert by == signal.SIGKILL or not [*folder.glob("tmd-*")]
    assert run.returncode == (-by if by == signal.SIGKILL else 130)

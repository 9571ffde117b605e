"""A child that ends with its parent."""

from __future__ import annotations

import os
import select
import subprocess
import sys

from tmd.lifeline import prefix

PARENT = """
import subprocess, sys
from tmd.lifeline import prefix
child = subprocess.Popen([*prefix(), *sys.argv[1:]])
print(child.pid, flush=True)
child.wait()
"""
LONG_S = 20.0


def test_a_command_ends_when_its_parent_is_killed() -> None:
    says = [sys.executable, "-uc", "import time; print('runs'); time.sleep(600)"]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *says], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        assert parent.stdout.readline() == b"runs\n"
        parent.kill()
        ended, _, _ = select.select([child], [], [], LONG_S)
        os.close(child)
    finally:
        parent.kill()
        parent.communicate()

    assert ended == [child]


def test_a_command_keeps_its_exit_status() -> None:
    assert status(os.getpid()) == 7


def test_a_command_whose_parent_has_ended_is_not_started() -> None:
    assert status(os.getppid()) == 0


def status(parent: int) -> int:
    command = [sys.executable, "-c", "raise SystemExit(7)"]
    *lifeline, _ = prefix()
    return subprocess.run(
        [*lifeline, str(parent), *command], check=False, timeout=LONG_S
    ).returncode

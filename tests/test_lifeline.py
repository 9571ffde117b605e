"""A child that ends with its parent."""

from __future__ import annotations

import os
import select
import subprocess
import sys

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "tmd.lifeline", *sys.argv[1:]])
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
    says = [sys.executable, "-m", "tmd.lifeline", sys.executable, "-c", "raise SystemExit(7)"]
    assert subprocess.run(says, check=False, timeout=LONG_S).returncode == 7

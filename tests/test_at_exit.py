"""What runs at the end of a process does not run at that of a fork of it."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def outputs(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split()


FORK = """
import os, sys
pid = os.fork()
if pid == 0:
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0
"""


def test_a_function_runs_once_if_the_process_has_forked() -> None:
    begin = "from tmd.at_exit import at_exit\nat_exit(print, 'ended')\n"
    assert outputs(begin + FORK) == ["ended"]


def test_a_worker_that_was_forked_after_the_import_ends_in_order() -> None:
    """As those of the campaign are. What was registered before runs last."""
    script = """
import atexit, os, threading
atexit.register(lambda: print(*(t.name for t in threading.enumerate()), sep="\\n"))
import tmd.trainer
import torch.distributed as dist
if os.fork() == 0:
    tmd.trainer.join()
    dist.init_process_group("tmd")
else:
    os.wait()
    os._exit(0)
"""
    assert "tmd-listener" not in outputs(script)


def test_a_fork_that_ends_leaves_the_connections_of_its_parent_alone() -> None:
    begin = """
import tmd.trainer
import torch.distributed as dist
tmd.trainer.join()
dist.init_process_group("tmd")
"""
    end = """
import threading
print(*sorted(t.name for t in threading.enumerate() if t.name == "tmd-listener"))
"""
    assert outputs(begin + FORK + end) == ["tmd-listener"]

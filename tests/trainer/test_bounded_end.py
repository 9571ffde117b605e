"""A script that has failed is over, whatever keeps its process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.marks import thorough

BEGIN = """
import atexit, signal, sys, threading, time
from tmd.fabric.backend import ends_by_error
from tmd.trainer.worker.bounded_end import bound_the_end
bound_the_end(ends_by_error, within_s=2)
"""
THREAD = "threading.Thread(target=threading.Event().wait).start()"
POOL = (
    "from concurrent.futures import ThreadPoolExecutor\n"
    "ThreadPoolExecutor().submit(threading.Event().wait)"
)
PROCESSES = (
    "from concurrent.futures import ProcessPoolExecutor\n"
    "ProcessPoolExecutor(1).submit(time.sleep, 8)"
)
HANDLER = f"signal.signal(signal.SIGALRM, lambda *_: None)\n{THREAD}"


def run(*lines: str) -> subprocess.CompletedProcess[str]:
    code = "\n".join([BEGIN, *lines])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False
    )


@pytest.mark.parametrize(
    "kept",
    [
        HANDLER,
        POOL,
        thorough(THREAD),
        thorough(PROCESSES),
        thorough("atexit.register(time.sleep, 60)"),
    ],
    ids=["a thread, and a handler", "a pool", "a thread", "processes", "a function of atexit"],
)
def test_a_process_whose_script_has_failed_ends(kept: str) -> None:
    """Otherwise its rank would never be replaced."""
    done = run(kept, "raise ValueError('mistake')")

    assert done.returncode == -signal.SIGALRM
    assert "ValueError: mistake" in done.stderr


def test_a_process_whose_script_has_ended_well_may_take_its_time() -> None:
    """To send its last files, for example."""
    done = run("threading.Thread(target=lambda: (time.sleep(2.5), print('sent'))).start()")

    assert (done.returncode, done.stdout) == (0, "sent\n"), done.stderr

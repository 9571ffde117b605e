"""A script that has failed is over, whatever keeps its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

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
    "ProcessPoolExecutor(1).submit(time.sleep, 60)"
)
HANDLER = f"signal.signal(signal.SIGALRM, lambda *_: None)\n{THREAD}"


def run(folder: Path, *lines: str) -> tuple[int, str]:
    """Exit status and output. What the script has started ends with it."""
    output = folder / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", "\n".join([BEGIN, *lines])],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=50)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, output.read_text()


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
def test_a_process_whose_script_has_failed_ends(kept: str, tmp_path: Path) -> None:
    """Otherwise its rank would never be replaced."""
    status, output = run(tmp_path, kept, "raise ValueError('mistake')")

    assert status == -signal.SIGALRM
    assert "ValueError: mistake" in output


def test_a_process_whose_script_has_ended_well_may_take_its_time(tmp_path: Path) -> None:
    """To send its last files, for example."""
    ended = run(
        tmp_path, "threading.Thread(target=lambda: (time.sleep(2.5), print('sent'))).start()"
    )

    assert ended == (0, "sent\n")

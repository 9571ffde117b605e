"""What a worker does whose collectives cannot be ended after a loss."""

from __future__ import annotations

import subprocess
import sys

from tmd.fabric.generations.carriers import HUNG_CODE

SOON_S = 60
HANGS = """
import threading

from tests.fabric.circle import KEY, member
from tmd.core.values.model import Membership
from tmd.fabric import Fabric, GroupView
from tmd.fabric.generations.carriers import carry
from tmd.fabric.generations.generations import GenerationLimits

fabric, never = Fabric("w0", KEY), threading.Event()
carry(fabric, {"TMD_CPU": "ring"}, limits=GenerationLimits(abort_s=0.05))
fabric.generations.enter(Membership(epoch=1, members=(member(fabric),)))
fabric.generations.of(GroupView("world", (0,))).abort = never.wait
print("built", flush=True)
fabric.generations.lose(1)
for thread in threading.enumerate():
    if thread.name == "tmd-aborts":
        thread.join()
print("goes on", flush=True)
"""
"""A worker loses a member of a group whose abort hangs, and waits for what comes of it."""


def test_a_worker_whose_groups_cannot_be_ended_ends_itself() -> None:
    """Its main thread may be inside a collective for ever, so no other thread can ask it to end."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=SOON_S, check=False
    )

    assert done.stdout == "built\n", done.stderr
    assert done.returncode == HUNG_CODE
    assert "the groups world could not be ended after a loss" in done.stderr

"""Faults of training processes: they end, stop, hang, or flood the log."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tmd.campaign.kind import FaultKind, Mend, Unfired, nothing
from tmd.campaign.scenario import FaultPart
from tmd.campaign.stage import CampaignStage
from tmd.campaign.waiting import until

STOPPED, ENDED = "T", ("", "Z")


def state_of(pid: int) -> str:
    """The kernel's letter for the process's state; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


async def send(pid: int, number: int, wanted: str) -> None:
    """Signal a process and wait until it is in the state ``wanted``.

    Raises:
        Unfired: there is no such process, or it has ended and ``wanted`` is another state.
    """
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise Unfired(f"there is no process {pid}") from None
    await until(lambda: state_of(pid) in (wanted, *ENDED))
    if wanted not in ENDED and state_of(pid) in ENDED:
        raise Unfired(f"process {pid} has ended")


async def _stop_and_continue(stage: CampaignStage, fault: FaultPart) -> Mend:
    pid = (await stage.worker(fault.where)).pid
    await send(pid, signal.SIGSTOP, STOPPED)

    async def proceed() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    return proceed


async def _killed_from_outside(stage: CampaignStage, fault: FaultPart) -> Mend:
    await send((await stage.worker(fault.where)).pid, signal.SIGKILL, "")
    return nothing


KINDS = (
    FaultKind("process.kill", "SIGKILL, as by the kernel or an operator", inside="kill"),
    FaultKind("process.kill-now", "SIGKILL at no particular point", _killed_from_outside),
    FaultKind("process.terminate", "SIGTERM, to the process alone", inside="terminate"),
    FaultKind(
        "process.linger", "killed; the kernel takes long to free its memory", inside="linger"
    ),
    FaultKind("process.stop", "SIGSTOP, for good", inside="stop"),
    FaultKind("process.stop-and-continue", "SIGSTOP, and SIGCONT later", _stop_and_continue),
    FaultKind("process.exit", "the script exits with an unusual status", inside="exit"),
    FaultKind("process.exception", "an exception in the user's code", inside="raise"),
    FaultKind("process.segfault", "an invalid pointer", inside="crash"),
    FaultKind("process.abort", "abort(), as a failed assertion in C++ does", inside="abort"),
    FaultKind("process.out-of-memory", "the allocator finds no memory", inside="memory"),
    FaultKind("process.hang", "the training thread hangs, others continue", inside="hang"),
    FaultKind(
        "process.hang-with-gil", "a call into C never releases the interpreter", inside="hold"
    ),
    FaultKind("process.log-flood", "200,000 lines of output in one step", inside="flood"),
    FaultKind(
        "process.held", "the process waits until the other faults have struck", inside="wait"
    ),
    FaultKind("process.wrong-bits", "a joiner with one bit flipped in every step", inside="flips"),
)

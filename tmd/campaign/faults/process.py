"""Training processes: how they end, stop, hang, and talk too much."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tmd.campaign.kind import FaultKind, Mend, Unfired, nothing
from tmd.campaign.scenario import FaultPart
from tmd.campaign.stage import CampaignStage
from tmd.campaign.waiting import until

STOPPED = "T"


def state_of(pid: int) -> str:
    """The letter of the kernel for a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


async def send(pid: int, number: int, wanted: str) -> None:
    """Signal a process and see that it is in the state ``wanted`` then.

    Raises:
        Unfired: it is not there.
    """
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise Unfired(f"there is no process {pid}") from None
    await until(lambda: state_of(pid) in (wanted, "", "Z"))


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
    FaultKind("process.kill", "SIGKILL, as the kernel's or an operator's", inside="kill"),
    FaultKind("process.kill-now", "SIGKILL at no particular point", _killed_from_outside),
    FaultKind("process.terminate", "SIGTERM, to the process alone", inside="terminate"),
    FaultKind(
        "process.linger", "killed; the kernel takes long to free its memory", inside="linger"
    ),
    FaultKind("process.stop", "SIGSTOP, for good", inside="stop"),
    FaultKind("process.stop-and-continue", "SIGSTOP, and SIGCONT later", _stop_and_continue),
    FaultKind("process.exit", "the script exits with a status of its own", inside="exit"),
    FaultKind("process.exception", "an exception in the user's code", inside="raise"),
    FaultKind("process.segfault", "a wild pointer", inside="crash"),
    FaultKind("process.abort", "abort(), as a failed assertion in C++ does", inside="abort"),
    FaultKind("process.out-of-memory", "the allocator finds nothing any more", inside="memory"),
    FaultKind("process.hang", "the training thread stands still, others go on", inside="hang"),
    FaultKind(
        "process.hang-with-gil", "a call into C never lets go of the interpreter", inside="hold"
    ),
    FaultKind("process.log-flood", "200,000 lines of output in one step", inside="flood"),
    FaultKind(
        "process.held", "it waits until the others of the scenario have struck", inside="wait"
    ),
    FaultKind("process.wrong-bits", "a joiner with one bit flipped in every step", inside="flips"),
)

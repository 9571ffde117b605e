"""Ends one worker, and all that it has started.

A worker leads a process group of its own. If it is a shell script, the training process is another
member of that group.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def terminate(pidfd: int) -> None:
    """Send SIGTERM to a worker, and not to its group: a script that saves its state at this signal
    still needs the processes of its data loader."""
    with suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)


def kill(pid: int, pidfd: int) -> None:
    """Send SIGKILL to a worker and its group.

    Hazard: ``pid`` must not have been waited for yet. Until then no stranger can have its number.
    """
    for send, process in ((os.killpg, pid), (signal.pidfd_send_signal, pidfd)):
        # The second one reaches a worker that was forked and has not made its group yet.
        with suppress(ProcessLookupError, PermissionError):
            send(process, signal.SIGKILL)


def ended_well(pidfd: int) -> bool:
    """Whether a worker that has ended has status 0. It can still be waited for."""
    try:
        end = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return True  # this launcher inherited that SIGCHLD is ignored: the status is lost
    return end is not None and end.si_code == os.CLD_EXITED and end.si_status == 0

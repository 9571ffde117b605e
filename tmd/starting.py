"""Starts one worker: its log file, its process and the pidfd that reports its end.

A worker leads a process group of its own. A shell script that starts Python is one, too: then the
training process is another member of the group.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from tmd.core.values.errors import TmdError
from tmd.core.values.reasons import in_words
from tmd.lifeline import die_with_parent

spawn: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
"""Creates the process. The campaign's fork server replaces it by a fork, which does not import
torch again."""


class CannotStart(TmdError):
    """The operating system refuses the command of a worker."""


def start(
    command: Sequence[str], environment: Mapping[str, str], log_file: Path | None
) -> tuple[subprocess.Popen[bytes], int]:
    """The process and its pidfd; its output goes to ``log_file``, or to that of the launcher.

    Raises:
        CannotStart: the operating system refuses the command or the log file.
    """
    try:
        with ExitStack() as open_file:
            output = None
            if log_file is not None:
                log_file.parent.mkdir(parents=True, exist_ok=True)
                output = open_file.enter_context(log_file.open("ab"))
            child = spawn(
                command,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                process_group=0,
                preexec_fn=die_with_parent,
            )
    except (OSError, subprocess.SubprocessError) as error:
        raise _refused(command, error) from error
    try:
        return child, os.pidfd_open(child.pid)
    except OSError as error:
        # Its end would go unnoticed.
        child.kill()
        child.wait()
        raise _refused(command, error) from error


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


def _refused(command: Sequence[str], error: Exception) -> CannotStart:
    return CannotStart(f"cannot start {shlex.join(command)}: {in_words(error)}")

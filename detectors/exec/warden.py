"""The process that runs one check and ends every process that the check started.

It is the subreaper of its descendants (prctl, PR_SET_CHILD_SUBREAPER): a process whose parent ends
becomes its child, even in another session, so that none escapes. When the daemon closes its end
of stdin, also by being killed, all descendants are stopped, so that none can fork, then killed and
reaped. The warden runs until all of them have ended, so that the daemon can tell. Each signal goes
through a pidfd whose process was found below the warden after the pidfd was opened, so it cannot
hit another process. Only where pidfds are refused, the signal goes to a pid that was just found
below the warden.

On stderr it prints one line: ``status N`` (negative: a signal) once the command has ended, or
``cannot REASON`` if it cannot be started.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

SUBREAPER, DEATH_SIGNAL = 36, 1
"""PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG."""
PATIENCE_S = 2.0
"""By then, killed processes have ended. One may hang in a driver or wait for a dead file system.
One of another user may refuse the signal."""
TURN_S, SLOW_TURN_S = 0.02, 1.0
"""Pause between two attempts to kill, before and after that."""
REPORT = 2


def main(daemon: str, *command: str) -> None:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(SUBREAPER, 1, 0, 0, 0)
    prctl(DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    woken = _wake_up()
    if os.getppid() != int(daemon):
        return  # the daemon died before it could be watched
    try:
        _run(command, prctl, woken)
    finally:
        end()


def _run(command: tuple[str, ...], prctl: Any, woken: int) -> None:
    """Run until the daemon hangs up."""
    report = os.dup(REPORT)
    first = _start(command, prctl)
    os.close(1)  # only the check holds it, so its end is the end of file
    if isinstance(first, str):
        os.write(report, f"cannot {first}\n".encode())
        return
    while not _hung_up(woken):
        for pid, status in _reaped():
            if pid == first:
                os.write(report, f"status {os.waitstatus_to_exitcode(status)}\n".encode())


def _wake_up() -> int:
    """A descriptor that becomes readable after SIGCHLD or SIGTERM."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return reader


def _hung_up(woken: int) -> bool:
    """Wait for an event; return whether the daemon has hung up or died."""
    ready, _, _ = select.select([0, woken], [], [])
    signals = os.read(woken, 4096) if woken in ready else b""
    return 0 in ready or signal.SIGTERM in signals


def _start(command: tuple[str, ...], prctl: Any) -> int | str:
    """The pid of the command, or why it cannot be started."""
    failed, reporting = os.pipe()  # closed by a successful exec
    pid = os.fork()
    if pid == 0:
        try:
            _become(command, prctl)
        except BaseException as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            os.write(reporting, reason.encode())
        finally:
            os._exit(127)
    os.close(reporting)
    with open(failed, "rb") as answer:
        reason = answer.read().decode("utf-8", "replace")
    if reason:
        os.waitpid(pid, 0)
        return reason
    return pid


def _become(command: tuple[str, ...], prctl: Any) -> None:
    """In the child: exec the command, which ends when the warden dies."""
    warden = os.getppid()
    os.setsid()
    prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != warden:
        os._exit(127)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 2)
    os.execvp(command[0], command)


# --- the end --------------------------------------------------------------------------------------


def end() -> None:
    """Stop, kill and reap all descendants; return once none is left."""
    deadline = time.monotonic() + PATIENCE_S
    stopped: set[int] = set()
    while _any_left() and time.monotonic() < deadline:
        new = set(_descendants()) - stopped
        if not new:
            break  # none can fork
        _send(new, signal.SIGSTOP)
        stopped |= new
    while _any_left():
        _send(_descendants(), signal.SIGKILL)
        time.sleep(TURN_S if time.monotonic() < deadline else SLOW_TURN_S)


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            _send_by_pidfd(pid, number)
        except ProcessLookupError:
            continue  # it has ended
        except OSError:
            # No pidfds: an old kernel, a system call filter, a limit. Or the process is another
            # user's, and this is refused, too.
            with suppress(OSError):
                if _is_below(pid):
                    os.kill(pid, number)


def _send_by_pidfd(pid: int, number: int) -> None:
    fd = os.pidfd_open(pid)
    try:
        # Checked again: the pid may have been reused before the pidfd was opened.
        if _is_below(pid):
            signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)


def _is_below(pid: int) -> bool:
    own = os.getpid()
    while pid not in (0, own):
        pid = _parent(pid)
    return pid == own


def _parent(pid: int) -> int:
    """The parent's pid; 0 if there is none, or no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The fields after the name, which may contain spaces and brackets: state, parent.
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _descendants() -> Iterator[int]:
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return  # for instance out of descriptors; the next turn tries again
    for name in names:
        if name.isdigit():
            children.setdefault(_parent(int(name)), []).append(int(name))
    found = children.get(os.getpid(), [])
    while found:
        yield from found
        found = [below for pid in found for below in children.get(pid, [])]


def _any_left() -> bool:
    """Reap; return whether children, and thus descendants, are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _reaped() -> list[tuple[int, int]]:
    found = []
    try:
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(one)
    except ChildProcessError:
        pass
    return found

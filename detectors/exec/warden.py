"""The process that runs one check, and ends with it all that the check has started.

It is the subreaper of its descendants (prctl, PR_SET_CHILD_SUBREAPER): one that leaves its session,
or whose parent ends, becomes its child, and cannot get away. When the daemon closes its end of
stdin, and so also when the daemon is killed, all of them are stopped, so that none forks any more,
then killed, and reaped. Each signal goes through a pidfd whose process was found below the warden
after it was opened: nobody else's process can be meant. Only where pidfds are refused a signal goes
to a number that has just been found below the warden.

On stderr it says one line: ``status N`` (negative: a signal) once the command has ended, or
``cannot REASON`` if there is none to start.
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
"""Less than a reload of the daemon waits for a detector.

What was killed may hang in a driver, and what runs as another user is not ours to kill."""
TURN_S = 0.02
REPORT = 2


def main(daemon: str, *command: str) -> None:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(SUBREAPER, 1, 0, 0, 0)
    prctl(DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    woken = _wake_up()
    if os.getppid() != int(daemon):
        return  # it died before it could be watched
    try:
        _run(command, prctl, woken)
    finally:
        end()


def _run(command: tuple[str, ...], prctl: Any, woken: int) -> None:
    """Until the daemon hangs up."""
    report = os.dup(REPORT)
    first = _start(command, prctl)
    os.close(1)  # the check alone holds it: the end of its output is the end of file
    if isinstance(first, str):
        os.write(report, f"cannot {first}\n".encode())
        return
    while not _hung_up(woken):
        for pid, status in _reaped():
            if pid == first:
                os.write(report, f"status {os.waitstatus_to_exitcode(status)}\n".encode())


def _wake_up() -> int:
    """A descriptor that can be read after SIGCHLD or SIGTERM."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return reader


def _hung_up(woken: int) -> bool:
    """Wait for something; whether it is the end of the daemon, or of its interest."""
    ready, _, _ = select.select([0, woken], [], [])
    signals = os.read(woken, 4096) if woken in ready else b""
    return 0 in ready or signal.SIGTERM in signals


def _start(command: tuple[str, ...], prctl: Any) -> int | str:
    """The number of the command's process, or why there is none."""
    failed, telling = os.pipe()  # closed by a successful exec
    pid = os.fork()
    if pid == 0:
        try:
            _become(command, prctl)
        except BaseException as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            os.write(telling, reason.encode())
        finally:
            os._exit(127)
    os.close(telling)
    with open(failed, "rb") as answer:
        reason = answer.read().decode("utf-8", "replace")
    if reason:
        os.waitpid(pid, 0)
        return reason
    return pid


def _become(command: tuple[str, ...], prctl: Any) -> None:
    """In the child: the command, which does not outlive the warden either."""
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
    """Stop, kill and reap all descendants; give up on what does not end."""
    deadline = time.monotonic() + PATIENCE_S
    stopped: set[int] = set()
    while _any_left() and time.monotonic() < deadline:
        new = set(_descendants()) - stopped
        if not new:
            break  # nobody forks any more
        _send(new, signal.SIGSTOP)
        stopped |= new
    while _any_left() and time.monotonic() < deadline:
        _send(_descendants(), signal.SIGKILL)
        time.sleep(TURN_S)


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            _send_by_pidfd(pid, number)
        except ProcessLookupError:
            continue  # it has ended
        except OSError:
            # No pidfds: an old kernel, a filter of system calls, a limit. Or it runs as another
            # user, and this is refused, too.
            with suppress(OSError):
                if _is_below(pid):
                    os.kill(pid, number)


def _send_by_pidfd(pid: int, number: int) -> None:
    fd = os.pidfd_open(pid)
    try:
        # Asked again: the number may have gone to another process before the pidfd was opened.
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
    """0 if there is none, or no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # Behind the name, which may have blanks and brackets in it: state, parent.
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _descendants() -> Iterator[int]:
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return  # out of descriptors, say; the next turn asks again
    for name in names:
        if name.isdigit():
            children.setdefault(_parent(int(name)), []).append(int(name))
    found = children.get(os.getpid(), [])
    while found:
        yield from found
        found = [below for pid in found for below in children.get(pid, [])]


def _any_left() -> bool:
    """Reap; whether there still are children, and so descendants."""
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

"""Starts the workers of this host for a job, ends them, restarts them: ``tmd launch``.

The launcher talks to the daemon over its socket. It runs as the user, in the user's cgroup. The
daemon can only order it to kill a worker. The launcher reports how each worker ended.
One loop, no threads: it waits for pidfds of the children, the socket and signals together.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import structlog
from msgspec import Struct

from tmd import wire
from tmd.core.planning.restarts import STEADY_S, Restarts
from tmd.core.values.environment import FOREIGN, Slot, announced
from tmd.core.values.errors import WireError
from tmd.core.values.model import Exit
from tmd.core.values.reasons import in_words
from tmd.ending import ended_well, kill, terminate
from tmd.folders import refuse_impostor
from tmd.joining import Joining
from tmd.signals import signals
from tmd.starting import CannotStart, start

RECONNECT_S = 0.5
LAST_S = 30.0
"""Longest wait for a daemon at the end, if there was one. Systemd restarts it in that time."""
LASTING_S = 10.0
"""A connection that lasted longer has been of use; its end is logged again."""
GRACE_S = 5.0
"""Time for workers to end after SIGTERM before they get SIGKILL."""
KILL_AGAIN_S = 1.0
"""Interval between two SIGKILLs. A worker in a driver may not end for minutes."""
NOT_STARTED = 2
"""Exit status when the command of a worker cannot be started."""
RESTART_S = 1.0
"""Pause before a worker is restarted; doubled with each failure in a row. Importing torch keeps a
core busy for seconds, which a recovery on this host needs first."""
JOIN_S = 60.0
"""A script that has not called ``join()`` after this time is warned about; imports take long."""

log = structlog.get_logger("tmd.launch")


class LaunchSpec(Struct, frozen=True):
    """Settings of this host's launcher."""

    job: str
    host: str
    socket: Path
    advertise: str
    world_size: int
    local_size: int
    command: tuple[str, ...]
    max_restarts: int
    restart_delay_s: float = RESTART_S
    steady_s: float = STEADY_S
    """See :data:`STEADY_S`."""
    grace_s: float = GRACE_S
    """See :data:`GRACE_S`."""
    one_run: bool = False  # whether no later run of the job has its name
    trace: Path | None = None
    log_dir: Path | None = None


class RunningWorker(NamedTuple):
    """A running worker."""

    worker: str
    slot: int
    process: subprocess.Popen[bytes]


class Launcher:
    """Owns the worker processes and the connection to the daemon; :meth:`run` ends both."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, RunningWorker] = {}
        self._restarts = [Restarts()] * spec.local_size
        self._due: dict[int, float] = {}
        """Slots to restart, and the time."""
        self._exits: list[Exit] = []
        self._daemon: socket.socket | None = None
        self._missed = False
        """Whether a daemon has answered, or its absence has been logged."""
        self._ends = self._is_known = False
        """Whether all workers have ended, and whether a daemon has read that."""
        self._complained = ""
        self._answered_at = 0.0
        """When a daemon has accepted the latest connection."""
        self._inbox = bytearray()
        self._next_dial = 0.0
        self._kill_at: float | None = None
        """When workers get SIGKILL next; ``None`` unless they are to end."""
        self._exit_status = 0
        self._joining = Joining("")
        self._awaited: dict[str, float] = {}
        """Workers not known to have joined, and the time of the next check."""
        self._reminded: set[str] = set()

    def run(self) -> int:
        """Start all workers and run until all have ended; returns the exit status.

        Raises:
            CannotStart: the operating system refuses the command at a first start.
        """
        with (
            tempfile.TemporaryDirectory(prefix="tmd-launch-") as folder,
            signals(self._selector, self.stop),
        ):
            self._joining = Joining(folder)
            try:
                for slot in range(self._spec.local_size):
                    self._spawn(slot)
                while self._children or self._due:
                    self._turn()
                self._tell_the_last()
                return self._exit_status
            finally:
                self._kill_all()
                if self._daemon is not None:
                    self._daemon.close()
                self._selector.close()

    def _tell_the_last(self) -> None:
        """See to it that a daemon knows all exits: the one that was there may be restarting. It
        hangs up once it has read them."""
        self._ends, until = True, time.monotonic() + LAST_S
        while True:
            self._dial()
            if self._daemon is not None:
                with suppress(OSError):
                    self._daemon.shutdown(socket.SHUT_WR)
            if not self._answered_at or self._is_known or self._kill_at is not None:
                return
            if time.monotonic() >= until:
                return
            for key, _ in self._selector.select(RECONNECT_S):
                key.data(key.fileobj)

    # --- workers ----------------------------------------------------------------------------------

    def _spawn(self, slot: int) -> None:
        spec = self._spec
        worker = f"{spec.host}/{spec.job}/{slot}.{uuid.uuid4().hex[:6]}"
        log_file = spec.log_dir and spec.log_dir / f"{worker.replace('/', '_')}.log"
        process, pidfd = start(spec.command, self._environment(worker, slot), log_file)
        self._awaited[worker] = time.monotonic() + JOIN_S
        self._children[pidfd] = RunningWorker(worker, slot, process)
        self._selector.register(pidfd, selectors.EVENT_READ, self._reap)
        self._introduce()

    def _environment(self, worker: str, slot: int) -> dict[str, str]:
        spec = self._spec
        restarts = self._restarts[slot].done
        sizes = (spec.world_size, spec.local_size, slot, restarts, spec.max_restarts)
        variables = {
            **{name: value for name, value in os.environ.items() if name not in FOREIGN},
            **announced(Slot(spec.job, *sizes)),
            **self._joining.variables(worker),
            "TMD_SOCKET": str(spec.socket),
            "TMD_JOB": spec.job,
            "TMD_WORKER": worker,
            "TMD_WORLD_SIZE": str(spec.world_size),
            "TMD_ADVERTISE": spec.advertise,
            "TMD_RESTARTS": str(restarts),
            "TMD_ONE_RUN": str(int(spec.one_run)),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        if spec.trace is not None:
            variables["TMD_TRACE"] = str(spec.trace)
        return variables

    def _reap(self, pidfd: int) -> None:
        worker, slot, process = self._children.pop(pidfd)
        self._selector.unregister(pidfd)
        if self._kill_at is not None or not ended_well(pidfd):
            # What is left of it would hold the device that the next worker of the slot needs.
            kill(process.pid, pidfd)
        os.close(pidfd)
        code = process.wait()
        # A script that saves its state at SIGTERM and exits has not come to its end. Status 0 would
        # mean to the other ranks that training has ended.
        stopped = self._kill_at is not None and code == 0
        code = -signal.SIGTERM if stopped else code
        ended = Exit(worker, self._spec.job, code, time.time(), stopped=stopped)
        self._exits = [*self._exits, ended][-max(64, 2 * self._spec.local_size) :]
        self._tell(wire.Exited(self._exits[-1]))
        self._awaited.pop(worker, None)
        self._reminded.discard(worker)
        joined_s = self._joining.seconds(worker)
        joined = joined_s is not None
        self._joining.forget(worker)
        log.info("worker ended", worker=worker, code=code, joined=joined)
        if self._kill_at is not None:
            return
        if code == 0 and not joined:
            log.warning(
                "the script ended without a call of tmd.trainer.join(), so it never took part in "
                "the job",
                worker=worker,
            )
        elif code != 0:
            self._failed(worker, slot, code, joined_s)

    def _failed(self, worker: str, slot: int, code: int, joined_s: float | None) -> None:
        """``joined_s``: seconds since it had joined, or ``None``."""
        self._restarts[slot] = self._restarts[slot].failed(joined_s, self._spec.steady_s)
        status, joined = code if code > 0 else 128 - code, joined_s is not None
        why = {} if joined else {"why": "the script failed before it called tmd.trainer.join()"}
        self._try_again(slot, status, joined=joined, facts={"worker": worker, **why})

    def _try_again(
        self, slot: int, status: int, *, joined: bool, facts: Mapping[str, object]
    ) -> None:
        """Restart the slot after a pause. If no restarts are left, ``status`` goes into the exit
        status."""
        restarts, allowed = self._restarts[slot], self._spec.max_restarts
        if restarts.done < allowed:
            pause = restarts.pause_s(self._spec.restart_delay_s, joined=joined)
            self._restarts[slot] = restarts.restarted()
            self._due[slot] = time.monotonic() + pause
            left = allowed - restarts.done - 1
            log.warning("restarting the worker", in_s=pause, restarts_left=left, **facts)
        else:
            self._exit_status = max(self._exit_status, status)
            log.error("not restarted: --max-restarts is used up", max_restarts=allowed, **facts)

    def _remind(self) -> None:
        self._joining.look(child.worker for child in self._children.values())
        now = time.monotonic()
        for worker in [worker for worker, at in self._awaited.items() if at <= now]:
            del self._awaited[worker]
            if self._joining.has(worker):
                continue
            # Check again: no other event may wake the loop for days, and the mark may be removed.
            self._awaited[worker] = now + JOIN_S
            if worker not in self._reminded:
                self._reminded.add(worker)
                log.warning(
                    f"no call of tmd.trainer.join() after {JOIN_S:.0f} s: the worker is not part "
                    "of the job yet, and its RANK is a placeholder",
                    worker=worker,
                )

    def _respawn(self) -> None:
        for slot in [slot for slot, at in self._due.items() if at <= time.monotonic()]:
            del self._due[slot]
            try:
                self._spawn(slot)
            except CannotStart as error:
                # Other workers are well, and the system may allow the command later.
                facts = {"slot": slot, "error": in_words(error)}
                log.warning("a worker cannot be restarted", **facts)
                self._try_again(slot, NOT_STARTED, joined=False, facts=facts)

    def _kill_all(self) -> None:
        for pidfd, child in self._children.items():
            kill(child.process.pid, pidfd)

    # --- one turn of the loop ---------------------------------------------------------------------

    def _turn(self) -> None:
        if self._daemon is None and time.monotonic() >= self._next_dial:
            self._dial()
        for key, _ in self._selector.select(self._patience()):
            key.data(key.fileobj)
        self._respawn()
        self._remind()
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._kill_all()
            self._kill_at = time.monotonic() + KILL_AGAIN_S

    def _patience(self) -> float | None:
        deadlines = [*self._due.values(), *self._awaited.values()]
        if self._daemon is None:
            deadlines.append(self._next_dial)
        if self._kill_at is not None:
            deadlines.append(self._kill_at)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def stop(self, number: int) -> None:
        """Handle a signal: end the workers in an orderly way, on a second signal at once."""
        if self._kill_at is not None:
            if number != signal.SIGHUP:  # a terminal that closes may send two
                self._kill_all()
            return
        if self._children or self._due:  # else all workers have ended, with a status of their own
            self._exit_status = 128 + number
        self._due.clear()
        self._kill_at = time.monotonic() + self._spec.grace_s
        for pidfd in self._children:
            terminate(pidfd)

    # --- the daemon -------------------------------------------------------------------------------

    def _dial(self) -> None:
        if self._daemon is not None:
            return
        self._next_dial = time.monotonic() + RECONNECT_S
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(self._spec.socket))
            refuse_impostor(connection, self._spec.socket)
        except OSError as error:
            connection.close()
            self._miss(in_words(error))
            return
        self._daemon, self._missed = connection, True
        self._answered_at = time.monotonic()
        self._inbox.clear()
        self._selector.register(connection, selectors.EVENT_READ, self._listen)
        self._introduce()
        for known in self._exits:
            self._tell(wire.Exited(known))

    def _miss(self, error: str) -> None:
        """Log once that no daemon answers. The loss of one is logged where the connection ends."""
        if not self._missed:
            log.warning(
                "no daemon answers, and the workers wait for it: start 'tmd daemon' on this host, "
                "or set [host] socket to where it is",
                socket=str(self._spec.socket),
                error=error,
            )
        self._missed = True

    def _complain(self, event: str, why: str) -> None:
        """Log what has happened to the connection, but not again and again if each attempt ends
        like this."""
        if self._complained != event + why or time.monotonic() - self._answered_at > LASTING_S:
            log.warning(event, error=why)
        self._complained = event + why

    def _introduce(self) -> None:
        # Ended workers too: their exits are reported again after each reconnect.
        alive = (child.worker for child in self._children.values())
        workers = (*alive, *(known.worker for known in self._exits))
        hello = wire.LauncherHello(wire.VERSION, self._spec.job, os.getpid(), workers, notices=True)
        self._tell(hello)

    def _tell(self, message: wire.Message) -> None:
        if self._daemon is not None:
            try:
                self._daemon.sendall(wire.encode(message))
            except OSError:
                self._hang_up()

    def _hang_up(self) -> None:
        if self._daemon is not None:
            self._selector.unregister(self._daemon)
            self._daemon.close()
            self._daemon = None
            self._next_dial = time.monotonic() + RECONNECT_S

    def _listen(self, connection: socket.socket) -> None:
        try:
            part = connection.recv(1 << 16)
            self._inbox += part
            for message in wire.messages(self._inbox):
                self._obey(message)
            self._is_known |= self._ends and not part
            why = "" if part else "it has closed the connection"
        except (OSError, WireError) as error:
            why = in_words(error)
        if why and not self._is_known:
            self._complain("lost the connection to the daemon, workers continue", why)
        if why:
            self._hang_up()

    def _obey(self, message: wire.Message) -> None:
        match message:
            case wire.Kill():
                for pidfd, child in self._children.items():
                    if child.worker == message.worker:
                        log.warning("killing worker", worker=child.worker, reason=message.reason)
                        kill(child.process.pid, pidfd)
            case wire.LauncherNotice():
                log.warning("daemon notes", worker=message.worker, text=message.text)
            case wire.Rejected():
                self._complain("rejected by the daemon, workers continue", message.reason)
                self._is_known = self._ends  # as far as it will be
                self._hang_up()
            case _:
                pass

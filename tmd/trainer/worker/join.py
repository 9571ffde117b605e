"""Entry to the job: ``join()`` reads from the environment whether there is a daemon.

``tmd launch`` sets ``TMD_SOCKET``, ``TMD_JOB``, ``TMD_WORKER`` and ``TMD_WORLD_SIZE``. Without the
first the session is a standalone one, for plain ``torchrun`` or plain ``python``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

from tmd import fabric, joining
from tmd.at_exit import at_exit
from tmd.core.values.environment import of_rank, ranked
from tmd.core.values.errors import ConfigError
from tmd.core.values.model import Activity, WorkerStatus
from tmd.fabric.backend import ends_by_error
from tmd.fabric.generations.carriers import carry
from tmd.robust_futex import ExitBeacon
from tmd.trainer.session import environment
from tmd.trainer.session.session import Session
from tmd.trainer.session.standalone import StandaloneHooks
from tmd.trainer.session.trace import FileTrace, Trace
from tmd.trainer.worker.agent import Agent
from tmd.trainer.worker.bounded_end import bound_the_end
from tmd.trainer.worker.coordinator import Coordinator

log = logging.getLogger("tmd.trainer")


class _Process:
    session: Session | None = None
    """The session of this process, if ``tmd launch`` has started it."""


def joined() -> Session | None:
    """The session that :func:`join` returned under ``tmd launch``; ``None`` without one."""
    return _Process.session


def join() -> Session:
    """Join the job of this process; blocks until this worker holds a rank or is a standby.

    Call once, before ``torch.distributed.init_process_group("tmd")``.

    Raises:
        ConfigError: ``TMD_SOCKET`` is set but another variable is missing, or ``TMD_CUDA`` asks
            for what this machine lacks.
        TmdError: the daemon does not answer, or rejects this worker.
        RuntimeError: this process has joined already.
    """
    if _Process.session is not None:
        # Two agents with one worker name would replace each other at the daemon for ever.
        raise RuntimeError(
            "tmd.trainer.join() was called a second time in this process: use the session that the "
            "first call returned, and start another process for another job"
        )
    joining.mark()
    seen = environment.unwatch()
    socket = os.environ.get("TMD_SOCKET")
    if not socket:
        hooks = StandaloneHooks()
        return Session(hooks, _trace(hooks.status.worker))
    status = WorkerStatus(
        worker=_needed("TMD_WORKER"),
        job=_needed("TMD_JOB"),
        world_size=int(_needed("TMD_WORLD_SIZE")),
        address="",
        pid=os.getpid(),
        activity=Activity.STARTING,
    )
    coordinator = Coordinator(status)
    agent = Agent(Path(socket), coordinator.current, coordinator.obey, _exit_beacon())
    welcome = agent.introduce()
    endpoint = fabric.Fabric(status.worker, welcome.key, host=_host())
    endpoint.calls.stepping = threading.current_thread()
    restarted = os.environ.get("TMD_RESTARTS", "0") != "0"
    one_run = restarted or os.environ.get("TMD_ONE_RUN", "0") != "0"
    carry(endpoint)
    coordinator.start(agent, endpoint, welcome.shadow, one_run=one_run)
    fabric.install(endpoint)
    environment.settle(_torchrun_variables(endpoint, status.world_size), seen)
    # A process that is ending must not look like a silent one.
    at_exit(coordinator.close)
    session = _Process.session = Session(coordinator, _trace(status.worker))
    at_exit(_end_as_lost, session)
    bound_the_end(lambda: ends_by_error() or bool(session.why_not_done))
    return session


def _end_as_lost(session: Session) -> None:
    """End this process at once and with status 1 if the script ends where its rank is not done,
    such as after an error that it has caught: status 0 would end the whole job."""
    if not (why := session.why_not_done) or ends_by_error():
        return
    try:
        log.error(
            "%s: this process exits with status 1, so that the rank is replaced. To end training "
            "early, leave the loop by 'break' after a step whose step.counts is true",
            why,
        )
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(1)  # even if a stream is closed


def _torchrun_variables(endpoint: fabric.Fabric, size: int) -> dict[str, str]:
    """Torchrun's variables for this worker. A standby gets those of the last rank."""
    membership, rank = endpoint.membership, endpoint.rank
    if membership is None or rank is None:
        hosts = size // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return ranked(size - 1, size, hosts - 1, hosts)
    return of_rank(rank, [member.host for member in membership.members])


def _exit_beacon() -> ExitBeacon | None:
    """Lets others notice the end of this process at once; ``None`` where that is impossible."""
    try:
        beacon = ExitBeacon()
    except OSError as error:
        log.info("the end of this process will be noticed with a delay: %s", error)
        return None
    at_exit(_release, beacon)
    return beacon


def _release(beacon: ExitBeacon) -> None:
    # Otherwise the worker is lost, though the interpreter still runs.
    if not ends_by_error():
        beacon.release()


def _needed(name: str) -> str:
    try:
        return os.environ[name]
    except KeyError:
        raise ConfigError(
            f"TMD_SOCKET is set but {name} is not: start the script with 'tmd launch'"
        ) from None


def _host() -> str:
    """The address at which peers reach this worker; the launcher sets it from the host's config."""
    return os.environ.get("TMD_ADVERTISE", "127.0.0.1")


def _trace(worker: str) -> Trace:
    folder = os.environ.get("TMD_TRACE")
    return FileTrace(Path(folder), worker) if folder else Trace()

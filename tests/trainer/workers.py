"""A worker made of the product's own parts, beside a daemon that only gives directives."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.fabric.circle import KEY
from tests.trainer.contexts import context_of
from tests.trainer.scripts import Script
from tests.trainer.wire import PATIENCE
from tmd import wire
from tmd.core.planning.directives import Directive
from tmd.core.values.model import Activity, WorkerStatus
from tmd.fabric import Fabric, Neutral
from tmd.trainer.session.handovers import Handovers
from tmd.trainer.state.replicas import all_alike
from tmd.trainer.state_transfer.context import RankContext
from tmd.trainer.worker.agent import Agent
from tmd.trainer.worker.status_reporter import StatusReporter
from tmd.trainer.worker.wiring import WorkerParts, assemble

WELCOME = wire.Welcome("h1", KEY)


class Daemon:
    """Accepts one agent on a Unix socket and keeps what it reports."""

    def __init__(self, path: Path) -> None:
        self.reports: list[WorkerStatus] = []
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(path))
        self._door.listen()
        self._agent: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def order(self, directive: Directive) -> None:
        assert self._agent is not None
        self._agent.sendall(wire.encode(wire.DirectiveOrder(1, 1, directive)))

    def close(self) -> None:
        """After the agent is closed: the thread has then read its last report."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._door.close()

    def _run(self) -> None:
        connection, _ = self._door.accept()
        with connection, suppress(EOFError):
            assert isinstance(_receive(connection), wire.TrainerHello)
            self._agent = connection
            connection.sendall(wire.encode(WELCOME))
            while True:
                report = _receive(connection)
                assert isinstance(report, wire.StatusReport)
                self.reports.append(report.status)


def _receive(connection: socket.socket) -> wire.Message:
    header = connection.recv(wire.HEADER_SIZE, socket.MSG_WAITALL)
    if len(header) < wire.HEADER_SIZE:
        raise EOFError
    return wire.decode(connection.recv(wire.body_size(header), socket.MSG_WAITALL))


@dataclass(frozen=True)
class Worker:
    """Made by :func:`worker`."""

    daemon: Daemon
    agent: Agent
    fabric: Fabric
    reporter: StatusReporter
    context: RankContext
    parts: WorkerParts
    handovers: Handovers

    @property
    def status(self) -> WorkerStatus:
        return self.reporter.status

    def obey(self, directive: Directive) -> None:
        """Order ``directive`` and wait until the agent has it."""
        self.daemon.order(directive)
        assert self.agent.wait_a_while(lambda d: d == directive, PATIENCE) == directive


@contextmanager
def reporting(folder: Path, status: WorkerStatus) -> Iterator[tuple[StatusReporter, Agent, Fabric]]:
    """The reporter of a worker that has registered nothing yet."""
    with _started(folder, status) as (_, agent, fabric, reporter):
        yield reporter, agent, fabric


@contextmanager
def worker(
    folder: Path, *, script: Script | None = None, several: bool = False, **status: object
) -> Iterator[Worker]:
    """A standby of four ranks, unless ``status`` says something else, that has registered
    ``script``. ``several``: the script can build any role."""
    fields: dict[str, object] = {"size": 4, "activity": Activity.STANDBY, **status}
    size, activity = fields.pop("size"), fields.pop("activity")
    assert isinstance(size, int)
    assert isinstance(activity, Activity)
    told = WorkerStatus("w", "j", size, "", 1, activity, **fields)  # type: ignore[arg-type]
    with _started(folder, told) as (daemon, agent, fabric, reporter):
        fabric.sandbox(Neutral(), size - 1, size)
        context = context_of((script or Script(1)).registry(), fabric, several=several)
        handovers = Handovers()
        parts = assemble(
            reporter,
            agent,
            context,
            snapshot_every=0,
            alike=all_alike(size),
            alone=True,
            handovers=handovers,
            halt=lambda: None,
        )
        try:
            yield Worker(daemon, agent, fabric, reporter, context, parts, handovers)
        finally:
            # A server thread ends with its fabric.
            fabric.close()
            parts.close()


@contextmanager
def _started(
    folder: Path, status: WorkerStatus
) -> Iterator[tuple[Daemon, Agent, Fabric, StatusReporter]]:
    path = folder / "tmd.sock"
    daemon, fabric = Daemon(path), Fabric(status.worker, KEY)
    reporter = StatusReporter(status)
    agent = Agent(path, reporter.current, lambda _: None)
    agent.introduce()
    reporter.open(agent, fabric)
    try:
        yield daemon, agent, fabric, reporter
    finally:
        agent.close()
        fabric.close()
        daemon.close()

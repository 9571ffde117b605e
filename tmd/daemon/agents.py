"""The Unix socket: trainers, launchers and operators of this host connect here.

One task serves one connection. A client that violates the protocol gets the reason and is
disconnected. A directive is pushed when it differs from the last one sent on the connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import structlog
from msgspec import structs

from tmd import wire
from tmd.core.planning.directives import Directive
from tmd.core.values.encodable import encodable, encodable_exit
from tmd.core.values.errors import WireError
from tmd.core.values.model import WorkerStatus
from tmd.core.values.shadows import Verdicts
from tmd.daemon.agent_socket import AgentSocket, bind
from tmd.daemon.injections import Injections, Peer
from tmd.daemon.lifelines import Lifelines
from tmd.daemon.records import Records
from tmd.daemon.roster import Roster
from tmd.folders import peer_of

BUFFER_LIMIT = 1 << 20
"""A client is disconnected if more bytes than this wait for it when there is another message."""

FIRST_PROTOCOL = 1
"""Version of what workers of tmd 0.1.0 exchange."""

STARTED_AGAIN = (
    "its script has started Python again, which has none of its state; leave that to tmd launch "
    "(--max-restarts)"
)

log = structlog.get_logger("tmd.agents")


class ClientStreams(NamedTuple):
    """Both ends of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class TrainerLink:
    """A connected trainer and the last directive sent to it."""

    def __init__(self, worker: str, job: str, writer: asyncio.StreamWriter) -> None:
        self.name = worker
        self.job = job
        self.writer = writer
        self.sent: tuple[int, Directive] | None = None

    def push(self, records: Records) -> None:
        order = records.order(self.job, self.name)
        if order is None or (self.sent is not None and self.sent[1] == order.directive):
            return
        if self.sent is not None and order.lease_epoch < self.sent[0]:
            return
        self.sent = (order.lease_epoch, order.directive)
        _send(self.writer, order)
        log.info(
            "directive",
            worker=self.name,
            directive=type(order.directive).__name__,
            revision=order.revision,
            lease_epoch=order.lease_epoch,
        )


class LauncherLink:
    """A connected launcher, its workers, and the workers it was asked to kill."""

    def __init__(self, hello: wire.LauncherHello, writer: asyncio.StreamWriter) -> None:
        self.name, self.job = "launcher", hello.job
        self.workers = hello.workers
        self.takes_notices = hello.notices
        self.owned = set(hello.workers)
        """Includes workers that have exited."""
        self.writer = writer
        self.asked: set[str] = set()
        self._noted: dict[str, str] = {}
        self._seen: dict[str, Verdicts] = {}

    def note(self, status: WorkerStatus) -> None:
        """Notify the launcher when a standby becomes unfit, and when it is fit again."""
        mine = self.takes_notices and status.worker in self.workers
        if not mine or status.rehearsed == self._seen.get(status.worker, ()):
            return
        self._seen[status.worker] = status.rehearsed
        unfit, before = status.unfit, self._noted.get(status.worker, "")
        if unfit != before:
            self._noted[status.worker] = unfit
            text = f"standby is unfit: {unfit}" if unfit else "standby is fit again"
            _send(self.writer, wire.LauncherNotice(worker=status.worker, text=text))

    def push(self, records: Records, roster: Roster) -> None:
        for worker in self.workers:
            reason = records.condemned(worker, self.job)
            if roster.is_ending(worker):
                # A single thread may have ended while its process keeps computing.
                reason = "the kernel reports that it is exiting"
            if roster.ended(worker):
                reason = STARTED_AGAIN if worker in roster.returned else None
            if reason is None or worker in self.asked:
                continue
            self.asked.add(worker)
            _send(self.writer, wire.Kill(worker=worker, reason=reason))
            log.warning("killing worker", worker=worker, reason=reason)


class AgentServer:
    """Serves the socket while :meth:`serve` runs; removes it at the end."""

    def __init__(
        self,
        door: AgentSocket,
        roster: Roster,
        records: Records,
        injections: Injections | None = None,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        """``keep``: writes the exits of workers to disk."""
        self._door = door
        self._injections = injections
        self._keep = keep
        self._roster = roster
        self._records = records
        self._trainers: dict[str, TrainerLink] = {}
        self._launchers: set[LauncherLink] = set()
        self._clients: dict[asyncio.Task[None], ClientStreams] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        """The connections without a hello, oldest first."""
        self._lifelines = Lifelines(roster, self.push, self._has_time)
        self._failed: dict[object, str] = {}
        """Client -> the error of the latest push."""
        self.listening = asyncio.Event()

    async def serve(self) -> None:
        """Accept until cancelled."""
        path = self._door.path
        self._listener = await asyncio.to_thread(bind, path, self._door.uids)
        server = await asyncio.start_unix_server(self._accepted, sock=self._listener)
        self.listening.set()
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            path.unlink(missing_ok=True)
            self._lifelines.close()
            for reader, writer in self._clients.values():
                # Process what has been read: a launcher may exit once its connection closes. Data
                # that has not been read makes the close an error there, and it connects again.
                assert isinstance(writer.transport, asyncio.Transport)
                writer.transport.pause_reading()
                reader.feed_eof()
            if self._clients:
                _, late = await asyncio.wait(self._clients, timeout=1.0)
                for task in late:
                    task.cancel()

    def push(self) -> None:
        """Send every client what follows from the current records."""
        for trainer in self._trainers.values():
            self._contained(trainer, partial(trainer.push, self._records))
        for launcher in self._launchers:
            self._contained(launcher, partial(launcher.push, self._records, self._roster))

    def _contained(self, client: TrainerLink | LauncherLink, push: Callable[[], None]) -> None:
        """An error about one client must not end the daemon, which serves others."""
        try:
            push()
        except Exception as error:
            if self._failed.get(client) != (text := repr(error)):
                self._failed[client] = text
                log.exception("a client gets nothing", client=client.name, job=client.job)
        else:
            self._failed.pop(client, None)

    def _has_time(self, worker: str, job: str) -> bool:
        """Whether a launcher will report the exit of ``worker``, and nobody waits for it."""
        known = self._roster.workers.get(worker)
        if known is None or known.status.rank is None:
            return False  # a worker without a rank decides nothing, but is counted on
        launched = any(worker in launcher.owned for launcher in self._launchers)
        return launched and not self._records.recovers(job)

    # --- one connection ---------------------------------------------------------------------------

    def _watch_futex(self, hello: wire.TrainerHello, writer: asyncio.StreamWriter) -> None:
        peer: socket.socket = writer.get_extra_info("socket")
        handed = self._listener.take_from(peer.fileno())
        if handed is None:
            return
        try:
            self._lifelines.watch_futex(hello.status.worker, hello.status.job, handed, hello.futex)
        finally:
            os.close(handed)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = ClientStreams(reader, writer)
        task.add_done_callback(self._clients.pop)
        try:
            await self._converse(reader, writer)
        except WireError as error:
            log.warning("client rejected", reason=str(error), pid=_peer(writer)[0])
            _send(writer, wire.Rejected(reason=str(error)))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client disconnected; a launcher or the kernel reports why a worker ended
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid, uid = _peer(writer)
        if uid not in self._door.uids:
            raise WireError(
                f"user {uid} may not use this daemon: add it to [host] users and restart the daemon"
            )
        first = await self._first(reader, writer)
        match first:
            case wire.TrainerHello():
                _check_version(first.version)
                log.info("trainer connected", worker=first.status.worker, pid=pid, uid=uid)
                await self._trainer(first, reader, writer)
            case wire.LauncherHello():
                _check_version(first.version)
                log.info("launcher connected", job=first.job, pid=pid, uid=uid)
                with self._roster.launching(first.job):
                    await self._launcher(first, reader, writer)
            case wire.Inject() | wire.Withdraw() if self._injections is not None:
                _check_version(first.version)
                _send(writer, self._injections.answer(first, Peer(pid, uid)))
            case _:
                raise WireError(f"expected a hello, got {type(first).__name__}")

    async def _first(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> wire.Message:
        self._strangers[writer] = None
        if len(self._strangers) > self._door.strangers:
            # Without a reason: a worker that is refused with one ends, others connect again.
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.close()
        try:
            async with asyncio.timeout(self._door.hello_s):
                return await _receive(reader)
        except TimeoutError:
            # Without a reason here, too: a worker or this daemon may have been paused.
            log.warning("client dropped: no hello in time", pid=_peer(writer)[0])
            raise ConnectionAbortedError from None
        finally:
            self._strangers.pop(writer, None)

    async def _trainer(
        self, hello: wire.TrainerHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        worker, job = hello.status.worker, hello.status.job
        link = TrainerLink(worker, job, writer)
        self._lifelines.watch(worker, job, _peer(writer)[0])
        if self._roster.ended(worker):
            self._roster.returned.add(worker)
            self.push()
            raise WireError(f"{worker} has ended: {STARTED_AGAIN}")
        replaced = self._trainers.get(worker)
        if replaced is not None:
            replaced.writer.close()
        self._trainers[worker] = link
        door = self._door
        try:
            _send(writer, wire.Welcome(host=door.host, key=door.key_of(job), shadow=door.shadow))
            self._roster.report(stated(hello.status), _now())
            self._watch_futex(hello, writer)
            self._contained(link, partial(link.push, self._records))
            while True:
                message = await _receive(reader)
                if not isinstance(message, wire.StatusReport):
                    raise WireError(f"a trainer cannot send {type(message).__name__}")
                if message.status.worker != worker or message.status.job != job:
                    raise WireError(f"{worker} reported as {message.status.worker}")
                status = stated(message.status)
                self._roster.report(status, _now())
                for launcher in self._launchers:
                    launcher.note(status)
        finally:
            self._failed.pop(link, None)
            if self._trainers.get(worker) is link:
                del self._trainers[worker]
                self._roster.lost(worker, _now())

    async def _launcher(
        self, hello: wire.LauncherHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        link = LauncherLink(hello, writer)
        self._launchers.add(link)
        try:
            while True:
                self._contained(link, partial(link.push, self._records, self._roster))
                match await _receive(reader):
                    case wire.Exited(exit=ended) if ended.worker not in link.owned:
                        raise WireError(f"{ended.worker} is not a worker of this launcher")
                    case wire.Exited(exit=ended) if ended.code is None:
                        raise WireError(f"a launcher must send the exit code of {ended.worker}")
                    case wire.Exited(exit=ended):
                        log.info("worker exited", worker=ended.worker, code=ended.code)
                        self._roster.exited(encodable_exit(ended, time.time()))
                    case wire.LauncherHello() as again:
                        link.workers = again.workers
                        link.owned |= set(again.workers)
                    case other:
                        raise WireError(f"a launcher cannot send {type(other).__name__}")
        finally:
            self._failed.pop(link, None)
            self._launchers.discard(link)
            self._keep()  # before the connection is closed, by which the launcher knows of it


async def _receive(reader: asyncio.StreamReader) -> wire.Message:
    size = wire.body_size(await reader.readexactly(wire.HEADER_SIZE))
    return wire.decode(await reader.readexactly(size))


def _send(writer: asyncio.StreamWriter, message: wire.Message) -> None:
    if writer.is_closing():
        return
    # Checked before the write: one directive of a large job exceeds the limit.
    if writer.transport.get_write_buffer_size() > BUFFER_LIMIT:
        writer.transport.abort()
        return
    writer.write(wire.encode(message))


def _check_version(version: int) -> None:
    if version != wire.VERSION:
        raise WireError(
            f"this daemon uses protocol version {wire.VERSION}, the client {version}: "
            "install the same version of tmd for both"
        )


def _peer(writer: asyncio.StreamWriter) -> tuple[int, int]:
    """Process and user at the other end, as the kernel reports them."""
    return peer_of(writer.get_extra_info("socket"))


def stated(status: WorkerStatus) -> WorkerStatus:
    """``status`` as JSON can hold it but for its loss, with the version of the protocol, which
    trainers of 0.1.0 do not state."""
    status = encodable(status)
    if status.protocol or not status.address:
        return status
    return structs.replace(status, protocol=FIRST_PROTOCOL)


def _now() -> float:
    return asyncio.get_running_loop().time()

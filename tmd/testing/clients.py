"""Trainers and launchers that speak the wire protocol without any training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import structs

from tmd import wire
from tmd.core.planning.directives import Directive
from tmd.core.values.model import Activity, Exit, WorkerStatus


class Connection:
    """One client connection to a daemon. Closed by :func:`connected`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, message: wire.Message) -> None:
        self._writer.write(wire.encode(message))
        await self._writer.drain()

    async def send_raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def end(self) -> None:
        """Send nothing more; the daemon sees the end of the stream."""
        self._writer.write_eof()

    async def receive(self) -> wire.Message:
        """The next message.

        Raises:
            EOFError: the daemon closed the connection.
        """
        header = await self._reader.readexactly(wire.HEADER_SIZE)
        return wire.decode(await self._reader.readexactly(wire.body_size(header)))


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


class FakeTrainer:
    """A trainer that reports as the test demands and records its directives."""

    def __init__(self, connection: Connection, status: WorkerStatus) -> None:
        self._connection = connection
        self.status = status
        self.directives: list[Directive] = []
        self.orders: list[wire.DirectiveOrder] = []

    async def hello(self) -> wire.Welcome:
        await self._connection.send(wire.TrainerHello(wire.VERSION, self.status, obeyed=0))
        answer = await self._connection.receive()
        assert isinstance(answer, wire.Welcome), answer
        return answer

    async def say(self, **changes: object) -> None:
        """Report with ``changes`` to the status."""
        self.status = structs.replace(self.status, **changes)
        await self._connection.send(wire.StatusReport(self.status))

    async def directive(
        self, wanted: Callable[[Directive], bool], timeout_s: float = 10.0
    ) -> Directive:
        """The latest directive if ``wanted`` holds for it, else the next one for which it does."""
        if self.directives and wanted(self.directives[-1]):
            return self.directives[-1]
        async with asyncio.timeout(timeout_s):
            while True:
                order = await self._connection.receive()
                assert isinstance(order, wire.DirectiveOrder), order
                self.orders.append(order)
                self.directives.append(order.directive)
                if wanted(order.directive):
                    return order.directive


class FakeLauncher:
    """A launcher without processes."""

    def __init__(self, connection: Connection, job: str, workers: tuple[str, ...]) -> None:
        self._connection = connection
        self._job = job
        self._workers = workers

    async def hello(self) -> None:
        await self._connection.send(
            wire.LauncherHello(wire.VERSION, self._job, pid=1, workers=self._workers, notices=True)
        )

    async def exited(self, worker: str, code: int | None) -> None:
        await self._connection.send(wire.Exited(Exit(worker, self._job, code, at=0.0)))

    async def next_kill(self, timeout_s: float = 10.0) -> wire.Kill:
        """The next message, which must be an order to end a worker."""
        message = await self._next(timeout_s)
        assert isinstance(message, wire.Kill), message
        return message

    async def next_notice(self, timeout_s: float = 10.0) -> wire.LauncherNotice:
        """The next message, which must be a notice for the log."""
        message = await self._next(timeout_s)
        assert isinstance(message, wire.LauncherNotice), message
        return message

    async def _next(self, timeout_s: float) -> wire.Message:
        async with asyncio.timeout(timeout_s):
            return await self._connection.receive()


async def until(
    condition: Callable[[], bool], *, within_s: float = 5.0, every_s: float = 0.0
) -> None:
    """Wait until ``condition`` holds, checked at every turn of the loop, or ``every_s``.

    Raises:
        TimeoutError: it did not hold in time.
    """
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(every_s)


def worker_status(
    worker: str,
    *,
    job: str = "job",
    world_size: int = 2,
    activity: Activity = Activity.STARTING,
) -> WorkerStatus:
    """A status with plausible values: all ranks are replicas."""
    return WorkerStatus(
        worker=worker,
        job=job,
        world_size=world_size,
        address="127.0.0.1:1",
        pid=1,
        activity=activity,
        replicas=tuple(range(world_size)),
    )

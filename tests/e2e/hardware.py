"""The simulated hardware of a host: a kernel log and a network port for its daemon."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.plugins.sysfs import Tree
from tests.plugins.xid.corpus import open_pipe, record

PORT = "mlx5_0/1"
"""The port of every host."""
READ_MS = 30_000
"""A daemon that reads nothing for this long has ended."""


class Machine:
    """One host's hardware, below ``folder``. Made by :func:`machines`."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "kmsg"
        folder.mkdir()
        self._pipe = open_pipe(self._log)
        self._room = select.poll()
        self._room.register(self._pipe, select.POLLOUT)
        self._tree = Tree(folder)
        self._port = self._tree.rdma("mlx5_0", self._tree.pci("0000:00/0000:00:01.0"))
        self._seq = 0

    def config(self, strategy: str = "act", *, ports: bool = False) -> str:
        """The configuration of the host's daemon."""
        xid = f'[detectors.xid]\nstrategy = "{strategy}"\nsource = "{self._log}"\n'
        nic = (
            f'[detectors.nic]\nstrategy = "{strategy}"\npoll_s = 0.1\ndown_hold_s = 0.2\n'
            f'sys_root = "{self._tree.sys}"\nproc_root = "{self._tree.proc}"\n'
        )
        return xid + nic * ports

    def says(self, line: str) -> None:
        """The kernel writes ``line``."""
        self._seq += 1
        self._write(record(line, self._seq))

    async def storms(self, line: str, times: int) -> None:
        """The kernel writes ``line`` that often, as fast as it is read."""
        head, _, tail = record(line, 0).partition(b",0,")
        first, self._seq = self._seq + 1, self._seq + times
        await asyncio.to_thread(self._write_all, head, tail, first)

    def _write_all(self, head: bytes, tail: bytes, first: int) -> None:
        for seq in range(first, self._seq + 1):
            self._write(b"%b,%d,%b" % (head, seq, tail))

    def _write(self, line: bytes) -> None:
        while True:
            try:
                os.write(self._pipe, line)
                return
            except BlockingIOError:
                if not self._room.poll(READ_MS):
                    raise TimeoutError(f"nobody reads {self._log}") from None

    def link(self, state: str) -> None:
        """Set the state of the port, in the words of sysfs."""
        self._tree.write(f"{self._port}/state", state)

    def close(self) -> None:
        os.close(self._pipe)


@asynccontextmanager
async def machines(folder: Path, *hosts: str) -> AsyncIterator[dict[str, Machine]]:
    """A machine for each host."""
    made = {host: Machine(folder / f"{host}-hardware") for host in hosts}
    try:
        yield made
    finally:
        for machine in made.values():
            machine.close()

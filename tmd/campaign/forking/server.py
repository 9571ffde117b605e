"""``python -P -m tmd.campaign.forking.server SOCKET``: imports torch once, then forks a process for
each client.

The server exits when its standard input closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from tmd.campaign.forking import COMPILER, FIRST, NETWORK
from tmd.campaign.forking.client import STATUS
from tmd.campaign.forking.worker import ForkedWorker, ended, run_script

if os.environ[FIRST]:
    importlib.import_module(os.environ[FIRST])
if os.environ[COMPILER] == "True":
    import torch.distributed.fsdp  # noqa: F401 - imports the compiler
else:
    import tmd.campaign.uncompiled

import tmd.cli
import tmd.daemon.__main__
import tmd.starting
import tmd.trainer
from tmd.lifeline import die_with_parent

SIZE = struct.Struct("!I")
CLONE_NEWNET = 0x40000000


class ForkOrder(NamedTuple):
    """A client's request."""

    command: list[str]
    env: dict[str, str]
    cwd: str
    group: int
    streams: list[int]


def receive(client: socket.socket) -> ForkOrder:
    """The order of a client that has just connected."""
    head, streams, _, _ = socket.recv_fds(client, SIZE.size, 3)
    body = client.recv(SIZE.unpack(head)[0], socket.MSG_WAITALL)
    return ForkOrder(**json.loads(body), streams=list(streams))


class ForkServer:
    """Owns one process for each client. It has a single thread, since a fork copies no other."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self._selector = selectors.DefaultSelector()
        self._watch(door, self._fork_for_client)
        self._watch(sys.stdin, lambda: sys.exit(0))
        self._fork: ForkOrder | None = None

    def run(self) -> ForkOrder:
        """Serve clients. Returns in a fork only, with the order that the fork carries out.

        Raises:
            SystemExit: the process that started the server has closed its standard input.
        """
        while self._fork is None:
            for key, _ in self._selector.select():
                if self._fork is None and key.fd in self._selector.get_map():
                    key.data()
        return self._fork

    def _watch(self, what: Any, act: Callable[[], None]) -> None:
        self._selector.register(what, selectors.EVENT_READ, act)

    def _fork_for_client(self) -> None:
        client, _ = self._door.accept()
        order = receive(client)
        pid = os.fork()
        if pid == 0:
            client.close()
            self._close_all()
            self._fork = order
            return
        for stream in order.streams:
            os.close(stream)
        ended_fd = os.pidfd_open(pid)
        self._watch(ended_fd, lambda: self._report_exit(ended_fd, pid, client))
        self._watch(client, lambda: self._signal_or_kill(client, pid))

    def _close_all(self) -> None:
        """In a fork: close everything of the server, including sockets of other clients."""
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not sys.stdin:
                os.close(
                    key.fd
                    if isinstance(key.fileobj, int)
                    else cast(socket.socket, key.fileobj).detach()
                )
        self._selector.close()

    def _signal_or_kill(self, client: socket.socket, pid: int) -> None:
        number = client.recv(1)
        if not number:
            self._selector.unregister(client)
        os.kill(pid, number[0] if number else signal.SIGKILL)

    def _report_exit(self, ended_fd: int, pid: int, client: socket.socket) -> None:
        _, status = os.waitpid(pid, 0)
        if client.fileno() in self._selector.get_map():
            self._selector.unregister(client)
            with contextlib.suppress(BrokenPipeError):  # the client was killed just now
                client.send(STATUS.pack(os.waitstatus_to_exitcode(status)))
        self._selector.unregister(ended_fd)
        os.close(ended_fd)
        client.close()


def become(order: ForkOrder) -> None:
    """Turn this fork into the process of ``order``, as far as is possible without exec."""
    os.setpgid(0, order.group)
    die_with_parent()
    for number, stream in enumerate(order.streams):
        os.dup2(stream, number)
        os.close(stream)
    if NETWORK in order.env:
        _enter(order.env[NETWORK])
    os.chdir(order.cwd)
    os.environ.clear()
    os.environ.update(order.env)
    added = [place for place in order.env.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:0] = [place for place in added if place not in sys.path]
    random.seed()
    if order.command[1] != "-P":
        run_script(order.command)
        return
    sys.argv = ["tmd", *order.command[4:]]
    if order.command[3] == "tmd.daemon":
        tmd.daemon.__main__.main()
        return
    tmd.starting.spawn = cast("Callable[..., subprocess.Popen[bytes]]", ForkedWorker)
    tmd.cli.main()


def _enter(namespace: str) -> None:
    """Use that network from now on; existing sockets stay in their network."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    if libc.setns(place, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the network {namespace}")
    os.close(place)


def main() -> None:
    die_with_parent()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(sys.argv[1])
        door.listen(64)
        # Each collection in a fork would otherwise look at all objects of torch, and copy their
        # pages.
        gc.collect()
        gc.freeze()
        print("ready", flush=True)
        order = ForkServer(door).run()
    os._exit(ended(lambda: become(order)))  # quicker than to free all modules of torch


if __name__ == "__main__":
    main()

"""Several fabrics in one process, for most tests of the fabric."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from tmd.core.values.model import Member, Membership
from tmd.fabric import Fabric, Group, Neutral
from tmd.fabric.dial import PATIENCE_S
from tmd.fabric.handshake import Talk

T = TypeVar("T")
KEY = b"a key of thirty-two bytes or so."
PATIENCE = 30.0


def member(fabric: Fabric) -> Member:
    return Member(worker=fabric.worker, host="here", address=fabric.address)


def sync(**options: object) -> dist.AllreduceOptions:
    """Options of an all-reduce whose caller waits for it."""
    opts = dist.AllreduceOptions()
    opts.asyncOp = False
    for name, value in options.items():
        setattr(opts, name, value)
    return opts


def conversed(sock: socket.socket, talk: Talk[T]) -> T:
    """Hold one side of a handshake over ``sock``; returns its outcome."""
    want = next(talk)
    try:
        while True:
            if isinstance(want, bytes):
                sock.sendall(want)
                want = next(talk)
            else:
                want = talk.send(sock.recv(want, socket.MSG_WAITALL))
    except StopIteration as done:
        outcome: T = done.value
        return outcome


class Circle:
    """Fabrics ``w0``... with a rank each, in threads of this process; ``close`` ends them."""

    def __init__(self, size: int, patience_s: float = PATIENCE_S, host: str = "127.0.0.1") -> None:
        self.fabrics = [Fabric(f"w{i}", KEY, host=host, patience_s=patience_s) for i in range(size)]
        self.all = list(self.fabrics)
        self.membership = Membership(epoch=1, members=tuple(map(member, self.fabrics)))
        self.groups: dict[str, dict[str, Group]] = {}
        for rank, fabric in enumerate(self.fabrics):
            fabric.enter(self.membership, rank)

    @property
    def size(self) -> int:
        return len(self.fabrics)

    def group(self, name: str = "0", ranks: Sequence[int] | None = None) -> None:
        """Create a group on all its members."""
        ranks = range(self.size) if ranks is None else ranks
        self.groups[name] = {}
        for rank in ranks:
            self.add_to(name, self.fabrics[rank], ranks)

    def add_to(self, name: str, fabric: Fabric, ranks: Sequence[int]) -> Group:
        group = Group(fabric, name, ranks, timeout=timedelta(seconds=PATIENCE))
        self.groups[name][fabric.worker] = group
        return group

    def of(self, fabric: Fabric, name: str = "0") -> Group:
        return self.groups[name][fabric.worker]

    def standby(self, worker: str, rank: int = 0) -> Fabric:
        """A fabric in the sandbox with the same groups."""
        fabric = Fabric(worker, KEY)
        self.all.append(fabric)
        fabric.sandbox(Neutral(), rank, self.size)
        for name, groups in self.groups.items():
            ranks = next(iter(groups.values())).view.ranks
            self.add_to(name, fabric, ranks)
        return fabric

    def each(self, act, fabrics=None):
        """Run ``act`` for each fabric in its own thread; returns the results in order."""
        fabrics = self.fabrics if fabrics is None else fabrics
        return at_once([lambda f=f: act(f) for f in fabrics])

    def allreduce(self, length: int = 1000, name: str = "0") -> list[torch.Tensor]:
        """Sum different values of the ranks, on all ranks of the group."""

        def one(fabric: Fabric) -> torch.Tensor:
            seed = torch.Generator().manual_seed(fabric.rank or 0)
            tensor = torch.randn(length, generator=seed)
            self.of(fabric, name).allreduce([tensor], sync()).wait()
            return tensor

        return self.each(one, [f for f in self.fabrics if f.worker in self.groups[name]])

    def close(self) -> None:
        for fabric in self.all:
            fabric.close()


def at_once(acts, timeout=PATIENCE):
    """Run all in threads; raises the first error, or TimeoutError if one does not end."""
    results = {}
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = acts[i]()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    if errors:
        raise errors[0]
    if len(results) < len(acts):
        raise TimeoutError(f"{len(acts) - len(results)} of {len(acts)} did not end")
    return [results[i] for i in range(len(acts))]


@contextmanager
def circle(size: int, patience_s: float = PATIENCE_S, host: str = "127.0.0.1") -> Iterator[Circle]:
    made = Circle(size, patience_s, host)
    try:
        yield made
    finally:
        made.close()

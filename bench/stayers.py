"""What each process of :mod:`bench.growth` does: one fabric, its groups, and what it cost."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.fabric.circle import KEY, PATIENCE, member, sync
from tmd import wire
from tmd.core.planning.directives import Arm
from tmd.core.values.model import Activity, Member, Membership, WorkerStatus
from tmd.fabric import Fabric, Group, GroupView, Neutral
from tmd.trainer.worker.arming import Arming

SMALL, LARGE = 1000, 300_000
"""Elements: by recursive doubling, and by the ring."""
TCP_INFO_BYTES = struct.Struct("=120xQQ")
"""``struct tcp_info``: what was sent and acknowledged, and what was received."""


class Part(NamedTuple):
    """This process's part in the present job."""

    fabric: Fabric
    groups: list[Group]
    arming: Arming


class Mark(NamedTuple):
    """What a process has used up to now."""

    cpu_s: float
    opened: int


_parts: dict[int, Part] = {}
"""By the number of the process: one entry, the process's own."""


def views(rank: int, size: int) -> tuple[GroupView, ...]:
    """The groups of ``rank``: the world, a pair, and the ranks of equal place in their pairs."""
    first = rank - rank % 2
    return (
        GroupView("world", tuple(range(size))),
        GroupView(f"pair-{first}", (first, first + 1)),
        GroupView(f"place-{rank % 2}", tuple(range(rank % 2, size, 2))),
    )


def begin(number: int, _: int, __: object) -> Member:
    """Be somebody whom others can call."""
    fabric = Fabric(f"w{number:02d}", KEY)
    status = WorkerStatus(fabric.worker, "bench", 1, "", 0, Activity.TRAINING)
    arming = Arming.of(fabric, lambda epoch, plan, refusal: None, lambda: status)
    _parts[number] = Part(fabric, [], arming)
    return member(fabric)


def enter(number: int, last: int, _: object, membership: Membership, leaving: int) -> None:
    """Hold a rank, or be the standby, which builds what the rank that ``leaving`` holds builds."""
    fabric, groups, _arming = _parts[number]
    size = membership.size
    rank = membership.rank_of(fabric.worker)
    if rank is not None:
        fabric.enter(membership, rank)
    elif number == last - 1:
        fabric.sandbox(Neutral(), leaving, size)
    else:
        return
    place = leaving if rank is None else rank
    patience = timedelta(seconds=PATIENCE)
    groups += [Group(fabric, v.name, v.ranks, timeout=patience) for v in views(place, size)]
    fabric.learn(tuple(views(each, size) for each in range(size)))


def step(number: int, _: int, __: object) -> list[Tensor]:
    """What links a step opens: collectives small and large in each group, and the vote."""
    fabric, groups, _arming = _parts[number]
    if fabric.standing is None:
        return []
    found = []
    for group in groups:
        for length in (SMALL, LARGE):
            generator = torch.Generator().manual_seed(fabric.rank or 0)
            tensor = torch.randn(length, generator=generator)
            group.allreduce([tensor], sync()).wait()
            found.append(tensor[:1].clone())
    fabric.reduce_min([1])
    return found


def mark(number: int, _: int, __: object) -> Mark:
    """CPU time of all threads of this process, and links that it opened."""
    return Mark(time.process_time(), _parts[number].fabric.counters.opened)


def idle(_: int, __: int, ___: object, *____: object) -> None:
    """Hear of something, and do nothing."""


def prepare(number: int, last: int, _: object, order: bytes, rank: int) -> int:
    """The joiner opens the links of ``rank``, and says how many; the others accept them."""
    fabric = _parts[number].fabric
    if number != last - 1:
        return 0
    return fabric.prepare(_order(order).membership, rank, timeout=PATIENCE, cancel=lambda: False)


def arm(number: int, _: int, __: object, order: bytes) -> None:
    """Hear that all is ready, and look before the vote whether this rank is."""
    fabric, _groups, arming = _parts[number]
    if fabric.standing is None:
        return
    arming.arm(_order(order))
    later = _order(order).membership
    ticket = arming.begin_vote(lambda _: fabric.has_in_flight(later) or fabric.joiner_gone(later))
    assert ticket, f"{fabric.worker} is not ready"
    assert arming.end_vote(ticket) is not None


def switch(number: int, last: int, _: object, order: bytes) -> tuple[float, int]:
    """Seconds of CPU that the switch takes, and the bytes that its new links have carried."""
    fabric = _parts[number].fabric
    if fabric.standing is None and number != last - 1:
        return 0.0, 0
    later = _order(order).membership
    rank = later.rank_of(fabric.worker)
    cpu_s = _cpu(lambda: fabric.switch(later, rank))
    if fabric.standing is None:
        return cpu_s, 0
    joiner = f"w{last - 1:02d}"
    links = [link for key, link in fabric.standing.member_links() if key.worker == joiner]
    return cpu_s, sum(_carried(link.sock) for link in links)


def end(number: int, _: int, __: object) -> None:
    """Forget the job."""
    _parts.pop(number).fabric.close()


def _order(order: bytes) -> Arm:
    message: Any = wire.decode(order[wire.HEADER_SIZE :])
    assert isinstance(message.directive, Arm)
    return message.directive


def _cpu(act: Callable[[], object]) -> float:
    before = time.process_time()
    act()
    return time.process_time() - before


def _carried(sock: socket.socket) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES.size)
    return sum(TCP_INFO_BYTES.unpack(info))

"""The backend without the runtime: plain torchrun, members found through torch's store.

There is no vote here, so an aborted operation raises, as with any other backend.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address

import msgspec

from tmd.core.values.model import Member, Membership
from tmd.fabric.fabric import Fabric
from tmd.torch_private.c10d import Store

LOOPBACK = "127.0.0.1"


def lone_fabric(store: Store, rank: int, size: int) -> Fabric:
    """A fabric in epoch 0 whose members published themselves in ``store``.

    Raises:
        RuntimeError: the address of a member is not reachable from other hosts.
    """
    if rank == 0:
        store.set("tmd/key", os.urandom(32).hex())
    key = bytes.fromhex(store.get("tmd/key").decode())
    fabric = Fabric(f"solo/{rank}.{os.urandom(4).hex()}", key, host=own_address())
    member = Member(worker=fabric.worker, host=socket.gethostname(), address=fabric.address)
    store.set(f"tmd/member/{rank}", msgspec.json.encode(member).decode())
    members = tuple(
        msgspec.json.decode(store.get(f"tmd/member/{r}"), type=Member) for r in range(size)
    )
    if why := why_unreachable(members):
        fabric.close()
        raise RuntimeError(why)
    fabric.enter(Membership(epoch=0, members=members), rank)
    return fabric


def own_address() -> str:
    """The address of this host on the route to torch's store, unless ``TMD_ADVERTISE`` gives it."""
    if given := os.environ.get("TMD_ADVERTISE"):
        return given
    with suppress(OSError):  # the name is unknown
        found = socket.getaddrinfo(
            os.environ.get("MASTER_ADDR", LOOPBACK), 9, type=socket.SOCK_DGRAM
        )
        for family, *_, address in found:
            # Connecting a datagram socket sends nothing; it only selects the route.
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return LOOPBACK


def why_unreachable(members: Sequence[Member]) -> str:
    """Why some of ``members`` cannot reach another one; empty if they can, as far as known."""
    local = [number for number, each in enumerate(members) if _is_local(each.address)]
    if not local or len(local) == len(members):
        return ""
    here = members[local[0]]
    return (
        f"rank {local[0]} on {here.host} has the address {here.address}, which other hosts cannot "
        "reach: MASTER_ADDR is a name of the loopback interface there, or cannot be resolved. Set "
        "TMD_ADVERTISE on each host to its address in the network of the job"
    )


def _is_local(address: str) -> bool:
    with suppress(ValueError):  # a name
        return ip_address(address.rpartition(":")[0]).is_loopback
    return False

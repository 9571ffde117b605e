"""The backend without the runtime: plain torchrun, members found through torch's store.

There is no vote here, so an aborted operation raises, as with any other backend.
"""

from __future__ import annotations

import os
import socket

import msgspec

from tmd.core.values.model import Member, Membership
from tmd.fabric.fabric import Fabric
from tmd.torch_private.c10d import Store


def lone_fabric(store: Store, rank: int, size: int) -> Fabric:
    """A fabric in epoch 0 whose members published themselves in ``store``."""
    if rank == 0:
        store.set("tmd/key", os.urandom(32).hex())
    key = bytes.fromhex(store.get("tmd/key").decode())
    fabric = Fabric(f"solo/{rank}.{os.urandom(4).hex()}", key, host=_own_host())
    member = Member(worker=fabric.worker, host=socket.gethostname(), address=fabric.address)
    store.set(f"tmd/member/{rank}", msgspec.json.encode(member).decode())
    members = tuple(
        msgspec.json.decode(store.get(f"tmd/member/{r}"), type=Member) for r in range(size)
    )
    fabric.enter(Membership(epoch=0, members=members), rank)
    return fabric


def _own_host() -> str:
    """The address of this host on the route to torch's store."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        # Connecting a datagram socket sends nothing; it only selects the route.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"

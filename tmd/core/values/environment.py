"""The environment variables of a worker, as torchrun sets them.

The launcher sets them before the rank is known, and ``join()`` sets the true ones. Until then a
worker has the values of a standby, which are those of the last rank: a script that checks for
``RANK`` takes the distributed path, and no script writes the files that only rank 0 writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

MASTER = ("127.0.0.1", "29500")
"""torch's defaults. ``join()`` sets the address of this process's store instead."""
FOREIGN = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE")
"""Variables that only another launcher can have set."""


class Slot(Struct, frozen=True):
    """One of the workers of a launcher."""

    job: str
    world_size: int
    local_size: int
    number: int
    restarts: int
    max_restarts: int


def announced(slot: Slot) -> dict[str, str]:
    """Variables that the launcher sets."""
    hosts = slot.world_size // slot.local_size
    return {
        **ranked(slot.world_size - 1, slot.world_size, hosts - 1, hosts),
        "LOCAL_RANK": str(slot.number),
        "LOCAL_WORLD_SIZE": str(slot.local_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": MASTER[0],
        "MASTER_PORT": MASTER[1],
        "TORCHELASTIC_RUN_ID": slot.job,
        "TORCHELASTIC_RESTART_COUNT": str(slot.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(slot.max_restarts),
    }


def of_rank(rank: int, hosts: Sequence[str]) -> dict[str, str]:
    """Variables of the worker with ``rank``, in a job whose rank r is on ``hosts[r]``."""
    different = list(dict.fromkeys(hosts))
    return ranked(rank, len(hosts), different.index(hosts[rank]), len(different))


def ranked(rank: int, size: int, host: int, hosts: int) -> dict[str, str]:
    """``host``: number of this host among ``hosts``."""
    return {
        "RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": str(host),
        "WORLD_SIZE": str(size),
        "ROLE_WORLD_SIZE": str(size),
        "GROUP_WORLD_SIZE": str(hosts),
    }

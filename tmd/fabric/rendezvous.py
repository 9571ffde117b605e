"""Lets ``dist.init_process_group("tmd")`` find a store where none is shared.

torch's ``env://`` requires a store. It gets one of this process alone, on the loopback interface,
announced as torchrun announces its agent's.
"""

from __future__ import annotations

import os
import socket

from tmd.torch_private.c10d import TCPStore

_stores: list[TCPStore] = []


def publish_environment(rank: int, size: int) -> None:
    """Set what ``env://`` reads: rank, size and a store that lives with the process."""
    if not _stores:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            # The store owns the descriptor now.
            _stores.append(
                TCPStore(
                    "127.0.0.1",
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=listening.detach(),
                )
            )
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(_stores[0].port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        RANK=str(rank),
        WORLD_SIZE=str(size),
    )

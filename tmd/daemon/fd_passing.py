"""A listening Unix socket whose connections keep a file descriptor sent with their data.

asyncio reads streams with ``recv``, with which the kernel discards descriptors. That suits
clients that may not pass one.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from typing import Any
from weakref import WeakValueDictionary

NOTHING = -1
_UCRED = struct.Struct("3i")
_ROOM = socket.CMSG_LEN(array.array("i").itemsize)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel reports them."""
    pid, uid, _ = _UCRED.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    return pid, uid


class AgentConnection(socket.socket):
    """Keeps the first descriptor received, if the peer may pass one, until taken or closed."""

    may_hand = False
    handed = NOTHING

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        if not self.may_hand:
            return super().recv(size, flags)
        flags |= socket.MSG_CMSG_CLOEXEC
        data, ancillary, _, _ = self.recvmsg(size, _ROOM, flags)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                (self.handed,) = array.array("i", content)
                self.may_hand = False
        return data

    def take(self) -> int | None:
        """The received descriptor, which the caller closes."""
        found, self.handed, self.may_hand = self.handed, NOTHING, False
        return None if found == NOTHING else found

    def close(self) -> None:
        found = self.take()
        if found is not None:
            with contextlib.suppress(OSError):
                os.close(found)
        super().close()


class AgentListener(socket.socket):
    """Accepts such connections; only ``uids`` may pass a descriptor."""

    def __init__(self, uids: frozenset[int]) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._uids = uids
        self._open: WeakValueDictionary[int, AgentConnection] = WeakValueDictionary()

    def accept(self) -> tuple[socket.socket, Any]:
        plain, address = super().accept()
        connection = AgentConnection(plain.family, plain.type, plain.proto, plain.detach())
        connection.setblocking(self.gettimeout() != 0.0)
        connection.may_hand = peer_of(connection)[1] in self._uids
        self._open[connection.fileno()] = connection
        return connection, address

    def taken(self, connection: int) -> int | None:
        """The descriptor received over ``connection``, which the caller closes."""
        known = self._open.get(connection)
        return None if known is None else known.take()

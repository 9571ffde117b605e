"""A listening Unix socket whose connections keep a file descriptor sent with their data.

asyncio reads streams with ``recv``, and the kernel then discards any descriptor. So
:class:`AgentConnection` receives otherwise, except from clients that may not pass one.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from typing import Any
from weakref import WeakValueDictionary

from tmd.folders import peer_of

NOTHING = -1
_ROOM = socket.CMSG_LEN(array.array("i").itemsize)
"""Room for one descriptor. The kernel closes any further ones."""


class AgentConnection(socket.socket):
    """Keeps the first descriptor received, if the peer may pass one, until taken or closed."""

    accepts_fd = False
    received_fd = NOTHING

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        if not self.accepts_fd:
            return super().recv(size, flags)
        flags |= socket.MSG_CMSG_CLOEXEC
        data, ancillary, _, _ = self.recvmsg(size, _ROOM, flags)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                (self.received_fd,) = array.array("i", content)
                self.accepts_fd = False
        return data

    def take(self) -> int | None:
        """The received descriptor, which the caller closes. No other one is accepted afterwards."""
        found, self.received_fd, self.accepts_fd = self.received_fd, NOTHING, False
        return None if found == NOTHING else found

    def close(self) -> None:
        found = self.take()
        if found is not None:
            with contextlib.suppress(OSError):
                os.close(found)
        super().close()


class AgentListener(socket.socket):
    """Accepts :class:`AgentConnection` sockets; only ``uids`` may pass a descriptor."""

    def __init__(self, uids: frozenset[int]) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._uids = uids
        self._open: WeakValueDictionary[int, AgentConnection] = WeakValueDictionary()

    def accept(self) -> tuple[socket.socket, Any]:
        plain, address = super().accept()
        connection = AgentConnection(plain.family, plain.type, plain.proto, plain.detach())
        connection.setblocking(self.gettimeout() != 0.0)
        connection.accepts_fd = peer_of(connection)[1] in self._uids
        self._open[connection.fileno()] = connection
        return connection, address

    def take_from(self, fileno: int) -> int | None:
        """The descriptor received over the connection ``fileno``; the caller closes it."""
        known = self._open.get(fileno)
        return None if known is None else known.take()

"""A kernel log written by a test."""

from __future__ import annotations

import os
import socket

from .corpus import record


class Log:
    def __init__(self):
        self.ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._theirs.setblocking(False)
        self._seq = 0

    def write(self, text, **changes):
        """Append a record, after a gap of ``lost`` records."""
        self._seq += 1 + changes.pop("lost", 0)
        self.ours.send(record(text, self._seq, **changes))

    def open(self, place):
        return os.dup(self._theirs.fileno())

    def close(self):
        self.ours.close()
        self._theirs.close()


def refused(number):
    """A host whose log cannot be opened."""

    def open_log(place):
        raise OSError(number, os.strerror(number))

    return open_log

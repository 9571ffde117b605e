"""The reading process: one byte in, one snapshot out, until its parent closes the pipe.

It is long-lived, so it stays small: it imports only the standard library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import NamedTuple

from .reader import NicReader
from .snapshot import ScopeReading, Snapshot, absent


class ReaderArguments(NamedTuple):
    """The arguments of the process."""

    scope: ScopeReading
    counters: tuple[str, ...]
    sys_root: str = "/sys"
    proc_root: str = "/proc"
    interfaces: Mapping[str, str] = {}
    """See :class:`NicReader`."""
    in_scope: tuple[str, ...] = ()

    def after(self, snapshot: Snapshot) -> ReaderArguments:
        """For a process that goes on after this one, whose last answer was ``snapshot``."""
        interfaces = {port.identity: port.interface for port in snapshot.there if port.interface}
        return self._replace(
            interfaces={**absent(self.interfaces, interfaces), **interfaces},
            in_scope=tuple(port.identity for port in snapshot.ports),
        )


def main(argument: str) -> None:
    request = ReaderArguments(*json.loads(argument))
    request = request._replace(scope=ScopeReading(*request.scope))
    reader = NicReader(*request)
    while os.read(0, 1):
        print(json.dumps(reader.read()), flush=True)

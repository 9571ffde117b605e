"""The reading process: one byte in, one snapshot out, until its parent closes the pipe.

It is long-lived, so it stays small: it imports only the standard library.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from .reader import NicReader
from .snapshot import ScopeReading


class Request(NamedTuple):
    """The arguments of the process."""

    scope: ScopeReading
    counters: tuple[str, ...]
    sys_root: str = "/sys"
    proc_root: str = "/proc"


def main(argument: str) -> None:
    request = Request(*json.loads(argument))
    scope = ScopeReading(*request.scope)
    reader = NicReader(scope, request.counters, request.sys_root, request.proc_root)
    while os.read(0, 1):
        print(json.dumps(reader.read()), flush=True)

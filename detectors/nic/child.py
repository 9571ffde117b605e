"""The process that reads: a line in, a snapshot out, until its parent closes the pipe.

It stays, so it is kept small: it imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from .reader import Reader
from .snapshot import Scope


class Request(NamedTuple):
    """What it is told on its command line."""

    scope: Scope
    counters: tuple[str, ...]
    sys_root: str = "/sys"
    proc_root: str = "/proc"


def main(argument: str) -> None:
    request = Request(*json.loads(argument))
    scope = Scope(*request.scope)
    reader = Reader(scope, request.counters, request.sys_root, request.proc_root)
    while os.read(0, 1):
        print(json.dumps(reader.read()), flush=True)

"""The process that reads: a line in, a snapshot out, until its parent closes the pipe.

It stays, so it is kept small: it imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
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
    roots = Path(request.sys_root), Path(request.proc_root)
    reader = Reader(Scope(*request.scope), request.counters, *roots)
    while os.read(0, 1):
        print(json.dumps(reader.read()), flush=True)

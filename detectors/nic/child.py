"""The process that reads: a line in, a snapshot out, until its parent closes the pipe."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from .reader import Reader
from .snapshot import Scope


class Request(Struct, frozen=True):
    """What it is told on its command line."""

    scope: Scope
    counters: tuple[str, ...]
    sys_root: str = "/sys"
    proc_root: str = "/proc"


def main(argument: str) -> None:
    request = msgspec.json.decode(argument, type=Request)
    roots = Path(request.sys_root), Path(request.proc_root)
    reader = Reader(request.scope, request.counters, *roots)
    while os.read(0, 1):
        print(msgspec.json.encode(reader.read()).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

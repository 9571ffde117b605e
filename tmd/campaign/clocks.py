"""A wall clock for each host's daemon that can be set while it runs. Needs a C compiler."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from tmd.campaign.commands import run
from tmd.core.values.errors import TmdError

SOURCE = Path(__file__).with_name("clock.c")
SECOND = 1_000_000_000


def unable() -> str:
    """Why this machine cannot give each host a clock of its own; empty if it can."""
    return "" if _compiler() else "needs a C compiler, for a clock that can be set"


class Clocks:
    """Clock files in ``folder``, and the environment of a daemon that uses one."""

    def __init__(self, folder: Path, hosts: Iterable[str]) -> None:
        self._library = folder / "clock.so"
        self._files = {host: folder / f"clock-{host}" for host in hosts}
        compiler = _compiler()
        if compiler is None:
            raise TmdError(unable())
        flags = ("-shared", "-fPIC", "-O2", "-Wall", "-Werror")
        names = (str(self._library), str(SOURCE))
        run(compiler, *flags, "-o", *names, "-ldl")
        for host in self._files:
            self.shift(host, 0.0)

    def environment(self, host: str) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "TMD_CLOCK": str(self._files[host])}

    def shift(self, host: str, seconds: float) -> None:
        """Set the clock of ``host`` to this machine's plus ``seconds``."""
        file = self._files[host]
        # In place, since the daemon has mapped it.
        with file.open("r+b" if file.exists() else "wb") as clock:
            clock.write(round(seconds * SECOND).to_bytes(8, "little", signed=True))


def _compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")

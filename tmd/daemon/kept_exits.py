"""The exits of workers outlive a restart of the daemon.

A launcher ends with its workers, and nobody else knows their exit statuses. A job has ended only
once all of them are known, which may be minutes after the first.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tmd.core.values.model import Exit
from tmd.daemon.roster import Roster
from tmd.daemon.state_file import StateFile

LOOK_S = 0.5


class KeptExits:
    """Gives ``roster`` the exits that the last run of the daemon knew, and keeps its own."""

    def __init__(self, roster: Roster, state_dir: Path) -> None:
        self._roster = roster
        self._file = StateFile(state_dir / "exits.json", "the exits of workers")
        roster.restore(self._file.read(tuple[Exit, ...], ()))

    async def run(self) -> None:
        """Run until cancelled; the last exits are kept, too."""
        try:
            while True:
                self.keep()
                await asyncio.sleep(LOOK_S)
        finally:
            self.keep()

    def keep(self) -> None:
        """Write the exits to disk if there are new ones, or if the disk did not take them."""
        self._file.keep(tuple(each for each in self._roster.exits if each.code is not None))

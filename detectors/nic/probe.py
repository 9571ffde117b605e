"""Runs the reader in a process of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tmd.plugin import bare_python

from ..children import AskedChild, Ended, Hung
from .child import ReaderArguments
from .snapshot import Snapshot

CHILD = Path(__file__).with_name("child.py")


class NicProbe:
    """Owns the child. Closed by :meth:`close`."""

    def __init__(self, request: ReaderArguments) -> None:
        self._request = request
        self._child = AskedChild("the reader", self._command, Snapshot)

    async def read(self, timeout_s: float) -> Snapshot | None:
        """A snapshot, or ``None`` if there was no valid answer in time."""
        try:
            snapshot = await self._child.ask(timeout_s)
        except (Hung, Ended):
            return None
        self._request = self._request.after(snapshot)
        return snapshot

    async def close(self) -> None:
        await self._child.close()

    def _command(self) -> list[str]:
        return bare_python(CHILD, msgspec.json.encode(self._request).decode())

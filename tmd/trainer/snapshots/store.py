"""Stores copies of states in the memory of this host, for a rollback."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tmd.core.values.snapshots import Kept
from tmd.trainer.protocol.copies import StateCopy


class SnapshotStore:
    """Copies by rank and step, only of the newest known ``batches()`` call. Thread-safe."""

    def __init__(
        self, tell: Callable[[tuple[Kept, ...]], None], freed: Callable[[StateCopy], None]
    ) -> None:
        """``tell`` gets rank and step of all copies after each change, ``freed`` each copy that is
        dropped or replaced. Both run under a lock and must not call this store."""
        self._tell = tell
        self._freed = freed
        self._copies: dict[tuple[int, int], StateCopy] = {}
        self._call = 0
        self.whole: int | None = None
        """The step that was kept last, of which all ranks have copies. These are good, while one
        that is made later may be torn."""
        self._changing = threading.Lock()

    def put(self, copy: StateCopy) -> bool:
        """Store ``copy``, unless the whole snapshot has one already; ``False`` if its ``batches()``
        call has ended."""
        call = copy.position.call
        with self._changing:
            if call < self._call:
                return False
            if call > self._call:
                # A copy of the next call implies that all ranks have ended the previous one.
                self._keep(lambda step: False)
                self._call = call
            before = self._copies.get((copy.rank, copy.step))
            if before is None or copy.step != self.whole:
                self._copies[copy.rank, copy.step] = copy
                if before is not None:
                    self._freed(before)
                self._report()
        return True

    def get(self, rank: int, step: int) -> StateCopy | None:
        return self._copies.get((rank, step))

    def keep_only(self, step: int) -> None:
        """Drop all copies of other steps."""
        with self._changing:
            self.whole = step
            self._keep(lambda other: other == step)

    def drop(self, step: int) -> None:
        """Drop copies of ``step``, whose snapshot will not be completed, unless it is whole since
        an earlier epoch."""
        with self._changing:
            if step != self.whole:
                self._keep(lambda other: other != step)

    def begin_call(self, call: int) -> None:
        """Drop the copies of ``batches()`` calls before ``call``."""
        with self._changing:
            if call > self._call:
                self._call = call
                self._keep(lambda step: False)

    def clear(self) -> None:
        """Drop all copies."""
        with self._changing:
            self._keep(lambda step: False)

    def _keep(self, wanted: Callable[[int], bool]) -> None:
        gone = [key for key in self._copies if not wanted(key[1])]
        for key in gone:
            self._freed(self._copies.pop(key))
        if gone:
            self._report()

    def _report(self) -> None:
        self._tell(tuple(sorted(Kept(rank, step) for rank, step in self._copies)))

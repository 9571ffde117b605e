"""Copies of states in the memory of this host, to which ranks can go back."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tmd.core.values.snapshots import Kept
from tmd.trainer.protocol.copies import StateCopy


class SnapshotStore:
    """Copies by rank and step; of one ``batches()`` call, the newest that is known. Any thread."""

    def __init__(
        self, tell: Callable[[tuple[Kept, ...]], None], freed: Callable[[StateCopy], None]
    ) -> None:
        """``tell`` is called with what is here at each change, ``freed`` with what has gone."""
        self._tell = tell
        self._freed = freed
        self._copies: dict[tuple[int, int], StateCopy] = {}
        self._call = 0
        self._changing = threading.Lock()

    def put(self, copy: StateCopy) -> bool:
        """Keep ``copy``; ``False`` if it is of a call that is over."""
        call = copy.position.call
        with self._changing:
            if call < self._call:
                return False
            if call > self._call:
                # Who is there has seen all ranks come to the end of the call before.
                self._leave(lambda step: False)
                self._call = call
            before = self._copies.pop((copy.rank, copy.step), None)
            self._copies[copy.rank, copy.step] = copy
            if before is not None:
                self._freed(before)
            self._told()
        return True

    def get(self, rank: int, step: int) -> StateCopy | None:
        return self._copies.get((rank, step))

    def only(self, step: int) -> None:
        """No other step is needed any more."""
        with self._changing:
            self._leave(lambda kept: kept == step)

    def drop(self, step: int) -> None:
        """Of ``step`` there will be no whole snapshot."""
        with self._changing:
            self._leave(lambda kept: kept != step)

    def clear(self, call: int) -> None:
        """Nobody goes back to before ``call``."""
        with self._changing:
            self._call = max(call, self._call)
            self._leave(lambda step: False)

    def _leave(self, wanted: Callable[[int], bool]) -> None:
        gone = [key for key in self._copies if not wanted(key[1])]
        for key in gone:
            self._freed(self._copies.pop(key))
        if gone:
            self._told()

    def _told(self) -> None:
        self._tell(tuple(sorted(Kept(rank, step) for rank, step in self._copies)))

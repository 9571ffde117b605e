"""Alerts in SQLite, in the order in which they came, and which of them the store has taken.

Blocking: on a disk only :class:`tmd.daemon.journal.Journal` may use it, from its thread.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from tmd.core.alerts.injection import PREFIX
from tmd.core.values.decode_errors import UNREADABLE
from tmd.core.values.model import Alert

_SCHEMA = """
CREATE TABLE IF NOT EXISTS alerts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    written REAL NOT NULL,
    published INTEGER NOT NULL DEFAULT 0,
    body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS waiting ON alerts (number) WHERE published = 0;
"""


class Bounds(Struct, frozen=True):
    """How much is kept. What was published goes first, then the oldest."""

    alerts: int = 10_000
    seconds: float = 7 * 86_400.0
    """Of published alerts: they are told again to a store that has lost its data. One that was
    never published goes only when there are too many."""


class Ledger:
    """One table. Raises :class:`sqlite3.Error` if the disk fails. Closed by :meth:`close`.

    Args:
        place: a file, or ``:memory:``.
    """

    def __init__(self, place: str, bounds: Bounds) -> None:
        self._bounds = bounds
        # The thread that opens it on a disk is the one that uses it; in memory it is the loop's.
        self._db = sqlite3.connect(place, timeout=1.0, isolation_level=None)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            # A power cut may cost the last alerts, never the file.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
        except BaseException:
            self._db.close()
            raise

    def add(self, alerts: Iterable[Alert], now: float) -> None:
        """Append, and let go what is beyond the bounds. All or nothing."""
        rows = [(now, msgspec.json.encode(alert)) for alert in alerts]
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany("INSERT INTO alerts (written, body) VALUES (?, ?)", rows)
            self._prune(now)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk has rolled back by itself
                self._db.execute("ROLLBACK")
            raise

    def _prune(self, now: float) -> None:
        oldest = now - self._bounds.seconds
        self._db.execute("DELETE FROM alerts WHERE published = 1 AND written < ?", (oldest,))
        (count,) = self._db.execute("SELECT COUNT(*) FROM alerts").fetchone()
        if count > self._bounds.alerts:
            self._db.execute(
                "DELETE FROM alerts WHERE number IN "
                "(SELECT number FROM alerts ORDER BY published DESC, number LIMIT ?)",
                (count - self._bounds.alerts,),
            )

    def waiting(self, limit: int) -> list[tuple[int, Alert]]:
        """The oldest that the store has not taken, with their numbers."""
        rows = self._db.execute(
            "SELECT number, body FROM alerts WHERE published = 0 ORDER BY number LIMIT ?", (limit,)
        ).fetchall()
        found = [(number, _decoded(body)) for number, body in rows]
        strange = [number for number, alert in found if alert is None]
        if strange:
            self._delete(strange)
            return self.waiting(limit)
        return [(number, alert) for number, alert in found if alert is not None]

    def published(self, numbers: Sequence[int]) -> None:
        """The store has taken these."""
        self._db.executemany(
            "UPDATE alerts SET published = 1 WHERE number = ?", [(n,) for n in numbers]
        )

    def last_published(self) -> Alert | None:
        """The newest that the store has taken, if it is still kept."""
        row = self._db.execute(
            "SELECT body FROM alerts WHERE published = 1 ORDER BY number DESC LIMIT 1"
        ).fetchone()
        return _decoded(row[0]) if row else None

    def injected(self) -> list[Alert]:
        """What operators have injected, as it was told, oldest first."""
        rows = self._db.execute(
            "SELECT body FROM alerts WHERE instr(body, ?) > 0 ORDER BY number",
            (f'"detector":"{PREFIX}'.encode(),),
        ).fetchall()
        found = [_decoded(body) for (body,) in rows]
        return [alert for alert in found if alert is not None]

    def forget_published(self) -> None:
        """The store has lost what it had taken: all that is kept waits again."""
        self._db.execute("UPDATE alerts SET published = 0")

    def _delete(self, numbers: Sequence[int]) -> None:
        self._db.executemany("DELETE FROM alerts WHERE number = ?", [(n,) for n in numbers])

    def close(self) -> None:
        self._db.close()


def _decoded(body: bytes) -> Alert | None:
    """``None`` for what another version wrote and this one cannot read."""
    try:
        return msgspec.json.decode(body, type=Alert)
    except UNREADABLE:
        return None

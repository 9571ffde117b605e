"""Alerts in SQLite, in order of arrival, with a mark on those that the store has accepted.

Blocking: an on-disk ledger is used only by the thread of :class:`tmd.daemon.journal.Journal`.
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
    """How much is kept. Published alerts are deleted first, then the oldest."""

    alerts: int = 10_000
    seconds: float = 7 * 86_400.0
    """For published alerts: they are published again to a store that lost its data. An
    unpublished alert is deleted only when there are too many."""


class Ledger:
    """One table. Raises :class:`sqlite3.Error` if the disk fails. Closed by :meth:`close`.

    Args:
        place: a file, or ``:memory:``.
    """

    def __init__(self, place: str, bounds: Bounds) -> None:
        self._bounds = bounds
        # The thread that opens an on-disk ledger also uses it; the loop uses one in memory.
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
        """Append, and delete what exceeds the bounds. All or nothing."""
        rows = [(now, msgspec.json.encode(alert)) for alert in alerts]
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany("INSERT INTO alerts (written, body) VALUES (?, ?)", rows)
            self._prune(now)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite may have rolled back when the disk was full
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
        """The oldest alerts that the store has not accepted, with their numbers."""
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
        """Mark the alerts that the store has accepted."""
        self._db.executemany(
            "UPDATE alerts SET published = 1 WHERE number = ?", [(n,) for n in numbers]
        )

    def last_published(self) -> Alert | None:
        """The newest alert that the store has accepted, if it is still kept."""
        row = self._db.execute(
            "SELECT body FROM alerts WHERE published = 1 ORDER BY number DESC LIMIT 1"
        ).fetchone()
        return _decoded(row[0]) if row else None

    def injected(self) -> list[Alert]:
        """The alerts of injected findings that are kept, published or not, oldest first."""
        rows = self._db.execute(
            "SELECT body FROM alerts WHERE instr(body, ?) > 0 ORDER BY number",
            (f'"detector":"{PREFIX}'.encode(),),
        ).fetchall()
        found = [_decoded(body) for (body,) in rows]
        return [alert for alert in found if alert is not None]

    def forget_published(self) -> None:
        """Mark all alerts as unpublished: the store has lost them."""
        self._db.execute("UPDATE alerts SET published = 0")

    def _delete(self, numbers: Sequence[int]) -> None:
        self._db.executemany("DELETE FROM alerts WHERE number = ?", [(n,) for n in numbers])

    def close(self) -> None:
        self._db.close()


def _decoded(body: bytes) -> Alert | None:
    """The alert, or ``None`` if another version wrote it and this one cannot decode it."""
    try:
        return msgspec.json.decode(body, type=Alert)
    except UNREADABLE:
        return None

"""Checks what the daemons of a cluster have written and obeyed, according to their logs.

In the manner of Jepsen: the history is recorded during the faults, and judged afterwards without
knowledge of the faults. One daemon writes under a lease epoch and no other (I5), and a daemon that
has obeyed a leader never obeys an older one, even after restarts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

WROTE, OBEYED = "decided", "directive"
"""Events of the log."""


class Entry(Struct, frozen=True):
    """A record that a leader has stored, or a directive that a daemon has sent to a worker."""

    event: str
    host: str
    lease: int
    what: str
    """The job, or the worker."""
    revision: int


def recorded(folder: Path) -> Iterator[Entry]:
    """The entries of all hosts of a cluster, each in the order of its log."""
    for log in sorted(folder.glob("*/daemon.log")):
        for line in log.read_text(errors="replace").splitlines():
            entry = _entry(log.parent.name, line)
            if entry is not None:
                yield entry


def _entry(host: str, line: str) -> Entry | None:
    if '"lease_epoch"' not in line:
        return None
    try:
        fields = json.loads(line)
    except ValueError:
        return None  # cut off by a kill
    if fields.get("event") not in (WROTE, OBEYED):
        return None
    what = fields.get("worker") or fields.get("job", "")
    return Entry(fields["event"], host, fields["lease_epoch"], what, fields["revision"])


def _job(worker: str) -> str:
    """The job of a worker, whose name is ``host/job/slot``."""
    return worker.split("/")[1] if worker.count("/") == 2 else worker


def unlawful(history: Iterable[Entry]) -> list[str]:
    """All violations, in sentences."""
    found: list[str] = []
    writers: dict[int, str] = {}
    newest: dict[tuple[str, str], int] = {}
    for entry in history:
        if entry.event == WROTE:
            first = writers.setdefault(entry.lease, entry.host)
            if first != entry.host:
                found.append(f"{first} and {entry.host} both wrote under lease {entry.lease}")
            continue
        place = entry.host, _job(entry.what)
        if entry.lease < newest.get(place, 0):
            found.append(
                f"{entry.host} ordered {entry.what} by lease {entry.lease} "
                f"after lease {newest[place]}"
            )
        newest[place] = max(entry.lease, newest.get(place, 0))
    return found

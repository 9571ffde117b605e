"""Which of two records of a job a daemon obeys: never one of an older leader (I5). Pure."""

from __future__ import annotations

from enum import StrEnum

from tmd.core.model import JobRecord


class Receipt(StrEnum):
    """What becomes of a record that was read from the store."""

    NEW = "new"
    KNOWN = "known"
    OLDER = "older"  # the store lost something: ours is the newer one
    REFUSED = "refused"  # written by a leader older than one obeyed before


def received(record: JobRecord, known: JobRecord | None, obeyed: int) -> Receipt:
    """What becomes of ``record``.

    ``known`` is the newest record that was obeyed since the daemon started, ``obeyed`` the highest
    lease epoch of all that it has ever obeyed for this job.
    """
    if record.lease_epoch < obeyed:
        older = known is not None and record.revision < known.revision
        return Receipt.OLDER if older else Receipt.REFUSED
    if known is not None and record.revision < known.revision:
        return Receipt.OLDER
    return Receipt.KNOWN if record == known else Receipt.NEW

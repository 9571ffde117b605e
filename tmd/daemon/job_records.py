"""Decodes job records; of one of a later version only what is needed to leave it alone.

Such a record is left alone: nothing is decided about the job, no order is derived from it, and it
is not written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from msgspec import Struct

from tmd.core.values.decode_errors import UNREADABLE
from tmd.core.values.model import RECORD_VERSION, JobRecord
from tmd.daemon.codec import decoded


class LaterRecord(Struct, frozen=True):
    """The fields that every version has."""

    job: str
    revision: int


class StoredJobs(NamedTuple):
    """All records of a store."""

    records: tuple[JobRecord, ...]
    unread: tuple[str, ...]
    """Jobs whose records a later version wrote."""


def sorted_out(found: Iterable[JobRecord | LaterRecord]) -> StoredJobs:
    """Those that may be decided upon, and the names of the others."""
    found = tuple(found)
    return StoredJobs(
        tuple(r for r in found if isinstance(r, JobRecord)),
        tuple(r.job for r in found if isinstance(r, LaterRecord)),
    )


def read_record(body: bytes) -> JobRecord | LaterRecord:
    """The record, or a :class:`LaterRecord` if this version cannot decode it or must not act on it.

    Raises:
        StoreUnavailable: the text does not even name its job.
    """
    try:
        record = msgspec.json.decode(body, type=JobRecord)
    except UNREADABLE:
        return decoded(body, LaterRecord)
    return LaterRecord(record.job, record.revision) if record.v > RECORD_VERSION else record

"""Decodes job records; of one of a later version only what is needed to leave it alone."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from tmd.core.values.decode_errors import UNREADABLE
from tmd.core.values.model import JobRecord
from tmd.daemon.codec import decoded


class LaterRecord(Struct, frozen=True):
    """The fields that every version has."""

    job: str
    revision: int


def read_record(body: bytes) -> JobRecord | LaterRecord:
    """The record, or a :class:`LaterRecord` if this version cannot decode it.

    Raises:
        StoreUnavailable: the text does not even name its job.
    """
    try:
        return msgspec.json.decode(body, type=JobRecord)
    except UNREADABLE:
        return decoded(body, LaterRecord)

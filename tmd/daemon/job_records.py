"""Decodes job records; of one of a later version only what is needed to leave it alone.

Such a record is left alone: nothing is decided about the job, no order is derived from it, and it
is not written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from tmd.core.values.decode_errors import UNREADABLE
from tmd.core.values.model import READABLE_VERSION, JobRecord
from tmd.daemon.codec import Codec, decoded, text

COUNT_DIGITS = 15
"""Matches the scripts: no member writes a fence or revision of more digits."""


class LaterRecord(Struct, frozen=True):
    """The fields that every version has."""

    job: str
    revision: int


class StoredJobs(NamedTuple):
    """Records of a store: all, or those that were asked for."""

    records: tuple[JobRecord, ...]
    unread: tuple[str, ...]
    """Jobs whose records a later version wrote."""


class ReadRecord(NamedTuple):
    """A record as it is stored. The values beside it are what scripts compare."""

    revision: bytes
    fence: bytes
    seal: bytes
    record: bytes

    @property
    def mark(self) -> bytes:
        """A reader that has the record with this mark need not read it again."""
        return b" ".join((self.revision, self.fence, self.seal))

    @property
    def is_marked(self) -> bool:
        """Whether the seal beside the record is its own: another version may not have written it,
        and a stranger may have written anything."""
        return self.seal != b"" and self.record.startswith(self.seal + b" ")


Reply = Sequence[bytes | None]
"""Of a script: name, revision, fence, seal and record of each job, in turn; no record for those
that the caller has read."""


class RecordReader:
    """Reads the records of one store, each as often as it changes."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.known: Mapping[str, ReadRecord] = {}
        """The records that were read last, by job."""

    def read(self, reply: Reply, known: Mapping[str, ReadRecord]) -> StoredJobs:
        """All records or an error: a skipped one would look like a job that has not formed yet.

        ``known``: those whose :func:`marks` the script was given.

        Raises:
            StoreUnavailable: no member wrote a record, or the values beside it.
        """
        stored = _by_job(reply, known)
        pairs = [(name, read.record) for name, read in stored.items()]
        found = self._codec.named(pairs, JobRecord, lambda r: r.job, read_record)
        for name, read in stored.items():
            # The values that the scripts compare are outside the seal.
            counts = found.get(name) and text(read.revision) == str(found[name].revision)
            if not counts or not read.fence.isdigit() or len(read.fence) > COUNT_DIGITS:
                raise self._codec.forged(JobRecord, f"job:{name}")
        self.known = stored
        return sorted_out(found[name] for name in sorted(found))


def marks(known: Mapping[str, ReadRecord]) -> Iterator[str | bytes]:
    """Arguments of a script that need not send these records."""
    for name, read in known.items():
        if read.is_marked:
            yield from (name, read.mark)


def demands(names: Collection[str], known: Mapping[str, ReadRecord]) -> Iterator[str | bytes]:
    """Arguments of a script that sends the records of ``names``, and need not send ``known``."""
    for name in names:
        read = known.get(name)
        yield from (name, read.mark if read is not None and read.is_marked else b"")


def _by_job(reply: Reply, known: Mapping[str, ReadRecord]) -> dict[str, ReadRecord]:
    found = {}
    for name, revision, fence, seal, record in zip(*[iter(reply)] * 5, strict=True):
        job = text(name or b"")
        found[job] = (
            known[job]
            if record is None
            else ReadRecord(revision or b"", fence or b"", seal or b"", record)
        )
    return found


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
    return LaterRecord(record.job, record.revision) if record.v > READABLE_VERSION else record

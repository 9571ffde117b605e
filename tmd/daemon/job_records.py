"""Reads and decodes job records. Of a record that has changed, only the changes are read.

A reader applies the changes (:mod:`tmd.daemon.record_changes`) to the text that it read before. If
the result does not bear the stored seal, the reader asks for the whole record. A record of a later
version is decoded only as far as is needed to leave it alone: nothing is decided about its job, no
order is derived from it, and it is not written.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import structlog
from msgspec import Struct

from tmd.core.values.decode_errors import UNREADABLE
from tmd.core.values.model import READABLE_VERSION, JobRecord
from tmd.daemon.codec import Codec, decoded, text
from tmd.daemon.record_changes import applied, difference

log = structlog.get_logger("tmd.store")

T = TypeVar("T")

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

    def and_those(self, others: StoredJobs) -> StoredJobs:
        """These, and ``others``."""
        return StoredJobs((*self.records, *others.records), (*self.unread, *others.unread))


class ReadRecord(NamedTuple):
    """A record as it is stored. The values beside it are what scripts compare."""

    revision: bytes
    fence: bytes
    seal: bytes
    record: bytes

    @classmethod
    def of(cls, record: JobRecord, sealed: bytes) -> ReadRecord:
        """As a put stores it: ``sealed`` is the text."""
        revision, fence = str(record.revision).encode(), str(record.lease_epoch).encode()
        return cls(revision, fence, sealed[: sealed.index(b" ")], sealed)

    @property
    def mark(self) -> bytes:
        """A reader that has the record with this mark need not read it again."""
        return b" ".join((self.revision, self.fence, self.seal))

    @property
    def is_marked(self) -> bool:
        """Whether the seal beside the record is its own: another version may not have written it,
        and a stranger may have written anything."""
        return self.seal != b"" and self.record.startswith(self.seal + b" ")


Known = Mapping[str, ReadRecord]
"""Records that were read, by job."""
Reply = Sequence[Any]
"""Of a script: name, revision, fence, seal and record of each job, in turn. Instead of a record
that the caller has read, it has the changes since then, or nothing if there are none."""


class _Misfits(Exception):
    """The changes of these jobs do not lead to their stored records."""

    def __init__(self, jobs: Collection[str]) -> None:
        self.jobs = jobs


class RecordReader:
    """Reads the records of one store, each as often as it changes."""

    def __init__(self, codec: Codec, of_named: Codec) -> None:
        """Each codec remembers what it decoded last: ``codec`` all records, ``of_named`` those that
        were asked for by name."""
        self._codec = codec
        self._of_named = of_named
        self._known: Known = {}
        """The records as they were read last, or written."""
        self._logged: set[str] = set()

    async def all(
        self, ask: Callable[[Known], Awaitable[T]], records: Callable[[T], Reply]
    ) -> tuple[T, StoredJobs]:
        """The reply to ``ask`` and all records in it, which ``records`` finds there. ``ask`` gets
        the known records: see :func:`marks`.

        Raises:
            StoreUnavailable: no member wrote a record, or the values beside it. A record that is
                skipped would look like a job that has not formed yet.
        """
        before = self._known
        reply, found, stored = await self._read(self._codec, ask, records)
        self._known = {**stored, **self._since(before)}
        return reply, found

    async def named(
        self, names: Collection[str], ask: Callable[[Known], Awaitable[Reply]]
    ) -> StoredJobs:
        """The records of ``names`` in the reply to ``ask``, which gets the known records: see
        :func:`demands`.

        Raises:
            StoreUnavailable: as above.
        """
        before = self._known
        _, found, stored = await self._read(self._of_named, ask, lambda reply: reply)
        others = {job: read for job, read in before.items() if job not in names}
        self._known = {**others, **stored, **self._since(before)}
        return found

    def change_to(self, job: str, after: ReadRecord, expected: int) -> tuple[bytes, bytes]:
        """The mark of the known record with revision ``expected``, and the change from it to
        ``after``. Both are empty if that revision is not known. The change is empty if it would be
        too long."""
        before = self._known.get(job)
        if before is None or not before.is_marked or text(before.revision) != str(expected):
            return b"", b""
        return before.mark, difference(before.record, after.record) or b""

    def wrote(self, job: str, record: ReadRecord) -> None:
        """The store has accepted ``record``."""
        self._known = {**self._known, job: record}

    def _since(self, before: Known) -> Known:
        """What was read or written while a reading was under way. It stays: a leader that forgot
        what it has just written could not tell what its next revision changes."""
        return {job: read for job, read in self._known.items() if before.get(job) is not read}

    async def _read(
        self, codec: Codec, ask: Callable[[Known], Awaitable[T]], records: Callable[[T], Reply]
    ) -> tuple[T, StoredJobs, Known]:
        known = self._known
        while True:
            reply = await ask(known)
            try:
                stored, found = _opened(codec, records(reply), known)
            except _Misfits as misfits:
                self._log(misfits.jobs)
                # Fewer each time: without a known record there are no changes.
                known = {job: read for job, read in known.items() if job not in misfits.jobs}
            else:
                return reply, found, stored

    def _log(self, jobs: Collection[str]) -> None:
        for job in jobs:
            if job not in self._logged:  # once: forged changes must not flood the log
                self._logged.add(job)
                log.error("changes in redis do not lead to the record: read it whole", job=job)


def marks(known: Known) -> Iterator[str | bytes]:
    """Arguments of a script that need not send these records."""
    for name, read in known.items():
        if read.is_marked:
            yield from (name, read.mark)


def demands(names: Collection[str], known: Known) -> Iterator[str | bytes]:
    """Arguments of a script that sends the records of ``names``, and need not send ``known``."""
    for name in names:
        read = known.get(name)
        yield from (name, read.mark if read is not None and read.is_marked else b"")


def _opened(codec: Codec, reply: Reply, known: Known) -> tuple[Known, StoredJobs]:
    """The stored and the decoded records.

    Raises:
        StoreUnavailable: no member wrote one of them.
        _Misfits: changes of some do not lead to a record that a member wrote.
    """
    stored, changed = _by_job(reply, known)
    pairs = [(name, read.record) for name, read in stored.items()]
    found = codec.named(pairs, JobRecord, lambda r: r.job, read_record, doubtful=changed)
    if misfits := [name for name in changed if name not in found]:
        raise _Misfits(misfits)
    for name, read in stored.items():
        # The values that the scripts compare are outside the seal.
        counts = found.get(name) and text(read.revision) == str(found[name].revision)
        if not counts or not read.fence.isdigit() or len(read.fence) > COUNT_DIGITS:
            raise codec.forged_error(JobRecord, f"job:{name}")
    return stored, sorted_out(found[name] for name in sorted(found))


def _by_job(reply: Reply, known: Known) -> tuple[Known, Collection[str]]:
    """The records by job, and which of them are made of changes."""
    found, changed = {}, set()
    for name, revision, fence, seal, record in zip(*[iter(reply)] * 5, strict=True):
        job = text(name or b"")
        if record is None:
            found[job] = known[job]
            continue
        if isinstance(record, list):
            changed.add(job)
            record = _changed(known[job].record, seal or b"", record)
        found[job] = ReadRecord(revision or b"", fence or b"", seal or b"", record)
    return found, changed


def _changed(record: bytes, seal: bytes, changes: Sequence[bytes]) -> bytes:
    """``record`` with ``changes`` applied; empty if the result does not bear ``seal``."""
    for change in changes:
        result = applied(record, change)
        if result is None:
            return b""
        record = result
    return record if record.startswith(seal + b" ") else b""


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

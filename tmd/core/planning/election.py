"""Leader election, from the view of one candidate.

Pure: the store's answer and the times come in, the candidate's belief goes out. The belief only
saves requests; safety comes from the lease epoch, which every acting daemon compares
(invariant I5).
"""

from __future__ import annotations

from enum import StrEnum
from math import inf

from msgspec import Struct

from tmd.core.values.model import JobRecord
from tmd.core.values.view_checks import ENDED

SAFE_PART = 0.8
"""Share of the time to live, from before the request was sent, for which a holder trusts it."""

JITTER = 0.2
SPREAD = 0.1
"""Part of a period over which followers spread: all know of the same moment at which a lease can
lapse."""
MOST_PERIODS = 3
"""After so many periods of renewal a follower asks whatever the lease: the store may have lost it,
or somebody may have stored one that does not lapse."""

WAY_TTLS = 1.0
"""Lifetimes of a lease for which a candidate abstains although nobody leads: each other one asks at
least once."""


class Granted(Struct, frozen=True):
    """The store's answer: this candidate leads, with this lease epoch."""

    epoch: int


class Denied(Struct, frozen=True):
    """The store's answer: ``holder`` leads, for at most ``remaining_s`` unless it renews."""

    holder: str
    remaining_s: float


Answer = Granted | Denied


class Lease(Struct, frozen=True):
    """A candidate's belief: it may act as leader of ``epoch`` until ``until`` (monotonic)."""

    epoch: int = 0
    until: float = -inf

    def held(self, now: float) -> bool:
        return now < self.until


def updated(lease: Lease, answer: Answer, *, sent_at: float, ttl_s: float) -> Lease:
    """The belief after ``answer`` to a request sent at ``sent_at``."""
    if isinstance(answer, Granted):
        return Lease(epoch=answer.epoch, until=sent_at + SAFE_PART * ttl_s)
    return Lease(epoch=lease.epoch)


class GivingWay(Struct, frozen=True):
    """A candidate that leaves the lease to others: hosts that can read what it cannot.

    It gives way once to the same hosts, and then abstains for as long as anybody leads, and for
    some time without a leader. So each host that cannot read a record wins the lease once at most
    before one that can. If none of these takes it, perhaps since none may lead, a host that has
    given way leads again: other jobs must not be without a leader.
    """

    hosts: frozenset[str] = frozenset()
    """Those that it has given way to, until one of them leads."""
    until: float = -inf
    """It does not ask for the lease before (monotonic)."""

    def to(self, hosts: frozenset[str], now: float, ttl_s: float) -> tuple[GivingWay, bool]:
        """After it has led and seen that it should give way to ``hosts``; and whether it does."""
        if hosts <= self.hosts:
            return self, False
        return GivingWay(self.hosts | hosts, now + WAY_TTLS * ttl_s), True

    def saw(self, leader: str, now: float, ttl_s: float) -> GivingWay:
        """While it abstains, ``leader`` holds the lease; empty if nobody does."""
        if not leader:
            return self
        if leader.partition("#")[0] in self.hosts:
            return GivingWay()
        return GivingWay(self.hosts, now + WAY_TTLS * ttl_s)

    def after(self, answer: Answer) -> GivingWay:
        """After an ``answer`` of the store."""
        leads = isinstance(answer, Denied) and answer.holder.partition("#")[0] in self.hosts
        return GivingWay() if leads else self

    def rest(self, now: float) -> float:
        """Seconds for which it does not ask."""
        return max(0.0, self.until - now)


def next_attempt(answer: Answer | None, *, renew_s: float, chance: float, leads: bool) -> float:
    """Seconds until the next request to the store. ``chance`` in [0, 1) spreads the candidates.

    A follower asks again just after the current lease can lapse, so that a dead leader is replaced
    soon, and not before: ten thousand followers would ask thousands of times a second. ``None``:
    the store did not answer. Then a candidate that ``leads`` asks again at once, before its lease
    lapses.
    """
    if answer is None and leads:
        return 0.0
    if isinstance(answer, Denied):
        lapses = answer.remaining_s + 0.01 + SPREAD * renew_s * chance
        return min(lapses, MOST_PERIODS * renew_s)
    return renew_s * (1 - JITTER * chance)


class Receipt(StrEnum):
    """How to treat a record that was read from the store."""

    NEW = "new"
    KNOWN = "known"
    OLDER = "older"  # the store has lost writes: the known record is newer
    REFUSED = "refused"  # written by a leader older than one already obeyed


def received(record: JobRecord, known: JobRecord | None, obeyed: int) -> Receipt:
    """How to treat ``record``.

    ``known`` is the newest record obeyed since the daemon started, ``obeyed`` the highest lease
    epoch ever obeyed for this job. The record of a new run replaces that of one that has ended,
    though its revisions begin anew: somebody has deleted the old one.
    """
    if known is not None and _is_new_run(record, known):
        return Receipt.NEW
    if record.lease_epoch < obeyed:
        older = known is not None and record.revision < known.revision
        return Receipt.OLDER if older else Receipt.REFUSED
    if known is not None and record.revision < known.revision:
        return Receipt.OLDER
    return Receipt.KNOWN if record == known else Receipt.NEW


def _is_new_run(record: JobRecord, known: JobRecord) -> bool:
    ended = known.state in ENDED and record.lease_epoch >= known.lease_epoch
    return ended and not set(record.membership.workers) & set(known.membership.workers)

"""The leader: reads the view, asks the policies, writes the next revision.

Snapshot, pure decision, guarded write. The leader keeps no state that matters: the next leader
continues from the stored records. While the cluster is paused it opens no new plan; live plans
continue.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice

import structlog
from msgspec import structs

from tmd.core.alerts.store_health import StoreLoop
from tmd.core.planning.adoption import shrunk
from tmd.core.planning.job_end import dated, may_be_unlisted
from tmd.core.planning.migration import is_live
from tmd.core.planning.readiness import NO_FIT_STANDBY, SHRUNK
from tmd.core.planning.record_versions import (
    LastHeard,
    needed_version,
    recalled,
    remembered,
    successors,
    written_version,
)
from tmd.core.planning.status_reads import next_reads
from tmd.core.values.errors import Conflict, StaleLease, StoreUnavailable
from tmd.core.values.model import ClusterView, JobRecord, Severity, Signal, State, Verdict
from tmd.core.values.reasons import in_words
from tmd.core.values.view_checks import ENDED
from tmd.daemon.breaker import BreakerWatch
from tmd.daemon.bus import Store, Topic, Wake
from tmd.daemon.candidate import Candidate, LeaderConfig
from tmd.daemon.counters import JobCounter
from tmd.daemon.deciding import Decider, log_decision
from tmd.daemon.held_findings import HeldFindings, RaiseFinding
from tmd.daemon.policy_calls import PolicyCalls
from tmd.daemon.policy_runner import rulings
from tmd.daemon.shared_bans import SharedBans
from tmd.daemon.store_health import StoreHealth
from tmd.plugin import Policy

log = structlog.get_logger("tmd.leader")

ByJob = Mapping[str, Sequence[Verdict]]

MOST_REVISIONS = 16
"""Per job and turn: a guard against decisions that never settle."""
MOST_ENDED = 100
"""Most ended jobs that leave the list in a turn, and most that get the time of their end."""
AGAIN_S = 0.05
"""Pause before the next turn if somebody else has written a record meanwhile."""

NOT_REPLICATED = "store.not_replicated"
REPLICATED = "records and leases reach a replica, or this host no longer leads"
OVER = {
    NO_FIT_STANDBY: "each rank has a fit standby, or the job no longer trains",
    SHRUNK: "each rank has a worker of its own, or the job no longer trains",
}
POLICY_FAILED = "policy.failed"
DECIDES = {POLICY_FAILED: "the policy decides again, or is no longer enabled"}


class Leader:
    """Decides while the candidate leads. ``bell`` rings when there may be something to decide."""

    def __init__(
        self,
        store: Store,
        config: LeaderConfig,
        candidate: Candidate,
        policies: Sequence[Policy],
        store_health: StoreHealth,
        report: RaiseFinding = lambda _: None,
    ) -> None:
        """``report`` raises or clears a finding on this host."""
        self.bell = candidate.elected
        self.view: ClusterView | None = None
        """The cluster at the latest turn, while this daemon leads and Redis answers."""
        self.counter = JobCounter(may_lead=config.may_lead)
        self._store = store
        self._config = config
        self._candidate = candidate
        self._policies = policies
        self._store_health = store_health
        self._breaker = BreakerWatch(store, config.holder)
        self._decider = Decider(config.limits, config.shadow_goals)
        self._heard: dict[str, LastHeard] = {}
        self._findings = HeldFindings(report, OVER)
        self._policy_findings = HeldFindings(report, DECIDES, kind="policy")
        self._failing: dict[tuple[str, str], str] = {}
        """Findings about policies that have failed in this turn."""
        self._calls = PolicyCalls()
        self._bans = SharedBans(store)
        self._report = report
        self._unreplicated = ""
        self._outrun = False
        """Whether somebody else had written a record in the latest turn."""
        self._uncounted: set[str] = set()
        self._urgent: set[str] | None = None
        """Hosts that have reported a change since the latest turn; ``None`` if any may have."""
        self._read_last, self._read_at = "", -math.inf
        """The host up to which statuses were read in turn, and when."""

    def hear(self, wake: Wake) -> None:
        """Something may have to be decided."""
        if wake.topic is Topic.HOST and wake.about and self._urgent is not None:
            self._urgent.add(wake.about)
        elif wake.topic is not Topic.LEADER:
            self._urgent = None
        self.bell.ring()

    def adopt(self, policies: Sequence[Policy]) -> None:
        """Use these policies from the next turn on."""
        self._policies = policies
        self._calls.forget()
        self.bell.ring()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            patience = self._config.poll_s
            now = asyncio.get_running_loop().time()
            self.counter.keep(self._candidate.records.under_way, now)
            if not self._candidate.leading:
                self.counter.ledger.look(self._candidate.records.jobs)
                self._decider.lose_sight()
                for findings in (self._findings, self._policy_findings):
                    findings.hold({}, "this host no longer leads")
                self._follow()
            else:
                try:
                    patience = await self.turn()
                except StoreUnavailable as error:
                    self.view = None
                    self._decider.lose_sight()
                    await self._store_health.failed(StoreLoop.DECIDING, error)
                    continue
                except StaleLease as error:
                    log.warning("not the leader any more", error=str(error))
                    await self._candidate.step_down(error.fence)
            # Also while another one leads: an outage in which this daemon led is over.
            self._store_health.worked(StoreLoop.DECIDING)
            await self.bell.wait(patience)

    async def turn(self) -> float:
        """Read the view and decide once; return the seconds until the next turn is due."""
        view = await self._breaker.look(await self._read(), self._config.breaker)
        now = asyncio.get_running_loop().time()
        self._decider.see(now)
        self._heard = remembered(self._heard, view, now)
        self.view = view = recalled(view, self._heard, now)
        if self._candidate.give_way_to(successors(view)):
            log.warning("another host reads records that this one cannot: no longer leading")
            await self._candidate.step_down()
            return 0.0
        names = view.job_names
        self._decider.leave_alone(view.unread_jobs)
        self._decider.keep(names)
        mine = sorted(names.difference(view.unread_jobs))
        self.counter.follow(mine)
        self._failing = {}
        after = await self._decide(view, mine)
        self._findings.hold(self._unprotected(view, after))
        self._policy_findings.hold(self._failing)
        await self._bans.lift(after, self._config.breaker)
        await self._tidy(after)
        # After the decisions, since it may take a moment.
        await self._store.look_for_replica()
        self._note_replication(self._store.unreplicated or self._candidate.unreplicated)
        due = min(map(self._decider.due, mine), default=math.inf)
        wait = min(self._config.poll_s, due - asyncio.get_running_loop().time())
        return max(0.0, min(wait, AGAIN_S) if self._outrun else wait)

    async def _read(self) -> ClusterView:
        now = asyncio.get_running_loop().time()
        urgent, self._urgent = self._urgent, set()
        reads = next_reads(self.view, urgent, self._read_last, now - self._read_at)
        if reads.hosts is None or reads.last != self._read_last:
            self._read_last, self._read_at = reads.last, now
        return await self._store.snapshot(reads.hosts)

    def _follow(self) -> None:
        """Leave the cluster's metrics to the leader, and what it says of replicas."""
        self._store.forget_replica()
        self._note_replication("")
        self.view = None
        self.counter.follow(())

    def _unprotected(self, before: ClusterView, after: ClusterView) -> dict[tuple[str, str], str]:
        """Per job, why no fit standby covers some rank, and which ranks are adopted. While a plan
        is live, or if the record was written in this turn, the earlier reason for the former stays.
        """
        lacking = {}
        for record in after.jobs:
            gap, finding = self._decider.gap(record.job), (NO_FIT_STANDBY, record.job)
            moves = is_live(record.plan) or record is not before.record(record.job)
            if gap is not None and not moves:
                lacking[finding] = gap.sentence
            elif moves and finding in self._findings.raised:
                lacking[finding] = self._findings.raised[finding]
            if why := shrunk(record):
                lacking[SHRUNK, record.job] = why
        return lacking

    def _note_replication(self, problem: str) -> None:
        if problem != self._unreplicated:
            state, message = (State.RAISED, problem) if problem else (State.CLEARED, REPLICATED)
            self._report(Signal(NOT_REPLICATED, "store", Severity.WARNING, state, message))
        self._unreplicated = problem

    async def _decide(self, view: ClusterView, jobs: Sequence[str]) -> ClusterView:
        """Write revisions of ``jobs`` until the view requires no further one; return the view then.

        Each pass writes at most one revision of a job, and asks the policies once, which takes a
        tenth of a second for ten thousand hosts.
        """
        self._outrun = False
        for _ in range(MOST_REVISIONS):
            verdicts, before = self._verdicts(view), view
            for job in sorted(jobs, key=lambda job: job not in verdicts):  # what is urgent first
                if (record := view.record(job)) is not None:
                    now = asyncio.get_running_loop().time()
                    self._count(job, partial(self.counter.look, record, view, now))
                after = self._decider.next(view, job, verdicts.get(job, ()))
                if after is None:
                    continue
                try:
                    view = await self._write(view, after)
                except Conflict as error:
                    view = await self._with_unlisted(view, job, error)
            jobs = [job for job in jobs if view.record(job) is not before.record(job)]
            if not jobs:
                break
        return view

    async def _with_unlisted(self, view: ClusterView, job: str, why: Conflict) -> ClusterView:
        """``view``, with the ended unlisted record of ``job`` if there is one. Otherwise it has to
        be read again."""
        unknown = view.record(job) is None
        stored = await self._store.jobs_named([job] if unknown else [])
        for record in stored.records:
            if record.state in ENDED:
                return view.with_record(record)
        self._decider.leave_alone(stored.unread)
        self._outrun |= not stored.unread
        log.info("the record changed in the meantime, deciding again", error=str(why))
        return view

    async def _tidy(self, view: ClusterView) -> None:
        """Take jobs off the list that ended long ago, since each listed job costs time in each
        turn. Date ends that have no date."""
        if not (kept_s := self._config.list_ended_s):
            return
        now = time.time()
        old = (record for record in view.jobs if may_be_unlisted(record, view, kept_s, now))
        for record in islice(old, MOST_ENDED):
            if await self._store.unlist_job(record):
                log.info("ended job no longer listed", job=record.job, state=record.state.value)
        undated = (record for record in view.jobs if record.state in ENDED and not record.ended_at)
        for record in islice(undated, MOST_ENDED):
            with suppress(Conflict):
                await self._write(view, dated(record, now))

    async def _write(self, view: ClusterView, after: JobRecord) -> ClusterView:
        record = view.record(after.job)
        after = self._stamped(after, record, view)
        if not self._candidate.leading:
            raise StaleLease("the lease expired while deciding")
        listeners = [host.listener for host in view.hosts_of(after.job)]
        expected = record.revision if record else 0
        await self._store.put_job(after, expected=expected, listeners=listeners)
        log_decision(record, after)
        self._count(after.job, partial(self.counter.wrote, record, after, view))
        return view.with_record(after)

    def _count(self, job: str, count: Callable[[], None]) -> None:
        """Metrics must not keep a leader from deciding."""
        try:
            count()
        except Exception:
            if job not in self._uncounted:
                self._uncounted.add(job)
                log.exception("the metrics of the job are not updated", job=job)

    def _stamped(self, after: JobRecord, before: JobRecord | None, view: ClusterView) -> JobRecord:
        epoch = self._candidate.lease.epoch
        version = written_version(before, view, self._heard, asyncio.get_running_loop().time())
        version = max(version, needed_version(after))
        stamped = structs.replace(after, lease_epoch=epoch, v=version)
        return self.counter.ledger.into(stamped)

    def _verdicts(self, view: ClusterView) -> ByJob:
        """What the policies want of each job, as far as it may be done."""
        found: dict[str, list[Verdict]] = {}
        rules, ask = self._config.breaker, self._calls.ask
        for ruling in rulings(self._policies, view, rules, self._failed, ask):
            if not ruling.held_back:
                found.setdefault(ruling.verdict.job, []).append(ruling.verdict)
        return found

    def _failed(self, policy: Policy, error: Exception) -> None:
        """Logged once, until it decides again: the policies are asked in every turn."""
        finding = (POLICY_FAILED, policy.name)
        known = self._failing.get(finding) or self._policy_findings.raised.get(finding)
        if known is None:
            log.error("policy failed", policy=policy.name, exc_info=error)
        self._failing[finding] = known or f"its verdicts are ignored: {in_words(error)}"

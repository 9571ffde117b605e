"""The leader: holds the lease, reads the view, asks the policies, writes the next revision.

Snapshot, pure decision, guarded write. The leader keeps no state that matters: the next leader
continues from the stored records. While the cluster is paused it opens no new plan; live plans
continue.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence

import structlog
from msgspec import Struct, structs

from tmd.core.alerts.breaker import BreakerRules
from tmd.core.alerts.store_health import StoreLoop
from tmd.core.planning.deadlines import Seen, seen
from tmd.core.planning.election import (
    Answer,
    GivingWay,
    Granted,
    Lease,
    next_attempt,
    updated,
)
from tmd.core.planning.migration import is_live
from tmd.core.planning.planning import ENDED, form, steer, unformed
from tmd.core.planning.readiness import NO_FIT_STANDBY, unprotected
from tmd.core.planning.record_versions import LastHeard, remembered, successors, written_version
from tmd.core.values.errors import Conflict, StaleLease, StoreUnavailable
from tmd.core.values.limits import PlanLimits, ShadowGoals
from tmd.core.values.model import ClusterView, JobRecord, Severity, Signal, State, Verdict
from tmd.core.values.reasons import in_words
from tmd.core.values.view_checks import left_alone, too_new
from tmd.daemon.bus import Store, WakeEvent
from tmd.daemon.counters import JobCounter
from tmd.daemon.job_findings import JobFindings, RaiseFinding
from tmd.daemon.policy_runner import guarded, rulings
from tmd.daemon.records import Records
from tmd.daemon.store_health import StoreHealth
from tmd.plugin import Policy

log = structlog.get_logger("tmd.leader")

ByJob = Mapping[str, Sequence[Verdict]]

MOST_REVISIONS = 16
"""Per job and turn: a guard against decisions that never settle."""


NOT_REPLICATED = "store.not_replicated"
REPLICATED = "records and leases reach a replica, or this host no longer leads"
OVER = {NO_FIT_STANDBY: "each rank has a fit standby, or the job no longer trains"}


class LeaderConfig(Struct, frozen=True):
    holder: str
    """Unique name of this candidate: host and incarnation."""
    ttl_s: float
    renew_s: float
    poll_s: float
    limits: PlanLimits
    shadow_goals: ShadowGoals = ShadowGoals()
    breaker: BreakerRules = BreakerRules()
    may_lead: bool = True


class Candidate:
    """Keeps the lease for as long as it can. ``lease`` is what this process may assume."""

    def __init__(
        self, store: Store, config: LeaderConfig, records: Records, store_health: StoreHealth
    ) -> None:
        self.lease = Lease()
        self.elected = WakeEvent()
        self.vacant = WakeEvent()
        """Rings when the leader stepped down."""
        self._store = store
        self._config = config
        self.records = records
        self._store_health = store_health
        self._led = False
        self._asking = False
        """Whether a lease may have been granted whose answer has not come."""
        self._way = GivingWay()

    @property
    def holder(self) -> str:
        """The name under which it holds the lease."""
        return self._config.holder

    @property
    def unreplicated(self) -> str:
        """Why the lease may be lost if Redis fails over; empty if it is not."""
        return self._store.unreplicated

    @property
    def leading(self) -> bool:
        return self.lease.held(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Run until cancelled, then give the lease back."""
        try:
            while True:
                if (rest := self._way.rest(asyncio.get_running_loop().time())) > 0:
                    await asyncio.sleep(rest)
                    continue
                answer = await self._ask()
                if self._way.rest(asyncio.get_running_loop().time()) > 0:
                    await self.step_down()  # it was asked for before, and granted since
                    continue
                wait_s = next_attempt(answer, renew_s=self._config.renew_s, chance=random.random())
                await self.vacant.wait(wait_s)
        finally:
            await asyncio.shield(self.step_down())

    async def _ask(self) -> Answer | None:
        config = self._config
        sent_at = asyncio.get_running_loop().time()
        floor = max(self.records.obeyed, self.lease.epoch)
        self._asking = True
        try:
            answer = await self._store.acquire(config.holder, ttl_s=config.ttl_s, floor=floor)
        except StoreUnavailable as error:
            await self._store_health.failed(StoreLoop.LEASE, error)
            self._note(self.leading)
            return None
        self._asking = False
        self._store_health.worked(StoreLoop.LEASE)
        self.lease = updated(self.lease, answer, sent_at=sent_at, ttl_s=config.ttl_s)
        self._way = self._way.after(answer)
        self._note(isinstance(answer, Granted))
        return answer

    def _note(self, leading: bool) -> None:
        if leading and not self._led:
            log.info("leading", lease_epoch=self.lease.epoch)
            self.elected.ring()
        elif self._led and not leading:
            log.warning("no longer leading", lease_epoch=self.lease.epoch)
        self._led = leading

    def gives_way_to(self, hosts: frozenset[str]) -> bool:
        """Whether to leave the lease to ``hosts``: once, unless one of them leads meanwhile."""
        now = asyncio.get_running_loop().time()
        self._way, gives = self._way.to(hosts, now, self._config.ttl_s)
        return gives

    async def step_down(self, fence: int = 0) -> None:
        """Stop leading; the next lease, of this host or another, has an epoch above ``fence``."""
        held, self._led = self._led or self._asking, False
        self.lease = Lease(epoch=max(self.lease.epoch, fence))
        if not held:
            return
        try:
            async with asyncio.timeout(1.0):
                await self._store.release(self._config.holder)
            log.info("lease released")
        except (StoreUnavailable, TimeoutError) as error:
            log.warning("lease not released, it will expire", error=in_words(error))


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
        """``report`` raises findings about jobs on the leader's host."""
        self.bell = candidate.elected
        self.view: ClusterView | None = None
        """The cluster at the latest turn, while this daemon leads and Redis answers."""
        self.counter = JobCounter(may_lead=config.may_lead)
        self._store = store
        self._config = config
        self._candidate = candidate
        self._policies = policies
        self._store_health = store_health
        self._seen: dict[str, Seen] = {}
        self._heard: dict[str, LastHeard] = {}
        self._logged: dict[str, str] = {}
        self._findings = JobFindings(report, OVER)
        self._report = report
        self._unreplicated = ""

    def adopt(self, policies: Sequence[Policy]) -> None:
        """Use these policies from the next turn on."""
        self._policies = policies
        self.bell.ring()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            patience = self._config.poll_s
            now = asyncio.get_running_loop().time()
            self.counter.keep(self._candidate.records.under_way, now)
            if not self._candidate.leading:
                self._findings.hold({}, "this host no longer leads")
                self._follow()
            else:
                try:
                    patience = await self.turn()
                except StoreUnavailable as error:
                    self.view = None
                    await self._store_health.failed(StoreLoop.DECIDING, error)
                    continue
                except StaleLease as error:
                    log.warning("a newer leader exists", error=str(error))
                    await self._candidate.step_down(error.fence)
                except Conflict as error:
                    log.info("the record changed in the meantime, deciding again", error=str(error))
                    continue
                self._store_health.worked(StoreLoop.DECIDING)
            await self.bell.wait(patience)

    async def turn(self) -> float:
        """Read the view and decide once; return the seconds until the next turn is due."""
        view = await guarded(
            await self._store.snapshot(), self._store, self._config.holder, self._config.breaker
        )
        self.view = view
        if self._candidate.gives_way_to(successors(view)):
            log.warning("another host reads records that this one cannot: no longer leading")
            await self._candidate.step_down()
            return 0.0
        self._heard = remembered(self._heard, view, asyncio.get_running_loop().time())
        names = {r.job for r in view.jobs}
        names |= {w.job for h in view.hosts for w in h.workers}
        self.counter.follow(names.difference(view.unread_jobs))
        patience = self._config.poll_s
        for job in view.unread_jobs:
            self._log_once(job, f"not deciding: {too_new(job)}")
        verdicts = self._verdicts(view)
        for job in sorted(names.difference(view.unread_jobs)):
            patience = min(patience, await self._decide(view, job, verdicts))
        for gone in self._seen.keys() - names:
            del self._seen[gone]
        self._findings.hold(self._unprotected(view))
        # After the decisions, since it may take a moment.
        await self._store.look_for_replica()
        self._note_replication(self._store.unreplicated or self._candidate.unreplicated)
        return patience

    def _follow(self) -> None:
        """Leave the cluster's metrics to the leader, and what it says of replicas."""
        self._store.forget_replica()
        self._note_replication("")
        self.view = None
        self.counter.follow(())

    def _unprotected(self, view: ClusterView) -> dict[tuple[str, str], str]:
        """Per job, why no fit standby covers some rank; a live plan keeps the earlier reason."""
        lacking = {}
        for record in view.jobs:
            gap, finding = unprotected(view, record), (NO_FIT_STANDBY, record.job)
            if gap is not None:
                lacking[finding] = gap.sentence
            elif is_live(record.plan) and finding in self._findings.raised:
                lacking[finding] = self._findings.raised[finding]
        return lacking

    def _note_replication(self, problem: str) -> None:
        if problem != self._unreplicated:
            state, message = (State.RAISED, problem) if problem else (State.CLEARED, REPLICATED)
            self._report(Signal(NOT_REPLICATED, "store", Severity.WARNING, state, message))
        self._unreplicated = problem

    async def _decide(self, view: ClusterView, job: str, verdicts: ByJob) -> float:
        """Write revisions of ``job`` until the view requires no further one.

        ``verdicts``: of the policies about ``view``.
        """
        limits = self._config.limits
        for _ in range(MOST_REVISIONS):
            record = next((r for r in view.jobs if r.job == job), None)
            if record is not None:
                self.counter.look(record, view, asyncio.get_running_loop().time())
            age = self._age(view, record, job)
            after = self._next(view, record, job, age, verdicts.get(job, ()))
            if after is record or after is None:
                break
            expected = record.revision if record else 0
            after = self._signed(after, record, view)
            if not self._candidate.leading:
                raise StaleLease("the lease expired while deciding")
            await self._store.put_job(after, expected=expected)
            self._log_decision(record, after)
            self.counter.wrote(record, after, view)
            view = view.with_record(after)
            verdicts = self._verdicts(view)
        ahead = [limit - age for limit in structs.astuple(limits) if limit > age]
        return min(ahead, default=self._config.poll_s) + 0.001

    def _signed(self, after: JobRecord, before: JobRecord | None, view: ClusterView) -> JobRecord:
        epoch = self._candidate.lease.epoch
        version = written_version(before, view, self._heard, asyncio.get_running_loop().time())
        signed = structs.replace(after, lease_epoch=epoch, v=version)
        return self.counter.ledger.into(signed)

    def _next(
        self,
        view: ClusterView,
        record: JobRecord | None,
        job: str,
        age: float,
        verdicts: Sequence[Verdict],
    ) -> JobRecord | None:
        if record is None or record.state in ENDED:
            formed = form(view, job, before=record)
            if formed is None and (why := unformed(view, job)):
                self._log_once(job, why)
            return formed or record
        if why := left_alone(record, view):
            self._log_once(job, f"not deciding: {why}")
            return record
        after = steer(
            record,
            view,
            verdicts,
            now=time.time(),
            age=age,
            limits=self._config.limits,
            wanted=self._config.shadow_goals,
        )
        if view.paused and not is_live(record.plan) and _plan_id(after) != _plan_id(record):
            self._log_once(job, f"paused: plan {_plan_id(after)} is not opened")
            return record
        return after

    def _verdicts(self, view: ClusterView) -> ByJob:
        """What the policies want of each job, as far as it may be done."""
        found: dict[str, list[Verdict]] = {}
        for ruling in rulings(self._policies, view, self._config.breaker):
            if not ruling.held_back:
                found.setdefault(ruling.verdict.job, []).append(ruling.verdict)
        return found

    def _age(self, view: ClusterView, record: JobRecord | None, job: str) -> float:
        """How long this leader has seen the job unchanged."""
        now = asyncio.get_running_loop().time()
        if record is None:
            return 0.0
        self._seen[job] = known = seen(self._seen.get(job), view, record, now)
        return now - known.since

    def _log_decision(self, before: JobRecord | None, after: JobRecord) -> None:
        plan = after.plan
        fields = {"job": after.job, "revision": after.revision, "state": after.state.value}
        fields["lease_epoch"] = after.lease_epoch
        if after.detail:
            fields["detail"] = after.detail
        if before is None or before.membership.epoch != after.membership.epoch:
            fields["epoch"] = after.membership.epoch
        if plan is not None and (before is None or before.plan != plan):
            fields |= {"plan": plan.id, "kind": plan.kind.value, "phase": plan.phase.value}
            fields |= {"cause": plan.cause, "reason": plan.outcome or plan.reason}
            if plan.rollback is not None:
                fields["rollback"] = plan.rollback.sentence
        log.info("decided", **fields)
        self._logged.pop(after.job, None)

    def _log_once(self, job: str, sentence: str) -> None:
        if self._logged.get(job) != sentence:
            self._logged[job] = sentence
            log.info(sentence, job=job)


def _plan_id(record: JobRecord) -> str:
    return record.plan.id if record.plan else ""

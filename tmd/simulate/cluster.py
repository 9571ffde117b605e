"""A cluster in memory: the real policies and the real planner decide on its snapshots.

Nothing of :mod:`tmd.core` is modelled here. What is modelled is how workers answer a plan: at once,
and as ordered (:mod:`tmd.simulate.reports`). The time that this takes is charged by
:mod:`tmd.simulate.standing_by`. Each host has one worker, since all ranks of a host move together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct, structs

from tmd.core.alerts.breaker import BreakerRules, tripped
from tmd.core.planning.forming import form
from tmd.core.planning.planning import steer
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.limits import PlanLimits, ShadowGoals
from tmd.core.values.model import (
    Alert,
    Exit,
    JobRecord,
    JobState,
    MigrationPlan,
    Phase,
    PlanKind,
    Severity,
    State,
    Strategy,
)
from tmd.core.values.requests import DrainRequest
from tmd.daemon.policy_runner import rulings
from tmd.plugin import Policy
from tmd.simulate.reports import JOB, Machine, Situation, shadow_of, starting, view
from tmd.simulate.values import Job

MOST_TURNS = 64
"""Revisions without an event: a guard against decisions that never settle."""
OPERATOR_S = 3600.0
"""An operator closes the circuit breaker after this time."""
SETTLED_S = 60.0
"""Least age of a finding when policies see it."""


class OperatorRules(Struct, frozen=True):
    """What an operator configures."""

    policies: Sequence[Policy]
    breaker: BreakerRules
    limits: PlanLimits


class SimulatedCluster:
    """Hosts, the record of the job, and the leader's turns."""

    def __init__(
        self,
        job: Job,
        standbys: int,
        hot: int,
        snapshot_steps: int,
        rules: OperatorRules,
        follow_s: float,
    ) -> None:
        """``snapshot_steps``: between snapshots. ``follow_s``: until a new shadow is in step."""
        self._rules, self._follow_s = rules, follow_s
        self._wanted = ShadowGoals(hot=hot)
        self._number = 0
        self._now = Situation(job, snapshot_steps)
        for number in range(job.hosts + standbys):
            self.add(f"host-{number:06}")
        waiting = list(self._now.machines)[job.hosts :]
        self._now.record = form(starting(self._now, waiting), JOB)

    # --- what the simulation asks -----------------------------------------------------------------

    @property
    def record(self) -> JobRecord:
        assert self._now.record is not None, "a job of as many workers as ranks is formed"
        return self._now.record

    @property
    def plan(self) -> MigrationPlan | None:
        """The live plan."""
        return self._now.plan

    @property
    def places(self) -> list[str | None]:
        """The host of each rank, in a failover with its joiners, then those without a rank.

        A standby that waits until there are enough counts for the first rank without a host.
        """
        plan = self.plan
        members = self.record.membership
        if plan is not None and plan.phase is Phase.SYNC:
            members = plan.new
        holders = [m.host for m in members.members]
        taken = set(holders)
        idle = sorted(h for h in self._now.machines if self.runs(h) and h not in taken)
        found: list[str | None] = [h if self.runs(h) else None for h in holders]
        for rank, holder in enumerate(found):
            if holder is None and idle:
                found[rank] = idle.pop(0)
        return [*found, *idle]

    def has(self, host: str) -> bool:
        """Whether ``host`` is up."""
        return host in self._now.machines

    def runs(self, host: str) -> bool:
        """Whether a worker runs on ``host``."""
        return self.has(host) and bool(self._now.machines[host].worker)

    def needs(self, host: str) -> bool:
        """Whether a rank is, or is about to be, on ``host``."""
        members = self.record.membership.members
        plan = self.plan
        if plan is not None and plan.phase is Phase.SYNC:
            members = (*members, *plan.new.members)
        return self.runs(host) and any(m.host == host for m in members)

    def follows(self, host: str, rank: int) -> bool:
        """Whether the standby on ``host`` follows ``rank`` itself, not a replica of it."""
        shadow = shadow_of(self._now, host)
        return shadow is not None and shadow.verified is not None and shadow.rank == rank

    @property
    def paused_s(self) -> float:
        """Seconds until an operator closes the circuit breaker; infinite if it is closed."""
        breaker = self._now.breaker
        return breaker.at + OPERATOR_S - self._now.now if breaker.open else math.inf

    # --- what happens -----------------------------------------------------------------------------

    def add(self, host: str) -> None:
        """A host comes, or starts another worker."""
        machine = self._now.machines.setdefault(host, Machine())
        machine.worker = self._new_worker(host)

    def remove(self, host: str) -> None:
        """A host is silent from now on. A drain of it is over, and so are its findings."""
        self._now.machines.pop(host, None)
        self._now.drains.pop(host, None)

    def end_worker(self, host: str) -> None:
        """The worker of a host ends; the daemon reports how."""
        machine = self._now.machines[host]
        if machine.worker:
            ended = Exit(machine.worker, JOB, -9, self._now.now)
            machine.ended, machine.worker = (*machine.ended, ended)[-8:], ""

    def drain(self, host: str) -> None:
        """An operator asks for the host."""
        self._number += 1
        self._now.drains[host] = DrainRequest(host, f"drain-{self._number}")

    def degrade(self, host: str, now: float) -> None:
        """A detector that may act finds that the host degrades."""
        self._number += 1
        alert = Alert(
            id=f"{host}-{self._number}",
            host=host,
            detector="simulated",
            code="simulated.degrading",
            entity=host,
            severity=Severity.DEGRADED,
            state=State.RAISED,
            message="it will fail",
            job="",
            strategy=Strategy.ACT,
            count=1,
            # Older than what the breaker waits for other hosts to report the same.
            at=now - max(SETTLED_S, self._rules.breaker.settle_s),
        )
        self._now.machines[host].alerts = (alert,)

    def restart(self) -> bool:
        """All workers start again; whether there are enough for a new run."""
        for host, machine in self._now.machines.items():
            machine.worker, machine.ended = self._new_worker(host), ()
        self._now.halted, self._now.snapshot = None, 0
        failed = structs.replace(self.record, state=JobState.FAILED)
        formed = form(starting(self._now), JOB, before=failed)
        self._now.record = formed or failed
        return formed is not None

    def _new_worker(self, host: str) -> str:
        self._number += 1
        return f"{host}/{JOB}/0.{self._number:x}"

    # --- turns of the leader ----------------------------------------------------------------------

    def halt(self, step: int, now: float) -> None:
        """A link broke at ``step``; decide as far as possible without waiting for anybody."""
        if self._now.halted is None:
            self._now.halted = step
        self.decide(step, now)
        if self.plan is not None and self.plan.phase is Phase.RECOVER:
            # Nobody has named a worker that is gone with all its peers: the leader's deadlines do.
            limits = self._rules.limits
            self.decide(step, now, age=1.0 + max(limits.silent_s, limits.abandon_s))

    def decide(self, step: int, now: float, *, age: float | None = None) -> None:
        """The leader's turns until nothing changes. A failover stops before its joiners sync, a
        planned move before its joiners are ready."""
        self._now.step, self._now.now = step, now
        for _ in range(MOST_TURNS):
            if not self._turn(age=age):
                return

    def sync(self, now: float) -> None:
        """The joiners of a failover have their state: it ends."""
        plan = self.plan
        assert plan is not None
        assert plan.resume is not None
        self._now.now = now
        self._ready(m.host for m in plan.new.members)
        self._turn()  # all synced: RESUME
        self._ready(())
        self._now.halted, self._now.snapshot = None, plan.resume
        self.decide(plan.resume + 1, now)

    def switch(self, step: int, now: float) -> bool:
        """The joiners of the planned move are ready: it ends; whether there was one."""
        self._now.step, self._now.now = step, now
        plan = self.plan
        if plan is None or plan.kind is not PlanKind.PLANNED:
            return False
        self._ready(m.joiner.host for m in plan.moves if m.joiner is not None)
        self._turn()  # joiners ready: READY
        self._turn(switched=True)  # the vote switched: SWITCH
        self._ready(())
        self._now.snapshot = step
        self.decide(step + 1, now)
        return True

    def _ready(self, hosts: Iterable[str]) -> None:
        """Only the workers on ``hosts`` have done what the plan asks for."""
        named = set(hosts)
        for host, machine in self._now.machines.items():
            machine.ready = host in named

    def _turn(self, *, switched: bool = False, age: float | None = None) -> bool:
        situation, rules = self._now, self._rules
        seen = view(situation, switched=switched)
        reason = tripped(seen, rules.breaker)
        if reason is not None:
            situation.breaker = Breaker(open=True, reason=reason, at=situation.now)
        elif situation.breaker.open and situation.now - situation.breaker.at > OPERATOR_S:
            situation.breaker = Breaker(at=situation.now, by="operator")
        seen = structs.replace(seen, breaker=situation.breaker)
        verdicts = [
            r.verdict for r in rulings(rules.policies, seen, rules.breaker) if not r.held_back
        ]
        before = self.record
        after = steer(
            before,
            seen,
            verdicts,
            now=situation.now,
            age=max(rules.limits.settle_s, rules.limits.unheard_s) if age is None else age,
            limits=rules.limits,
            wanted=self._wanted,
        )
        self._note_shadows(before, after)
        situation.record = after
        return after is not before

    def _note_shadows(self, before: JobRecord, after: JobRecord) -> None:
        for assignment in after.shadows:
            if assignment not in before.shadows:
                machine = self._now.machines[assignment.member.host]
                machine.follows_from = self._now.now + self._follow_s

"""Turns verdicts and a cluster view into the next revision of a job's record.

:func:`steer` is the only entry point. It opens plans, moves them through the table of
:mod:`tmd.core.planning.migration` as facts arrive, and ends jobs. Each call changes one thing, so
a leader that crashes between two revisions leaves a record from which the next leader continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from tmd.core.planning import failover
from tmd.core.planning.adoption import may_return
from tmd.core.planning.forming import form
from tmd.core.planning.hot_standbys import assign_shadows
from tmd.core.planning.job_end import abandoned, ended
from tmd.core.planning.links import IN_VAIN, LINK_BROKEN, all_heard, blamed, broke_before, in_vain
from tmd.core.planning.migration import (
    PAUSED,
    STOPPED,
    PlanEvent,
    PlanFacts,
    failover_event,
    has_committed,
    how_prepared,
    is_live,
    planned_event,
    transition,
    troubled_joiners,
    unheard_joiners,
    with_timings,
)
from tmd.core.planning.planned_moves import grown, planned
from tmd.core.planning.standby_reasons import reasons, the_first
from tmd.core.planning.standbys import candidates, dismissed
from tmd.core.planning.sync_losses import silent_survivors, witnesses
from tmd.core.values.limits import PlanLimits, ShadowGoals
from tmd.core.values.model import (
    Activity,
    ClusterView,
    JobRecord,
    JobState,
    MigrationPlan,
    Phase,
    PlanKind,
    Urgency,
    Verdict,
)
from tmd.core.values.view_checks import ENDED

NONE_WANTED = ShadowGoals()


def steer(
    record: JobRecord,
    view: ClusterView,
    verdicts: Sequence[Verdict],
    *,
    now: float,
    age: float,
    limits: PlanLimits,
    wanted: ShadowGoals = NONE_WANTED,
    silences: Mapping[str, float] | None = None,
) -> JobRecord:
    """The next revision of ``record``, or ``record`` itself if nothing changes.

    ``now`` is wall-clock time and only recorded. ``age`` is how long (monotonic seconds) the leader
    has seen the job in its current situation, and ``silences`` how long it has heard nothing of
    each worker without a report; of those that are not there it is ``age``.
    """
    facts = PlanFacts(view, record.job, silences)
    if record.state in ENDED:
        return form(view, record.job, before=record) or record
    changed = (
        ended(record, facts, now)
        or abandoned(record, view, facts, age, limits)
        or _lost(record, view, facts, verdicts, age, limits, now)
        or _moved_on(record, view, facts, age, limits, now)
        or grown(record, view, facts, now)
        or planned(record, view, facts, verdicts, now, age)
        or record
    )
    if held := _held(record, changed, view):
        changed = structs.replace(record, detail=held)
    elif changed.detail in (PAUSED, STOPPED) and is_live(changed.plan):
        changed = structs.replace(changed, detail="")
    # With a rank lost a standby may have its only state: none gets other work until the failover.
    lacks_rank = changed.detail == STOPPED
    if changed.plan is record.plan and changed.state is record.state and not lacks_rank:
        changed = _pooled(changed, view, facts, wanted, limits.silent_s)
    if changed.state in ENDED:
        changed = structs.replace(changed, ended_at=now)
    if changed == record:
        return record
    return structs.replace(changed, revision=record.revision + 1)


def _held(before: JobRecord, after: JobRecord, view: ClusterView) -> str:
    """What ``before`` waits for, if ``after``, its next revision, opens a plan although the cluster
    is paused; else empty. A plan under way goes on."""
    plan = after.plan
    if plan is None or not view.paused or is_live(before.plan):
        return ""
    if before.plan is not None and plan.id == before.plan.id:
        return ""
    return STOPPED if plan.kind is PlanKind.FAILOVER else PAUSED


def _pooled(
    record: JobRecord, view: ClusterView, facts: PlanFacts, wanted: ShadowGoals, silent_s: float
) -> JobRecord:
    """What workers without a rank do: shadow one, rehearse, or exit."""
    shadows = assign_shadows(record, view, facts, wanted, silent_s)
    return structs.replace(record, shadows=shadows, dismissed=dismissed(record, view))


# --- losses ---------------------------------------------------------------------------------------


def _lost(
    record: JobRecord,
    view: ClusterView,
    facts: PlanFacts,
    verdicts: Sequence[Verdict],
    age: float,
    limits: PlanLimits,
    now: float,
) -> JobRecord | None:
    if record.state is not JobState.RUNNING:
        return None
    plan = record.plan if is_live(record.plan) else None
    holders = {m.worker for m in record.holders}
    named = set(plan.dead) if plan is not None else set()
    failed = [
        v
        for v in verdicts
        if v.urgency is Urgency.FAILED
        and v.job == record.job
        and v.worker in holders - named
        and not _may_report_yet(v.worker, facts, age, limits)
    ]
    if failed:
        dead = list(dict.fromkeys(v.worker for v in failed))
        first = failed[0]
        return failover.open_failover(record, dead, first.cause, first.reason, first.policy, now)
    if plan is not None and plan.phase is Phase.SWITCH:
        broken = _broken_switch(record, plan, facts, age, limits, now)
        if broken is not None:
            return broken
    recovering = plan is not None and plan.phase in (Phase.RECOVER, Phase.SYNC)
    if not recovering and age >= limits.settle_s and facts.stuck(record.membership):
        return _broken_off(record, view, facts, age, limits, now)
    return None


def _may_report_yet(worker: str, facts: PlanFacts, age: float, limits: PlanLimits) -> bool:
    """Whether nothing has been heard of ``worker`` for so short a time that it may be well."""
    if worker in facts.status or facts.has_ended(worker):
        return False
    return facts.silence(worker, age) < limits.unheard_s


def _broken_off(
    record: JobRecord,
    view: ClusterView,
    facts: PlanFacts,
    age: float,
    limits: PlanLimits,
    now: float,
) -> JobRecord | None:
    """Links broke, but no worker died."""
    if not broke_before(record, facts) or not candidates(view, record, facts):
        return _once_more(record, facts, now)
    if age < limits.silent_s and not all_heard(record, facts):
        return None  # wait for all reports: a worker that is cut off notices last
    culprit = blamed(record, facts)
    if not culprit:
        return _once_more(record, facts, now)
    reason = f"{culprit} has lost its peers again, and most of them name it"
    return failover.open_failover(record, (culprit,), LINK_BROKEN, reason, "", now)


def _once_more(record: JobRecord, facts: PlanFacts, now: float) -> JobRecord:
    if in_vain(record, facts):
        detail = f"one step broke {IN_VAIN} times though no worker died; see the workers' logs"
        return structs.replace(record, state=JobState.FAILED, detail=detail)
    reason = "members are stuck though no worker died"
    return failover.open_failover(record, (), LINK_BROKEN, reason, "", now)


def _broken_switch(
    record: JobRecord,
    plan: MigrationPlan,
    facts: PlanFacts,
    age: float,
    limits: PlanLimits,
    now: float,
) -> JobRecord | None:
    """The vote switched, but a joiner cannot take over: the leaver, or a replica, is the source."""
    joiners = [m.joiner.worker for m in plan.moves if m.joiner]
    refused = [w for w in joiners if facts.doing(w, Activity.REFUSED, plan.id)]
    late = [w for w in joiners if facts.epoch(w) < plan.new.epoch]
    late = [w for w in late if not has_committed(facts, w, plan)]
    orphaned = [
        m.leaver.worker
        for m in plan.moves
        if facts.failing(m.leaver.worker) and m.joiner and m.joiner.worker in late
    ]
    if refused:
        return failover.open_failover(
            record, refused, "joiner.refused", facts.status[refused[0]].detail, "", now
        )
    if orphaned:
        reason = f"leaver {orphaned[0]} was lost before it had handed over its state"
        return failover.open_failover(record, orphaned, "leaver.lost", reason, "", now)
    if late and age > limits.switch_s:
        reason = f"joiner {', '.join(late)} did not take over within {limits.switch_s:g} s"
        return failover.open_failover(record, late, "joiner.late", reason, "", now)
    return None


# --- live plans -----------------------------------------------------------------------------------


def _moved_on(
    record: JobRecord,
    view: ClusterView,
    facts: PlanFacts,
    age: float,
    limits: PlanLimits,
    now: float,
) -> JobRecord | None:
    plan = record.plan
    if plan is None or not is_live(plan) or record.state is not JobState.RUNNING:
        return None
    if plan.phase is Phase.RECOVER:
        return _recovering(record, plan, view, facts, age, limits, now)
    if plan.phase is Phase.SYNC and age > limits.silent_s:
        silent = silent_survivors(record, plan, view, facts)
        if extended := _without_silent(record, plan, silent, facts, age, limits, now):
            return extended
    happened = planned_event(plan, facts, age, limits) or failover_event(plan, facts, age, limits)
    if happened is None:
        return None
    event, reason = happened
    if plan.phase is Phase.SYNC and event is not PlanEvent.SYNCED:
        rejected, late = _dropped(plan, facts, age, limits)
        if not (rejected or late):
            late = _unsynced(plan, facts)
        plan = structs.replace(plan, witnesses=witnesses(plan, facts, rejected))
        return failover.reopened(record, plan, event, reason, now, rejected=rejected, late=late)
    if event is PlanEvent.JOINERS_READY:
        plan = structs.replace(plan, how=how_prepared(plan, facts))
    if event is PlanEvent.JOINER_LOST:
        rejected, late = _dropped(plan, facts, age, limits)
        plan = structs.replace(plan, rejected=rejected, late=late)
    moved = with_timings(transition(plan, event, now, reason), facts)
    if moved.phase in (Phase.SWITCH, Phase.RESUME):
        # The change is committed now: by the vote, or because every member is synced.
        return structs.replace(record, plan=moved, membership=plan.new, detail="")
    if not is_live(moved):
        return structs.replace(failover.archived(record, moved), detail="")
    return structs.replace(record, plan=moved)


def _recovering(
    record: JobRecord,
    plan: MigrationPlan,
    view: ClusterView,
    facts: PlanFacts,
    age: float,
    limits: PlanLimits,
    now: float,
) -> JobRecord | None:
    spare = candidates(view, record, facts)
    settled, missing = failover.settle(record, plan, facts, spare, now)
    if not missing:
        hasty = age < limits.settle_s and may_return(settled, facts)
        return None if hasty else _with_choice(settled, record, view, facts)
    silent = failover.unheard(plan, facts)
    if extended := _without_silent(record, plan, silent, facts, age, limits, now):
        return extended
    if age < limits.settle_s:
        # Not worth a revision, since it usually ends in milliseconds.
        return None
    if limits.hold_s and age > limits.hold_s:
        detail = f"gave up after {limits.hold_s:g} s: {missing}"
        return structs.replace(record, state=JobState.FAILED, detail=detail)
    return structs.replace(record, detail=missing)


def _without_silent(
    record: JobRecord,
    plan: MigrationPlan,
    silent: Sequence[str],
    facts: PlanFacts,
    age: float,
    limits: PlanLimits,
    now: float,
) -> JobRecord | None:
    """Names ``silent`` workers dead once nothing has been heard of them for long enough: training
    stands still meanwhile."""
    if not silent or min(age, *(facts.silence(w, age) for w in silent)) <= limits.silent_s:
        return None
    reason = f"{the_first(silent)} not heard from for {limits.silent_s:g} s"
    return failover.open_failover(record, silent, "host.silent", reason, plan.policy, now)


def _with_choice(
    settled: JobRecord, record: JobRecord, view: ClusterView, facts: PlanFacts
) -> JobRecord:
    plan = settled.plan
    if plan is None or plan.phase is not Phase.SYNC:
        return settled
    joiners = {m.rank: m.joiner for m in plan.moves if m.joiner}
    choice = reasons(joiners, view, record, facts, left_out=plan.rejected)
    return structs.replace(settled, plan=structs.replace(plan, choice=choice))


def _dropped(
    plan: MigrationPlan, facts: PlanFacts, age: float, limits: PlanLimits
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """If joiners cannot continue ``plan``: those that never will, and all of which nothing is
    heard, since they may report again. Otherwise none."""
    troubled, unheard = troubled_joiners(plan, facts, age, limits), unheard_joiners(plan, facts)
    return tuple(w for w in troubled if w not in unheard), unheard if troubled else ()


def _unsynced(plan: MigrationPlan, facts: PlanFacts) -> tuple[str, ...]:
    joiners = [m.joiner.worker for m in plan.moves if m.joiner and m.source]
    return tuple(w for w in joiners if not facts.synced(w, plan))

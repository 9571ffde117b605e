"""Opens a planned move: whose turn it is, and from whom the joiner gets its state."""

import math
from collections import Counter

import pytest
from msgspec import structs

from tests.core.test_hot_standbys import cluster, member, worker
from tests.values import alert, plan
from tmd.core.planning import planned_moves
from tmd.core.planning.directives import Arm, Leave, Prepare, Train, Wait, directive_of
from tmd.core.planning.failover import archived
from tmd.core.planning.migration import PlanFacts, how_prepared
from tmd.core.planning.planning import steer
from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import (
    Activity,
    Alert,
    ClusterView,
    HostStatus,
    JobRecord,
    JobState,
    Membership,
    MigrationPlan,
    Move,
    Phase,
    Severity,
    Urgency,
    Verdict,
    WorkerStatus,
)
from tmd.core.values.requests import DrainRequest

WANTED = Verdict(job="j", worker="a", urgency=Urgency.DRAIN, cause="drain", reason="asked")


def ailing(host: str, severity: Severity) -> Alert:
    return alert(host=host, code="nic.errors", entity="nic:eth0", severity=severity)


def with_status(view: ClusterView, name: str, **changes: object) -> ClusterView:
    """``view`` with ``changes`` in the status of worker ``name``."""
    hosts = tuple(
        structs.replace(
            host,
            workers=tuple(
                structs.replace(w, **changes) if w.worker == name else w for w in host.workers
            ),
        )
        for host in view.hosts
    )
    return structs.replace(view, hosts=hosts)


def in_phase(record: JobRecord, phase: Phase) -> JobRecord:
    """``record`` whose plan has come to ``phase``."""
    assert record.plan is not None
    return structs.replace(record, plan=structs.replace(record.plan, phase=phase))


def planned(
    *alerts: Alert, replicas: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 1), (0, 1))
) -> tuple[JobRecord, MigrationPlan]:
    """The plan that moves rank 0 off host h-a, while ``alerts`` are raised."""
    record, view, _ = cluster(worker("s"))
    hosts = []
    for host in view.hosts:
        raised = tuple(a for a in alerts if a.host == host.host)
        status = host.workers[0]
        if status.activity is Activity.TRAINING:
            assert status.rank is not None
            status = structs.replace(status, replicas=replicas[status.rank])
        hosts.append(structs.replace(host, workers=(status,), alerts=raised))
    view = structs.replace(view, hosts=tuple(hosts))
    after = steer(record, view, [WANTED], now=0.0, age=0.0, limits=PlanLimits())
    assert after.plan is not None
    return after, after.plan


@pytest.mark.parametrize("name", ["b", "s"], ids=["stayer", "joiner"])
def test_groups_are_built_at_the_switch_if_a_worker_of_the_move_cannot_build_before(
    name: str,
) -> None:
    """All members must do it at the same time, so that the plan says so."""
    record, view, facts = cluster(worker("s"))
    concerned = with_status(view, name, beside_obstacle="no room")
    after = steer(record, concerned, [WANTED], now=0.0, age=0.0, limits=PlanLimits())
    assert after.plan is not None
    joins = directive_of(after, "s")
    armed = directive_of(in_phase(after, Phase.READY), "b")

    assert after.plan.builds_at_switch == f"{name} reported: no room"
    assert isinstance(joins, Prepare)
    assert joins.builds_at_switch
    assert isinstance(armed, Arm)
    assert armed.builds_at_switch
    assert "inner groups are built at the switch, since" in how_prepared(after.plan, facts)


def test_groups_are_built_beside_training_if_all_workers_of_the_move_can() -> None:
    """Another standby, or the rank that leaves, may not."""
    record, view, facts = cluster(worker("s"), worker("idle"))
    after = steer(record, view, [WANTED], now=0.0, age=0.0, limits=PlanLimits())
    assert after.plan is not None
    joiner = after.plan.moves[0].joiner
    assert joiner is not None
    other = "idle" if joiner.worker == "s" else "s"
    unconcerned = with_status(view, other, beside_obstacle="no room")
    unconcerned = with_status(unconcerned, "a", beside_obstacle="no room")
    after = steer(record, unconcerned, [WANTED], now=0.0, age=0.0, limits=PlanLimits())
    assert after.plan is not None
    joins = directive_of(after, joiner.worker)

    assert after.plan.builds_at_switch == ""
    assert isinstance(joins, Prepare)
    assert not joins.builds_at_switch
    assert "inner groups" not in how_prepared(after.plan, facts)


def test_the_leaver_is_the_source_by_default() -> None:
    record, plan = planned()
    joins = directive_of(record, "s")

    assert plan.moves[0].source == plan.moves[0].leaver
    assert isinstance(joins, Prepare)
    assert (joins.rank, joins.plays) == (0, 0)


def test_a_replica_is_the_source_if_the_leavers_host_is_degraded() -> None:
    """A warning does not suffice, and the replica's own host must be sound."""
    record, plan = planned(ailing("h-a", Severity.DEGRADED))
    joins = directive_of(record, "s")

    assert plan.moves[0].source is not None
    assert plan.moves[0].source.worker == "b"
    assert isinstance(joins, Prepare)
    assert (joins.rank, joins.plays, joins.source.worker) == (0, 1, "b")
    for alerts in (
        [ailing("h-a", Severity.WARNING)],
        [ailing("h-a", Severity.FATAL), ailing("h-b", Severity.DEGRADED)],
    ):
        _, plan = planned(*alerts)
        assert plan.moves[0].source == plan.moves[0].leaver


def test_the_leaver_is_the_source_if_it_has_no_replica() -> None:
    _, plan = planned(ailing("h-a", Severity.FATAL), replicas=((0,), (1,)))

    assert plan.moves[0].source == plan.moves[0].leaver


def one_host(replicas: tuple[int, ...], size: int) -> tuple[JobRecord, ClusterView]:
    """Host ``bad`` with ranks 0 and 1 is degraded; each other rank has a host of its own. There are
    two standbys, and the ranks ``replicas`` have the state of all."""
    hosts = {name: "bad" if name in "ab" else f"h-{name}" for name in "abcdefgh"[:size]}
    found: dict[str, list[WorkerStatus]] = {}
    for rank, (name, host) in enumerate(hosts.items()):
        status = worker(name, Activity.TRAINING, rank=rank, epoch=1, step=9, world_size=size)
        found.setdefault(host, []).append(structs.replace(status, replicas=replicas))
    for name in ("s0", "s1"):
        found[name] = [worker(name, world_size=size)]
    ails = {"bad": (ailing("bad", Severity.DEGRADED),)}
    members = tuple(structs.replace(member(name), host=host) for name, host in hosts.items())
    record = JobRecord("j", size, JobState.RUNNING, Membership(1, members), proposed=1)
    view = ClusterView(
        hosts=tuple(
            HostStatus(host, "1", workers=tuple(workers), alerts=ails.get(host, ()))
            for host, workers in found.items()
        ),
        jobs=(record,),
    )
    return record, view


@pytest.mark.parametrize(
    ("replicas", "size", "sources"),
    [
        ((0, 1, 2, 3), 4, {"d": 1, "c": 1}),
        ((0, 1, 2), 4, {"c": 2}),
        ((0, 1), 4, {"a": 1, "b": 1}),
    ],
    ids=["enough", "too few", "none"],
)
def test_the_ranks_of_a_degraded_host_have_as_many_sources_as_there_are(
    replicas: tuple[int, ...], size: int, sources: dict[str, int]
) -> None:
    """One source that serves all joiners of a host copies and stages for each."""
    record, view = one_host(replicas, size)
    after = steered(record, view, wish("a"), wish("b"))

    assert after.plan is not None
    assert Counter(m.source.worker for m in after.plan.moves if m.source) == sources


def full(count: int, *drains: DrainRequest) -> tuple[JobRecord, ClusterView]:
    """A host h-a with both ranks of a and b, one more host with rank 2, and ``count`` standbys."""
    workers = [
        worker(n, Activity.TRAINING, rank=i, epoch=1, step=9, world_size=3)
        for i, n in enumerate("abc")
    ]
    pool = [worker(f"s{n}", world_size=3) for n in range(count)]
    hosts = (
        HostStatus(host="h-a", incarnation="1", workers=tuple(workers[:2])),
        *(HostStatus(host=f"h-{w.worker}", incarnation="1", workers=(w,)) for w in workers[2:]),
        *(HostStatus(host=f"h-{w.worker}", incarnation="1", workers=(w,)) for w in pool),
    )
    members = (member("a"), structs.replace(member("b"), host="h-a"), member("c"))
    record = JobRecord(
        job="j",
        world_size=3,
        state=JobState.RUNNING,
        membership=Membership(epoch=1, members=members),
        proposed=1,
    )
    return record, ClusterView(hosts=hosts, jobs=(record,), drains=drains)


def wish(name: str, request: str = "", **more: object) -> Verdict:
    verdict = structs.replace(WANTED, worker=name, policy="p", request=request)
    return structs.replace(verdict, **more)


def steered(record: JobRecord, view: ClusterView, *verdicts: Verdict) -> JobRecord:
    return steer(record, view, verdicts, now=0.0, age=0.0, limits=PlanLimits())


def test_a_host_that_cannot_be_served_does_not_block_others() -> None:
    """It needs two standbys, and there is one, which suffices for the other host."""
    record, view = full(1)
    after = steered(record, view, wish("a", "first"), wish("b", "first"), wish("c", "second"))
    none = steered(*full(0), wish("a", "first"), wish("b", "first"), wish("c", "second"))

    assert after.plan is not None
    assert [m.rank for m in after.plan.moves] == [2]
    assert after.plan.request == "second"
    assert none.plan is None
    assert "h-a waits for 2 standby" in none.detail


def test_a_requested_move_comes_before_one_that_a_policy_wants() -> None:
    record, view = full(2)
    after = steered(record, view, wish("a"), wish("b"), wish("c", "asked"))

    assert after.plan is not None
    assert after.plan.request == "asked"


@pytest.mark.parametrize("turn", [1, -1])
def test_a_request_wins_over_a_policy_that_wants_the_same_move(turn: int) -> None:
    """In whichever order the policies are configured: it says whether the workers exit."""
    record, view = full(2)
    verdicts = [wish("c", "asked", leave=True), wish("c", policy="drain_degraded")][::turn]
    after = steered(record, view, *verdicts)

    assert after.plan is not None
    assert (after.plan.request, after.plan.leave) == ("asked", True)


def test_standbys_of_a_host_that_is_drained_with_leave_exit() -> None:
    record, view = full(2, DrainRequest("h-s0", "r", leave=True), DrainRequest("h-s1", "q"))
    after = steered(record, view)
    undrained = steered(after, structs.replace(view, drains=()))

    assert isinstance(directive_of(after, "s0"), Leave)
    assert isinstance(directive_of(after, "s1"), Wait)
    assert isinstance(directive_of(undrained, "s0"), Wait)
    assert steered(after, view) == after


def test_ranks_of_a_host_that_is_drained_with_leave_exit_only_after_a_move() -> None:
    record, view = full(0, DrainRequest("h-c", "r", leave=True))
    after = steered(record, view, wish("c", "r", leave=True))

    assert isinstance(directive_of(after, "c"), Train)


def test_standbys_of_a_drained_host_exit_while_another_drain_waits() -> None:
    record, view = full(1, DrainRequest("h-s0", "r", leave=True), DrainRequest("h-c", "q"))
    after = steered(record, view, wish("c", "q"))

    assert "waits" in after.detail
    assert isinstance(directive_of(after, "s0"), Leave)


def test_no_standby_exits_while_a_plan_is_live() -> None:
    """It may have the only state of a lost rank."""
    record, view = full(2, DrainRequest("h-s0", "r", leave=True))
    moving = steered(steered(record, view), view, wish("c", "q"))

    assert moving.plan is not None
    assert moving.dismissed == ("s0",)
    assert not isinstance(directive_of(moving, "s0"), Leave)


# --- members that are not heard -------------------------------------------------------------------


def test_a_move_waits_for_a_silent_member_and_says_so_after_a_while() -> None:
    """A switch needs all members. Missed heartbeats make no new revisions."""
    record, view = full(1)
    without = structs.replace(view, hosts=tuple(h for h in view.hosts if h.host != "h-a"))
    facts = PlanFacts(without, "j", dict.fromkeys("ab", planned_moves.SILENT_S))
    early = PlanFacts(without, "j", dict.fromkeys("ab", planned_moves.SILENT_S - 0.1))

    def after(known: PlanFacts) -> JobRecord | None:
        return planned_moves.planned(record, without, known, [wish("c", "r")], 0.0, 100.0)

    late = after(facts)
    assert after(early) is None
    assert late is not None
    assert late.plan is None
    assert late.detail == "moves wait: nothing is heard of a; is the daemon of h-a up?"
    assert planned_moves.silent_member(record, PlanFacts(view, "j")) == ""


# --- moves that were dropped ----------------------------------------------------------------------


def dropped(record: JobRecord, *requests: str, **changes: object) -> JobRecord:
    """``record`` after a move of rank 2 off h-c for each of ``requests`` that a member refused."""
    for number, request in enumerate(requests):
        ended = plan(
            record.membership,
            id=f"j-{number}",
            phase=Phase.ABORTED,
            moves=(Move(2, record.membership.members[2], member("s0")),),
            request=request,
            outcome="rank 0 cannot switch: because",
        )
        record = archived(record, structs.replace(ended, **changes))
    return record


def tried(
    record: JobRecord, view: ClusterView, *verdicts: Verdict, age: float = math.inf
) -> JobRecord:
    facts = PlanFacts(view, record.job)
    found = planned_moves.planned(record, view, facts, verdicts, 0.0, age)
    assert found is not None
    return found


@pytest.mark.parametrize(("drops", "pause_s"), [(1, 10.0), (2, 20.0), (3, 40.0), (20, 600.0)])
def test_a_move_that_was_dropped_is_tried_again_after_a_pause_that_grows(
    drops: int, pause_s: float
) -> None:
    """Each costs the job a copy of the state. The record says what it waits for."""
    record, view = full(1)
    record = dropped(record, *["r"] * drops)
    early = tried(record, view, wish("c", "r"), age=pause_s - 0.1)
    due = tried(record, view, wish("c", "r"), age=pause_s)

    assert early.plan is record.plan
    assert early.detail == (
        f"moving the ranks of h-c is tried again {pause_s:g} s after j-{drops - 1}, which was "
        "dropped: rank 0 cannot switch: because"
    )
    assert due.plan is not record.plan


@pytest.mark.parametrize(
    ("request_", "changes"),
    [
        ("another", {}),
        ("r", {"rejected": ("s0",)}),
        ("r", {"late": ("s0",)}),
        ("r", {"old": Membership(0, ())}),
        ("r", {"phase": Phase.DONE}),
        ("r", {"moves": (Move(0, structs.replace(member("a"), host="h-a")),)}),
    ],
    ids=["new request", "joiner failed", "not heard", "earlier epoch", "done", "another host"],
)
def test_a_move_is_tried_at_once_if_it_need_not_end_as_the_last_one(
    request_: str, changes: dict[str, object]
) -> None:
    """An operator who has mended the cause drains the host anew."""
    record, view = full(2)
    record = dropped(record, "r", **changes)
    after = tried(record, view, wish("c", request_), age=0.0)

    assert after.plan is not record.plan


def test_a_host_that_pauses_does_not_block_others() -> None:
    record, view = full(2)
    after = tried(dropped(record, "r"), view, wish("c", "r"), wish("a"), wish("b"), age=0.0)

    assert after.plan is not None
    assert [m.rank for m in after.plan.moves] == [0, 1]


def test_the_reason_to_wait_goes_once_no_move_is_wanted() -> None:
    """The operator has withdrawn the drain."""
    record, view = full(0)
    waits = steered(record, view, wish("c", "r"))
    after = steered(waits, view)

    assert "waits for 1 standby" in waits.detail
    assert after.detail == ""
    assert steered(after, view) is after


def test_a_member_that_cannot_switch_is_not_asked_again_at_once() -> None:
    """Nor does the record change while the move waits for its next turn."""
    record, view = full(1)
    record = dropped(record, "r")
    waits = steer(record, view, [wish("c", "r")], now=0.0, age=9.0, limits=PlanLimits())
    same = steer(waits, view, [wish("c", "r")], now=0.0, age=9.5, limits=PlanLimits())
    again = steer(waits, view, [wish("c", "r")], now=0.0, age=10.0, limits=PlanLimits())

    assert "rank 0 cannot switch" in waits.detail
    assert same is waits
    assert again.plan is not record.plan
    assert again.detail == ""

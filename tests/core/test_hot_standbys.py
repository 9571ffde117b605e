"""Which standby shadows which rank without a plan, and which gets a lost rank first."""

from msgspec import structs

from tests.plugins.clusters import planned
from tests.values import alert
from tmd.core.planning.directives import Hold, HoldState, Prepare, ShadowRank, Wait, directive_of
from tmd.core.planning.failover import open_failover
from tmd.core.planning.hot_standbys import answered, assign_shadows, roles_of, to_rehearse
from tmd.core.planning.migration import PlanFacts
from tmd.core.planning.standby_reasons import reasons
from tmd.core.planning.standbys import assigned, candidates
from tmd.core.values.limits import ShadowGoals
from tmd.core.values.model import (
    Activity,
    ClusterView,
    Exit,
    HostStatus,
    JobRecord,
    JobState,
    Member,
    Membership,
    Move,
    Phase,
    PlanKind,
    Rehearsal,
    Severity,
    ShadowAssignment,
    ShadowStatus,
    Strategy,
    WorkerStatus,
)
from tmd.core.values.requests import DrainRequest, RehearsalRequest
from tmd.core.values.shadows import noted


def worker(name: str, activity: Activity = Activity.STANDBY, **more: object) -> WorkerStatus:
    plain = WorkerStatus(
        worker=name, job="j", world_size=2, address=f"{name}:1", pid=1, activity=activity
    )
    return structs.replace(plain, **more)


def member(name: str) -> Member:
    return Member(worker=name, host=f"h-{name}", address=f"{name}:1")


def cluster(
    *standbys: WorkerStatus, trains: bool = True
) -> tuple[JobRecord, ClusterView, PlanFacts]:
    """A job of two ranks, a and b, and some standbys, each on a different host."""
    doing = Activity.TRAINING if trains else Activity.STUCK
    ranks = [worker(n, doing, rank=i, epoch=1, step=9) for i, n in enumerate("ab")]
    hosts = tuple(
        HostStatus(host=f"h-{w.worker}", incarnation="1", workers=(w,)) for w in (*ranks, *standbys)
    )
    membership = Membership(epoch=1, members=(member("a"), member("b")))
    record = JobRecord(
        job="j", world_size=2, state=JobState.RUNNING, membership=membership, proposed=1
    )
    view = ClusterView(hosts=hosts, jobs=(record,))
    return record, view, PlanFacts(view, "j")


def test_hot_standbys_cover_different_ranks() -> None:
    """One more in each round, as many as wanted and at most one per rank."""
    record, view, facts = cluster(worker("s"), worker("t"), worker("u"))
    wanted = ShadowGoals(hot=5)
    for count in (1, 2, 2):
        studies = assign_shadows(record, view, facts, wanted)
        assert len(studies) == count
        record = structs.replace(record, shadows=studies)

    assert sorted(u.rank for u in record.shadows) == [0, 1]
    assert all(u.stay for u in record.shadows)


def test_a_hot_standby_on_a_drained_host_is_replaced() -> None:
    """It could not assume the rank, so its shadow is useless."""
    record, view, facts = cluster(worker("s"), worker("t"))
    wanted = ShadowGoals(hot=1)
    (first,) = assign_shadows(record, view, facts, wanted)
    busy = structs.replace(record, shadows=(first,))
    drained = structs.replace(view, drains=(DrainRequest(first.member.host, "r"),))
    (second,) = assign_shadows(busy, drained, PlanFacts(drained, "j"), wanted)

    assert (first.member.worker, second.member.worker) == ("s", "t")
    assert second.stay


def test_a_hot_standby_in_reserve_is_replaced_once_another_standby_is_fit() -> None:
    """Until then it stays, since it may take the rank after a loss. No new one begins there."""
    reserve = (DrainRequest("h-s", "r", reserve=True),)
    wanted = ShadowGoals(hot=1)
    hot = ShadowAssignment(member=member("s"), rank=0, stay=True)

    def shadows(*standbys: WorkerStatus, present: tuple[ShadowAssignment, ...]) -> list[str]:
        record, view, _ = cluster(*standbys)
        view = structs.replace(view, drains=reserve)
        record = structs.replace(record, shadows=present)
        found = assign_shadows(record, view, PlanFacts(view, "j"), wanted)
        return [u.member.worker for u in found if u.stay]

    unfit = worker("t", rehearsed=(Rehearsal(step=9, seconds=1.0, refusal="bits"),))
    assert shadows(worker("s"), present=()) == []
    assert shadows(worker("s"), present=(hot,)) == ["s"]
    assert shadows(worker("s"), unfit, present=(hot,)) == ["s"]
    assert shadows(worker("s"), worker("t"), present=(hot,)) == ["t"]


def test_no_more_hot_standbys_in_reserve_end_than_others_take_their_place() -> None:
    """None could begin there again."""
    record, view, _ = cluster(worker("s"), worker("u"), worker("t"))
    drains = tuple(DrainRequest(f"h-{name}", name, reserve=True) for name in "su")
    view = structs.replace(view, drains=drains)
    present = tuple(
        ShadowAssignment(member=member(name), rank=rank, stay=True)
        for rank, name in enumerate("su")
    )
    record = structs.replace(record, shadows=present)
    for _ in range(2):
        found = assign_shadows(record, view, PlanFacts(view, "j"), ShadowGoals(hot=2))
        assert sorted(u.member.worker for u in found) == ["t", "u"]
        record = structs.replace(record, shadows=found)


def test_an_idle_standby_takes_a_lost_rank_before_a_hot_one_in_reserve() -> None:
    """The rank would have to leave the host in reserve again."""
    hot = worker("s", Activity.IN_STEP, shadow=ShadowStatus(rank=0, verified=9))
    record, view, _ = cluster(hot, worker("t"))
    view = structs.replace(view, drains=(DrainRequest("h-s", "r", reserve=True),))
    facts = PlanFacts(view, "j")
    found = assigned([0], candidates(view, record, facts), facts)
    (taken, other) = reasons({0: member("s")}, view, record, facts)

    assert found == {0: member("t")}
    assert taken.endswith("its host is drained and in reserve")
    assert other.startswith("not t")


def test_every_standby_rehearses_once_and_one_at_a_time() -> None:
    """Not as rank 0 if there is a choice, since scripts print and save there."""
    wanted = ShadowGoals(rehearse=True)
    record, view, facts = cluster(worker("s"), worker("t"))
    studies = assign_shadows(record, view, facts, wanted)

    assert studies == (ShadowAssignment(member=member("s"), rank=1, stay=False),)
    busy = structs.replace(record, shadows=studies)
    assert assign_shadows(busy, view, facts, wanted) == studies

    done = worker("s", rehearsed=(Rehearsal(step=9, seconds=1.0),))
    _, view, facts = cluster(done, worker("t"))
    first = assign_shadows(busy, view, facts, wanted)
    assert [u.member.worker for u in first] == ["t"]


def test_a_requested_rehearsal_takes_place_after_any_earlier_verdict() -> None:
    """This includes a standby that has failed one; it ends once the request is answered."""
    old = worker("s", rehearsed=(Rehearsal(step=9, seconds=1.0, refusal="bits", request="r1"),))
    record, view, facts = cluster(old, worker("t"))
    asked = structs.replace(view, rehearsals=(RehearsalRequest(host="h-s", id="r2"),))
    studies = assign_shadows(record, asked, facts, ShadowGoals())

    expected = ShadowAssignment(member=member("s"), rank=1, stay=False, request="r2")
    assert studies == (expected,)
    busy = structs.replace(record, shadows=studies)
    assert assign_shadows(busy, asked, facts, ShadowGoals()) == studies
    answered = worker("s", rehearsed=(Rehearsal(step=12, seconds=1.0, request="r2"),))
    _, view, facts = cluster(answered, worker("t"))
    asked = structs.replace(view, rehearsals=asked.rehearsals)
    assert assign_shadows(busy, asked, facts, ShadowGoals()) == ()
    assert assign_shadows(record, asked, facts, ShadowGoals()) == ()


def test_a_job_that_is_disturbed_gets_no_new_shadow() -> None:
    """It keeps those that a recovery can use."""
    record, view, facts = cluster(worker("s"), trains=False)
    hot = ShadowAssignment(member=member("s"), rank=0, stay=True)

    assert assign_shadows(record, view, facts, ShadowGoals(hot=1)) == ()
    followed = structs.replace(record, shadows=(hot,))
    assert assign_shadows(followed, view, facts, ShadowGoals(hot=1)) == (hot,)


def test_a_shadow_that_ended_or_failed_is_dropped() -> None:
    """It is silent, or has computed other bits."""
    unfit = worker("s", rehearsed=(Rehearsal(step=9, seconds=1.0, refusal="other bits"),))
    hot = ShadowAssignment(member=member("s"), rank=0, stay=True)
    for standbys in ((), (unfit,)):
        record, view, facts = cluster(*standbys)
        record = structs.replace(record, shadows=(hot,))
        assert assign_shadows(record, view, facts, ShadowGoals(hot=1)) == ()


def test_a_hot_standby_that_misses_heartbeats_stays_hot_for_a_while() -> None:
    """Another one would have to copy the state first. One that has ended is dropped at once."""
    record, view, _ = cluster()
    hot = ShadowAssignment(member=member("s"), rank=0, stay=True)
    rehearses = structs.replace(hot, stay=False)

    def kept(assignment: ShadowAssignment, silence_s: float, view: ClusterView = view) -> bool:
        facts = PlanFacts(view, record.job, {"s": silence_s})
        followed = structs.replace(record, shadows=(assignment,))
        return bool(assign_shadows(followed, view, facts, ShadowGoals(hot=1), silent_s=10.0))

    ended = Exit("s", record.job, -9, 0.0)
    host, *others = view.hosts
    gone = structs.replace(view, hosts=(structs.replace(host, exits=(ended,)), *others))
    assert kept(hot, 9.0)
    assert not kept(hot, 11.0)
    assert not kept(rehearses, 9.0)
    assert not kept(hot, 9.0, gone)


def test_a_standby_that_failed_its_rehearsal_or_joins_is_no_candidate() -> None:
    unfit = worker("s", rehearsed=(Rehearsal(step=9, seconds=1.0, refusal="other bits"),))
    joiner = worker("t", Activity.IN_STEP, plan="j-2")
    record, view, facts = cluster(unfit, joiner, worker("u"))

    assert [c.worker for c in candidates(view, record, facts)] == ["u"]


def test_a_rank_goes_to_its_own_shadow_first_then_to_that_of_a_replica() -> None:
    """And to an idle standby before one that is busy copying."""
    record, view, facts = cluster(
        worker("busy", Activity.SHADOWING, shadow=ShadowStatus(rank=1)),
        worker("cold"),
        worker("other", Activity.IN_STEP, shadow=ShadowStatus(rank=0, verified=8)),
        worker("own", Activity.IN_STEP, shadow=ShadowStatus(rank=1, verified=8)),
    )
    spare = candidates(view, record, facts)

    assert assigned([1], spare, facts)[1].worker == "own"
    both = assigned([0, 1], spare, facts)
    assert [both[0].worker, both[1].worker] == ["other", "own"]
    left = [c for c in spare if c.worker not in ("own", "other")]
    assert assigned([1], left, facts)[1].worker == "cold"
    assert assigned([1], spare, facts, idle_first=True)[1].worker == "cold"


def test_the_shadow_of_a_rank_with_another_state_is_the_last_choice() -> None:
    """It would have to be copied as a whole, and the rank that it follows would lose its shadow."""
    record, view, facts = cluster(
        worker("cold"), worker("other", Activity.IN_STEP, shadow=ShadowStatus(rank=0, verified=8))
    )
    spare = candidates(view, record, facts)
    known = with_replicas(view, a=(0,), b=(1,))

    assert assigned([1], spare, facts)[1].worker == "other"
    assert assigned([1], spare, with_replicas(view, b=(1,)))[1].worker == "other"
    assert assigned([1], spare, with_replicas(view, a=(0, 1)))[1].worker == "other"
    assert assigned([1], spare, known)[1].worker == "cold"
    assert assigned([1], spare[:1], known)[1].worker == "other"


def with_replicas(view: ClusterView, **replicas: tuple[int, ...]) -> PlanFacts:
    """The facts if these workers report ranks of equal state."""
    hosts = tuple(
        structs.replace(
            host,
            workers=tuple(
                structs.replace(w, replicas=replicas.get(w.worker, ())) for w in host.workers
            ),
        )
        for host in view.hosts
    )
    return PlanFacts(structs.replace(view, hosts=hosts), "j")


def test_a_rank_goes_to_a_standby_that_needs_no_rebuild() -> None:
    """Otherwise equal: a state that is already there saves more."""
    record, view, facts = cluster(
        worker("first", serves=(0, 2)),
        worker("second", serves=(1, 3)),
        worker("third", serves=(0, 2)),
        worker("shadow", Activity.IN_STEP, shadow=ShadowStatus(rank=0, verified=8), serves=(0, 2)),
    )
    spare = candidates(view, record, facts)
    idle = [c for c in spare if c.worker != "shadow"]

    assert assigned([1], idle, facts)[1].worker == "second"
    assert [m.worker for m in assigned([0, 1, 2], idle, facts).values()] == [
        "first",
        "second",
        "third",
    ]
    assert assigned([0], spare, facts)[0].worker == "shadow"
    assert assigned([1], spare, facts, idle_first=True)[1].worker == "second"


def test_a_standby_that_shadows_another_role_is_the_last_choice() -> None:
    """It would lose a state and be rebuilt; an idle one is at most rebuilt."""
    hot = worker("hot", Activity.IN_STEP, shadow=ShadowStatus(rank=1, verified=8), serves=(1, 3))
    both = [member("hot"), member("idle")]
    for serves in ((0, 2), (1, 3)):
        _, _, facts = cluster(hot, worker("idle", serves=serves))

        assert assigned([0], both, facts) == {0: member("idle")}
        assert assigned([0, 3], both, facts) == {0: member("idle"), 3: member("hot")}


def test_a_standby_learns_that_a_plan_is_live() -> None:
    """It may be needed at any moment, and does not rebuild by itself."""
    record, _, _ = cluster(worker("s"))
    live = structs.replace(record, plan=planned(1, phase=Phase.RECOVER))

    assert directive_of(record, "s") == Wait()
    assert directive_of(live, "s") == Wait(busy=True)


# --- ranks with different roles -------------------------------------------------------------------

ROLES = ("first", "middle", "middle", "last")
"""A pipeline of four stages; those in the middle have one role."""


def pipeline(
    *standbys: WorkerStatus, roles: tuple[str, ...] = ROLES, replicas: tuple[int, ...] = ()
) -> tuple[JobRecord, ClusterView, PlanFacts]:
    """A job of four ranks, and some standbys."""
    ranks = [
        worker(n, Activity.TRAINING, rank=i, epoch=1, step=9, world_size=4, role=roles[i])
        for i, n in enumerate("abcd")
    ]
    ranks = [structs.replace(w, replicas=replicas) for w in ranks]
    idle = [structs.replace(s, world_size=4) for s in standbys]
    hosts = tuple(
        HostStatus(host=f"h-{w.worker}", incarnation="1", workers=(w,)) for w in (*ranks, *idle)
    )
    membership = Membership(epoch=1, members=tuple(member(n) for n in "abcd"))
    record = JobRecord(
        job="j", world_size=4, state=JobState.RUNNING, membership=membership, proposed=1
    )
    view = ClusterView(hosts=hosts, jobs=(record,))
    return record, view, PlanFacts(view, "j")


def rehearsed(*ranks: int, **more: object) -> tuple[Rehearsal, ...]:
    """A worker that has rehearsed these, one after the other."""
    known: tuple[Rehearsal, ...] = ()
    for rank in ranks:
        verdict = structs.replace(Rehearsal(step=9, seconds=1.0), **more)
        known = noted(known, verdict, rank, ROLES)
    return known


def test_a_standby_rehearses_each_role_once() -> None:
    """First what it is built as, then what most are; then it is left alone."""
    wanted, found = ShadowGoals(rehearse=True), []
    known: tuple[Rehearsal, ...] = ()
    studies: tuple[ShadowAssignment, ...] = ()
    for _ in range(4):
        waits = worker("s", rehearsed=known, serves=(3,))
        record, view, facts = pipeline(waits)
        record = structs.replace(record, shadows=studies)
        studies = assign_shadows(record, view, facts, wanted)
        found.append([u.rank for u in studies])
        for study in studies:
            known = noted(known, Rehearsal(9, 1.0), study.rank, ROLES)

    assert found == [[3], [1], [0], []]
    assert [(v.role, v.ranks) for v in known] == [
        ("last", (3,)),
        ("middle", (1, 2)),
        ("first", (0,)),
    ]


def test_one_standby_has_rehearsed_all_before_the_next_begins() -> None:
    """So one standby is warm soon, whichever rank is lost."""
    record, view, facts = pipeline(worker("s"), worker("t", rehearsed=rehearsed(2)))
    (study,) = assign_shadows(record, view, facts, ShadowGoals(rehearse=True))

    assert (study.member.worker, study.rank) == ("t", 3)


def test_of_equal_ranks_the_one_already_built_is_rehearsed() -> None:
    """Otherwise the last: on rank 0 scripts print and save."""
    record, _, facts = pipeline()
    roles, wanted = roles_of(record, facts), ShadowGoals(rehearse=True)

    assert roles == {"middle": [2, 1], "last": [3], "first": [0]}
    assert to_rehearse(worker("s", serves=(1,)), roles, "", wanted) == 1
    assert to_rehearse(worker("s"), roles, "", wanted) == 2


def test_a_standby_rehearses_another_rank_than_it_had_as_its_own() -> None:
    """A script that goes on with the rank of its start computes right bits for that rank only. A
    script that builds each role anew has got the last rank of the role."""
    record, view, facts = cluster(worker("s", first_rank=1))
    wanted = ShadowGoals(rehearse=True)
    (of_two,) = assign_shadows(record, view, facts, wanted)
    roles = {"alike": [3, 2, 1, 0], "alone": [4]}

    assert of_two.rank == 0
    assert to_rehearse(worker("s", first_rank=3), roles, "", wanted) == 2
    assert to_rehearse(worker("s", first_rank=2), roles, "", wanted) == 3
    assert to_rehearse(worker("s", first_rank=4), {"alone": [4]}, "", wanted) == 4
    assert to_rehearse(worker("s", first_rank=4, serves=(0, 1, 2, 3)), roles, "", wanted) == 2
    assert to_rehearse(worker("s", first_rank=0), {"alike": [3, 0]}, "", wanted) == 3


def test_after_a_refused_move_another_source_is_more_important() -> None:
    """That of the move may be the one that is wrong."""
    refused = Rehearsal(9, 1.0, "other bits", suspect=True, refused_rank=0)
    status, wanted = worker("s", first_rank=1, rehearsed=(refused,)), ShadowGoals(rehearse=True)

    assert to_rehearse(status, {"": [1, 0]}, "", wanted) == 1
    assert to_rehearse(status, {"": [2, 1, 0]}, "", wanted) == 2


def test_a_hot_standby_follows_another_rank_than_it_had_as_its_own() -> None:
    """If there is a replica of that role besides rank 0, which it would follow for ever."""

    def followed(job: tuple[JobRecord, ClusterView, PlanFacts]) -> int:
        (hot,) = assign_shadows(*job, ShadowGoals(hot=1))
        return hot.rank

    alike, all_ranks = ("all",) * 4, (0, 1, 2, 3)
    assert followed(pipeline(worker("s", first_rank=3), roles=alike, replicas=all_ranks)) == 2
    assert followed(pipeline(worker("s", first_rank=2), roles=alike, replicas=all_ranks)) == 3
    assert followed(pipeline(worker("s", first_rank=3), roles=alike, replicas=(0, 3))) == 3
    assert followed(pipeline(worker("s", first_rank=3), roles=alike)) == 3
    assert followed(pipeline(worker("s", first_rank=3), replicas=all_ranks)) == 3


def test_a_role_that_has_changed_is_rehearsed_again() -> None:
    """The job was restarted with other shapes; earlier verdicts are dropped."""
    done = rehearsed(0, 2, 3)
    record, _, facts = pipeline()
    changed = {**roles_of(record, facts), "larger": [3]}
    del changed["last"]
    wanted = ShadowGoals(rehearse=True)

    assert to_rehearse(worker("s", rehearsed=done), roles_of(record, facts), "", wanted) is None
    assert to_rehearse(worker("s", rehearsed=done), changed, "", wanted) == 3
    again = noted(done, Rehearsal(1, 1.0), 3, ("first", "middle", "middle", "larger"))
    assert [v.role for v in again] == ["first", "middle", "larger"]


def test_a_request_is_answered_once_every_role_was_rehearsed_for_it() -> None:
    """Rehearsals without a request do not count."""
    record, _, facts = pipeline()
    roles, quiet = roles_of(record, facts), ShadowGoals()
    old = rehearsed(0, 2, 3)
    half = noted(old, Rehearsal(9, 1.0, request="r"), 2, ROLES)
    whole = rehearsed(0, 2, 3, request="r")

    assert to_rehearse(worker("s", rehearsed=old), roles, "r", quiet) == 2
    assert to_rehearse(worker("s", rehearsed=half), roles, "r", quiet) == 3
    assert to_rehearse(worker("s", rehearsed=whole), roles, "r", quiet) is None
    assert [answered(worker("s", rehearsed=v), roles, "r") for v in (old, half, whole)] == [
        False,
        False,
        True,
    ]


def test_a_role_that_failed_its_rehearsal_is_never_given() -> None:
    """It gets other roles, and a request may show that it fits now."""
    some = noted(rehearsed(2), Rehearsal(0, 0.0, "other shapes"), 3, ROLES)
    record, view, facts = pipeline(worker("s", rehearsed=some), worker("t"))
    spare = candidates(view, record, facts)

    assert [m.worker for m in spare] == ["s", "t"]
    assert assigned([3], spare, facts) == {3: member("t")}
    assert assigned([3], spare[:1], facts) == {}
    assert assigned([1, 3], spare[:1], facts) == {1: member("s")}
    why = reasons({3: member("t")}, view, record, facts)
    assert why[1] == "not s: it failed its rehearsal: other shapes"
    mended = noted(some, Rehearsal(9, 1.0), 3, ROLES)
    _, _, facts = pipeline(worker("s", rehearsed=mended))
    assert assigned([3], spare[:1], facts) == {3: member("s")}


def test_a_standby_that_computed_other_bits_gets_no_rank() -> None:
    """Its machine is suspect. It is tried again only on request."""
    bad = noted(rehearsed(2), Rehearsal(9, 1.0, "other bits", suspect=True), 3, ROLES)
    suspect = worker("s", rehearsed=bad)
    record, view, facts = pipeline(suspect)
    roles = roles_of(record, facts)

    assert candidates(view, record, facts) == []
    assert to_rehearse(suspect, roles, "", ShadowGoals(rehearse=True)) is None
    assert to_rehearse(suspect, roles, "r", ShadowGoals(rehearse=True)) == 2


def test_a_rank_goes_to_a_standby_that_has_rehearsed_its_role() -> None:
    """It comes before one that only needs no rebuild, and after one that has the state; the plan
    states the reason."""
    record, view, facts = pipeline(
        worker("built", serves=(3,), rehearsed=rehearsed(0)),
        worker("warm", serves=(0,), rehearsed=rehearsed(3)),
    )
    spare = candidates(view, record, facts)
    chosen = assigned([3], spare, facts)

    assert chosen == {3: member("warm")}
    assert reasons(chosen, view, record, facts) == (
        "rank 3: warm: it shadows no rank, its host holds none, rehearsed",
        "not built: it has not rehearsed what rank 3 is built as",
    )
    alone = reasons({3: member("built")}, view, record, facts)
    assert alone[0].endswith("rehearsed as another rank only")


def test_ranks_are_assigned_so_that_each_gets_a_standby() -> None:
    """The only standby that is fit for a rank is not used for another."""
    only_first = noted(rehearsed(0), Rehearsal(0, 0.0, "other shapes"), 3, ROLES)
    _, _, facts = pipeline(
        worker("all", rehearsed=rehearsed(0, 3)), worker("some", rehearsed=only_first)
    )
    both = [member("all"), member("some")]

    assert assigned([0, 3], both, facts) == {0: member("some"), 3: member("all")}


def test_a_shadow_learns_whether_its_rank_is_dead() -> None:
    """The worker that it shadows is dead, or another one."""
    record, _, _ = cluster(worker("s", Activity.IN_STEP))
    hot = ShadowAssignment(member=member("s"), rank=1, stay=True)
    record = structs.replace(record, shadows=(hot,))
    orders = {}
    for dead in ("a", "b"):
        plan = structs.replace(
            planned(2, phase=Phase.RECOVER), kind=PlanKind.FAILOVER, dead=(dead,)
        )
        orders[dead] = directive_of(structs.replace(record, plan=plan), "s")

    assert orders == {"a": HoldState(plan.id), "b": HoldState(plan.id, over=True)}


def test_survivors_learn_which_lost_ranks_have_a_hot_standby() -> None:
    """It may shadow other ranks as well; a rehearsal leaves no usable state."""
    record, _, _ = cluster(worker("s", Activity.IN_STEP))
    record = open_failover(record, ["b"], "trainer", "it was killed", "replace_failed", 0.0)
    assert record.plan is not None
    orders = {}
    for name, studies in {
        "none": (),
        "hot": (ShadowAssignment(member=member("s"), rank=0, stay=True),),
        "rehearsal": (ShadowAssignment(member=member("s"), rank=0, stay=False),),
    }.items():
        orders[name] = directive_of(structs.replace(record, shadows=studies), "a")

    plan = record.plan.id
    plain = Hold(plan, epoch=1)
    assert orders == {"none": plain, "hot": Hold(plan, 1, hot=(1,)), "rehearsal": plain}


def test_a_plan_comes_before_a_rehearsal() -> None:
    """Remaining rehearsals wait until the plan has ended."""
    record, view, facts = pipeline(worker("s", Activity.SHADOWING, shadow=ShadowStatus(rank=3)))
    study = ShadowAssignment(member=member("s"), rank=3, stay=False)
    moved = record.membership.replaced({1: member("s")}, 2)
    move = Move(rank=1, leaver=member("b"), joiner=member("s"))
    plan = planned(2, phase=Phase.PREPARE, moves=(move,), old=record.membership, new=moved)
    busy = structs.replace(record, shadows=(study,), plan=plan)

    assert directive_of(structs.replace(busy, plan=None), "s") == ShadowRank(
        3, 4, member("d"), stay=False
    )
    assert isinstance(directive_of(busy, "s"), Prepare)
    assert assign_shadows(busy, view, facts, ShadowGoals(rehearse=True)) == (study,)
    assert assigned([1], [member("s")], facts) == {1: member("s")}


def test_late_standbys_and_degraded_hosts_come_last_despite_rehearsals() -> None:
    _, view, facts = pipeline(worker("s"), worker("t", rehearsed=rehearsed(3)))
    both = [member("s"), member("t")]
    ill = alert(host="h-t", severity=Severity.DEGRADED, strategy=Strategy.ACT, job="")
    hosts = [structs.replace(h, alerts=(ill,)) if h.host == "h-t" else h for h in view.hosts]

    assert assigned([3], both, facts) == {3: member("t")}
    assert assigned([3], both, facts, late=("t",)) == {3: member("s")}
    ailing = PlanFacts(structs.replace(view, hosts=tuple(hosts)), "j")
    assert assigned([3], both, ailing) == {3: member("s")}


def test_the_role_of_a_lost_rank_is_known_from_the_rehearsal() -> None:
    """Its host may be silent, so that no report has the role any more."""
    some = noted(rehearsed(2), Rehearsal(0, 0.0, "other shapes"), 3, ROLES)
    _, view, _ = pipeline(worker("s", rehearsed=some))
    silent = structs.replace(view, hosts=tuple(h for h in view.hosts if h.host != "h-d"))
    facts = PlanFacts(silent, "j")

    assert assigned([3], [member("s")], facts) == {}
    assert assigned([2], [member("s")], facts) == {2: member("s")}


def test_a_standby_that_refused_a_move_rehearses_another_rank_by_itself() -> None:
    """The source of the move may be the one that computes other bits; a rehearsal decides."""
    refusal = Rehearsal(step=9, seconds=1.0, refusal="other bits", suspect=True, refused_rank=1)
    wanted = ShadowGoals(rehearse=True)
    record, view, facts = cluster(worker("s", rehearsed=(refusal,)))
    (study,) = assign_shadows(record, view, facts, wanted)
    settled = worker("s", rehearsed=(structs.replace(refusal, refused_rank=None),))
    record, view, facts = cluster(settled)

    assert (study.member.worker, study.rank, study.stay) == ("s", 0, False)
    assert assign_shadows(record, view, facts, wanted) == ()


def test_a_rehearsal_without_a_result_keeps_an_earlier_refusal() -> None:
    refusal = Rehearsal(step=9, seconds=1.0, refusal="other bits", suspect=True, refused_rank=1)
    before = noted((), refusal, 1, ("r", "r"))
    (after,) = noted(before, Rehearsal(0, 0.0, note="too slow", request="q"), 1, ("r", "r"))

    assert (after.refusal, after.suspect, after.request) == ("other bits", True, "q")
    assert after.refused_rank is None

"""Who follows which rank without a plan, and who is first in line for a rank."""

from msgspec import structs

from tests.plugins.clusters import planned
from tmd.core.duties import Wait, duty
from tmd.core.limits import Understudies
from tmd.core.migration import Facts
from tmd.core.model import (
    Activity,
    ClusterView,
    HostStatus,
    JobRecord,
    JobState,
    Member,
    Membership,
    Phase,
    Rehearsal,
    ShadowStatus,
    Understudy,
    WorkerStatus,
)
from tmd.core.requests import RehearsalRequest
from tmd.core.standbys import assigned, candidates
from tmd.core.understudies import understudied


def worker(name: str, activity: Activity = Activity.STANDBY, **more: object) -> WorkerStatus:
    plain = WorkerStatus(
        worker=name, job="j", world_size=2, address=f"{name}:1", pid=1, activity=activity
    )
    return structs.replace(plain, **more)


def member(name: str) -> Member:
    return Member(worker=name, host=f"h-{name}", address=f"{name}:1")


def cluster(*standbys: WorkerStatus, trains: bool = True) -> tuple[JobRecord, ClusterView, Facts]:
    """A job of two ranks, a and b, and some standbys, each on a host of its own."""
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
    return record, view, Facts(view, "j")


def test_hot_standbys_cover_different_ranks() -> None:
    """One more at each look, as many as wanted and no more than there are ranks."""
    record, view, facts = cluster(worker("s"), worker("t"), worker("u"))
    wanted = Understudies(hot=5)
    for count in (1, 2, 2):
        studies = understudied(record, view, facts, wanted)
        assert len(studies) == count
        record = structs.replace(record, understudies=studies)

    assert sorted(u.rank for u in record.understudies) == [0, 1]
    assert all(u.stay for u in record.understudies)


def test_every_standby_rehearses_once_and_one_at_a_time() -> None:
    """Never as rank 0, on which scripts print and save."""
    wanted = Understudies(rehearse=True)
    record, view, facts = cluster(worker("s"), worker("t"))
    studies = understudied(record, view, facts, wanted)

    assert studies == (Understudy(member=member("s"), rank=1, stay=False),)
    busy = structs.replace(record, understudies=studies)
    assert understudied(busy, view, facts, wanted) == studies

    done = worker("s", rehearsed=Rehearsal(step=9, seconds=1.0))
    _, view, facts = cluster(done, worker("t"))
    first = understudied(busy, view, facts, wanted)
    assert [u.member.worker for u in first] == ["t"]


def test_a_rehearsal_that_is_asked_for_comes_whoever_asked_before() -> None:
    """Also of a standby that has failed one; and only until it is answered."""
    old = worker("s", rehearsed=Rehearsal(step=9, seconds=1.0, refusal="bits", request="r1"))
    record, view, facts = cluster(old, worker("t"))
    asked = structs.replace(view, rehearsals=(RehearsalRequest(host="h-s", id="r2"),))
    studies = understudied(record, asked, facts, Understudies())

    expected = Understudy(member=member("s"), rank=1, stay=False, request="r2")
    assert studies == (expected,)
    busy = structs.replace(record, understudies=studies)
    assert understudied(busy, asked, facts, Understudies()) == studies
    answered = worker("s", rehearsed=Rehearsal(step=12, seconds=1.0, request="r2"))
    _, view, facts = cluster(answered, worker("t"))
    asked = structs.replace(view, rehearsals=asked.rehearsals)
    assert understudied(busy, asked, facts, Understudies()) == ()
    assert understudied(record, asked, facts, Understudies()) == ()


def test_a_job_that_is_disturbed_gets_no_new_understudy() -> None:
    """Nor does it lose those that are of use in a recovery."""
    record, view, facts = cluster(worker("s"), trains=False)
    hot = Understudy(member=member("s"), rank=0, stay=True)

    assert understudied(record, view, facts, Understudies(hot=1)) == ()
    followed = structs.replace(record, understudies=(hot,))
    assert understudied(followed, view, facts, Understudies(hot=1)) == (hot,)


def test_an_understudy_that_ended_or_failed_is_dropped() -> None:
    """It is not heard from any more, or has computed other bits."""
    unfit = worker("s", rehearsed=Rehearsal(step=9, seconds=1.0, refusal="other bits"))
    hot = Understudy(member=member("s"), rank=0, stay=True)
    for standbys in ((), (unfit,)):
        record, view, facts = cluster(*standbys)
        record = structs.replace(record, understudies=(hot,))
        assert understudied(record, view, facts, Understudies(hot=1)) == ()


def test_who_failed_its_rehearsal_or_is_a_joiner_is_no_candidate() -> None:
    unfit = worker("s", rehearsed=Rehearsal(step=9, seconds=1.0, refusal="other bits"))
    joiner = worker("t", Activity.IN_STEP, plan="j-2")
    record, view, facts = cluster(unfit, joiner, worker("u"))

    assert [c.worker for c in candidates(view, record, facts)] == ["u"]


def test_a_rank_goes_to_its_own_shadow_first_then_to_that_of_a_replica() -> None:
    """And to a standby with nothing before one that is busy copying."""
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


def test_a_rank_goes_to_a_standby_that_need_not_be_built_again() -> None:
    """If they are equal otherwise: a state that is here saves more."""
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


def test_whoever_follows_another_role_is_the_last_choice() -> None:
    """It would lose a state and be built again; an idle one is only built, if at all."""
    hot = worker("hot", Activity.IN_STEP, shadow=ShadowStatus(rank=1, verified=8), serves=(1, 3))
    both = [member("hot"), member("idle")]
    for serves in ((0, 2), (1, 3)):
        _, _, facts = cluster(hot, worker("idle", serves=serves))

        assert assigned([0], both, facts) == {0: member("idle")}
        assert assigned([0, 3], both, facts) == {0: member("idle"), 3: member("hot")}


def test_a_standby_is_told_that_a_plan_goes_on() -> None:
    """It may be wanted any moment, and is not built anew of its own accord."""
    record, _, _ = cluster(worker("s"))
    live = structs.replace(record, plan=planned(1, phase=Phase.RECOVER))

    assert duty(record, "s") == Wait()
    assert duty(live, "s") == Wait(busy=True)

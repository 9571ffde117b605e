"""Ranks that nobody else could take are adopted, and given to the standbys that come."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack, structs

from tests import values
from tests.core.clusters import STEP, Scene
from tmd.core.planning.adoption import ATTEMPTS, adopted, growth, load_of, refusal, shrunk
from tmd.core.planning.directives import (
    Arm,
    Leave,
    Prepare,
    ShadowRank,
    Sync,
    Train,
    directive_of,
)
from tmd.core.planning.planning import steer
from tmd.core.planning.readiness import SHRUNK
from tmd.core.planning.record_versions import needed_version
from tmd.core.planning.survival import LossOutlook, survival
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.limits import PlanLimits, ShadowGoals
from tmd.core.values.model import (
    ADOPTING_VERSION,
    Activity,
    ClusterView,
    HostStatus,
    JobRecord,
    JobState,
    Membership,
    Phase,
    PlanKind,
    Urgency,
    Verdict,
)

LIMITS = PlanLimits()


class Elastic(Scene):
    """A job whose script lets ranks be adopted."""

    def __init__(self, size: int = 4, standbys: int = 0) -> None:
        super().__init__(size, standbys)
        self.alike = tuple(range(size))
        for host in (*self.ranks, *(f"s{n}" for n in range(standbys))):
            self.changes(host, elastic="")

    @property
    def view(self) -> ClusterView:
        """All daemons are of this release."""
        found = super().view
        hosts = tuple(structs.replace(h, reads=ADOPTING_VERSION) for h in found.hosts)
        return structs.replace(found, hosts=hosts)

    def changes(self, host: str, **fields: object) -> None:
        status = structs.replace(self.statuses[host], **fields)
        alike = self.alike if status.rank is not None else ()
        self.statuses[host] = structs.replace(status, replicas=alike)

    def loses(self, *hosts: str) -> None:
        """The workers of ``hosts`` die, and all others halt."""
        for host in hosts:
            self.exit(host, -9)
        self.steer(
            *(Verdict("job", values.worker(h), Urgency.FAILED, "trainer.exited", "") for h in hosts)
        )
        for host in self.statuses:
            if self.statuses[host].rank is not None:
                self.changes(host, activity=Activity.STUCK, plan=self.plan.id)

    def steer(self, *verdicts: Verdict, age: float = 1.0) -> JobRecord:
        view = self.view
        self.record = steer(
            self.record, view, verdicts, now=0.0, age=age, limits=LIMITS, wanted=ShadowGoals(hot=1)
        )
        return self.record

    def recovers(self, step: int = STEP) -> None:
        """All workers carry out the plan to its end."""
        for activity, at in ((Activity.SYNCED, step), (Activity.TRAINING, step + 1)):
            epoch = self.plan.new.epoch if activity is Activity.TRAINING else 1
            for host in self.statuses:
                own = self.plan.new.rank_of(values.worker(host))
                if own is not None:
                    fields = {"plan": self.plan.id, "rank": own, "epoch": epoch, "step": at}
                    self.changes(host, activity=activity, **fields)
            self.steer()
        for host in self.statuses:
            self.changes(host, plan="")


# --- who adopts ----------------------------------------------------------------------------------


@given(
    st.integers(1, 40).flatmap(
        lambda n: st.sets(st.integers(0, n - 1), min_size=1).map(lambda owners: (n, owners))
    )
)
def test_every_rank_is_adopted_once_and_as_evenly_as_can_be(case: tuple[int, set[int]]) -> None:
    size, owners = case
    vacant = set(range(size)) - owners
    found = adopted(vacant, owners)
    loads = Counter(found.values())

    assert found.keys() == vacant
    assert set(found.values()) <= owners
    assert max(loads[own] for own in owners) - min(loads[own] for own in owners) <= 1


def test_a_membership_names_each_worker_once() -> None:
    less = values.record("h0", "h1", "h2").membership.shrunk({0: 2})
    assert less.workers == (values.worker("h2"), values.worker("h1"))


@given(st.integers(2, 20), st.data())
def test_a_membership_with_adopted_ranks_names_each_worker_once_as_own(
    size: int, data: st.DataObject
) -> None:
    owners = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    whole = values.record(*(f"h{n}" for n in range(size))).membership
    vacant = set(range(size)) - owners
    less = whole.replaced({}, 2).shrunk(adopted(vacant, owners))
    crew = less.crew(range(size))

    assert set(crew) == owners
    assert [less.rank_of(less.members[own].worker) for own in crew] == list(crew)
    assert sorted(r for own in crew for r in less.held_by(less.members[own].worker)) == list(
        range(size)
    )
    assert sum(load_of(less).values()) == size
    assert less.moved(whole) == vacant
    assert msgpack.decode(msgpack.encode(less), type=Membership) == less


def test_a_membership_of_an_earlier_release_adopts_nothing() -> None:
    before = values.record("h0", "h1").membership
    raw = {"epoch": before.epoch, "members": [structs.asdict(m) for m in before.members]}
    assert msgpack.decode(msgpack.encode(raw), type=Membership) == before


# --- a loss --------------------------------------------------------------------------------------


def test_without_a_standby_a_survivor_adopts_the_rank() -> None:
    """All workers run the step again; nobody copies a state."""
    scene = Elastic()
    scene.loses("h2")
    record = scene.steer()
    plan = scene.plan

    assert plan.phase is Phase.SYNC
    assert plan.new.adopted == {2: 3}
    assert plan.new.members[2] == values.member("h3")
    assert [(m.rank, m.joiner, m.source) for m in plan.moves] == [(2, None, None)]
    sync = directive_of(record, values.worker("h3"))
    assert isinstance(sync, Sync)
    assert (sync.rank, sync.resume, sync.continues) == (3, STEP, False)
    assert isinstance(directive_of(record, values.worker("h2")), Leave)
    assert plan.taker_of(plan.moves[0]) == "adopted by rank 3"

    scene.recovers()
    assert scene.plan.phase is Phase.DONE
    assert scene.record.membership.adopted == {2: 3}
    assert scene.record.state is JobState.RUNNING
    train = directive_of(scene.record, values.worker("h3"))
    assert isinstance(train, Train)
    assert train.rank == 3


def test_two_of_four_are_adopted_by_one_each() -> None:
    scene = Elastic()
    scene.loses("h0", "h3")
    scene.steer()
    assert scene.plan.new.adopted == {0: 1, 3: 2}


def test_standbys_come_first() -> None:
    scene = Elastic(standbys=1)
    scene.loses("h1", "h2")
    scene.steer()

    assert scene.plan.new.adopted == {2: 3}
    joiner, adopted_rank = scene.plan.moves
    assert joiner.joiner == values.member("s0")
    assert joiner.source is not None
    assert adopted_rank.joiner is None


def test_a_joiner_of_a_dropped_plan_is_waited_for_but_not_for_long() -> None:
    """It is about to stand by again."""
    scene = Elastic(standbys=1)
    scene.loses("h1")
    scene.changes("s0", activity=Activity.PREPARED, plan="job-1")
    scene.steer(age=0.1)
    waited = scene.plan.phase
    scene.steer(age=LIMITS.settle_s)

    assert (waited, scene.plan.phase) == (Phase.RECOVER, Phase.SYNC)
    assert scene.plan.new.adopted == {1: 2}


def test_the_loss_of_one_that_has_adopted_a_rank_moves_both() -> None:
    scene = Elastic()
    scene.loses("h2")
    scene.steer()
    scene.recovers()
    scene.loses("h3")
    assert [m.rank for m in scene.plan.moves] == [2, 3]
    scene.steer()
    assert scene.plan.new.adopted == {2: 0, 3: 1}
    scene.recovers(STEP + 1)
    assert scene.record.membership.adopted == {2: 0, 3: 1}


def test_one_that_has_adopted_a_rank_is_waited_for_by_its_name_once() -> None:
    scene = small()
    scene.loses("h1")
    scene.changes("h3", activity=Activity.TRAINING, plan="")
    assert scene.steer().detail == f"waiting for {values.worker('h3')} to halt"


def test_a_loss_that_comes_later_leaves_an_adopted_rank_where_it_is() -> None:
    """If that is even: nothing is said of a rank that does not move."""
    scene = Elastic(6)
    scene.loses("h2")
    scene.steer()
    scene.recovers()
    scene.loses("h5")
    scene.steer()

    assert scene.plan.new.adopted == {2: 3, 5: 0}
    assert [m.rank for m in scene.plan.moves] == [5]


def test_a_rank_is_adopted_before_the_first_step() -> None:
    """The buckets of DDP are those of later steps."""
    scene = Elastic()
    scene.loses("h2")
    for host in ("h0", "h1", "h3"):
        scene.changes(host, step=0)
    scene.steer()

    assert scene.plan.new.adopted == {2: 3}
    assert scene.plan.resume == 0


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"elastic": None}, ""),
        ({"elastic": "its script calls reduce"}, "no other rank can compute for it: its script"),
    ],
)
def test_in_doubt_the_job_holds(fields: dict[str, object], why: str) -> None:
    """A script that has not asked is told of nothing."""
    scene = Elastic()
    scene.loses("h2")
    scene.changes("h0", **fields)
    for host in ("h1", "h3"):
        scene.changes(host)
    record = scene.steer()

    assert scene.plan.phase is Phase.RECOVER
    assert record.detail.startswith("no standby for rank 2: the job has no other standby")
    assert why in record.detail
    assert ("compute" in record.detail) is bool(why)


def test_a_state_that_exists_once_is_never_adopted() -> None:
    """Without a snapshot the job has failed, as ever."""
    scene = Elastic()
    scene.alike = ()
    scene.loses("h2")
    for host in ("h0", "h1", "h3"):
        scene.changes(host, replicas=(scene.ranks.index(host),))
    assert scene.steer().state is JobState.FAILED


@pytest.mark.parametrize("unread", [False, True])
def test_no_rank_is_adopted_while_a_host_cannot_read_of_that(unread: bool) -> None:
    scene = Elastic()
    view = scene.view
    if unread:
        view = structs.replace(view, unread=("h9",))
    else:
        view = structs.replace(view, hosts=(*view.hosts, HostStatus("h9", "i", reads=1)))
    found = refusal(view, list(scene.statuses.values()))
    able = scene.view

    assert found is not None
    assert "h9" in found
    assert refusal(able, list(scene.statuses.values())) == ""
    assert refusal(able, []) is None


def test_only_a_record_that_names_adopted_ranks_needs_a_later_version() -> None:
    scene = Elastic()
    plain = needed_version(scene.record)
    scene.loses("h2")
    holding = needed_version(scene.record)
    scene.steer()

    assert (plain, holding, needed_version(scene.record)) == (0, 0, ADOPTING_VERSION)


# --- growing back --------------------------------------------------------------------------------


def small(**standbys: object) -> Elastic:
    """Rank 2 is adopted by rank 3, and the job trains."""
    scene = Elastic()
    scene.loses("h2")
    scene.steer()
    scene.recovers()
    return scene


def test_a_standby_that_comes_gets_the_adopted_rank_by_a_planned_move() -> None:
    """It shadows a worker with one rank; the adopter stays."""
    scene = small()
    scene.says("s0", Activity.STANDBY, elastic="")
    record = scene.steer()
    plan = scene.plan

    assert (plan.kind, plan.phase, plan.cause) == (PlanKind.PLANNED, Phase.PREPARE, SHRUNK)
    assert plan.new.adopted == {}
    assert plan.new.members[2] == values.member("s0")
    (move,) = plan.moves
    assert (move.leaver, move.source) == (values.member("h3"), values.member("h1"))
    prepare = directive_of(record, values.worker("s0"))
    assert isinstance(prepare, Prepare)
    assert (prepare.rank, prepare.plays, prepare.adopted) == (2, 1, True)
    assert directive_of(record, values.worker("h3")) == Train(plan.old, 3)

    scene.changes("s0", activity=Activity.IN_STEP, plan=plan.id)
    ready = scene.steer()
    assert isinstance(directive_of(ready, values.worker("h3")), Arm)
    entered = {"epoch": plan.new.epoch, "entered": STEP + 2, "step": STEP + 2}
    for host in ("h0", "h1", "h3"):
        scene.changes(host, **entered)
    scene.changes("s0", activity=Activity.TRAINING, rank=2, **entered)
    scene.steer()
    scene.steer()
    assert scene.plan.phase.value == "switch"
    scene.changes("s0", step=STEP + 3)
    done = scene.steer()

    assert scene.plan.phase is Phase.DONE
    assert done.membership.adopted == {}
    assert shrunk(done) == ""
    assert directive_of(done, values.worker("h3")) == Train(done.membership, 3)


def test_a_joiner_that_refuses_often_is_not_asked_again() -> None:
    scene = small()
    scene.says("s0", Activity.STANDBY, elastic="")
    for _ in range(ATTEMPTS):
        scene.steer()
        scene.changes("s0", activity=Activity.REFUSED, plan=scene.plan.id, detail="no")
        scene.steer()
        assert scene.plan.phase is Phase.ABORTED
        scene.changes("s0", activity=Activity.STANDBY, plan="")
    assert growth(scene.record, scene.view, scene.facts) == ((), {})


def test_a_joiner_that_is_late_often_is_not_asked_again() -> None:
    """Also after a failover, which raises the epoch. Another one is."""
    scene = small()
    scene.says("s0", Activity.STANDBY, elastic="")
    for _ in range(ATTEMPTS):
        scene.steer()
        scene.steer(age=LIMITS.prepare_s + 1)
        assert scene.plan.phase is Phase.ABORTED
        assert scene.plan.rejected == ()
    assert growth(scene.record, scene.view, scene.facts) == ((), {})
    later = structs.replace(scene.record.membership, epoch=scene.record.proposed + 1)
    after = structs.replace(scene.record, membership=later)
    assert growth(after, scene.view, scene.facts) == ((), {})
    scene.says("s1", Activity.STANDBY, elastic="")
    assert growth(scene.record, scene.view, scene.facts)[1] == {2: values.member("s1")}


def test_no_move_begins_while_the_job_is_disturbed_or_a_plan_is_live() -> None:
    scene = small()
    scene.says("s0", Activity.STANDBY, elastic="")
    scene.changes("h1", activity=Activity.STUCK)
    assert growth(scene.record, scene.view, scene.facts)[0] == ()
    scene.changes("h1", activity=Activity.TRAINING)
    assert growth(scene.record, scene.view, scene.facts)[0] != ()
    assert growth(scene.record, structs.replace(scene.view, paused=True), scene.facts)[0] == ()
    tripped = structs.replace(scene.view, breaker=Breaker(open=True))
    assert growth(scene.record, tripped, scene.facts)[0] == ()
    scene.steer()
    assert growth(scene.record, scene.view, scene.facts)[0] == ()


def test_each_joiner_shadows_a_worker_of_its_own() -> None:
    """Two workers hold six ranks: two joiners come at once, and the others after them."""
    scene = Elastic(6)
    scene.loses("h0", "h1", "h4", "h5")
    scene.steer()
    scene.recovers()
    for number in range(4):
        scene.says(f"s{number}", Activity.STANDBY, elastic="")
    moves, joiners = growth(scene.record, scene.view, scene.facts)

    assert len(joiners) == 2
    assert {m.source for m in moves} == {values.member("h2"), values.member("h3")}


def test_no_standby_shadows_while_ranks_are_adopted() -> None:
    scene = small()
    scene.says("s0", Activity.STANDBY, elastic="")
    scene.record = structs.replace(scene.record, shadows=())
    scene.changes("h1", activity=Activity.STUCK)  # so that no move begins
    assert not isinstance(directive_of(scene.steer(), values.worker("s0")), ShadowRank)


def test_a_drain_waits_until_the_job_has_grown() -> None:
    scene = small()
    verdict = Verdict("job", values.worker("h1"), Urgency.DRAIN, "drain", "")
    record = scene.steer(verdict)

    assert record.plan is not None
    assert record.plan.phase is Phase.DONE
    assert record.detail == "moving the ranks of h1 waits until no rank is adopted"


# --- what is said --------------------------------------------------------------------------------


def test_what_people_are_told() -> None:
    scene = small()
    assert shrunk(scene.record) == "3 workers compute for 4 ranks: rank 2 by that of rank 3"


def test_the_outlook_of_a_job_that_goes_on_smaller() -> None:
    scene = Elastic()
    before = survival(scene.view, scene.record)
    scene.changes("h1", elastic="its script calls reduce")
    after = survival(scene.view, scene.record)

    assert (before.outlook, after.outlook) == (LossOutlook.LIKELY, LossOutlook.HALTS)
    assert before.sentence.endswith("but other ranks would compute for it")

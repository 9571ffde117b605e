"""Disarming must never be reported while a vote may still switch, nor after it has switched."""

from collections.abc import Callable

from tmd.core.planning.directives import Arm, Train
from tmd.core.values.model import Activity, Member, Membership, WorkerStatus
from tmd.trainer.protocol.step_vote import ticket
from tmd.trainer.worker.arming import Arming


def order(epoch: int) -> Arm:
    return Arm(plan=f"p{epoch}", membership=Membership(epoch=epoch, members=()), moves=())


class Reports:
    """An :class:`Arming` whose groups are built at once, and what it reports."""

    def __init__(self, *, refusal: str | None = "") -> None:
        """``refusal``: the outcome of each build; ``None`` if it does not end by itself."""
        self.armed: list[tuple[int, str, str]] = []
        self.dropped: list[int] = []
        self.done: Callable[[str], None] = lambda _: None
        self._refusal = refusal
        self.arming = Arming(
            lambda epoch, plan, why: self.armed.append((epoch, plan, why)),
            self._build,
            lambda later: self.dropped.append(later.epoch),
        )

    def _build(self, order: Arm, done: Callable[[str], None]) -> None:
        self.done = done
        if self._refusal is not None:
            done(self._refusal)

    @property
    def epochs(self) -> list[int]:
        return [epoch for epoch, _, _ in self.armed]


def nobody(waiting: Arm) -> bool:
    """No joiner is gone."""
    return False


def test_an_armed_epoch_that_wins_the_vote_is_followed_once() -> None:
    """The outcome names the directive; afterwards nothing is armed."""
    arming = Reports().arming
    arming.arm(order(2))

    assert arming.begin_vote(nobody) == ticket(order(2).membership)
    assert arming.end_vote(ticket(order(2).membership)) == order(2)
    assert arming.begin_vote(nobody) == 0


def test_disarming_during_a_vote_is_reported_after_it() -> None:
    """Else the leader could drop a plan whose switch is already being voted on."""
    reports = Reports()
    arming = reports.arming
    arming.arm(order(2))
    arming.begin_vote(nobody)
    arming.disarm()
    before = list(reports.armed)
    outcome = arming.end_vote(0)

    assert before == [(2, "p2", "")]
    assert outcome is None
    assert reports.epochs == [2, 0]


def test_a_vote_that_switches_wins_over_a_late_disarm() -> None:
    """Others have switched: this rank must too, and never reports that it was disarmed."""
    reports = Reports()
    arming = reports.arming
    arming.arm(order(2))
    arming.begin_vote(nobody)
    arming.disarm()

    assert arming.end_vote(ticket(order(2).membership)) == order(2)
    assert reports.epochs == [2]


def test_a_voted_switch_cannot_be_disarmed_before_the_boundary() -> None:
    """Between the vote and the boundary the optimizer runs: the plan of a rank that reported
    "disarmed" meanwhile would be dropped, and the rank would be alone in its epoch."""
    reports = Reports()
    arming = reports.arming
    status = WorkerStatus("w", "job", 2, "", 1, Activity.TRAINING, epoch=1)
    arming.arm(order(2))
    arming.begin_vote(nobody)
    arming.end_vote(ticket(order(2).membership))
    arming.obey(Train(membership=Membership(1, ()), rank=0, dropped="p2"), status)
    arming.obey(order(2), status)
    before = list(reports.armed)
    arming.switched()
    arming.arm(order(3))

    assert before == [(2, "p2", "")]
    assert reports.armed == [(2, "p2", ""), (3, "p3", "")]
    assert arming.begin_vote(nobody) == ticket(order(3).membership)


def test_a_rank_that_knows_of_a_dead_joiner_does_not_vote_for_it() -> None:
    """The leader does not know of it yet; the rank stays armed until the leader disarms it."""
    reports = Reports()
    arming = reports.arming
    arming.arm(order(2))
    asked = arming.begin_vote(lambda order: order.membership.epoch == 2)
    outcome = arming.end_vote(0)

    assert asked == 0
    assert outcome is None
    assert reports.epochs == [2]
    assert arming.begin_vote(nobody) == ticket(order(2).membership)


def test_a_rank_is_armed_once_its_groups_are_built() -> None:
    reports = Reports(refusal=None)
    reports.arming.arm(order(2))
    before = list(reports.armed)
    asked = reports.arming.begin_vote(nobody)
    reports.arming.end_vote(0)
    reports.done("")

    assert before == []
    assert asked == 0
    assert reports.armed == [(2, "p2", "")]
    assert reports.arming.begin_vote(nobody) == ticket(order(2).membership)


def test_a_rank_whose_groups_cannot_be_built_says_why() -> None:
    """The leader drops the plan; the directive, which repeats, starts no second build."""
    reports = Reports(refusal="out of memory")
    reports.arming.arm(order(2))
    reports.arming.arm(order(2))

    assert reports.armed == [(0, "p2", "out of memory")]
    assert reports.arming.begin_vote(nobody) == 0


def test_what_is_built_is_dropped_with_its_plan() -> None:
    """Not while a vote may still switch to it."""
    reports = Reports(refusal=None)
    reports.arming.arm(order(2))
    reports.arming.disarm("p2")
    reports.done("")
    assert (reports.dropped, reports.armed) == ([2], [(0, "p2", "")])

    reports = Reports()
    reports.arming.arm(order(2))
    reports.arming.begin_vote(nobody)
    reports.arming.disarm("p2")
    assert reports.dropped == []
    reports.arming.end_vote(0)
    assert reports.dropped == [2]


def rival(epoch: int) -> Arm:
    """Another plan for the same epoch."""
    other = Member(worker="other", host="h", address="")
    return Arm(plan="rival", membership=Membership(epoch=epoch, members=(other,)), moves=())


def test_what_is_built_after_it_was_disarmed_is_dropped() -> None:
    """The main thread halts between the order and the build, which the agent's thread begins."""
    dropped: list[str] = []

    def build(order: Arm, done: Callable[[str], None]) -> None:
        arming.disarm()
        dropped.append("built")

    arming = Arming(lambda *_: None, build, lambda later: dropped.append(f"dropped {later.epoch}"))
    arming.arm(order(2))

    assert dropped == ["dropped 2", "built", "dropped 2"]


def test_what_is_built_and_followed_at_once_is_kept() -> None:
    """The main thread may switch before the thread that began the build goes on."""
    dropped: list[int] = []

    def build(order: Arm, done: Callable[[str], None]) -> None:
        done("")
        arming.begin_vote(nobody)
        arming.end_vote(ticket(order.membership))
        arming.switched()

    arming = Arming(lambda *_: None, build, lambda later: dropped.append(later.epoch))
    arming.arm(order(2))

    assert dropped == []


def test_another_order_disarms_the_earlier_one_first() -> None:
    """Its groups are gone once those of the other are built; it must not be voted for."""
    reports = Reports()
    reports.arming.arm(order(2))
    reports.arming.arm(rival(2))

    assert reports.armed == [(2, "p2", ""), (0, "", ""), (2, "rival", "")]
    assert reports.dropped == [2]
    assert reports.arming.begin_vote(nobody) == ticket(rival(2).membership)


def test_another_order_waits_for_the_vote_that_may_follow_the_earlier_one() -> None:
    reports = Reports()
    reports.arming.arm(order(2))
    reports.arming.begin_vote(nobody)
    reports.arming.arm(rival(2))
    during = list(reports.armed)
    lost = reports.arming.end_vote(0)

    assert during == [(2, "p2", "")]
    assert reports.dropped == [2]
    assert lost is None
    assert reports.armed == [(2, "p2", ""), (0, "", ""), (2, "rival", "")]


def test_the_earlier_order_may_win_the_vote_in_which_another_came() -> None:
    """Other ranks have switched; the other order is void."""
    reports = Reports()
    reports.arming.arm(order(2))
    reports.arming.begin_vote(nobody)
    reports.arming.arm(rival(2))

    assert reports.arming.end_vote(ticket(order(2).membership)) == order(2)
    assert reports.armed == [(2, "p2", "")]
    assert reports.dropped == []


def test_a_rank_that_was_armed_during_a_vote_is_disarmed_at_once() -> None:
    """The vote has not shown it as armed."""
    reports = Reports()
    reports.arming.begin_vote(nobody)
    reports.arming.arm(order(2))
    reports.arming.disarm()
    reports.arming.end_vote(0)

    assert reports.armed == [(2, "p2", ""), (0, "", "")]
    assert reports.dropped == [2]

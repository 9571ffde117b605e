"""Disarming must never be reported while a vote may use the arm, nor after such a vote."""

from tmd.core.planning.directives import Arm, Train
from tmd.core.values.model import Activity, Membership, WorkerStatus
from tmd.trainer.protocol.step_vote import ticket
from tmd.trainer.worker.arming import Arming


def order(epoch: int) -> Arm:
    return Arm(plan=f"p{epoch}", membership=Membership(epoch=epoch, members=()), moves=())


def nobody(later: Membership) -> bool:
    """No joiner is gone."""
    return False


def test_an_armed_epoch_that_wins_the_vote_is_followed_once() -> None:
    """The outcome names the directive; afterwards nothing is armed."""
    arming = Arming(lambda epoch, plan: None)
    arming.arm(order(2))

    assert arming.begin_vote(nobody) == ticket(order(2).membership)
    assert arming.end_vote(ticket(order(2).membership)) == order(2)
    assert arming.begin_vote(nobody) == 0


def test_disarming_during_a_vote_is_reported_after_it() -> None:
    """Else the leader could drop a plan whose switch is already being voted."""
    told: list[int] = []
    arming = Arming(lambda epoch, plan: told.append(epoch))
    arming.arm(order(2))
    arming.begin_vote(nobody)
    arming.disarm()
    before = list(told)
    outcome = arming.end_vote(0)

    assert before == [2]
    assert outcome is None
    assert told == [2, 0]


def test_a_vote_that_switches_wins_over_a_late_disarm() -> None:
    """Others have switched: this rank must too, and never reports that it was disarmed."""
    told: list[int] = []
    arming = Arming(lambda epoch, plan: told.append(epoch))
    arming.arm(order(2))
    arming.begin_vote(nobody)
    arming.disarm()

    assert arming.end_vote(ticket(order(2).membership)) == order(2)
    assert told == [2]


def test_a_voted_switch_cannot_be_disarmed_before_the_boundary() -> None:
    """Between the vote and the boundary the optimizer runs: the plan of a rank that reported
    "disarmed" meanwhile would be dropped, and the rank would be alone in its epoch."""
    told: list[tuple[int, str]] = []
    arming = Arming(lambda epoch, plan: told.append((epoch, plan)))
    status = WorkerStatus("w", "job", 2, "", 1, Activity.TRAINING, epoch=1)
    arming.arm(order(2))
    arming.begin_vote(nobody)
    arming.end_vote(ticket(order(2).membership))
    arming.obey(Train(membership=Membership(1, ()), rank=0, dropped="p2"), status)
    arming.obey(order(2), status)
    before = list(told)
    arming.switched()
    arming.arm(order(3))

    assert before == [(2, "p2")]
    assert told == [(2, "p2"), (3, "p3")]
    assert arming.begin_vote(nobody) == ticket(order(3).membership)


def test_a_rank_that_knows_of_a_dead_joiner_does_not_vote_for_it() -> None:
    """The leader does not know it yet; the rank stays armed until the leader disarms it."""
    told: list[int] = []
    arming = Arming(lambda epoch, plan: told.append(epoch))
    arming.arm(order(2))
    asked = arming.begin_vote(lambda later: later.epoch == 2)
    outcome = arming.end_vote(0)

    assert asked == 0
    assert outcome is None
    assert told == [2]
    assert arming.begin_vote(nobody) == ticket(order(2).membership)

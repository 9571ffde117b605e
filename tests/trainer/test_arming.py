"""Taking an arm back must never be told while a vote that may use it is under way."""

from tmd.core.duties import Arm
from tmd.core.model import Membership
from tmd.trainer.arming import Arming
from tmd.trainer.ballot import ticket


def order(epoch: int) -> Arm:
    return Arm(plan=f"p{epoch}", membership=Membership(epoch=epoch, members=()), moves=())


def test_an_armed_epoch_that_wins_the_vote_is_followed_once() -> None:
    """The outcome names the order; afterwards nothing is armed."""
    arming = Arming(lambda epoch, plan: None)
    arming.arm(order(2))

    assert arming.begin_vote() == ticket(order(2).membership)
    assert arming.end_vote(ticket(order(2).membership)) == order(2)
    assert arming.begin_vote() == 0


def test_disarming_during_a_vote_is_told_only_after_it() -> None:
    """Else the leader could drop a plan whose switch is already being voted."""
    told: list[int] = []
    arming = Arming(lambda epoch, plan: told.append(epoch))
    arming.arm(order(2))
    arming.begin_vote()
    arming.disarm()
    before = list(told)
    outcome = arming.end_vote(0)

    assert before == [2]
    assert outcome is None
    assert told == [2, 0]


def test_a_vote_that_switches_wins_over_a_late_disarm() -> None:
    """Others have switched: this rank must too, and never says that it was disarmed."""
    told: list[int] = []
    arming = Arming(lambda epoch, plan: told.append(epoch))
    arming.arm(order(2))
    arming.begin_vote()
    arming.disarm()

    assert arming.end_vote(ticket(order(2).membership)) == order(2)
    assert told == [2]

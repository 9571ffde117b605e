"""What a hot standby does if it does not hear how its rank's vote ended.

The rank was lost after its last gradients, before it passed the result of the vote on. The standby
has all gradients of the step. If another rank has committed it, so must the standby.
"""

from __future__ import annotations

from collections.abc import Callable

from tmd.core.planning.directives import Directive, Hold, HoldState, ShadowRank, Sync
from tmd.trainer.session.hooks import Interrupted
from tmd.trainer.shadow.receiver import ShadowLost
from tmd.trainer.shadow.session import ShadowSession
from tmd.trainer.worker.agent import Agent
from tmd.trainer.worker.shadow_driver import ShadowDriver
from tmd.trainer.worker.status_reporter import StatusReporter

NEWS_S = 15.0
"""How long a hot standby waits for a plan after a broken vote: a new leader may be needed."""


def can_stand_in(following: ShadowSession | None) -> bool:
    """Whether, as far as it knows, the rank that this worker follows is lost and its state is
    here."""
    if following is None or not (following.keeps_shadowing and following.has_state):
        return False
    if following.shadow.mismatch:
        return False
    # If the rank itself ended the shadow it is alive: its step broke because another rank was lost.
    return not isinstance(following.shadow.lost, ShadowLost)


def wait_for_outcome(driver: ShadowDriver, agent: Agent, reporter: StatusReporter) -> bool:
    """Wait for the plan; returns whether a rank has committed the step.

    Raises:
        Interrupted: no plan came in time, or it leaves the rank where it is.
    """
    following = driver.following
    if following is None or not isinstance(following.directive, ShadowRank):
        return False
    if following.shadow.mismatch or not following.has_state or following.refutation() is not None:
        return False
    driver.report_standing_by(following, undecided=True)
    directive = agent.wait_a_while(lambda d: d != following.directive, NEWS_S)
    if isinstance(directive, Hold | HoldState):  # the former if it was chosen, and another is lost
        directive = agent.wait_until(lambda d: not isinstance(d, Hold | HoldState))
    if isinstance(directive, Sync) and directive.resume == following.step + 1:
        following.stands_in = True
        return True
    reporter.update(undecided=False)
    if directive is None or directive == following.directive:
        raise Interrupted
    return False


def stands_in(following: ShadowSession | None) -> bool:
    """Whether this worker has committed a step for the lost rank, which it takes at the next
    boundary."""
    return following is not None and following.stands_in


def has_closed(
    following: ShadowSession | None,
    outcome: Callable[[], bool],
    agent: Agent,
    reporter: StatusReporter,
) -> bool:
    """Whether a rank has closed the loop after the vote on it broke, so that this worker must close
    it as well. ``outcome``: of that vote.

    A hot standby that gets a copy of the state stays in the loop: the copy has what code after the
    loop has changed, and the standby must not run that code again.
    """
    if following is not None and not can_stand_in(following):
        return False
    try:
        closed = outcome()
    except Interrupted:  # it hears nothing, and there is no step to interrupt
        return False
    if not closed or following is None or _keeps_state(following, agent.directive):
        return closed
    following.stands_in = False
    reporter.update(undecided=False)
    return False


def _keeps_state(following: ShadowSession, directive: Directive | None) -> bool:
    """Whether ``directive`` gives this worker the rank that it follows, with the state that it
    has."""
    if not isinstance(directive, Sync) or directive.rank != following.directive.plays:
        return False
    return all(move.source is None for move in directive.moves if move.rank == directive.rank)

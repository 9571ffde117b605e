"""What a hot standby does if it does not hear how its rank's vote ended.

The rank was lost after its last gradients, before it passed the result of the vote on. The standby
has all gradients of the step. If another rank has committed it, so must the standby.
"""

from __future__ import annotations

from tmd.core.planning.directives import HoldState, ShadowRank, Sync
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
    if following.shadow.mismatch or following.refutation() is not None:
        return False
    driver.report_standing_by(following, undecided=True)
    directive = agent.wait_a_while(lambda d: d != following.directive, NEWS_S)
    if isinstance(directive, HoldState):
        directive = agent.wait_until(lambda d: not isinstance(d, HoldState))
    if isinstance(directive, Sync) and directive.resume == following.step + 1:
        return True
    reporter.update(undecided=False)
    if directive is None or directive == following.directive:
        raise Interrupted
    return False

"""A standby: waits for a directive, and is rebuilt for another rank when one requires it."""

from __future__ import annotations

import logging

from tmd.core.planning.directives import Directive, Prepare, ShadowRank, Sync, Wait
from tmd.core.values.decode_errors import brief
from tmd.core.values.shadows import why_unfit
from tmd.core.worker.responses import Response, respond
from tmd.fabric import look_ahead
from tmd.trainer.session.hooks import dismiss
from tmd.trainer.state_transfer.context import RankContext
from tmd.trainer.state_transfer.obstacle import Obstacle, Rebuild
from tmd.trainer.worker.agent import Agent
from tmd.trainer.worker.rank_migration import RankMigration
from tmd.trainer.worker.recovery import Recovery
from tmd.trainer.worker.status_reporter import StatusReporter
from tmd.trainer.worker.warmup import Warmup

POOL_S = 1.0
"""Interval at which a standby checks whether to shadow a rank again."""

log = logging.getLogger("tmd.trainer")


class Pool:
    """All calls come from the main thread."""

    def __init__(
        self,
        reporter: StatusReporter,
        agent: Agent,
        context: RankContext,
        migration: RankMigration,
        recovery: Recovery,
    ) -> None:
        self._reporter = reporter
        self._agent = agent
        self._context = context
        self._fabric = context.fabric
        self._fit = context.fit
        self._migration = migration
        self._driver = migration.driver
        self._recovery = recovery

    def wait(self) -> Obstacle | None:
        """STANDBY: wait for a directive and carry it out, or return an obstacle."""
        driver = self._driver

        def response_to(directive: Directive) -> Response | None:
            held = driver.following is not None
            response = respond(directive, self._reporter.status, has_shadow=held)
            too_soon = isinstance(directive, ShadowRank) and not driver.attempts.wants(directive)
            return None if too_soon else response

        directive = self._agent.wait_a_while(lambda d: response_to(d) is not None, POOL_S)
        if directive is None:
            look_ahead(self._fabric.calls.ran)
            self._fabric.generations.reap()
            return self._settle()
        match response_to(directive), directive:
            case None, _:
                pass
            case Response.STAND_BY, _:
                self._migration.to_pool()
            case Response.SHADOW, ShadowRank():
                return driver.attempt(directive)
            case Response.PREPARE, Prepare():
                return self._migration.prepare(directive)
            case Response.REPLACE, Sync():
                if obstacle := self._migration.replace(directive):
                    return obstacle
                self._recovery.synced(directive, self._reporter.status.timings["transfer"])
            case _:
                dismiss(directive)
        return None

    def become(self, other: Rebuild, warmup: Warmup) -> None:
        """Rebuild this worker for another rank. If that fails for a rehearsal, report it and
        rebuild for the previous rank.

        Raises:
            Exception: the script's function fails, not for a rehearsal.
            StateMismatch: it has built a different state from the one to be kept.
        """
        directive, before = self._agent.directive, self._fit.roles.built
        # First, since the shadow's step is mostly void, and nothing is built in such a step.
        self._driver.disown_state()
        size = self._reporter.status.world_size
        try:
            warmup.become(other, self._context, size)
            return
        except Exception as error:
            if not isinstance(directive, ShadowRank):
                raise
            log.exception("this worker cannot be rebuilt for rank %d", other.rank)
            why = f"cannot be built for rank {other.rank} here: {brief(error)}"
        # Outside of the handler, which keeps half-built objects alive.
        self._driver.not_tried(directive, refusal=why)
        warmup.become(Rebuild(before), self._context, size)

    def _settle(self) -> Rebuild | None:
        """If idle, with no plan that may need this worker soon: rebuild for the commonest role."""
        roles = self._fit.roles
        if roles.commonest == roles.built or self._agent.directive != Wait():
            return None
        other = roles.commonest
        unfit = why_unfit(self._reporter.status.rehearsed, other, roles.of(other))
        return None if unfit else Rebuild(other)

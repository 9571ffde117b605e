"""Lets a write wait until a replica of Redis has it, where there is one.

A fail-over loses what no replica has. The wait is bounded: a job must recover also while a replica
lags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from tmd.core.values.reasons import in_words

log = structlog.get_logger("tmd.store")

LONGEST_S = 0.5
SHARE = 0.25
"""Of the time within which Redis must answer: the longest wait, if that is shorter."""


def longest_wait(timeout_s: float) -> float:
    """For a client whose Redis must answer within ``timeout_s``."""
    return min(LONGEST_S, SHARE * timeout_s)


class Replication:
    """Of one connection pool."""

    def __init__(self, client: Redis, wait_s: float) -> None:
        self._client = client
        self._ms = max(1, round(1000 * wait_s))
        self._expected = False
        self._possible = True
        self.problem = ""
        """Why the latest write may be lost in a fail-over, in a sentence; empty if it is not, or if
        there has never been a replica."""

    async def evaluate(self, script: str, keys: Sequence[str], *args: Any) -> Any:
        """Run ``script`` and wait. The reply is that of the script, replicated or not."""
        if not (self._expected or await self._has_replica()):
            return await self._client.eval(script, len(keys), *keys, *args)
        # On one connection: WAIT is about the writes of its own.
        both = self._client.pipeline(transaction=False)
        both.eval(script, len(keys), *keys, *args)
        both.execute_command("WAIT", 1, self._ms)
        reply, replicas = await both.execute(raise_on_error=False)
        for each in (reply, replicas):
            if isinstance(each, Exception):
                raise each
        self._expected = replicas > 0
        self._note("" if replicas else f"no replica had the latest write within {self._ms} ms")
        return reply

    async def _has_replica(self) -> bool:
        """Whether some replica is connected. It is asked for none, so the answer comes at once."""
        if not self._possible:
            return False
        try:
            found: int = await self._client.execute_command("WAIT", 0, 1)  # type: ignore[no-untyped-call]
            self._expected = found > 0
        except ResponseError as error:
            # An older access list does not have the command. A replica that is asked, as during a
            # fail-over, refuses it too, and the write after it.
            self._possible = "replica" in in_words(error)
            if not self._possible:
                log.info("writes do not wait for a replica", error=in_words(error))
                # Servers that do not know a command may close the connection after their answer.
                await self._client.connection_pool.disconnect(inuse_connections=False)
        return self._expected

    def _note(self, problem: str) -> None:
        if problem and not self.problem:
            log.warning("a write may be lost in a fail-over", reason=problem)
        elif self.problem and not problem:
            log.info("writes reach a replica again")
        self.problem = problem

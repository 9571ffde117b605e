"""Lets a write wait until a replica of Redis has it, where there is one.

When Redis fails over, writes that none of its replicas has are lost. The wait is bounded, since a
job must recover even while a replica of Redis lags.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from tmd.core.values.reasons import in_words
from tmd.daemon.lua import lean
from tmd.daemon.scripts import Scripts

log = structlog.get_logger("tmd.store")

LONGEST_S = 0.5
SHARE = 0.25
"""The longest wait is this share of the time within which Redis must answer, or ``LONGEST_S`` if
that is shorter."""
PROBE_SHARE = 0.05
"""A wait that only looks for a replica takes this share of the longest one. It is short, since most
servers have no replica, and a lease runs meanwhile."""
PROBE_EVERY_S = 3.0
UNASKED_S = 10.0
"""A write looks for a replica if nothing has looked for so long. A leader looks between its writes
more often, so that a plan is not delayed."""
REFUSED_S = 60.0
"""A server that refuses WAIT is asked again after this long."""
NOT_ALLOWED = (
    "Redis does not allow this user to run WAIT, so writes do not wait for a replica, if there is "
    "one; add '+wait' to the rights of the user in [redis] url, as this version's redis.acl does"
)
NOT_KNOWN = "this Redis does not know WAIT, so writes do not wait for a replica, if there is one"
KEPT_MS = 1000
"""Lifetime of the key that a probe writes."""


def longest_wait(timeout_s: float) -> float:
    """For a client whose Redis must answer within ``timeout_s``."""
    return min(LONGEST_S, SHARE * timeout_s)


class Replica(Enum):
    """What is known of the replicas of a server."""

    NONE = auto()
    EXPECTED = auto()
    REFUSED = auto()
    """The server does not let this user wait."""


class Replication:
    """Replication of the writes of one connection pool."""

    def __init__(self, client: Redis, scripts: Scripts, wait_s: float) -> None:
        self._client, self._scripts = client, scripts
        self._ms = max(1, round(1000 * wait_s))
        self._probe_ms = max(1, round(1000 * PROBE_SHARE * wait_s))
        self._replica = Replica.NONE
        self._heard_at = float("-inf")
        self.problem = ""
        """Why the latest write may be lost if Redis fails over, in a sentence. Empty if a replica
        has it, or if none is known and Redis lets writes wait."""

    async def evaluate(self, script: str, keys: Sequence[str], *args: Any) -> Any:
        """Run ``script``; wait for a replica if one is expected, or if it is time to look for one.

        Returns the script's reply, replicated or not.
        """
        if self._replica is Replica.EXPECTED:
            wait_ms = self._ms
        elif self._is_due(UNASKED_S):
            wait_ms = self._probe_ms
        else:
            return await self._scripts.run(script, keys, *args)
        return await self._waited(wait_ms, "EVAL", lean(script), len(keys), *keys, *args)

    async def probe(self, key: str) -> None:
        """Look for a replica if none is known; if one lagged, check whether it has caught up.

        The probe writes ``key``, since WAIT covers only the writes of its own connection. Replicas
        apply writes in order, so that one with the key has every earlier write.
        """
        if (self.problem or self._replica is not Replica.EXPECTED) and self._is_due(PROBE_EVERY_S):
            await self._waited(self._probe_ms, "SET", key, b"1", "PX", KEPT_MS)

    def reset(self) -> None:
        """Forget what was seen of replicas, as if nothing had been written."""
        self._replica, self._heard_at, self.problem = Replica.NONE, float("-inf"), ""

    def _is_due(self, after_s: float) -> bool:
        longer = REFUSED_S if self._replica is Replica.REFUSED else after_s
        return time.monotonic() - self._heard_at >= longer

    async def _waited(self, wait_ms: int, *command: Any) -> Any:
        # On one connection: WAIT is about the writes of its own.
        both = self._client.pipeline(transaction=False)
        both.execute_command(*command)
        both.execute_command("WAIT", 1, wait_ms)
        reply, replicas = await both.execute(raise_on_error=False)
        if isinstance(reply, Exception):
            raise reply
        await self._hear(replicas, wait_ms)
        return reply

    async def _hear(self, replicas: int | ResponseError, wait_ms: int) -> None:
        """Note the answer to WAIT. The write before it counts, whatever the answer is."""
        self._heard_at = time.monotonic()
        expected = self._replica is Replica.EXPECTED
        if isinstance(replicas, ResponseError):
            why = in_words(replicas)
            if _is_refusal(replicas):
                self._replica = Replica.REFUSED
                allowed = not isinstance(replicas, NoPermissionError)
                self._note(f"{NOT_KNOWN if allowed else NOT_ALLOWED}: {why}")
                # Servers that do not know a command may close the connection after their answer.
                await self._client.connection_pool.disconnect(inuse_connections=False)
            elif expected:
                self._note(f"Redis did not wait for a replica: {why}")
        elif replicas > 0:
            self._replica = Replica.EXPECTED
            self._note("")
        elif expected:
            self._note(self.problem or f"no replica had the latest write within {wait_ms} ms")
        else:
            self._replica = Replica.NONE
            self._note("")

    def _note(self, problem: str) -> None:
        if problem and not self.problem:
            log.warning("a write may be lost if Redis fails over to a replica", reason=problem)
        elif self.problem and not problem:
            log.info("writes reach a replica again, or there is none")
        self.problem = problem


def _is_refusal(error: ResponseError) -> bool:
    """Whether WAIT will fail until somebody changes the server: an older access list, for one."""
    return isinstance(error, NoPermissionError) or "unknown command" in in_words(error).lower()

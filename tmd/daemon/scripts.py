"""Runs scripts in Redis. Their text is sent once, and afterwards only its digest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import sha1
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, NoScriptError

from tmd.core.values.reasons import in_words
from tmd.daemon.lua import lean


class Scripts:
    """Runs scripts over one connection pool."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._sent: set[str] = set()
        """Digests of the scripts whose text the server has received."""
        self._only_texts = False

    async def run(self, script: str, keys: Sequence[str], *args: Any) -> Any:
        """The reply of ``script``.

        After a restart the server does not know the script and runs nothing. A second round trip
        sends the text.
        """
        name = digest(script)
        if name in self._sent and not self._only_texts:
            try:
                return await self._client.evalsha(name, len(keys), *keys, *args)
            except NoScriptError:
                pass
            except NoPermissionError as error:
                # A script that was denied a command may have run in part.
                if "'evalsha'" not in in_words(error):
                    raise
                # A Redis user that an earlier release of tmd has created may call EVAL only.
                self._only_texts = True
        reply = await self._client.eval(lean(script), len(keys), *keys, *args)
        self._sent.add(name)
        return reply


@cache
def digest(script: str) -> str:
    """The name by which Redis knows ``script`` once it has received it."""
    return sha1(lean(script).encode(), usedforsecurity=False).hexdigest()

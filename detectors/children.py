"""Child processes of detectors that talk to a driver.

A driver with a wedged device may block a process forever, and no signal ends it. So a child that is
too late is abandoned. Nobody waits for its end before the detector's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from tmd.plugin import Child, in_words

ABANDONED = 3
"""Most children that do not die: each keeps memory, and another would hang as well."""
FAREWELL_S = 1.0
"""Longest wait for killed children when the daemon stops."""
LONGEST_ANSWER = 1 << 22

Answer = TypeVar("Answer")


class LoneChild:
    """The one active child of a detector, and those before it that do not die. Closed by
    :meth:`close`."""

    def __init__(self) -> None:
        self.active: Child | None = None
        self._abandoned: list[Child] = []

    @property
    def hanging(self) -> int:
        """How many abandoned children have not ended. At :data:`ABANDONED` start no other."""
        self._abandoned = [child for child in self._abandoned if child.runs]
        return len(self._abandoned)

    def start(self, command: list[str], *, stdin: bool = False) -> Child:
        """Start the active child. Errors are those of :meth:`Child.start`."""
        self.active = Child.start(command, stdin=stdin)
        return self.active

    def abandon(self) -> None:
        """Kill the active child, if there is one, and do not wait for its end."""
        child, self.active = self.active, None
        if child is not None:
            child.abandon()
            self._abandoned.append(child)

    async def close(self) -> None:
        """End all children. One that is stuck in a wedged driver is left behind."""
        self.abandon()
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                for child in self._abandoned:
                    await child.status()


class Hung(Exception):
    """No answer within the deadline."""


class Ended(Exception):
    """The child is gone."""


class AskedChild(Generic[Answer]):
    """A child that is asked with one byte and answers with one line of JSON, again and again.
    Closed by :meth:`close`."""

    def __init__(self, name: str, command: Callable[[], list[str]], answer: type[Answer]) -> None:
        """``name``: the child in errors. ``command`` is called for each child that is started."""
        self._name, self._command, self._answer = name, command, answer
        self._children = LoneChild()

    async def ask(self, within_s: float) -> Answer:
        """Its next answer.

        Raises:
            Hung: no answer in ``within_s`` seconds, or too many children hang already.
            Ended: the child does not start, ended or sent an invalid answer.
        """
        try:
            child = self._running()
        except (OSError, ValueError) as error:
            raise Ended(f"{self._name} does not start: {in_words(error)}") from None
        try:
            async with asyncio.timeout(within_s):
                line = await _exchange(child)
            return msgspec.json.decode(line, type=self._answer)
        except TimeoutError:
            self._children.abandon()
            raise Hung(f"the driver did not answer within {within_s:g} s") from None
        except (OSError, ValueError) as error:  # a DecodeError is a ValueError
            self._children.abandon()
            raise Ended(f"{self._name} ended: {in_words(error)}") from None

    async def close(self) -> None:
        """End the child. One that is stuck in a wedged driver is left behind."""
        await self._children.close()

    def _running(self) -> Child:
        hanging = self._children.hanging
        if self._children.active is not None:
            return self._children.active
        if hanging >= ABANDONED:
            raise Hung(f"{hanging} workers hang in the driver")
        return self._children.start(self._command(), stdin=True)


async def _exchange(child: Child) -> bytes:
    """Ask, and read the line of the answer."""
    child.write(b"\n")  # the pipe is empty: the last request was answered
    found = b""
    while not found.endswith(b"\n"):
        chunk = await child.read()
        if not chunk:
            raise ValueError("it closed its output")
        found += chunk
        if len(found) > LONGEST_ANSWER:
            raise ValueError("its answer is too long")
    return found

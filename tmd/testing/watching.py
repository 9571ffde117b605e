"""Runs ``watch()`` of a detector in an event loop of its own, and times how it behaves there.

The loop runs in a thread that is abandoned if the detector does not let it end. In the loop of the
author's test, pytest would wait for such a detector forever.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from tmd.core.values.reasons import in_words
from tmd.daemon.foreign_code import PluginExit, contained_exit
from tmd.plugin import Detector, Signal
from tmd.testing.context import FakeContext

FIRST_S = 0.5
"""Time for a detector to yield signals before it is closed."""
BEAT_S = 0.01
BLOCKS_S = 0.5
"""A detector that keeps the event loop for this long blocks the daemon."""
LATE_S = 0.1
"""Beats that are less late than this are not compared."""
SLACK_S = 10.0
SLEEPS = 3
"""This many first sleeps of a detector return at once."""
MOST_SIGNALS = 10_000

Check = Callable[[Detector, object], None]

_abandoned: list[asyncio.AbstractEventLoop] = []
"""Loops that still have tasks. Without this they would be destroyed, each with a warning."""


LateBeat = tuple[float, float]
"""Start and end of the pause before a late beat, in seconds of the monotonic clock."""


class BrokenContract(AssertionError):
    """A plug-in violates the contract of :mod:`tmd.plugin`."""


class HurriedContext(FakeContext):
    """Its first sleeps are over at once."""

    left = SLEEPS

    async def sleep(self, seconds: float) -> None:
        if self.left == 0:
            return await super().sleep(seconds)
        self.left -= 1
        await asyncio.sleep(0)


async def watched(
    detector: Detector, make: Callable[[], FakeContext], close_s: float, check: Check
) -> None:
    """Watch and close ``detector``; ``check`` looks at each signal. The caller's loop keeps
    running, so the detector may talk to a server in it.

    Raises:
        BrokenContract: the first violation.
    """
    found: list[BaseException] = []
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            with contained_exit():
                work = _watched(detector, make(), close_s, check)
                loop.run_until_complete(_timed(detector, work))
        except PluginExit as error:
            found.append(BrokenContract(f"watch() of {detector.name} {in_words(error)}"))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="tmd-test-kit", daemon=True)
    thread.start()
    # In real time: the loop of the author's test may have a clock of its own.
    await asyncio.to_thread(thread.join, FIRST_S + 3 * close_s + SLACK_S)
    if thread.is_alive():
        raise BrokenContract(f"watch() of {detector.name} blocks the event loop and does not end")
    if asyncio.all_tasks(loop):
        _abandoned.append(loop)
    else:
        loop.close()
    if found:
        raise found[0]


def longest_block(gaps: Sequence[LateBeat], stalls: Sequence[LateBeat]) -> float:
    """Seconds for which something kept the event loop at most.

    Args:
        gaps: the late beats of the event loop.
        stalls: those of a thread beside it. What holds up both, such as a machine under load or
            a garbage collection, is not the detector's fault. A call of the detector that keeps
            the interpreter's lock for long is not found for the same reason.
    """
    return max((end - start - _shared((start, end), stalls) for start, end in gaps), default=0.0)


def _shared(gap: LateBeat, stalls: Sequence[LateBeat]) -> float:
    return sum(max(0.0, min(gap[1], end) - max(gap[0], start)) for start, end in stalls)


async def _timed(detector: Detector, work: Coroutine[Any, Any, None]) -> None:
    """Await ``work``, and find out whether anything keeps the loop meanwhile."""
    gaps: list[LateBeat] = []
    stalls: list[LateBeat] = []
    over = threading.Event()

    def note(late: list[LateBeat], before: float) -> None:
        if (now := time.monotonic()) - before > LATE_S:
            late.append((before, now))

    async def beat() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(BEAT_S)
            note(gaps, before)

    def beat_beside() -> None:
        while not over.is_set():
            before = time.monotonic()
            over.wait(BEAT_S)
            note(stalls, before)

    beside = threading.Thread(target=beat_beside, name="tmd-test-kit-beat", daemon=True)
    beside.start()
    beating = asyncio.create_task(beat())
    try:
        await work
    finally:
        beating.cancel()
        await asyncio.wait({beating})
        over.set()
        beside.join()
    longest = longest_block(gaps, stalls)
    if longest > BLOCKS_S:
        raise BrokenContract(
            f"watch() of {detector.name} blocks the event loop for {longest:.1f} s: pause with "
            "ctx.sleep(), and move what may take long into a thread or a process"
        )


async def _watched(detector: Detector, context: FakeContext, close_s: float, check: Check) -> None:
    before = asyncio.all_tasks()
    signals: AsyncGenerator[Signal, None] = detector.watch(context)  # type: ignore[assignment]
    if not hasattr(signals, "aclose"):
        raise BrokenContract(f"watch() of {detector.name} is not an 'async def' with 'yield'")
    watching = asyncio.create_task(_checked(detector, signals, check))
    idle = asyncio.create_task(context.idle.wait())
    try:
        await asyncio.wait({watching, idle}, timeout=FIRST_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (idle, watching):
            task.cancel()
            await _over(detector, task, close_s)
        closing = asyncio.create_task(_close(signals))
        await _over(detector, closing, close_s)
    if (failure := closing.exception()) is not None:
        raise BrokenContract(f"watch() of {detector.name} fails as it is closed: {failure}")
    if not watching.cancelled() and (error := watching.exception()) is not None:
        raise error
    left = asyncio.all_tasks() - before
    if left:
        raise BrokenContract(f"{detector.name} leaves tasks behind: {left}")


async def _checked(detector: Detector, signals: AsyncGenerator[Signal, None], check: Check) -> None:
    count = 0
    async for shown in signals:
        check(detector, shown)
        if (count := count + 1) > MOST_SIGNALS:
            raise BrokenContract(f"{detector.name} yields more than {MOST_SIGNALS} signals at once")
        await asyncio.sleep(0)
    raise BrokenContract(f"watch() of {detector.name} ends; it should go on")


async def _close(signals: AsyncGenerator[Signal, None]) -> None:
    await signals.aclose()


async def _over(detector: Detector, task: asyncio.Task[Any], close_s: float) -> None:
    """Wait for its end, not without limit: it may ignore that it is cancelled."""
    done, _ = await asyncio.wait({task}, timeout=close_s)
    if not done:
        raise BrokenContract(
            f"watch() of {detector.name} cannot be closed: it must let asyncio.CancelledError pass"
        )

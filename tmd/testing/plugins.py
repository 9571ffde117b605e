"""The contract of plug-ins as checks that their authors call in their own tests.

Each raises :class:`BrokenContract` with what is wrong. tmd's own tests call them for every plug-in
that is installed, built-in or not::

    @pytest.mark.parametrize("point", installed("tmd.detectors"), ids=lambda p: p.name)
    async def test_contract(point):
        await check_detector(point)
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast

import msgspec

from tmd.config import Plugins
from tmd.core.values.errors import PluginError
from tmd.core.values.reasons import in_words
from tmd.daemon.plugins import load
from tmd.plugin import ClusterView, Detector, DetectorConfig, Policy, Signal
from tmd.testing.context import FakeContext

QUICK_S = 2.0
"""Limit for ``supported()``, which is called at start, on the event loop."""
FIRST_S = 0.5
"""Time for a detector to yield signals before it is closed."""
CLOSE_S = 10.0
MOST_SIGNALS = 10_000
SLEEPS = 3
"""So many sleeps of a detector are over at once."""


class BrokenContract(AssertionError):
    """A plug-in violates the contract of :mod:`tmd.plugin`."""


async def check_detector(point: EntryPoint) -> None:
    """Check a detector: it loads, is configured, reports whether it works, runs and closes.

    Raises:
        BrokenContract: the first violation.
    """
    detector = cast(Detector, _loaded(point, Detector))
    check_config(detector)
    check_supported(detector)
    check_import(point)
    if detector.supported() is None:
        await check_watch(detector)


def check_policy(point: EntryPoint) -> None:
    """Check a policy: it loads, and demands nothing of an empty cluster.

    Raises:
        BrokenContract: the first violation.
    """
    policy = cast(Policy, _loaded(point, Policy))
    check_import(point)
    if list(policy.decide(ClusterView())):
        raise BrokenContract(f"{point.name} demands something of an empty cluster")


def check_config(detector: Detector) -> None:
    """Every key of ``Config`` has a default, and unknown keys are refused."""
    try:
        config = detector.Config()
    except TypeError as error:
        raise BrokenContract(
            f"a key of {detector.name} has no default: {in_words(error)}"
        ) from error
    if not isinstance(config, DetectorConfig):
        raise BrokenContract(f"the Config of {detector.name} does not derive from DetectorConfig")
    try:
        msgspec.convert({"no-such-key": 1}, detector.Config)
    except msgspec.ValidationError:
        return
    raise BrokenContract(
        f"{detector.name} accepts any key, so that a misspelt one goes unnoticed: "
        "derive its Config with forbid_unknown_fields=True"
    )


def check_supported(detector: Detector, within_s: float = QUICK_S) -> None:
    """``supported()`` gives a reason or ``None``, and soon."""
    started = time.monotonic()
    reason = detector.supported()
    took = time.monotonic() - started
    if reason is not None and (not isinstance(reason, str) or not reason.strip()):
        raise BrokenContract(f"supported() of {detector.name} gives {reason!r}, no reason")
    if took > within_s:
        raise BrokenContract(f"supported() of {detector.name} took {took:.1f} s")


def check_import(point: EntryPoint) -> None:
    """Importing the plug-in does not bring torch, redis or an IO framework into the daemon."""
    code = (
        "import sys; from importlib.metadata import EntryPoint\n"
        "EntryPoint(*sys.argv[1:]).load()\n"
        "print(*{'torch', 'redis'} & set(sys.modules))"
    )
    command = [sys.executable, "-P", "-c", code, point.name, point.value, point.group]
    # From this process's import path, not from its working directory.
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(None, (*given, *sys.path)))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    if done.returncode != 0:
        raise BrokenContract(f"{point.name} cannot be imported alone: {done.stderr}")
    if done.stdout.strip():
        raise BrokenContract(f"{point.name} imports {done.stdout.strip()}")


async def check_watch(
    detector: Detector, config: DetectorConfig | None = None, close_s: float = CLOSE_S
) -> None:
    """``watch()`` can be started and closed in time; it goes on, yields signals only, and leaves no
    task. Its first sleeps are over at once, so that it shows more than its first look."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = config if config is not None else detector.Config()
        await _watched(detector, _Hurried(chosen, state_dir=Path(folder)), close_s)


class _Hurried(FakeContext):
    """Its first sleeps are over at once."""

    left = SLEEPS

    async def sleep(self, seconds: float) -> None:
        if self.left == 0:
            return await super().sleep(seconds)
        self.left -= 1
        await asyncio.sleep(0)


async def _watched(detector: Detector, context: FakeContext, close_s: float) -> None:
    before = asyncio.all_tasks()
    signals = cast("AsyncGenerator[Signal, None]", detector.watch(context))
    if not hasattr(signals, "aclose"):
        raise BrokenContract(f"watch() of {detector.name} is not an 'async def' with 'yield'")
    watching = asyncio.create_task(_checked(detector, signals))
    idle = asyncio.create_task(context.idle.wait())
    try:
        await asyncio.wait({watching, idle}, timeout=FIRST_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (idle, watching):
            task.cancel()
            await _over(detector, task, close_s)
        await _over(detector, asyncio.create_task(_close(signals)), close_s)
    if not watching.cancelled() and (error := watching.exception()) is not None:
        raise error
    left = asyncio.all_tasks() - before
    if left:
        raise BrokenContract(f"{detector.name} leaves tasks behind: {left}")


async def _checked(detector: Detector, signals: AsyncGenerator[Signal, None]) -> None:
    count = 0
    async for shown in signals:
        _check_signal(detector, shown)
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
        raise BrokenContract(f"watch() of {detector.name} cannot be closed")


def _check_signal(detector: Detector, shown: object) -> None:
    if not isinstance(shown, Signal):
        raise BrokenContract(f"{detector.name} yields {shown!r}, no Signal")
    if "." not in shown.code or not shown.entity:
        raise BrokenContract(
            f"{detector.name} yields {shown!r}: a dotted code and an entity, please"
        )


def _loaded(point: EntryPoint, base: type) -> object:
    try:
        return load([point], base, Plugins())[point.name][0]
    except PluginError as error:
        raise BrokenContract(str(error)) from error

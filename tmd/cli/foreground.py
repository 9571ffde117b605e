"""Runs detectors in the foreground: supervised as in the daemon, but without a cluster."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from tmd.config import Log, Settings
from tmd.core.alerts.findings import AT_ONCE, FindingRules
from tmd.core.values.model import Alert, Signal, Strategy
from tmd.daemon import logs
from tmd.daemon.journal import Journal
from tmd.daemon.plugins import LoadedDetector
from tmd.daemon.roster import Roster
from tmd.daemon.store_health import StoreHealth
from tmd.daemon.watcher import AlertSinks, Watcher
from tmd.testing import MemoryStore

Hear = Callable[[str, Signal], None]


class Watched(NamedTuple):
    """What detectors have found."""

    alerts: tuple[Alert, ...]
    without_result: list[str]
    """Detectors that are not through their first look."""


class CutShort(Exception):
    """The signal ``number`` ended detectors before their time."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, signal.Signals(number).name
        super().__init__(self.name)


class Listening(Watcher):
    """A watcher that passes on each signal as it comes."""

    def __init__(self, settings: Settings, detectors: list[LoadedDetector], hear: Hear) -> None:
        store = MemoryStore().client()
        host, journal = settings.host.name, Journal(None)
        sinks = AlertSinks(store, StoreHealth(), journal)
        super().__init__(host, "foreground", detectors, Roster(), sinks)
        self._hear = hear
        self._memory = journal
        self.stop = asyncio.Event()
        self.unheard: OSError | None = None
        """Why the signals can no longer be passed on, for instance to a closed pipe."""

    def close(self) -> None:
        """Call after :meth:`run` has ended."""
        self._memory.close()

    def fold(
        self, signal: Signal, detector: str, strategy: Strategy, rules: FindingRules = AT_ONCE
    ) -> bool:
        if self.unheard is None:
            try:
                self._hear(detector, signal)
            except OSError as error:  # it is no failure of the detector
                self.unheard = error
                self.stop.set()
        return super().fold(signal, detector, strategy, rules)


def watch(
    settings: Settings, detectors: list[LoadedDetector], hear: Hear, seconds: float | None = None
) -> Watched:
    """Run ``detectors`` until SIGINT or SIGTERM, or for ``seconds``.

    There are no workers here, so detectors that watch workers see none. Each works on a
    copy of its folder, so that the daemon's own detector still judges what was seen here.

    Raises:
        CutShort: a signal came before ``seconds`` were over.
        OSError: ``hear`` raised it.
    """
    logs.configure(Log(level="error"), host=settings.host.name)
    with tempfile.TemporaryDirectory(prefix="tmd-scan-") as folder:
        copies = [_copied(each, Path(folder)) for each in detectors]
        return asyncio.run(_watch(Listening(settings, copies, hear), seconds))


def _copied(loaded: LoadedDetector, folder: Path) -> LoadedDetector:
    """``loaded`` with a folder of its own, which has what could be read of the daemon's."""
    copy = folder / loaded.origin.name
    with suppress(OSError, shutil.Error):
        shutil.copytree(loaded.state_dir, copy)
    return structs.replace(loaded, state_dir=copy)


async def _watch(watcher: Listening, seconds: float | None) -> Watched:
    received: list[int] = []
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        received.append(number)
        watcher.stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    running = asyncio.create_task(watcher.run())
    running.add_done_callback(lambda _: watcher.stop.set())
    try:
        async with asyncio.timeout(seconds):
            await watcher.stop.wait()
    except TimeoutError:
        pass
    if running.done():
        await running  # it only ends with an error
    seen = Watched(watcher.board.alerts, watcher.without_result)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    watcher.close()
    if watcher.unheard is not None:
        raise watcher.unheard
    if received and seconds is not None:
        raise CutShort(received[0])
    return seen

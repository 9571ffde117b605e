"""State that outlives the detectors: operators' requests and the memory of recurring findings.

Level-triggered: a request stays in the store until it is served here, so a daemon that is down
misses none. A request that is served late, or twice, ends no finding that is newer than it.
"""

from __future__ import annotations

from pathlib import Path

from tmd.boot import boot_id
from tmd.core.alerts.findings import FindingMemory
from tmd.core.alerts.store_health import StoreLoop
from tmd.core.alerts.triage import restored
from tmd.core.values.errors import StoreUnavailable
from tmd.daemon.bus import Store, WakeEvent
from tmd.daemon.state_file import StateFile
from tmd.daemon.store_health import StoreHealth
from tmd.daemon.watcher import Watcher

LOOK_S = 5.0


class HostHealth:
    """Serves 'tmd set-healthy' requests for its host. ``bell`` rings when one may have come."""

    def __init__(
        self, host: str, watcher: Watcher, store: Store, store_health: StoreHealth, state_dir: Path
    ) -> None:
        self.bell = WakeEvent()
        self._host = host
        self._watcher = watcher
        self._store = store
        self._store_health = store_health
        self._file = StateFile(state_dir / "findings.json", "the memory of findings")
        memory = self._file.read(FindingMemory, FindingMemory())
        watcher.board = restored(memory, host, boot_id())

    async def run(self) -> None:
        """Run until cancelled; the latest findings are kept, too."""
        try:
            await self._run()
        finally:
            self.keep()

    async def _run(self) -> None:
        while True:
            self.keep()
            try:
                await self._serve()
            except StoreUnavailable as error:
                await self._store_health.failed(StoreLoop.REQUESTS, error)
                continue
            self._store_health.worked(StoreLoop.REQUESTS)
            await self.bell.wait(LOOK_S)

    async def _serve(self) -> None:
        for request in await self._store.healthy_requests():
            if request.host == self._host:
                self._watcher.declare_healthy(request)
                self.keep()
                await self._store.healthy_served(request)

    def keep(self) -> None:
        """Write the memory of findings to disk if it has changed or the disk did not take it."""
        self._file.keep(self._watcher.board.lasting)

"""Whole daemons as processes on folders of one machine, and simulated trainers."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

from tmd.config import store_key
from tmd.core.planning.directives import Train, Wait
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import Activity
from tmd.daemon.store import RedisStore
from tmd.testing.clients import FakeLauncher, FakeTrainer, connected, worker_status

CONFIG = """
[cluster]
name = "test"
secret = "0123456789abcdef"
[redis]
url = "{url}"
[host]
name = "{host}"
standby = {standby}
runtime_dir = "{folder}"
state_dir = "{folder}/state"
heartbeat_s = 0.2
ttl_s = 1.0
[leader]
ttl_s = 1.5
renew_s = 0.5
poll_s = 0.3
[shadow]
rehearse = false
[detectors.host]
disk_free_percent = 0 # a full disk of this machine is no finding of a test
[detectors.trainer]
heartbeat_timeout_s = {silence}
"""
WITHIN_S = 15.0


class Cluster:
    """Daemons on folders. Closed by ``async with``."""

    def __init__(self, folder, server, silence=60.0, more=""):
        self.folder = folder
        self.more = more
        """Appended to every configuration."""
        self.url = server.url
        self.silence = silence
        self.daemons = {}
        self.store = RedisStore(self.url, "test", store_key(b"0123456789abcdef", "test"))
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self._stack.aclose()
        for process in self.daemons.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
        await self.store.close()

    def socket(self, host):
        return self.folder / host / "tmd.sock"

    async def start(self, host, standby=False):
        folder = self.folder / host
        folder.mkdir(exist_ok=True)
        text = CONFIG.format(
            url=self.url,
            host=host,
            standby=str(standby).lower(),
            folder=folder,
            silence=self.silence,
        )
        (folder / "tmd.toml").write_text(text + self.more)
        with (folder / "log").open("ab") as log:
            self.daemons[host] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tmd.cli", "daemon", "-c", str(folder / "tmd.toml")),
                stdout=log,
                stderr=log,
            )
        await self.until(lambda: self._answers(host), f"{host} serves")

    async def _answers(self, host):
        try:
            async with connected(self.socket(host)):
                return True
        except OSError:
            return False

    async def until(self, condition, what):
        """Poll ``condition``, a coroutine function, until it is true."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            with contextlib.suppress(StoreUnavailable):
                if await condition():
                    return
            if time.monotonic() > deadline:
                logs = "\n".join(p.read_text() for p in self.folder.glob("*/log"))
                raise AssertionError(f"not within {WITHIN_S} s: {what}\n{logs}")
            await asyncio.sleep(0.01)

    async def trainer(self, host, slot=0):
        connection = await self._stack.enter_async_context(connected(self.socket(host)))
        one = FakeTrainer(connection, worker_status(f"{host}/job/{slot}.a"))
        await one.hello()
        return one

    async def launcher(self, host, slots=1):
        connection = await self._stack.enter_async_context(connected(self.socket(host)))
        workers = tuple(f"{host}/job/{slot}.a" for slot in range(slots))
        one = FakeLauncher(connection, "job", workers)
        await one.hello()
        return one

    async def formed(self):
        """Two ranks on h1 and h2 and a standby on h2, all running."""
        await self.start("h1")
        await self.start("h2")
        trainers = [await self.trainer("h1"), await self.trainer("h2")]
        for rank, one in enumerate(trainers):
            directive = await one.directive(lambda d: isinstance(d, Train))
            assert directive.rank == rank
            await one.say(activity=Activity.TRAINING, rank=rank, epoch=1, step=3)
        spare = await self.trainer("h2", slot=1)
        await spare.directive(lambda d: isinstance(d, Wait))
        await spare.say(activity=Activity.STANDBY)
        return *trainers, spare

    async def alerts(self):
        """The alerts, once there are any: they are written to disk first, and plans do not wait."""

        async def published():
            return bool(await self.store.alerts("", limit=10))

        await self.until(published, "an alert is published")
        return [alert for _, alert in await self.store.alerts("", limit=10)]

    async def record(self):
        return (await self.store.jobs()).records[0]

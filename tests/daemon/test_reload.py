"""SIGHUP: which settings are applied, which are not, and that nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
from msgspec import structs

from tests.distribution import distribution
from tmd.config import Settings, load, store_key
from tmd.core.alerts.findings import FindingRules
from tmd.core.values.model import Severity, Signal, State, Strategy
from tmd.daemon.detector_run import STOP_S
from tmd.daemon.journal import Journal
from tmd.daemon.plugins import LoadedDetector, PluginOrigin
from tmd.daemon.reload import KEPT, Reloader, fixed, taken_over
from tmd.daemon.roster import Roster
from tmd.daemon.store import RedisStore
from tmd.daemon.store_health import StoreHealth
from tmd.daemon.watcher import GIVE_UP_S, AlertSinks, Watcher
from tmd.plugin import Detector, DetectorConfig
from tmd.testing import MemoryStore

WITHIN_S = 20.0


class Config(DetectorConfig, frozen=True):
    number: int = 0


class Telling(Detector):
    """Raises one finding named after itself, with its configuration as message."""

    name = "telling"
    Config = Config

    def __init__(self, name="telling", starts=None, stubborn=False):
        self.name = name  # type: ignore[misc]
        self.starts = [] if starts is None else starts
        self.stubborn = stubborn
        self.end = asyncio.Event()

    async def watch(self, ctx):
        self.starts.append(ctx.config.number)
        yield Signal("a.b", self.name, Severity.FATAL)
        while not self.end.is_set():
            try:
                await self.end.wait()
            except asyncio.CancelledError:
                if not self.stubborn:
                    raise


def loaded(tmp_path, detector, number=0, strategy=Strategy.ACT):
    origin = PluginOrigin(detector.name, "t", "d")
    folder = tmp_path / detector.name
    return LoadedDetector(detector, Config(number=number), strategy, origin, folder)


@asynccontextmanager
async def watching(*detectors):
    store, journal = MemoryStore(), Journal(None)
    watcher = Watcher(
        "h1", "boot", list(detectors), Roster(), AlertSinks(store.client(), StoreHealth(), journal)
    )
    task = asyncio.create_task(watcher.run())
    await asyncio.sleep(1)
    try:
        yield watcher, store
    finally:
        for detector in detectors:
            detector.detector.stubborn = False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        journal.close()


@pytest.mark.looptime
async def test_only_changed_detectors_restart_and_findings_stay(tmp_path):
    same, other, new = Telling("same"), Telling("other"), Telling("new")
    async with watching(loaded(tmp_path, same), loaded(tmp_path, other)) as (watcher, store):
        before = {a.entity: a.id for a in watcher.board.alerts}
        again = Telling("other", other.starts)
        restarted = await watcher.adopt(
            [
                loaded(tmp_path, Telling("same", same.starts)),
                loaded(tmp_path, again, number=5),
                loaded(tmp_path, new, number=7),
            ]
        )
        await asyncio.sleep(1)
        after = {a.entity: a.id for a in watcher.board.alerts}

    assert restarted == ["other", "new"]
    assert (same.starts, other.starts, new.starts) == ([0], [0, 5], [7])
    assert before.items() < after.items()
    assert [a.state for a in store.stream] == [State.RAISED] * 3


@pytest.mark.looptime
async def test_a_new_strategy_applies_to_open_findings_without_a_restart(tmp_path):
    """From ACT to OBSERVE: the old finding may not cause a move any more."""
    one = Telling("one")
    async with watching(loaded(tmp_path, one)) as (watcher, _):
        restarted = await watcher.adopt([loaded(tmp_path, one, strategy=Strategy.OBSERVE)])

        assert restarted == []
        assert [a.strategy for a in watcher.board.alerts] == [Strategy.OBSERVE]
        assert one.starts == [0]


@pytest.mark.looptime
async def test_switching_a_detector_off_clears_its_findings(tmp_path):
    class Broken(Telling):
        async def watch(self, ctx):
            yield Signal("a.b", self.name, Severity.FATAL)
            raise RuntimeError("broken")

    async with watching(loaded(tmp_path, Broken("one")), loaded(tmp_path, Telling("two"))) as (
        watcher,
        store,
    ):
        raised = {(a.code, a.entity) for a in watcher.board.alerts}
        await watcher.adopt([loaded(tmp_path, Telling("two"))])
        await asyncio.sleep(100)

        assert ("detector.failed", "detector:one") in raised
        assert [(a.code, a.entity) for a in watcher.board.alerts] == [("a.b", "two")]
        cleared = {(a.code, a.entity) for a in store.stream if a.state is State.CLEARED}
        assert cleared == {("a.b", "one"), ("detector.failed", "detector:one")}


@pytest.mark.looptime
async def test_a_detector_that_does_not_stop_is_not_started_twice(tmp_path):
    stubborn, spare = Telling("one", stubborn=True), Telling("one")
    async with watching(loaded(tmp_path, stubborn)) as (watcher, _):
        begin = asyncio.get_running_loop().time()
        restarted = await watcher.adopt([loaded(tmp_path, spare, number=5)])
        took = asyncio.get_running_loop().time() - begin

        assert restarted == []
        assert spare.starts == []
        assert took == pytest.approx(GIVE_UP_S)


@pytest.mark.looptime
async def test_what_was_configured_last_follows_a_detector_that_stops_late(tmp_path):
    """A reload that is reverted meanwhile starts the former configuration again."""
    stubborn, never, last = Telling("one", stubborn=True), Telling("one"), Telling("one")
    async with watching(loaded(tmp_path, stubborn)) as (watcher, store):
        await watcher.adopt([loaded(tmp_path, never, number=5)])
        restarted = await watcher.adopt([loaded(tmp_path, last)])
        before = list(last.starts)
        stubborn.end.set()
        await asyncio.sleep(100)

        assert (restarted, before) == ([], [])
        assert (stubborn.starts, never.starts, last.starts) == ([0], [], [0])
        assert {a.code for a in store.stream} == {"a.b"}


@pytest.mark.looptime
async def test_a_removed_detector_that_stops_late_is_forgotten_then(tmp_path):
    stubborn = Telling("one", stubborn=True)
    async with watching(loaded(tmp_path, stubborn)) as (watcher, _):
        await watcher.adopt([])
        kept = set(watcher.terms())
        stubborn.end.set()
        await asyncio.sleep(100)

        assert kept == {"one"}
        assert watcher.terms() == {}
        assert watcher.board.alerts == ()
        assert stubborn.starts == [0]


@pytest.mark.looptime
async def test_detectors_that_end_while_another_one_is_waited_for_are_removed_once(tmp_path):
    """A second reload waits for the first of two; the other one ends by itself meanwhile."""
    one, two = Telling("one", stubborn=True), Telling("two", stubborn=True)
    async with watching(loaded(tmp_path, one), loaded(tmp_path, two)) as (watcher, _):
        await watcher.adopt([])
        asyncio.get_running_loop().call_later(1.0, two.end.set)
        await watcher.adopt([])
        kept = set(watcher.terms())
        one.end.set()
        await asyncio.sleep(1)

        assert kept == {"one"}
        assert watcher.terms() == {}


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("before", "after", "applies"),
    [
        (Strategy.ACT, Strategy.OBSERVE, Strategy.OBSERVE),
        (Strategy.ADVISE, Strategy.ACT, Strategy.ADVISE),
        (Strategy.ACT, None, Strategy.OBSERVE),
    ],
    ids=["lowered", "raised", "removed"],
)
async def test_a_detector_that_does_not_stop_gets_no_new_permission(
    tmp_path, before, after, applies
):
    """What it finds with its former configuration may not cause a move."""
    stubborn = Telling("one", stubborn=True)
    async with watching(loaded(tmp_path, stubborn, strategy=before)) as (watcher, _):
        later = [loaded(tmp_path, Telling("one"), 5, after)] if after else []
        await watcher.adopt(later)

        assert [a.strategy for a in watcher.board.alerts] == [applies]


@pytest.mark.looptime
async def test_a_new_time_to_hold_applies_without_a_restart(tmp_path):
    one, rules = Telling("one"), FindingRules(hold_s=60.0)
    async with watching(loaded(tmp_path, one)) as (watcher, _):
        await watcher.adopt([structs.replace(loaded(tmp_path, one), rules=rules)])

        assert watcher.terms() == {"one": (Strategy.ACT, rules)}
        assert one.starts == [0]


@pytest.mark.looptime
async def test_a_detector_that_ends_just_before_a_reload_gives_up_is_no_failure(tmp_path):
    """The supervisor has given up by then."""
    stubborn, spare = Telling("one", stubborn=True), Telling("one")
    async with watching(loaded(tmp_path, stubborn)) as (watcher, store):
        asyncio.get_running_loop().call_later(STOP_S + 0.5, stubborn.end.set)
        restarted = await watcher.adopt([loaded(tmp_path, spare, number=5)])
        await asyncio.sleep(100)

        assert restarted == ["one"]
        assert spare.starts == [5]
        assert {a.code for a in store.stream} == {"a.b"}


def test_keys_that_need_a_restart_are_named(tmp_path, monkeypatch):
    for name in [n for n in os.environ if n.startswith("TMD_")]:
        monkeypatch.delenv(name)
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text("[host]\nname = 'a'\n[redis]\nurl = 'redis://a'\n")
    new.write_text(
        "[host]\nname = 'a'\n[redis]\nurl = 'redis://b'\n[leader]\nttl_s = 20\n"
        "[log]\nlevel = 'debug'\n[policies]\nenabled = ['observe_only']\n"
        "[detectors.nic]\nstrategy = 'act'\n"
    )
    before, after = load(old), load(new)
    ahead = taken_over(before, after)

    assert fixed(before, after) == ["[redis] url", "[leader] ttl_s"]
    assert fixed(before, ahead) == []
    assert (ahead.log.level, ahead.policies.enabled) == ("debug", ("observe_only",))
    assert ahead.detector("nic").strategy is Strategy.ACT
    assert ahead.redis.url == "redis://a"


async def test_whatever_a_new_configuration_raises_changes_nothing() -> None:
    """Code of plug-ins reads it, too."""

    def read() -> Settings:
        raise RuntimeError("broken")

    unused: Any = None
    reloader = Reloader(load(None), read, unused, unused, unused, unused)
    with structlog.testing.capture_logs() as lines:
        result = await reloader.reload()

    assert result == "configuration not reloaded: reading it failed"
    assert [(line["event"], line["error"]) for line in lines] == [(KEPT, "broken")]


# --- a whole daemon -------------------------------------------------------------------------------

BASE = """
[cluster]
name = "{cluster}"
secret = "0123456789abcdef"
[redis]
url = "{url}"
[host]
name = "h1"
runtime_dir = "{folder}"
state_dir = "{folder}/state"
[plugins]
allow = ["exec", "replace_failed", "drain_requested", "observe_only"]
"""
CHECK = """
[[detectors.exec.checks]]
name = "{name}"
command = ["/bin/sh", "-c", "exit 1"]
every_s = 1000
"""


async def until(condition, what):
    deadline = time.monotonic() + WITHIN_S
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


@asynccontextmanager
async def daemon(*module, file, **variables):
    """A daemon with the configuration ``file``, until SIGTERM at the end; its log is beside it."""
    with file.with_name("log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *module, "-c", str(file)),
            stderr=log,
            env={**os.environ, **variables},
        )
    try:
        yield process
        process.terminate()
        await asyncio.wait_for(process.wait(), WITHIN_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_reload_applies_the_reloadable_settings(redis_url, tmp_path):
    """A new check, then invalid files, then another log level: same process, no state lost."""
    cluster, file, log_file = f"r{os.urandom(4).hex()}", tmp_path / "tmd.toml", tmp_path / "log"
    base = BASE.format(cluster=cluster, url=redis_url, folder=tmp_path)
    quiet = "[log]\nlevel = 'error'\n"
    file.write_text(base + quiet + CHECK.format(name="first"))
    store = RedisStore(redis_url, cluster, store_key(b"0123456789abcdef", cluster))

    async def raised(*names):
        hosts = (await store.snapshot()).hosts
        found = {a.entity: a.id for h in hosts for a in h.alerts}
        seen.update(found)
        return found.keys() == {f"check:{name}" for name in names}

    async def logged(word):
        return word in log_file.read_text()

    seen = {}
    variables = {"TMD_CLUSTER__SECRET": "0123456789abcdef"}
    try:
        async with daemon("tmd.cli", "daemon", file=file, **variables) as process:
            await until(lambda: raised("first"), "the first check reports")
            before = dict(seen)
            file.write_text(base + quiet + CHECK.format(name="first") + CHECK.format(name="second"))
            process.send_signal(signal.SIGHUP)
            await until(lambda: raised("first", "second"), "the second check reports")
            file.write_text(base + "[nonsense]\n")
            process.send_signal(signal.SIGHUP)
            await until(lambda: logged("nonsense"), "the error is logged")
            file.write_text("cluster = 'prod'\n")
            process.send_signal(signal.SIGHUP)
            await until(lambda: logged("TMD_CLUSTER__SECRET"), "the second error is logged")
            file.write_text(base + "[leader]\nttl_s = 20.0\n" + CHECK.format(name="first"))
            silent = not await logged("configuration reloaded")
            process.send_signal(signal.SIGHUP)
            await until(lambda: logged("[leader] ttl_s"), "the keys that need a restart are logged")
            await until(lambda: logged("configuration reloaded"), "and it is done")
    finally:
        await store.close()

    assert process.returncode == 0
    assert seen.items() >= before.items()
    assert silent


DEAF = """
import asyncio, contextlib
from tmd.plugin import Detector

class Deaf(Detector):
    name = "deaf"

    async def watch(self, ctx):
        (ctx.state_dir / "runs").touch()
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1e9)
        yield
"""


async def test_a_daemon_ends_although_a_detector_does_not(redis_url, tmp_path):
    """Its code ignores that it is cancelled."""
    distribution(tmp_path, "deaf", "tmd.detectors", DEAF)
    file, log_file = tmp_path / "tmd.toml", tmp_path / "log"
    base = BASE.format(cluster="deaf", url=redis_url, folder=tmp_path)
    file.write_text(base.replace('"exec"', '"deaf"'))

    async def runs():
        return (tmp_path / "state" / "detectors" / "deaf" / "runs").exists()

    path = os.pathsep.join([*sys.path, str(tmp_path)])
    async with daemon("tmd.daemon", file=file, PYTHONPATH=path) as process:
        await until(runs, "the detector runs")

    assert process.returncode == 0
    assert "detector abandoned" in log_file.read_text()
    assert not (tmp_path / "tmd.sock").exists()


EXITS = """
import asyncio, sys
from tmd.plugin import Detector

class Exits(Detector):
    name = "exits"

    async def watch(self, ctx):
        async def tool():
            sys.exit(0)

        task = asyncio.create_task(tool())
        await ctx.sleep(1e9)
        yield
"""


def test_a_daemon_that_a_task_of_a_plug_in_ends_has_failed(redis_url, tmp_path):
    """systemd starts it again then. After the plug-in's own status, 0, it would not."""
    distribution(tmp_path, "exits", "tmd.detectors", EXITS)
    file = tmp_path / "tmd.toml"
    base = BASE.format(cluster="exits", url=redis_url, folder=tmp_path)
    file.write_text(base.replace('"exec"', '"exits"'))
    command = [sys.executable, "-m", "tmd.daemon", "-c", str(file)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WITHIN_S)

    assert done.returncode == 1
    assert "the daemon failed" in done.stderr

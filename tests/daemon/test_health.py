"""State that outlives the detectors: operators' requests and recurring findings."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from tests.daemon.tasks import running
from tmd.core.alerts.findings import BANNED, DECLARED, FindingMemory, FindingRules
from tmd.core.values.model import Severity, Signal, State, Strategy
from tmd.core.values.requests import HealthyRequest
from tmd.daemon.detector_run import BLAMED_S
from tmd.daemon.foreign_code import BLOCKS_S
from tmd.daemon.health import LOOK_S, HostHealth
from tmd.daemon.journal import Journal
from tmd.daemon.plugins import LoadedDetector, PluginOrigin
from tmd.daemon.roster import Roster
from tmd.daemon.store_health import StoreHealth
from tmd.daemon.watcher import AlertSinks, Watcher
from tmd.plugin import Detector
from tmd.testing import MemoryStore
from tmd.testing.clients import until

pytestmark = pytest.mark.looptime

SIGNAL = Signal(code="gpu.lost", entity="gpu:0", severity=Severity.FATAL)
OVER = Signal(code="gpu.lost", entity="gpu:0", severity=Severity.FATAL, state=State.CLEARED)


class Forgetful(Detector):
    name = "forgetful"

    def __init__(self):
        self.declared = []

    def declared_healthy(self, code):
        self.declared.append(code)

    async def watch(self, ctx):
        await ctx.sleep(1e9)
        yield SIGNAL


class Other(Forgetful):
    name = "other"


class Broken(Forgetful):
    name = "broken"

    def declared_healthy(self, code):
        raise RuntimeError("broken")


class Blocking(Forgetful):
    name = "blocking"

    def declared_healthy(self, code):
        time.sleep(1.2 * BLOCKS_S)


class Ending(Forgetful):
    """Raises what ends a process, or the task of its caller."""

    name = "ending"

    def __init__(self, error):
        super().__init__()
        self.error = error

    def declared_healthy(self, code):
        raise self.error


@asynccontextmanager
async def daemon(data, state_dir, *detectors, host="h1"):
    """The parts of one daemon that these tests need, while the block lasts."""
    store, store_health = data.client(), StoreHealth()
    loaded = [
        LoadedDetector(d, d.Config(), Strategy.ACT, PluginOrigin(d.name, "", ""), state_dir)
        for d in detectors
    ]
    watcher = Watcher(
        host, "boot", loaded, Roster(), AlertSinks(store, store_health, Journal(None))
    )
    health = HostHealth(host, watcher, store, store_health, state_dir)
    async with running(watcher, health):
        yield watcher, health


async def test_a_declaration_of_health_reaches_one_host_and_is_recorded(tmp_path):
    data = MemoryStore()
    store = data.client()
    async with daemon(data, tmp_path) as (watcher, health):
        watcher.fold(SIGNAL, "d", Strategy.ACT)
        mine = HealthyRequest("h1", "r1", by="ann", at=time.time())
        others = HealthyRequest("h2", "r2", by="ann", at=time.time())
        for request in (mine, others):
            await store.declare_healthy(request)
        health.bell.ring()
        await asyncio.sleep(1)

        assert watcher.board.alerts == ()
        assert await store.healthy_requests() == (others,)
        heard = [(a.code, a.state) for a in data.stream]
        assert heard == [
            ("gpu.lost", State.RAISED),
            ("gpu.lost", State.CLEARED),
            (DECLARED, State.CLEARED),
        ]


async def test_the_latest_findings_outlive_a_stop(tmp_path):
    """Otherwise the fault would be raised again under another id, and a ban would be lost."""
    data = MemoryStore()
    async with daemon(data, tmp_path) as (watcher, _):
        await asyncio.sleep(LOOK_S / 2)
        watcher.fold(SIGNAL, "d", Strategy.ACT)
        before = watcher.board.lasting
    async with daemon(data, tmp_path) as (watcher, _):
        after = watcher.board.lasting

    assert after == before != FindingMemory()


@pytest.mark.parametrize("late_s", [0.0, 3600.0])
async def test_a_late_request_leaves_a_newer_finding_to_its_detector(late_s, tmp_path):
    """The detector does not forget what the operator has not seen. Another one does."""
    data, mine, other = MemoryStore(), Forgetful(), Other()
    request = HealthyRequest("h1", "r1", by="ann", at=time.time() - late_s)
    async with daemon(data, tmp_path, mine, other) as (watcher, health):
        watcher.fold(SIGNAL, "forgetful", Strategy.ACT)
        await data.client().declare_healthy(request)
        health.bell.ring()
        await asyncio.sleep(1)
        kept = [a.code for a in watcher.board.alerts]

    assert kept == (["gpu.lost"] if late_s else [])
    assert (mine.declared, other.declared) == ([] if late_s else [""], [""])


async def test_a_request_waits_for_its_daemon(tmp_path):
    data = MemoryStore()
    await data.client().declare_healthy(HealthyRequest("h1", "r1", by="ann"))
    async with daemon(data, tmp_path):
        await asyncio.sleep(1)

    assert [a.code for a in data.stream] == [DECLARED]
    assert data.healthy == {}


async def test_a_ban_survives_a_restart_and_an_operator_lifts_it(tmp_path):
    data = MemoryStore()
    rules = FindingRules(repeats=2)
    for _ in range(2):
        async with daemon(data, tmp_path) as (watcher, _health):
            watcher.fold(SIGNAL, "d", Strategy.ACT, rules)
            watcher.fold(OVER, "d", Strategy.ACT, rules)
            await asyncio.sleep(10)
            last = [a.code for a in watcher.board.alerts]
    async with daemon(data, tmp_path) as (watcher, health):
        banned = [a.code for a in watcher.board.alerts]
        await data.client().declare_healthy(HealthyRequest("h1", "r1", by="ann"))
        health.bell.ring()
        await asyncio.sleep(1)
    async with daemon(data, tmp_path) as (watcher, _health):
        after = watcher.board.alerts

    assert (last, banned, after) == ([BANNED], [BANNED], ())


async def test_a_ban_outlives_a_disk_that_was_full(tmp_path):
    data, there = MemoryStore(), tmp_path / "state"
    rules = FindingRules(repeats=1)
    async with daemon(data, there) as (watcher, _health):
        watcher.fold(SIGNAL, "d", Strategy.ACT, rules)
        watcher.fold(OVER, "d", Strategy.ACT, rules)
        await asyncio.sleep(10)
        there.mkdir()
        # A thread writes it, in real time.
        await until((there / "findings.json").is_file, within_s=3600.0, every_s=0.01)
    async with daemon(data, there) as (watcher, _health):
        banned = [a.code for a in watcher.board.alerts]

    assert banned == [BANNED]


async def test_an_unreadable_memory_of_findings_is_empty(tmp_path):
    (tmp_path / "findings.json").write_text("{nonsense")
    async with daemon(MemoryStore(), tmp_path) as (watcher, _):
        assert watcher.board.alerts == ()


async def test_a_finding_is_raised_after_its_hold(tmp_path):
    """Without a further signal: the watcher checks by itself."""
    async with daemon(MemoryStore(), tmp_path) as (watcher, _):
        watcher.fold(SIGNAL, "d", Strategy.ACT, FindingRules(hold_s=5))
        await asyncio.sleep(4)
        early = watcher.board.alerts
        await asyncio.sleep(2)

        assert early == ()
        assert [a.code for a in watcher.board.alerts] == ["gpu.lost"]


async def test_detectors_learn_of_a_declaration_of_health(tmp_path):
    """Those that remember findings must forget them; one that fails at it affects no other."""
    data = MemoryStore()
    forgetful, broken = Forgetful(), Broken()
    async with daemon(data, tmp_path, broken, forgetful) as (_, health):
        await data.client().declare_healthy(HealthyRequest("h1", "r1", code="gpu.lost"))
        health.bell.ring()
        await asyncio.sleep(1)

    assert forgetful.declared == ["gpu.lost"]
    assert data.healthy == {}


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError()], ids=repr)
async def test_a_detector_that_ends_the_process_at_a_declaration_of_health_is_contained(
    tmp_path, error
):
    data = MemoryStore()
    forgetful = Forgetful()
    async with daemon(data, tmp_path, Ending(error), forgetful) as (_, health):
        for request in ("r1", "r2"):
            await data.client().declare_healthy(HealthyRequest("h1", request, code="gpu.lost"))
            health.bell.ring()
            await asyncio.sleep(1)

    assert forgetful.declared == ["gpu.lost"] * 2
    assert data.healthy == {}


@pytest.mark.parametrize(
    ("detector", "problem"),
    [
        (Broken, "declared_healthy() fails: broken"),
        (Blocking, "declared_healthy() blocks"),
    ],
)
async def test_a_detector_that_fails_or_blocks_at_a_declaration_is_a_finding_for_a_while(
    detector, problem, tmp_path
):
    data = MemoryStore()
    async with daemon(data, tmp_path, detector()) as (watcher, health):
        await data.client().declare_healthy(HealthyRequest("h1", "r1", code="gpu.lost"))
        health.bell.ring()
        await asyncio.sleep(0.5 * BLAMED_S)
        found = {a.entity: a.message for a in watcher.board.alerts}
        await asyncio.sleep(BLAMED_S)
        after = watcher.board.alerts

    assert problem in found[f"detector:{detector.name}"]
    assert after == ()


class Stating(Forgetful):
    """States its finding when it begins and when it ends."""

    name = "stating"
    holds = True

    async def watch(self, ctx):
        known = False
        while True:
            if self.holds is not known:
                yield SIGNAL if self.holds else OVER
            known = self.holds
            await ctx.sleep(1)


async def test_a_finding_that_is_stated_once_is_not_shown_after_a_declaration_until_it_comes_back(
    tmp_path,
):
    data, stating, shown = MemoryStore(), Stating(), []
    async with daemon(data, tmp_path, stating) as (watcher, health):
        await asyncio.sleep(5)
        await data.client().declare_healthy(HealthyRequest("h1", "r1", by="ann"))
        health.bell.ring()
        for stating.holds in (True, False, True):
            await asyncio.sleep(60)
            shown.append([a.code for a in watcher.board.alerts])

    assert shown == [[], [], ["gpu.lost"]]

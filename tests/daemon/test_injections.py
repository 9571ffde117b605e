"""Injected findings in the daemon: the switch, the path through the watcher, every way to clear."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from msgspec import structs

from tests.daemon.tasks import running
from tmd import wire
from tmd.core.alerts.findings import FindingRules
from tmd.core.alerts.injection import MOST, unended
from tmd.core.values.model import Severity, Signal, State, Strategy
from tmd.core.values.requests import HealthyRequest
from tmd.daemon.injections import Injections, Peer
from tmd.daemon.journal import Journal
from tmd.daemon.plugins import LoadedDetector, PluginOrigin
from tmd.daemon.roster import Roster
from tmd.daemon.store_health import StoreHealth
from tmd.daemon.watcher import AlertSinks, Watcher
from tmd.plugin import Detector, DetectorConfig
from tmd.testing import MemoryStore
from tmd.testing.clients import until, worker_status

pytestmark = pytest.mark.looptime

DOWN = Signal("nic.down", "nic:eth0", Severity.DEGRADED, message="no carrier")
ME = Peer(pid=1, uid=os.getuid())


class Nic(Detector):
    """Finds nothing by itself."""

    name = "nic"

    async def watch(self, ctx):
        await ctx.sleep(1e9)
        yield DOWN


def loaded(folder, strategy=Strategy.ACT, hold_s=0.0):
    rules = FindingRules(hold_s=hold_s, repeats=1)
    origin = PluginOrigin("nic", "t", "d")
    return LoadedDetector(Nic(), DetectorConfig(), strategy, origin, folder / "nic", rules)


class Host:
    """The parts of one daemon that these tests need. ``ask`` is an operator's request."""

    def __init__(self, folder, *, enabled=True, hold_s=0.0, journal=None):
        self.folder = folder
        self.data = MemoryStore()
        self.journal = journal or Journal(None)
        self.roster = Roster()
        found = [loaded(folder, hold_s=hold_s)]
        store = self.data.client()
        incarnation = os.urandom(4).hex()
        self.watcher = Watcher(
            "h1", incarnation, found, self.roster, AlertSinks(store, StoreHealth(), self.journal)
        )
        file = Path("/etc/tmd/tmd.toml")
        self.injections = Injections("h1", enabled, file, self.watcher, self.roster, self.journal)

    def inject(self, signal=DOWN, for_s=0.0, dry_run=False):
        return self.injections.answer(wire.Inject(wire.VERSION, signal, for_s, dry_run), ME)

    def withdraw(self, code="", entity=""):
        return self.injections.answer(wire.Withdraw(wire.VERSION, code, entity), ME)

    @property
    def raised(self):
        return [(a.detector, a.code) for a in self.watcher.board.alerts]

    @property
    def published(self):
        return [(a.code, a.state) for a in self.data.stream]


@asynccontextmanager
async def serving(host):
    with closing(host.journal):
        async with running(host.watcher, host.injections):
            yield host


BOTH = [("nic.down", State.RAISED), ("nic.down", State.CLEARED)]


async def test_an_injected_finding_has_the_strategy_of_its_detector(tmp_path):
    """Its message and evidence state that nothing was found."""
    async with serving(Host(tmp_path)) as host:
        answer = host.inject()
        await asyncio.sleep(1)

    (alert,) = host.data.stream
    assert answer.alerts == (alert,)
    assert (alert.detector, alert.strategy) == ("injected:nic", Strategy.ACT)
    assert alert.message == f"INJECTED by {ME}: no carrier"
    assert "nothing was found" in alert.evidence[0]


async def test_the_switch_is_off_by_default_and_the_refusal_names_key_and_file(tmp_path):
    async with serving(Host(tmp_path, enabled=False)) as host:
        refused = host.inject()
        await asyncio.sleep(1)

    assert isinstance(refused, wire.Rejected)
    assert "[inject] enabled = true in /etc/tmd/tmd.toml" in refused.reason
    assert host.data.stream == []


async def test_a_dry_run_needs_no_switch_and_raises_nothing(tmp_path):
    async with serving(Host(tmp_path, enabled=False)) as host:
        answer = host.inject(dry_run=True)
        await asyncio.sleep(1)

        assert [a.code for a in answer.alerts] == ["nic.down"]
        assert "[inject] enabled" in answer.off
        assert host.raised == []


async def test_an_injected_finding_clears_after_its_duration(tmp_path):
    """Each after its own; a repeated injection replaces the duration."""
    other = structs.replace(DOWN, entity="nic:eth1")
    async with serving(Host(tmp_path)) as host:
        host.inject(for_s=10)
        host.inject(other, for_s=30)
        await asyncio.sleep(5)
        host.inject(for_s=10)
        await asyncio.sleep(9)
        before = host.raised
        await asyncio.sleep(2)
        between = [a.entity for a in host.watcher.board.alerts]
        await asyncio.sleep(20)

        assert len(before) == 2
        assert between == ["nic:eth1"]
        assert host.raised == []


async def test_an_operator_clears_only_injected_findings(tmp_path):
    async with serving(Host(tmp_path)) as host:
        host.watcher.fold(DOWN, "nic", Strategy.ACT)
        host.inject(for_s=60)
        none = host.withdraw("nic.up")
        ended = host.withdraw("nic.down")
        again = host.withdraw()
        await asyncio.sleep(100)

        assert isinstance(none, wire.Rejected)
        assert [(a.detector, a.state) for a in ended.alerts] == [("injected:nic", State.CLEARED)]
        assert isinstance(again, wire.Rejected)
        assert host.raised == [("nic", "nic.down")]
        assert len(host.data.stream) == 3


async def test_an_injected_finding_counts_and_lasts_from_the_end_of_its_hold(tmp_path):
    async with serving(Host(tmp_path, hold_s=5.0)) as host:
        answer = host.inject(for_s=10)
        early = host.raised
        await asyncio.sleep(6)
        held = host.raised
        await asyncio.sleep(10)

        assert answer.hold_s == 5.0
        assert (early, held) == ([], [("injected:nic", "nic.down")])
        assert host.published == BOTH


async def test_a_finding_cleared_during_its_hold_is_never_raised(tmp_path):
    async with serving(Host(tmp_path, hold_s=5.0)) as host:
        host.inject()
        answer = host.withdraw()
        await asyncio.sleep(10)

        assert answer == wire.Injected(())
        assert host.published == []


@pytest.mark.looptime(False)
async def test_a_restart_clears_injected_findings(tmp_path):
    """Also after a crash: the journal has the alert and that it was cleared."""
    file = tmp_path / "alerts.sqlite"
    async with serving(Host(tmp_path, journal=Journal(file))) as first:
        first.inject()
        await until(lambda: len(first.data.stream) == 1)
    async with serving(Host(tmp_path, journal=Journal(file))) as second:
        await until(lambda: len(second.data.stream) == 2)  # published again to the new store
        left = unended(await second.journal.injected())

    (raised,), (_, over) = first.data.stream, second.data.stream
    assert (over.id, over.state) == (raised.id, State.CLEARED)
    assert over.message == "injection: the daemon was restarted"
    assert left == []


@pytest.mark.looptime(False)
async def test_a_finding_injected_while_the_journal_is_read_stays(tmp_path):
    """It may be in the journal before the last run's findings are read from it."""
    host = Host(tmp_path, journal=Journal(tmp_path / "alerts.sqlite"))
    host.inject()
    await host.journal.add(host.watcher.board.alerts)
    async with serving(host):
        await until(lambda: bool(host.data.stream))
        host.inject(structs.replace(DOWN, entity="nic:eth1"))
        await until(lambda: host.data.stream[-1].entity == "nic:eth1")

    assert {state for _, state in host.published} == {State.RAISED}


async def test_switching_injection_off_clears_all_injected_findings(tmp_path):
    async with serving(Host(tmp_path)) as host:
        host.inject(for_s=60)
        host.injections.adopt(False)
        await asyncio.sleep(1)

        assert host.published == BOTH
        assert isinstance(host.inject(), wire.Rejected)


async def test_an_injected_finding_follows_its_detectors_configuration(tmp_path):
    """A new strategy applies to it; removing the detector clears it."""
    async with serving(Host(tmp_path)) as host:
        host.inject(for_s=60)
        await host.watcher.adopt([loaded(tmp_path, Strategy.OBSERVE)])
        bound = [a.strategy for a in host.watcher.board.alerts]
        await host.watcher.adopt([])
        await asyncio.sleep(100)

        assert bound == [Strategy.OBSERVE]
        assert host.published == BOTH
        assert "no detector here" in host.inject().reason


async def test_a_declaration_of_health_clears_injected_findings(tmp_path):
    async with serving(Host(tmp_path)) as host:
        host.inject(for_s=60)
        host.watcher.declare_healthy(HealthyRequest("h1", "r1", code="nic.down"))
        await asyncio.sleep(100)

        assert host.published[:2] == BOTH
        assert len(host.published) == 3


async def test_an_injected_finding_about_a_worker_names_its_job(tmp_path):
    worker = "h1/job/0.a"
    async with serving(Host(tmp_path)) as host:
        host.roster.report(worker_status(worker), 0.0)
        (alert,) = host.inject(structs.replace(DOWN, entity=worker)).alerts

    assert alert.job == "job"


async def test_no_more_than_the_heartbeat_can_carry(tmp_path):
    async with serving(Host(tmp_path)) as host:
        for number in range(MOST):
            host.inject(structs.replace(DOWN, entity=f"nic:{number}"))
        one_more = host.inject()
        again = host.inject(structs.replace(DOWN, entity="nic:0"))

    assert isinstance(one_more, wire.Rejected)
    assert isinstance(again, wire.Injected)

"""Decisions: snapshot in, guarded writes out, on fake time."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from msgspec import structs
from tmd_policies.drain_degraded import DrainDegraded
from tmd_policies.drain_requested import DrainRequested
from tmd_policies.replace_failed import ReplaceFailed

from tests.daemon.tasks import running
from tests.plugins.clusters import finding
from tmd.core.alerts.breaker import BreakerRules
from tmd.core.alerts.findings import BANNED, FindingRules, Origin, ban
from tmd.core.alerts.store_health import StoreLoop
from tmd.core.planning.election import Lease
from tmd.core.planning.goodput import LossCause
from tmd.core.planning.record_versions import REMEMBERED_S
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.errors import StaleLease, StoreUnavailable
from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import (
    ADOPTING_VERSION,
    READABLE_VERSION,
    RECORD_VERSION,
    Activity,
    ClusterView,
    Exit,
    HostStatus,
    JobState,
    Phase,
    Rehearsal,
    State,
    Strategy,
    Urgency,
    Verdict,
)
from tmd.core.values.requests import DrainRequest
from tmd.daemon.breaker import BreakerWatch
from tmd.daemon.candidate import Candidate, LeaderConfig
from tmd.daemon.deciding import grounds
from tmd.daemon.leader import Leader
from tmd.daemon.records import Records
from tmd.daemon.shared_bans import WAIT_S
from tmd.daemon.store_health import StoreHealth
from tmd.plugin import Policy
from tmd.testing import MemoryStore
from tmd.testing.clients import until, worker_status
from tmd.testing.store import MemoryClient

pytestmark = pytest.mark.looptime

LIMITS = PlanLimits(settle_s=0.5, prepare_s=60)
EPOCH = 5_000


class Broken(Policy):
    name = "broken"

    def decide(self, view):
        raise RuntimeError("foreign code")


class Scene:
    """A cluster of two ranks and a standby in the store, and its leader."""

    def __init__(self, tmp_path, *policies):
        self.data = MemoryStore()
        self.store = self.data.client()
        config = LeaderConfig(
            "a", ttl_s=9, renew_s=3, poll_s=1.0, limits=LIMITS, list_ended_s=3600.0
        )
        self.store_health = store_health = StoreHealth()
        self.candidate = Candidate(self.store, config, Records(tmp_path), store_health)
        self.candidate.lease = Lease(epoch=EPOCH, until=float("inf"))
        self.reported = []
        self.leader = Leader(
            self.store, config, self.candidate, policies, store_health, self.reported.append
        )
        self.workers = {host: worker_status(f"{host}/job/0.a") for host in ("h1", "h2", "h3")}
        self.exits = {}
        self.alerts = {}
        self.reads = {}

    @property
    def gaps(self):
        """Reports that a job is not protected."""
        return [s for s in self.reported if s.code == "job.no_fit_standby"]

    async def report(self, host, **changes):
        self.workers[host] = structs.replace(self.workers[host], **changes)
        await self.put(host)

    async def end(self, host, code):
        self.exits[host] = Exit(self.workers[host].worker, "job", code, at=0.0)
        await self.put(host)

    async def put(self, host):
        ended = self.exits.get(host)
        status = HostStatus(
            host=host,
            incarnation="i",
            standby=host == "h3",
            workers=() if ended else (self.workers[host],),
            exits=(ended,) if ended else (),
            alerts=self.alerts.get(host, ()),
            reads=self.reads.get(host, READABLE_VERSION),
            at=1000.0,
        )
        await self.store.put_host(status, ttl_s=1e6, wake=False)

    async def fall_silent(self, host):
        """Let the heartbeat of ``host`` expire."""
        del self.data.hosts[host]

    async def send_later_version(self, host):
        """Store a host status of a later version."""
        later = structs.replace(self.workers.get(host, self.workers["h3"]))
        structs.force_setattr(later, "activity", "hibernating")
        await self.store.put_host(HostStatus(host, "i", workers=(later,)), ttl_s=1e6, wake=False)

    async def degrade(self, *hosts):
        """Give each a GPU fault, seen long ago."""
        for host in hosts:
            fault = finding(host, code=f"nvml.{host}", at=100.0)
            self.alerts[host] = (fault,)
            await self.put(host)

    async def start(self):
        for host in self.workers:
            await self.put(host)
        await self.leader.turn()
        for rank, host in enumerate(("h1", "h2")):
            await self.report(host, activity=Activity.TRAINING, rank=rank, epoch=1, step=5)
        await self.report("h3", activity=Activity.STANDBY)

    @property
    async def record(self):
        return (await self.store.jobs()).records[0]


@pytest.fixture
async def scene(tmp_path):
    scene = Scene(tmp_path, Broken(), ReplaceFailed(), DrainRequested())
    await scene.start()
    return scene


async def test_a_status_of_a_later_version_stops_no_other_decision(scene):
    """A host with an undecodable status and no rank is ignored, nothing else changes."""
    await scene.send_later_version("h9")
    await scene.end("h2", -9)
    await scene.leader.turn()
    plan = (await scene.record).plan

    assert plan is not None
    assert plan.moves[0].rank == 1


async def test_a_job_with_a_rank_on_an_undecodable_host_is_left_alone(scene):
    """It is not silent, so it does not count as dead; once it is decodable, the job continues."""
    await scene.send_later_version("h1")
    await scene.end("h2", -9)
    await scene.leader.turn()
    alone = (await scene.record).plan
    await scene.put("h1")
    await scene.leader.turn()

    assert alone is None
    assert (await scene.record).plan is not None


async def test_a_job_forms_when_its_workers_have_come(scene):
    """The record carries the leader's lease epoch; standby hosts get no rank."""
    record = await scene.record

    assert [m.host for m in record.membership.members] == ["h1", "h2"]
    assert (record.revision, record.lease_epoch) == (1, EPOCH)


async def test_at_rest_nothing_is_written(scene):
    await scene.leader.turn()

    assert (await scene.record).revision == 1


async def test_a_loss_opens_a_failover_although_another_policy_fails(scene):
    await scene.end("h1", -9)
    await scene.leader.turn()
    plan = (await scene.record).plan

    assert (plan.cause, plan.phase) == ("trainer.exited", Phase.RECOVER)
    assert plan.dead == ("h1/job/0.a",)
    assert abs(plan.timeline[0].at - time.time()) < 60


async def test_one_turn_takes_every_possible_step(scene):
    """A survivor that has already halted needs no second wake-up."""
    await scene.end("h1", -9)
    await scene.report("h2", activity=Activity.STUCK, plan="job-2")
    await scene.leader.turn()

    assert (await scene.record).plan.phase is Phase.SYNC


async def test_a_job_that_ended_long_ago_is_not_listed_until_its_name_is_used_again(scene):
    """A leader looks at each listed job in each turn. Epochs and revisions of the name continue."""
    running = await scene.record
    old = structs.replace(
        running, state=JobState.FINISHED, revision=running.revision + 1, ended_at=1.0
    )
    await scene.store.put_job(old, expected=running.revision)
    for host in ("h1", "h2", "h3"):
        await scene.fall_silent(host)
    await scene.leader.turn()
    listed = (await scene.store.jobs()).records
    for host in ("h1", "h2"):
        scene.workers[host] = worker_status(f"{host}/job/0.b")
        await scene.put(host)
    await scene.leader.turn()
    new = await scene.record

    assert listed == ()
    assert (new.state, new.revision) == (JobState.RUNNING, old.revision + 1)
    assert new.membership.epoch == old.proposed + 1


async def test_a_deadline_is_kept_without_a_wake_up(scene):
    """Stuck members without evidence: the leader wakes just after settle_s, not on its period."""
    await scene.leader.turn()
    await scene.report("h2", activity=Activity.STUCK)
    patience = await scene.leader.turn()
    before = (await scene.record).plan
    await asyncio.sleep(patience)
    await scene.leader.turn()

    assert before is None
    assert patience == pytest.approx(LIMITS.settle_s, abs=0.01)
    assert (await scene.record).plan.cause == "link.broken"


async def test_each_phase_resets_the_age(scene):
    await asyncio.sleep(100)
    await scene.leader.turn()
    await scene.store.drain(DrainRequest("h1", "d1"))
    patience = await scene.leader.turn()

    assert (await scene.record).plan.phase is Phase.PREPARE
    assert patience <= 1.0
    await scene.leader.turn()
    assert (await scene.record).plan.phase is Phase.PREPARE


async def test_a_pause_opens_no_new_plan(scene):
    """Neither for a drain nor after a loss; both happen after the pause."""
    await scene.store.set_paused(True)
    await scene.store.drain(DrainRequest("h1", "d1"))
    await scene.leader.turn()
    await scene.end("h2", 1)
    await scene.leader.turn()
    paused = (await scene.record).plan
    await scene.store.set_paused(False)
    await scene.leader.turn()

    assert paused is None
    assert (await scene.record).plan.cause == "trainer.exited"


async def test_live_plans_continue_during_a_pause(scene):
    """A planned move that loses its leaver must become a failover, or the job would stop."""
    await scene.store.drain(DrainRequest("h1", "d1"))
    await scene.leader.turn()
    await scene.store.set_paused(True)
    await scene.end("h1", -9)
    await scene.leader.turn()

    assert (await scene.record).plan.cause == "trainer.exited"


async def test_a_host_that_does_not_lead_writes_nothing(scene):
    await scene.end("h1", -9)
    scene.candidate.lease = Lease(epoch=EPOCH, until=asyncio.get_running_loop().time())
    with pytest.raises(StaleLease):
        await scene.leader.turn()

    assert (await scene.record).plan is None


async def test_a_superseded_leader_steps_down(scene):
    """The store refuses its write, and it asks for a new lease instead of retrying."""
    newer = structs.replace(await scene.record, revision=2, lease_epoch=EPOCH + 1)
    await scene.store.put_job(newer, expected=1)
    await scene.end("h1", -9)
    async with running(scene.leader):
        await asyncio.sleep(0.1)

    assert not scene.candidate.leading
    assert await scene.record == newer


async def test_verdicts_for_other_jobs_are_left_out(tmp_path):
    class Elsewhere(Policy):
        name = "elsewhere"

        def decide(self, view: ClusterView):
            return [Verdict("other", "h1/job/0.a", Urgency.FAILED, "c", "r")]

    scene = Scene(tmp_path, Elsewhere())
    await scene.start()
    await scene.leader.turn()

    assert (await scene.record).plan is None


async def test_a_policy_that_fails_is_reported_until_it_decides_again(tmp_path, capsys):
    """It returns words instead of verdicts. The others decide, and it is logged once."""

    class Words(Policy):
        name = "words"
        wrong = True

        def decide(self, view: ClusterView):
            return ["drain it"] if self.wrong else []

    words = Words()
    scene = Scene(tmp_path, words, ReplaceFailed())
    await scene.start()
    await scene.leader.turn()
    await scene.end("h1", -9)
    await scene.leader.turn()
    words.wrong = False
    await scene.leader.turn()
    told = [(s.code, s.entity, s.state) for s in scene.reported if s.code == "policy.failed"]

    assert (await scene.record).plan is not None
    assert told == [("policy.failed", "policy:words", s) for s in (State.RAISED, State.CLEARED)]
    assert "'drain it'" in next(s.message for s in scene.reported if s.code == "policy.failed")
    assert capsys.readouterr().out.count("policy failed") == 1


async def test_a_policy_that_never_ends_costs_no_decision(tmp_path):
    """The leader keeps its lease, and the other policies decide."""
    end = threading.Event()

    class Endless(Policy):
        name = "endless"

        def decide(self, view: ClusterView):
            end.wait()
            return []

    scene = Scene(tmp_path, Endless(), ReplaceFailed())
    await scene.start()
    await scene.leader.turn()
    await scene.end("h1", -9)
    await scene.leader.turn()
    end.set()
    failed = [s for s in scene.reported if s.code == "policy.failed"]

    assert (await scene.record).plan is not None
    assert [s.entity for s in failed] == ["policy:endless"]
    assert "longer than 1.5 s" in failed[0].message


async def test_a_ban_that_two_hosts_got_at_once_is_lifted(scene):
    """Also one that is seen when the others are lifted, and none that a host got alone. A lost
    request is made again."""

    async def ban_of(host, at):
        cause = finding(host, id=f"{host}-{at}", code="nic.down")
        origin = Origin(host, "nic", Strategy.ACT, FindingRules(repeats=3))
        scene.alerts[host] = (ban(origin, cause, 3, at),)
        await scene.put(host)

    async def asked_after(seconds):
        await asyncio.sleep(seconds)
        await scene.leader.turn()
        found = [scene.data.healthy[each] for each in sorted(scene.data.healthy)]
        scene.data.healthy.clear()
        return found

    await ban_of("h1", 100.0)
    await ban_of("h2", 101.0)
    at_once = await asked_after(0)
    pair = await asked_after(WAIT_S)
    soon = await asked_after(WAIT_S / 2)
    again = await asked_after(WAIT_S / 2)
    await ban_of("h1", 900.0)
    scene.alerts.pop("h2")
    await scene.put("h2")
    await ban_of("h3", 159.0)
    await scene.leader.turn()
    late = await asked_after(WAIT_S)

    assert (at_once, soon) == ([], [])
    assert [(r.host, r.code) for r in pair] == [("h1", BANNED), ("h2", BANNED)]
    assert [r.id for r in again] == [r.id for r in pair]
    assert [(r.host, r.code) for r in late] == [("h3", BANNED)]
    assert all("raised the same within 60 s" in r.by for r in (*pair, *late))


async def test_an_outage_only_delays(scene):
    scene.data.fall_away()
    async with running(scene.leader):
        await asyncio.sleep(30)
        scene.data.away = False
        await scene.end("h1", -9)
        await asyncio.sleep(3)

    assert (await scene.record).plan is not None


async def test_an_outage_is_over_for_a_leader_that_another_one_has_replaced_meanwhile(scene):
    """Otherwise the daemon would never be ready again."""
    async with running(scene.leader):
        await until(lambda: scene.leader.view is not None, every_s=0.01)
        scene.data.fall_away()
        scene.leader.bell.ring()
        await until(lambda: StoreLoop.DECIDING in scene.store_health.state.failing, every_s=0.01)
        scene.candidate.lease = Lease(epoch=EPOCH)
        scene.data.away = False
        await until(lambda: not scene.store_health.state.failing, every_s=0.01)

    assert not scene.candidate.leading


# --- the circuit breaker --------------------------------------------------------------------------


@pytest.fixture
async def guarded(tmp_path):
    """A cluster with a policy that moves ranks off degraded hosts."""
    scene = Scene(tmp_path, ReplaceFailed(), DrainRequested(), DrainDegraded())
    await scene.start()
    return scene


async def test_after_an_outage_a_host_that_has_not_reported_yet_is_not_taken_for_dead(scene):
    """The outage broke the links, too: a member that is stuck names the other end of its own."""
    async with running(scene.leader):
        await scene.fall_silent("h2")
        await asyncio.sleep(LIMITS.unheard_s / 2)
        scene.data.fall_away()
        await asyncio.sleep(60)
        suspects = ("h2/job/0.a",)
        scene.data.away = False
        await scene.report("h1", activity=Activity.STUCK, suspects=suspects)
        await asyncio.sleep(LIMITS.unheard_s - 0.5)
        early = (await scene.record).plan
        await scene.report("h2", activity=Activity.STUCK)
        await asyncio.sleep(LIMITS.unheard_s)
        plan = (await scene.record).plan

    assert early is None or early.dead == ()
    assert plan.dead == ()


async def test_hosts_that_come_back_one_after_the_other_are_not_taken_for_dead(scene):
    """A switch was away, for the members but not for the leader. The first that reports names
    another, whose report is on its way."""
    async with running(scene.leader):
        await asyncio.sleep(LIMITS.settle_s)
        await scene.fall_silent("h1")
        await scene.fall_silent("h2")
        await asyncio.sleep(90)
        await scene.report("h1", activity=Activity.STUCK, suspects=("h2/job/0.a",))
        await asyncio.sleep(LIMITS.unheard_s - 0.5)
        early = (await scene.record).plan
        await scene.report("h2", activity=Activity.STUCK, suspects=("h1/job/0.a",))
        await asyncio.sleep(LIMITS.unheard_s)
        plan = (await scene.record).plan

    assert early is None or early.dead == ()
    assert plan.dead == ()


async def test_a_host_that_stays_silent_is_taken_for_dead_once_a_link_to_it_broke(scene):
    """It had time to report after the outage."""
    async with running(scene.leader):
        scene.data.fall_away()
        await asyncio.sleep(60)
        scene.data.away = False
        await scene.fall_silent("h2")
        await scene.report("h1", activity=Activity.STUCK, suspects=("h2/job/0.a",))
        await asyncio.sleep(2 * LIMITS.unheard_s)
        plan = (await scene.record).plan

    assert plan.dead == ("h2/job/0.a",)


async def test_ranks_leave_a_degraded_host(guarded):
    await guarded.degrade("h1")
    await guarded.leader.turn()

    assert (await guarded.record).plan.cause == "nvml.h1"
    assert not guarded.data.breaker.open


async def test_too_many_hosts_at_once_open_the_breaker_and_no_rank_moves(guarded):
    """It is reported once and stays open although the hosts recover."""
    await guarded.degrade("h1", "h2")
    await guarded.leader.turn()
    guarded.alerts.clear()
    await guarded.put("h1")
    for _ in range(3):
        await guarded.leader.turn()

    assert (await guarded.record).plan is None
    assert guarded.data.breaker.open
    assert [(a.code, a.state.value) for a in guarded.data.stream] == [("breaker.open", "raised")]


async def test_the_alert_of_a_breaker_is_published_by_the_next_leader_if_it_is_missing(guarded):
    """Each is published once."""

    class Refusing(MemoryClient):
        async def publish_alert(self, alert):
            raise StoreUnavailable("the disk of the store is full")

    await guarded.degrade("h1", "h2")
    first = BreakerWatch(Refusing(guarded.data), "a#1")
    second, third = (BreakerWatch(guarded.store, holder) for holder in ("b#1", "c#1"))
    await first.look(await guarded.store.snapshot(), BreakerRules())
    before = list(guarded.data.stream)
    for watch in (second, second, third):
        view = await watch.look(await guarded.store.snapshot(), BreakerRules())

    assert before == []
    assert view.breaker.open
    assert [(a.code, a.state.value) for a in guarded.data.stream] == [("breaker.open", "raised")]


async def test_policies_move_ranks_again_after_the_breaker_is_closed(guarded):
    await guarded.degrade("h1", "h2")
    await guarded.leader.turn()
    await guarded.store.set_breaker(Breaker(at=200.0))
    await guarded.leader.turn()

    assert (await guarded.record).plan.cause in ("nvml.h1", "nvml.h2")
    assert not guarded.data.breaker.open


async def test_an_open_breaker_stops_neither_operators_nor_failovers(guarded):
    await guarded.store.set_breaker(Breaker(open=True, reason="r", at=50.0))
    await guarded.store.drain(DrainRequest("h2", "d1"))
    await guarded.leader.turn()
    drained = (await guarded.record).plan
    await guarded.end("h1", -9)
    await guarded.leader.turn()

    assert drained.request == "d1"
    assert (await guarded.record).plan.cause == "trainer.exited"


# --- protection -----------------------------------------------------------------------------------


async def test_an_unprotected_job_is_reported_once_per_reason(scene):
    """The standby is first unfit, then rehearses, then is lost."""
    await scene.leader.turn()
    unfit = Rehearsal(step=5, seconds=1.0, refusal="other bits", suspect=True)
    await scene.report("h3", rehearsed=(unfit,))
    await scene.leader.turn()
    await scene.leader.turn()
    await scene.report("h3", rehearsed=(Rehearsal(step=9, seconds=1.0),))
    await scene.leader.turn()
    await scene.end("h3", 1)
    await scene.leader.turn()

    assert [(s.code, s.entity, s.state) for s in scene.gaps] == [
        ("job.no_fit_standby", "job:job", State.RAISED),
        ("job.no_fit_standby", "job:job", State.CLEARED),
        ("job.no_fit_standby", "job:job", State.RAISED),
    ]
    assert scene.gaps[0].message == (
        "no standby could take ranks 0-1: not h3/job/0.a: it failed its rehearsal: other bits"
    )
    assert "the job has no other standby" in scene.gaps[2].message


async def test_a_former_leader_clears_its_findings(scene):
    await scene.end("h3", 1)
    await scene.leader.turn()
    scene.candidate.lease = Lease(epoch=EPOCH)
    async with running(scene.leader):
        await until(lambda: len(scene.gaps) == 2)

    assert [s.state for s in scene.gaps] == [State.RAISED, State.CLEARED]


async def test_a_live_plan_changes_no_report_of_a_gap(scene):
    """The standby is the joiner of a plan and there is no other: no new report."""
    await scene.store.drain(DrainRequest("h1", "d1"))
    await scene.leader.turn()

    assert (await scene.record).plan is not None
    assert scene.gaps == []


# --- other versions -------------------------------------------------------------------------------


async def write_later(scene, **changes):
    """A newer leader writes the record; ``changes`` may be what this version cannot decode."""
    record = await scene.record
    later = structs.replace(record, revision=record.revision + 1)
    for name, value in changes.items():
        structs.force_setattr(later, name, value)
    await scene.store.put_job(later, expected=record.revision)


@pytest.mark.parametrize(
    "changes", [{"v": READABLE_VERSION + 1}, {"state": "hibernating"}], ids=["newer", "undecodable"]
)
async def test_a_record_of_a_later_version_is_left_alone(scene, changes):
    """Even a loss changes nothing, and the job is not formed anew; other jobs are decided upon."""
    await write_later(scene, **changes)
    before = dict(scene.data.records)
    await scene.end("h2", -9)
    for name in ("h4", "h5"):
        scene.workers[name] = worker_status(f"{name}/other/0.a", job="other")
        await scene.put(name)
    await scene.leader.turn()
    await scene.leader.turn()

    assert scene.data.records["job"] == before["job"]
    assert "other" in scene.data.records


async def test_a_job_that_has_ended_is_not_formed_over_a_record_of_a_later_version(scene):
    await write_later(scene, v=READABLE_VERSION + 1, state=JobState.FINISHED)
    before = dict(scene.data.records)
    for host in ("h1", "h2"):
        scene.workers[host] = worker_status(f"{host}/job/0.b")
        await scene.put(host)
    await scene.leader.turn()

    assert scene.data.records == before


async def test_a_leader_writes_its_version_into_a_record(scene):
    """Also into one that an older leader wrote."""
    await write_later(scene, v=0)
    await scene.end("h1", -9)
    await scene.leader.turn()

    assert (await scene.record).v == RECORD_VERSION


async def test_a_leader_writes_the_latest_version_that_all_live_hosts_read(scene):
    """During an upgrade the older hosts still act on the record."""
    await write_later(scene, v=RECORD_VERSION - 1)
    older = HostStatus("h4", "i", reads=RECORD_VERSION - 1)
    await scene.store.put_host(older, ttl_s=1e6, wake=False)
    await scene.end("h1", -9)
    await scene.leader.turn()
    during = (await scene.record).v
    await scene.store.put_host(
        structs.replace(older, reads=READABLE_VERSION + 1), ttl_s=1, wake=False
    )
    await scene.end("h2", -9)
    await scene.leader.turn()

    assert (during, (await scene.record).v) == (RECORD_VERSION - 1, RECORD_VERSION)


async def test_a_silent_host_of_the_job_counts_with_what_it_read_but_not_for_ever(scene):
    """It trains, and its daemon may return in a moment: it could not read a later record then."""
    await write_later(scene, v=RECORD_VERSION - 1)
    scene.reads["h2"] = RECORD_VERSION - 1
    await scene.put("h2")
    await scene.leader.turn()
    await scene.fall_silent("h2")
    await scene.end("h1", -9)
    await scene.leader.turn()
    during = (await scene.record).v
    await asyncio.sleep(REMEMBERED_S + 1)
    await scene.leader.turn()

    assert (during, (await scene.record).v) == (RECORD_VERSION - 1, RECORD_VERSION)


async def test_no_rank_is_adopted_while_a_silent_daemon_of_an_earlier_release_may_return(scene):
    """It would leave the record alone. Only what was heard counts, and not for ever."""
    scene.reads["h2"] = ADOPTING_VERSION - 1
    await scene.put("h2")
    await scene.leader.turn()
    await scene.fall_silent("h2")
    await scene.leader.turn()
    during = scene.leader.view.earlier
    await asyncio.sleep(REMEMBERED_S + 1)
    await scene.leader.turn()

    assert (during, scene.leader.view.earlier) == (("h2",), ())


async def test_a_job_is_looked_at_again_once_the_breaker_is_closed(scene):
    """It may be about to give a standby an adopted rank."""
    view = await scene.store.snapshot()
    closed, opened = (
        grounds(structs.replace(view, breaker=Breaker(open=is_open)), view.record("job"), "job", ())
        for is_open in (False, True)
    )

    assert closed.same(closed)
    assert not opened.same(closed)


async def test_nothing_is_decided_about_a_job_whose_record_one_of_its_hosts_cannot_read(scene):
    """It would carry out nothing of it."""
    scene.reads["h1"] = RECORD_VERSION - 1
    await scene.put("h1")
    before = (await scene.record).revision
    await scene.end("h2", -9)
    await scene.leader.turn()

    assert (await scene.record).revision == before


async def test_a_leader_gives_way_to_a_host_that_reads_a_record_which_it_cannot(scene):
    """It has no other way to get decisions about that job. It leads on if there is no such host, or
    if none takes the lease, since other jobs need a leader."""
    await write_later(scene, v=READABLE_VERSION + 1)
    await scene.leader.turn()
    alone = scene.candidate.leading
    later = HostStatus("h4", "i", reads=READABLE_VERSION + 1)
    await scene.store.put_host(later, ttl_s=1e6, wake=False)
    await scene.leader.turn()
    gave_way = not scene.candidate.leading
    scene.candidate.lease = Lease(epoch=EPOCH, until=float("inf"))
    await scene.leader.turn()

    assert alone
    assert gave_way
    assert scene.candidate.leading


async def test_a_record_is_never_written_in_an_earlier_version_than_it_has(scene):
    """A host that joins later with an older version leaves it alone. It may hold what that version
    cannot express."""
    older = HostStatus("h4", "i", reads=RECORD_VERSION - 1)
    await scene.store.put_host(older, ttl_s=1e6, wake=False)
    await scene.end("h1", -9)
    before = (await scene.record).revision
    await scene.leader.turn()

    assert (await scene.record).revision > before
    assert (await scene.record).v == RECORD_VERSION


async def test_a_write_that_no_replica_has_is_reported_until_one_has_it_again(scene):
    """Once, however long it lasts. It ends without a further write once a replica has caught up."""
    scene.data.unreplicated = "no replica had the latest write within 500 ms"
    await scene.end("h1", -9)
    await scene.leader.turn()
    await scene.leader.turn()
    scene.data.unreplicated = ""
    await scene.leader.turn()

    found = [s for s in scene.reported if s.code == "store.not_replicated"]
    assert [(s.state, s.entity) for s in found] == [
        (State.RAISED, "store"),
        (State.CLEARED, "store"),
    ]
    assert found[0].message == "no replica had the latest write within 500 ms"


async def test_a_new_leadership_forgets_an_earlier_write_that_no_replica_had(scene):
    """Another leader has written since; what this one knows of its own write is too old."""
    scene.data.unreplicated = "no replica had the latest write within 500 ms"
    await scene.end("h1", -9)
    await scene.leader.turn()
    scene.candidate.lease = Lease()
    async with running(scene.leader):
        await until(lambda: scene.reported[-1].state is State.CLEARED, every_s=0.1, within_s=60)

    assert scene.store.unreplicated == ""


# --- metrics --------------------------------------------------------------------------------------


async def test_a_daemon_that_has_never_led_counts_the_jobs_from_zero(scene):
    """Its first turn as leader may count a loss, and a series that begins with it shows none."""
    scene.candidate.lease = Lease()
    scene.candidate.records.take(await scene.record)
    async with running(scene.leader):
        await asyncio.sleep(0.01)

    assert scene.leader.counter.lost == {("job", cause): 0.0 for cause in LossCause}


async def test_the_leader_counts_the_time_that_a_loss_costs(scene):
    """From the last commit to the failover, and then while it recovers."""
    await scene.report("h2", stands_s=1.5)
    await scene.end("h1", -9)
    await scene.leader.turn()
    await asyncio.sleep(2.0)
    await scene.leader.turn()
    await asyncio.sleep(3.0)
    await scene.leader.turn()

    assert scene.leader.counter.lost == pytest.approx(
        {("job", LossCause.INTERRUPTED_STEP): 3.0, ("job", LossCause.FAILOVER): 10.0}
    )


async def test_the_record_keeps_the_lost_time_over_leaders_and_restarts(scene):
    """A daemon begins at nothing, and its host may never come back. Only what was counted since the
    latest revision is in the heartbeat: it would count twice."""
    await scene.end("h1", -9)
    for pause_s in (0.0, 1.0, 1.0):
        await asyncio.sleep(pause_s)
        await scene.leader.turn()
    first, unwritten = (await scene.record).lost, scene.leader.counter.ledger.unwritten()
    config = LeaderConfig("b", ttl_s=9, renew_s=3, poll_s=1.0, limits=LIMITS)
    another = Leader(scene.store, config, scene.candidate, [ReplaceFailed()], StoreHealth())
    await another.turn()
    await asyncio.sleep(3.0)
    await scene.end("h2", -9)
    await another.turn()

    assert first == pytest.approx({"failover": 2.0})
    assert unwritten == {"job": pytest.approx({"failover": 2.0})}
    assert (await scene.record).lost == pytest.approx({"failover": 8.0})
    assert another.counter.ledger.unwritten() == {}


async def test_only_the_leader_has_a_view_for_its_metrics(scene):
    """Not without Redis either: old facts would look like new ones."""
    views = []
    async with running(scene.leader):
        await until(lambda: scene.leader.view is not None, every_s=0.1, within_s=60)
        scene.data.fall_away()
        await until(lambda: scene.leader.view is None, every_s=0.1, within_s=60)
        scene.data.away = False
        await until(lambda: scene.leader.view is not None, every_s=0.1, within_s=60)
        views.append(scene.leader.view)
        scene.candidate.lease = Lease(epoch=EPOCH)
        await until(lambda: scene.leader.view is None, every_s=0.1, within_s=60)

    assert [h.host for h in views[0].hosts] == ["h1", "h2", "h3"]

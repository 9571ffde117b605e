"""Whole daemons as processes, a real Redis, and simulated trainers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from tests.daemon.cluster import WITHIN_S, Cluster
from tmd import embedded, wire
from tmd.boot import boot_id
from tmd.core.planning.directives import Hold, Sync, Train
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import Activity, Exit, HostStatus, Phase, PlanKind, Severity, Signal
from tmd.core.values.requests import DrainRequest
from tmd.daemon.store import RedisStore
from tmd.testing.clients import connected


async def test_a_loss_is_recovered_across_hosts(tmp_path, redis):
    """Formed on two hosts; one worker exits; the survivor holds; standby and survivor sync."""
    async with Cluster(tmp_path, redis) as cluster:
        first, second, spare = await cluster.formed()
        launcher = await cluster.launcher("h1")
        await launcher.exited("h1/job/0.a", -9)
        hold = await second.directive(lambda d: isinstance(d, Hold))
        await second.say(activity=Activity.STUCK, plan=hold.plan)
        sync = await spare.directive(lambda d: isinstance(d, Sync))

        assert (sync.rank, sync.resume) == (0, 3)
        assert sync.membership.members[0].worker == "h2/job/1.a"
        assert (await cluster.record()).plan.phase is Phase.SYNC
        assert first.orders[0].lease_epoch == spare.orders[-1].lease_epoch
        assert [a.code for a in await cluster.alerts()] == ["trainer.exited"]


async def test_a_stranger_who_writes_to_redis_moves_nobody(tmp_path, redis):
    """Forged: a drain, a host that reports an exit, and wake-ups. Then a member requests the same
    drain."""
    async with Cluster(tmp_path, redis) as cluster:
        await cluster.formed()

        async def logged(*kinds):
            logs = "".join(p.read_text() for p in tmp_path.glob("*/log"))
            return all(
                f"redis holds {k} that the secret of this host does not verify" in logs
                for k in kinds
            )

        guess = RedisStore(redis.url, "test", b"a guess")
        lie = HostStatus("h3", "i", exits=(Exit("h1/job/0.a", "job", -9, at=time.time()),))
        await guess.drain(DrainRequest(host="h1", id="forged"))
        await guess.put_host(lie, ttl_s=60, wake=True)
        await cluster.until(lambda: logged("a DrainRequest", "a HostStatus"), "both were seen")
        before = await cluster.record()
        await cluster.store.drain(DrainRequest(host="h1", id="real"))

        async def decided():
            return (await cluster.record()).plan is not None

        await cluster.until(decided, "the member's drain is planned")
        record = await cluster.record()
        await guess.close()

        assert before.plan is None
        assert (record.plan.request, record.plan.moves[0].leaver.host) == ("real", "h1")
        assert {h.host for h in (await cluster.store.snapshot()).hosts} == {"h1", "h2"}


async def test_another_daemon_leads_when_the_leader_is_killed(tmp_path, redis):
    """Trainers keep their directives; the next decision has a higher lease epoch."""
    async with Cluster(tmp_path, redis) as cluster:
        await cluster.formed()
        before = (await cluster.record()).lease_epoch
        led = (await cluster.store.leader()).partition("#")[0]
        other = "h2" if led == "h1" else "h1"
        cluster.daemons[led].kill()

        async def taken_over():
            return (await cluster.store.leader()).startswith(f"{other}#")

        await cluster.until(taken_over, "the other leads")
        launcher = await cluster.launcher(other)
        await launcher.exited(f"{other}/job/0.a", 1)

        async def decided():
            return (await cluster.record()).plan is not None

        await cluster.until(decided, "a plan is stored")
        assert (await cluster.record()).lease_epoch > before


async def test_trainers_reconnect_to_a_restarted_daemon(tmp_path, redis):
    async with Cluster(tmp_path, redis) as cluster:
        await cluster.formed()
        cluster.daemons["h2"].kill()
        await cluster.daemons["h2"].wait()
        await cluster.start("h2")
        again = await cluster.trainer("h2")

        assert isinstance(await again.directive(lambda _: True), Train)
        assert [h.boot for h in (await cluster.store.snapshot()).hosts] == [boot_id()] * 2


async def test_a_restarted_daemon_raises_no_second_alert_for_an_exit(tmp_path, redis):
    """Its launcher reports all earlier exits again, and a later one after them."""
    async with Cluster(tmp_path, redis) as cluster:
        await cluster.start("h1")
        await (await cluster.launcher("h1", slots=2)).exited("h1/job/0.a", 1)
        first = await cluster.alerts()
        cluster.daemons["h1"].kill()
        await cluster.daemons["h1"].wait()
        await cluster.start("h1")
        launcher = await cluster.launcher("h1", slots=2)
        await launcher.exited("h1/job/0.a", 1)
        await launcher.exited("h1/job/1.a", 1)

        async def both():
            return "h1/job/1.a" in [a.entity for a in await cluster.alerts()]

        await cluster.until(both, "the second exit is reported")
        assert [a.entity for a in first] == ["h1/job/0.a"]
        assert [a.entity for a in await cluster.alerts()] == ["h1/job/0.a", "h1/job/1.a"]


async def test_records_and_alerts_are_restored_to_an_emptied_redis(tmp_path, redis):
    """The record returns with its revision, decisions continue, and the logs report it."""
    async with Cluster(tmp_path, redis) as cluster:
        _, second, _ = await cluster.formed()
        before = await cluster.record()
        os.kill(redis.pid, signal.SIGKILL)

        async def away():
            try:
                await cluster.store.leader()
            except StoreUnavailable:
                return True
            return False

        await cluster.until(away, "redis is gone")
        (tmp_path / "redis" / "redis.sock").unlink(missing_ok=True)
        with embedded.redis(tmp_path / "redis"):

            async def restored():
                jobs = (await cluster.store.jobs()).records
                return bool(jobs) and jobs[0] == before

            await cluster.until(restored, "the record is back")

            async def logged():
                logs = [p.read_text() for p in tmp_path.glob("h*/log")]
                return all("store is available again" in log for log in logs)

            await cluster.until(logged, "each daemon says once that Redis serves all its loops")
            launcher = await cluster.launcher("h1")
            await launcher.exited("h1/job/0.a", -9)
            await second.directive(lambda d: isinstance(d, Hold), timeout_s=WITHIN_S)

        after = second.orders[-1]
        assert after.revision > before.revision
        assert after.lease_epoch >= before.lease_epoch


REHEARSING = """
[inject]
enabled = true
[policies]
enabled = ["replace_failed", "drain_degraded"]
[breaker]
settle_s = 0
[detectors.nic]
strategy = "act"
"""


async def test_an_injected_finding_moves_a_rank_like_a_real_one(tmp_path, redis):
    """From the socket of its host to a plan of the leader, whose reason names the injection."""
    async with Cluster(tmp_path, redis, more=REHEARSING) as cluster:
        await cluster.formed()
        async with connected(cluster.socket("h1")) as operator:
            found = Signal("nic.down", "nic:eth0", Severity.FATAL, message="no carrier")
            await operator.send(wire.Inject(wire.VERSION, found))
            answer = await operator.receive()

        async def planned():
            return (await cluster.record()).plan is not None

        await cluster.until(planned, "a plan is stored")
        plan = (await cluster.record()).plan
        (alert, *_) = await cluster.alerts()

        assert answer.alerts == (alert,)
        assert (plan.kind, plan.cause) == (PlanKind.PLANNED, "nic.down")
        assert "INJECTED by" in plan.reason
        assert [m.leaver.host for m in plan.moves] == ["h1"]


async def test_a_silent_trainer_is_replaced_and_killed_by_its_launcher(tmp_path, redis):
    async with Cluster(tmp_path, redis, silence=1.0) as cluster:
        _, second, spare = await cluster.formed()
        launcher = await cluster.launcher("h1")

        async def speak():
            while True:
                for one in (second, spare):
                    await one.say(step=one.status.step)
                await asyncio.sleep(0.2)

        speaking = asyncio.create_task(speak())
        try:
            kill = await launcher.next_kill()
        finally:
            speaking.cancel()

        assert kill.worker == "h1/job/0.a"
        assert (await cluster.record()).plan.cause == "trainer.stalled"


def memory_of(pid):
    """Resident memory in kB and the mapped files."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    rss_kb = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return rss_kb, Path(f"/proc/{pid}/maps").read_text()


async def test_a_daemon_stays_small_and_ends_clean(tmp_path, redis):
    """No torch, no command-line code, less than 60 MB; SIGTERM: status 0, nothing left."""
    async with Cluster(tmp_path, redis) as cluster:
        await cluster.start("h1")

        async def leading():
            return bool(await cluster.store.leader())

        await cluster.until(leading, "it leads")
        process = cluster.daemons["h1"]
        rss_kb, maps = memory_of(process.pid)
        process.terminate()
        code = await asyncio.wait_for(process.wait(), 5)

        assert rss_kb < 60_000
        assert "torch" not in maps
        assert "pydantic" not in maps
        assert code == 0
        assert not cluster.socket("h1").exists()
        assert await cluster.store.leader() == ""


async def test_the_daemon_runs_without_redis(tmp_path, redis):
    """Trainers are accepted while Redis is unavailable; work starts once it is there."""
    async with Cluster(tmp_path, redis) as cluster:
        cluster.url = f"unix://{tmp_path}/later/redis.sock"
        await cluster.start("h1")
        trainers = [await cluster.trainer("h1", slot) for slot in range(2)]
        (tmp_path / "later").mkdir()
        with embedded.redis(tmp_path / "later"):
            for one in trainers:
                assert isinstance(await one.directive(lambda _: True, timeout_s=WITHIN_S), Train)

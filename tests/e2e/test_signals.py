"""Findings about a host's hardware, from the kernel log or sysfs to the job that it runs.

One job on one cluster passes through all of them, since each start of a cluster costs seconds: it
waits at a gate while a fault is made, is released once all are armed, and ends with the golden
numbers. The state is copied at the switch, as wherever a job is held.
"""

import asyncio
from pathlib import Path

from tmd_policies.drain_degraded import DrainDegraded

from tests.e2e.hardware import PORT, Machine, machines
from tests.e2e.harness import (
    GATE,
    LONG,
    RANKS,
    STOP_AND_COPY,
    Golden,
    Run,
    history,
    live_plan,
    running,
)
from tmd.core.alerts.breaker import BreakerRules
from tmd.core.values.model import (
    Activity,
    Alert,
    ClusterView,
    MigrationPlan,
    Phase,
    PlanKind,
    Severity,
    State,
)
from tmd.daemon.breaker import OPEN
from tmd.daemon.policy_runner import rulings
from tmd.demo.cluster import host_of, pids, workers
from tmd.embedded import EmbeddedRedis

SETTLE_S = 0.5
PATIENCE_S = 5.0
POLICIES = '["replace_failed", "drain_requested", "drain_degraded"]'
CONFIG = f"""
[policies]
enabled = {POLICIES}
[policies.replace_failed]
patience_s = {PATIENCE_S}
[breaker]
settle_s = {SETTLE_S}
"""
GATES = (GATE, "between@1:30=wait", "backward@1:55=wait", "data@1:80=wait", "optimizer@1:105=wait")
"""Rank 1 stops the job here, one after the other, on its host at that time."""

GPU = "pci:0000:3b:00.0"
APPLICATION = "NVRM: Xid (PCI:0000:3b:00): 13, pid=71, name=python3, Graphics SM Warp Exception"
UNKNOWN = "NVRM: Xid (PCI:0000:3b:00): 999, pid=71, name=python3, of a driver to come"
PAGE_FAULT = "NVRM: Xid (PCI:0000:3b:00): 31, pid=71, name=python3, MMU Fault: ENGINE GRAPHICS"
STALL = "NVRM: Xid (PCI:0000:3b:00): 8, pid=71, name=python3, Ch 00000008"
REJECTED = "NVRM: Xid (PCI:0000:3b:00): 32, pid=72, name=python3, Channel ID 00000008"
CONTAINED = "NVRM: Xid (PCI:0000:3b:00): 94, pid=71, name=python3, Contained: SM (0x1). RST: No"
LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus."
UNCONTAINED = "NVRM: Xid (PCI:0000:3b:00): 95, pid=71, name=python3, Uncontained: LTC TAG (0x1,0x0)"
DOUBLE_BIT = "NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', DBE (double bit error)"
RECOVERED = (
    "NVRM: Xid (PCI:0000:3b:00): 154, pid='<unknown>', GPU recovery action changed from "
    "0x1 (GPU Reset Required) to 0x0 (None)"
)
FLOOD = 800_000
GROWTH_KB = 8_192
"""Memory by which a daemon may grow in a flood of a hundred megabytes, due to the allocator."""


async def test_hardware_findings_move_only_the_ranks_concerned(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """Doubt only alerts, a degraded host is left in time, a hanging rank is lost, and too many
    findings at once move no rank; the numbers are those of the undisturbed run."""
    async with machines(tmp_path, *RANKS, "s1") as hardware:
        configs = {host: machine.config() for host, machine in hardware.items()}
        configs["h3"] = hardware["h3"].config(ports=True)
        # An advising detector moves no rank, but its findings count for the breaker.
        configs["h1"] = hardware["h1"].config("advise")
        async with running(
            tmp_path,
            redis.url,
            faults=GATES,
            arguments=LONG,
            more_config=CONFIG + STOP_AND_COPY,
            own_config=configs,
            max_restarts=1,
        ) as run:
            await run.at_gate()
            await doubt_only_alerts(run, hardware)
            await a_flood_is_one_alert(run, hardware["h1"])
            await a_contained_error_is_handed_over(run, hardware["h2"])
            await a_host_without_its_link_is_left(run, hardware["h3"])
            await a_rank_that_hangs_on_a_lost_gpu_is_lost(run, hardware["s1"])
            await too_much_at_once_moves_nobody(run, hardware)
            await run.ends_like(long_golden)
            done = history(await run.cluster.view())

        assert [(p.cause, p.kind, p.phase) for p in done] == [
            ("xid.94", PlanKind.PLANNED, Phase.DONE),
            ("nic.down", PlanKind.PLANNED, Phase.DONE),
            ("xid.79", PlanKind.PLANNED, Phase.ABORTED),
            ("xid.79", PlanKind.FAILOVER, Phase.DONE),
            ("drain", PlanKind.PLANNED, Phase.DONE),
        ]


async def doubt_only_alerts(run: Run, hardware: dict[str, Machine]) -> None:
    """A fault of the application, and one that no table knows."""
    hardware["h2"].says(APPLICATION)
    hardware["h3"].says(UNKNOWN)
    found = [await settled(run, "h2", "xid.13"), await settled(run, "h3", "xid.999")]

    assert [a.severity for a in found] == [Severity.WARNING, Severity.WARNING]
    assert [a.entity for a in found] == [GPU, GPU]
    assert APPLICATION in found[0].evidence
    assert "not in the table" in found[1].message
    await nobody_has_moved(run, 0)


async def a_flood_is_one_alert(run: Run, machine: Machine) -> None:
    """The daemon reads the line after it, and keeps no line of the flood."""
    machine.says(PAGE_FAULT)
    await settled(run, "h1", "xid.31")
    before = resident_kb(run, "h1")
    await machine.storms(PAGE_FAULT, FLOOD)
    machine.says(STALL)
    await settled(run, "h1", "xid.8")
    view = await run.cluster.until(
        lambda v: (a := standing(v, "h1", "xid.31")) is not None and a.count > FLOOD, "all counted"
    )
    counted = standing(view, "h1", "xid.31")
    published = [a.code for a in await told(run, "xid.8") if a.host == "h1"]

    assert counted is not None
    assert counted.count == FLOOD + 1
    assert published == ["xid.31", "xid.8"]
    assert resident_kb(run, "h1") - before < GROWTH_KB
    await nobody_has_moved(run, 0)


async def a_contained_error_is_handed_over(run: Run, machine: Machine) -> None:
    """The job survives it; once the driver demands nothing more the host may hold ranks."""
    machine.says(CONTAINED)
    await run.armed()
    run.let_go("forward")
    plan = await moved(run, "xid.94", "between")
    machine.says(RECOVERED)
    await run.cluster.until(
        lambda v: standing(v, "h2", "xid.94") is None and waits(v, "h2"), "h2 is sound and waits"
    )

    assert route(plan) == [(1, "h2", "s1")]
    assert plan.moves[0].source is not None
    assert plan.moves[0].source.host != "h2", "a healthy replica is the source"
    assert "degraded" in plan.reason


async def a_host_without_its_link_is_left(run: Run, machine: Machine) -> None:
    """It may hold ranks again once the port is up."""
    machine.link("1: DOWN")
    await run.armed()
    run.let_go("between")
    plan = await moved(run, "nic.down", "backward")
    machine.link("4: ACTIVE")
    await run.cluster.until(
        lambda v: standing(v, "h3", "nic.down") is None and waits(v, "h3"), "h3 is sound and waits"
    )

    assert route(plan) == [(2, "h3", "h2")]
    assert f"nic:{PORT}" in plan.reason


async def a_rank_that_hangs_on_a_lost_gpu_is_lost(run: Run, machine: Machine) -> None:
    """It hangs in the middle of its step, cannot hand over, and is killed by its launcher."""
    machine.says(LOST)
    plan = await moved(run, "xid.79", "data")
    machine.says(RECOVERED)
    machine.says(REJECTED)
    await settled(run, "s1", "xid.32")
    unimpressed = standing(await run.cluster.view(), "s1", "xid.79")
    await run.cluster.declare_healthy("s1")
    await run.cluster.until(
        lambda v: not alerts_of(v, "s1") and waits(v, "s1"), "s1 is declared sound and waits"
    )

    assert route(plan) == [(1, "s1", "h3")]
    assert "no step for" in plan.reason
    assert unimpressed is not None, "only a new boot or an operator ends it"


async def too_much_at_once_moves_nobody(run: Run, hardware: dict[str, Machine]) -> None:
    """Two of four hosts. A standby waits on a sound one, and an operator may still use it."""
    hardware["h1"].says(UNCONTAINED)
    await settled(run, "h1", "xid.95")
    hardware["h2"].says(DOUBLE_BIT)
    await settled(run, "h2", "xid.48")
    view = await run.cluster.until(lambda v: v.breaker.open, "the circuit breaker is open")
    wanted = rulings([DrainDegraded()], view, BreakerRules(settle_s=SETTLE_S))
    opened = [a for a in await told(run, OPEN) if a.code == OPEN]

    assert [r.verdict.cause for r in wanted] == ["xid.48"]
    assert "circuit breaker is open" in wanted[0].held_back
    assert waits(view, "s1")
    assert [a.state for a in opened] == [State.RAISED]
    assert "2 of 4 hosts" in opened[0].message
    assert "h1, h2" in opened[0].message
    await nobody_has_moved(run, 4)

    await run.cluster.drain("h2")
    await run.armed()
    run.let_go("data")
    plan = await moved(run, "drain", "optimizer")
    run.let_go("optimizer")

    assert route(plan) == [(2, "h2", "s1")]


# --- looking --------------------------------------------------------------------------------------


def alerts_of(view: ClusterView, host: str) -> tuple[Alert, ...]:
    """The alerts raised on ``host``."""
    status = view.host(host)
    return status.alerts if status is not None else ()


def standing(view: ClusterView, host: str, code: str) -> Alert | None:
    return next((a for a in alerts_of(view, host) if a.code == code), None)


async def settled(run: Run, host: str, code: str) -> Alert:
    """Wait until the finding is old enough for policies to act on it."""

    def old(view: ClusterView) -> bool:
        status, alert = view.host(host), standing(view, host, code)
        return status is not None and alert is not None and status.at - alert.at >= SETTLE_S

    view = await run.cluster.until(old, f"{code} stands on {host}")
    alert = standing(view, host, code)
    assert alert is not None
    return alert


async def told(run: Run, code: str) -> list[Alert]:
    """All published alerts, once one has that code."""
    async with asyncio.timeout(60):
        async for _ in run.cluster.views():
            found = await run.cluster.alerts()
            if any(alert.code == code for alert in found):
                return found
    raise AssertionError(f"{code} was not published")


async def moved(run: Run, cause: str, gate: str) -> MigrationPlan:
    """The plan of that cause, once it is carried out and the job is at its next gate."""
    plan = await run.done(cause)
    await run.reached(gate)
    return plan


async def nobody_has_moved(run: Run, after: int) -> None:
    """There is no plan after the first ``after`` ones, and all ranks train."""
    view = await run.cluster.view()

    assert live_plan(view) is None
    assert len(history(view)) == after
    assert all(host_of(view, rank) is not None for rank in range(len(RANKS)))


def waits(view: ClusterView, host: str) -> bool:
    """Whether a standby waits on ``host``."""
    return any(
        w.activity is Activity.STANDBY and w.worker.startswith(f"{host}/") for w in workers(view)
    )


def route(plan: MigrationPlan) -> list[tuple[int, str, str]]:
    """Rank, old host, new host."""
    return [(m.rank, m.leaver.host, m.joiner.host if m.joiner else "") for m in plan.moves]


def resident_kb(run: Run, host: str) -> int:
    """Memory of the daemon of ``host``."""
    daemon = pids(run.cluster.daemons[host])
    lines = [x for pid in daemon for x in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(x.split()[1]) for x in lines if x.startswith("VmRSS"))

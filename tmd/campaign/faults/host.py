"""Faults of hosts: lost, frozen, without power, with a wrong clock, with a failing disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

from tmd.campaign import clocks, namespaces
from tmd.campaign.faults.process import STOPPED, send
from tmd.campaign.kind import FaultKind, Mend, Unfired
from tmd.campaign.scenario import FaultPart
from tmd.campaign.stage import CampaignStage
from tmd.core.values.reasons import in_words
from tmd.demo.cluster import kill, pids, workers

HOUR_S = 3600.0
SMALL = "192k"
"""Space for the first pages of a journal only."""


async def _lost(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Daemon, launcher and, with it, the workers: no process is left to report it."""
    for host in await stage.targets(fault.where):
        await stage.cluster.lose(host)
    return stage.repair


async def _launcher(stage: CampaignStage, fault: FaultPart) -> Mend:
    await kill(stage.cluster.launchers[await stage.target(fault.where)])
    return stage.repair


async def _frozen(stage: CampaignStage, fault: FaultPart) -> Mend:
    """As a virtual machine that is paused or moved: all processes stop, and continue later."""
    host = await stage.target(fault.where)
    view = await stage.cluster.view()
    trainers = [w.pid for w in workers(view) if w.worker.startswith(f"{host}/")]
    # Daemon first, since it must not see the others stop.
    stopped = [*pids(stage.cluster.daemons[host]), *{_parent(pid) for pid in trainers}, *trainers]
    for pid in stopped:
        await send(pid, signal.SIGSTOP, STOPPED)

    async def thaw() -> None:
        for pid in reversed(stopped):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return thaw


def _parent(pid: int) -> int:
    """The launcher of a worker."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        raise Unfired(f"worker {pid} has ended") from None


async def _power_cut(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Packets are lost at once, so that no reset gets out; then all its processes end."""
    networks = _networks(stage)
    host = await stage.target(fault.where)
    networks.link(host, up=False)
    await kill(stage.cluster.daemons[host])
    await kill(stage.cluster.launchers[host])

    async def restore() -> None:
        networks.link(host, up=True)

    return restore


def _networks(stage: CampaignStage) -> namespaces.Namespaces:
    if stage.networks is None:
        raise Unfired('the cluster has no networks of its own: [cluster] network = "namespaces"')
    return stage.networks


async def _set_clock(stage: CampaignStage, fault: FaultPart, seconds: float) -> Mend:
    """The jump shows in the daemon's reports."""
    if stage.clocks is None:
        raise Unfired("the cluster has no clocks of its own: [cluster] clocks = true")
    known = stage.clocks
    host = await stage.target(fault.where)
    before = await _clock(stage, host)
    known.shift(host, fault.amount or seconds)
    shift = abs(fault.amount or seconds)
    await stage.until(lambda v: (h := v.host(host)) is not None and abs(h.at - before) > shift / 2)

    async def put_right() -> None:
        known.shift(host, 0.0)

    return put_right


async def _clock(stage: CampaignStage, host: str) -> float:
    view = await stage.until(lambda v: v.host(host) is not None)
    status = view.host(host)
    assert status is not None
    return status.at


async def _forward(stage: CampaignStage, fault: FaultPart) -> Mend:
    return await _set_clock(stage, fault, HOUR_S)


async def _back(stage: CampaignStage, fault: FaultPart) -> Mend:
    return await _set_clock(stage, fault, -HOUR_S)


async def _disk_full(stage: CampaignStage, fault: FaultPart) -> Mend:
    """Put the daemon's state on a separate file system that is full, and start the daemon."""
    host = await stage.target(fault.where)
    state = stage.cluster.folder(host) / "state"
    mend = await _on(stage, host, state, ("-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs"))
    with contextlib.suppress(OSError):
        _fill(state / "ballast")
    if shutil.disk_usage(state).free:
        raise Unfired(f"there is space left in {state}")
    return mend


async def _read_only(stage: CampaignStage, fault: FaultPart) -> Mend:
    host = await stage.target(fault.where)
    state = stage.cluster.folder(host) / "state"
    mend = await _on(stage, host, state, ("--bind", "-o", "ro", str(state)))
    with contextlib.suppress(OSError):
        (state / "probe").touch()
        raise Unfired(f"{state} can be written")
    return mend


async def _on(stage: CampaignStage, host: str, state: Path, options: tuple[str, ...]) -> Mend:
    """Mount at ``state``, then restart the daemon on it."""
    try:
        stage.mount(state, *options)
    except OSError as error:
        raise Unfired(in_words(error)) from None
    await kill(stage.cluster.daemons[host])
    await stage.cluster.start_daemon(host)

    async def mend() -> None:
        if stage.unmount(state):
            await kill(stage.cluster.daemons[host])
            await stage.cluster.start_daemon(host)

    return mend


def _fill(file: Path) -> None:
    with file.open("wb", buffering=0) as ballast:
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    ballast.write(b"\0" * size)


def _no_mounts() -> str:
    return "" if os.geteuid() == 0 else "needs root, to mount a file system"


KINDS = (
    FaultKind("host.lost", "daemon, launcher and workers are killed at once", _lost),
    FaultKind("host.launcher-killed", "the launcher is killed, and its workers with it", _launcher),
    FaultKind("host.frozen", "all processes are stopped, and continue later", _frozen),
    FaultKind("host.power-cut", "lost without a reset", _power_cut, unable=namespaces.unable),
    FaultKind("host.clock-forward", "the wall clock jumps ahead", _forward, unable=clocks.unable),
    FaultKind("host.clock-back", "the wall clock jumps back", _back, unable=clocks.unable),
    FaultKind("host.disk-full", "no space for journal and state", _disk_full, unable=_no_mounts),
    FaultKind("host.journal-read-only", "state cannot be written", _read_only, unable=_no_mounts),
)

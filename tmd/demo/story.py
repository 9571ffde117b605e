"""The story of the demo: train, drain one host, kill a worker of another, finish."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from tmd import lifeline
from tmd.child import send
from tmd.core.values.model import FINAL, Activity, ClusterView, MigrationPlan
from tmd.demo.cluster import LocalCluster, describe, host_of, ready, workers

DRAINED_RANK = 1
KILLED_RANK = 2
PATIENCE_S = 300.0


class StoryTimes(Struct):
    """Times that only the story knows."""

    started: dict[str, float] = {}
    """By plan id: time of the request or of the kill (wall clock)."""
    seen: dict[str, float] = {}
    """By plan id: time at which its host detected that the worker exits."""
    plans: list[MigrationPlan] = []
    exits: dict[str, int] = {}


async def play(cluster: LocalCluster, steps: int, say: Callable[[str], None]) -> StoryTimes:
    """Run the story to its end.

    Raises:
        TimeoutError: an expected event did not happen.
    """
    times = StoryTimes()
    ranks = len(cluster.spec.active)
    say("starting hosts")
    await cluster.until(lambda v: ready(v, ranks, 1), "all ranks train, a standby waits")
    say("training")
    view = await _at_step(cluster, steps // 3)
    leaving = host_of(view, DRAINED_RANK)
    assert leaving is not None
    say(f"planned: draining {leaving.host}")
    await event(cluster, times, lambda: cluster.drain(leaving.host))
    say(f"maintenance of {leaving.host} is over: undrained, it stands by")
    await cluster.undrain(leaving.host)
    view = await _at_step(cluster, 2 * steps // 3)
    victim = host_of(view, KILLED_RANK)
    assert victim is not None
    # It takes over from the killed host.
    await cluster.until(lambda v: ready(v, ranks, 1), "the drained host stands by")
    say(f"unexpected: kill -9 of the worker on {victim.host}")
    await event(cluster, times, lambda: _kill(victim.workers[-1].pid))
    say("training")
    times.exits = await cluster.finished(PATIENCE_S + steps)
    say("finished")
    return times


async def run_golden(
    script: tuple[str, ...], ranks: int, trace: Path, log: Path, prefix: Sequence[str] = ()
) -> None:
    """Run the same job undisturbed, without tmd's control plane, started as torchrun would.

    Not with torchrun itself: its workers survive if it is killed. ``prefix``: as in
    :class:`ClusterSpec`.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TMD_")}
    environment |= {"TMD_TRACE": str(trace), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes: list[Process] = []
    with log.open("wb") as output:
        try:
            for rank in range(ranks):
                process = await asyncio.create_subprocess_exec(
                    *(*lifeline.prefix(), *prefix, sys.executable, *script),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    process_group=0,
                )
                processes.append(process)
            codes = [await process.wait() for process in processes]
        finally:
            for process in processes:
                send(process, signal.SIGKILL)
                await process.wait()
    if any(codes):
        text = await asyncio.to_thread(log.read_text, errors="replace")
        raise RuntimeError(f"the undisturbed run failed {codes}:\n{text[-2000:]}")


def free_port() -> int:
    """A port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _at_step(cluster: LocalCluster, step: int) -> ClusterView:
    def there(view: ClusterView) -> bool:
        found = [w.step for w in workers(view) if w.activity is Activity.TRAINING]
        return bool(found) and max(found) >= step

    return await cluster.until(there, f"step {step} is reached", PATIENCE_S + step)


async def event(cluster: LocalCluster, times: StoryTimes, act: Callable[[], object]) -> None:
    """Run ``act`` to disturb the job, wait until its plan is done, and record both in ``times``.

    Raises:
        RuntimeError: the plan was aborted.
        TimeoutError: there was no plan, or it did not finish in time.
    """
    known = {plan.id for plan in _finals(await cluster.view())}
    started = time.time()
    done = act()
    if asyncio.iscoroutine(done):
        await done

    def new(view: ClusterView) -> list[MigrationPlan]:
        return [plan for plan in _finals(view) if plan.id not in known]

    view = await cluster.until(lambda v: bool(new(v)), "a plan is done", PATIENCE_S)
    plan = new(view)[0]
    times.started[plan.id] = started
    exits = view.exits(view.jobs[0].job)
    times.seen.update((plan.id, exits[worker].at) for worker in plan.dead if worker in exits)
    times.plans.append(plan)
    if plan.phase not in FINAL or plan.outcome:
        raise RuntimeError(f"plan {plan.id} was aborted: {plan.outcome}\n{describe(view)}")


def _finals(view: ClusterView) -> tuple[MigrationPlan, ...]:
    return view.jobs[0].history if view.jobs else ()


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)

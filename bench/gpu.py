"""What a job on one GPU shows: several ranks share the card, with NCCL over sockets between them.

Phases, each in a process of its own that may be killed:

probe    two ranks, then four: how long the first group takes to build; one rank is killed, and how
         long until the others know it and all their groups are aborted
ratio    DDP through tmd's group and on NCCL itself, step by step in the same processes, with a
         world of one rank (what the wrapper costs) and of four; --repeats is that of this phase
moves    planned moves of the demo's job: pauses, and the card's memory before and after
losses   kill -9 and SIGSTOP of workers of that job: downtime
All runs of the job in a phase must have the same losses, bit for bit.

``--device cpu`` plays the phases without a GPU, to see that they work. The ring stands in for
NCCL, and the figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench import downtime
from bench.downtime import RANKS, STANDBY, TINY
from bench.measure import Report, each, options, parsed
from bench.passing import one_card
from bench.sizes import Oracle
from tmd import embedded, lifeline
from tmd.core.values.model import HostStatus, Member, Membership
from tmd.demo import train
from tmd.demo.cluster import ClusterSpec, LocalCluster
from tmd.demo.report import DemoTrace, events_of, read_trace
from tmd.demo.story import DRAINED_RANK, KILLED_RANK, StoryTimes

PHASES = ("probe", "ratio", "moves", "losses")
PHASE_S = {"probe": 120.0, "ratio": 150.0, "moves": 150.0, "losses": 150.0}
SIZES = {
    1: ["--width", "2048", "--batch", "4096", "--steps", "20"],
    4: ["--width", "1024", "--batch", "1024", "--steps", "10"],
}
"""By ranks: of the model and of a block. A step of one rank is long enough to keep the card busy;
those of four wait for sockets."""
LOSSES = {"trainer.exited": "kill -9", "trainer.stalled": "SIGSTOP"}
"""By the cause of the failover: what was done to the worker."""
KEY = b"k" * 32
SOON_S = 60.0
QUIET = 10
"""Steps between two events."""
ABORT_LIMIT_S, RESUME_LIMIT_S = 2.0, 5.0
MEMORY_LIMIT = 0.01

Facts = dict[str, Any]


def carriers(device: str) -> dict[str, str]:
    return {"TMD_CPU": "ring"} if device == "cpu" else {"TMD_CUDA": "nccl"}


# --- probe ---------------------------------------------------------------------------------------


def probe_rank(rank: int, size: int, device: str, pipe: Connection) -> None:
    """One rank: builds a group, and sums in it until a peer is lost."""
    lifeline.die_with_parent()
    os.environ.update(one_card(f"rank-{rank}"))
    from tmd.fabric import Fabric
    from tmd.fabric.generations.carriers import carry
    from tmd.fabric.generations.passing import PassingGroup

    fabric = Fabric(f"p{rank}", KEY)
    pipe.send(fabric.address)
    members = tuple(Member(f"p{r}", "here", address) for r, address in enumerate(pipe.recv()))
    carry(fabric, carriers(device))
    fabric.enter(Membership(1, members), rank)
    group = PassingGroup(fabric, "0", range(size))
    began = time.perf_counter()
    group.allreduce([torch.ones(1 << 20, device=device)]).wait()
    fabric.settle()
    pipe.send(time.perf_counter() - began)
    fabric.reduce_min([1])  # opens the links that are watched
    pipe.send("voted")
    while not fabric.poisoned:
        group.allreduce([torch.ones(1 << 20, device=device)]).wait()
        fabric.settle()
    hung = fabric.generations.await_aborts(SOON_S)
    pipe.send((time.time(), hung))
    pipe.recv()
    os._exit(0)


def probe(args: argparse.Namespace) -> Facts:
    """Builds and losses in worlds of two and of four."""
    return {str(size): [_probed(size, args.device) for _ in range(3)] for size in (2, 4)}


def _probed(size: int, device: str) -> Facts:
    spawn = mp.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(size)]
    ranks = [
        spawn.Process(target=probe_rank, args=(r, size, device, pipes[r][1]), daemon=True)
        for r in range(size)
    ]
    try:
        for rank in ranks:
            rank.start()
        addresses = [_heard(here) for here, _ in pipes]
        for here, _ in pipes:
            here.send(addresses)
        built = [_heard(here) for here, _ in pipes]
        for here, _ in pipes:
            _heard(here)
        killed = time.time()
        os.kill(ranks[1].pid or 0, signal.SIGKILL)
        ended = [_heard(here) for r, (here, _) in enumerate(pipes) if r != 1]
        if hung := [groups for _, groups in ended if groups]:
            raise RuntimeError(f"aborts hang: {hung}")
        return {"build_s": max(built), "abort_s": max(at for at, _ in ended) - killed}
    finally:
        for rank in ranks:
            rank.kill()
            rank.join(10)


def _heard(pipe: Connection) -> Any:
    if not pipe.poll(SOON_S):
        raise RuntimeError(f"a rank said nothing for {SOON_S:.0f} s")
    return pipe.recv()


# --- ratio ---------------------------------------------------------------------------------------


def ratio(args: argparse.Namespace) -> Facts:
    """``bench.passing`` in worlds of one and of four."""
    return {str(ranks): _ratio(args, ranks) for ranks in (1, 4)}


def _ratio(args: argparse.Namespace, ranks: int) -> Facts:
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        file = Path(scratch, "passing.json")
        command = [*lifeline.prefix(), sys.executable, "-m", "bench.passing", "--json", str(file)]
        repeats = 1 if args.quick else args.repeats
        command += ["--ranks", str(ranks), "--device", args.device, "--repeats", str(repeats)]
        tiny = args.quick or args.device == "cpu"
        command += ["--quick"] if tiny else SIZES[ranks]
        subprocess.run(command, check=True, timeout=PHASE_S["ratio"] / 2, stdout=sys.stderr)
        found: Facts = json.loads(file.read_text())["figures"]
        return found


# --- the job -------------------------------------------------------------------------------------


def moves(args: argparse.Namespace) -> Facts:
    """An undisturbed run, and one with planned moves: their training losses must be equal."""
    oracle = Oracle()
    _, quiet = _run(args, "undisturbed", ())
    oracle.check("job", quiet)
    count = 1 if args.quick else 5
    found, trace = _run(args, "moves", [(DRAINED_RANK, downtime.drain)] * count)
    oracle.check("job", trace)
    return {**found, "compared": oracle.compared["job"]}


def losses(args: argparse.Namespace) -> Facts:
    """An undisturbed run, and one in which workers die: their training losses must be equal."""
    oracle = Oracle()
    _, quiet = _run(args, "undisturbed", ())
    oracle.check("job", quiet)
    kills = [(KILLED_RANK, downtime.kill)] * (1 if args.quick else 3)
    found, trace = _run(args, "losses", [*kills, (KILLED_RANK, stop)])
    oracle.check("job", trace)
    return {**found, "compared": oracle.compared["job"]}


async def stop(cluster: LocalCluster, host: HostStatus) -> None:
    """A worker hangs without dying."""
    os.kill(host.workers[-1].pid, signal.SIGSTOP)


Event = tuple[int, Callable[[LocalCluster, HostStatus], Awaitable[None]]]


def _run(args: argparse.Namespace, name: str, events: Any) -> tuple[Facts, DemoTrace]:
    with tempfile.TemporaryDirectory(prefix=f"tmd-{name}-") as scratch:
        return asyncio.run(_disturbed(args, Path(scratch, "run"), events))


async def _disturbed(
    args: argparse.Namespace, folder: Path, events: list[Event]
) -> tuple[Facts, DemoTrace]:
    times, used = StoryTimes(), []
    script = (train.__file__, "--steps", "100000", "--device", args.device)
    hosts = (*RANKS, *STANDBY)
    with embedded.redis() as redis:
        spec = ClusterSpec(
            folder,
            redis.url,
            "gpu",
            RANKS,
            STANDBY,
            (*script, *(TINY if args.quick else ())),
            max_restarts=9,
            environment=carriers(args.device),
            own_environment={host: one_card(host) for host in hosts},
        )
        async with LocalCluster(spec) as cluster:
            await downtime.run_on(cluster, QUIET)
            used.append(memory(args.device))
            for rank, act in events:
                await downtime.event(cluster, times, QUIET, rank, act)
            await downtime.run_on(cluster, QUIET)
            used.append(memory(args.device))
        trace = read_trace(cluster.trace)
    found = events_of(trace, times.plans, times.started, times.seen)
    rows = [downtime.facts(e, plan) for e, plan in zip(found, times.plans, strict=True)]
    return {"events": rows, "device_bytes": used}, trace


def memory(device: str) -> int:
    """Bytes of the card that are in use, by all processes."""
    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


# --- all phases ----------------------------------------------------------------------------------


def played(phase: str, args: argparse.Namespace) -> Facts:
    """One phase in a process of its own.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    command = [sys.executable, "-m", "bench.gpu", "--only", phase, "--device", args.device]
    command += ["--repeats", str(args.repeats), *(["--quick"] if args.quick else [])]
    longest = PHASE_S[phase]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=longest, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"phase {phase} did not end within {longest:g} s") from error
    if done.returncode:
        raise RuntimeError(f"phase {phase} ended with {done.returncode}")
    found: Facts = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(report: Report, found: dict[str, Facts]) -> Facts:
    """Rows and targets; returns the figures."""
    figures: Facts = {}
    for size, runs in found.get("probe", {}).items():
        built, ended = each(runs, "build_s"), each(runs, "abort_s")
        figures[f"probe {size}"] = {"build": built, "abort": ended}
        report.row(f"{size} ranks: first group", built, "built when first used")
        report.row(f"{size} ranks: kill to all aborted", ended)
        title = f"{size} ranks: kill to aborted <= 2 s"
        report.target(title, ended.get("median"), ABORT_LIMIT_S, at_least=False)
    for size, shown in found.get("ratio", {}).items():
        figures[f"ratio {size}"] = shown
        report.row(f"{size} ranks: tmd / plain", shown["ratio"], "a ratio, not seconds")
        title = f"{size} ranks: step on tmd <= plain, within the interval"
        low, _ = shown["ratio"].get("interval_95") or (shown["ratio"]["median"], None)
        report.target(title, low, 1.0, at_least=False)
    for name, key, events in _disturbances(found):
        shown = figures[name] = {k: each(events, k) for k in (key, "median_step_s")}
        report.row(f"{name}: {key}", shown[key], "beyond one step")
        report.row(f"{name}: step", shown["median_step_s"], "before an event")
    if "moves" in found:
        before, after = found["moves"]["device_bytes"]
        grown = abs(after - before) / before if before else None
        report.target("memory after moves as before", grown, MEMORY_LIMIT, at_least=False)
    if "losses" in found:
        worst = each(found["losses"]["events"], "downtime_s").get("max")
        report.target("downtime after a lost worker <= 5 s", worst, RESUME_LIMIT_S, at_least=False)
    return figures


def _disturbances(found: dict[str, Facts]) -> Iterator[tuple[str, str, list[Facts]]]:
    """What was done to the job, what it costs, and each event."""
    if "moves" in found:
        yield "moves", "pause_s", found["moves"]["events"]
    if "losses" in found:
        for cause, name in LOSSES.items():
            events = [e for e in found["losses"]["events"] if e["cause"] == cause]
            yield name, "downtime_s", events


def main() -> int:
    parser = options("gpu", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=[*PHASES])
    parser.add_argument("--only", choices=PHASES, help=argparse.SUPPRESS)
    args = parsed(parser)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --device cpu shows that the phases work, and no more")
    if args.only:
        phases = {"probe": probe, "ratio": ratio, "moves": moves, "losses": losses}
        print(json.dumps(phases[args.only](args)))
        return 0
    report = Report("gpu", args)
    found: dict[str, Facts] = {}
    for phase in args.phases:
        report.progress(f"phase {phase}")
        facts = report.attempt(phase, partial(played, phase, args))
        if facts is not None:
            found[phase] = facts
        elif phase == "probe":
            break  # what follows needs groups that survive a loss
    return report.finish(found, rows(report, found))


if __name__ == "__main__":
    raise SystemExit(main())

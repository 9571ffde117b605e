"""A training job in an allocation of Slurm: a node is drained, another one is lost, it goes on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.harness import SCRIPT, Golden, Run
from tests.slurm import EXAMPLES, asked, job_of, scontrol, slurm, state
from tmd.core.values.model import ClusterView, PlanKind
from tmd.demo.cluster import ClusterSpec, LocalCluster, ready
from tmd.embedded import EmbeddedRedis
from tmd.testing.clients import until

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]
NODES = ("n1", "n2", "n3", "n4", "n5")
SPARES = 2
STEPS = ("--steps", "600")
SLOWLY = ("--pace", "0.1", "--last", "590")
"""Until both nodes are gone; it changes no result."""
PATIENCE_S = 60.0


class Daemons(LocalCluster):
    """Each node has its daemon as a service. Slurm starts the launchers."""

    async def start_launcher(self, host: str, *more: str) -> None:
        pass


class Job:
    """The example, submitted as it is."""

    def __init__(self, found: dict[str, str], cluster: LocalCluster, marks: Path) -> None:
        programs = cluster.spec.folder / "programs"
        programs.mkdir()
        # All nodes are this machine; each has the configuration of its own daemon.
        config = cluster.config("$SLURMD_NODENAME")
        (programs / "tmd").write_text(
            f'#!/bin/sh\nTMD_CONFIG="{config}" exec "{sys.executable}" -P -m tmd.cli "$@"\n'
        )
        (programs / "tmd").chmod(0o755)
        cluster.trace.mkdir()
        self._environ = {**os.environ, **found, "SPARES": str(SPARES), "OMP_NUM_THREADS": "1"}
        self._environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self._environ |= {"TMD_TRACE": str(cluster.trace), "TMD_FAULTS_FOLDER": str(marks)}
        self._folder = cluster.spec.folder
        words = ("--parsable", f"--nodes={len(NODES)}", str(EXAMPLES / "train.sbatch"))
        batch = ("sbatch", *words, SCRIPT, *STEPS, *SLOWLY)
        self.id = asked(self._environ, *batch, folder=self._folder).strip()

    @property
    def shown(self) -> dict[str, str]:
        return job_of(self._environ, self.id)

    @property
    def log(self) -> str:
        return (self._folder / f"gpt-{self.id}.log").read_text(errors="replace")

    def cancel(self) -> None:
        asked(self._environ, "scancel", self.id)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm"), NODES) as found:
        yield found


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden_of(tmp_path_factory.mktemp("golden"), STEPS, len(NODES) - SPARES)


@contextmanager
def synchronizing(found: dict[str, str], config: Path) -> Iterator[None]:
    """``tmd slurm sync`` as a service."""
    command = (sys.executable, "-P", "-m", "tmd.cli", "slurm", "sync", "--every", "1")
    known = {**os.environ, **found, "TMD_CONFIG": str(config)}
    with subprocess.Popen(command, env=known) as process:
        try:
            yield
        finally:
            process.kill()


@asynccontextmanager
async def submitted(
    nodes: dict[str, str], folder: Path, redis: str
) -> AsyncIterator[tuple[Job, Run]]:
    marks = folder / "faults"
    await asyncio.to_thread(marks.mkdir)
    spec = ClusterSpec(
        folder=folder, redis=redis, job="slurm", active=NODES, standby=(), script=(), silence_s=5.0
    )
    async with Daemons(spec) as cluster:
        job = await asyncio.to_thread(Job, nodes, cluster, marks)
        try:
            yield job, Run(cluster, marks)
        except BaseException:
            print(job.log, *map(cluster.log, NODES), sep="\n====\n")
            raise
        finally:
            job.cancel()


async def test_a_job_moves_off_a_drained_node_and_goes_on_without_a_lost_one(
    nodes: dict[str, str], tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """It is the file that the documentation names. The spares take both ranks, the allocation
    stays, and the numbers are those of an undisturbed run."""
    async with submitted(nodes, tmp_path, redis.url) as (job, run):
        cluster = run.cluster
        view = await cluster.until(
            lambda v: ready(v, len(NODES) - SPARES, SPARES, step=3),
            "the ranks train, the spares wait",
            PATIENCE_S,
        )
        # Not the first node: the batch script and srun run there.
        (rank, node), (other, away) = [place for place in held(view) if place[1] != NODES[0]][:2]
        with synchronizing(nodes, cluster.config(NODES[0])):
            scontrol(nodes, "update", f"NodeName={node}", "State=DRAIN", "Reason=disk")
            drained = await run.done("drain")
            scontrol(nodes, "update", f"NodeName={away}", "State=DOWN", "Reason=lost")
            lost = await run.done("trainer")
        view, during = await cluster.view(), job.shown
        (run.folder / "hurry.go").touch()
        await until(lambda: job.shown["JobState"] != "RUNNING", within_s=PATIENCE_S, every_s=0.2)
        ended = job.shown

        assert [(d.host, d.by) for d in view.drains] == [(node, "slurm: disk")]
        assert state(nodes, node) in ("draining", "drained")
        assert during["JobState"] == "RUNNING"
        assert [(m.rank, m.leaver.host) for m in drained.moves if m.leaver] == [(rank, node)]
        assert (drained.kind, lost.kind) == (PlanKind.PLANNED, PlanKind.FAILOVER)
        assert [m.rank for m in lost.moves] == [other]
        assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "137:0")  # of the lost launcher
        await run.ends_like(golden, unwritten=[(other, (lost.resume or 1) - 1)])


def held(view: ClusterView) -> list[tuple[int, str]]:
    """Rank and node of each member."""
    return [(rank, m.host) for rank, m in enumerate(view.jobs[0].membership.members)]

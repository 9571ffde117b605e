"""Slurm and tmd agree about drained hosts; with a real slurmctld and two real slurmd."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm import EXAMPLES, asked, scontrol, sinfo, slurm, until
from tests.test_cli import tmd
from tests.values import alert
from tmd.cli.slurm import SlurmSynchronizer
from tmd.config import parse
from tmd.core.alerts.findings import DECLARED
from tmd.core.planning.slurm import SlurmChanges, SlurmNode, SlurmRules
from tmd.core.values.errors import Conflict
from tmd.core.values.model import Alert, ClusterView, HostStatus, Severity, Strategy
from tmd.core.values.requests import DrainRequest
from tmd.daemon.store import open_store
from tmd.testing import MemoryStore

FAULT = alert(code="nvml.ecc", severity=Severity.FATAL, strategy=Strategy.ACT, message="row 'x'")
SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Two nodes, and one without a daemon in a hidden partition."""
    with slurm(tmp_path_factory.mktemp("slurm"), ("n1", "n2"), ("n3",)) as found:
        yield found


def pair(found: dict[str, str]) -> list[SlurmNode]:
    """The two nodes with a daemon."""
    return [node for node in sinfo(found) if node.name != "n3"]


@pytest.fixture
def sync(cluster: dict[str, str], redis_url: str, tmp_path: Path) -> Iterator[Any]:
    """A function that runs the verb, and one that changes and reads the store of tmd."""
    name = f"slurm{os.urandom(4).hex()}"
    config = tmp_path / "tmd.toml"
    config.write_text(f'[cluster]\nname = "{name}"\n[redis]\nurl = "{redis_url}"\n')
    settings, _ = parse({"cluster": {"name": name, "secret": SECRET}, "redis": {"url": redis_url}})
    assert settings is not None

    def reported(*values: HostStatus | DrainRequest | Alert) -> ClusterView:
        async def ask() -> ClusterView:
            store = open_store(settings)
            try:
                for value in values:
                    if isinstance(value, HostStatus):
                        await store.put_host(value, ttl_s=300, wake=False)
                    elif isinstance(value, Alert):
                        await store.publish_alert(value)
                    else:
                        await store.drain(value)
                return await store.snapshot()
            finally:
                await store.close()

        return asyncio.run(ask())

    def run(*options: str, status: int = 0, **environment: str) -> str:
        environment = {**cluster, "TMD_CLUSTER__SECRET": SECRET, **environment}
        done = tmd("slurm", "sync", "-c", config, *options, env=environment)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    yield run, reported
    for node in pair(cluster):
        if node.is_drained:
            scontrol(cluster, "update", f"NodeName={node.name}", "State=UNDRAIN")


def test_slurm_takes_the_example_of_a_job_with_a_spare(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    """All its options; of two nodes, one is the spare."""
    done = subprocess.run(
        ["sbatch", "--test-only", "--nodes=2", str(EXAMPLES / "train.sbatch")],
        env={**os.environ, **cluster},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    text = (EXAMPLES / "train.sbatch").read_text()

    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr
    assert re.findall(r"^(#SBATCH|srun) --no-kill\b", text, re.MULTILINE) == ["#SBATCH", "srun"]
    subprocess.run(["bash", "-n", str(EXAMPLES / "train.sbatch")], check=True)


def test_drains_go_one_way_and_findings_the_other(cluster: dict[str, str], sync: Any) -> None:
    """Each is taken back when its cause is over; nothing comes back as an echo."""
    run, reported = sync
    reported(HostStatus("n1", "i"), HostStatus("n2", "i", alerts=(FAULT,)))
    scontrol(cluster, "update", "NodeName=n1", "State=DRAIN", "Reason=disk | swap")
    planned = run("--dry-run")
    untouched = reported().drains, pair(cluster)[1].state
    run("--once")
    view, nodes = reported(), pair(cluster)
    again = run("--once")
    scontrol(cluster, "update", "NodeName=n1", "State=RESUME")
    reported(HostStatus("n2", "i"))
    run("--once")
    too_soon = pair(cluster)[1].state
    run("--once", "--resume-after", "0")
    over, after = reported(), pair(cluster)

    assert planned.splitlines() == [
        "would drain host n1: slurm: disk | swap",
        "would drain node n2: tmd: nvml.ecc: row 'x'",
    ]
    assert untouched == ((), "idle")
    assert [(d.host, d.by) for d in view.drains] == [("n1", "slurm: disk | swap")]
    assert (nodes[1].state, nodes[1].reason) == ("drained", "tmd: nvml.ecc: row 'x'")
    assert again == ""
    assert [d.bars for d in view.drains] == [False]
    assert over.drains == ()
    assert too_soon == "drained"
    assert [n.state for n in after] == ["idle", "idle"]


def test_a_change_that_fails_stops_no_other_and_is_not_reported_as_done(
    cluster: dict[str, str], sync: Any, tmp_path: Path
) -> None:
    """A scontrol that refuses the first node."""
    run, reported = sync
    broken = tmp_path / "scontrol"
    broken.write_text(
        '#!/bin/sh\ncase "$*" in *NodeName=n1*) echo refused >&2; exit 1;; esac\n'
        f'exec "{shutil.which("scontrol")}" "$@"\n'
    )
    broken.chmod(0o755)
    reported(HostStatus("n1", "i", alerts=(FAULT,)), HostStatus("n2", "i", alerts=(FAULT,)))
    printed = run("--once", status=1, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    assert [n.state for n in pair(cluster)] == ["idle", "drained"]
    assert printed.splitlines() == [
        "drain node n2: tmd: nvml.ecc: row 'x'",
        "tmd: cannot drain node n1: tmd: nvml.ecc: row 'x': scontrol update failed: refused",
    ]


def test_a_node_of_a_hidden_partition_is_seen_and_a_request_without_a_node_reported(
    cluster: dict[str, str], sync: Any
) -> None:
    run, reported = sync
    reported(HostStatus("n3", "i"))
    scontrol(cluster, "update", "NodeName=n3", "State=DRAIN", "Reason=disk")
    run("--once")
    drained = [d.host for d in reported().drains]
    reported(DrainRequest("n4", "r", by="slurm: disk"))
    printed = run("--once")

    assert drained == ["n3"]
    assert "host n4 stays drained: sinfo shows no node for it" in printed


def test_a_host_that_is_declared_healthy_gets_its_node_back_at_once(
    cluster: dict[str, str], sync: Any, tmp_path: Path
) -> None:
    """The verb sees it in the alerts while it runs."""
    run, reported = sync
    reported(HostStatus("n2", "i", alerts=(FAULT,)))
    run("--once")
    reported(HostStatus("n2", "i"))
    command = [sys.executable, "-m", "tmd.cli", "slurm", "sync", "-c"]
    environment = {**os.environ, **cluster, "TMD_CLUSTER__SECRET": SECRET}
    with subprocess.Popen(
        [*command, str(tmp_path / "tmd.toml"), "--every", "1"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        reported(HostStatus("n1", "i", alerts=(FAULT,)))
        first = process.stdout.readline()  # it has looked
        before = pair(cluster)[1].state
        reported(alert(host="n2", code=DECLARED, entity="host", at=FAULT.at + 1))
        second = process.stdout.readline()
        process.terminate()

    assert before == "drained"
    assert first.startswith("drain node n1")
    assert second == "take back the drain of node n2\n"


@pytest.fixture
def check(cluster: dict[str, str], tmp_path: Path) -> Any:
    """A function that runs the health check on n2, with a detector whose check ends as given."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "tmd").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tmd.cli "$@"\n')
    (programs / "tmd").chmod(0o755)
    config = tmp_path / "tmd.toml"

    def run(status: int, more: str = "", ends: int = 0) -> Any:
        names = ("host", "nic", "nvml", "straggler", "trainer", "xid")
        off = "".join(f"[detectors.{name}]\nenabled = false\n" for name in names)
        script = tmp_path / "own"
        script.write_text(f"""#!/bin/sh\necho '{{"message": "m"}}'\nexit {status}\n""")
        script.chmod(0o755)
        own = f'[[detectors.exec.checks]]\nname = "own"\ncommand = ["{script}"]\n'
        config.write_text(off + own + more)
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "TMD_CONFIG": str(config), "SLURMD_NODENAME": "n2"}
        done = subprocess.run(
            [str(EXAMPLES / "health-check")],
            env={**os.environ, **cluster, **environment, "SCAN_SECONDS": "1"},
        )
        assert done.returncode == ends
        return pair(cluster)[1]

    return run


def test_the_health_check_drains_a_node_that_fails_and_takes_it_back(check: Any) -> None:
    """It says what was found."""
    failed = check(2)
    healthy = check(0)

    assert (failed.state, failed.reason) == ("drained", "tmd scan: exec.own")
    assert not failed.is_ours
    assert healthy.state == "idle"


def test_a_wrong_configuration_drains_no_node(check: Any) -> None:
    """The scan ends with the status of a failure, too. The check fails, so that slurmd logs it."""
    assert check(2, "[nonsense]\n", ends=1).state == "idle"


@pytest.mark.thorough
def test_a_node_that_still_runs_a_job_is_drained_as_well(
    cluster: dict[str, str], sync: Any, tmp_path: Path
) -> None:
    """That is the case that matters: the ranks move, the job goes on."""
    run, reported = sync
    reported(HostStatus("n1", "i"))
    words = ("sbatch", "--parsable", "-w", "n1", "-o", "/dev/null", "--wrap", "sleep 300")
    submitted = asked(cluster, *words, folder=tmp_path).strip()
    try:
        until(lambda: pair(cluster)[0].state == "allocated", tmp_path)
        scontrol(cluster, "update", "NodeName=n1", "State=DRAIN", "Reason=soon")
        run("--once")
        state = pair(cluster)[0].state
    finally:
        asked(cluster, "scancel", submitted)

    assert state == "draining"
    assert [d.by for d in reported().drains] == ["slurm: soon"]


def test_without_slurm_the_verb_says_where_to_run_it(redis_url: str, tmp_path: Path) -> None:
    config = tmp_path / "tmd.toml"
    config.write_text(f'[cluster]\nname = "none"\n[redis]\nurl = "{redis_url}"\n')
    environment = {"TMD_CLUSTER__SECRET": SECRET, "PATH": str(tmp_path)}
    done = tmd("slurm", "sync", "--once", "-c", config, env=environment)

    assert done.returncode == 1
    assert "no sinfo in PATH" in done.stderr


async def test_a_drain_that_an_operator_sets_while_the_verb_looks_stays() -> None:
    """Neither withdrawn nor replaced: the verb changes only what it has seen."""
    store = MemoryStore().client()
    await store.drain(DrainRequest("n1", "seen", by="slurm: disk"))
    found = SlurmChanges(drain=(("n2", "slurm: disk"),), undrain=("n1",))
    synchronizer = SlurmSynchronizer(store, SlurmRules())
    steps = list(synchronizer.steps(found, await store.snapshot()))
    theirs = tuple(DrainRequest(host, "ann", by="ann") for host in ("n1", "n2"))
    for request in theirs:
        await store.drain(request)
    for _, change in steps:
        with pytest.raises(Conflict):
            await change()

    assert (await store.snapshot()).drains == theirs

"""A real slurmd runs the health check and the prolog of the examples, in its own environment."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import EXAMPLES, asked, job_of, scontrol, sinfo, slurm, state, until

OFF = "".join(
    f"[detectors.{name}]\nenabled = false\n"
    for name in ("host", "nic", "nvml", "straggler", "trainer", "xid")
)


class Checked:
    """A Slurm of two nodes whose checks find what a test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, str] = {}
        for node in ("n1", "n2"):
            self.finds(node, 0)
        own = f'[[detectors.exec.checks]]\nname = "own"\ncommand = ["{self._script("own")}"]\n'
        (folder / "tmd.toml").write_text(OFF + own)
        programs = folder / "programs"
        programs.mkdir()
        run = f'TMD_CONFIG="{folder}/tmd.toml" exec "{sys.executable}" -P -m tmd.cli "$@"'
        (programs / "tmd").write_text(f"#!/bin/sh\n{run}\n")
        (programs / "tmd").chmod(0o755)

    def _script(self, name: str) -> Path:
        """A check that ends with the status in a file of the node."""
        file = self.folder / name
        file.write_text(
            f"""#!/bin/sh\necho '{{"message": "m"}}'\n"""
            f'exit "$(cat "{self.folder}/of-$SLURMD_NODENAME")"\n'
        )
        file.chmod(0o755)
        return file

    def finds(self, node: str, status: int) -> None:
        """From now on the check of ``node`` ends with ``status``."""
        fresh = self.folder / f"new-{node}"
        fresh.write_text(str(status))
        fresh.replace(self.folder / f"of-{node}")

    def example(self, name: str) -> Path:
        """The example as an administrator installs it: with the folder of tmd in its path. This
        Slurm has its configuration elsewhere, and slurmd does not say where."""
        text = (EXAMPLES / name).read_text()
        assert text.count("/usr/local/bin:") == 1
        file = self.folder / name
        body = text.replace("/usr/local/bin:", f"{self.folder}/programs:/usr/local/bin:")
        own = f"export SCAN_SECONDS=1 SLURM_CONF={self.folder}/slurm.conf"
        file.write_text(body.replace("#!/bin/sh", f"#!/bin/sh\n{own}", 1))
        file.chmod(0o755)
        return file

    def reason(self, node: str) -> str:
        return next(n.reason for n in sinfo(self.found) if n.name == node)

    def submitted(self, *options: str) -> str:
        words = ("sbatch", "--parsable", "-o", f"{self.folder}/%j.out", *options)
        return asked(self.found, *words).strip()

    def job(self, number: str) -> dict[str, str]:
        return job_of(self.found, number)


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Checked]:
    """``request.param``: the lines of slurm.conf that name the example."""
    checked = Checked(tmp_path)
    name, lines = request.param
    more = [line.format(checked.example(name)) for line in lines]
    with slurm(tmp_path, ("n1", "n2"), more=more) as found:
        checked.found = found
        yield checked


HEALTH = ("HealthCheckProgram={}", "HealthCheckInterval=1", "HealthCheckNodeState=IDLE")


@pytest.mark.parametrize("nodes", [("health-check", HEALTH)], indirect=True)
def test_slurmd_runs_the_health_check(nodes: Checked) -> None:
    """Without a PATH. The sick node is drained with the code, the other one is not."""
    nodes.finds("n2", 2)
    until(lambda: state(nodes.found, "n2") == "drained", nodes.folder)

    assert nodes.reason("n2") == "tmd scan: exec.own"
    assert state(nodes.found, "n1") == "idle"


@pytest.mark.thorough
@pytest.mark.parametrize("nodes", [("prolog", ("Prolog={}",))], indirect=True)
def test_no_job_begins_on_a_node_that_fails_in_the_prolog(nodes: Checked) -> None:
    """It is held, or cancelled if it may not be put back. On a healthy node jobs begin."""
    nodes.finds("n2", 2)
    well = nodes.submitted("-w", "n1", "--wrap", "echo began")
    held = nodes.submitted("-w", "n2", "--wrap", "echo began")
    until(lambda: nodes.job(held)["Reason"] == "launch_failed_requeued_held", nodes.folder)
    until(lambda: state(nodes.found, "n2") == "drained", nodes.folder)
    reason = nodes.reason("n2")
    scontrol(nodes.found, "update", "NodeName=n2", "State=RESUME")
    cancelled = nodes.submitted("-w", "n2", "--no-requeue", "--wrap", "echo began")
    until(lambda: nodes.job(cancelled)["JobState"] == "CANCELLED", nodes.folder)
    until(lambda: state(nodes.found, "n2") == "drained", nodes.folder)
    nodes.finds("n2", 0)
    scontrol(nodes.found, "update", "NodeName=n2", "State=RESUME")
    healed = nodes.submitted("-w", "n2", "--wrap", "echo began")
    for job in (well, healed):
        until(lambda job=job: nodes.job(job)["JobState"] == "COMPLETED", nodes.folder)
    began = [p.stem for p in nodes.folder.glob("*.out") if "began" in p.read_text()]

    assert reason == "Prolog error"
    assert sorted(began) == sorted([well, healed])

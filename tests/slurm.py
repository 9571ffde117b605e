"""A Slurm on this machine: a real slurmctld, and a real slurmd for each node."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.marks import program
from tmd.core.planning.slurm import SINFO_FORMAT, SlurmNode, nodes_of

EXAMPLES = Path(__file__).parents[1] / "examples" / "slurm"
WITHIN_S = 30.0


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def started(*command: str | Path, log: Path, **environment: str) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*map(str, command)], stdout=out, stderr=out, env={**os.environ, **environment}
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def slurm(
    folder: Path, nodes: Sequence[str], hidden: Sequence[str] = (), more: Sequence[str] = ()
) -> Iterator[dict[str, str]]:
    """The environment in which the commands of Slurm find it. ``hidden``: nodes without a daemon,
    in partitions that are hidden. ``more``: lines of the configuration."""
    for name, package in (("munged", "munge"), ("slurmctld", "slurm-wlm"), ("slurmd", "slurm-wlm")):
        program(name, package)
    munge = folder / "munge"
    munge.mkdir(mode=0o700)
    (munge / "key").write_bytes(os.urandom(64))
    (munge / "key").chmod(0o600)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    control, *ports = free_ports(1 + len(nodes) + len(hidden))
    me, host = getpass.getuser(), socket.gethostname()
    lines = [
        "ClusterName=t",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmUser={me}",
        f"SlurmdUser={me}",
        f"SlurmctldPort={control}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={munge}/socket",
        "CredType=cred/munge",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/control.pid",
        f"SlurmdPidFile={folder}/%n.pid",
        *("ProctrackType=proctrack/pgid", "TaskPlugin=task/none", "SelectType=select/linear"),
        *("ReturnToService=2", "MpiDefault=none"),
        *(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1"
            for name, port in zip((*nodes, *hidden), ports, strict=True)
        ),
        f"PartitionName=all Nodes={','.join(nodes)} Default=YES State=UP",
        f"PartitionName=again Nodes={','.join(nodes)} State=UP",
        *(f"PartitionName=hidden-{name} Nodes={name} State=UP Hidden=YES" for name in hidden),
        *more,
    ]
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    found = {"SLURM_CONF": str(folder / "slurm.conf")}
    own = [f"--{name}={munge}/{name.partition('-')[0]}" for name in ("key-file", "socket")]
    own += [f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"]
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(started("munged", "--foreground", "--force", *own, log=folder / "munged"))
        until(lambda: (munge / "socket").exists(), folder)
        enter(started("slurmctld", "-D", log=folder / "control", **found))
        for name in nodes:
            enter(started("slurmd", "-D", "-N", name, log=folder / name, **found))
        until(lambda: {state(found, name) for name in nodes} == {"idle"}, folder)
        yield found


def until(condition: Any, logs: Path) -> None:
    """Slurm has no event for it, so it is asked again."""
    end = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > end:
            pytest.fail(
                "\n".join(
                    p.read_text(errors="replace") for p in logs.glob("[cnm]*[0-9dl]") if p.is_file()
                )
            )
        time.sleep(0.05)


def sinfo(found: dict[str, str]) -> list[SlurmNode]:
    """All nodes, also hidden ones, by name."""
    done = subprocess.run(
        ["sinfo", "--all", "--Node", "--noheader", "--format", SINFO_FORMAT],
        env={**os.environ, **found},
        capture_output=True,
        text=True,
    )
    return sorted(nodes_of(done.stdout), key=lambda n: n.name)


def state(found: dict[str, str], name: str) -> str:
    return next((n.state for n in sinfo(found) if n.name == name), "")


def scontrol(found: dict[str, str], *arguments: str) -> None:
    asked(found, "scontrol", *arguments)


def asked(found: dict[str, str], *words: str, folder: Path | None = None) -> str:
    """What a command of Slurm prints. ``folder``: where it runs."""
    environment = {**os.environ, **found}
    return subprocess.run(
        words, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def job_of(found: dict[str, str], number: str) -> dict[str, str]:
    """What Slurm shows of a job."""
    words = asked(found, "scontrol", "--oneliner", "show", "job", number).split()
    return dict(word.split("=", 1) for word in words if "=" in word)

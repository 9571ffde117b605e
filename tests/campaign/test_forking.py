"""Workers of a campaign start by fork: a worker that imports torch anew costs seconds of a core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tmd.campaign.forking import fork_server


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tmd.toml"
    path.write_text(
        f'[cluster]\nname = "forking"\nsecret = "{"k" * 32}"\n'
        f'[host]\nname = "h1"\nsocket = "{tmp_path}/tmd.sock"\nstate_dir = "{tmp_path}"\n'
    )
    return path


def launched(config: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` as the only worker of a launcher, all by fork."""
    file = config.with_name("script.py")
    file.write_text(script)
    verb = ("-P", "-m", "tmd.cli", "launch", "--job", "j", "--nnodes", "1", *options)
    with fork_server(compiler=False) as prefix:
        return subprocess.run(
            (*prefix, sys.executable, *verb, "--", str(file)),
            env={**os.environ, "TMD_CONFIG": str(config)},
            capture_output=True,
            text=True,
            timeout=60,
        )


def test_a_launched_worker_inherits_torch(config: Path) -> None:
    """The launcher is tmd's own, and its worker has torch before the script's first line."""
    script = "import os, sys; print('torch' in sys.modules, os.getppid())"
    done = launched(config, script, "--max-restarts", "0")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True "), done.stderr


def test_a_worker_that_ends_removes_nothing_of_its_launcher(config: Path) -> None:
    """The launcher knows by a file in its own folder that a worker has joined."""
    script = "from tmd.joining import mark; mark(); raise RuntimeError"
    done = launched(config, script, "--max-restarts", "2", "--restart-delay", "0")

    ends = [line for line in done.stderr.splitlines() if "worker ended" in line]
    assert len(ends) == 3, done.stderr
    assert all("joined=True" in line or '"joined": true' in line for line in ends), ends

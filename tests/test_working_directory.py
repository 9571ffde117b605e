"""Nothing of ours imports from the working directory, which may belong to somebody else."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tmd.campaign.forking import fork_server
from tmd.demo.cluster import ClusterSpec, LocalCluster
from tmd.testing.plugins import check_import

PROGRAM = Path(sys.executable).with_name("tmd")
NAMES = (
    *("aiohttp", "click", "msgspec", "prometheus_client", "pynvml", "redis", "rich", "structlog"),
    *("tmd", "tmd_detectors", "tmd_policies", "torch", "typer"),
    # The standard library comes after the working directory, too.
    *("argparse", "asyncio", "getpass", "json", "logging", "socket", "sqlite3", "tempfile"),
)
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("TMD_", "PYTHON"))}
PLANTED = """
import os
with open({mark!r}, "a") as mark:
    print({name!r}, file=mark)
os._exit(66)
"""
VERBS = (
    *(("--help",), ("plugins",), ("doctor",), ("status",), ("events",), ("pause",), ("resume",)),
    *(("config", "check"), ("config", "show"), ("detectors", "list"), ("policy", "explain")),
    *(("xid", "list"), ("xid", "explain", "79"), ("scan", "--seconds", "1"), ("drain", "h1")),
    *(("undrain", "h1"), ("set-healthy", "h1"), ("standby", "rehearse", "h1"), ("inject", "a.b")),
    *(("campaign", "--help"), ("demo", "--help"), ("campaign", "list")),
    *(("launch", "--job", "j", "--nnodes", "1", "--max-restarts", "0", "/bin/true"),),
)


class Ground:
    """A folder full of modules that leave a mark when they are imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "theirs"
        self.folder.mkdir()
        self.mark = folder / "imported"
        for name in NAMES:
            text = PLANTED.format(mark=str(self.mark), name=name)
            (self.folder / f"{name}.py").write_text(text)

    def imported(self) -> str:
        return self.mark.read_text() if self.mark.exists() else ""


@pytest.fixture
def ground(tmp_path):
    return Ground(tmp_path)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tmd.toml"
    path.write_text(
        f'[cluster]\nname = "c"\n[redis]\nurl = "unix://{tmp_path}/gone.sock"\n'
        f'[host]\nname = "h1"\nruntime_dir = "{tmp_path}"\nstate_dir = "{tmp_path}/state"\n'
    )
    return path


def start(ground, config, *arguments):
    return subprocess.Popen(
        [str(a) for a in arguments],
        cwd=ground.folder,
        env={**ENVIRONMENT, "TMD_CONFIG": str(config), "TMD_CLUSTER__SECRET": "s" * 32},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(ground, config, *arguments):
    with start(ground, config, *arguments) as process:
        try:
            out, error = process.communicate(timeout=60)
        finally:
            process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, out, error)


def test_the_trap_works(ground, config):
    """Python itself, asked without ``-P``, does import what is planted."""
    done = run(ground, config, sys.executable, "-m", "tmd.cli", "--version")

    assert done.returncode == 66
    assert ground.imported() == "tmd\n"


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_no_verb_imports_from_the_working_directory(ground, config, verb):
    done = run(ground, config, PROGRAM, *verb)

    assert ground.imported() == ""
    assert done.returncode in (0, 1, 2), done.stderr


def test_the_module_does_not_either_as_its_documentation_says(ground, config):
    done = run(ground, config, sys.executable, "-P", "-m", "tmd.cli", "plugins")

    assert ground.imported() == ""
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", ["tmd daemon", "tmd-daemon"])
def test_the_daemon_and_its_detectors_do_not(ground, config, program, tmp_path):
    """It runs until a check of the exec detector has: then a child of a child was started."""
    fifo = tmp_path / "ran"
    os.mkfifo(fifo)
    with config.open("a") as file:
        check = f'{{name = "c", command = ["/bin/sh", "-c", "echo > {fifo}"]}}'
        file.write(f"[detectors.exec]\nchecks = [{check}]\n")
    name, *verb = program.split()
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    daemon = start(ground, config, PROGRAM.with_name(name), *verb)
    ended = os.pidfd_open(daemon.pid)
    try:
        ran, _, _ = select.select([reading, ended], [], [], 60)
    finally:
        os.close(reading)
        os.close(ended)
        daemon.terminate()
        _, said = daemon.communicate(timeout=20)

    assert ran == [reading], said
    assert ground.imported() == ""
    assert daemon.returncode == 0, said


async def test_the_processes_of_a_demo_do_not(ground, redis_url, tmp_path, monkeypatch):
    """Its daemons and launchers."""
    monkeypatch.chdir(ground.folder)
    (tmp_path / "script.py").write_text("")
    script = (str(tmp_path / "script.py"),)
    spec = ClusterSpec(tmp_path / "cluster", redis_url, "planted", ("h1",), (), script)
    async with LocalCluster(spec) as cluster:
        code = await cluster.launchers["h1"].wait()
        await cluster.until(lambda view: view.host("h1") is not None, "h1 is heard", 30)

    assert ground.imported() == ""
    assert code == 0, cluster.log("h1")


def test_the_fork_server_of_a_campaign_does_not(ground, config, monkeypatch):
    """Nor what it starts."""
    monkeypatch.chdir(ground.folder)
    verb = (sys.executable, "-P", "-m", "tmd.cli", "launch", "--help")
    with fork_server(compiler=False) as prefix:
        done = run(ground, config, *prefix, *verb)

    assert ground.imported() == ""
    assert "Start this host's workers" in done.stdout


def test_the_check_of_a_plug_in_does_not(ground, monkeypatch):
    monkeypatch.chdir(ground.folder)

    (point,) = entry_points(group="tmd.detectors", name="exec")
    check_import(point)

    assert ground.imported() == ""


@pytest.mark.parametrize("way", ["file", "module"])
def test_a_training_script_finds_what_lies_beside_it(config, tmp_path, way):
    """Users' programs are started as ever: ours is not to change where they import from."""
    folder = tmp_path / "training"
    folder.mkdir()
    (folder / "beside.py").write_text("FOUND = 'beside'")
    (folder / "script.py").write_text(
        "import sys, beside; print(beside.FOUND, sys.flags.safe_path)"
    )
    command = (str(folder / "script.py"),) if way == "file" else ("-m", "script")
    done = subprocess.run(
        [PROGRAM, "launch", "--job", "j", "--nnodes", "1", "--max-restarts", "0", "--", *command],
        cwd=tmp_path if way == "file" else folder,
        env={**ENVIRONMENT, "TMD_CONFIG": str(config)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.stdout == "beside False\n", done.stderr
    assert done.returncode == 0

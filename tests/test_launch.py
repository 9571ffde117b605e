"""``tmd launch`` as a process: exit status, restarts, and that nobody is left behind."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CONFIG = """\
[host]
name = "h1"
runtime_dir = "{folder}"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "tmd.toml"
    file.write_text(CONFIG.format(folder=tmp_path))
    return file


class Started:
    """A launcher and the pipe on which its worker says its pid."""

    def __init__(self, config: Path, script: str, *options: str) -> None:
        file = config.with_name("script.py")
        file.write_text(script)
        self.process = subprocess.Popen(
            (
                *(sys.executable, "-m", "tmd.cli", "launch", "-c", str(config)),
                *("--job", "j", "--nnodes", "1", *options, "--", str(file)),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def line(self) -> str:
        """The next line that a worker prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def said(self) -> list[str]:
        """All that is still printed, once everything has ended."""
        return self.process.communicate(timeout=60)[0].splitlines()


@pytest.fixture
def launch(config: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def start(script: str, *options: str) -> Started:
        started.append(Started(config, script, *options))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


WAITING = "import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()\n"


def ended(pid: int) -> None:
    """Return once ``pid`` is gone; it is no child of ours, so ask for its pidfd."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    readable, _, _ = select.select([handle], [], [], 30)
    os.close(handle)
    assert readable


def test_a_script_that_succeeds_is_success(launch: Callable[..., Started]) -> None:
    """Also without a daemon: the launcher goes on trying to reach one."""
    started = launch("print('done', flush=True)")

    assert started.said() == ["done"]
    assert started.process.returncode == 0


def test_a_script_that_fails_is_started_again_so_often(launch: Callable[..., Started]) -> None:
    """The last status is the launcher's."""
    script = "import os, sys\nprint(os.environ['TMD_RESTARTS'], flush=True)\nsys.exit(7)"
    started = launch(script, "--max-restarts", "2")

    assert started.said() == ["0", "1", "2"]
    assert started.process.returncode == 7


def test_the_script_finds_its_environment(launch: Callable[..., Started]) -> None:
    """Names and sizes as torchrun gives them, and where the daemon is."""
    names = ("TMD_JOB", "TMD_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    script = f"import os\nprint(*(os.environ[n] for n in {names}))"
    started = launch(script, "--nproc-per-node", "1")

    assert started.said() == ["j 1 0 1 1"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_launcher(number: int, launch: Callable[..., Started]) -> None:
    """In an orderly way, or by the kernel's hand if the launcher is killed."""
    started = launch(WAITING)
    worker = int(started.line())
    started.process.send_signal(number)
    started.process.wait(60)
    ended(worker)

    assert started.process.returncode == (-9 if number == signal.SIGKILL else 128 + number)


def test_a_worker_that_ignores_sigterm_is_killed(launch: Callable[..., Started]) -> None:
    """A second signal does not wait for the end of the grace."""
    script = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITING
    started = launch(script)
    worker = int(started.line())
    started.process.terminate()
    started.process.terminate()
    started.process.wait(60)
    ended(worker)

    assert started.process.returncode == 128 + signal.SIGTERM

"""``tmd launch`` as a process: exit status, restarts, and that nobody is left behind."""

import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tmd import wire
from tmd.cli.script_last import marked
from tmd.joining import Joining, mark
from tmd.launcher import Launcher, LaunchSpec

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

    def __init__(
        self,
        config: Path,
        script: str,
        *options: str,
        command: tuple[str, ...] = (),
        says: bool = False,
    ) -> None:
        """``command`` replaces the script; with ``says`` its own words are read with the output."""
        file = config.with_name("script.py")
        file.write_text(script)
        self.process = subprocess.Popen(
            (
                *(sys.executable, "-m", "tmd.cli", "launch", "-c", str(config)),
                *("--job", "j", "--nnodes", "1", *options, "--", *(command or (str(file),))),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if says else subprocess.DEVNULL,
            text=True,
        )

    def line(self) -> str:
        """The next line that a worker prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def until(self, words: str) -> str:
        """The first line with ``words``; all that came if there is none."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"{words!r} is not in:\n{''.join(lines)}")

    def output(self) -> list[str]:
        """All that is still printed, once everything has ended."""
        return self.process.communicate(timeout=60)[0].splitlines()


@pytest.fixture
def launch(config: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def start(
        script: str, *options: str, command: tuple[str, ...] = (), says: bool = False
    ) -> Started:
        started.append(Started(config, script, *options, command=command, says=says))
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

    assert started.output() == ["done"]
    assert started.process.returncode == 0


def test_a_script_that_fails_is_started_again_so_often(launch: Callable[..., Started]) -> None:
    """The last status is the launcher's."""
    script = "import os, sys\nprint(os.environ['TMD_RESTARTS'], flush=True)\nsys.exit(7)"
    started = launch(script, "--max-restarts", "2")

    assert started.output() == ["0", "1", "2"]
    assert started.process.returncode == 7


TORCHRUN = {
    "RANK": "3",
    "ROLE_RANK": "3",
    "WORLD_SIZE": "4",
    "ROLE_WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "3",
    "GROUP_WORLD_SIZE": "4",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "j",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "OMP_NUM_THREADS": "1",
}
"""Of the only worker of a host, in a job of four hosts, before it joins."""


def test_the_script_finds_what_torchrun_sets(launch: Callable[..., Started]) -> None:
    """Its rank is not known yet: it is that of a standby, the last one."""
    names = (*TORCHRUN, "TMD_JOB", "TMD_WORLD_SIZE")
    script = f"import os\nfor n in {names}: print(n, os.environ[n], flush=True)"
    started = launch(script, "--nnodes", "4")

    assert dict(line.split() for line in started.output()) == {
        **TORCHRUN,
        "TMD_JOB": "j",
        "TMD_WORLD_SIZE": "4",
    }


def test_an_environment_from_outside_does_not_shine_through(
    launch: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher may itself have been started by another one."""
    monkeypatch.setenv("RANK", "17")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    names = ("RANK", "TORCHELASTIC_USE_AGENT_STORE")
    started = launch(f"import os\nprint(*(os.environ.get(n) for n in {names}))")

    assert started.output() == ["0 None"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_workers_end_with_their_launcher(number: int, launch: Callable[..., Started]) -> None:
    """In an orderly way, or by the kernel's hand if the launcher is killed."""
    started = launch(WAITING)
    worker = int(started.line())
    started.process.send_signal(number)
    started.process.wait(60)
    ended(worker)

    assert started.process.returncode == (-9 if number == signal.SIGKILL else 128 + number)


SAVING = (
    "import signal, sys, time\n"
    "def save(*_):\n"
    "    print('saves', flush=True)\n"
    "    time.sleep(1)\n"
    "    print('saved', flush=True)\n"
    "    sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, save)\n"
) + WAITING


@pytest.mark.parametrize("grace", ["0", "60"])
def test_an_operator_says_how_long_a_worker_may_save(
    grace: str, launch: Callable[..., Started]
) -> None:
    started = launch(SAVING, "--grace", grace)
    started.line()
    started.process.terminate()

    assert ("saved" in started.output()) == (grace == "60")
    assert started.process.wait(60) == 128 + signal.SIGTERM


def test_a_terminal_that_closes_leaves_workers_their_time(launch: Callable[..., Started]) -> None:
    """The shell and the kernel send a SIGHUP each."""
    started = launch(SAVING)
    started.line()
    started.process.send_signal(signal.SIGHUP)
    saves = started.line()
    started.process.send_signal(signal.SIGHUP)
    saved = started.output()

    assert (saves, saved) == ("saves", ["saved"])
    assert started.process.wait(60) == 128 + signal.SIGHUP


def test_a_launcher_under_nohup_outlives_its_terminal(launch: Callable[..., Started]) -> None:
    script = "import signal\nprint(signal.getsignal(signal.SIGHUP).name, flush=True)\n" + WAITING
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        started = launch(script)
    finally:
        signal.signal(signal.SIGHUP, before)
    ignored, worker = started.line(), int(started.line())
    started.process.send_signal(signal.SIGHUP)
    started.process.terminate()
    started.process.wait(60)
    ended(worker)

    assert ignored == "SIG_IGN"
    assert started.process.returncode == 128 + signal.SIGTERM


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


def test_a_worker_that_saves_its_state_at_sigterm_has_not_ended_training(
    config: Path, launch: Callable[..., Started]
) -> None:
    """With status 0 the job would end on all other hosts. Its launcher was stopped, as when a pod
    is evicted."""
    script = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + WAITING
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(config.with_name("tmd.sock")))
        door.listen()
        started = launch(script)
        daemon, _ = door.accept()
        started.line()
        started.process.terminate()
    said = []
    with daemon, daemon.makefile("rb") as frames:
        while header := frames.read(wire.HEADER_SIZE):
            said.append(wire.decode(frames.read(wire.body_size(header))))
    exits = [(m.exit.code, m.exit.stopped) for m in said if isinstance(m, wire.Exited)]

    assert started.process.wait(60) == 128 + signal.SIGTERM
    assert exits == [(-signal.SIGTERM, True)]


# --- what cannot be started, and what does not join -----------------------------------------------


def launched(
    config: Path, *command: str, options: tuple[str, ...] = (), end: tuple[str, ...] = ("--",)
) -> tuple[int, str, str]:
    """Exit status, and what a launcher and its workers print. ``end``: ends its own options."""
    done = subprocess.run(
        (
            *(sys.executable, "-m", "tmd.cli", "launch", "-c", str(config)),
            *("--job", "j", "--nnodes", "1", *options, *end, *command),
        ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=config.parent,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("end", [(), ("--",)], ids=["as it is", "marked"])
def test_options_after_the_script_are_its_own(config: Path, end: tuple[str, ...]) -> None:
    """Also one that the launcher has as well, and one that it would refuse."""
    config.with_name("own.py").write_text("import sys; print(sys.argv[1:])")
    options = ("--epochs", "3", "--job", "mine", "-v")
    status, output, _ = launched(config, "own.py", *options, end=end)

    assert (status, output) == (0, f"{list(options)}\n")


@pytest.mark.parametrize(
    "command", [("missing.py",), ("-m", "missing"), ("./tmd.toml",)], ids=["file", "module", "mode"]
)
def test_a_command_that_is_not_there_is_refused_at_once(
    config: Path, command: tuple[str, ...]
) -> None:
    """Exit status 2 and one line, before any worker is started."""
    status, output, errors = launched(config, *command)

    assert status == 2
    assert output == ""
    assert errors.startswith("tmd launch: ")
    assert errors.count("\n") == 1
    assert command[-1].strip("./") in errors


def test_a_host_without_a_daemon_is_named_at_once(config: Path) -> None:
    """The workers wait for one, and say so only in their own logs."""
    status, _, errors = launched(config, "/bin/true")

    assert status == 0
    assert errors.count("no daemon answers") == 1
    assert "start 'tmd daemon'" in errors


class Dialling(Launcher):
    """Counts the attempts that find no daemon."""

    def __init__(self, spec: LaunchSpec) -> None:
        super().__init__(spec)
        self.missed = threading.Semaphore(0)

    def _dial(self) -> None:
        super()._dial()
        if self._daemon is None:
            self.missed.release()


def test_a_daemon_that_is_restarted_at_the_end_still_learns_of_the_exits(tmp_path: Path) -> None:
    """Nobody else knows them. It comes back only when the launcher has looked for it in vain."""
    path, mark = tmp_path / "tmd.sock", tmp_path / "pid"
    script = (
        f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid()))\n"
        f"while os.path.exists({str(path)!r}): time.sleep(0.05)"
    )
    spec = LaunchSpec(
        *("j", "h1", path, "127.0.0.1", 1, 1), (sys.executable, "-c", script), max_restarts=0
    )
    launcher = Dialling(spec)
    said: list[wire.Message] = []

    def restart() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(str(path))
            door.listen()
            door.accept()[0].close()
            while not (mark.exists() and mark.read_text()):
                door.accept()[0].close()
        path.unlink()
        ended(int(mark.read_text()))
        while launcher.missed.acquire(blocking=False):
            pass
        for _ in range(3):  # one may have begun before, and one follows in any case
            launcher.missed.acquire()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(str(path))
            door.listen()
            while not any(isinstance(m, wire.Exited) for m in said):
                daemon, _ = door.accept()
                with daemon, daemon.makefile("rb") as frames:
                    while header := frames.read(wire.HEADER_SIZE):
                        said.append(wire.decode(frames.read(wire.body_size(header))))

    daemon = threading.Thread(target=restart, daemon=True)
    daemon.start()
    status = launcher.run()
    daemon.join(10)

    assert status == 0
    assert [m.exit.code for m in said if isinstance(m, wire.Exited)] == [0]


def test_a_daemon_that_rejects_the_launcher_is_named_once(config: Path) -> None:
    """It is asked twice a second, perhaps for days."""
    attempts = []

    def reject(door: socket.socket) -> None:
        with suppress(OSError):  # once the door is shut
            while True:
                client, _ = door.accept()
                if len(attempts) == 4:
                    config.with_name("enough").touch()
                with client:
                    size = wire.body_size(client.recv(wire.HEADER_SIZE, socket.MSG_WAITALL))
                    attempts.append(wire.decode(client.recv(size, socket.MSG_WAITALL)))
                    client.sendall(wire.encode(wire.Rejected("no such user")))

    wait = f"import os, time\nwhile not os.path.exists({str(config.with_name('enough'))!r}):"
    config.with_name("wait.py").write_text(f"{wait}\n    time.sleep(0.05)\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(config.with_name("tmd.sock")))
        door.listen()
        serving = threading.Thread(target=reject, args=(door,), daemon=True)
        serving.start()
        status, _, errors = launched(config, "wait.py")
        door.shutdown(socket.SHUT_RDWR)
        serving.join(10)

    assert status == 0
    assert errors.count("rejected by the daemon, workers continue") == 1
    assert errors.count("no such user") == 1


@pytest.mark.parametrize("option", ["--log-dir", "--trace"])
def test_a_folder_that_cannot_be_made_is_named_and_not_the_program(
    config: Path, option: str
) -> None:
    folder = config / "inside-a-file"
    status, _, errors = launched(config, "/bin/true", options=(option, str(folder)))

    assert status == 2
    assert f"{option} {folder}: Not a directory; name another folder\n" in errors


def test_a_command_that_the_system_refuses_is_named(config: Path) -> None:
    """Executable, but no program: only the start shows that."""
    program = config.with_name("nonsense")
    program.write_bytes(b"\x00\x01\x02")
    program.chmod(0o755)

    status, _, errors = launched(config, str(program))

    assert status == 2
    assert f"tmd launch: cannot start {program}: [Errno" in errors


@pytest.mark.parametrize("end", [(), ("--",)], ids=["as it is", "marked"])
def test_a_module_is_run_as_torchrun_runs_it(config: Path, end: tuple[str, ...]) -> None:
    """Its options are its own, also one that the launcher has as well, and another -m."""
    config.with_name("training.py").write_text("import sys\nprint(sys.argv[1:], flush=True)")
    options = ("--lr", "1", "--job", "mine", "-m", "small")

    status, output, _ = launched(config, "-m", "training", *options, end=end)

    assert (status, output) == (0, f"{list(options)}\n")


def test_a_module_may_follow_any_option_of_the_launcher() -> None:
    """One with a value, with its value attached, and without one. What follows a script is its."""
    names = {"--trace", "-c"}

    assert marked(["-c", "-m", "--auto", "-m", "a"], names) == [
        "-c",
        "-m",
        "--auto",
        "--",
        "-m",
        "a",
    ]
    assert marked(["--trace=t", "-m", "a"], names) == ["--trace=t", "--", "-m", "a"]
    for args in (["-c", "x", "a.py", "-m", "b"], ["--", "-m", "a"], ["--trace", "t"]):
        assert marked(args, names) == args


def test_a_script_that_never_joins_is_told_so(config: Path) -> None:
    """It may have trained well, but nothing was protected."""
    config.with_name("alone.py").write_text("")

    status, _, errors = launched(config, "alone.py")

    assert status == 0
    assert "the script ended without a call of tmd.trainer.join()" in errors


def test_a_script_that_fails_before_it_joins_is_said_to(config: Path) -> None:
    """How often it is tried again and when, and at last that it is not."""
    config.with_name("wrong.py").write_text("import nothing_of_the_kind")

    status, _, errors = launched(
        config, "wrong.py", options=("--max-restarts=1", "--restart-delay=0")
    )

    assert status == 1
    again, never = (line for line in errors.splitlines() if " restart" in line)
    assert "restarting the worker" in again
    assert "the script failed before it called tmd.trainer.join()" in again
    assert "1.0" in again
    assert "not restarted: --max-restarts is used up" in never


@pytest.mark.parametrize(("steady_s", "pauses"), [(0.0, [0.01] * 3), (60.0, [0.01, 0.02, 0.04])])
def test_the_pause_is_short_again_after_a_worker_that_was_long_in_the_job(
    tmp_path: Path, steady_s: float, pauses: list[float]
) -> None:
    script = "from tmd.joining import mark; mark(); raise SystemExit(1)"
    spec = LaunchSpec(
        *("j", "h1", tmp_path / "none.sock", "127.0.0.1", 1, 1),
        command=(sys.executable, "-c", script),
        max_restarts=3,
        restart_delay_s=0.01,
        steady_s=steady_s,
    )
    with capture_logs() as lines:
        status = Launcher(spec).run()

    assert status == 1
    assert [line["in_s"] for line in lines if line["event"] == "restarting the worker"] == pauses


# --- a restart that the operating system refuses --------------------------------------------------


HEALTHY = """
import os
if os.environ["LOCAL_RANK"] == "0":
    with open({fifo!r}) as fifo:
        fifo.read()
    open({witness!r}, "w").close()
"""
"""Slot 0 ends well once somebody has opened and closed the other end of the fifo."""


def test_a_restart_that_is_refused_is_tried_again(
    config: Path, launch: Callable[..., Started]
) -> None:
    """The log cannot be opened for a while. The worker beside it stays alive."""
    folder, fifo, witness = (config.with_name(name) for name in ("logs", "fifo", "witness"))
    os.mkfifo(fifo)
    fails_once = f"""
elif os.environ["TMD_RESTARTS"] == "0":
    os.rename({str(folder)!r}, {str(folder)!r} + ".away")
    open({str(folder)!r}, "w").close()
    os._exit(7)
else:
    open({str(fifo)!r}, "w").close()
"""
    started = launch(
        HEALTHY.format(fifo=str(fifo), witness=str(witness)) + fails_once,
        *("--nproc-per-node", "2", "--max-restarts", "6", "--log-dir", str(folder)),
        says=True,
    )
    refused = started.until("a worker cannot be restarted")
    folder.unlink()
    started.output()

    assert str(folder) in refused
    assert witness.exists()
    assert started.process.returncode == 0


def test_restarts_that_are_refused_are_counted(
    config: Path, launch: Callable[..., Started]
) -> None:
    """The worker beside it ends well; the exit status is that of a command that cannot start."""
    names = ("program", "fifo", "ready", "witness")
    program, fifo, ready, witness = (config.with_name(name) for name in names)
    os.mkfifo(fifo)
    os.mkfifo(ready)
    # The program must not vanish before the other worker's interpreter has read it.
    meet = (
        "import os\n"
        f"open({str(ready)!r}, 'w' if os.environ['LOCAL_RANK'] == '0' else 'r').close()\n"
    )
    vanishes = f"else:\n    os.unlink({str(program)!r})\n    os._exit(7)\n"
    healthy = HEALTHY.format(fifo=str(fifo), witness=str(witness))
    program.write_text(f"#!{sys.executable}\n{meet}{healthy}{vanishes}")
    program.chmod(0o755)
    started = launch(
        "", "--nproc-per-node", "2", "--max-restarts", "1", command=(str(program),), says=True
    )
    refused = started.until("not restarted: --max-restarts is used up")
    fifo.open("w").close()
    started.output()

    assert f"cannot start {program}: [Errno 2]" in refused
    assert witness.exists()
    assert started.process.returncode == 2


def test_a_worker_that_was_seen_to_join_stays_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mark is a file in a folder that is cleaned up after days."""
    joining = Joining(str(tmp_path))
    for name, value in joining.variables("h1/j/0.a").items():
        monkeypatch.setenv(name, value)
    before = joining.has("h1/j/0.a")
    mark()
    marked = joining.has("h1/j/0.a")
    for file in tmp_path.iterdir():
        file.unlink()

    assert (before, marked) == (False, True)
    assert joining.has("h1/j/0.a")
    assert not joining.has("h1/j/1.b")


def test_a_launcher_remembers_who_has_joined(config: Path, launch: Callable[..., Started]) -> None:
    """A turn of its loop sees the mark. What becomes of the file after that does not matter."""
    fifo = config.with_name("fifo")
    os.mkfifo(fifo)
    script = f"""
import os
from tmd.joining import VARIABLE, mark
mark()
print("mark", os.environ[VARIABLE], flush=True)
open({str(fifo)!r}).read()
"""
    started = launch(script, says=True)
    file = Path(started.until("mark ").split()[-1])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(config.with_name("tmd.sock")))
        door.listen()
        daemon, _ = door.accept()
    with daemon:
        # The second one is read in a later turn than the first one.
        for text in ("one", "two"):
            daemon.sendall(wire.encode(wire.LauncherNotice("w", f"turn {text}")))
            started.until(f"turn {text}")
        file.unlink()
        fifo.open("w").close()
        ended = started.until("worker ended")

    assert "joined=True" in ended


# --- the process group of a worker ----------------------------------------------------------------


WRAPPED = """#!/bin/sh
echo worker $TMD_WORKER
{python} -c 'import os, signal; print(os.getpid(), flush=True); signal.pause()'
echo done
"""
"""A shell script that starts the training process as a child of its own."""


@pytest.fixture
def wrapper(config: Path) -> str:
    program = config.with_name("run.sh")
    program.write_text(WRAPPED.format(python=sys.executable))
    program.chmod(0o755)
    return str(program)


def outlives(pid: int, seconds: float = 30.0) -> bool:
    """Whether ``pid`` still runs after ``seconds``; if so it is killed, since nobody else will."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    runs = not select.select([handle], [], [], seconds)[0]
    if runs:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.close(handle)
    return runs


def test_a_training_process_ends_with_the_shell_that_started_it(
    launch: Callable[..., Started], wrapper: str
) -> None:
    """The shell ends at SIGTERM and tells nobody."""
    started = launch("", command=(wrapper,))
    started.until("worker ")
    training = int(started.line())
    started.process.terminate()
    started.process.wait(60)

    assert not outlives(training)
    assert started.process.returncode == 128 + signal.SIGTERM


def test_a_kill_reaches_the_training_process_behind_a_shell(
    config: Path, launch: Callable[..., Started], wrapper: str
) -> None:
    """Else the slot would be started again beside it, on the same device."""
    started = launch("", "--max-restarts", "0", command=(wrapper,))
    worker = started.until("worker ").split()[-1]
    training = int(started.line())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(config.with_name("tmd.sock")))
        door.listen()
        daemon, _ = door.accept()
    with daemon:
        daemon.sendall(wire.encode(wire.Kill(worker, "it hangs")))
        while daemon.recv(1 << 16):
            pass
    started.process.wait(60)

    assert not outlives(training)
    assert started.process.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize(("status", "stays"), [(0, True), (7, False)], ids=["well", "failed"])
def test_what_a_worker_leaves_behind_ends_only_if_it_failed(
    config: Path, launch: Callable[..., Started], status: int, stays: bool
) -> None:
    """An upload in the background may outlive a script that has ended well."""
    fifo = config.with_name("fifo")
    os.mkfifo(fifo)
    script = f"""
import os, signal, sys
if os.fork() == 0:
    print(os.getpid(), flush=True)
    open({str(fifo)!r}, "w").close()
    signal.pause()
open({str(fifo)!r}).read()
os._exit({status})
"""
    started = launch(script, "--max-restarts", "0")
    left = int(started.line())
    started.process.wait(60)

    assert outlives(left, 0.0 if stays else 30.0) == stays
    assert started.process.returncode == status


def test_a_worker_that_does_not_die_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may hold it for minutes after SIGKILL, and the launcher must not spin meanwhile."""
    waits: list[float | None] = []
    kills: list[int] = []
    send = signal.pidfd_send_signal

    class Watched(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[Any]:
            if kills:
                waits.append(timeout)
            return super().select(timeout)

    def held(pidfd: int, number: int) -> None:
        """As if the first two SIGKILLs met a process that cannot take them yet."""
        kills.extend([number] * (number == signal.SIGKILL))
        if number != signal.SIGKILL or len(kills) > 2:
            send(pidfd, number)

    monkeypatch.setattr(selectors, "DefaultSelector", Watched)
    monkeypatch.setattr(signal, "pidfd_send_signal", held)
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    stubborn = (
        "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    )
    spec = LaunchSpec(
        *("j", "h1", tmp_path / "none.sock", "127.0.0.1", 1, 1),
        command=(sys.executable, "-c", stubborn),
        max_restarts=0,
        grace_s=0.0,
    )

    assert Launcher(spec).run() == 128 + signal.SIGTERM
    assert len(kills) >= 3
    assert waits.count(0.0) < 2  # one deadline may have passed just then

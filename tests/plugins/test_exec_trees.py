"""Checks that leave processes behind: real ones, each held by a pidfd before it must end."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress

import pytest
from tmd_detectors.exec import warden
from tmd_detectors.exec.detector import END_S, CheckHealth, CheckRunner, ExecCheck

from tmd.daemon.detector_run import STOP_S

WITHIN_S = 60.0

REPORTS = """
import os, signal, sys, time
fifo = os.open(sys.argv[1], os.O_WRONLY)
def report(pid):
    os.write(fifo, b"%d\\n" % pid)
def stay():
    report(os.getpid())
    while True:
        signal.pause()
def child(do):
    if os.fork() == 0:
        try:
            do()
        finally:
            os._exit(1)
report(os.getppid())
"""
TREES = {
    "a child": "child(stay); stay()",
    "a session of its own": "child(lambda: (os.setsid(), stay())); stay()",
    "a double fork": "child(lambda: child(lambda: (os.setsid(), child(stay)))); stay()",
    "an end that leaves them": """
child(lambda: child(lambda: (os.setsid(), stay())))
child(stay)
os._exit(0)
""",
    "deaf to signals": """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
child(lambda: (os.setsid(), stay()))
stay()
""",
    "stopped": """
child(lambda: (os.setsid(), report(os.getpid()), os.kill(os.getpid(), signal.SIGSTOP)))
stay()
""",
    "a flood": """
def flood():
    while True:
        child(lambda: (os.setsid(), stay()))
        time.sleep(0.001)
child(flood)
child(lambda: (os.setsid(), flood()))
stay()
""",
}
SEEN = {"a flood": 40}
"""Least number of processes; two if not listed."""


class Watch:
    """The processes that report through a fifo, held by pidfds."""

    def __init__(self, folder, stack):
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)
        # Open for both ends, so that writers may come and go.
        self._fd = os.open(self.fifo, os.O_RDWR | os.O_NONBLOCK)
        self._stack = stack
        stack.callback(os.close, self._fd)
        self.alive = {}
        self._rest = b""

    def command(self, tree):
        return (sys.executable, "-S", "-c", REPORTS + TREES[tree], str(self.fifo))

    def take(self):
        """Open pidfds of the processes that have reported."""
        with suppress(BlockingIOError):
            while chunk := os.read(self._fd, 65536):
                self._rest += chunk
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if int(line) == os.getpid():
                continue  # without a warden: the test must not kill itself
            with suppress(ProcessLookupError):
                fd = os.pidfd_open(int(line))
                self._stack.callback(os.close, fd)
                self._stack.callback(_kill, fd)
                self.alive[int(line)] = fd
        return len(self.alive)

    async def until(self, number):
        """Wait until ``number`` of them and the warden are alive at once."""
        reported = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._fd, reported.set)
        try:
            async with asyncio.timeout(WITHIN_S):
                while self.take() < number + 1:
                    await reported.wait()
                    reported.clear()
        finally:
            loop.remove_reader(self._fd)

    def left(self):
        """Those that have not ended in time, each with its state."""
        self.take()
        return [
            (pid, _state(pid))
            for pid, fd in self.alive.items()
            if not select.select([fd], [], [], WITHIN_S)[0]
        ]


def _kill(fd):
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(fd, signal.SIGKILL)


def _state(pid):
    with suppress(OSError), open(f"/proc/{pid}/status") as file:
        return file.read(200)
    return "gone"


@pytest.fixture
def watch(tmp_path):
    with ExitStack() as stack:
        yield Watch(tmp_path, stack)


@pytest.fixture
def stranger():
    """A foreign process, a child of the same parent as the check's warden."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("tree", TREES)
async def test_a_stopped_check_leaves_no_process(tree, watch, stranger):
    check = ExecCheck(name="mine", command=watch.command(tree), timeout_s=1000)
    running = asyncio.create_task(CheckRunner(check, 1000).run())
    await watch.until(SEEN.get(tree, 2))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert watch.left() == []
    assert stranger.poll() is None
    assert [_state(pid) for pid in watch.alive if _state(pid) != "gone"] == []  # nor a zombie


@pytest.mark.parametrize("tree", ["a session of its own", "a double fork", "a flood"])
async def test_a_late_check_leaves_no_process(tree, watch, stranger):
    late = asyncio.create_task(
        CheckRunner(ExecCheck("mine", watch.command(tree), timeout_s=2.0), 1000).run()
    )
    await watch.until(2)
    outcome = await late

    assert outcome.health is CheckHealth.UNKNOWN
    assert outcome.message == "ran for more than 2 s"
    assert watch.left() == []
    assert stranger.poll() is None


async def test_a_finished_check_leaves_no_process(watch):
    """A daemon that it has started, with its own pipes, ends with the check, too."""
    left = "child(lambda: (os.setsid(), os.close(1), stay()))"
    ends = f"{left}\nopen(sys.argv[1] + '.go').readline()\nos._exit(0)"
    os.mkfifo(f"{watch.fifo}.go")
    command = (sys.executable, "-S", "-c", REPORTS + ends, str(watch.fifo))
    running = asyncio.create_task(CheckRunner(ExecCheck("mine", command), 1000).run())
    await watch.until(1)
    go = os.open(f"{watch.fifo}.go", os.O_RDWR)
    os.write(go, b"go\n")
    outcome = await running
    os.close(go)

    assert outcome.health is CheckHealth.HEALTHY
    assert watch.left() == []


DAEMON = """
import asyncio, sys
from tmd_detectors.exec.detector import CheckRunner, ExecCheck
asyncio.run(CheckRunner(ExecCheck("mine", tuple(sys.argv[1:]), timeout_s=1000.0), 1000).run())
"""


@pytest.fixture
def daemon(watch):
    """Starts processes that run a check; killed by the test, or after it."""
    started = []

    def start(tree):
        command = [sys.executable, "-c", DAEMON, *watch.command(tree)]
        started.append(subprocess.Popen(command))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("tree", ["a session of its own", "a double fork", "deaf to signals"])
async def test_a_killed_daemon_leaves_no_check_running(tree, watch, daemon, stranger):
    process = daemon(tree)
    await watch.until(2)
    process.kill()

    assert watch.left() == []
    assert stranger.poll() is None


async def test_a_check_whose_warden_is_killed_is_no_finding_about_the_host(watch):
    command = (sys.executable, "-S", "-c", REPORTS + "stay()", str(watch.fifo))
    running = asyncio.create_task(CheckRunner(ExecCheck("mine", command), 1000).run())
    await watch.until(1)
    os.kill(next(iter(watch.alive)), signal.SIGKILL)
    outcome = await running

    why = "its warden ended without a status, perhaps killed"
    assert outcome == type(outcome)(CheckHealth.UNKNOWN, why)
    assert watch.left() == []


REFUSED = """
import ctypes, errno, os, signal, sys
from tmd_detectors.exec import warden

def refused(*_):
    raise OSError(getattr(errno, sys.argv[2]), "refused")

owner = getattr(sys.modules[sys.argv[1]], "__dict__")
owner[sys.argv[3]] = refused
reader, writer = os.pipe()
if os.fork() == 0:
    ctypes.CDLL(None).prctl(warden.DEATH_SIGNAL, signal.SIGKILL)
    os.setsid()
    os.write(writer, b"1")
    signal.pause()
os.read(reader, 1)
warden.end()
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("nothing is left")
"""


@pytest.mark.parametrize("error", ["ENOSYS", "EPERM", "EMFILE"])
@pytest.mark.parametrize(
    ("module", "call"), [("os", "pidfd_open"), ("signal", "pidfd_send_signal")]
)
def test_a_tree_is_killed_where_pidfds_are_refused(module, call, error):
    """Refused by an old kernel, a system call filter, or a limit."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, module, error, call],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )

    assert (done.stdout, done.stderr) == ("nothing is left\n", "")


def test_a_tree_is_killed_although_proc_is_unreadable_at_first():
    """The system may lack file descriptors for a moment."""
    once = """
import os
from tmd_detectors.exec import warden
listdir = os.listdir
def refused(path):
    os.listdir = listdir
    raise OSError(23, "refused")
os.listdir = refused
"""
    done = subprocess.run(
        [sys.executable, "-c", once + REFUSED, "os", "ENOSYS", "pidfd_open"],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )

    assert (done.stdout, done.stderr) == ("nothing is left\n", "")


UNKILLABLE = """
import os, signal, sys
from tmd_detectors.exec import warden

def refused(*_):
    raise OSError(1, "refused")

signal.pidfd_send_signal = os.kill = refused
turns = []

def turn(seconds):
    turns.append(seconds)
    if turns == [warden.SLOW_TURN_S] * 3:
        os.close(writer)

warden.time.sleep = turn
warden.PATIENCE_S = 0.0
reader, writer = os.pipe()
if os.fork() == 0:
    os.close(writer)
    os.read(reader, 1)
    os._exit(0)
warden.end()
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("nothing is left")
"""


def test_the_warden_stays_until_processes_that_no_signal_ends_have_ended():
    """Here all signals are refused, and the process ends by itself after a while."""
    done = subprocess.run(
        [sys.executable, "-c", UNKILLABLE], capture_output=True, text=True, timeout=WITHIN_S
    )

    assert (done.stdout, done.stderr) == ("nothing is left\n", "")


def test_killing_a_check_takes_less_time_than_a_reload_waits():
    """Otherwise a check that cannot be killed would end the detector: two must not run at once."""
    assert warden.PATIENCE_S < END_S < STOP_S


def test_checks_leave_no_warnings_of_the_event_loop():
    """The loop may close as soon as they end."""
    many = (
        "import asyncio\n"
        "from tmd_detectors.exec.detector import CheckRunner, ExecCheck\n"
        "checks = [('/bin/true',), ('/no/such',), ('/bin/sleep', '1000')]\n"
        "async def main():\n"
        "    runs = (CheckRunner(ExecCheck('a', c, timeout_s=0.3), 9).run() for c in checks * 5)\n"
        "    await asyncio.gather(*runs)\n"
        "for _ in range(3):\n"
        "    asyncio.run(main(), debug=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", many], capture_output=True, text=True, timeout=100
    )

    assert done.returncode == 0, done.stderr
    said = [x for x in done.stderr.splitlines() if not x.startswith("Executing <")]
    assert said == []

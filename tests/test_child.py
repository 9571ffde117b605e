"""Children that only their owner reaps."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tmd.child import Child, readable, send


def python(code):
    return [sys.executable, "-S", "-c", code]


async def output(child):
    found = b""
    while chunk := await child.read():
        found += chunk
    return found


async def test_what_it_says_and_how_it_ends():
    child = Child.start(python("print('here'); raise SystemExit(3)"))

    assert await output(child) == b"here\n"
    assert await child.status() == 3
    assert await child.end(10.0)


async def test_one_that_has_just_ended_keeps_its_status():
    """A signal polls it first: whoever waited beside that heard of an unknown child, and 255."""
    for _ in range(50):
        child = Child.start(["/bin/sh", "-c", "exit 7"])
        while await child.read():
            pass
        assert await child.end(10.0)
        assert await child.status() == 7


async def test_one_that_does_not_end_is_left_running():
    child = Child.start(python("import signal; signal.pause()"), stdin=True)
    ended, runs = await child.end(0.01, kill=False), child.runs
    child.abandon()

    assert (ended, runs) == (False, True)
    assert await child.status() == -9


async def test_where_there_are_no_pidfds_it_is_asked(monkeypatch):
    def missing(pid):
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(os, "pidfd_open", missing)
    child = Child.start(python("print()"))

    assert await child.status() == 0
    assert await child.end(10.0)


WRAPPER = """
exec 3>"$1"
sleep 60 &
echo up
"""
"""A shell script whose tool holds a FIFO and its stdout."""
ENDS = {
    "end": lambda child: child.end(10.0),
    "abandon": lambda child: asyncio.to_thread(child.abandon),
}


@contextmanager
def wrapper(tmp_path, last):
    """A wrapper that does ``last`` once its tool runs, and a call that waits until nobody holds the
    FIFO any more."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    waiting = select.poll()
    waiting.register(reader)
    try:
        child = Child.start(["/bin/sh", "-c", WRAPPER + last, "wrapper", str(fifo)])
        yield child, lambda: waiting.poll(10_000) == [(reader, select.POLLHUP)]
    finally:
        os.close(reader)


@pytest.mark.parametrize("how", ENDS)
async def test_the_tool_below_a_wrapper_is_killed_with_it(how, tmp_path):
    """Else one more would be left by each poll."""
    with wrapper(tmp_path, "wait") as (child, gone):
        up = await child.read()
        await ENDS[how](child)

        assert up == b"up\n"
        assert gone()
        assert await child.status() == -9


async def test_a_tool_that_outlives_its_wrapper_holds_up_no_reader_and_is_killed(tmp_path):
    """It holds the pipe of the wrapper, whose status is known before the end."""
    with wrapper(tmp_path, "exit 7") as (child, gone):
        async with asyncio.timeout(20):
            said = await output(child)
        status = await child.status()
        ended = await child.end(10.0)

        assert (said, status, ended, child.runs) == (b"up\n", 7, True, False)
        assert gone()
        assert await child.status() == 7


async def test_a_child_gets_no_secrets_of_the_daemon(monkeypatch):
    """The URL of Redis may have a password. A child's own environment is as its owner says."""
    monkeypatch.setenv("TMD_REDIS__URL", "redis://:hidden@r")
    show = python("import os; print(os.environ.get('TMD_REDIS__URL'), 'PATH' in os.environ)")
    said = []
    for env in (None, {"TMD_REDIS__URL": "mine"}):
        child = Child.start(show, env=env)
        said.append(await output(child))
        await child.end(10.0)

    assert said == [b"None True\n", b"mine False\n"]


PROBES = {
    "host": (
        "from tmd_detectors.host.facts import Question\n"
        "from tmd_detectors.host.probe import ask\n"
        "async def use():\n"
        "    assert await ask(Question(paths=('/',), driver_processes=()), 30.0) is not None\n"
    ),
    "nic": (
        "from tmd_detectors.nic.detector import NicConfig\n"
        "from tmd_detectors.nic.probe import NicProbe\n"
        "async def use():\n"
        "    probe = NicProbe(NicConfig().request({}))\n"
        "    assert await probe.read(30.0) is not None\n"
        "    await probe.close()\n"
    ),
}


@pytest.mark.parametrize("probe", PROBES)
def test_those_who_ask_children_leave_no_warnings_of_the_event_loop(probe):
    """``Unknown child process pid N`` stood in half of the outputs of ``tmd scan``."""
    code = f"import asyncio\n{PROBES[probe]}for _ in range(10): asyncio.run(use())\n"
    command = [sys.executable, "-X", "dev", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)

    assert (done.returncode, done.stderr) == (0, "")


async def test_a_signal_to_a_child_of_asyncio_leaves_its_status(caplog):
    """It may have ended just now; asked through asyncio, its status would be lost."""
    statuses = []
    for _ in range(50):
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("/bin/sh", "-c", "exit 7", stdout=pipe)
        await process.stdout.read()
        send(process, signal.SIGCONT)
        statuses.append(await process.wait())
        send(process, signal.SIGKILL)  # nobody is there any more

    assert statuses == [7] * 50
    assert [r for r in caplog.records if r.name == "asyncio" and r.levelname == "WARNING"] == []


async def test_a_child_that_is_never_read_can_be_ended():
    child = Child.start(python("while True: print('x' * 1000)"))
    await asyncio.sleep(0)

    assert await child.end(10.0)


async def test_one_of_several_descriptors_is_waited_for_and_not_for_ever():
    (first, _), (second, writes) = ends = os.pipe(), os.pipe()
    await readable([first, second], 0.01)
    os.write(writes, b"x")
    await readable([first, second])
    await readable((), 0.01)
    loop = asyncio.get_running_loop()
    watched = [loop.remove_reader(fd) for fd in (first, second)]
    for fd in (fd for pipe in ends for fd in pipe):
        os.close(fd)

    assert watched == [False, False]

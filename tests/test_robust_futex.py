"""The end of a process is reported while it still ends. A process that releases its futex is not
reported, and strangers are not believed."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from tmd.robust_futex import ExitBeacon, FutexWatch

PATIENCE = 10
HOLDER = """
import os, sys, threading
from tmd.robust_futex import ExitBeacon

ends = threading.Event()

class Brief(ExitBeacon):
    def _live(self):
        ends.wait()

held = Brief()
print(held.fd, held.thread, flush=True)
for line in sys.stdin:
    match line.strip():
        case "let go":
            held.release()
        case "fork":
            if os.fork() == 0:
                held.release()
                os._exit(0)
            os.wait()
        case "thread ends":
            ends.set()
    print("done", flush=True)
"""


class Ended:
    """What a watch has reported."""

    def __init__(self) -> None:
        self._called = threading.Event()

    def __call__(self) -> None:
        self._called.set()

    def within(self, seconds: float) -> bool:
        return self._called.wait(seconds)


class Holder:
    """A process that holds one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        fd, self.thread = map(int, self._line().split())
        self.fd = os.open(f"/proc/{process.pid}/fd/{fd}", os.O_RDWR)

    def watch(self, ended: Ended) -> FutexWatch:
        return FutexWatch(self.fd, self.thread, ended)

    def do(self, what: str) -> None:
        """Let it do something, and wait for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        self._line()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@contextmanager
def run():
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        holder = Holder(process)
        try:
            yield holder
        finally:
            process.kill()
            os.close(holder.fd)


@pytest.fixture
def holder():
    with run() as holder:
        yield holder


def over(watch: FutexWatch) -> None:
    """Wait until it waits no more."""
    watch.waits.join(PATIENCE)
    assert not watch.waits.is_alive()


def test_a_killed_process_is_told_of(holder):
    ended = Ended()
    holder.watch(ended)
    holder.kill()

    assert ended.within(PATIENCE)


def test_it_is_told_of_before_the_process_is_gone(holder):
    """The kernel marks what a thread held as it ends, whatever the rest of the process still does:
    here it goes on for good."""
    ended = Ended()
    holder.watch(ended)
    holder.do("thread ends")

    assert ended.within(PATIENCE)
    assert holder.process.poll() is None


def test_a_process_that_takes_its_leave_is_not_told_of(holder):
    ended = Ended()
    watch = holder.watch(ended)
    holder.do("let go")
    holder.kill()
    over(watch)

    assert not ended.within(0)


def test_a_child_cannot_take_its_parents_leave(holder):
    ended = Ended()
    holder.do("fork")
    holder.watch(ended)
    holder.kill()

    assert ended.within(PATIENCE)


def test_a_watch_that_is_closed_tells_nobody(holder):
    ended = Ended()
    watch = holder.watch(ended)
    watch.close()
    holder.kill()
    over(watch)

    assert not ended.within(0)


def test_two_may_watch_one_after_the_other(holder):
    """A daemon that was started anew watches again."""
    first, second = Ended(), Ended()
    watch = holder.watch(first)
    watch.close()
    over(watch)
    holder.watch(second)
    holder.kill()

    assert second.within(PATIENCE)
    assert not first.within(0)


# --- strangers ------------------------------------------------------------------------------------


def assert_refused(fd: int, thread: int, why: str) -> None:
    with pytest.raises(OSError, match=why):
        FutexWatch(fd, thread, lambda: None)


def test_a_thread_that_holds_nothing_is_refused():
    held = ExitBeacon()

    assert_refused(held.fd, held.thread + 1, "no robust futex")
    assert_refused(held.fd, -1, "no robust futex")
    assert_refused(held.fd, 1 << 40, "no robust futex")
    held.release()
    assert_refused(held.fd, held.thread, "no robust futex")


@pytest.mark.parametrize("what", ["file", "pipe", "socket"])
def test_what_is_no_shared_memory_is_refused(tmp_path, what):
    """A page of a file on a network may be long in coming."""
    a, b = socket.socketpair()
    with a, b, (tmp_path / "file").open("wb+") as file:
        file.truncate(mmap.PAGESIZE)
        pipe = os.pipe()
        fds = {"file": file.fileno(), "pipe": pipe[0], "socket": a.fileno()}
        try:
            assert_refused(fds[what], 1, "not of shared memory")
        finally:
            for fd in pipe:
                os.close(fd)


def test_a_page_that_is_gone_ends_the_watch_and_not_the_watcher(holder):
    """A file can be made shorter by its owner while others have it in their memory."""
    ended = Ended()
    watch = holder.watch(ended)
    os.truncate(holder.fd, 0)
    over(watch)
    holder.kill()

    assert not ended.within(0)

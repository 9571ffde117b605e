"""Knowing that a process begins to end, before the kernel has taken it apart (Linux).

Who is killed keeps its sockets, and its entry in the process table, until its memory is freed: the
more it had, the longer, and longer still where a driver has to give back a device. What the kernel
does before all that is to mark the robust futexes of its threads and to wake whoever waits for them
(kernel documentation, ``locking/robust-futex-ABI``). So a thread of a trainer holds one for as long
as the process lives, and the daemon of its host waits for it.

It is held and waited for by system call and not through pthreads: a daemon that serves other users
must not let a C library follow pointers in memory of theirs. Where it cannot be had, an exit is
noticed as late as ever.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

SYSTEM_CALLS = {"x86_64": (273, 202), "aarch64": (99, 98)}
"""Numbers of ``set_robust_list`` and ``futex``."""
FUTEX_WAIT, FUTEX_WAKE = 0, 1
WAITERS, OWNER_DIED = 0x80000000, 0x40000000
NAME = "tmd-robust-futex"
PAGE = mmap.PAGESIZE
WORD = struct.Struct("@I")
LIST, ENTRY, AT = struct.Struct("@PlP"), struct.Struct("@P"), 32
"""The page: ``struct robust_list_head``, its one entry, and from ``AT`` on the word."""
LOOK_S = 1.0
"""How often a thread that waits sees whether it is still wanted."""
MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Held:
    """A robust futex of this process. Owns a page of shared memory and a thread that sleeps.

    Raises:
        OSError: it cannot be had on this machine.
    """

    fd: int
    """Of the page; to be handed to whoever is to watch."""
    thread: int
    """The thread that holds it, by its number where it lives."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self.fd = os.memfd_create(NAME)
        try:
            os.ftruncate(self.fd, PAGE)
            self._page = mmap.mmap(self.fd, PAGE)
            self.thread = self._taken()
        except BaseException:
            os.close(self.fd)
            raise

    def let_go(self) -> None:
        """The process is about to end of its own accord: that is nothing to be noticed early."""
        if os.getpid() == self._process:
            WORD.pack_into(self._page, AT, 0)

    def _taken(self) -> int:
        """Number of the thread that holds it from now on."""
        held: Future[int] = Future()

        def hold() -> None:
            try:
                held.set_result(self._enlist())
            except OSError as error:
                held.set_exception(error)
            else:
                self._live()

        threading.Thread(target=hold, name=NAME, daemon=True).start()
        return held.result()

    def _live(self) -> None:
        """What the thread does that holds it."""
        threading.Event().wait()

    def _enlist(self) -> int:
        """The calling thread, whose number is returned, holds this robust futex and no other."""
        # All that the kernel reads when the thread ends is in shared memory: a process that is
        # killed for want of memory may have lost its own by then.
        page = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        entry, thread = page + LIST.size, threading.get_native_id()
        WORD.pack_into(self._page, AT, thread | WAITERS)
        LIST.pack_into(self._page, 0, entry, AT - LIST.size, 0)
        ENTRY.pack_into(self._page, LIST.size, page)
        error = _call(0, ctypes.c_void_p(page), ctypes.c_size_t(LIST.size))
        if error:
            raise OSError(error, "set_robust_list")
        return thread


class FutexWatch:
    """A thread that waits until the holder of a futex begins to end; then it calls ``told``.

    Args:
        fd: what the holder has handed over; it may be anything, and stays the caller's.
        thread: the thread that holds it, if that is true.
        told: called in the thread that waits, at most once.

    Raises:
        OSError: there is no such futex.
    """

    def __init__(self, fd: int, thread: int, told: Callable[[], None]) -> None:
        self._page = _mapped(fd)
        self._word = (thread | WAITERS) & 0xFFFFFFFF
        self._told = told
        self._closed = threading.Event()
        self.waits = threading.Thread(target=self._run, name="tmd-watch", daemon=True)
        try:
            if not self._is(self._word, 0):
                raise OSError(errno.EINVAL, f"no robust futex is held by thread {thread}")
            self.waits.start()
        except (OSError, RuntimeError) as error:
            _libc.munmap(self._page, PAGE)
            raise OSError(*error.args) from error

    def close(self) -> None:
        """Call nobody any more; the thread ends within a second."""
        self._closed.set()

    def _run(self) -> None:
        try:
            while not self._closed.is_set() and self._is(self._word, LOOK_S):
                pass
            # Let go in an orderly way, it is another word. It is never read here: the page may be
            # gone by now, which is an error to the kernel and the end to whoever reads.
            died = self._is(OWNER_DIED | WAITERS, 0)
        finally:
            _libc.munmap(self._page, PAGE)
        if died and not self._closed.is_set():
            self._told()

    def _is(self, word: int, seconds: float) -> bool:
        """Whether the futex is ``word``; sleep while it is, for so long."""
        whole = int(seconds)
        time = _Time(whole, int((seconds - whole) * 1e9))
        address = ctypes.c_void_p(self._page + AT)
        arguments = (address, FUTEX_WAIT, ctypes.c_uint(word), ctypes.byref(time), None, 0)
        # Whoever was woken, by whatever, had begun to wait for that word.
        return _call(1, *arguments) in (0, errno.EINTR, errno.ETIMEDOUT)


def wake(word: int) -> None:
    """Wake who waits for the futex at this address, as the kernel does."""
    _call(1, ctypes.c_void_p(word), FUTEX_WAKE, 1, None, None, 0)


def _mapped(fd: int) -> int:
    """Address of the page behind ``fd``, to read. Raises OSError."""
    try:
        # Only shared memory has seals, and whoever asks anything else about a file may have to wait
        # for a disk or a network.
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise OSError(error.errno, "what was handed over is no shared memory") from error
    found = _libc.mmap(None, PAGE, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if found is None or found == MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    return int(found)


def _call(which: int, *arguments: Any) -> int:
    """``errno`` of a system call, 0 if it went well."""
    numbers = SYSTEM_CALLS.get(platform.machine())
    if numbers is None:
        return errno.ENOSYS
    done = _libc.syscall(ctypes.c_long(numbers[which]), *arguments)
    return ctypes.get_errno() if done < 0 else 0

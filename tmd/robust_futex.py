"""Notices that a process begins to end, before the kernel has dismantled it (Linux).

A killed process keeps its sockets, and its entry in the process table, until its memory is freed.
This takes longer for more memory, and longer still where a driver must release a device. Before
that the kernel marks the robust futexes of the process's threads and wakes the waiting threads
(kernel documentation, ``locking/robust-futex-ABI``). So a thread of a trainer holds one for as long
as the process lives, and the daemon of its host waits for it.

System calls hold it and wait for it, not pthreads: a daemon that serves other users must not let a
C library follow pointers in their memory. Where robust futexes are missing, an exit is noticed with
a delay.
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
"""The page: ``struct robust_list_head``, its one entry, and the futex word at ``AT``."""
LOOK_S = 1.0
"""Interval at which a waiting thread checks whether it should end."""
MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class ExitBeacon:
    """A robust futex that a thread of this process holds until the process ends. Owns that thread,
    and a page of shared memory.

    Raises:
        OSError: this machine has no robust futexes.
    """

    fd: int
    """Descriptor of the page, for the process that watches."""
    thread: int
    """Number of the holding thread in its own PID namespace."""

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

    def release(self) -> None:
        """Release it, since the process ends by itself and need not be noticed early."""
        if os.getpid() == self._process:
            WORD.pack_into(self._page, AT, 0)

    def _taken(self) -> int:
        """Let a thread hold it; returns the thread's number."""
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
        """Work of the holding thread."""
        threading.Event().wait()

    def _enlist(self) -> int:
        """Let the calling thread hold this futex and no other; returns the thread's number."""
        # Everything that the kernel reads at the thread's end is in shared memory: a process killed
        # for lack of memory may already have lost its own.
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
    """A thread that waits until the holder of a futex begins to end; then it calls ``on_end``.

    Args:
        fd: the descriptor from the holder; it is not trusted, and stays the caller's.
        thread: the holding thread, according to the holder.
        on_end: called in the waiting thread, at most once.

    Raises:
        OSError: there is no such futex.
    """

    def __init__(self, fd: int, thread: int, on_end: Callable[[], None]) -> None:
        self._page = _mapped(fd)
        self._word = (thread | WAITERS) & 0xFFFFFFFF
        self._on_end = on_end
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
        """Make no more calls; the thread ends within a second."""
        self._closed.set()

    def _run(self) -> None:
        try:
            while not self._closed.is_set() and self._is(self._word, LOOK_S):
                pass
            # An orderly release sets another word. It is never read here: the page may be gone,
            # which is an error for the kernel but would kill a process that reads.
            died = self._is(OWNER_DIED | WAITERS, 0)
        finally:
            _libc.munmap(self._page, PAGE)
        if died and not self._closed.is_set():
            self._on_end()

    def _is(self, word: int, seconds: float) -> bool:
        """Sleep for up to ``seconds`` while the futex is ``word``; returns whether it is."""
        whole = int(seconds)
        time = _Time(whole, int((seconds - whole) * 1e9))
        address = ctypes.c_void_p(self._page + AT)
        arguments = (address, FUTEX_WAIT, ctypes.c_uint(word), ctypes.byref(time), None, 0)
        # Any wake-up means that the thread had begun to wait for that word.
        return _call(1, *arguments) in (0, errno.EINTR, errno.ETIMEDOUT)


def wake(word: int) -> None:
    """Wake the threads that wait for the futex at this address, as the kernel does."""
    _call(1, ctypes.c_void_p(word), FUTEX_WAKE, 1, None, None, 0)


def _mapped(fd: int) -> int:
    """Address of the readable page behind ``fd``. Raises OSError."""
    try:
        # Only shared memory has seals. Any other question about a file might wait for a disk or a
        # network.
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise OSError(error.errno, "the descriptor is not of shared memory") from error
    found = _libc.mmap(None, PAGE, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if found is None or found == MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    return int(found)


def _call(which: int, *arguments: Any) -> int:
    """``errno`` of a system call, 0 on success."""
    numbers = SYSTEM_CALLS.get(platform.machine())
    if numbers is None:
        return errno.ENOSYS
    done = _libc.syscall(ctypes.c_long(numbers[which]), *arguments)
    return ctypes.get_errno() if done < 0 else 0

"""Faults that strike a training process from inside: the names after ``=`` in a fault's line.

Each uses the means by which the fault occurs in practice; the process gets no warning.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

import tmd.fabric
from tmd import robust_futex
from tmd.trainer.shadow.session import ShadowSession

EXIT_STATUS = 3
FOREVER_S = 86_400
ROOM = 64 << 20
"""Bytes that a process may still allocate before it runs out of memory."""
LINES = 200_000


def strike(name: str) -> None:
    """Let the fault ``name`` happen to this process.

    Raises:
        ValueError: there is no such fault.
    """
    if name not in ACTIONS:
        raise ValueError(f"unknown fault {name!r}")
    ACTIONS[name]()


def _raise() -> None:
    raise RuntimeError("injected error in user code")


def _full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _out_of_memory() -> None:
    """The allocator's own error, at a limit of the kernel's."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    torch.empty(ROOM, dtype=torch.float32).fill_(1.0)


def _hold_interpreter() -> None:
    """A call into C that keeps the interpreter: no other thread of the process can run."""
    ctypes.PyDLL(None).sleep(FOREVER_S)


def _linger() -> None:
    """Killed while its kernel takes for ever to free its memory: its futex is marked at once, and
    all links stay open."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    page = next(line for line in mappings if robust_futex.NAME in line)
    word = int(page.partition("-")[0], 16) + robust_futex.AT
    ctypes.c_uint.from_address(word).value = robust_futex.OWNER_DIED | robust_futex.WAITERS
    robust_futex.wake(word)
    os.kill(os.getpid(), signal.SIGSTOP)


def _flood() -> None:
    """As a script's progress bar does; training continues afterwards."""
    for number in range(LINES):
        print(f"step 0 of {LINES}: an unwanted line of log, number {number}")


ACTIONS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "linger": _linger,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "crash": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exit": lambda: os._exit(EXIT_STATUS),
    "raise": _raise,
    "full": _full,
    "memory": _out_of_memory,
    "hang": lambda: time.sleep(FOREVER_S),
    "hold": _hold_interpreter,
    "flood": _flood,
}


def flip(following: ShadowSession) -> None:
    """Flip one bit of one parameter of a joiner, as faulty memory does."""
    param = following._units.params[0]
    # Through `data`: faulty memory counts no new version of the tensor.
    param.data.view(-1).view(torch.int32)[:1].bitwise_xor_(1)


def sever(fabric: tmd.fabric.Fabric) -> None:
    """Break a link of the current epoch, as a network does: the one that received something last.

    Others may have been opened for operations that the script does not call.
    """
    standing = fabric.standing
    assert standing is not None
    links = [link for _, link in standing.member_links()]
    min(links, key=lambda link: link.quiet_s).sever()


def isolate(fabric: tmd.fabric.Fabric) -> None:
    """Break all links of the current epoch, without a dead process."""
    standing = fabric.standing
    assert standing is not None
    for _, link in standing.member_links():
        link.sever()

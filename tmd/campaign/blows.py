"""What can happen to a training process from inside: the names after ``=`` in a fault's line.

Real ones, by the means by which they come in life; whoever is struck does not know of it.
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
"""What a process that runs out of memory may still take."""
LINES = 200_000


def strike(name: str) -> None:
    """Let ``name`` happen to this process.

    Raises:
        ValueError: nothing is called so.
    """
    if name not in BLOWS:
        raise ValueError(f"unknown fault {name!r}")
    BLOWS[name]()


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
    """A call into C that does not let go: no other thread of the process runs any more."""
    ctypes.PyDLL(None).sleep(FOREVER_S)


def _linger() -> None:
    """Killed, as far as anybody can see, and its kernel takes for ever to free its memory: what it
    marks first is marked, and all links stay open."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    page = next(line for line in mappings if robust_futex.NAME in line)
    word = int(page.partition("-")[0], 16) + robust_futex.AT
    ctypes.c_uint.from_address(word).value = robust_futex.OWNER_DIED | robust_futex.WAITERS
    robust_futex.wake(word)
    os.kill(os.getpid(), signal.SIGSTOP)


def _flood() -> None:
    """As a progress bar of the script's own would; training goes on afterwards."""
    for number in range(LINES):
        print(f"step 0 of {LINES}: a line of log that nobody asked for, number {number}")


BLOWS: dict[str, Callable[[], object]] = {
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
    """One bit of one parameter of a joiner, as a sick memory would."""
    param = following._units.params[0]
    param.detach().view(-1).view(torch.int32)[:1].bitwise_xor_(1)


def sever(fabric: tmd.fabric.Fabric) -> None:
    """Break one link of the present epoch, as a network would."""
    standing = fabric.standing
    assert standing is not None
    _, link = next(iter(standing.member_links()))
    link.sever()


def isolate(fabric: tmd.fabric.Fabric) -> None:
    """Break all links of the present epoch; nobody dies of it."""
    standing = fabric.standing
    assert standing is not None
    for _, link in standing.member_links():
        link.sever()

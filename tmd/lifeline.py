"""Lets a child end together with its parent, however the parent ends (Linux).

``python -m tmd.lifeline PARENT COMMAND ...`` runs COMMAND as such a child of the process PARENT:
:func:`prefix`. Parents that may have loaded torch use it. A child that runs Python between fork and
exec frees thread-local caches of torch, and a process group in them would wait forever for threads
that the child does not have.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the thread that forked this process ends; for use as
    ``preexec_fn``."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prefix() -> tuple[str, ...]:
    """What to put before a command that is to end with the thread that starts it."""
    return (sys.executable, "-P", "-m", "tmd.lifeline", str(os.getpid()))


if __name__ == "__main__":
    die_with_parent()
    if os.getppid() == int(sys.argv[1]):  # otherwise it has ended meanwhile
        os.execvp(sys.argv[2], sys.argv[2:])

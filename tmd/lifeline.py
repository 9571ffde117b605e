"""Lets a child end together with its parent, however the parent ends (Linux).

``python -m tmd.lifeline COMMAND ...`` runs a command that does. Use that where the parent may have
loaded torch: a child that runs Python between fork and exec frees thread-local caches of torch, and
a process group in them would wait forever for threads that the child does not have.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL at the death of the parent; for use as ``preexec_fn``."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])

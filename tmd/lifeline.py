"""Lets a child end together with its parent, however the parent ends (Linux)."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL at the death of the parent; for use as ``preexec_fn``."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

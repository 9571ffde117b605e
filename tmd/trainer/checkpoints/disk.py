"""Files of checkpoints, which may lie on a file server: digests, locks, and what is on disk."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EBADF, EINVAL, ELOOP, ENOENT, ENOLCK, ENOSYS, ENOTDIR, ENOTSUP
from pathlib import Path

import xxhash

BLOCK = 1 << 24
NO_SYNC = frozenset({EINVAL, ENOTSUP})
"""Errors of a file system that cannot put a folder on disk."""
NO_LOCK = frozenset({ENOLCK, ENOTSUP, EINVAL, ENOSYS, EBADF})
"""Errors of a file system without locks."""
NOT_THERE = frozenset({ENOENT, ENOTDIR, ELOOP})


def exists(place: Path) -> bool:
    """Whether there is a file or folder.

    Raises:
        OSError: unknown. ``Path.exists`` hides this error from Python 3.14 on.
    """
    try:
        place.stat()
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return False
    return True


def digest(file: Path) -> tuple[int, str]:
    """Size and digest of a file."""
    found, size = xxhash.xxh3_128(), 0
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            found.update(block)
            size += len(block)
    return size, found.hexdigest()


def sync(folder: Path) -> None:
    """Put the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock of an existing file. Not where the file system has no locks.

    Raises:
        BlockingIOError: another process has the lock.
    """
    with file.open("r+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCK:
                raise
        yield


def is_locked(file: Path) -> bool:
    """Whether another process has the lock of a file, as far as the file system can tell."""
    try:
        with locked(file):
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextmanager
def marked(file: Path) -> Iterator[None]:
    """Let :func:`is_locked` be true of ``file`` in this context, for as long as this process lives.
    The file is made for it, and removed at the end."""
    with file.open("a+b") as stream:
        with suppress(OSError):  # there are no locks
            # Shared with a former worker of the rank, which may still write. It waits while
            # `is_locked` has the lock.
            fcntl.flock(stream, fcntl.LOCK_SH)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)

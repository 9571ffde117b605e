"""Warns a script that reads variables before ``join()`` which ``join()`` then changes.

From the import of :mod:`tmd.trainer` to ``join()`` the first reader of each variable is recorded,
so that only a script that got a stale value is warned. Earlier reads are not seen.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator, KeysView, Mapping
from types import CodeType, FrameType

MAY_CHANGE = frozenset(
    {"RANK", "ROLE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
OURS = frozenset({"os", "_collections_abc", "collections.abc", __name__})
SILENT = frozenset({"torch", "tmd"})
"""Packages that read a variable again whenever they need it."""

log = logging.getLogger("tmd.trainer")


class WatchedEnvironment(os._Environ[str]):
    """``os.environ`` that records the first reader of each variable."""

    def __getitem__(self, name: str) -> str:
        value = super().__getitem__(name)
        if name == _passing.name or _instruction(sys._getframe(1)) == _passing.copier:
            return value  # a copy of the whole environment, as for a child process, is no read
        if name in MAY_CHANGE and name not in _seen and (where := _reader(sys._getframe(1))):
            _seen[name] = where, value
        return value

    def keys(self) -> KeysView[str]:
        # dict() and {**...} request all names and then each value, in one instruction.
        _passing.copier = _instruction(sys._getframe(1))
        return super().keys()

    def __iter__(self) -> Iterator[str]:
        try:
            for name in super().__iter__():
                _passing.name = name
                yield name
        finally:
            _passing.name = ""


class _Passing(threading.local):
    name = ""
    """The variable that this thread has reached in a copy of all variables."""
    copier: tuple[CodeType, int] | None = None
    """The instruction that last requested all names."""


_passing = _Passing()
_seen: dict[str, tuple[str, str]] = {}


def watch() -> None:
    """Start to record; only in a process that ``tmd launch`` has started."""
    if "TMD_SOCKET" in os.environ:
        os.environ.__class__ = WatchedEnvironment


def unwatch() -> dict[str, tuple[str, str]]:
    """Stop recording; returns the first readers of each variable and the values they got."""
    if isinstance(os.environ, WatchedEnvironment):
        os.environ.__class__ = os._Environ  # type: ignore[assignment]
    seen = dict(_seen)
    _seen.clear()
    return seen


def settle(truth: Mapping[str, str], seen: Mapping[str, tuple[str, str]]) -> None:
    """Set the true values, and warn a script that has ``seen`` other ones."""
    os.environ.update(truth)
    for name, (where, value) in sorted(seen.items()):
        now = os.environ.get(name)
        if now != value:
            log.warning(
                "%s read %s=%s before tmd.trainer.join(), which set it to %s: read it after join()",
                *(where, name, value, now),
            )


def _instruction(frame: FrameType) -> tuple[CodeType, int]:
    return frame.f_code, frame.f_lasti


def _reader(frame: FrameType | None) -> str:
    """The script's or library's line that reads; empty if no warning is due."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module not in OURS:
            quiet = module.partition(".")[0] in SILENT
            return "" if quiet else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_code.co_name == "__contains__":
            return ""
        frame = frame.f_back
    return ""

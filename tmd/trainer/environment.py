"""Variables that a script reads before ``join()`` and that ``join()`` changes.

From the import of :mod:`tmd.trainer` to ``join()`` it is noted who reads them, so that only a
script that has read something else than the truth is told so. What is read before is not seen.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from types import FrameType

MAY_CHANGE = frozenset(
    {"RANK", "ROLE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
OURS = frozenset({"os", "_collections_abc", "collections.abc", __name__})
SILENT = frozenset({"torch", "tmd"})
"""Packages that read variables anew when they need them."""

log = logging.getLogger("tmd.trainer")


class Reading(os._Environ[str]):
    """``os.environ``, noting by whom a variable was read first."""

    def __getitem__(self, name: str) -> str:
        value = super().__getitem__(name)
        if name in MAY_CHANGE and name not in _seen and (where := _reader(sys._getframe(1))):
            _seen[name] = where, value
        return value


_seen: dict[str, tuple[str, str]] = {}


def watch() -> None:
    """From now on; only in a process that ``tmd launch`` has started."""
    if "TMD_SOCKET" in os.environ:
        os.environ.__class__ = Reading


def unwatch() -> dict[str, tuple[str, str]]:
    """No longer. Who has read which value of a variable."""
    if isinstance(os.environ, Reading):
        os.environ.__class__ = os._Environ  # type: ignore[assignment]
    seen = dict(_seen)
    _seen.clear()
    return seen


def settle(truth: Mapping[str, str], seen: Mapping[str, tuple[str, str]]) -> None:
    """Set what is true, and tell a script that has ``seen`` something else."""
    os.environ.update(truth)
    for name, (where, value) in sorted(seen.items()):
        now = os.environ.get(name)
        if now != value:
            log.warning(
                "%s read %s=%s before tmd.trainer.join(), and it is %s now: read it after join()",
                *(where, name, value, now),
            )


def _reader(frame: FrameType | None) -> str:
    """Where in a script, or a library; empty if nobody has to be told."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module not in OURS:
            quiet = module.partition(".")[0] in SILENT
            return "" if quiet else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_code.co_name == "__contains__":
            return ""
        frame = frame.f_back
    return ""

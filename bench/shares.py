"""Gives each host of a benchmark its own share of the cores, as if it were a machine.

All hosts run on one machine. Without shares, the survivors of a loss would use the cores of the
lost host. A standby that becomes a rank would slow down the others, since it computes more than
before.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

CGROUPS = Path("/sys/fs/cgroup")
V1 = CGROUPS / "cpu"
"""The CPU controller of version 1. In version 2 all controllers share one tree."""
PERIOD_US = 10_000
"""Short, since the other ranks wait for one that has used up its share of a period."""
OTHERS = 0.1
"""Cores that are left to Redis, the daemons and the benchmark itself."""
ENDING_S = 10.0
LOOK_S = 0.01


def unable() -> str:
    """Why this machine cannot limit the cores of a process; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, for control groups that limit the cores of each host"
    if not (V1.is_dir() or "cpu" in _controllers()):
        return f"needs the CPU controller of control groups in {CGROUPS}"
    return ""


def _controllers() -> list[str]:
    """The controllers that groups of version 2 can use."""
    file = CGROUPS / "cgroup.subtree_control"
    return file.read_text().split() if file.exists() else []


class CoreShares:
    """An equal share for each host. Leaving the context removes the shares, whose processes must
    have ended."""

    def __init__(self, hosts: int) -> None:
        self.cores = ((os.cpu_count() or 1) - OTHERS) / hosts
        """Cores of each host."""
        self._stem = f"tmd-bench-{secrets.token_hex(3)}"
        self._made: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + ENDING_S
        for group in self._made:
            while not _removed(group) and time.monotonic() < deadline:
                time.sleep(LOOK_S)  # the kernel is still ending a process; nothing reports the end

    def give(self, pid: int) -> None:
        """Give the process ``pid`` and all that it will start a share of their own."""
        version_1 = V1.is_dir()
        group = (V1 if version_1 else CGROUPS) / f"{self._stem}-{pid}"
        group.mkdir()
        self._made.append(group)
        quota_us = int(self.cores * PERIOD_US)
        if version_1:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        (group / "cgroup.procs").write_text(str(pid))


def _removed(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()

"""A share of the cores for each host of a benchmark, as if it had cores of its own.

All hosts run on one machine. Without shares, those that survive a loss would use the cores of the
lost one, and a standby that becomes a rank would slow down the others, since it computes more than
before. Both do not happen where each host is a machine.
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
"""Where version 1 has its CPU controller. Version 2 has one tree."""
PERIOD_US = 10_000
"""Short, since a rank that has used up its share lets the others wait."""
OTHERS = 0.1
"""Cores that daemons, Redis and the benchmark get."""
ENDING_S = 10.0


def unable() -> str:
    """Why this machine cannot limit the cores of a process; empty if it can."""
    if os.geteuid() != 0:
        return "bench.hot needs root: it gives each host its own share of the cores (cgroups)"
    if V1.is_dir() or "cpu" in _controllers():
        return ""
    return f"bench.hot needs the CPU controller of cgroups in {CGROUPS}"


def _controllers() -> list[str]:
    file = CGROUPS / "cgroup.subtree_control"
    return file.read_text().split() if file.exists() else []


class CoreShares:
    """Created on entering the context, removed on leaving it, when all their processes have ended.

    All hosts have the same share.
    """

    def __init__(self, hosts: int) -> None:
        self.cores = ((os.cpu_count() or 1) - OTHERS) / hosts
        """Cores of each host."""
        self._stem = f"tmd-bench-{secrets.token_hex(3)}"
        self._made: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        until = time.monotonic() + ENDING_S
        while self._made and time.monotonic() < until:
            for group in [*self._made]:
                with suppress(OSError):  # a process has not ended yet
                    group.rmdir()
                    self._made.remove(group)

    def give(self, pid: int) -> None:
        """Give a process and those that it will start a share of their own."""
        group = (V1 if V1.is_dir() else CGROUPS) / f"{self._stem}-{pid}"
        group.mkdir()
        self._made.append(group)
        quota_us = int(self.cores * PERIOD_US)
        if V1.is_dir():
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        (group / "cgroup.procs").write_text(str(pid))

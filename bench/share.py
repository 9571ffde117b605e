"""Takes over the CPU share of a process once that has died, until it is killed itself.

The survivors of a loss would compute faster on the cores that the dead worker leaves, which no real
loss gives them. A process that computes all the time would take more than the worker did, which
waited for others, too. So this one measures the worker and then uses as much as it.

``python -m bench.share PID``
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

LOOK_S = 0.05
SLICE_S = 0.001
"""How long it computes or sleeps at once."""


def used_s(pid: int) -> float:
    """CPU time of a process up to now. Raises OSError once it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share_until_death(pid: int) -> float:
    """CPU time per second that a process has used from now on until it dies."""
    share, began, before = 0.0, time.monotonic(), used_s(pid)
    handle = os.pidfd_open(pid)
    while not select.select([handle], [], [], LOOK_S)[0]:
        try:
            share = (used_s(pid) - before) / (time.monotonic() - began)
        except OSError:  # it died between the two calls
            break
    return share


def use(share: float) -> None:
    """Use ``share`` of a core for ever."""
    began, before = time.monotonic(), time.process_time()
    while True:
        if time.process_time() - before < share * (time.monotonic() - began):
            until = time.monotonic() + SLICE_S
            while time.monotonic() < until:
                pass
        else:
            time.sleep(SLICE_S)


if __name__ == "__main__":
    use(share_until_death(int(sys.argv[1])))

"""Tracks the device memory that building a group takes, so that no group is built if training would
then run short."""

from __future__ import annotations

import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

BUILDS = 5
"""Number of builds of a group that are remembered."""


def free_on(device: torch.device) -> int:
    """Bytes of ``device`` that nobody has allocated, what torch keeps for reuse not included."""
    return torch.cuda.mem_get_info(device)[0]


class BuildMemory:
    """What the builds of one worker have taken, by group. Thread-safe.

    Training allocates and frees meanwhile, and so may other processes on the same device: the
    median of the latest builds counts.

    Args:
        free: returns the free bytes of a device.
    """

    def __init__(self, free: Callable[[torch.device], int] = free_on) -> None:
        self._free = free
        self._changing = threading.Lock()
        self._taken: defaultdict[str, list[int]] = defaultdict(list)

    def check(self, group: str, device: torch.device) -> None:
        """Check that ``group`` fits beside the one that training uses.

        Raises:
            RuntimeError: there is not enough memory.
        """
        need, free = statistics.median(self._taken[group] or [0]), self._free(device)
        if free < need:
            raise RuntimeError(
                f"a second set of communicators needs some {need / 1e6:.0f} MB of the memory of "
                f"{device}, and {free / 1e6:.0f} MB are free: reduce what the script keeps there"
            )

    @contextmanager
    def measured(self, group: str, device: torch.device) -> Iterator[None]:
        """Measure what the caller takes while it builds ``group`` within the context."""
        before = self._free(device)
        yield
        if (took := before - self._free(device)) > 0:
            with self._changing:
                self._taken[group] = [*self._taken[group][1 - BUILDS :], took]

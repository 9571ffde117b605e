"""Tracks the device memory that building a group takes, so that no group is built if training would
then run short."""

from __future__ import annotations

import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tmd.fabric.generations.inner import CannotBuildBeside

BUILDS = 5
"""Number of builds of a group that are remembered, besides the first."""
ENOUGH = 3
"""Number of these from which on they count."""


def free_on(device: torch.device) -> int:
    """Bytes of ``device`` that nobody has allocated, what torch keeps for reuse not included."""
    return torch.cuda.mem_get_info(device)[0]


class BuildMemory:
    """What the builds of one worker have taken, by group. Thread-safe.

    Training allocates and frees meanwhile, and so may other processes on the same device: the
    median of the latest builds counts once there are enough. The first one, which loads kernels,
    too, is the most that counts.

    Args:
        free: returns the free bytes of a device.
    """

    def __init__(self, free: Callable[[torch.device], int] = free_on) -> None:
        self._free = free
        self._changing = threading.Lock()
        self._taken: defaultdict[str, list[int]] = defaultdict(list)

    def need(self, group: str) -> float:
        """The bytes that a second set of communicators of ``group`` needs, as far as known."""
        first, *later = self._taken[group] or [0]
        return min(first, statistics.median(later) if len(later) >= ENOUGH else first)

    def fits(self, group: str, device: torch.device) -> bool:
        """Whether ``group`` fits beside the one that was used before."""
        return self._free(device) >= self.need(group)

    def check(self, group: str, device: torch.device) -> None:
        """Check that ``group`` fits beside the one that training uses.

        Raises:
            CannotBuildBeside: there is not enough memory.
        """
        need, free = self.need(group), self._free(device)
        if free < need:
            raise CannotBuildBeside(
                f"a second set of communicators needs some {need / 1e6:.0f} MB of the memory of "
                f"{device}, and {free / 1e6:.0f} MB are free: reduce what the script keeps there"
            )

    @contextmanager
    def measured(self, group: str, device: torch.device, *, beside: bool) -> Iterator[None]:
        """Measure what the caller takes while it builds ``group`` within the context, ``beside``
        the one that training uses. After a loss earlier groups are freed meanwhile: only the first
        such build counts."""
        before = self._free(device)
        yield
        took = before - self._free(device)
        with self._changing:
            taken = self._taken[group]
            if took > 0 and (beside or not taken):
                self._taken[group] = [*taken[:1], *taken[1:][1 - BUILDS :], took]

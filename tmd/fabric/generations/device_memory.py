"""Device memory that building a group takes, so that none is built where training would lack it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def free_on(device: torch.device) -> int:
    """Bytes of ``device`` that nobody has allocated, what torch keeps for reuse not included."""
    return torch.cuda.mem_get_info(device)[0]


class BuildMemory:
    """What the builds of one worker have taken, by group. One thread builds at a time.

    Args:
        free: returns the free bytes of a device.
    """

    def __init__(self, free: Callable[[torch.device], int] = free_on) -> None:
        self._free = free
        self._taken: dict[str, int] = {}

    @contextmanager
    def build(self, group: str, device: torch.device, *, beside: bool) -> Iterator[None]:
        """Build ``group`` within the context, ``beside`` the group that training uses.

        Training may allocate meanwhile, so that the least of several builds is closest.

        Raises:
            RuntimeError: beside the present group there is not enough memory for it.
        """
        before, need = self._free(device), self._taken.get(group, 0)
        if beside and before < need:
            raise RuntimeError(
                f"a second set of communicators needs some {need / 1e6:.0f} MB of the memory of "
                f"{device}, and {before / 1e6:.0f} MB are free: lower what the script keeps there"
            )
        yield
        took = max(before - self._free(device), 0)
        self._taken[group] = min(took, self._taken.get(group, took))

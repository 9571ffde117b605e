"""A kind of fault: a name, a description, and a function that causes it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from tmd.core.values.errors import TmdError

if TYPE_CHECKING:
    from tmd.campaign.scenario import FaultPart
    from tmd.campaign.stage import CampaignStage

Mend = Callable[[], Awaitable[None]]
"""Undoes a fault; may be called twice."""


class Unfired(TmdError):
    """The fault could not be caused, or nothing proves that it was."""


async def nothing() -> None:
    """Mends a fault that ends by itself."""


def once(*undo: Callable[[], object]) -> Mend:
    """A mend that calls each function once, however often it is called itself, the last function
    first."""
    left = list(undo)

    async def mend() -> None:
        while left:
            await asyncio.to_thread(left.pop())

    return mend


class FaultKind(Struct, frozen=True):
    """One kind of fault. ``act`` returns once the fault has happened, and raises :class:`Unfired`
    otherwise; a kind with ``inside`` instead is caused within the process concerned."""

    name: str
    """``<group>.<what>``."""
    about: str
    act: Callable[[CampaignStage, FaultPart], Awaitable[Mend]] | None = None
    met: Callable[[CampaignStage, FaultPart], Awaitable[None]] | None = None
    """Returns once something has met a fault that lasts. It is called after held processes go on,
    since they may be the only ones that meet the fault."""
    inside: str = ""
    """Name of the fault in :mod:`tmd.campaign.fault_actions`."""
    unable: Callable[[], str] = str
    """Returns why this machine cannot play it; empty if it can."""
    needs_other: bool = False
    """Whether it needs another release of tmd."""

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]

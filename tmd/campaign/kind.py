"""What a kind of fault is: a name, a sentence, and how it is done."""

from __future__ import annotations

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
    """The fault could not be brought about, or there is no proof that it was."""


async def nothing() -> None:
    """The mending of what mends itself."""


class FaultKind(Struct, frozen=True):
    """One kind of fault. ``act`` returns once the fault is there, and raises :class:`Unfired` if it
    is not; a kind that has ``inside`` instead strikes by itself where the process is."""

    name: str
    """``<group>.<what>``."""
    about: str
    act: Callable[[CampaignStage, FaultPart], Awaitable[Mend]] | None = None
    inside: str = ""
    """The blow of :mod:`tmd.campaign.blows`."""
    unable: Callable[[], str] = str
    """Why it cannot be done on this machine; empty if it can."""

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]

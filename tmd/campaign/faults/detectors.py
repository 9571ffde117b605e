"""A detector that raises, hangs, floods or lies: :mod:`tmd.campaign.faulty_detector`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from tmd.campaign import faulty_detector
from tmd.campaign.kind import FaultKind, Mend
from tmd.campaign.scenario import FaultPart
from tmd.campaign.stage import CampaignStage
from tmd.campaign.waiting import until


def _does(word: str) -> Callable[[CampaignStage, FaultPart], Awaitable[Mend]]:
    async def act(stage: CampaignStage, fault: FaultPart) -> Mend:
        hosts = await stage.targets(fault.where)
        files = [stage.folder / f"{faulty_detector.NAME}-{host}" for host in hosts]
        given = [_given(orders, word) for orders in files]
        await until(lambda: all(done() for done in given))

        async def truth() -> None:
            for orders in files:
                await asyncio.to_thread(orders.write_text, "truth")

        return truth

    return act


def _given(orders: Path, word: str) -> Callable[[], bool]:
    """Give the order; returns a function that tells whether it was taken."""
    done = orders.with_suffix(".done")
    done.unlink(missing_ok=True)
    orders.write_text(word)
    return lambda: done.exists() and done.read_text() == word


KINDS = (
    FaultKind("detector.crash", "a detector raises", _does("crash")),
    FaultKind("detector.hang", "a detector hangs", _does("hang")),
    FaultKind(
        "detector.flood", "a detector reports 50,000 different findings at once", _does("flood")
    ),
    FaultKind("detector.lie", "a detector reports a sound host as lost", _does("lie")),
)

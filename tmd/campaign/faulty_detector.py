"""A faulty detector for campaigns: it obeys its host's file, and a real entry point finds it.

It imports only the plug-in API, so that daemons of other releases can load a copy of it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

from tmd.plugin import Detector, DetectorConfig, DetectorContext, Severity, Signal, State

NAME, MODULE = "faulty", "tmd_campaign_faulty"
DISTRIBUTION = {
    "METADATA": "Metadata-Version: 2.1\nName: tmd-campaign\nVersion: 0\n",
    "entry_points.txt": f"[tmd.detectors]\n{NAME} = {MODULE}:FaultyDetector\n",
}
FLOOD = 50_000
LOOK_S = 0.05


class FaultyConfig(DetectorConfig, frozen=True, forbid_unknown_fields=True):
    orders: str = ""
    """The file with one word: crash, hang, flood, lie or truth."""


class FaultyDetector(Detector):
    name: ClassVar[str] = NAME
    Config: ClassVar[type[DetectorConfig]] = FaultyConfig
    deadline_s: ClassVar[float | None] = 1.0

    async def watch(self, ctx: DetectorContext) -> AsyncIterator[Signal]:
        config = ctx.config
        assert isinstance(config, FaultyConfig)
        orders, last = Path(config.orders), ""
        while True:
            word = _word(orders)
            if word != last:
                last = word
                _answer(orders, word)
                async for signal in _obey(word):
                    yield signal
            await ctx.sleep(LOOK_S)


def _answer(orders: Path, word: str) -> None:
    orders.with_suffix(".done").write_text(word)


def _word(orders: Path) -> str:
    return orders.read_text() if orders.exists() else ""


async def _obey(word: str) -> AsyncIterator[Signal]:
    match word:
        case "crash":
            raise RuntimeError("injected error in a detector")
        case "hang":
            await asyncio.Event().wait()
        case "flood":
            for number in range(FLOOD):
                entity = f"thing-{number}"
                yield Signal(f"{NAME}.flood", entity, Severity.WARNING, message=f"it is {number}")
                await asyncio.sleep(0)
        case "lie":
            yield Signal(f"{NAME}.lie", "host", Severity.FATAL, message="all is lost")
        case "truth":
            yield Signal(f"{NAME}.lie", "host", Severity.INFO, State.CLEARED)
            for number in range(FLOOD):
                yield Signal(f"{NAME}.flood", f"thing-{number}", Severity.INFO, State.CLEARED)
        case _:
            return


def install(folder: Path) -> None:
    """Let daemons with ``folder`` in PYTHONPATH find this detector."""
    place = folder / "tmd_campaign-0.dist-info"
    place.mkdir(parents=True)
    for name, text in DISTRIBUTION.items():
        (place / name).write_text(text)
    shutil.copyfile(__file__, folder / f"{MODULE}.py")

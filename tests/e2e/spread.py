"""A job of one of many layouts on two hosts of two ranks each, and two standbys on a third one."""

import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from tests.e2e.conftest import golden_of
from tests.e2e.harness import HOT, LONG, PACE, Golden, Run, running
from tmd.core.values.model import MigrationPlan
from tmd.demo.cluster import ready
from tmd.embedded import EmbeddedRedis

UNLIKE = (
    "unlike",
    "pipeline",
    "single",
    "deep",
    "zero",
    "averaged",
    "pairs",
    "once",
    "eight",
)
"""Layouts whose ranks have different roles."""
HOSTS = ("h1", "h2")
PER_HOST = 2
RANKS = len(HOSTS) * PER_HOST


def script(layout: str) -> str:
    return str(Path(__file__).with_name("stages.py" if layout in UNLIKE else "layouts.py"))


_golden: dict[str, Golden] = {}


def undisturbed(folder: Path, layout: str) -> Golden:
    """The oracle of a layout; runs once for all tests."""
    if layout not in _golden:
        (folder / "golden").mkdir()
        made = golden_of(folder / "golden", (layout, *LONG), RANKS, script(layout))
        _golden[layout] = made
    return _golden[layout]


def with_hot_standby(
    folder: Path, redis: EmbeddedRedis, layout: str
) -> AbstractAsyncContextManager[Run]:
    """Four hosts of one rank each, and a hot standby."""
    return running(
        folder / "run",
        redis.url,
        faults=[PACE],
        more_config=HOT,
        arguments=(layout, *LONG),
        active=("h1", "h2", "h3", "h4"),
        script=script(layout),
    )


def spread(
    folder: Path,
    redis: EmbeddedRedis,
    layout: str,
    *faults: str,
    more_config: str = "",
    more: Sequence[str] = (),
    rehearse: bool = False,
) -> AbstractAsyncContextManager[Run]:
    """Two hosts of two ranks, and a host of two standbys."""
    return running(
        folder / "run",
        redis.url,
        faults=[PACE, *faults],
        more_config=more_config,
        rehearse=rehearse,
        arguments=(layout, *LONG, *more),
        active=HOSTS,
        per_host=PER_HOST,
        script=script(layout),
    )


async def drained(run: Run) -> MigrationPlan:
    """Both ranks of a host have moved, and it stands by."""
    await run.reached("between")
    await run.cluster.until(lambda v: ready(v, RANKS, PER_HOST), "all train, two stand by")
    await run.cluster.drain("h2", soft=True)
    moved = await run.done("drain")
    await run.cluster.until(lambda v: ready(v, RANKS, PER_HOST), "the drained host stands by")
    return moved


def built(run: Run, host: str) -> list[int]:
    """Ranks that the workers of a host were built for."""
    return sorted(int(rank) for rank in re.findall(r"built as rank (\d)", run.cluster.log(host)))

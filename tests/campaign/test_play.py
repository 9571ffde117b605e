"""Whatever fails in a scenario is part of its observation, and of no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import pytest
from msgspec import structs

from tests import values
from tmd.campaign.campaign import Result, _Cluster
from tmd.campaign.play import Play
from tmd.campaign.scenario import Expected, FaultPart, Scenario, Story
from tmd.campaign.stage import CampaignStage
from tmd.core.values.model import Activity, Alert, ClusterView, HostStatus, WorkerStatus

FAULT = FaultPart(kind="process.kill", where="rank 0", when="at forward")
ENDED = "all daemons have ended; last line of h0: no"


def scenario(name: str) -> Scenario:
    return Scenario(name=name, faults=(FAULT,), expect=Expected(repeated=0))


class Broken:
    """A stage on which nothing happens, and whose cluster breaks while it is awaited for the
    ``at``-th time; or which does not start."""

    def __init__(self, at: int, error: Exception, *, starts: bool = True) -> None:
        self.cluster = self
        self.hosts = ["h0"]
        self._at, self._error, self._starts, self._waits = at, error, starts, 0
        self.raised: set[str] = set()
        self.streams: list[list[Alert]] = []
        """What Redis has of alerts each time that it is asked."""
        status = WorkerStatus(*("h0/job/0.a", "job", 1, "", 1), Activity.TRAINING, rank=0, step=9)
        hosts = (HostStatus("h0", "", workers=(status,)),)
        self._view = ClusterView(hosts=hosts, jobs=(values.record("h0"),))

    async def __aenter__(self) -> Self:
        if not self._starts:
            raise self._error
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def whole(self, standbys: int | None = None) -> ClusterView:
        self._waits += 1
        if self._waits == self._at:
            raise self._error
        return self._view

    async def until(self, wanted: Callable[[ClusterView], bool]) -> ClusterView:
        assert wanted(self._view)
        return self._view

    async def views(self) -> AsyncIterator[ClusterView]:
        while True:
            yield self._view
            await asyncio.sleep(0.01)

    async def view(self) -> ClusterView:
        return self._view

    async def alerts(self) -> list[Alert]:
        return self.streams.pop(0) if self.streams else []

    async def leader(self) -> str:
        return "h0#1"

    async def resolved(self, fault: FaultPart) -> FaultPart:
        return fault

    async def fired(self, name: str) -> float:
        return 5.0

    async def describe(self) -> str:
        return "as it is"

    async def is_near_its_last_step(self) -> bool:
        return False

    async def nothing(self, *_: object) -> None:
        pass

    steps = undrain = repair = nothing

    def order(self, *_: object) -> None:
        pass

    withdraw = release = hurry = order

    async def finished(self, within_s: float) -> dict[str, int]:
        return {"h0": 0}


@pytest.mark.parametrize(("at", "fired"), [(1, ()), (2, (5.0,)), (3, (5.0,))])
async def test_a_cluster_that_ends_in_a_scenario_is_its_trouble(
    at: int, fired: tuple[float, ...]
) -> None:
    """Before its faults, after them, and at its end. What was seen until then is kept."""
    stage: Any = Broken(at, RuntimeError(ENDED))
    seen = await Play(stage, scenario("one"), "0-one").run()

    assert seen.trouble == f"RuntimeError: {ENDED}"
    assert (seen.scenario, seen.kinds, seen.fired) == ("one", ("process.kill",), fired)


async def test_a_cluster_that_is_not_whole_in_time_is_described() -> None:
    stage: Any = Broken(1, TimeoutError())
    seen = await Play(stage, scenario("one"), "0-one").run()

    assert seen.trouble == "NotWhole: the cluster was not whole within 120 s\nas it is"


async def test_an_alert_of_an_earlier_scenario_may_be_published_again() -> None:
    """By a host that finds Redis without its data, perhaps in a later scenario."""
    stage: Any = Broken(0, RuntimeError())
    old, new = values.alert(id="old"), values.alert(id="new")
    stage.streams = [[], [old], [], [old, new]]
    found = [
        [a.id for a in (await Play(stage, scenario(name), f"{name}-0").run()).alerts]
        for name in ("one", "two")
    ]

    assert found == [["old"], ["new"]]


class Audience:
    def begins(self, story: str, what: str) -> None:
        pass

    def ended(self, result: Result) -> None:
        pass


class OnBroken(_Cluster):
    def __init__(self, stage: Broken) -> None:
        nobody: Any = Audience()
        super().__init__(Story(name="story"), Path(), (), nobody, nobody)
        self.broken: Any = stage

    def _stage(self) -> CampaignStage:
        return self.broken


@pytest.mark.parametrize(
    ("at", "troubled"), [(3, ["one"]), (6, ["", "two"])], ids=["in the first", "in the second"]
)
async def test_the_scenario_under_way_is_the_last_that_was_seen(
    at: int, troubled: list[str]
) -> None:
    """The others are still to be played, and none is blamed in its place."""
    cluster = OnBroken(Broken(at, RuntimeError(ENDED)))
    scenarios = [scenario(name) for name in ("one", "two", "three")]
    seen, problems = await cluster._on_stage(scenarios)

    assert [s.scenario if s.trouble else "" for s in seen] == troubled
    assert problems == []


@pytest.mark.parametrize("stage", [(1, True), (0, False)], ids=["never whole", "not started"])
async def test_only_a_cluster_that_does_not_start_speaks_for_the_next_one(
    stage: tuple[int, bool],
) -> None:
    """No scenario is played then, and one that this machine cannot play is skipped all the same."""
    at, starts = stage
    cluster = OnBroken(Broken(at, RuntimeError(ENDED), starts=starts))
    unable = structs.replace(scenario("three"), faults=(FaultPart(kind="daemon.upgraded"),))
    first, second, third = (await cluster.play([scenario("one"), scenario("two"), unable]))[0]
    failed = (f"the cluster failed at its start: {ENDED}",)

    assert (first.deviations, second.deviations, third.deviations) == (failed, failed, ())
    assert third.seen.skipped

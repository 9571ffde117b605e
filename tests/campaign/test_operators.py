"""Actions of operators in a campaign: each has happened when it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tmd.campaign.faults import KINDS
from tmd.campaign.kind import Unfired
from tmd.campaign.scenario import FaultPart
from tmd.core.values.model import Activity, ClusterView, HostStatus, WorkerStatus
from tmd.core.values.shadows import Rehearsal

REHEARSE = FaultPart(kind="operator.rehearse", where="host s1")


def view(host: str, *verdicts: Rehearsal) -> ClusterView:
    """A standby on ``host``, with its verdicts."""
    status = WorkerStatus(
        *(f"{host}/job/0.a", "job", 2, "", 1), Activity.STANDBY, rehearsed=verdicts
    )
    return ClusterView(hosts=(HostStatus(host, "", workers=(status,)),))


class Asked:
    """A stage whose views come one after the other. The only request has the id ``new``."""

    def __init__(self, *views: ClusterView) -> None:
        self.left = list(views)
        self.cluster = self

    async def target(self, where: str) -> str:
        return where.partition(" ")[2]

    async def rehearse(self, host: str) -> str:
        return "new"

    async def until(self, wanted: Callable[[ClusterView], bool]) -> ClusterView:
        while self.left:
            if wanted(found := self.left.pop(0)):
                return found
        raise TimeoutError


async def rehearsed(stage: Any) -> None:
    act = KINDS["operator.rehearse"].act
    assert act is not None
    await act(stage, REHEARSE)


@pytest.mark.parametrize("refusal", ["", "it computes other bits"])
async def test_a_rehearsal_has_happened_once_its_request_has_a_verdict(refusal: str) -> None:
    """Of that standby, for that request, whatever it says."""
    verdict = Rehearsal(9, 1.0, refusal, request="new")
    stage = Asked(
        view("s1"),
        view("s1", Rehearsal(5, 1.0, request="old")),
        view("s2", verdict),
        view("s1", verdict),
        view("s1"),
    )
    await rehearsed(stage)

    assert stage.left == [view("s1")]


async def test_a_rehearsal_without_a_verdict_has_not_happened() -> None:
    with pytest.raises(Unfired, match=r"no standby of s1 has answered the request"):
        await rehearsed(Asked(view("s1", Rehearsal(5, 1.0, request="old"))))


async def test_a_rehearsal_without_a_result_has_not_happened() -> None:
    """The standby says why."""
    with pytest.raises(Unfired, match="the standby of s1 has not rehearsed: not in step in time"):
        await rehearsed(
            Asked(view("s1", Rehearsal(5, 1.0, note="not in step in time", request="new")))
        )

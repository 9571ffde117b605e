"""Random campaigns: a pure function of a seed chooses the faults and ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from msgspec import structs

from tmd.campaign.scenario import (
    ClusterPart,
    Expected,
    FaultPart,
    JobPart,
    Scenario,
    Story,
)

NAME = "rounds"
STEPS_PER_ROUND = 150
PACE_S = 0.02
STANDARD = ClusterPart()
"""The usual cluster of a random campaign."""


def cluster_of(stories: Sequence[Story]) -> ClusterPart:
    """The cluster of a random campaign: that of the stories if they share one."""
    found = [story.cluster for story in stories]
    shared = bool(found) and all(part == found[0] for part in found)
    return found[0] if shared else STANDARD


def pool(stories: Sequence[Story]) -> list[Scenario]:
    """Scenarios that need no other cluster, no special job, and leave the cluster as it was."""
    cluster = cluster_of(stories)
    return [
        scenario
        for story in stories
        if story.cluster == cluster and not story.job.arguments
        for scenario in story.scenarios
        if scenario.draw and scenario.standbys is None
    ]


def drawn(
    scenarios: Sequence[Scenario], seed: int, rounds: int, cluster: ClusterPart = STANDARD
) -> Story:
    """``rounds`` of ``scenarios`` on ``cluster``, each with its ranks permuted at random."""
    dice = random.Random(seed)
    found = []
    for number in range(1, rounds + 1):
        scenario = dice.choice(scenarios)
        ranks = list(range(cluster.ranks))
        dice.shuffle(ranks)
        found.append(_with_ranks(scenario, dict(enumerate(ranks)), f"{number}-{scenario.name}"))
    job = JobPart(steps=max(300, STEPS_PER_ROUND * rounds), pace_s=PACE_S)
    return Story(name=NAME, cluster=cluster, job=job, scenarios=tuple(found))


def _with_ranks(scenario: Scenario, ranks: Mapping[int, int], name: str) -> Scenario:
    expect = _moved(scenario.expect, ranks)
    voted = None if scenario.voted is None else _moved(scenario.voted, ranks)
    faults = tuple(_on(fault, ranks) for fault in scenario.faults)
    return structs.replace(scenario, name=name, faults=faults, expect=expect, voted=voted, repeat=1)


def _moved(expect: Expected, ranks: Mapping[int, int]) -> Expected:
    moved = expect.moved
    if moved is None:
        return expect
    return structs.replace(expect, moved=tuple(sorted(ranks[rank] for rank in moved)))


def _on(fault: FaultPart, ranks: Mapping[int, int]) -> FaultPart:
    if fault.rank is None:
        return fault
    return structs.replace(fault, where=f"rank {ranks[fault.rank]}")

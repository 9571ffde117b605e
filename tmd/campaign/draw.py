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
    Network,
    Scenario,
    ServerKind,
    Story,
)

NAME = "rounds"
STEPS_PER_ROUND = 150
PACE_S = 0.02
STANDARD = ClusterPart()
"""The cluster of a random campaign; scenarios that need another one are excluded."""


def pool(stories: Sequence[Story]) -> list[Scenario]:
    """Scenarios that need no special cluster or job and leave the cluster as it was."""
    return [
        scenario
        for story in stories
        if _is_standard(story)
        for scenario in story.scenarios
        if scenario.draw and scenario.standbys is None
    ]


def _is_standard(story: Story) -> bool:
    part = story.cluster
    plain = part.network is Network.SHARED and part.redis is ServerKind.PRIVATE
    return plain and part == STANDARD and not story.job.arguments


def drawn(scenarios: Sequence[Scenario], seed: int, rounds: int) -> Story:
    """``rounds`` of ``scenarios``, each with its ranks permuted at random."""
    dice = random.Random(seed)
    found = []
    for number in range(1, rounds + 1):
        scenario = dice.choice(scenarios)
        ranks = list(range(STANDARD.ranks))
        dice.shuffle(ranks)
        found.append(_renamed(scenario, dict(enumerate(ranks)), f"{number}-{scenario.name}"))
    job = JobPart(steps=max(300, STEPS_PER_ROUND * rounds), pace_s=PACE_S)
    return Story(name=NAME, cluster=STANDARD, job=job, scenarios=tuple(found))


def _renamed(scenario: Scenario, ranks: Mapping[int, int], name: str) -> Scenario:
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

"""The build of a worker, for the first time and for another rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.fabric.circle import KEY
from tests.trainer.contexts import context_of
from tests.trainer.scripts import Script
from tmd.core.values.model import Activity
from tmd.fabric import Fabric, Group, Neutral
from tmd.trainer.session.hooks import SHADOWS
from tmd.trainer.state.roles import Role
from tmd.trainer.state.units import Units, whole_digest
from tmd.trainer.state_transfer.obstacle import Rebuild
from tmd.trainer.worker.warmup import ASLEEP, Warmup

SIZE = 4
ROLES = tuple(Role("alike", (rank // 2 * 2, rank // 2 * 2 + 1)) for rank in range(SIZE))
"""Ranks 0 and 1 are alike, and 2 and 3."""


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    """In the sandbox, as the last of four ranks."""
    made = Fabric("w", KEY)
    made.sandbox(Neutral(), SIZE - 1, SIZE)
    yield made
    made.close()


class Outcome(NamedTuple):
    """What has become of a worker that was to be built as another rank."""

    built_as: int | None
    held_meanwhile: list[str]
    """What was registered when the script's function was called."""
    kept: bool
    """Whether the new objects have the state of those before, or else the state they began with."""
    wears: int | None
    warms_up: bool


def rebuilt(fabric: Fabric, other: Rebuild) -> Outcome:
    before, after = Script(1), Script(2)
    before.train(range(2))
    after.train(range(2))
    registry = before.registry()
    context = context_of(registry, fabric, several=True)
    context.fit.roles.known = ROLES
    old, new = (whole_digest(Units(s.registry()), 0) for s in (before, after))
    seen: list[tuple[int | None, list[str]]] = []

    def build() -> None:
        seen.append((fabric.rank, list(registry.named)))
        registry.renew({"model": after.model, "optimizer": after.optimizers})
        context.state.renew()
        context.fit.renew()

    warmup = Warmup()
    warmup.set_builder(build)
    warmup.become(other, context, SIZE)
    found = whole_digest(context.units, 0)
    assert found in (old, new)
    ((built_as, held),) = seen
    return Outcome(built_as, held, found == old, fabric.rank, warmup.is_due(Activity.STANDBY))


def test_only_a_survivor_keeps_its_state_in_a_rebuild(fabric: Fabric) -> None:
    """A joiner's comes later: a copy of what it has would be memory for nothing."""
    rehearses = rebuilt(fabric, Rebuild(2))
    joins = rebuilt(fabric, Rebuild(2, cold=True))
    survives = rebuilt(fabric, Rebuild(2, cold=True, keeps=True))

    assert rehearses == Outcome(2, [], kept=False, wears=3, warms_up=True)
    assert joins == Outcome(2, [], kept=False, wears=2, warms_up=False)
    assert survives == Outcome(2, [], kept=True, wears=2, warms_up=False)


def test_a_build_function_that_makes_groups_is_refused_at_once(fabric: Fabric) -> None:
    """Not only when a standby is built again, in the midst of a loss."""
    warmup = Warmup()
    warmup.set_builder(lambda: made.append(Group(fabric, "mesh", range(SIZE))))
    made: list[Group] = []
    with pytest.raises(RuntimeError, match="has made process groups"):
        warmup.build(fabric)

    assert len(made) == 1


def test_a_worker_without_a_rank_reports_shadowing() -> None:
    """This includes a joiner on the way to its data position, even with rank 0."""
    assert ASLEEP <= SHADOWS

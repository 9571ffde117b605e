"""A take-over that comes to nothing leaves nobody waiting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.trainer.contexts import context_of
from tests.trainer.scripts import Script
from tests.trainer.wire import linked
from tmd.core.planning.directives import Prepare
from tmd.core.values.model import Member, Membership
from tmd.trainer.protocol.take_over import Takeover
from tmd.trainer.worker.rank_migration import RankMigration


def prepare(plan: str) -> Prepare:
    return Prepare(plan, Membership(2, ()), 1, Member("w", "h", "h:1"), 1)


def test_the_source_of_a_take_over_that_another_replaces_is_told() -> None:
    """It has sent what it has to offer, and waits for an answer while this worker is built."""
    reporter: Any = SimpleNamespace(update=lambda *_, **more: None)
    nobody: Any = None
    migration = RankMigration(reporter, nobody, context_of(Script(1).registry()), nobody)
    with linked() as (source, joiner):
        migration._takeover = Takeover(prepare("p"), joiner)
        migration.expect_state(prepare("q"), "", {})

        assert source.ended
        assert migration._takeover == Takeover(prepare("q"))

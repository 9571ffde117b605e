"""A failed take-over leaves no peer waiting."""

from __future__ import annotations

from pathlib import Path

from tests.trainer.wire import linked
from tests.trainer.workers import worker
from tmd.core.planning.directives import Prepare
from tmd.core.values.model import Activity, Member, Membership
from tmd.trainer.protocol.take_over import Takeover


def prepare(plan: str) -> Prepare:
    return Prepare(plan, Membership(2, ()), 1, Member("w", "h", "h:1"), 1)


def test_the_source_of_a_replaced_take_over_is_notified(tmp_path: Path) -> None:
    """It has sent what it has to offer, and waits for an answer while this worker is built."""
    with worker(tmp_path) as made, linked() as (source, joiner):
        migration = made.parts.migration
        migration._takeover = Takeover(prepare("p"), joiner)
        migration.expect_state(prepare("q"), "", {})

        assert source.ended
        assert migration._takeover == Takeover(prepare("q"))
        assert (made.status.activity, made.status.plan) == (Activity.PREPARED, "q")


def test_a_worker_holds_copies_of_the_present_step_only(tmp_path: Path) -> None:
    """It got others' buffers as the shadow of some rank. The leader asks a holder for those that a
    lost rank had, so a worker must not name copies of an earlier step."""
    with worker(tmp_path) as made:
        migration, local = made.parts.migration, made.context.state.local
        local.hold(0, 5, {})
        made.reporter.update(holds=local.ranks_held(5))
        migration._took(2, 5, {})
        present = made.status.holds
        migration._took(2, 6, {})
        later = made.status.holds
        migration._took(2, 5, {})
        migration.to_pool()

        assert (present, later) == ((0,), ())
        assert made.status.holds == local.ranks_held(5) == ()


def test_a_worker_that_goes_back_to_the_pool_builds_no_groups(tmp_path: Path) -> None:
    """A recovery for which it was ready goes on without it."""
    with worker(tmp_path) as made:
        generations = made.fabric.generations
        generations.prepare((), Membership(3, ()))
        assert generations.wait(0)
        made.parts.migration.to_pool()
        assert generations.refusal == "the preparation was dropped"

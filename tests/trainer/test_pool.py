"""A standby that is asked to be built as ranks that cannot be built on its host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.trainer.contexts import context_of
from tests.trainer.scripts import Script
from tmd.core.planning.directives import ShadowRank, Wait
from tmd.core.values.model import Activity, Member, Rehearsal, WorkerStatus
from tmd.trainer.state.roles import Role, Roles
from tmd.trainer.state_transfer.hindrance import Rebuild
from tmd.trainer.worker.pool import Pool

ASKED = ShadowRank(rank=0, size=4, source=Member("w0", "h0", "a:1"), stay=False)


def pool(directive: object, **status: Any) -> tuple[Pool, Mock]:
    """Of a standby built as rank 3 of four, most of which are like rank 0."""
    roles = Roles(several=True)
    roles.built = 3
    roles.known = tuple(Role(s, (r,)) for r, s in enumerate(["wide", "wide", "wide", "narrow"]))
    reporter = Mock(status=WorkerStatus("w", "j", 4, "a:2", 1, Activity.STANDBY, **status))
    migration = Mock()
    context = context_of(Script(1).registry(), several=True)
    context.fit.roles = roles
    agent: Any = SimpleNamespace(directive=directive)
    return Pool(reporter, agent, context, migration, Mock()), migration.driver


def test_what_cannot_be_built_is_refused_and_the_standby_stays_one() -> None:
    """For a rehearsal no process ends: it is built again as it was before."""
    standby, shadowing = pool(ASKED)
    warmup = Mock(become=Mock(side_effect=[MemoryError("too wide"), None]))

    standby.become(Rebuild(0), warmup)

    assert [call.args[0].rank for call in warmup.become.call_args_list] == [0, 3]
    shadowing.not_tried.assert_called_once_with(
        ASKED, refusal="cannot be built as rank 0 here: too wide"
    )


def test_what_cannot_be_built_for_a_plan_is_an_error() -> None:
    """Then the rank has to go to another standby: the process ends and says why."""
    standby, shadowing = pool(Wait())

    with pytest.raises(MemoryError):
        standby.become(Rebuild(0), Mock(become=Mock(side_effect=MemoryError)))

    shadowing.not_tried.assert_not_called()


@pytest.mark.parametrize("refusal", ["", "cannot be built"])
def test_nobody_settles_on_what_was_refused(refusal: str) -> None:
    verdict = Rehearsal(0, 0.0, refusal, role="wide", ranks=(0, 1, 2))
    standby, _ = pool(Wait(), rehearsed=(verdict,))
    assert standby._settle() == (None if refusal else Rebuild(2))

"""The hooks of a managed job, as far as they work without other workers."""

from __future__ import annotations

from typing import Any

import pytest

from tmd.core.values.model import Activity
from tmd.testing.clients import worker_status
from tmd.trainer.session.hooks import Interrupted, VoteOutcome
from tmd.trainer.worker.coordinator import Coordinator

NO_STATE: Any = None


def test_a_second_step_in_the_batch_of_a_broken_one_is_interrupted() -> None:
    """The script continues to its next boundary; a vote there would end a healthy worker."""
    coordinator = Coordinator(worker_status("h1/j/0", activity=Activity.STUCK))

    with pytest.raises(Interrupted):
        coordinator.vote(NO_STATE)


@pytest.mark.parametrize("activity", [Activity.STARTING, Activity.STANDBY])
def test_a_step_of_a_worker_without_a_rank_is_not_committed(activity: Activity) -> None:
    """Its optimizer runs, so that a shadow iteration warms everything up."""
    coordinator = Coordinator(worker_status("h1/j/0", activity=activity))

    assert coordinator.vote(NO_STATE) is VoteOutcome.SHADOW

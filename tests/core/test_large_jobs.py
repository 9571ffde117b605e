"""How large the record of a job gets, which all hosts of the job read."""

from __future__ import annotations

import msgspec
import pytest

from tests.values import large
from tmd.core.planning.plan_history import HISTORY

PLAN = 1_000
"""Bytes of a past plan, whatever the size of the job."""


def nbytes(value: object) -> int:
    return len(msgspec.json.encode(value))


@pytest.mark.parametrize("ranks", [1_024, 16_384])
def test_a_past_plan_takes_as_much_in_a_large_job_as_in_a_small_one(ranks: int) -> None:
    record = large(ranks, plans=HISTORY + 5)

    assert len(record.history) == HISTORY
    assert nbytes(record.history) < HISTORY * PLAN


def test_a_record_with_a_plan_has_four_memberships_at_most() -> None:
    """That of the job; of the plan the old and the new one, and the witnesses of a failover."""
    record = large(1_024, plans=HISTORY)

    assert nbytes(record) < 4 * nbytes(record.membership) + HISTORY * PLAN

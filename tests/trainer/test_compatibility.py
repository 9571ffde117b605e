"""Checks which worker can assume which rank: process groups and gradient buckets."""

from __future__ import annotations

import pytest

from tests.fabric.test_grouping import TABLE
from tmd.fabric import GroupView
from tmd.trainer.state.compatibility import bucket_mismatch, group_mismatch
from tmd.trainer.state.roles import Role

WORLD = GroupView("0", (0, 1, 2, 3))
THREE = GroupView("0", (0, 1, 2))
HALVES = (
    (THREE, GroupView("1", (0, 1))),
    (THREE, GroupView("1", (0, 1))),
    (THREE, GroupView("2", (2,))),
)
RING = tuple(
    (WORLD, GroupView(f"{r}", (r, (r + 1) % 4)), GroupView(f"{(r - 1) % 4}", ((r - 1) % 4, r)))
    for r in range(4)
)
"""Each rank with its next and its previous one: a rank is previous to its next one."""


@pytest.mark.parametrize("rank", range(4))
def test_a_worker_with_the_groups_of_one_rank_can_be_any_rank(rank: int) -> None:
    assert all(group_mismatch(row, TABLE, rank) == "" for row in TABLE)
    assert group_mismatch((*TABLE[3], GroupView("9", WORLD.ranks)), TABLE, rank) == ""


@pytest.mark.parametrize(
    ("ours", "table"),
    [
        (RING[3], RING),
        ((WORLD, TABLE[3][2], TABLE[3][1]), TABLE),
        (TABLE[3][:2], TABLE),
        ((*TABLE[3], GroupView("9", (2, 3))), TABLE),
        ((WORLD, GroupView("9", WORLD.ranks), *TABLE[3][1:]), TABLE),
        (TABLE[3], (*TABLE[:3], TABLE[3][:2])),
        (HALVES[2], HALVES),
        (TABLE[3], ()),
    ],
    ids=[
        "a ring",
        "another order",
        "too few",
        "a later pair",
        "one between",
        "unlike",
        "halves",
        "none told",
    ],
)
def test_groups_without_a_counterpart_are_refused(ours, table) -> None:
    assert "build their groups alike" in group_mismatch(ours, table, 0)


def test_a_rank_whose_role_is_unknown_is_not_refused_for_its_buckets() -> None:
    roles = [Role("s", (0,), buckets="b")]

    assert [bool(bucket_mismatch("a", roles, rank)) for rank in range(2)] == [True, False]

"""Checks which worker can assume which rank: process groups and gradient buckets."""

from __future__ import annotations

import pytest
from torch import nn

from tests.fabric.test_grouping import TABLE
from tmd.fabric import GroupView
from tmd.trainer.state.compatibility import bucket_layout, group_mismatch

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


class Reducing(nn.Module):
    """A DDP module that has rebuilt its buckets, or not yet."""

    def __init__(self, buckets: str) -> None:
        super().__init__()
        self.buckets = buckets

    def _get_ddp_logging_data(self) -> dict[str, str]:
        return {"rebuilt_per_bucket_param_indices": self.buckets}


def test_buckets_are_known_once_all_are_rebuilt() -> None:
    settled, fresh, plain = Reducing("1 0"), Reducing(""), nn.Linear(1, 1)

    assert bucket_layout([settled, plain, settled]) == "1 0|1 0"
    assert bucket_layout([settled, fresh]) == ""
    assert bucket_layout([fresh, fresh]) == ""
    assert bucket_layout([plain]) == ""

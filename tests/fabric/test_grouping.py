"""The groups of a process become those of another rank."""

from __future__ import annotations

import pytest

from tmd.fabric import GroupView, packed, unpacked
from tmd.fabric.grouping import Groups

TABLE = (
    (GroupView("0", (0, 1, 2, 3)), GroupView("1", (0, 1)), GroupView("3", (0, 2))),
    (GroupView("0", (0, 1, 2, 3)), GroupView("1", (0, 1)), GroupView("4", (1, 3))),
    (GroupView("0", (0, 1, 2, 3)), GroupView("2", (2, 3)), GroupView("3", (0, 2))),
    (GroupView("0", (0, 1, 2, 3)), GroupView("2", (2, 3)), GroupView("4", (1, 3))),
)
"""Groups of two."""


class Plain:
    """A group that does nothing."""

    def __init__(self, view: GroupView) -> None:
        self.view = view

    def assume(self, view: GroupView) -> None:
        self.view = view


def built(rank: int) -> tuple[Groups, list[Plain]]:
    groups, plain = Groups(), [Plain(view) for view in TABLE[rank]]
    for each in plain:
        groups.add(each)  # type: ignore[arg-type]
    groups.table = TABLE
    return groups, plain


@pytest.mark.parametrize("rank", range(4))
def test_the_nth_group_is_the_nth_of_any_rank(rank: int) -> None:
    groups, plain = built(3)

    assert groups.assume(rank) == (rank != 3)
    assert groups.views == TABLE[rank]
    assert groups.built == TABLE[3]
    assert not groups.assume(rank)
    found: object = groups.named(TABLE[rank][1].name)
    assert found is plain[1]


def test_a_group_that_all_destroy_leaves_no_gap() -> None:
    groups, plain = built(3)
    groups.remove(plain[1])  # type: ignore[arg-type]
    groups.assume(0)

    assert groups.views == (TABLE[0][0], TABLE[0][2])


def test_groups_built_later_stay() -> None:
    groups, _ = built(3)
    late = GroupView("9", (0, 1, 2, 3))
    groups.add(Plain(late))  # type: ignore[arg-type]
    groups.assume(1)

    assert groups.views == (*TABLE[1], late)


def test_without_a_table_the_groups_stay_the_same() -> None:
    groups, _ = built(3)
    groups.table = ()

    assert not groups.assume(0)
    assert groups.views == TABLE[3]


def test_the_packed_table_omits_the_world() -> None:
    sent = packed(TABLE)

    assert all(row[0] == GroupView("0", ()) for row in sent)
    assert unpacked(sent) == TABLE
    assert len({id(row[0]) for row in unpacked(sent)}) == 1

"""Replacing one member: who opens which links, and that the numbers do not change."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from tests.fabric.circle import KEY, PATIENCE, Circle, circle, member
from tmd.core.values.errors import LinkError
from tmd.core.values.model import Membership
from tmd.fabric import EpochView, Fabric, Group, GroupTable, GroupView, Link, Neutral
from tmd.fabric.inbox import Inbox, UnclaimedMessage
from tmd.fabric.topology import neighbours

pytestmark = pytest.mark.timeout(60)


def opened(fabrics: list[Fabric]) -> dict[str, Counter[tuple[str, str]]]:
    return {f.worker: Counter(f.counters.by_peer) for f in fabrics}


def replace(c: Circle, rank: int, joiner: Fabric) -> int:
    """Planned replacement of ``rank``; returns how many links the joiner opened before it."""
    new = c.membership.replaced({rank: member(joiner)}, c.membership.epoch + 1)
    count = joiner.prepare(new, rank, timeout=5, cancel=lambda: False)
    leaver = c.fabrics[rank]
    everybody = [*c.fabrics, joiner]
    places = [None if f is leaver else new.rank_of(f.worker) for f in everybody]
    for fabric, place in zip(everybody, places, strict=True):
        fabric.switch(new, place)
    c.fabrics[rank], c.membership = joiner, new
    return count


@pytest.mark.parametrize("size", [4, 8, 16])
def test_only_the_joiner_opens_links_one_per_neighbour(size: int) -> None:
    with circle(size) as c:
        c.group()
        c.allreduce()
        c.allreduce(300_000)
        c.each(lambda f: f.reduce_min([1]))
        leaver = 2
        stayers = [f for i, f in enumerate(c.fabrics) if i != leaver]
        before = opened(stayers)
        joiner = c.standby("joiner")

        count = replace(c, leaver, joiner)
        c.allreduce()
        c.allreduce(300_000)
        c.each(lambda f: f.reduce_min([1]))

        near = neighbours(leaver, size)
        expected = Counter((g, f"w{n}") for g in ("0", "@vote") for n in near)
        assert joiner.counters.by_peer == expected
        assert count == joiner.counters.opened == 2 * len(near)
        for fabric in stayers:
            new = opened([fabric])[fabric.worker] - before[fabric.worker]
            rank = int(fabric.worker[1:])
            groups = ("0", "@vote") if rank in near else ()
            assert new == Counter({(g, "joiner"): 1 for g in groups})


@pytest.mark.parametrize("length", [10, 1000, 500_000])
def test_results_are_bit_identical_before_and_after(length: int) -> None:
    with circle(5) as c:
        c.group()
        before = c.allreduce(length)
        replace(c, 3, c.standby("a"))
        replace(c, 0, c.standby("b"))
        after = c.allreduce(length)
        assert all(torch.equal(before[0], t) for t in (*before, *after))


def test_groups_without_the_rank_are_untouched() -> None:
    with circle(4) as c:
        c.group("left", [0, 1])
        c.group("right", [2, 3])
        joiner = c.standby("joiner", rank=3)
        replace(c, 3, joiner)
        assert {group for group, _ in joiner.counters.by_peer} == {"right", "@vote"}


def test_leaver_is_in_the_sandbox_afterwards() -> None:
    with circle(3) as c:
        c.group()
        c.allreduce()
        leaver = c.fabrics[1]
        replace(c, 1, c.standby("joiner"))
        tensor = torch.full((4,), 7.0)
        c.of(leaver).allreduce([tensor]).wait()
        assert (leaver.membership, leaver.rank) == (None, 1)
        assert tensor.tolist() == [7.0] * 4
        assert len(c.allreduce()) == 3


def test_a_worker_may_leave_and_return() -> None:
    with circle(3) as c:
        c.group()
        first = c.allreduce()
        leaver = c.fabrics[1]
        replace(c, 1, c.standby("joiner"))
        c.allreduce()
        replace(c, 1, leaver)
        assert torch.equal(first[0], c.allreduce()[2])


def test_two_joiners_at_once_share_one_link() -> None:
    with circle(4) as c:
        c.group()
        before = c.allreduce()
        a, b = c.standby("a"), c.standby("b")
        new = c.membership.replaced({1: member(a), 2: member(b)}, 2)
        for fabric, rank in ((b, 2), (a, 1)):
            fabric.prepare(new, rank, timeout=5, cancel=lambda: False)
        for fabric in c.all:
            fabric.switch(new, new.rank_of(fabric.worker))
        c.fabrics[1:3], c.membership = [a, b], new
        assert torch.equal(before[0], c.allreduce()[1])


def test_prepare_and_discard_leave_nothing() -> None:
    with circle(4) as c:
        c.group()
        before = c.allreduce()
        joiner = c.standby("joiner")
        new = c.membership.replaced({2: member(joiner)}, 2)
        joiner.prepare(new, 2, timeout=5, cancel=lambda: False)
        for fabric in c.all:
            fabric.discard(new)
        assert [f.parked for f in c.all] == [0] * 5
        assert torch.equal(before[0], c.allreduce()[0])
        replace(c, 2, c.standby("other"))
        assert torch.equal(before[0], c.allreduce()[0])


def test_a_joiner_that_dies_after_it_was_prepared_is_missed_by_its_neighbours() -> None:
    """A live one is not missed, whatever became of its links: they are reopened when needed."""
    with circle(4) as c:
        c.group()
        c.allreduce()
        joiner = c.standby("joiner")
        new = c.membership.replaced({2: member(joiner)}, 2)
        joiner.prepare(new, 2, timeout=5, cancel=lambda: False)
        prepared = [f.joiner_gone(new) for f in c.fabrics]
        joiner.discard(new)
        hung_up = [f.joiner_gone(new) for f in c.fabrics]
        joiner.close()

        assert prepared == hung_up == [False] * 4
        assert [f.joiner_gone(new) for f in c.fabrics] == [True, True, False, True]


def test_prepare_fails_if_a_neighbour_is_gone() -> None:
    with circle(4) as c:
        c.group()
        joiner = c.standby("joiner")
        c.fabrics[3].close()
        new = c.membership.replaced({2: member(joiner)}, 2)
        with pytest.raises(LinkError, match="w3"):
            joiner.prepare(new, 2, timeout=1, cancel=lambda: False)
        assert joiner.parked == 0


def test_prepare_can_be_cancelled() -> None:
    with circle(3) as c:
        c.group()
        joiner = c.standby("joiner")
        new = c.membership.replaced({2: member(joiner)}, 2)
        with pytest.raises(LinkError, match="cancelled"):
            joiner.prepare(new, 2, timeout=1, cancel=lambda: True)


def test_a_joiner_assumes_the_rank_before_it_holds_it() -> None:
    with circle(3) as c:
        c.group()
        joiner = c.standby("joiner", rank=0)
        new = c.membership.replaced({2: member(joiner)}, 2)
        joiner.prepare(new, 2, timeout=5, cancel=lambda: False)
        assert (joiner.rank, c.of(joiner).rank(), joiner.membership) == (2, 2, None)


def divided(c: Circle) -> GroupTable:
    """Eight ranks in pairs, in fours across them, and all together; by rank."""
    layout = {
        "0": range(8),
        **{f"pair{i}": (2 * i, 2 * i + 1) for i in range(4)},
        **{f"four{i}": range(i, 8, 2) for i in range(2)},
    }
    for name, ranks in layout.items():
        c.group(name, ranks)
    views = [GroupView(name, tuple(ranks)) for name, ranks in layout.items()]
    return tuple(tuple(v for v in views if rank in v.ranks) for rank in range(8))


def test_a_standby_of_the_last_rank_becomes_a_rank_of_other_groups() -> None:
    """Its groups are that rank's, with the same bits; links only in groups with the leaver."""
    with circle(8) as c:
        table = divided(c)
        joiner = Fabric("joiner", KEY)
        c.all.append(joiner)
        joiner.sandbox(Neutral(), 7, 8)
        own = {view.name: c.add_to(view.name, joiner, view.ranks) for view in table[7]}
        joiner.learn(table)
        names = [view.name for view in table[2]]
        undisturbed = {name: c.allreduce(name=name) for name in names}
        c.each(lambda f: f.reduce_min([1]))
        before = opened(c.fabrics)

        replace(c, 2, joiner)
        for name, group in zip(names, own.values(), strict=True):
            c.groups[name]["joiner"] = group
        after = {name: c.allreduce(name=name) for name in names}
        c.each(lambda f: f.reduce_min([1]))

        for name in names:
            assert all(map(torch.equal, undisturbed[name], after[name]))
        everywhere = GroupView("@vote", tuple(range(8)))
        for rank, fabric in enumerate(c.fabrics):
            new = opened([fabric])[fabric.worker] - before.get(fabric.worker, Counter())
            shared = [v for v in (*table[2], everywhere) if rank in v.ranks]
            near = [v.name for v in shared if close_by(v.ranks, rank, 2)]
            assert fabric is joiner or new == Counter({(name, "joiner"): 1 for name in near})


def test_a_receive_pending_while_others_move_gets_its_message() -> None:
    """Nothing is poisoned, and messages from before the move are found after it."""
    with circle(3) as c:
        c.group()
        c.allreduce()
        sender, receiver, _ = c.fabrics
        early, pending, late = (torch.zeros(3) for _ in range(3))
        works = [c.of(receiver).recv([pending], 0, 1)]
        c.of(sender).send([torch.ones(3)], 1, 0).wait()
        wait_for(lambda: inbox(c, receiver).sources(0) == {0} and inbox(c, receiver)._messages)
        replace(c, 2, c.standby("joiner", rank=2))
        assert not works[0].is_completed()

        works.append(c.of(receiver).recv([early], 0, 0))
        for tag in (1, 2):
            c.of(sender).send([torch.full((3,), 1.0 + tag)], 1, tag).wait()
        works.append(c.of(receiver).recv([late], 0, 2))
        for work in works:
            work.wait()

        assert [t[0].item() for t in (early, pending, late)] == [1.0, 2.0, 3.0]
        assert not receiver.poisoned


def test_a_message_late_for_its_epoch_counts_in_the_next() -> None:
    """A sender may be one switch behind or ahead; after a loss the message belongs to no epoch."""
    with circle(3) as c:
        c.group()
        sender, receiver, leaver = c.fabrics
        joiner = c.standby("joiner", rank=2)
        new = c.membership.replaced({2: member(joiner)}, 2)
        received = [torch.zeros(1) for _ in range(2)]
        works = [c.of(receiver).recv([received[0]], 0, 0)]
        sender.switch(new, 0)
        view = receiver.standing
        assert view is not None
        c.of(receiver)._mailbox._verify(view, 0)  # as for each receive without a link
        with pytest.raises(LinkError, match="it has abandoned epoch 1"):
            view.verify_patiently(member(sender))  # as a collective does, which it will not join
        c.of(sender).send([torch.ones(1)], 1, 0).wait()
        receiver.switch(new, 1)
        works[0].wait()
        leaver.switch(new, None)
        newer = new.replaced({2: member(leaver)}, 3)
        receiver.switch(newer, 1)
        works.append(c.of(receiver).recv([received[1]], 0, 0))
        c.of(sender).send([torch.ones(1)], 1, 0).wait()
        works[1].wait()
        assert [t.item() for t in received] == [1.0, 1.0]

        c.of(sender).send([torch.ones(1)], 1, 0).wait()
        wait_for(lambda: bool(inbox(c, receiver)._messages))
        receiver.enter(newer.replaced({}, 4), 1)
        # A reading thread may have had it already.
        inbox(c, receiver).arrive(UnclaimedMessage(0, 0, epoch=3, dtype=0, data=bytearray(4)))
        assert not inbox(c, receiver)._messages


def test_a_break_after_the_vote_does_not_break_the_next_epoch() -> None:
    """The vote has agreed on a switch, and then a reduction for a log breaks on a link."""
    with circle(2) as c:
        c.group()
        before = c.allreduce()
        for fabric in c.fabrics:
            fabric.poison("a link broke")
        new = c.membership.replaced({}, 2)
        for rank, fabric in enumerate(c.fabrics):
            fabric.switch(new, rank)
        after = c.allreduce()

        assert [fabric.poisoned for fabric in c.fabrics] == [False, False]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_a_worker_that_returns_does_not_count_as_gone() -> None:
    """Although a receiver saw it close the link before it entered the next epoch itself."""
    with circle(2) as c:
        c.group()
        leaver, receiver = c.fabrics
        tensor = torch.zeros(1)
        c.of(leaver).send([torch.ones(1)], 1, 0).wait()
        c.of(receiver).recv([tensor], 0, 0).wait()
        joiner = c.standby("joiner")
        new = c.membership.replaced({0: member(joiner)}, 2)
        joiner.prepare(new, 0, timeout=5, cancel=lambda: False)
        leaver.switch(new, None)
        wait_for(lambda: "w0" in c.of(receiver)._mailbox._gone)
        for fabric, rank in ((receiver, 1), (joiner, 0)):
            fabric.switch(new, rank)
        c.fabrics[0], c.membership = joiner, new
        replace(c, 0, leaver)
        work = c.of(receiver).recv([tensor], 0, 0)
        c.of(leaver).send([torch.full((1,), 2.0)], 1, 0).wait()
        work.wait()

        assert tensor.item() == 2.0
        assert not receiver.poisoned


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_rank_with_messages_in_flight_is_not_moved(moved: int) -> None:
    """The joiner would not get them; messages of other ranks do not matter."""
    with circle(3) as c:
        c.group()
        joiner = c.standby("joiner", rank=moved)
        new = c.membership.replaced({moved: member(joiner)}, 2)
        receiver = c.fabrics[1]

        def held_up() -> list[bool]:
            return [fabric.has_in_flight(new) for fabric in c.fabrics]

        assert held_up() == [False] * 3
        c.of(c.fabrics[0]).send([torch.ones(3)], 1, 0).wait()
        wait_for(lambda: bool(inbox(c, receiver)._messages))
        concerned = [False, moved in (0, 1), False]
        assert held_up() == concerned
        c.of(receiver).recv([torch.zeros(3)], 0, 0).wait()
        assert held_up() == [False] * 3
        work = c.of(receiver).recv([torch.zeros(3)], 0, 0)
        assert held_up() == concerned
        c.of(c.fabrics[0]).send([torch.ones(3)], 1, 0).wait()
        work.wait()
        wait_for(lambda: held_up() == [False] * 3)


def test_a_failed_receive_is_no_longer_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the rank could never be followed again."""
    with circle(2) as c:
        c.group()
        group = c.of(c.fabrics[1])

        def broken(_: threading.Thread) -> None:
            raise RuntimeError("no thread left")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", broken)
            group.recv([torch.zeros(3)], 0, 0).wait()

        assert "no thread left" in c.fabrics[1].poison_reason
        assert not group.expects_message


def inbox(c: Circle, fabric: Fabric) -> Inbox:
    return c.of(fabric)._mailbox._inbox


def wait_for(enough: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not enough():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def close_by(ranks: tuple[int, ...], one: int, other: int) -> bool:
    """Whether two ranks of a group communicate."""
    return ranks.index(one) in neighbours(ranks.index(other), len(ranks))


def test_links_of_the_next_epoch_are_opened_ahead() -> None:
    """After a loss: one end of each link dials ahead, and the first operation opens none."""
    with circle(4) as c:
        c.group()
        before = c.allreduce()
        joiner = c.standby("joiner", rank=3)
        new = c.membership.replaced({1: member(joiner)}, c.membership.epoch + 1)
        for fabric in c.fabrics:
            fabric.poison("rank 1 is lost")
        c.fabrics[1] = joiner
        called = c.each(
            lambda f: f.prepare_recovery(
                new, new.rank_of(f.worker), timeout=5, cancel=lambda: False
            )
        )
        for rank, fabric in enumerate(c.fabrics):
            fabric.enter(new, rank)
        opened_ahead = opened(c.fabrics)
        after = c.allreduce()
        c.each(lambda f: f.reduce_min([1]))

        pairs = sum(len(neighbours(rank, 4)) for rank in range(4)) // 2
        assert sum(called) == 2 * pairs
        assert opened(c.fabrics) == opened_ahead
        assert all(map(torch.equal, before, after))


def test_an_unreachable_peer_is_left_to_the_first_operation() -> None:
    with circle(4) as c:
        c.group()
        joiner = c.standby("x", rank=3)
        new = c.membership.replaced({1: member(joiner)}, c.membership.epoch + 1)
        joiner.close()

        assert c.fabrics[0].prepare_recovery(new, 0, timeout=5, cancel=lambda: False) == 0


class CountedReaders(Group):
    """A group that records the links it reads, and runs ``meanwhile`` when an epoch ends."""

    readers: list[str]
    meanwhile: Callable[[], None]

    def attach(self, link: Link) -> None:
        self.readers.append(link.peer)
        super().attach(link)

    def abandon(self, standing: EpochView) -> None:
        super().abandon(standing)
        self.meanwhile()


def test_a_message_that_arrives_while_an_epoch_is_entered_is_read_once() -> None:
    """Two readers of one link would take bytes from each other."""
    with circle(2) as c:
        sender, receiver = c.fabrics
        later = Membership(epoch=2, members=c.membership.members)
        c.groups["0"] = {}
        c.add_to("0", sender, range(2))
        group = CountedReaders(receiver, "0", range(2))
        c.groups["0"][receiver.worker] = group
        group.readers, sent = [], []

        def meanwhile() -> None:
            """Between entering the new epoch and taking over what waited for it."""
            present = receiver.standing
            if sent or present is None:
                return
            sent.append(c.of(sender).send([torch.ones(3)], 1, 0).wait())
            with present.changed:
                here = [k for k in present.links if k.purpose == "messages"]
                assert here or present.changed.wait(PATIENCE)

        group.meanwhile = meanwhile
        sender.enter(later, 0)
        receiver.enter(later, 1)
        tensor = torch.zeros(3)
        assert group.recv([tensor], 0, 0).wait()
        assert sent == [True]
        assert group.readers == ["w0"]
        assert tensor.tolist() == [1.0] * 3

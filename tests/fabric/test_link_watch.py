"""The end of a peer is noticed although nobody reads its links."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fabric.circle import Circle, member
from tests.fabric.test_abort import die
from tests.trainer.wire import Facts
from tmd.core.values.errors import LinkError
from tmd.core.values.model import Membership
from tmd.fabric import Fabric
from tmd.fabric.frame import VOTE
from tmd.fabric.generations.generations import Generations
from tmd.fabric.generations.ring import RingKind
from tmd.fabric.topology import partners

pytestmark = pytest.mark.timeout(60)


@contextmanager
def watched(size: int, *, votes: bool = True) -> Iterator[Circle]:
    """Ranks that have voted once, or never, and then read nothing."""
    made = Circle(size)
    try:
        for fabric in made.fabrics:
            fabric.pass_to(Generations(RingKind(fabric)))
        later = Membership(epoch=2, members=made.membership.members)
        made.membership = later
        made.each(lambda f: f.enter(later, made.fabrics.index(f)))
        if votes:
            made.each(lambda f: f.reduce_min([1]))
        yield made
    finally:
        made.close()


def test_a_death_poisons_ranks_that_compute() -> None:
    with watched(3) as c:
        survivors = c.fabrics[:2]
        die(c.fabrics[2])
        Facts().until(lambda: all(f.poisoned for f in survivors))
        assert [f.suspects for f in survivors] == [("w2",)] * 2


def test_a_death_before_the_first_vote_is_noticed() -> None:
    """The links of the vote are opened when the epoch begins."""
    with watched(3, votes=False) as c:
        survivors = c.fabrics[:2]
        die(c.fabrics[2])
        Facts().until(lambda: all(f.poisoned for f in survivors))
        assert [f.suspects for f in survivors] == [("w2",)] * 2


@pytest.mark.parametrize("size", range(1, 10))
def test_the_partners_of_a_vote_are_those_whose_links_it_opens(size: int) -> None:
    with watched(size) as c:
        opened = [set(f.counters.by_peer) for f in c.fabrics]
        assert opened == [{(VOTE, f"w{n}") for n in partners(r, size)} for r in range(size)]


def test_the_links_of_a_recovery_are_opened_once() -> None:
    """A second link would replace the first, whose end the peer would take for a loss."""
    with watched(2) as c:
        later = Membership(epoch=3, members=c.membership.members)
        ahead = {"timeout": 5.0, "cancel": lambda: False}
        before = c.fabrics[0].counters.by_peer[VOTE, "w1"]
        c.each(lambda f: f.prepare_recovery(later, c.fabrics.index(f), **ahead))
        for rank in (1, 0):
            c.fabrics[rank].enter(later, rank)
        assert c.each(lambda f: f.reduce_min([1])) == [(1,)] * 2
        assert c.fabrics[0].counters.by_peer[VOTE, "w1"] == before + 1


def test_a_rank_that_ends_in_good_order_breaks_nothing() -> None:
    """Others may still be behind. Only the worker that is killed next is suspected."""
    with watched(4) as c:
        done, watches, _, dead = c.fabrics
        done.close()
        die(dead)
        Facts().until(lambda: watches.poisoned)
        assert watches.suspects == ("w3",)


def test_a_vote_that_was_sent_before_the_end_is_read() -> None:
    with watched(2) as c:
        first, second = c.fabrics

        def vote_and_end(fabric: Fabric) -> tuple[int, ...]:
            result = fabric.reduce_min([2])
            if fabric is first:
                fabric.close()
            return result

        assert c.each(vote_and_end) == [(2,), (2,)]
        with pytest.raises(LinkError, match="w0"):
            second.reduce_min([3])
        assert second.suspects == ("w0",)


def test_a_rank_that_gives_its_place_away_breaks_nothing() -> None:
    """It switches before the others do."""
    with watched(4) as c:
        leaver, watches, _, dead = c.fabrics
        leaver.switch(c.membership, None)
        die(dead)
        Facts().until(lambda: watches.poisoned)
        assert watches.suspects == ("w3",)


def test_a_rank_whose_peers_switch_first_breaks_nothing() -> None:
    """It gives its place away, and is still in the last step of its epoch."""
    with watched(4) as c:
        stayer, _, leaver, dead = c.fabrics
        joiner = c.standby("joiner", rank=2)
        later = c.membership.replaced({2: member(joiner)}, 3)
        stayer.generations.prepare([], later)
        stayer.switch(later, 0)
        die(dead)
        Facts().until(lambda: leaver.poisoned)
        assert leaver.suspects == ("w3",)


def test_a_joiner_that_dies_before_the_switch_poisons_the_new_epoch() -> None:
    """The collectives of inner groups would wait for it, and no link would end any more."""
    with watched(4) as c:
        joiner = c.standby("joiner", rank=2)
        later = c.membership.replaced({2: member(joiner)}, 3)
        joiner.prepare(later, 2, timeout=10, cancel=lambda: False)
        stayers = [f for rank, f in enumerate(c.fabrics) if rank != 2]
        near = [c.fabrics[rank] for rank in partners(2, 4)]
        die(joiner)
        Facts().until(lambda: all(f.joiner_gone(later) for f in near))
        for stayer in stayers:
            stayer.generations.prepare([], later)
            stayer.switch(later, c.fabrics.index(stayer))
        Facts().until(lambda: all(f.poisoned for f in stayers))
        assert {s for f in stayers for s in f.suspects} == {"joiner"}


def test_a_link_of_an_epoch_that_is_over_says_nothing() -> None:
    with watched(3) as c:
        survivors, dead = c.fabrics[:2], c.fabrics[2]
        later = Membership(epoch=3, members=c.membership.members[:2])
        c.each(lambda f: f.enter(later, c.fabrics.index(f)), survivors)
        c.each(lambda f: f.reduce_min([1]), survivors)
        die(dead)
        die(survivors[1])
        Facts().until(lambda: survivors[0].poisoned)
        assert survivors[0].suspects == ("w1",)


def test_links_that_were_closed_here_are_forgotten() -> None:
    """And the descriptor of the watch is closed at the end."""
    with watched(2) as c:
        for epoch in (3, 4):
            later = Membership(epoch=epoch, members=c.membership.members)
            c.each(lambda f, later=later: f.enter(later, c.fabrics.index(f)))
            c.each(lambda f: f.reduce_min([1]))
        watch = c.fabrics[0]._watch
        assert len(watch._links) == 1
        c.fabrics[0].close()
        Facts().until(lambda: watch._epoll is not None and watch._epoll.closed)


def test_without_inner_groups_nothing_is_watched() -> None:
    """An operation that runs notices the end itself."""
    c = Circle(2)
    try:
        c.each(lambda f: f.reduce_min([1]))
        die(c.fabrics[1])
        with pytest.raises(LinkError):
            c.fabrics[0].reduce_min([1])
    finally:
        c.close()

"""Data that peers may leave here unrequested is bounded."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from tests.fabric.circle import KEY, circle, member
from tests.trainer.wire import Facts, linked
from tmd.core.values.errors import LinkError
from tmd.core.values.model import Member, Membership
from tmd.fabric.admission import ENDED
from tmd.fabric.counters import LinkCounters
from tmd.fabric.dial import Caller
from tmd.fabric.epoch_view import EpochContext, EpochView
from tmd.fabric.handshake import LinkPurpose
from tmd.fabric.inbox import KEPT, KEPT_WAITING, Inbox, PostedReceive, UnclaimedMessage
from tmd.fabric.link_watch import LinkWatch
from tmd.fabric.mailbox import Mailbox
from tmd.fabric.raw import PARKED, RawLinks


def message(tag: int, size: int) -> UnclaimedMessage:
    return UnclaimedMessage(source=1, tag=tag, epoch=1, dtype=0, data=bytearray(size))


def epoch() -> EpochView:
    seen_by = (LinkCounters(), LinkWatch(lambda: None), lambda _: None)
    return EpochView(Membership(1, ()), 0, {}, EpochContext(Caller("w0", KEY), *seen_by))


def wanted(tag: int, size: int, source: int = 1) -> PostedReceive:
    def deliver(error: LinkError | None, source: int) -> None:
        raise AssertionError("nobody delivers here")

    into = memoryview(bytearray(size))
    return PostedReceive(source, tag, epoch(), 0, into, deliver, patience_s=60.0)


def test_messages_that_nobody_asked_for_are_read_up_to_a_bound() -> None:
    """Further ones stay with the sender, until one is taken or a receive waits for another."""
    box, size = Inbox(), KEPT // 10 + 1
    for tag in range(10):
        assert box.make_room(1, 0)
        assert box.arrive(message(tag, size)) is None
    assert not box.make_room(1, 0)

    taken = box.post(wanted(3, size))
    assert taken is not None
    assert taken.tag == 3
    assert box.make_room(1, 0)
    box.arrive(message(3, size))
    assert not box.make_room(1, 0)
    assert box.post(wanted(99, size, source=2)) is None
    while box.make_room(1, 0):  # rank 2 may wait for rank 1 before it sends
        assert box.arrive(message(3, size)) is None
        assert box._held < KEPT_WAITING + size
    assert box._held > KEPT
    assert box.make_room(2, 0)
    assert box.post(wanted(99, size)) is None
    assert box.make_room(1, 0)  # the awaited one may be the next


def test_raw_links_that_nobody_accepts_are_kept_up_to_a_number() -> None:
    """Of each caller and purpose, so that they crowd out no other. The oldest is dropped, and its
    caller sees that."""
    with circle(2) as pair:
        here, there = pair.fabrics
        other = here.connect(member(there), "shadow", timeout=5)
        links = [here.connect(member(there), "state", timeout=5) for _ in range(PARKED + 1)]
        with pytest.raises(LinkError):
            links[0].recv_frame(10)
        found = [
            there.accept(name, timeout=5, cancel=lambda: False) for name in ("shadow", "state")
        ]
        for n, link in enumerate(found):
            link.send_frame(b"%d" % n)
        assert [bytes(link.recv_frame(10)) for link in (other, links[1])] == [b"0", b"1"]
        for link in (other, *links, *found):
            link.close()


def test_callers_for_a_purpose_that_is_fulfilled_do_not_wait() -> None:
    """Neither one that has called before, nor one that calls later."""
    with circle(2) as pair:
        here, there = pair.fabrics
        before = here.connect(member(there), "state", timeout=5)
        other = here.connect(member(there), "shadow", timeout=5)
        Facts().until(lambda: len(there.raw._parked) == 2)
        there.raw.decline("state")
        later = here.connect(member(there), "state", timeout=5)
        for link in (before, later):
            with pytest.raises(LinkError):
                link.recv_frame(10)
            link.close()
        there.raw.decline_none()
        again = here.connect(member(there), "state", timeout=5)
        found = [there.accept(name, timeout=5) for name in ("shadow", "state")]
        for link in (*found, other, again):
            link.close()


def test_raw_links_whose_callers_have_hung_up_are_dropped() -> None:
    """A purpose that nobody expects any more may be called under ever new names."""
    with circle(2) as pair:
        here, there = pair.fabrics
        for n in range(5):
            here.connect(member(there), f"dropped-{n}", timeout=5).close()
        kept = here.connect(member(there), "kept", timeout=5)
        Facts().until(lambda: "kept" in there.raw._parked)
        assert list(there.raw._parked) == ["kept"]
        kept.close()


def test_links_of_joiners_that_have_hung_up_are_kept_up_to_a_number() -> None:
    """The newest ones: they show that a joiner of the present plan is gone."""
    with circle(1) as alone:
        stayer = alone.fabrics[0]
        joiners = [Member(f"joiner-{n}", "here", "127.0.0.1:1") for n in range(200)]
        for joiner in joiners:
            caller = Caller(joiner.worker, KEY)
            caller.dial(member(stayer), "0", LinkPurpose.COLLECTIVE, 2, timeout=5).close()
        later = Membership(2, (member(stayer), joiners[-1]))

        assert ENDED <= stayer.parked < 2 * ENDED
        assert stayer.joiner_gone(later)


def test_links_of_joiners_of_dropped_plans_are_closed() -> None:
    """Each plan has an epoch of its own."""
    with circle(1) as alone:
        stayer = alone.fabrics[0]
        for epoch in range(2, 202):
            caller = Caller(f"joiner-{epoch}", KEY)
            caller.dial(member(stayer), "0", LinkPurpose.COLLECTIVE, epoch, timeout=5).close()

        assert stayer.parked <= 2 * ENDED


def test_links_of_joiners_that_wait_are_all_kept() -> None:
    with circle(1) as alone, ExitStack() as links:
        stayer = alone.fabrics[0]
        for n in range(ENDED + 10):
            caller = Caller(f"joiner-{n}", KEY)
            link = caller.dial(member(stayer), "0", LinkPurpose.COLLECTIVE, 2, timeout=5)
            links.callback(link.close)
        assert stayer.parked == ENDED + 10


def test_raw_links_of_all_purposes_are_kept_up_to_a_number() -> None:
    raw = RawLinks(most=100)
    with ExitStack() as links:
        links.callback(raw.close)
        for n in range(101):
            _, link = links.enter_context(linked())
            raw.park(f"purpose-{n}", link)
        with pytest.raises(LinkError, match="no caller for purpose-0"):
            raw.accept("purpose-0", timeout=0)
        assert not raw.accept("purpose-1", timeout=0).severed


def test_raw_links_of_all_members_of_a_large_group_are_kept() -> None:
    """All call its first rank for one purpose, which may accept them late."""
    raw = RawLinks()
    with ExitStack() as links:
        links.callback(raw.close)
        for n in range(PARKED + 10):
            _, link = links.enter_context(linked())
            link.peer = f"w{n}"
            raw.park("group", link)
        found = [raw.accept("group", timeout=0).peer for _ in range(PARKED + 10)]
        assert found == [f"w{n}" for n in range(PARKED + 10)]


def test_a_raw_link_whose_caller_has_hung_up_is_not_accepted() -> None:
    """A later call of the same purpose is."""
    raw = RawLinks()
    with ExitStack() as links:
        links.callback(raw.close)
        other, gone = links.enter_context(linked())
        raw.park("purpose", gone)
        other.close()
        assert gone.ended
        with pytest.raises(LinkError, match="no caller"):
            raw.accept("purpose", timeout=0)
        _, link = links.enter_context(linked())
        raw.park("purpose", link)
        assert raw.accept("purpose", timeout=0) is link


def test_a_receive_after_one_without_a_thread_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may refuse a thread once; a dead sender must still be found out later."""
    before = set(threading.enumerate())
    box = Mailbox("0", (0, 1), lambda: None)
    watched = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", watched)
        raise RuntimeError("can't start new thread")

    with circle(2) as pair:
        standing = pair.fabrics[0].standing
        assert standing is not None
        monkeypatch.setattr(threading.Thread, "start", refuse)
        into = memoryview(bytearray(1))
        first, second = (
            PostedReceive(1, tag, standing, 0, into, lambda error, source: None, patience_s=60)
            for tag in range(2)
        )
        with pytest.raises(RuntimeError):
            box.post(first)
        box.post(second)

        started = [t.name for t in set(threading.enumerate()) - before]
        assert "tmd-watch-0" in started
        box.close()

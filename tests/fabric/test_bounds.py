"""Data that peers may leave here unrequested is bounded."""

from __future__ import annotations

from typing import cast

import pytest

from tests.fabric.circle import circle, member
from tmd.core.values.errors import LinkError
from tmd.fabric import inbox, raw
from tmd.fabric.epoch_view import EpochView
from tmd.fabric.inbox import Inbox, Message, Wanted


def message(tag: int, size: int) -> Message:
    return Message(source=1, tag=tag, epoch=1, dtype=0, data=bytearray(size))


class Epoch:
    """The part of an epoch view that an inbox uses."""

    epoch = since = 1


def wanted(tag: int, size: int) -> Wanted:
    def deliver(error: LinkError | None, source: int) -> None:
        raise AssertionError("nobody delivers here")

    into = memoryview(bytearray(size))
    return Wanted(1, tag, cast("EpochView", Epoch()), 0, into, deliver, deadline=0.0)


def test_messages_that_nobody_asked_for_are_read_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Further ones stay with the sender, until one is taken or a receive waits for another."""
    monkeypatch.setattr(inbox, "KEPT", 1000)
    box = Inbox()
    for tag in range(10):
        assert box.make_room(0)
        assert box.arrive(message(tag, 100)) is None
    assert not box.make_room(0)

    taken = box.post(wanted(3, 100))
    assert taken is not None
    assert taken.tag == 3
    assert box.make_room(0)
    box.arrive(message(3, 100))
    assert not box.make_room(0)
    assert box.post(wanted(99, 100)) is None  # the awaited one may be the next
    assert box.make_room(0)


def test_raw_links_that_nobody_accepts_are_kept_up_to_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest is dropped, and its caller sees that."""
    monkeypatch.setattr(raw, "PARKED", 2)
    with circle(2) as pair:
        here, there = pair.fabrics
        links = [here.connect(member(there), f"state/{n}", timeout=5) for n in range(3)]
        with pytest.raises(LinkError):
            links[0].recv_frame(10)
        kept = [there.accept(f"state/{n}", timeout=5, cancel=lambda: False) for n in (1, 2)]
        for n, link in enumerate(kept):
            link.send_frame(b"%d" % n)
        assert [bytes(link.recv_frame(10)) for link in links[1:]] == [b"0", b"1"]
        for link in (*links, *kept):
            link.close()

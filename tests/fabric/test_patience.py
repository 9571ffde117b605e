"""How long a rank waits for peers that are alive: busy ones, and ones that do not come."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from math import inf
from typing import Any

import pytest
import torch

from tests.fabric.circle import KEY, PATIENCE, Circle, at_once, circle, conversed, sync
from tests.trainer.wire import Facts, linked
from tmd.core.values.errors import LinkError
from tmd.core.values.model import Member, Membership
from tmd.fabric import EpochView, Group, LinkCounters, PeerLost
from tmd.fabric.dial import Caller, PeerBusy
from tmd.fabric.epoch_view import SENDING, EpochContext
from tmd.fabric.frame import FrameHeader, FrameKind
from tmd.fabric.handshake import HandshakeReply, HandshakeVerdict, acceptor
from tmd.fabric.inbox import KEPT, PostedReceive
from tmd.fabric.link import Link
from tmd.fabric.link_watch import LinkWatch
from tmd.fabric.mailbox import Mailbox
from tmd.fabric.reduction import dtype_code
from tmd.fabric.transfer import PeerLate, receive_within

pytestmark = pytest.mark.timeout(60)

YEARS_S = 180_000_000
SOON_S = 0.05


class Busy:
    """A worker whose kernel accepts connections while its process does nothing."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self._door = socket.create_server(("127.0.0.1", 0))
        self.member = Member(worker, "here", f"127.0.0.1:{self._door.getsockname()[1]}")

    def answer(self) -> socket.socket:
        """Accept the first caller at last."""
        sock, _ = self._door.accept()
        sock.settimeout(PATIENCE)
        _, seal = conversed(sock, acceptor(KEY, self.worker))
        sock.sendall(seal(HandshakeReply(HandshakeVerdict.ACCEPTED)))
        return sock

    def close(self) -> None:
        self._door.close()


class Told(Caller):
    """Tells when a peer has not answered within the time-out."""

    waited = threading.Event()

    def dial(self, *args: Any, go_on: Any = None, **rest: Any) -> Link:
        def asked() -> bool:
            self.waited.set()
            return go_on is not None and go_on()

        return super().dial(*args, go_on=asked, **rest)


def standing(worker: str, peer: Member, caller: type[Caller] = Caller) -> EpochView:
    """The first epoch as ``worker`` sees it, which shares it with ``peer`` alone."""
    own = Member(worker, "here", "127.0.0.1:1")
    seen_by = (LinkCounters(), LinkWatch(lambda: None), lambda _: None)
    context = EpochContext(caller(worker, KEY, SOON_S), *seen_by)
    return EpochView(Membership(1, (own, peer)), 0, {}, context)


@pytest.fixture
def busy() -> Iterator[Busy]:
    """``w1``; a call waits for a moment instead of seconds."""
    made = Busy("w1")
    yield made
    made.close()


def test_a_busy_peer_is_told_from_one_that_is_gone(busy: Busy) -> None:
    caller = Caller("w0", KEY)
    with pytest.raises(PeerBusy, match="w1 accepts connections and does not answer"):
        caller.ask(busy.member, timeout=0.05)
    busy.close()
    with pytest.raises(LinkError, match="cannot reach w1") as raised:
        caller.ask(busy.member, timeout=5)

    assert not isinstance(raised.value, PeerBusy)


def test_a_busy_peer_is_alive_for_who_waits_and_has_missed_a_call(busy: Busy) -> None:
    """The watchdog counts missed calls, since all processes of its host may be frozen."""
    view = standing("w0", busy.member)
    view.verify_patiently(busy.member)
    with pytest.raises(PeerLost, match="does not answer"):
        view.verify(busy.member)
    busy.close()
    with pytest.raises(PeerLost, match="cannot reach w1"):
        view.verify_patiently(busy.member)


def test_a_link_to_a_busy_peer_is_opened_once_it_answers(busy: Busy) -> None:
    """On the connection that it has accepted: further ones would fill its queue."""
    view = standing("w0", busy.member, Told)
    Told.waited.clear()

    def answer() -> None:
        assert Told.waited.wait(PATIENCE)
        busy.answer().close()

    link, _ = at_once([lambda: view.link("0", 1), answer])

    assert link.peer == "w1"
    link.close()


def test_a_wait_for_a_busy_peer_ends_with_the_epoch(busy: Busy) -> None:
    view = standing("w0", busy.member, Told)
    Told.waited.clear()

    def dial() -> None:
        with pytest.raises(LinkError, match="abandoned") as raised:
            view.link("0", 1)
        assert not isinstance(raised.value, PeerLost)

    def poison() -> None:
        assert Told.waited.wait(PATIENCE)
        view.poison("enough")

    at_once([dial, poison])


@pytest.mark.parametrize("worker", ["w0", "w2"], ids=["dials", "is called"])
def test_a_busy_peer_is_late_after_the_time_out_of_the_group(busy: Busy, worker: str) -> None:
    with pytest.raises(PeerLate, match="no data from w1"):
        standing(worker, busy.member).link("0", 1, patience=0.1)


def test_a_message_to_a_busy_peer_is_late_after_the_time_out_of_the_group(busy: Busy) -> None:
    view = standing("w2", busy.member)
    header = FrameHeader(1, 0, FrameKind.MESSAGE, 0)
    with pytest.raises(PeerLate, match="no data from w1"):
        Mailbox("0", (0, 1), lambda: view).send(view, 1, header, memoryview(b"x"), 0.1)


def test_a_live_peer_that_never_calls_is_late_after_the_time_out_of_the_group() -> None:
    """It may be busy for as long as the script allows, and is not suspected."""
    with circle(2) as c:
        waits = c.fabrics[1]
        group = Group(waits, "0", range(2), timeout=timedelta(seconds=0.2))
        group.allreduce([torch.ones(10)], sync()).wait()

        assert "w0 within the time-out" in waits.poison_reason
        assert waits.suspects == ()


def test_the_time_out_of_a_group_may_change() -> None:
    """As ``torch.distributed.set_timeout`` of torch 2.14 changes it."""
    with circle(2) as c:
        waits = c.fabrics[1]
        group = Group(waits, "0", range(2), timeout=timedelta(days=1))
        group.set_timeout(timedelta(seconds=0.2))
        group.allreduce([torch.ones(10)], sync()).wait()

        assert "w0 within the time-out" in waits.poison_reason


def with_groups(c: Circle, seconds: float) -> None:
    c.groups["0"] = {
        f.worker: Group(f, "0", range(c.size), timeout=timedelta(seconds=seconds))
        for f in c.fabrics
    }


def test_a_message_that_a_live_peer_never_takes_is_late_after_the_time_out_of_the_group() -> None:
    """The peer reads no further once it keeps as much as it may."""
    with circle(2) as c:
        with_groups(c, 0.2)
        sender = c.fabrics[0]
        size = KEPT // 4
        works = [c.of(sender).send([torch.ones(size, dtype=torch.uint8)], 1, k) for k in range(7)]
        for work in works:
            work.wait()

        assert "w1 within the time-out" in sender.poison_reason


def test_a_receive_in_a_group_without_a_time_out_is_never_late() -> None:
    with circle(2) as c:
        with_groups(c, 0.0)
        receiver, sender = c.fabrics
        got = torch.zeros(4)
        work = c.of(receiver).recv([got], 1)
        waiting = c.of(receiver)._mailbox._inbox.waiting()
        assert [receive.deadline for receive in waiting] == [inf]
        c.of(sender).send([torch.ones(4)], 0).wait()
        work.wait()

        assert got.tolist() == [1.0] * 4
        assert not receiver.poisoned


@pytest.mark.parametrize("tag", [-1, 1 << 31])
def test_a_tag_that_no_message_can_have_is_refused_at_once(tag: int) -> None:
    with circle(2) as c:
        c.group()
        group = c.of(c.fabrics[0])
        with pytest.raises(ValueError, match=f"got {tag}"):
            group.send([torch.ones(1)], 1, tag)
        with pytest.raises(ValueError, match=f"got {tag}"):
            group.recv([torch.ones(1)], 1, tag)
        assert not c.fabrics[0].poisoned


def test_a_group_may_wait_for_years() -> None:
    """As scripts say that it shall wait for ever: more milliseconds than ``poll`` takes."""
    with circle(2) as c:
        with_groups(c, YEARS_S)
        c.allreduce()
        early, late = c.fabrics
        tensors = {f.worker: torch.ones(2_000_000) for f in c.fabrics}

        def come_late() -> None:
            Facts().until(lambda: early.waiting)
            c.of(late).allreduce([tensors["w1"]], sync()).wait()

        at_once([lambda: c.of(early).allreduce([tensors["w0"]], sync()).wait(), come_late])
        c.each(lambda f: c.of(f).monitored_barrier())
        c.each(lambda f: c.of(f).drain(YEARS_S))
        received = torch.zeros(4)
        work = c.of(late).recv([received], 0, 0)
        c.of(early).send([torch.ones(4)], 1, 0).wait()
        work.wait()

        assert not any(f.poisoned for f in c.fabrics)
        assert all(torch.equal(t, torch.full_like(t, 2)) for t in tensors.values())
        assert torch.equal(received, torch.ones(4))


def test_a_message_that_stops_midway_is_late() -> None:
    """Its sender is frozen. A byte that arrives in time keeps the receive alive."""
    with circle(2) as c:
        c.groups["0"] = {
            fabric.worker: Group(fabric, "0", (0, 1), timeout=timedelta(seconds=SOON_S))
            for fabric in c.fabrics
        }
        here, there = c.fabrics
        assert here.standing is not None
        link = here.standing.link("0", 1, SENDING)
        header = FrameHeader(1, 0, FrameKind.MESSAGE, dtype_code(torch.float32), 0, 3)
        link.sock.sendall(header.packed(4000))  # before the receive, which then finds it begun
        work = c.of(there).recv([torch.empty(1000)], 0, tag=3)
        link.sock.sendall(bytes(2000))
        work.wait()
        assert there.poisoned
        assert "no data from" in there.poison_reason


@pytest.mark.parametrize("patience_s", [SOON_S, inf])
def test_a_reader_gets_all_of_a_message_in_pieces(patience_s: float) -> None:
    with linked() as (near, far):
        into = memoryview(bytearray(4))
        with ThreadPoolExecutor() as threads:
            reading = threads.submit(receive_within, near, into, patience_s)
            far.send(b"ab")
            far.send(b"cd")
            reading.result(PATIENCE)
        assert bytes(into) == b"abcd"


def test_each_sender_is_asked_once_for_all_that_is_awaited_from_it(busy: Busy) -> None:
    """A call to a frozen one takes seconds, in which no other would be found out."""
    calls: list[str] = []
    box: Mailbox

    class Counted(Caller):
        def ask(self, member: Member, **rest: Any) -> HandshakeReply:
            calls.append(member.worker)
            box.close()  # this round is the last one
            raise PeerBusy("it does not answer")

    view = standing("w0", busy.member, Counted)
    before = set(threading.enumerate())
    box = Mailbox("0", (0, 1), lambda: view)
    for tag in range(8):
        into = memoryview(bytearray(1))
        box.post(PostedReceive(1, tag, view, 0, into, lambda *_: None, PATIENCE))
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
    assert calls == ["w1"]

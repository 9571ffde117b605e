"""Who may open a link, and how a message that does not fit is handled."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.fabric.circle import KEY, Circle, at_once, circle, conversed, member, sync
from tests.marks import needs_ipv6
from tests.trainer.wire import linked
from tmd.core.values.errors import LinkError, LinkRefused, LinkTimeout
from tmd.core.values.model import Member, Membership
from tmd.fabric import Fabric, Link, Neutral
from tmd.fabric.dial import Caller
from tmd.fabric.frame import FrameHeader, FrameKind
from tmd.fabric.handshake import (
    MAGIC,
    NONCE,
    PROOF,
    VERSION,
    HandshakeReply,
    LinkPurpose,
    Talk,
    acceptor,
    dialer,
)
from tmd.fabric.listener import DEADLINE, HALF_OPEN, PROOF_S, _HalfOpen
from tmd.fabric.transfer import receive, send

pytestmark = pytest.mark.timeout(60)


def endpoint(fabric: Fabric) -> tuple[str, int]:
    host, _, port = fabric.address.rpartition(":")
    return host, int(port)


def hung_up(sock: socket.socket) -> bool:
    """Whether the other side closes without sending anything."""
    sock.settimeout(10)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def pair() -> Iterator[Circle]:
    with circle(2) as c:
        c.group()
        yield c
        # Whatever a test did to the listeners, the members must still work together.
        results = c.allreduce()
        assert torch.equal(results[0], results[1])


@needs_ipv6
def test_workers_meet_at_addresses_of_ipv6() -> None:
    """As in a cluster of Kubernetes that has no others."""
    with circle(2, host="::1") as c:
        c.group()

        one, other = c.allreduce()
        addresses = [fabric.address for fabric in c.fabrics]

    assert torch.equal(one, other)
    assert all(address.startswith("::1:") for address in addresses)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": b"\0" * 64,
    "version": MAGIC + (99).to_bytes(2, "little") + (10).to_bytes(2, "little"),
    "oversized": MAGIC + (1).to_bytes(2, "little") + (60_000).to_bytes(2, "little"),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_gets_nothing(pair: Circle, garbage: bytes) -> None:
    with socket.create_connection(endpoint(pair.fabrics[0])) as sock:
        sock.sendall(garbage)
        assert hung_up(sock)


def test_port_scan_and_half_open_connections_disturb_nobody(pair: Circle) -> None:
    target = pair.fabrics[1]
    for _ in range(50):
        socket.create_connection(endpoint(target)).close()
    silent = [socket.create_connection(endpoint(target)) for _ in range(HALF_OPEN + 10)]
    try:
        assert len(pair.allreduce()) == 2
        assert hung_up(silent[0]), "the oldest must make room"
        link = pair.fabrics[0].connect(member(target), "hello", timeout=5)
        link.close()
    finally:
        for sock in silent:
            sock.close()


def test_callers_that_answer_are_not_dropped_for_others(pair: Circle) -> None:
    """A rank may be called by all others at once. What it has no room for waits in the backlog."""
    target = pair.fabrics[1]
    for _ in range(10):
        begun = time.monotonic()
        callers = [greeting(target) for _ in range(HALF_OPEN + 10)]
        try:
            answers = [conversed(*caller) for caller in callers]
        except ConnectionResetError:
            # Lawful for a test that was held up so long.
            assert time.monotonic() - begun > PROOF_S
        else:
            break
        finally:
            for sock, _ in callers:
                sock.close()

    assert [answer.verdict for answer in answers] == ["accepted"] * (HALF_OPEN + 10)


def greeting(target: Fabric) -> tuple[socket.socket, Talk[HandshakeReply]]:
    """A caller that has sent its greeting."""
    sock = socket.create_connection(endpoint(target))
    sock.settimeout(10)
    talk = dialer(KEY, "w0", "w1", "", LinkPurpose.PROBE, -1)
    sock.sendall(_bytes(next(talk)))
    return sock, talk


def test_a_caller_whose_greeting_waited_here_has_time_to_answer() -> None:
    """Native code may hold the interpreter for longer than a caller may take."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        half_open = _HalfOpen(ours, "here", acceptor(KEY, "w1"))
        half_open.since -= 2 * DEADLINE
        theirs.sendall(_bytes(next(dialer(KEY, "w0", "w1", "", LinkPurpose.PROBE, -1))))
        outcome = half_open.advance()

        assert outcome is None
        assert time.monotonic() - half_open.since < DEADLINE


def test_who_is_refused_sees_an_orderly_end_and_who_is_dropped_a_reset(pair: Circle) -> None:
    """Also with something unread: a joiner must not take a lack of room for a refusal."""
    place = endpoint(pair.fabrics[1])
    greeting = _bytes(next(dialer(KEY, "w0", "w1", "0", LinkPurpose.COLLECTIVE, 1)))
    with socket.create_connection(place) as sock:
        sock.sendall(greeting[:4] + (VERSION + 1).to_bytes(2, "little") + greeting[6:])
        sock.settimeout(10)
        refused = sock.recv(1)
    silent = [socket.create_connection(place) for _ in range(HALF_OPEN + 1)]
    try:
        silent[0].settimeout(10)
        with pytest.raises(ConnectionResetError):
            silent[0].recv(1)
    finally:
        for sock in silent:
            sock.close()

    assert refused == b""


def test_a_connection_that_breaks_in_a_handshake_refuses_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = Member("w1", "here", f"127.0.0.1:{server.getsockname()[1]}")

        def breaks() -> None:
            sock, _ = server.accept()
            sock.recv(1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()

        thread = threading.Thread(target=breaks)
        thread.start()
        with pytest.raises(LinkError, match="handshake with w1 failed") as raised:
            Caller("w0", KEY).dial(peer, "0", LinkPurpose.COLLECTIVE, 1, timeout=5)
        thread.join(5)

    assert not isinstance(raised.value, LinkRefused)


def test_a_wait_that_ran_out_is_told_from_one_that_was_cancelled(pair: Circle) -> None:
    fabric = pair.fabrics[0]
    with pytest.raises(LinkTimeout, match="no caller for x within"):
        fabric.accept("x", timeout=0.01)
    with pytest.raises(LinkError, match="cancelled") as raised:
        fabric.accept("x", timeout=5, cancel=lambda: True)

    assert not isinstance(raised.value, LinkTimeout)


def test_wrong_key_is_refused_and_logged_once(
    pair: Circle, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Caller("w0", b"another key")
    with caplog.at_level(logging.WARNING, "tmd.fabric"):
        for _ in range(3):
            with pytest.raises(LinkRefused, match="another key"):
                stranger.dial(member(pair.fabrics[1]), "0", LinkPurpose.COLLECTIVE, 1, timeout=5)
    assert len(caplog.records) == 1


def test_an_impostor_without_the_key_is_refused() -> None:
    """A foreign process that answers in place of a worker cannot prove its identity."""
    listening = socket.create_server(("127.0.0.1", 0))
    me = Member("w1", "here", f"127.0.0.1:{listening.getsockname()[1]}")

    def pretend() -> None:
        sock, _ = listening.accept()
        with sock:
            sock.recv(4096)
            sock.sendall(os.urandom(NONCE))
            sock.recv(PROOF)
            sock.sendall((3).to_bytes(2, "little") + b"abc" + os.urandom(PROOF))
            sock.recv(1)

    thread = threading.Thread(target=pretend)
    thread.start()
    with listening:
        with pytest.raises(LinkRefused, match="does not hold the key"):
            Caller("w0", KEY).dial(me, "0", LinkPurpose.COLLECTIVE, 1, timeout=5)
        thread.join(5)


def test_replayed_handshake_is_refused(pair: Circle) -> None:
    host, port = endpoint(pair.fabrics[1])
    messages: list[bytes] = []
    talk = dialer(KEY, "w0", "w1", "spy", LinkPurpose.RAW, -1)
    with socket.create_connection((host, port)) as sock:
        messages.append(_bytes(next(talk)))
        sock.sendall(messages[0])
        wanted = next(talk)
        assert wanted == NONCE
        messages.append(_bytes(talk.send(sock.recv(NONCE, socket.MSG_WAITALL))))
        sock.sendall(messages[1])
        assert sock.recv(2), "the genuine one is let in"
    with socket.create_connection((host, port)) as sock:
        sock.sendall(messages[0])
        sock.recv(NONCE, socket.MSG_WAITALL)
        sock.sendall(messages[1])
        assert hung_up(sock)


def _bytes(value: bytes | int) -> bytes:
    assert isinstance(value, bytes)
    return value


def converse(call: Talk[object], answer: Talk[object]) -> None:
    """Let a dialer and an acceptor talk until one finishes or refuses."""
    wants = {"call": next(call), "answer": next(answer)}
    talks = {"call": call, "answer": answer}
    inbox = {"call": b"", "answer": b""}
    other = {"call": "answer", "answer": "call"}
    for side in ("call", "answer") * 20:
        want = wants[side]
        if isinstance(want, bytes):
            inbox[other[side]] += want
            wants[side] = next(talks[side])
        elif len(inbox[side]) >= want:
            data, inbox[side] = inbox[side][:want], inbox[side][want:]
            wants[side] = talks[side].send(data)


def test_a_proof_cannot_be_reflected() -> None:
    """An acceptor refuses a proof of its own kind: the role is part of it."""
    answer = acceptor(KEY, "w1")
    assert isinstance(next(answer), int)
    opening = _bytes(next(dialer(KEY, "w0", "w1", "0", LinkPurpose.COLLECTIVE, 1)))
    want = answer.send(opening[:8])
    assert want == len(opening) - 8
    challenge = _bytes(answer.send(opening[8:]))
    assert next(answer) == PROOF
    with pytest.raises(LinkRefused, match="key"):
        answer.send((challenge * 2)[:PROOF])


def test_a_link_for_another_worker_is_refused() -> None:
    call = dialer(KEY, "w0", "w2", "0", LinkPurpose.COLLECTIVE, 1)
    with pytest.raises(LinkRefused, match="w2"):
        converse(call, acceptor(KEY, "w1"))


def test_callers_of_an_older_epoch_and_non_members_are_refused(pair: Circle) -> None:
    target = member(pair.fabrics[1])
    with pytest.raises(LinkRefused, match="epoch 0 is over"):
        Caller("w0", KEY).dial(target, "0", LinkPurpose.COLLECTIVE, 0, timeout=5)
    with pytest.raises(LinkRefused, match="not a member"):
        Caller("w9", KEY).dial(target, "0", LinkPurpose.COLLECTIVE, 1, timeout=5)
    with pytest.raises(LinkRefused, match="too far"):
        Caller("w0", KEY).dial(target, "0", LinkPurpose.COLLECTIVE, 1 << 20, timeout=5)
    assert pair.fabrics[1].counters.refused == 3


def test_a_link_of_a_future_epoch_is_kept(pair: Circle) -> None:
    target = pair.fabrics[1]
    link = Caller("w7", KEY).dial(member(target), "0", LinkPurpose.COLLECTIVE, 2, timeout=5)
    assert target.parked == 1
    target.discard(Membership(epoch=2, members=pair.membership.members))
    assert hung_up(link.sock)
    link.close()


def test_arrived_data_can_be_read_after_receiving_stopped() -> None:
    """The sender may have died since, with its end of the link still open."""
    with linked() as (near, far):
        near.send(b"last words")
        while far.sock.recv(64, socket.MSG_PEEK) != b"last words":
            pass
        quiet = far.quiet_s
        far.receive_no_more()
        last = bytearray(10)
        far.recv_into(last)

        assert last == b"last words"
        assert 0 <= quiet < 10
        with pytest.raises(LinkError):
            far.recv_into(bytearray(1))
        far.close()
        with pytest.raises(LinkError):
            far.receive_no_more()
        with pytest.raises(LinkError):
            _ = far.quiet_s


def test_raw_links_carry_frames_both_ways(pair: Circle) -> None:
    a, b = pair.fabrics
    payload = os.urandom(3 << 20)

    def here() -> bytes:
        link = a.connect(member(b), "state/1", timeout=5)
        link.send_frame(payload)
        answer = link.recv_frame(100)
        link.close()
        return answer

    def there() -> bytes:
        link = b.accept("state/1", timeout=5, cancel=lambda: False)
        assert link.peer == "w0"
        data = link.recv_frame(4 << 20)
        link.send_frame(b"thanks")
        link.close()
        return data

    answer, data = at_once([here, there])
    assert (answer, data) == (b"thanks", payload)


def test_a_frame_over_the_limit_is_refused(pair: Circle) -> None:
    a, b = pair.fabrics
    link = a.connect(member(b), "big", timeout=5)
    other = b.accept("big", timeout=5, cancel=lambda: False)
    link.send_frame(b"x" * 1000)
    with pytest.raises(LinkError, match="1000 bytes, limit 999"):
        other.recv_frame(999)
    link.close()
    other.close()


def test_accept_ends_on_timeout_and_on_cancel(pair: Circle) -> None:
    fabric = pair.fabrics[0]
    with pytest.raises(LinkError, match="no caller"):
        fabric.accept("nothing", timeout=0.05, cancel=lambda: False)
    with pytest.raises(LinkError):
        fabric.accept("nothing", timeout=5, cancel=lambda: True)


def test_closing_a_raw_link_wakes_its_reader(pair: Circle) -> None:
    a, b = pair.fabrics
    link = a.connect(member(b), "quiet", timeout=5)
    other = b.accept("quiet", timeout=5, cancel=lambda: False)
    reading = threading.Event()

    def read() -> None:
        reading.set()
        with pytest.raises(LinkError):
            link.recv_into(bytearray(10))

    thread = threading.Thread(target=read)
    thread.start()
    reading.wait()
    link.close()
    thread.join(5)
    assert not thread.is_alive()
    other.close()


# --- messages that do not fit -------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    listening = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listening.getsockname())
    two, _ = listening.accept()
    listening.close()
    links = Link(one, "two", "one"), Link(two, "one", "one")
    yield links
    for link in links:
        link.close()


EXPECTED = FrameHeader(5, 17, FrameKind.ALLREDUCE, 8)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (FrameHeader(4, 17, FrameKind.ALLREDUCE, 8), "of epoch 4"),
        (FrameHeader(5, 18, FrameKind.ALLREDUCE, 8), "allreduce #18"),
        (FrameHeader(5, 17, FrameKind.BROADCAST, 8), "broadcast #17"),
        (FrameHeader(5, 17, FrameKind.ALLREDUCE, 9), "type 9"),
        (FrameHeader(5, 17, 77, 8), "unknown kind 77"),
    ],
)
def test_a_message_of_another_operation_names_both_sides(
    ends: tuple[Link, Link], sent: FrameHeader, reason: str
) -> None:
    send(ends[0], sent.packed(8), memoryview(b"12345678"))
    with pytest.raises(LinkError, match=reason) as caught:
        receive(ends[1], EXPECTED.packed(8), memoryview(bytearray(8)))
    assert "allreduce #17 of epoch 5" in str(caught.value)


@pytest.mark.parametrize("size", [0, 7, 9, 1 << 40])
def test_a_message_of_another_size_is_refused_at_once(ends: tuple[Link, Link], size: int) -> None:
    # The payload never arrives: the header alone must be enough.
    ends[0].sock.sendall(EXPECTED.packed(size))
    with pytest.raises(LinkError, match=f"{size} bytes"):
        receive(ends[1], EXPECTED.packed(8), memoryview(bytearray(8)))


def test_a_truncated_message_is_a_lost_link(ends: tuple[Link, Link]) -> None:
    ends[0].sock.sendall(EXPECTED.packed(8) + b"123")
    ends[0].close()
    with pytest.raises(LinkError, match="link to one broke"):
        receive(ends[1], EXPECTED.packed(8), memoryview(bytearray(8)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.ones(10), torch.ones(11)),
        (torch.ones(10), torch.ones(10, dtype=torch.int32)),
        (torch.ones(200_000), torch.ones(200_001)),
    ],
    ids=["size", "type", "large"],
)
def test_ranks_that_disagree_poison_the_step(first: torch.Tensor, second: torch.Tensor) -> None:
    with circle(2) as c:
        c.group()
        tensors = {"w0": first.clone(), "w1": second.clone()}
        c.each(lambda f: c.of(f).allreduce([tensors[f.worker]], sync()).wait())
        assert all(f.poisoned for f in c.fabrics)
        assert any("out of step" in f.poison_reason for f in c.fabrics)
        assert all(f.suspects == () for f in c.fabrics)


def test_wrong_use_raises_at_once() -> None:
    fabric = Fabric("alone", KEY)
    fabric.sandbox(Neutral(), 0, 2)
    with circle(2) as c:
        c.group()
        group = c.of(c.fabrics[0])
        opts = dist.BroadcastOptions()
        opts.rootRank = 5
        with pytest.raises(ValueError, match="root 5"):
            group.broadcast([torch.ones(1)], opts)
        with pytest.raises(ValueError, match="one tensor for each of 2 ranks"):
            group.allgather([[torch.ones(1)]], [torch.ones(1)])
        with pytest.raises(ValueError, match="into 3"):
            group.all_gather_single(torch.ones(3), torch.ones(1))
        with pytest.raises(ValueError, match="needs integers"):
            group.allreduce([torch.ones(1)], sync(reduceOp=dist.ReduceOp.BAND))
        with pytest.raises(ValueError, match="dense"):
            group.allreduce([torch.ones(1).to_sparse()])
        with pytest.raises(ValueError, match="rank 2 is not"):
            group.send([torch.ones(1)], 2)
    fabric.close()

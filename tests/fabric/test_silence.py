"""Links end whose peer's kernel answers nothing more, and no others."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from contextlib import suppress

import pytest

from tests.fabric.test_link_watch import watched
from tests.trainer.wire import Facts, linked
from tmd.fabric import silence
from tmd.fabric.frame import VOTE
from tmd.fabric.silence import PROBES, RETRANSMITS, SILENT_MS, SilenceWatch, is_silent
from tmd.fabric.transfer import PeerLost, receive_some

pytestmark = pytest.mark.timeout(60)

RETRANSMITS_AT, PROBES_AT, BACKOFF_AT, UNACKED_AT, LAST_ACK_AT = 2, 3, 4, 24, 56


def info(retransmits: int = 0, probes: int = 0, unacked: int = 0, last_ack_ms: int = 0) -> bytes:
    """A ``struct tcp_info`` in which every other byte is set."""
    made = bytearray(b"\xff" * 60)
    made[RETRANSMITS_AT], made[PROBES_AT] = retransmits, probes
    struct.pack_into("@I", made, UNACKED_AT, unacked)
    struct.pack_into("@I", made, LAST_ACK_AT, last_ack_ms)
    return bytes(made)


def aged(real: bytes) -> bytes:
    """The same, if the latest acknowledgement had come a minute ago."""
    made = bytearray(real)
    struct.pack_into("@I", made, LAST_ACK_AT, 4 * SILENT_MS)
    return bytes(made)


@pytest.mark.parametrize(
    "shown",
    [
        info(retransmits=RETRANSMITS, unacked=1, last_ack_ms=SILENT_MS),
        info(retransmits=9, unacked=300, last_ack_ms=100_000),
        info(probes=PROBES, last_ack_ms=SILENT_MS),
        info(probes=15, unacked=1, last_ack_ms=100_000),
    ],
)
def test_a_peer_that_leaves_retransmissions_or_probes_unanswered_is_silent(shown: bytes) -> None:
    assert is_silent(shown)


@pytest.mark.parametrize(
    "shown",
    [
        info(retransmits=RETRANSMITS, unacked=1, last_ack_ms=SILENT_MS - 1),
        info(retransmits=RETRANSMITS - 1, unacked=1, last_ack_ms=SILENT_MS),
        info(retransmits=RETRANSMITS, unacked=0, last_ack_ms=SILENT_MS),
        info(probes=PROBES, last_ack_ms=SILENT_MS - 1),
        info(probes=PROBES - 1, last_ack_ms=SILENT_MS),
        info(last_ack_ms=3_600_000),
    ],
    ids=["early", "few resent", "nothing in flight", "early probes", "few probes", "idle"],
)
def test_a_peer_that_has_answered_lately_or_owes_nothing_is_not_silent(shown: bytes) -> None:
    assert not is_silent(shown)


def test_a_peer_that_does_not_read_is_not_silent() -> None:
    """It answers the probes of its full window, so they do not add up, for however long."""
    with linked(buffer=4096) as (near, _):
        with suppress(BlockingIOError):
            while True:
                near.sock.send(bytes(1 << 16), socket.MSG_DONTWAIT)
        # The kernel doubles the time between probes with each one that it sends.
        Facts().until(lambda: silence.tcp_info(near.sock)[BACKOFF_AT] > PROBES)
        real = silence.tcp_info(near.sock)

        assert not is_silent(real)
        assert not is_silent(aged(real))


def test_no_link_ends_because_its_peer_does_not_read() -> None:
    """``TCP_USER_TIMEOUT`` would end it, although the peer is alive."""
    with linked() as links:
        for link in links:
            assert link.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_every_link_is_watched_from_its_beginning() -> None:
    with linked() as links:
        assert set(links) <= set(silence.WATCH._snapshot())
        assert "tmd-silence" in [thread.name for thread in threading.enumerate()]


def test_a_link_to_a_silent_peer_looks_lost_to_its_reader(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And the log names the peer. The link is not severed, which would look like an own end."""
    watch = SilenceWatch(lambda info: True)
    with linked() as (near, _), caplog.at_level(logging.WARNING, "tmd.fabric"):
        watch.add(near)
        watch.look()
        with pytest.raises(PeerLost, match="joiner"):
            receive_some(near, memoryview(bytearray(1)))

        assert not near.severed
        assert len(watch) == 0
    assert ["joiner" in record.getMessage() for record in caplog.records] == [True]


def test_a_silent_peer_poisons_a_rank_that_reads_nothing() -> None:
    with watched(2) as c:
        fabric = c.fabrics[0]
        (link,) = (link for key, link in fabric.standing.member_links() if key.group == VOTE)
        watch = SilenceWatch(lambda info: True)
        watch.add(link)
        watch.look()
        Facts().until(lambda: fabric.poisoned)
        assert "w1" in fabric.poison_reason


def test_only_open_links_that_somebody_holds_are_watched() -> None:
    watch = SilenceWatch()
    with linked() as (near, far), linked() as (other, _):
        for link in (near, far, other):
            watch.add(link)
        near.close()
        watch.look()
        held = len(watch)
        other.close()
        far.close()
        watch.look()

    assert held == 2
    assert len(watch) == 0

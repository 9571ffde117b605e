"""A joiner waits for its source, but not for one that will never reach it."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tmd.core.values.errors import LinkError, StateMismatch
from tmd.core.values.model import Member
from tmd.fabric import Fabric, Link
from tmd.fabric.handshake import OPENING
from tmd.trainer.state_transfer.source_call import await_call

pytestmark = pytest.mark.timeout(60)

KEY = b"the key of the job"
SOON_S = 0.02


@contextmanager
def two(key: bytes = KEY) -> Iterator[tuple[Fabric, Fabric]]:
    """A joiner, and a source with ``key``."""
    joiner, source = Fabric("joiner", KEY), Fabric("source", key)
    try:
        yield joiner, source
    finally:
        joiner.close()
        source.close()


def member(fabric: Fabric) -> Member:
    return Member(fabric.worker, "here", fabric.address)


def test_a_source_that_refuses_links_of_the_joiner_is_not_waited_for() -> None:
    """So does a source of another release. The reason is reported, and another standby is taken."""
    closed = "source closed the handshake: it has another key, release of tmd or worker id"
    with two(b"another key") as (joiner, source), pytest.raises(StateMismatch, match=closed):
        await_call(joiner, "state", member(source), lambda: False, SOON_S)


def test_a_source_that_calls_late_is_waited_for() -> None:
    """It answers meanwhile, and brings its state once it has come to the end of its step."""
    with two() as (joiner, source):
        asked = threading.Event()

        def not_cancelled() -> bool:
            asked.set()
            return False

        calls = queue.SimpleQueue[Link]()

        def call() -> None:
            asked.wait(30)
            calls.put(source.connect(member(joiner), "state", timeout=10))

        caller = threading.Timer(5 * SOON_S, call)
        caller.start()
        link = await_call(joiner, "state", member(source), not_cancelled, SOON_S)
        link.close()
        caller.join()
        calls.get().close()

        assert link.peer == "source"


@contextmanager
def answering(ends: Callable[[socket.socket], None]) -> Iterator[Member]:
    """A source that ends each handshake in its own way."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                with sock:
                    ends(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Member("source", "here", f"127.0.0.1:{server.getsockname()[1]}")
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def breaks(sock: socket.socket) -> None:
    """As a process that is killed, or a network without a way."""
    sock.recv(1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def refuses_the_version(sock: socket.socket) -> None:
    """As release 0.1.0: it closes whatever else has come, which resets the connection."""
    sock.recv(OPENING, socket.MSG_WAITALL)


def test_a_source_whose_connections_break_is_waited_for() -> None:
    """However often: that is no refusal. The leader names a source that is lost."""
    with two() as (joiner, _), answering(breaks) as source:
        looks = iter([False] * 30)
        with pytest.raises(LinkError, match="cancelled"):
            await_call(joiner, "state", source, lambda: next(looks, True), SOON_S)


def test_a_source_that_refuses_the_version_and_resets_is_not_waited_for() -> None:
    """It hears the version alone at first."""
    closed = "source closed the handshake: it has another key, release of tmd or worker id"
    with (
        two() as (joiner, _),
        answering(refuses_the_version) as source,
        pytest.raises(StateMismatch, match=closed),
    ):
        await_call(joiner, "state", source, lambda: False, SOON_S)


def test_the_wait_ends_with_its_directive() -> None:
    """Also while the source, which has ended, does not answer."""
    with two() as (joiner, source):
        gone = member(source)
        source.close()
        looks = iter([False] * 12)
        with pytest.raises(LinkError, match="cancelled"):
            await_call(joiner, "state", gone, lambda: next(looks, True), SOON_S)

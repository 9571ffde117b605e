"""Where bytes of others come in, and how each place says that it cannot read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tests.core.plane import Plane
from tmd import wire
from tmd.core.planning.directives import Wait
from tmd.core.values.errors import LinkError, LinkRefused, StoreUnavailable, TmdError, WireError
from tmd.core.values.model import Exit, HostStatus, JobRecord, Severity, Signal
from tmd.core.values.requests import DrainRequest
from tmd.daemon.codec import decoded
from tmd.daemon.record_changes import applied, difference
from tmd.daemon.seal import RecordSeal
from tmd.daemon.web.guard import RequestHeaders, refusal
from tmd.fabric import handshake
from tmd.fabric.frame import HEADER_SIZE, FrameHeader, check
from tmd.fabric.handshake import HandshakeReply, HandshakeVerdict, LinkPurpose
from tmd.schema import Secret
from tmd.testing.clients import worker_status

KEY = b"k" * 32
STATUS = worker_status("h1/job/0.a")
SEAL = RecordSeal(KEY)


class Target(NamedTuple):
    """``feed`` takes spoilt bytes; it returns, or raises one of ``errors`` with a sentence."""

    name: str
    seeds: tuple[bytes, ...]
    feed: Callable[[bytes], object]
    errors: tuple[type[TmdError], ...] = ()
    readable: bool = True
    """Whether the seeds themselves are understood: not so where they answer a challenge, or where
    nothing to say is the good news."""


# --- the Unix socket ------------------------------------------------------------------------------

FRAMES = tuple(
    wire.encode(message)
    for message in (
        wire.TrainerHello(wire.VERSION, STATUS, 3),
        wire.Welcome("h1", KEY),
        wire.StatusReport(STATUS),
        wire.DirectiveOrder(5, 7, Wait()),
        wire.LauncherHello(wire.VERSION, "job", 1, ("h1/job/0.a",)),
        wire.Exited(Exit("h1/job/0.a", "job", -9, 1.0)),
        wire.Kill("h1/job/0.a", "named dead"),
        wire.Inject(wire.VERSION, Signal("xid.79", "pci:0", Severity.FATAL)),
        wire.Rejected("because"),
    )
)


def socket_frame(data: bytes) -> object:
    size = wire.body_size(data[: wire.HEADER_SIZE].ljust(wire.HEADER_SIZE, b"\0"))
    return wire.decode(data[wire.HEADER_SIZE :][:size])


# --- links of workers -----------------------------------------------------------------------------


def _said() -> tuple[bytes, bytes]:
    """All that the dialer and the acceptor of one good handshake say."""
    dialer = handshake.dialer(KEY, "h1/job/0.a", "h2/job/0.b", "world", LinkPurpose.COLLECTIVE, 3)
    acceptor = handshake.acceptor(KEY, "h2/job/0.b")
    opening = next(dialer)
    assert isinstance(opening, bytes)
    next(acceptor)
    prefix = 8
    acceptor.send(opening[:prefix])
    challenge = acceptor.send(opening[prefix:])
    assert isinstance(challenge, bytes)
    next(acceptor)
    next(dialer)
    proof = dialer.send(challenge)
    assert isinstance(proof, bytes)
    try:
        acceptor.send(proof)
    except StopIteration as done:
        answer = done.value[1](HandshakeReply(HandshakeVerdict.ACCEPTED, epoch=3))
    return opening + proof, challenge + answer


DIALER, ACCEPTOR = _said()


def accepting(data: bytes) -> object:
    """A stranger calls."""
    return _talk(handshake.acceptor(KEY, "h2/job/0.b"), data)


def calling(data: bytes) -> object:
    """A stranger answers."""
    talk = handshake.dialer(KEY, "h1/job/0.a", "h2/job/0.b", "world", LinkPurpose.COLLECTIVE, 3)
    return _talk(talk, data)


def _talk(talk: handshake.Talk[object], data: bytes) -> object:
    want = next(talk)
    try:
        while True:
            if isinstance(want, bytes):
                want = next(talk)
            elif len(data) < want:
                return None  # more would have to come
            else:
                piece, data = data[:want], data[want:]
                want = talk.send(piece)
    except StopIteration as done:
        return done.value


EXPECTED = FrameHeader(3, 7, 1, 2).packed(4096)


def message_header(data: bytes) -> object:
    check(data[:HEADER_SIZE].ljust(HEADER_SIZE, b"\0"), EXPECTED, "h2/job/0.b")
    return True


# --- the store ------------------------------------------------------------------------------------


def _record() -> JobRecord:
    sim = Plane(ranks=3, standbys=1)
    sim.settle(2)
    sim.step()
    sim.drains, sim.drain_count = {"h0"}, 1
    sim.settle(2)
    assert sim.redis.record is not None
    assert sim.redis.record.plan is not None
    return sim.redis.record


RECORDS = (msgspec.json.encode(_record()),)
OLD = 20 * RECORDS[0]
CHANGES = (difference(OLD, b"new" + OLD) or b"", difference(OLD, OLD[700:] + OLD[:900]) or b"")
HOSTS = (msgspec.json.encode(HostStatus("h1", "i", workers=(STATUS,))),)
REQUESTS = (msgspec.json.encode(DrainRequest("h1", "d", by="ü")),)
SEALED = tuple(SEAL.sealed("DrainRequest", body) for body in REQUESTS)

# --- HTTP -----------------------------------------------------------------------------------------

HEADER_LIMIT = 8190
"""aiohttp refuses longer ones."""
HEADERS = tuple(
    json.dumps(headers).encode()
    for headers in (
        ["127.0.0.1:80", "Bearer token", "http://127.0.0.1:80", "same-origin", "application/json"],
        ["[::1]:80", "Basic x", "null", "", ""],
    )
)


def http_headers(data: bytes) -> object:
    text = data[:HEADER_LIMIT].decode("latin-1")
    words = [w.strip('" []') for w in text.split(",")] + [""] * 5
    return refusal(RequestHeaders(*words[:5]), Secret("token"), frozenset({"h1"}))


TARGETS = (
    Target("unix socket", FRAMES, socket_frame, (WireError,)),
    Target("calls of strangers", (DIALER,), accepting, (LinkRefused,), False),
    Target("answers of strangers", (ACCEPTOR,), calling, (LinkRefused,), False),
    Target("headers of messages", (EXPECTED,), message_header, (LinkError,)),
    Target("stored plans", RECORDS, lambda b: decoded(b, JobRecord), (StoreUnavailable,)),
    Target("changes of plans", CHANGES, lambda b: applied(OLD, b)),
    Target("stored hosts", HOSTS, lambda b: decoded(b, HostStatus), (StoreUnavailable,)),
    Target("requests", REQUESTS, lambda b: decoded(b, DrainRequest), (StoreUnavailable,)),
    Target("seals", SEALED, lambda b: SEAL.opened("DrainRequest", b)),
    Target("http headers", HEADERS, http_headers, (), False),
)

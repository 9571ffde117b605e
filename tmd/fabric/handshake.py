"""Mutual proof that both ends of a new connection hold the job's key; no IO of its own.

A conversation is a generator: it yields bytes to send or the number of bytes to receive, and the
caller moves them. Each proof is an HMAC over everything exchanged so far, with a label for its
role, so it cannot be replayed, reflected or used for another purpose. The acceptor proves itself
last: a stranger learns only a random number.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Generator
from enum import StrEnum
from struct import Struct as Layout
from typing import TypeVar

import msgspec
from msgspec import Struct

from tmd.core.values.decode_errors import UNREADABLE, brief
from tmd.core.values.errors import LinkRefused

T = TypeVar("T")
Talk = Generator[bytes | int, bytes, T]

MAGIC = b"TMDF"
VERSION = 2
"""Grows with a release that changes what workers send to each other or compare: frames, exchanges,
digests. Workers of different versions never share a job, and the leader gives no rank to one that
differs (:mod:`tmd.core.planning.peers`); this check is the second line of defence."""
NONCE = 32
PROOF = 32
MAX_HELLO = 2048
MAX_ANSWER = 4096

_PREFIX = Layout("<4sHH")
OPENING = _PREFIX.size
"""Bytes of a greeting that name protocol and version."""
_LENGTH = Layout("<H")


class LinkPurpose(StrEnum):
    """The purpose of a link."""

    COLLECTIVE = "collective"
    MESSAGES = "messages"  # point-to-point, in the direction of the dial only
    RAW = "raw"  # no group: state transfer
    PROBE = "probe"  # no link: asks for a sign of life and suspects


class LinkHello(Struct, frozen=True):
    """Caller, callee and purpose of a link."""

    worker: str
    peer: str
    group: str
    """Group id, or the purpose of a raw link."""
    purpose: LinkPurpose
    epoch: int
    nonce: bytes


class HandshakeVerdict(StrEnum):
    ACCEPTED = "accepted"
    REFUSED = "refused"


class HandshakeReply(Struct, frozen=True):
    """The acceptor's answer."""

    verdict: HandshakeVerdict
    detail: str = ""
    epoch: int = -1
    """Epoch the acceptor is in; -1 for none."""
    poisoned: bool = False
    settled: bool = True
    """Whether ``suspects`` is final."""
    suspects: tuple[str, ...] = ()


Seal = Callable[[HandshakeReply], bytes]


def _proof(key: bytes, role: bytes, *transcript: bytes) -> bytes:
    mac = hmac.new(key, role, "sha256")
    for part in transcript:
        mac.update(len(part).to_bytes(4, "little") + part)
    return mac.digest()


def dialer(
    key: bytes, worker: str, peer: str, group: str, purpose: LinkPurpose, epoch: int
) -> Talk[HandshakeReply]:
    """The calling side. Returns the verified reply, accepting or not."""
    hello = msgspec.msgpack.encode(
        LinkHello(worker, peer, group, purpose, epoch, os.urandom(NONCE))
    )
    if len(hello) > MAX_HELLO:
        raise ValueError(f"names are too long for a handshake: {len(hello)} bytes")
    opening = _PREFIX.pack(MAGIC, VERSION, len(hello)) + hello
    yield opening
    challenge = yield NONCE
    proof = _proof(key, b"tmd dialer", opening, challenge)
    yield proof
    (length,) = _LENGTH.unpack((yield _LENGTH.size))
    if length > MAX_ANSWER:
        raise LinkRefused(f"{peer} answered with {length} bytes")
    answer = yield length
    seal = yield PROOF
    if not hmac.compare_digest(seal, _proof(key, b"tmd acceptor", opening, challenge, answer)):
        raise LinkRefused(f"{peer} does not hold the key of this job")
    try:
        return msgspec.msgpack.decode(answer, type=HandshakeReply)
    except UNREADABLE as e:
        raise LinkRefused(f"{peer} sent an answer that cannot be decoded: {brief(e)}") from e


def acceptor(key: bytes, worker: str) -> Talk[tuple[LinkHello, Seal]]:
    """The called side. Returns the caller's hello and the function that seals the reply."""
    prefix = yield _PREFIX.size
    magic, version, length = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise LinkRefused("does not speak this protocol")
    if version != VERSION:
        raise LinkRefused(f"uses version {version} of the link protocol, expected {VERSION}")
    if length > MAX_HELLO:
        raise LinkRefused(f"announced a greeting of {length} bytes")
    raw = yield length
    challenge = os.urandom(NONCE)
    yield challenge
    opening = prefix + raw
    if not hmac.compare_digest((yield PROOF), _proof(key, b"tmd dialer", opening, challenge)):
        raise LinkRefused("does not hold the key of this job")
    try:
        hello = msgspec.msgpack.decode(raw, type=LinkHello)
    except UNREADABLE as e:
        raise LinkRefused(f"sent a greeting that cannot be decoded: {brief(e)}") from e
    if hello.peer != worker:
        raise LinkRefused(f"asks for worker {hello.peer!r}, this is {worker!r}")

    def seal(answer: HandshakeReply) -> bytes:
        body = msgspec.msgpack.encode(answer)
        mac = _proof(key, b"tmd acceptor", opening, challenge, body)
        return _LENGTH.pack(len(body)) + body + mac

    return hello, seal

"""Mutual proof that both ends of a new connection hold the job's key; no IO of its own.

A conversation is a generator: it yields bytes to be sent, or the number of bytes it wants to
receive, and the caller moves them. Each proof is an HMAC over everything said so far, with a label
of its role, so nothing can be replayed, reflected or used for another purpose. The acceptor proves
itself last: a stranger learns nothing from it but a random number.
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
VERSION = 1
NONCE = 32
PROOF = 32
MAX_HELLO = 2048
MAX_ANSWER = 4096

_PREFIX = Layout("<4sHH")
_LENGTH = Layout("<H")


class LinkPurpose(StrEnum):
    """What a link is for."""

    COLLECTIVE = "collective"
    MESSAGES = "messages"  # point-to-point, in the direction of the dial only
    RAW = "raw"  # no group: state transfer
    PROBE = "probe"  # no link: is this worker alive, and whom does it suspect


class LinkHello(Struct, frozen=True):
    """Who calls whom and what for."""

    worker: str
    peer: str
    group: str
    """Group id, or the purpose of a raw link."""
    lane: LinkPurpose
    epoch: int
    nonce: bytes


class HandshakeVerdict(StrEnum):
    ACCEPTED = "accepted"
    REFUSED = "refused"


class HandshakeReply(Struct, frozen=True):
    """What the acceptor thinks of it."""

    verdict: HandshakeVerdict
    detail: str = ""
    epoch: int = -1
    """Epoch the acceptor is in; -1 for none."""
    poisoned: bool = False
    settled: bool = True
    """Whether ``suspects`` is final."""
    suspects: tuple[str, ...] = ()


Seal = Callable[[HandshakeReply], bytes]


def _proof(key: bytes, role: bytes, *said: bytes) -> bytes:
    mac = hmac.new(key, role, "sha256")
    for part in said:
        mac.update(len(part).to_bytes(4, "little") + part)
    return mac.digest()


def dialer(
    key: bytes, worker: str, peer: str, group: str, lane: LinkPurpose, epoch: int
) -> Talk[HandshakeReply]:
    """The calling side. Returns the verified answer, whatever it says."""
    hello = msgspec.msgpack.encode(LinkHello(worker, peer, group, lane, epoch, os.urandom(NONCE)))
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
        raise LinkRefused(f"{peer} sent an answer that cannot be read: {brief(e)}") from e


def acceptor(key: bytes, worker: str) -> Talk[tuple[LinkHello, Seal]]:
    """The called side. Returns who called and the function that seals the answer for it."""
    prefix = yield _PREFIX.size
    magic, version, length = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise LinkRefused("does not speak this protocol")
    if version != VERSION:
        raise LinkRefused(f"speaks version {version} of the link protocol, here is {VERSION}")
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
        raise LinkRefused(f"sent a greeting that cannot be read: {brief(e)}") from e
    if hello.peer != worker:
        raise LinkRefused(f"asks for worker {hello.peer!r}, here is {worker!r}")

    def seal(answer: HandshakeReply) -> bytes:
        said = msgspec.msgpack.encode(answer)
        mac = _proof(key, b"tmd acceptor", opening, challenge, said)
        return _LENGTH.pack(len(said)) + said + mac

    return hello, seal

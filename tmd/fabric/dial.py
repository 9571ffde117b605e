"""Opens connections to other workers, and asks whether they are alive."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tmd.core.values.errors import LinkError, LinkRefused
from tmd.core.values.model import Member
from tmd.core.values.reasons import in_words
from tmd.fabric.handshake import (
    OPENING,
    HandshakeReply,
    HandshakeVerdict,
    LinkPurpose,
    Talk,
    dialer,
)
from tmd.fabric.link import Link, keep_alive

VERSION_S = 0.25
"""How long a peer has for ending the handshake once it knows the version."""
CLOSED = "{} closed the handshake: it has another key, release of tmd or worker id"

GoOn = Callable[[], bool]
"""Called each time that a peer has not answered in time; returns whether to wait once more."""


class PeerBusy(LinkError):
    """The peer's kernel has accepted the connection, but its process does not answer in time.

    Native code that holds the interpreter has this effect, as does a process that is stopped.
    """


PATIENCE_S = 5.0


@dataclass(frozen=True)
class Caller:
    """Identity and key of the dialling process."""

    worker: str
    key: bytes
    patience_s: float = PATIENCE_S
    """How long a peer may take to answer, in seconds."""

    def dial(
        self,
        member: Member,
        group: str,
        purpose: LinkPurpose,
        epoch: int,
        *,
        timeout: float,
        go_on: GoOn | None = None,
    ) -> Link:
        """Open an authenticated link to ``member``.

        Raises LinkRefused if it refuses, LinkError if it cannot be reached in ``timeout`` seconds,
        and PeerBusy if it is reached and does not answer in them. ``go_on`` may lengthen the wait
        for its answers.
        """
        sock, answer = self._talk(member, group, purpose, epoch, _Wait(timeout, go_on))
        if why := _refusal(member, answer):
            sock.close()
            raise LinkRefused(why)
        try:
            return Link(sock, member.worker, self.worker, epoch)
        except OSError as e:
            sock.close()
            raise LinkError(f"link to {member.worker} broke at once: {in_words(e)}") from e

    def ask(self, member: Member, *, timeout: float, go_on: GoOn | None = None) -> HandshakeReply:
        """The reply of ``member`` about itself. Raises LinkError as :meth:`dial` does."""
        sock, answer = self._talk(member, "", LinkPurpose.PROBE, -1, _Wait(timeout, go_on))
        sock.close()
        return answer

    def unanswered(self, members: Sequence[Member], timeout: float) -> list[Member]:
        """Those of ``members`` that do not answer a probe within ``timeout`` seconds each."""
        return [member for member in members if self.probe(member, timeout=timeout) is None]

    def probe(self, member: Member, *, timeout: float) -> HandshakeReply | None:
        """The reply of ``member`` about itself, or ``None`` without one."""
        try:
            return self.ask(member, timeout=timeout)
        except LinkError:
            return None

    def refusal(self, member: Member, *, timeout: float) -> str:
        """Why ``member`` refuses links of this worker; empty if it does not, or does not answer.

        A peer that dies, or has no room for a handshake, resets the connection: that is no refusal.
        So does one of release 0.1.0 that refuses the version with more to read, so it gets the
        version alone at first.
        """
        try:
            wait = _Wait(timeout)
            sock, answer = self._talk(member, "greeting", LinkPurpose.RAW, -1, wait, VERSION_S)
        except LinkRefused as e:
            return str(e)
        except LinkError:
            return ""
        sock.close()
        return _refusal(member, answer)

    def _talk(
        self,
        member: Member,
        group: str,
        purpose: LinkPurpose,
        epoch: int,
        wait: _Wait,
        version_s: float = 0.0,
    ) -> tuple[socket.socket, HandshakeReply]:
        """``version_s``: how long the peer may take to refuse the version before it hears more."""
        host, _, port = member.address.rpartition(":")
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), timeout=wait.left())
        except OSError as e:
            raise LinkError(
                f"cannot reach {member.worker} at {member.address}: {in_words(e)}"
            ) from e
        try:
            talk = dialer(self.key, self.worker, member.worker, group, purpose, epoch)
            return sock, _converse(sock, talk, member.worker, wait, version_s)
        except LinkError:
            sock.close()
            raise
        except OSError as e:
            sock.close()
            raise LinkError(f"handshake with {member.worker} failed: {in_words(e)}") from e


class _Wait:
    """How long a peer has for its answers: ``timeout`` seconds, and again while ``go_on`` holds."""

    def __init__(self, timeout: float, go_on: GoOn | None = None) -> None:
        self._timeout, self._go_on = timeout, go_on
        self._deadline = time.monotonic() + timeout

    def left(self) -> float:
        """Seconds until the deadline, and a moment if it has passed."""
        return max(0.001, self._deadline - time.monotonic())

    def goes_on(self) -> bool:
        """Whether to wait once more, with a new deadline."""
        if self._go_on is None or not self._go_on():
            return False
        self._deadline = time.monotonic() + self._timeout
        return True


def _refusal(member: Member, answer: HandshakeReply) -> str:
    accepted = answer.verdict is HandshakeVerdict.ACCEPTED
    return "" if accepted else f"{member.worker} refused the link: {answer.detail}"


def _converse(
    sock: socket.socket, talk: Talk[HandshakeReply], peer: str, wait: _Wait, version_s: float
) -> HandshakeReply:
    keep_alive(sock)
    want = next(talk)
    if version_s and isinstance(want, bytes):
        want = _after_version(sock, want, peer, version_s)
    while True:
        try:
            if isinstance(want, bytes):
                sock.settimeout(wait.left())
                sock.sendall(want)
                want = next(talk)
            else:
                want = talk.send(_exactly(sock, want, wait, peer))
        except StopIteration as done:
            answer: HandshakeReply = done.value
            return answer


def _after_version(sock: socket.socket, greeting: bytes, peer: str, version_s: float) -> bytes:
    """Send the version; the rest of ``greeting``, unless ``peer`` ends the handshake."""
    sock.settimeout(version_s)
    sock.sendall(greeting[:OPENING])
    with contextlib.suppress(TimeoutError):
        if not sock.recv(1, socket.MSG_PEEK):
            raise LinkRefused(CLOSED.format(peer))
    return greeting[OPENING:]


def _exactly(sock: socket.socket, count: int, wait: _Wait, peer: str) -> bytes:
    data = b""
    while len(data) < count:
        sock.settimeout(wait.left())
        try:
            more = sock.recv(count - len(data))
        except TimeoutError as e:
            if e.errno is not None:  # the kernel has given up the connection
                raise
            if not wait.goes_on():
                raise PeerBusy(f"{peer} accepts connections and does not answer") from e
            continue
        if not more:
            raise LinkRefused(CLOSED.format(peer))
        data += more
    return data

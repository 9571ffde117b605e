"""Opens connections to other workers, and asks whether they are alive."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from tmd.core.values.errors import LinkError, LinkRefused
from tmd.core.values.model import Member
from tmd.core.values.reasons import in_words
from tmd.fabric.handshake import HandshakeReply, HandshakeVerdict, LinkPurpose, dialer
from tmd.fabric.link import Link

CLOSED = "{} closed the handshake: it has another key, release of tmd or worker id"


@dataclass(frozen=True)
class Caller:
    """Identity and key of the dialling process."""

    worker: str
    key: bytes

    def dial(
        self, member: Member, group: str, lane: LinkPurpose, epoch: int, *, timeout: float
    ) -> Link:
        """Open an authenticated link to ``member``.

        Raises LinkRefused if it refuses, LinkError if it cannot be reached in ``timeout`` seconds.
        """
        sock, answer = self._talk(member, group, lane, epoch, timeout)
        if answer.verdict is not HandshakeVerdict.ACCEPTED:
            sock.close()
            raise LinkRefused(f"{member.worker} refused the link: {answer.detail}")
        try:
            return Link(sock, member.worker, self.worker, epoch)
        except OSError as e:
            sock.close()
            raise LinkError(f"link to {member.worker} broke at once: {in_words(e)}") from e

    def probe(self, member: Member, *, timeout: float) -> HandshakeReply | None:
        """The reply of ``member`` about itself, or ``None`` without one."""
        try:
            sock, answer = self._talk(member, "", LinkPurpose.PROBE, -1, timeout)
        except LinkError:
            return None
        sock.close()
        return answer

    def _talk(
        self, member: Member, group: str, lane: LinkPurpose, epoch: int, timeout: float
    ) -> tuple[socket.socket, HandshakeReply]:
        deadline = time.monotonic() + timeout
        host, _, port = member.address.rpartition(":")
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout)
        except OSError as e:
            raise LinkError(
                f"cannot reach {member.worker} at {member.address}: {in_words(e)}"
            ) from e
        try:
            return sock, self._converse(sock, member, group, lane, epoch, deadline)
        except LinkError:
            sock.close()
            raise
        except ConnectionResetError as e:
            # The peer had not read all that was sent when it closed.
            sock.close()
            raise LinkRefused(CLOSED.format(member.worker)) from e
        except OSError as e:
            sock.close()
            raise LinkError(f"handshake with {member.worker} failed: {in_words(e)}") from e

    def _converse(
        self,
        sock: socket.socket,
        member: Member,
        group: str,
        lane: LinkPurpose,
        epoch: int,
        deadline: float,
    ) -> HandshakeReply:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        talk = dialer(self.key, self.worker, member.worker, group, lane, epoch)
        want = next(talk)
        while True:
            try:
                if isinstance(want, bytes):
                    sock.settimeout(max(0.001, deadline - time.monotonic()))
                    sock.sendall(want)
                    want = next(talk)
                else:
                    want = talk.send(_exactly(sock, want, deadline, member.worker))
            except StopIteration as done:
                answer: HandshakeReply = done.value
                return answer


def _exactly(sock: socket.socket, count: int, deadline: float, peer: str) -> bytes:
    data = b""
    while len(data) < count:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        more = sock.recv(count - len(data))
        if not more:
            raise LinkRefused(CLOSED.format(peer))
        data += more
    return data

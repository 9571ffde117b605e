"""Messages between the daemon of a host and the trainers, launchers and operators on it.

One Unix stream socket, frames of a 4-byte little-endian length and a msgpack body. Every message
states the complete situation, so that a lost or repeated one does no harm.
This module opens no sockets: the daemon reads with asyncio, the trainer with threads.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from tmd.core.planning.directives import Directive
from tmd.core.values.decode_errors import UNREADABLE, brief
from tmd.core.values.errors import WireError
from tmd.core.values.limits import ShadowLimits
from tmd.core.values.model import Alert, Exit, Signal, WorkerStatus
from tmd.core.values.printable import valid_text

VERSION = 1
MAX_FRAME = 4 << 20
"""Largest body of a message, but for directives."""
MAX_DIRECTIVE = 64 << 20
"""Largest body of a directive, which has all members of its job: some 150 bytes for each rank."""
_LENGTH = struct.Struct("<I")
HEADER_SIZE = _LENGTH.size


class TrainerHello(Struct, frozen=True, tag=True):
    """First message of a trainer; repeated after every reconnect."""

    version: int
    status: WorkerStatus
    obeyed: int
    """Highest lease epoch this trainer has obeyed."""
    futex: int = 0
    """The thread that holds a robust futex while the process lives, whose descriptor accompanies
    this message; 0 for none."""


class Welcome(Struct, frozen=True, tag=True):
    """The daemon's answer to :class:`TrainerHello`."""

    host: str
    key: bytes
    """Key of the job's links (32 bytes)."""
    shadow: ShadowLimits = ShadowLimits()


class StatusReport(Struct, frozen=True, tag=True):
    """Trainer: its current status. Also the heartbeat of its agent's thread."""

    status: WorkerStatus


class DirectiveOrder(Struct, frozen=True, tag=True):
    """Daemon: the worker's current directive. Refused if ``lease_epoch`` is below one obeyed
    before (invariant I5)."""

    lease_epoch: int
    revision: int
    directive: Directive


class LauncherHello(Struct, frozen=True, tag=True):
    """First message of a launcher."""

    version: int
    job: str
    pid: int
    workers: tuple[str, ...]
    notices: bool = False
    """Whether it understands :class:`LauncherNotice`; older launchers do not."""


class Exited(Struct, frozen=True, tag=True):
    """Launcher: one of its workers ended."""

    exit: Exit


class Kill(Struct, frozen=True, tag=True):
    """Daemon: kill this worker at once (SIGKILL); it has been named dead."""

    worker: str
    reason: str


class LauncherNotice(Struct, frozen=True, tag=True):
    """Daemon: a notice about this worker for the launcher's log."""

    worker: str
    text: str


class Inject(Struct, frozen=True, tag=True):
    """Operator, instead of a hello: raise this finding for the detector that its code names."""

    version: int
    signal: Signal
    for_s: float = 0.0
    """Seconds until it is cleared; 0 is never."""
    dry_run: bool = False
    """Only report what would be raised."""


class Withdraw(Struct, frozen=True, tag=True):
    """Operator, instead of a hello: clear injected findings; empty fields match any."""

    version: int
    code: str = ""
    entity: str = ""


class Injected(Struct, frozen=True, tag=True):
    """The daemon's answer to :class:`Inject` and :class:`Withdraw`; then it closes the link."""

    alerts: tuple[Alert, ...]
    """The alerts in their present state."""
    hold_s: float = 0.0
    """Hold time before they are raised."""
    off: str = ""
    """After a dry run: why the finding would be refused."""


class Rejected(Struct, frozen=True, tag=True):
    """Daemon: refuses the client; ``reason`` has the cause and the remedy."""

    reason: str


Request = Inject | Withdraw
Message = (
    TrainerHello
    | Welcome
    | StatusReport
    | DirectiveOrder
    | LauncherHello
    | Exited
    | Kill
    | LauncherNotice
    | Request
    | Injected
    | Rejected
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One frame, ready to send. Text that is no valid Unicode, such as of a file name, is escaped.

    Raises:
        WireError: the message is too large.
    """
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError:
        body = _encoder.encode(_escaped(msgspec.to_builtins(message, builtin_types=(bytes,))))
    limit = MAX_DIRECTIVE if isinstance(message, DirectiveOrder) else MAX_FRAME
    if len(body) > limit:
        raise WireError(f"message {type(message).__name__} is {len(body)} bytes, limit {limit}")
    return _LENGTH.pack(len(body)) + body


def _escaped(value: Any) -> Any:
    match value:
        case str():
            return valid_text(value)
        case dict():
            return {_escaped(key): _escaped(one) for key, one in value.items()}
        case list() | tuple():
            return [_escaped(one) for one in value]
    return value


def body_size(header: bytes, limit: int = MAX_FRAME) -> int:
    """Size of the body that follows ``header``.

    Raises:
        WireError: the size is above ``limit``; the peer does not speak this protocol.
    """
    (size,) = _LENGTH.unpack(header)
    if size > limit:
        raise WireError(f"frame of {size} bytes announced, limit {limit}: not a tmd peer?")
    return int(size)


def decode(body: bytes | bytearray | memoryview) -> Message:
    """The message in ``body``.

    Raises:
        WireError: the body is no known message or lacks a field.
    """
    try:
        return _decoder.decode(body)
    except UNREADABLE as error:
        raise WireError(f"bad message of {len(body)} bytes: {brief(error)}") from error


def messages(inbox: bytearray) -> Iterator[Message]:
    """The whole messages at the beginning of ``inbox``, each of which is removed from it.

    Raises:
        WireError: one is malformed, or too long.
    """
    while len(inbox) >= HEADER_SIZE:
        end = HEADER_SIZE + body_size(bytes(inbox[:HEADER_SIZE]))
        if len(inbox) < end:
            return
        body = bytes(inbox[HEADER_SIZE:end])
        del inbox[:end]
        yield decode(body)

"""Moves a state over a link: header, answer, tensors, digest, answer.

The source sends the layout of the state and its data position. The joiner accepts or refuses. The
raw tensors follow, small ones packed together, then a digest of every byte. The joiner compares it
with its own digest and uses nothing before both agree (invariant I6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import xxhash
from msgspec import Struct, msgpack
from torch import Tensor

from tmd.core.values.decode_errors import UNREADABLE, brief
from tmd.core.values.errors import LinkError, StateMismatch
from tmd.fabric import Link
from tmd.fabric.packing import unpack
from tmd.trainer.protocol.offers import StateHeader
from tmd.trainer.state.digests import Digest, chunks, groups, raw

T = TypeVar("T")

HEADER_LIMIT = 64 << 20


class TransferReply(Struct, frozen=True):
    """The joiner's answer: continue, or the reason to refuse."""

    refusal: str = ""
    has: bool = False
    """The joiner may hold this state already; its digest follows."""


def offer(link: Link, header: StateHeader) -> bool:
    """Source: send ``header``, wait for the answer; returns whether the joiner may hold the state.

    Raises:
        StateMismatch: the joiner refused and gave this reason.
        LinkError: the joiner is gone.
    """
    link.send_frame(msgpack.encode(header))
    return _expect_go(link).has


def consider(link: Link) -> StateHeader:
    """Joiner: receive the header, to be answered with :func:`answer`."""
    return _read(link, StateHeader)


def answer(link: Link, refusal: str = "", *, has: bool = False) -> None:
    """Joiner: accept, or refuse with a reason. After ``has`` call :func:`has_same`."""
    link.send_frame(msgpack.encode(TransferReply(refusal, has)))


def confirm(link: Link, own: Callable[[], Digest]) -> bool:
    """Source: whether the joiner holds the same state, so that no tensors follow. Both sides
    compute ``own`` at the same time."""
    ours = own()
    same = ours == _read(link, Digest)
    link.send_frame(msgpack.encode(same))
    return same


def has_same(link: Link, own: Callable[[], Digest]) -> bool:
    """Joiner: the other side of :func:`confirm`."""
    link.send_frame(msgpack.encode(own()))
    return _read(link, bool)


def send_tensors(link: Link, tensors: Iterable[Tensor]) -> int:
    """Source: stream ``tensors``; returns the bytes sent once the joiner has confirmed the digest.

    Raises:
        StateMismatch: the joiner received different bytes.
        LinkError: the joiner is gone.
    """
    digest = xxhash.xxh3_128()
    total = 0
    for chunk in chunks(list(tensors)):
        link.send(chunk)
        digest.update(chunk)
        total += len(chunk)
    link.send_frame(digest.digest())
    _expect_go(link)
    return total


def receive_tensors(link: Link, tensors: Iterable[Tensor]) -> str:
    """Joiner: fill ``tensors`` in place; returns the digest (hex) that both sides agree on.

    Raises:
        StateMismatch: the digests differ.
        LinkError: the source is gone.
    """
    digest = xxhash.xxh3_128()
    targets = list(tensors)
    for group in groups(targets):
        if len(group) == 1 and _is_plain(group[0]):
            view = raw(group[0])
            link.recv_into(view)
            digest.update(view)
            continue
        buffer = bytearray(sum(t.numel() * t.element_size() for t in group))
        link.recv_into(memoryview(buffer))
        digest.update(buffer)
        _unpack(buffer, group)
    announced = link.recv_frame(64)
    refusal = "" if announced == digest.digest() else "digest of the received state differs"
    answer(link, refusal)
    if refusal:
        raise StateMismatch(f"{refusal}: memory or network of one side corrupts data")
    return digest.hexdigest()


def _read(link: Link, kind: type[T]) -> T:
    blob = link.recv_frame(HEADER_LIMIT)
    try:
        return msgpack.decode(blob, type=kind)
    except UNREADABLE as error:
        raise LinkError(f"{link.peer} does not speak this protocol: {brief(error)}") from error


def _expect_go(link: Link) -> TransferReply:
    reply = _read(link, TransferReply)
    if reply.refusal:
        raise StateMismatch(reply.refusal)
    return reply


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.device.type == "cpu"


def _unpack(buffer: bytearray, group: list[Tensor]) -> None:
    filled = [tensor for tensor in group if tensor.numel()]
    values: list[Tensor] = []
    offset = 0
    for tensor in filled:
        flat = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        values.append(flat.view(tensor.shape))
        offset += flat.nbytes
    with torch.no_grad():
        unpack(values, filled)

"""The frames between a rank and its shadow: one link, both directions.

A frame is a msgpack envelope and the bytes of its tensors, one after the other. Order is meaning:
what a frame says holds for the state that the frames before it have made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from msgspec import Struct, msgpack
from torch import Tensor

from tmd.core.values.errors import LinkError
from tmd.core.values.limits import ShadowLimits
from tmd.core.values.reasons import in_words
from tmd.fabric import Link
from tmd.trainer.protocol.offers import Offer
from tmd.trainer.state.data import Position
from tmd.trainer.state.digests import Digest
from tmd.trainer.state.state import Layout, Layouts, TensorSpec, dtype_of
from tmd.trainer.state.units import Units

PURPOSE = "mirror"
"""Name of the stream on which a joiner asks to follow a rank."""
SNAPSHOTS = "snapshot"
"""Name of the stream on which copies of a state are brought, or asked for."""
CHECK_EVERY = 20
"""Steps between two digests once the joiner is in step."""
ENVELOPE_LIMIT = 64 << 20
BODY_LIMIT = 1 << 38

VOTE, SHIFT = "@vote", "@shift"
"""Channels of what the runtime itself says among the ranks; the others are named for groups."""


# --- joiner to source -----------------------------------------------------------------------------


class ShadowRequest(Struct, frozen=True, tag=True):
    """The first frame on the link: which rank the peer wants to shadow, for which plan."""

    plan: str
    rank: int


class Begin(Struct, frozen=True, tag=True):
    """The joiner stands where it can take the state. ``whole``: all at once, while you wait."""

    whole: bool = False


class Settled(Struct, frozen=True, tag=True):
    """The joiner is in step: no more tails, and few digests."""


class Took(Struct, frozen=True, tag=True):
    """The joiner has the rank, at the start of ``step``, and needs no more of the source."""

    step: int


# --- source to joiner -----------------------------------------------------------------------------


class Opening(Struct, frozen=True, tag=True):
    """What the state looks like; answers :class:`ShadowRequest`."""

    offer: Offer


class Unit(Struct, frozen=True, tag=True):
    """Unit ``number`` as it was at the start of step ``version``."""

    version: int
    number: int
    layout: Layout


class Tail(Struct, frozen=True, tag=True):
    """What optimizer number ``optimizer`` was given in ``step``: gradients of ``units``, values."""

    step: int
    optimizer: int
    units: tuple[int, ...]
    values: Layout


class Boundary(Struct, frozen=True, tag=True):
    """The source begins ``step``. ``rest`` is there as long as the joiner may have to jump here."""

    step: int
    position: Position
    rest: Layout | None = None
    graded: tuple[int, ...] = ()
    """With ``rest``: units that have a gradient. Its value does not count: a step begins or ends by
    forgetting it, but optimizers pass over a parameter that has none."""
    check: bool = False
    """A :class:`DigestCheck` of this step follows as soon as it is there."""
    quiet: bool = True
    """No operation of an earlier step is under way: its outputs were all before this frame."""


class Output(Struct, frozen=True, tag=True):
    """Outputs of one collective."""

    channel: str
    op: str
    given: str = ""
    """Digest of what the source put in, as long as the joiner is on trial; else empty."""


class ControlMessage(Struct, frozen=True, tag=True):
    """Outcome of a vote or a shift."""

    channel: str
    payload: bytes


class DigestCheck(Struct, frozen=True, tag=True):
    """Digest of the source's state at the start of ``step``."""

    step: int
    parts: Digest


class Dropped(Struct, frozen=True, tag=True):
    """The source stops showing its rank. ``final``: its state should not be copied either."""

    reason: str
    final: bool = False
    offer: Offer | None = None
    """What it will have to give later."""


# --- copies to which a rank can go back -----------------------------------------------------------


class Bring(Struct, frozen=True, tag=True):
    """The state of ``rank`` at the start of ``step``: a boundary and ``units`` units follow."""

    rank: int
    step: int
    units: int
    layouts: Layouts
    digest: str
    """Of all bytes that follow."""
    buckets: str = ""
    """How gradients are summed on the rank; empty if that was not settled yet."""


class Stored(Struct, frozen=True, tag=True):
    """It has arrived; ``refusal`` says why it is not kept."""

    refusal: str = ""


class Fetch(Struct, frozen=True, tag=True):
    """Give back the state of ``rank`` at the start of ``step``; answered as a joiner is."""

    rank: int
    step: int


Frame = (
    ShadowRequest
    | Begin
    | Settled
    | Took
    | Opening
    | Unit
    | Tail
    | Boundary
    | Output
    | ControlMessage
    | DigestCheck
    | Dropped
    | Bring
    | Stored
    | Fetch
)


def staging_bound(limits: ShadowLimits, units: Units) -> int:
    """Bytes that may wait on one side: what is configured, and what a step of this model needs.

    That is its gradients three times: as outputs, as a tail, and once more for the step after.
    """
    return int(limits.staging_mb * 1e6) + 3 * units.nbytes


class Envelope(Struct, frozen=True, array_like=True):
    """A frame and what its body consists of."""

    frame: Frame
    body: tuple[TensorSpec, ...] = ()


_decoder = msgpack.Decoder(Envelope)


def specs_of(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    """What a body of ``tensors`` is announced as."""
    return tuple(TensorSpec(tuple(t.shape), str(t.dtype)) for t in tensors)


def send(link: Link, envelope: Envelope, body: Tensor | None = None) -> None:
    """Send a frame; ``body``: its tensors' bytes, uint8 on the CPU. Raises LinkError."""
    link.send_frame(msgpack.encode(envelope))
    if body is not None and body.numel():
        link.send(body.numpy().data)


def receive(link: Link) -> tuple[Frame, list[Tensor]]:
    """The next frame and its tensors (CPU). Raises LinkError, also for what is no frame."""
    envelope, body = receive_whole(link)
    with _understanding(link):
        return envelope.frame, taken_apart(envelope, body)


def receive_whole(link: Link) -> tuple[Envelope, Tensor]:
    """The next frame as it was sent: with one body. Raises LinkError as :func:`receive` does."""
    blob = link.recv_frame(ENVELOPE_LIMIT)
    with _understanding(link):
        envelope = _decoder.decode(blob)
        if (total := sum(map(_size, envelope.body))) > BODY_LIMIT:
            raise ValueError(f"a body of {total} bytes, limit {BODY_LIMIT}")
        body = torch.empty(total, dtype=torch.uint8)
    if total:
        link.recv_into(body.numpy().data)
    return envelope, body


def taken_apart(envelope: Envelope, body: Tensor) -> list[Tensor]:
    """The tensors that ``body`` consists of; they share its memory where they can."""
    return list(_parts(body, envelope.body, [_size(spec) for spec in envelope.body]))


@contextlib.contextmanager
def _understanding(link: Link) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Bytes of no meaning can fail in any way: bad msgpack, a depth, a type, a size.
        raise LinkError(f"{link.peer} does not speak this protocol: {in_words(error)}") from error


def _size(spec: TensorSpec) -> int:
    count = 1
    for extent in spec.shape:
        if extent < 0:
            raise ValueError(f"negative size in {spec.shape}")
        count *= extent
    return count * dtype_of(spec).itemsize


def _parts(body: Tensor, announced: Sequence[TensorSpec], sizes: list[int]) -> Iterator[Tensor]:
    offset = 0
    for spec, size in zip(announced, sizes, strict=True):
        piece = body[offset : offset + size]
        dtype = dtype_of(spec)
        # A view needs an aligned start.
        piece = piece if offset % dtype.itemsize == 0 else piece.clone()
        yield piece.view(dtype).view(spec.shape)
        offset += size

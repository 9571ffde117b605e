"""The frames between a rank and its shadow: one link, both directions.

A frame is a msgpack envelope followed by the bytes of its tensors. Frames must be used in order:
each applies to the state that the previous ones have produced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

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
from tmd.trainer.state.layout import Layout, Layouts, TensorSpec, dtype_of, spec_of
from tmd.trainer.state.units import Units

PURPOSE = "mirror"
"""Name of the stream on which a joiner asks to shadow a rank."""
SNAPSHOTS = "snapshot"
"""Name of the stream on which copies of a state are brought or fetched."""
CHECK_EVERY = 20
"""Steps between two digests once the joiner is in step."""
ENVELOPE_LIMIT = 64 << 20
BODY_LIMIT = 1 << 38
PIECE = 1 << 20
"""Bytes of a body that are sent at once."""

VOTE, SHIFT = "@vote", "@shift"
"""Channels of the runtime's own exchanges among ranks; other channels are named for groups."""


# --- joiner to source -----------------------------------------------------------------------------


class ShadowRequest(Struct, frozen=True, tag=True):
    """The first frame on the link: which rank the peer wants to shadow, for which plan."""

    plan: str
    rank: int
    adopted: bool = False
    """As in :class:`tmd.core.planning.directives.Prepare`."""


class Begin(Struct, frozen=True, tag=True):
    """The joiner is ready for the state. ``whole``: all at once, while the source waits."""

    whole: bool = False


class Settled(Struct, frozen=True, tag=True):
    """The joiner is in step. It needs few digests, and no more tails if it gets outputs.

    In a planned move it is sent again after each step: the joiner's state is that at the start of
    ``step``. Earlier releases leave it 0, which says nothing.
    """

    step: int = 0


class Took(Struct, frozen=True, tag=True):
    """The joiner has assumed the rank at the start of ``step`` and no longer needs the source."""

    step: int


# --- source to joiner -----------------------------------------------------------------------------


class Opening(Struct, frozen=True, tag=True):
    """Describes the state; answers :class:`ShadowRequest`."""

    offer: Offer


class Unit(Struct, frozen=True, tag=True):
    """Unit ``number`` as it was at the start of step ``version``."""

    version: int
    number: int
    layout: Layout


class Tail(Struct, frozen=True, tag=True):
    """Input of optimizer number ``optimizer`` in ``step``: gradients of ``units``, values."""

    step: int
    optimizer: int
    units: tuple[int, ...]
    values: Layout


class Boundary(Struct, frozen=True, tag=True):
    """The source begins ``step``. ``rest`` is included while the joiner may have to jump here."""

    step: int
    position: Position
    rest: Layout | None = None
    graded: tuple[int, ...] = ()
    """With ``rest``: units that have a gradient. Its value does not matter, since a step begins or
    ends by clearing it, but optimizers skip a parameter without one."""
    check: bool = False
    """A :class:`DigestCheck` of this step follows once it is computed."""
    quiet: bool = True
    """No operation of an earlier step is running: all its outputs precede this frame."""


class GradientsOnly(Struct, frozen=True, tag=True):
    """The source sends no outputs in this shadow: the joiner computes no step, and follows the
    tails up to the switch. ``why`` is for the operator."""

    why: str


class HandOver(Struct, frozen=True, tag=True):
    """The vote has given the rank to a joiner that follows the tails, at the start of ``step``. The
    boundary of that step comes before."""

    step: int


class Output(Struct, frozen=True, tag=True):
    """Outputs of one collective."""

    channel: str
    op: str
    given: str = ""
    """Digest of the source's inputs while the joiner is on trial; else empty."""


class ControlMessage(Struct, frozen=True, tag=True):
    """Outcome of a vote or a shift."""

    channel: str
    payload: bytes


class DigestCheck(Struct, frozen=True, tag=True):
    """Digest of the source's state at the start of ``step``."""

    step: int
    parts: Digest


class Dropped(Struct, frozen=True, tag=True):
    """The source ends the shadow. ``final``: its state should not be copied either."""

    reason: str
    final: bool = False
    offer: Offer | None = None
    """What the source can offer later."""


# --- copies for a rollback ------------------------------------------------------------------------


class Bring(Struct, frozen=True, tag=True):
    """The state of ``rank`` at the start of ``step``: a boundary and ``units`` units follow."""

    rank: int
    step: int
    units: int
    layouts: Layouts
    digest: str
    """Digest of all bytes that follow."""


class Stored(Struct, frozen=True, tag=True):
    """The copy has arrived; ``refusal`` is the reason if it was not stored."""

    refusal: str = ""


class Fetch(Struct, frozen=True, tag=True):
    """Request for the state of ``rank`` at the start of ``step``; answered as a joiner is."""

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
    | GradientsOnly
    | HandOver
    | Output
    | ControlMessage
    | DigestCheck
    | Dropped
    | Bring
    | Stored
    | Fetch
)


def staging_bound(limits: ShadowLimits, units: Units) -> int:
    """Bytes that may wait on one side: the configured limit, or more if a step needs it.

    A step needs three times its gradients: as outputs, as a tail, and for the next step.
    """
    return int(limits.staging_mb * 1e6) + 3 * units.nbytes


class Envelope(Struct, frozen=True, array_like=True):
    """A frame and the types of the tensors in its body."""

    frame: Frame
    body: tuple[TensorSpec, ...] = ()


_decoder = msgpack.Decoder(Envelope)


def specs_of(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    """Announcement of a body of ``tensors``."""
    return tuple(map(spec_of, tensors))


def send(
    link: Link,
    envelope: Envelope,
    body: Tensor | None = None,
    *,
    piece: int = PIECE,
    sent: Callable[[int], None] = lambda _: None,
) -> None:
    """Send a frame; ``body``: its tensors' bytes, uint8 on the CPU. Raises LinkError.

    A body may take minutes: ``sent`` is called after each ``piece`` of it with the number of bytes.
    """
    link.send_frame(msgpack.encode(envelope))
    if body is not None and body.numel():
        data = body.numpy().data
        for start in range(0, len(data), piece):
            link.send(part := data[start : start + piece])
            sent(len(part))


def receive(link: Link) -> tuple[Frame, list[Tensor]]:
    """The next frame and its tensors (CPU). Raises LinkError, even for malformed bytes."""
    envelope, body = receive_whole(link)
    with _understanding(link):
        return envelope.frame, taken_apart(envelope, body)


def receive_whole(link: Link) -> tuple[Envelope, Tensor]:
    """The next frame with its body undivided. Raises LinkError as :func:`receive` does."""
    blob = link.recv_frame(ENVELOPE_LIMIT)
    with _understanding(link):
        envelope = _decoder.decode(blob)
        if (total := sum(map(_size, envelope.body))) > BODY_LIMIT:
            raise ValueError(f"a body of {total} bytes, limit {BODY_LIMIT}")
        body = torch.empty(total, dtype=torch.uint8, device="cpu")
    if total:
        link.recv_into(body.numpy().data)
    return envelope, body


def taken_apart(envelope: Envelope, body: Tensor) -> list[Tensor]:
    """The tensors in ``body``; they share its memory where possible."""
    return list(_parts(body, envelope.body, [_size(spec) for spec in envelope.body]))


@contextlib.contextmanager
def _understanding(link: Link) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Malformed bytes can fail in many ways: msgpack, nesting, a type, a size.
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

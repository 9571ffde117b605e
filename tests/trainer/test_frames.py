"""Frames between a rank and its shadow arrive unchanged, and malformed ones are refused."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from msgspec import msgpack
from torch import Tensor

from tests.fabric.circle import at_once
from tests.trainer.wire import linked
from tmd.core.values.errors import LinkError
from tmd.fabric import GroupView, Link
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.frames import (
    BODY_LIMIT,
    ENVELOPE_LIMIT,
    Begin,
    Boundary,
    ControlMessage,
    DigestCheck,
    Dropped,
    Envelope,
    Frame,
    Opening,
    Output,
    Settled,
    ShadowRequest,
    Tail,
    Took,
    Unit,
)
from tmd.trainer.protocol.offers import Offer
from tmd.trainer.protocol.outbox import Outbox
from tmd.trainer.state.data import Position
from tmd.trainer.state.digests import raw
from tmd.trainer.state.layout import TensorSpec, flatten

pytestmark = pytest.mark.timeout(60)

LAYOUT, _ = flatten({"a": [torch.ones(2), 1.5, None], 7: (b"x", "y", True), "inf": float("inf")})
OFFER = Offer({"model": LAYOUT}, ((GroupView("0", (0, 1)),),), (1, 2**62), Position(1, 9))

FRAMES: list[Frame] = [
    ShadowRequest("plan", 3),
    Begin(),
    Begin(whole=True),
    Settled(),
    Took(7),
    Opening(OFFER),
    Unit(3, 4, LAYOUT),
    Tail(3, 1, (0, 2), LAYOUT),
    Boundary(3, Position(0, 3)),
    Boundary(3, Position(0, 3), LAYOUT, check=True),
    Output("0", "allreduce"),
    ControlMessage("@vote", b"\x00\xff"),
    DigestCheck(3, {"buffers": "00ff"}),
    Dropped("enough", final=True),
]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    with linked() as pair:
        yield pair


def carried(ends: tuple[Link, Link], frame: Frame, tensors: list[Tensor]) -> list[Tensor]:
    """Send it and receive it; the frame must be equal."""
    entry = Outbox(1 << 30).copy(frame, tensors)
    assert entry is not None
    received, arrived = at_once(
        [lambda: frames.receive(ends[1]), lambda: frames.send(ends[0], *entry)]
    )[0]
    assert received == frame
    return list(arrived)


def assert_same(sent: list[Tensor], arrived: list[Tensor]) -> None:
    assert len(sent) == len(arrived)
    for a, b in zip(sent, arrived, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert bytes(raw(a)) == bytes(raw(b))


@pytest.mark.parametrize("frame", FRAMES, ids=lambda f: type(f).__name__)
def test_every_frame_arrives_as_it_was_sent(ends: tuple[Link, Link], frame: Frame) -> None:
    assert carried(ends, frame, []) == []
    tensors = [torch.randn(3, 2), torch.arange(5)]
    assert_same(tensors, carried(ends, frame, tensors))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_for_bit(ends: tuple[Link, Link], dtype: torch.dtype) -> None:
    """They follow a single byte, so that no view starts at an aligned address."""
    size = 6 * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    own = bits.view(dtype).view(2, 3)
    tensors = [torch.tensor([True]), own, own[1, 1], own[:0], own.t(), torch.tensor(3.0)]

    assert_same(tensors, carried(ends, Output("0", "broadcast"), tensors))


def test_received_tensors_are_writable(ends: tuple[Link, Link]) -> None:
    """Optimizers keep placed tensors, and change them in place."""
    one, two = carried(ends, Output("0", "gather"), [torch.ones(3), torch.ones(3)])
    one.add_(1)
    assert (one.tolist(), two.tolist()) == ([2.0] * 3, [1.0] * 3)


def refused(near: Link, far: Link, wire: bytes, *, end: bool = True) -> str:
    """The error of ``receive`` for these bytes."""

    def say() -> None:
        near.send(wire)
        if end:
            near.sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    with pytest.raises(LinkError) as caught:
        frames.receive(far)
    thread.join()
    return str(caught.value)


def framed(envelope: object) -> bytes:
    blob = msgpack.encode(envelope)
    return len(blob).to_bytes(8, "little") + blob


def announcing(shape: tuple[int, ...], dtype: str = "torch.float32") -> bytes:
    return framed(Envelope(Settled(), (TensorSpec(shape, dtype),)))


def nested(depth: int) -> bytes:
    """A layout in a layout in a layout..."""
    around, inner = b"\x94\xa4node\xa4list\xc0\x91", b"\x92\xa4leaf\x01"
    unit = msgpack.encode({"type": "Unit", "version": 0, "number": 0, "layout": None})
    blob = b"\x92" + unit[:-1] + around * depth + inner + b"\x90"
    return len(blob).to_bytes(8, "little") + blob


WRONG = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no msgpack": (4).to_bytes(8, "little") + b"\xc1\xc1\xc1\xc1",
    "text that is none": (3).to_bytes(8, "little") + b"\xa2\xff\xfe",
    "another message": framed({"type": "Follow", "plan": "p", "rank": 0}),
    "unknown frame": framed([{"type": "Sing"}, []]),
    "wrong type": framed([{"type": "Took", "step": "seven"}, []]),
    "too long an integer": framed([{"type": "Took", "step": 2**64 - 1}, [["tensor", [-1], "x"]]]),
    "envelope over the limit": (ENVELOPE_LIMIT + 1).to_bytes(8, "little"),
    "envelope of all bits": b"\xff" * 8,
    "truncated length": b"\x01\x00",
    "truncated envelope": framed(Envelope(Settled()))[:-1],
    "truncated body": announcing((4,)) + b"\0" * 15,
    "no body": announcing((4,)),
    "negative": announcing((-1,)),
    "negative twice": announcing((-2, -3)),
    "negative and empty": announcing((0, -3)),
    "unknown dtype": announcing((1,), "torch.float31"),
    "no dtype": announcing((1,), "torch.nn"),
    "body over the limit": announcing((BODY_LIMIT // 4 + 1,)),
    "body over all limits": announcing((2**62, 2**62)),
    "bodies over the limit together": framed(
        Envelope(Settled(), (TensorSpec((BODY_LIMIT // 8,), "torch.float32"),) * 3)
    ),
    "body that no memory holds": announcing((BODY_LIMIT // 4,)),
    "empty with too long a side": announcing((0, 2**64 - 1)),
    "too deep": nested(100_000),
}


@pytest.mark.parametrize("wire", WRONG.values(), ids=WRONG.keys())
def test_malformed_bytes_are_a_link_error(ends: tuple[Link, Link], wire: bytes) -> None:
    """The reader ends in good order, and waiting threads are notified."""
    assert refused(*ends, wire)


def test_the_sender_of_malformed_bytes_is_named(ends: tuple[Link, Link]) -> None:
    assert refused(*ends, announcing((1,), "torch.nn")).startswith("source does not speak")


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(st.binary(max_size=200))
def test_random_envelopes_are_link_errors(blob: bytes) -> None:
    with linked() as (near, far):
        assert refused(near, far, len(blob).to_bytes(8, "little") + blob)


VALID = [framed(Envelope(frame, (TensorSpec((2, 1), "torch.float16"),))) for frame in FRAMES]


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.sampled_from(VALID), st.data())
def test_frames_with_a_few_wrong_bytes_are_frames_or_link_errors(
    wire: bytes, data: st.DataObject
) -> None:
    """There is no other exception, and no endless wait for an ended stream."""
    spoilt = bytearray(wire)
    for _ in range(data.draw(st.integers(1, 4))):
        spoilt[data.draw(st.integers(8, len(wire) - 1))] = data.draw(st.integers(0, 255))
    with linked() as (near, far):
        near.send(bytes(spoilt) + b"\0\0\0\0")
        near.sock.shutdown(socket.SHUT_WR)
        try:
            frame, tensors = frames.receive(far)
        except LinkError:
            return
        assert isinstance(frame, Frame)
        assert sum(t.nbytes for t in tensors) <= 4

"""Copies of many tensors between a device and host memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.twin.device import Twin
from tmd.fabric.packing import Pieces, pack, unpack


@pytest.fixture
def pieces() -> Pieces:
    return Pieces(64)


def values() -> list[Tensor]:
    """200 bytes: more than three pieces, one of them in one tensor."""
    return [
        torch.arange(3, dtype=torch.int32),
        torch.tensor(2.5, dtype=torch.float64),
        torch.arange(20, dtype=torch.int64).reshape(4, 5).t(),
        torch.empty(0),
        torch.arange(20, dtype=torch.uint8),
    ]


def joined(tensors: list[Tensor]) -> bytes:
    return b"".join(t.contiguous().numpy().tobytes() for t in tensors)


@pytest.mark.parametrize("where", ["device", "host", "both"])
def test_bytes_of_tensors_are_packed_in_their_order(where: str, pieces: Pieces) -> None:
    twin = Twin()
    with twin.installed(), twin.training():
        tensors = values()
        for tensor in {"device": [], "host": tensors, "both": tensors[::2]}[where]:
            twin.move_to_host(tensor)
        body = twin.host_memory((200,), torch.uint8)
        pack(tensors, body, pieces)
        packed = body.numpy().tobytes()

    assert packed == joined(tensors)
    assert twin.recorder.races == []


def test_a_wait_is_for_a_piece_and_not_for_a_tensor(pieces: Pieces) -> None:
    twin = Twin()
    with twin.installed(), twin.training():
        many = [torch.ones(1) for _ in range(16)]
        body = twin.host_memory((64,), torch.uint8)
        before = twin.recorder.waits
        pack(many, body, pieces)
        packed = twin.recorder.waits - before
    with twin.installed():
        unpack([torch.zeros(1) for _ in many], many, pieces)

    assert packed == 1
    assert twin.recorder.waits - before == 2


def test_tensors_are_filled_from_host_memory(pieces: Pieces) -> None:
    twin = Twin()
    with twin.installed(), twin.training():
        targets = [torch.full_like(value, 7) for value in values()]
    with twin.installed():
        unpack(values(), targets, pieces)
        twin.forget()

    assert all(torch.equal(a, b) for a, b in zip(targets, values(), strict=True))
    assert twin.recorder.races == []


def test_a_piece_is_used_again(pieces: Pieces) -> None:
    twin = Twin()
    with twin.installed(), twin.training():
        body = twin.host_memory((200,), torch.uint8)
        for _ in range(3):
            pack(values(), body, pieces)

    assert twin.staged == 2


def test_a_piece_that_a_copy_may_still_use_is_not_used_again(pieces: Pieces) -> None:
    twin = Twin()
    with twin.installed(), twin.training():
        with pytest.raises(RuntimeError):
            unpack([torch.ones(4, 4)], [torch.ones(3)], pieces)
        before = twin.staged
        unpack([torch.ones(3)], [torch.ones(3)], pieces)

    assert twin.staged == before + 1
    assert twin.recorder.races == []

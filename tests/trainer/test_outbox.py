"""Frames that wait for a joiner stay within the memory bound, and the memory is reused."""

from __future__ import annotations

import weakref

import hypothesis
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fabric.circle import at_once
from tmd.trainer.protocol.frames import ControlMessage, Output, Settled
from tmd.trainer.protocol.outbox import Outbox, OutboxEntry


def taken(outbox: Outbox) -> OutboxEntry:
    entry = outbox.next()
    assert entry is not None
    return entry


def address(entry: OutboxEntry) -> int:
    return entry[1].data_ptr()


def test_put_copies_its_tensors() -> None:
    """Training continues and changes the tensor."""
    outbox = Outbox(1000)
    tensor = torch.arange(5.0)
    frame = Output("0", "allreduce")

    assert outbox.put(frame, [tensor[1:], tensor[:1]])
    tensor.zero_()
    envelope, body = taken(outbox)

    assert envelope.frame == frame
    assert [spec.shape for spec in envelope.body] == [(4,), (1,)]
    assert body.view(torch.float32).tolist() == [1, 2, 3, 4, 0]
    assert outbox.next() is None


def test_strided_and_empty_tensors_are_copied_as_they_read() -> None:
    outbox = Outbox(1000)
    tensor = torch.arange(6.0).view(2, 3)

    assert outbox.put(Output("0", "gather"), [tensor.t(), torch.empty(0, 3), tensor[1, 2]])
    envelope, body = taken(outbox)

    assert [spec.shape for spec in envelope.body] == [(3, 2), (0, 3), ()]
    assert body.view(torch.float32).tolist() == [0, 3, 1, 4, 2, 5, 5]


def test_put_refuses_above_the_bound() -> None:
    """Waiting frames are not affected."""
    outbox = Outbox(100)

    assert outbox.put(ControlMessage("@vote", b""), [torch.zeros(60, dtype=torch.uint8)])
    assert not outbox.put(ControlMessage("@vote", b""), [torch.zeros(41, dtype=torch.uint8)])
    assert outbox.put(ControlMessage("@vote", b""), [torch.zeros(40, dtype=torch.uint8)])
    assert outbox.held == 100
    assert [taken(outbox)[1].numel() for _ in range(2)] == [60, 40]


def test_returned_memory_is_reused() -> None:
    """Every step puts the same sizes: after the first one nothing is allocated."""
    outbox = Outbox(1000)
    sizes = (100, 200, 100)
    seen: list[set[int]] = []
    for _ in range(3):
        for size in sizes:
            assert outbox.put(Settled(), [torch.zeros(size, dtype=torch.uint8)])
        entries = [taken(outbox) for _ in sizes]
        seen.append(set(map(address, entries)))
        for _, body in entries:
            outbox.back(body)

    assert seen[0] == seen[1] == seen[2]
    assert outbox.held == 400


def test_kept_memory_makes_room_for_another_size() -> None:
    """Memory kept for reuse counts, but never blocks an entry."""
    outbox = Outbox(1000)
    for size in (300, 600):
        assert outbox.put(Settled(), [torch.zeros(size, dtype=torch.uint8)])
        outbox.back(taken(outbox)[1])

    assert outbox.put(Settled(), [torch.zeros(1000, dtype=torch.uint8)])
    assert outbox.held == 1000


def test_a_copy_is_not_queued() -> None:
    """The sender sends it directly, and returns the memory."""
    outbox = Outbox(100)
    entry = outbox.copy(Settled(), [torch.ones(10)])
    assert entry is not None

    assert outbox.next() is None
    assert outbox.held == 40
    assert outbox.copy(Settled(), [torch.ones(16)]) is None
    outbox.back(entry[1])
    assert outbox.copy(Settled(), [torch.ones(16)]) is not None


def test_forget_leaves_nothing_behind() -> None:
    """No waiting entry, no kept memory, and nothing that is returned or put afterwards."""
    outbox = Outbox(1000)
    for _ in range(2):
        assert outbox.put(Settled(), [torch.ones(10)])
    _, under_way = taken(outbox)
    memory = weakref.ref(under_way)
    outbox.forget()
    outbox.back(under_way)
    del under_way

    assert outbox.next() is None
    assert memory() is None
    assert not outbox.put(Settled(), [torch.ones(10)])
    assert not outbox.put(Settled())
    assert outbox.held == 0


def test_an_entry_or_a_wake_up_ends_the_wait_or_the_next_one() -> None:
    """An entry or a wake-up between two waits ends the next wait at once."""
    outbox = Outbox(100)
    at_once([lambda: outbox.wait(1000), outbox.wake])
    outbox.wake()
    outbox.wait(1000)
    assert outbox.put(Settled())
    outbox.wait(1000)
    assert outbox.next() is not None
    at_once([lambda: outbox.wait(1000), lambda: outbox.put(Settled())])


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    st.integers(0, 300),
    st.lists(st.tuples(st.sampled_from(["put", "next", "back"]), st.integers(0, 120))),
)
def test_never_more_than_the_bound(bound: int, acts: list[tuple[str, int]]) -> None:
    """In any order of calls the held memory is bounded, and no entry is lost."""
    outbox = Outbox(bound)
    put: list[int] = []
    got: list[int] = []
    out: list[Tensor] = []
    for act, size in acts:
        if act == "put" and outbox.put(Settled(), [torch.zeros(size, dtype=torch.uint8)]):
            put.append(size)
        elif act == "next" and (entry := outbox.next()) is not None:
            got.append(entry[1].numel())
            out.append(entry[1])
        elif act == "back" and out:
            outbox.back(out.pop(size % len(out)))
        waiting = sum(put[len(got) :]) + sum(t.numel() for t in out)
        assert waiting <= outbox.held <= bound
    assert got == put[: len(got)]

"""Frames that a shadow has read reach their consumers in order; an end reaches all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from msgspec import msgpack
from torch import Tensor

from tests.fabric.circle import at_once
from tests.trainer.wire import PATIENCE, Facts, linked
from tmd.core.values.errors import LinkError
from tmd.fabric import Link
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.frames import (
    SHIFT,
    VOTE,
    Begin,
    Boundary,
    ControlMessage,
    DigestCheck,
    Dropped,
    Frame,
    Output,
    Settled,
    Took,
)
from tmd.trainer.protocol.outbox import Outbox
from tmd.trainer.shadow.receiver import CALLS_ALL, Arrival, ShadowLost, ShadowReceiver
from tmd.trainer.state.data import Position
from tmd.trainer.state.units import digest_of_inputs

pytestmark = pytest.mark.timeout(30)


class Heard(ShadowReceiver):
    """Reports each frame that was read, and the end."""

    def __init__(self, link: Link, bound: int) -> None:
        self.facts = Facts()
        self.count = 0
        self.ended = False
        super().__init__(link, bound)

    def _sort(self, arrival: Arrival) -> None:
        try:
            super()._sort(arrival)
        finally:
            with self.facts.changing():
                self.count += 1

    def _read(self) -> None:
        super()._read()
        with self.facts.changing():
            self.ended = True


class QuietLink(Link):
    """Looks quiet for as long as the test says."""

    seconds = 0.0

    @property
    def quiet_s(self) -> float:
        return self.seconds


class Stage:
    """A shadow, and the source's end of its link."""

    def __init__(self, near: Link, far: Link, bound: int) -> None:
        self.near, self.far = near, far
        self.shadow = Heard(far, bound)
        self._outbox = Outbox(1 << 30)
        self._said = 0

    def say(self, *each: Frame | tuple[Frame, list[Tensor]]) -> None:
        """Send frames, and wait until the shadow has read them."""
        for one in each:
            frame, tensors = one if isinstance(one, tuple) else (one, [])
            entry = self._outbox.copy(frame, tensors)
            assert entry is not None
            frames.send(self.near, *entry)
        self._said += len(each)
        self.shadow.facts.until(lambda: self.shadow.count >= self._said or self.shadow.ended)

    def end(self) -> None:
        """The source dies."""
        self.near.close()
        self.shadow.facts.until(lambda: self.shadow.ended)


@contextmanager
def stage(bound: int = 1 << 20, kind: type[Link] = Link) -> Iterator[Stage]:
    with linked(kind=kind) as (near, far):
        made = Stage(near, far, bound)
        try:
            yield made
        finally:
            made.shadow.close()
            made.shadow.facts.until(lambda: made.shadow.ended)


def output(
    value: float, group: str = "0", op: str = "allreduce", size: int = 2
) -> tuple[Frame, list[Tensor]]:
    return Output(group, op), [torch.full((size,), float(value))]


def boundary(step: int) -> Boundary:
    return Boundary(step, Position(0, step))


def ask(
    shadow: ShadowReceiver, group: str = "0", op: str = "allreduce", size: int = 2
) -> list[float]:
    """The result of a collective of the joiner's script; -1 where nothing is filled in. A step that
    lacks an output is void, as for a runner whose step cannot be finished."""
    mine = torch.full((size,), -1.0)
    try:
        shadow.outputs(op, group, [mine], [mine])
    except LinkError:
        shadow.spoil()
    found: list[float] = mine.tolist()
    return found


# --- order ----------------------------------------------------------------------------------------


def test_each_channel_has_its_own_order() -> None:
    """Groups run at the same time."""
    with stage() as s:
        s.say(output(1), output(2, "1"), output(4), output(5, "1"))
        s.say(ControlMessage(VOTE, msgpack.encode([1, 2])), ControlMessage(f"{SHIFT}1", b"one"))
        s.say(ControlMessage(f"{SHIFT}-1", b"back"), ControlMessage(VOTE, msgpack.encode([0, 0])))

        assert [ask(s.shadow, "1"), ask(s.shadow, "1")] == [[2, 2], [5, 5]]
        assert [ask(s.shadow), ask(s.shadow)] == [[1, 1], [4, 4]]
        assert [s.shadow.vote([9, 9]), s.shadow.vote([9, 9])] == [(1, 2), (0, 0)]
        assert s.shadow.shift(b"mine", -1) == b"back"
        assert s.shadow.shift(b"mine", 1) == b"one"
        assert not s.shadow.starved


def test_an_empty_channel_is_removed() -> None:
    """A script that tags its messages with the step number has new ones in each step."""
    with stage() as s:
        s.say(boundary(1), *(output(tag, f"0/1/{tag}") for tag in range(4)))
        for tag in range(2):
            assert ask(s.shadow, f"0/1/{tag}") == [tag, tag]
        s.shadow.forget_before(2)

        assert s.shadow._channels == {}


def test_a_collective_waits_for_its_output() -> None:
    """A shadow is ahead of its rank wherever the rank waits for others."""
    with stage() as s:
        results = at_once([lambda: ask(s.shadow), lambda: s.say(output(7))])
        assert results[0] == [7, 7]


def test_all_frames_of_a_dead_source_are_received() -> None:
    """Its frames are received; the shadow stops waiting, though the link is still open."""
    with stage() as s:
        s.say(output(7))
        s.shadow.hear_out(0.02)
        s.shadow.facts.until(lambda: s.shadow.ended)

        assert [ask(s.shadow), ask(s.shadow)] == [[7, 7], [-1, -1]]
        assert s.shadow.starved


def test_late_frames_of_a_dead_source_are_received() -> None:
    """Nothing is cut off while bytes arrive."""
    with stage(kind=QuietLink) as s:
        assert isinstance(s.far, QuietLink)
        s.shadow.hear_out(0.02)
        s.say(output(1), output(2))
        ended = s.shadow.ended
        s.far.seconds = 0.02
        s.shadow.facts.until(lambda: s.shadow.ended)

        assert not ended
        assert [ask(s.shadow), ask(s.shadow)] == [[1, 1], [2, 2]]


def test_several_outputs_of_one_collective() -> None:
    with stage() as s:
        s.say((Output("0", "allgather"), [torch.ones(2, 2), torch.zeros(3, dtype=torch.int64)]))
        mine = [torch.zeros(2, 2), torch.ones(3, dtype=torch.int64)]
        s.shadow.outputs("allgather", "0", mine, mine[:1])
        assert [t.tolist() for t in mine] == [[[1, 1], [1, 1]], [0, 0, 0]]


def test_a_send_has_no_output() -> None:
    with stage() as s:
        s.say(output(1))
        assert ask(s.shadow, op="send") == [-1, -1]
        assert ask(s.shadow) == [1, 1]


def test_state_has_an_order_of_its_own() -> None:
    """A returned frame comes first again."""
    with stage() as s:
        said: list[Frame] = [boundary(3), DigestCheck(3, {"a": "b"}), boundary(4)]
        s.say(said[0], output(1), said[1], said[2])
        first = s.shadow.next_state()
        s.shadow.put_back(first)

        assert s.shadow.newest_boundary() == 4
        assert [s.shadow.next_state().frame for _ in said] == said
        assert s.shadow.newest_boundary() is None


def test_frames_of_the_joiner_reach_the_source() -> None:
    with stage() as s:
        frames_: list[Frame] = [Begin(whole=True), Settled(), Took(4)]
        for frame in frames_:
            s.shadow.send(frame)
            assert frames.receive(s.near) == (frame, [])


# --- jumping --------------------------------------------------------------------------------------


def test_outputs_of_steps_that_are_jumped_over_are_forgotten() -> None:
    """In all channels; the outputs of the target step come next."""
    with stage() as s:
        for step in (1, 2, 3):
            s.say(boundary(step), output(step), output(10 + step, "1"))
        s.shadow.forget_before(3)

        assert (ask(s.shadow), ask(s.shadow, "1")) == ([3, 3], [13, 13])


def test_forgetting_makes_room() -> None:
    """Forgotten frames do not count as waiting, nor do taken ones."""
    with stage(bound=100) as s:
        for step in range(20):
            s.say(boundary(step), output(1, size=10), output(1, "1", size=10))
            if step % 2:
                s.shadow.forget_before(step + 1)
            else:
                assert ask(s.shadow, size=10) == ask(s.shadow, "1", size=10) == [1] * 10
        assert not s.shadow.ended


# --- the end --------------------------------------------------------------------------------------


def test_received_frames_stay_usable_after_the_link_has_ended() -> None:
    """The source may leave before its shadow has caught up."""
    with stage() as s:
        s.say(boundary(3), output(1), ControlMessage(VOTE, msgpack.encode([5])))
        s.end()

        assert s.shadow.next_state().frame == boundary(3)
        assert ask(s.shadow) == [1, 1]
        assert s.shadow.vote([0]) == (5,)
        assert not s.shadow.starved
        with pytest.raises(LinkError, match="closed by the other side"):
            s.shadow.next_state()


def test_the_end_of_the_link_ends_all_waits() -> None:
    """Collectives complete without a value, votes and shifts fail; the step is void."""
    with stage() as s:

        def fails(act: object) -> bool:
            assert callable(act)
            with pytest.raises(LinkError):
                act()
            return True

        waiting = [
            lambda: ask(s.shadow),
            lambda: ask(s.shadow, "1"),
            lambda: ask(s.shadow, op="recv"),
            lambda: fails(lambda: s.shadow.vote([1])),
            lambda: fails(lambda: s.shadow.shift(b"", 1)),
            lambda: fails(s.shadow.next_state),
        ]
        results = at_once([*waiting, s.near.close])

        assert results[:6] == [[-1, -1], [-1, -1], [-1, -1], True, True, True]
        assert s.shadow.starved
        assert isinstance(s.shadow.lost, LinkError)


def test_closing_ends_all_waits() -> None:
    """The directive has changed: another thread wakes the main thread."""
    with stage() as s:
        assert at_once([lambda: ask(s.shadow), s.shadow.close])[0] == [-1, -1]
        assert s.shadow.starved


def test_a_void_step_waits_for_nothing() -> None:
    """The rest of a void step passes quickly, even where an output may still come."""
    with stage() as s:
        s.say(output(1, op="broadcast"))
        assert ask(s.shadow) == [-1, -1]
        assert s.shadow.starved

        assert ask(s.shadow, "1") == [-1, -1]
        with pytest.raises(LinkError):
            s.shadow.vote([1])


def test_spoil_withholds_received_frames() -> None:
    """A step that is computed from received frames can be cancelled."""
    with stage() as s:
        s.say(boundary(3), output(1), ControlMessage(VOTE, msgpack.encode([5])))
        s.shadow.spoil()

        assert ask(s.shadow) == [-1, -1]
        with pytest.raises(LinkError):
            s.shadow.vote([1])
        assert s.shadow.starved


# --- recordings -----------------------------------------------------------------------------------


def test_a_step_is_recorded_once_a_later_digest_is_here() -> None:
    """A digest can come late, or never for some step: then a later one completes the recording."""
    with stage() as s:
        busy = Boundary(5, Position(0, 5), quiet=False)
        s.say(boundary(3), output(1), boundary(4), DigestCheck(3, {}), busy)
        waiting = lambda: s.shadow.records(3, PATIENCE)  # noqa: E731
        held, _ = at_once([waiting, lambda: s.say(DigestCheck(5, {}), boundary(6))])
        s.end()

        assert held is True
        assert s.shadow.records(4, 0)
        with pytest.raises(LinkError):
            s.shadow.records(5, PATIENCE)


def test_a_step_with_outputs_under_way_is_not_recorded() -> None:
    """They come after the next step has begun; without the link they would never come."""
    with stage() as s:
        s.say(boundary(3), Boundary(4, Position(0, 4), quiet=False), DigestCheck(4, {}))
        s.end()

        with pytest.raises(LinkError):
            s.shadow.records(3, PATIENCE)


def test_a_step_that_exceeds_the_memory_is_not_recorded() -> None:
    """Half of the allowed bytes: the rest is for what arrives while the first half is used."""
    with stage(bound=100) as s:
        s.say(boundary(3), output(1, size=12))
        waiting = lambda: s.shadow.records(3, PATIENCE)  # noqa: E731
        held, _ = at_once([waiting, lambda: s.say(output(2, size=1))])

        assert held is False
        assert s.shadow.is_crowded
        assert not s.shadow.ended
        assert ask(s.shadow, size=12) == [1] * 12
        assert not s.shadow.is_crowded


def test_a_frame_read_during_spoil_is_no_mismatch() -> None:
    """A frame read at that moment would replace one that is withheld, and a sound worker would
    appear to compute other bits."""
    with stage() as s:
        s.shadow.spoil()
        s.shadow._sort(Arrival(Output("0", "broadcast"), [torch.ones(9)], 0.0))

        assert ask(s.shadow) == [-1, -1]
        assert s.shadow.mismatch == ""


# --- the reason of the end ------------------------------------------------------------------------


def test_the_sources_reason_is_reported() -> None:
    """The further course depends on whether the joiner was too slow."""
    for final in (False, True):
        with stage() as s:
            s.say(boundary(1), Dropped("because", final=final))
            assert s.shadow.next_state().frame == boundary(1)
            with pytest.raises(ShadowLost, match="because") as caught:
                s.shadow.next_state()
            assert caught.value.final is final
            assert s.shadow.lost is caught.value


def test_too_many_waiting_bytes_end_the_shadow() -> None:
    """Host memory limits how far a joiner may be behind."""
    with stage(bound=100) as s:
        s.say(output(1, size=10), output(2, "1", size=15))
        assert not s.shadow.ended
        s.say(output(3, size=1))

        with pytest.raises(ShadowLost) as caught:
            s.shadow.next_state()
        assert caught.value.final
        assert ask(s.shadow, size=10) == [1] * 10


def test_garbage_ends_it() -> None:
    """Waiting threads get an error, and the source sees the link close."""
    with stage() as s:
        s.near.send_frame(b"\xc1")
        with pytest.raises(LinkError, match="does not speak this protocol"):
            s.shadow.next_state()
        with pytest.raises(LinkError):
            frames.receive(s.near)


# --- a different script ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "mine", "shown"),
    [
        ("broadcast", [torch.zeros(2)], "broadcast float32[2]"),
        ("allreduce", [torch.zeros(3)], "allreduce float32[3]"),
        ("allreduce", [torch.zeros(2, 1)], "allreduce float32[2, 1]"),
        ("allreduce", [torch.zeros(2)] * 2, "allreduce float32[2], float32[2]"),
        ("allreduce", [torch.zeros(2).half()], "allreduce float16[2]"),
        ("allreduce", [], "allreduce nothing"),
    ],
)
def test_another_collective_is_a_mismatch(op: str, mine: list[Tensor], shown: str) -> None:
    """Nothing is filled in, the step is void, and the first difference is kept."""
    calls = f"{shown} here, allreduce float32[2] there"
    reason = f"the script calls different collectives: {calls} ({CALLS_ALL})"
    with stage() as s:
        s.say(output(1), output(2))
        with pytest.raises(LinkError):
            s.shadow.outputs(op, "0", mine, mine)

        assert s.shadow.mismatch == reason
        assert s.shadow.starved
        assert not any(t.any() for t in mine)
        assert ask(s.shadow, op="gather") == [-1, -1]
        assert s.shadow.mismatch == reason


def test_other_inputs_are_a_mismatch() -> None:
    """Outputs are equal on all ranks and do not show this worker's own work."""
    mine, theirs = torch.full((2,), 3.0), torch.full((2,), 3.0)
    theirs.view(torch.int32)[1] ^= 1
    for given, agrees in ((mine, True), (theirs, False)):
        with stage() as s:
            digest = digest_of_inputs("allreduce", [given])
            s.say((Output("0", "allreduce", digest), [torch.full((2,), 12.0)]))
            out = mine.clone()
            with nullcontext() if agrees else pytest.raises(LinkError):
                s.shadow.outputs("allreduce", "0", [out], [out])

            assert (out.tolist() == [12.0, 12.0]) is agrees
            assert s.shadow.starved is not agrees
            assert ("inputs of allreduce" in s.shadow.mismatch) is not agrees


def test_a_mismatch_ends_the_waits_of_all() -> None:
    """A script that takes another branch may wait elsewhere for ever."""
    with stage() as s:
        s.say(output(1, "1", op="broadcast"))
        waiting = [lambda: ask(s.shadow), lambda: ask(s.shadow, "2"), lambda: ask(s.shadow, "1")]

        assert at_once(waiting, timeout=10) == [[-1, -1]] * 3


def test_a_vote_in_the_place_of_an_output_is_a_mismatch() -> None:
    with stage() as s:
        s.say(ControlMessage("0", b"x"), output(1, VOTE))
        with pytest.raises(LinkError, match="unexpected Output"):
            s.shadow.vote([1])
        assert ask(s.shadow) == [-1, -1]
        calls = "allreduce float32[2] here, ControlMessage nothing there"
        assert s.shadow.mismatch.endswith(f"{calls} ({CALLS_ALL})")

"""Training feeds a joiner and never waits for one, whatever the joiner does."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.fabric.circle import at_once
from tests.trainer.scripts import Script
from tests.trainer.showing import FAST, UNREAD, Show, show, wide
from tests.trainer.tailing import Source
from tests.trainer.wire import PATIENCE, linked
from tmd.core.values.errors import LinkError
from tmd.core.values.limits import ShadowLimits
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.frames import (
    Begin,
    Boundary,
    ControlMessage,
    DigestCheck,
    Dropped,
    Output,
    Settled,
    Tail,
    Unit,
)
from tmd.trainer.shadow.receiver import ShadowReceiver
from tmd.trainer.shadow.source import HOLD_S
from tmd.trainer.shadow.source_context import SourcePace
from tmd.trainer.state.data import Position

pytestmark = pytest.mark.timeout(60)

NARROW = ShadowLimits(copy_mb_s=1e6, staging_mb=8)
ROOMY = ShadowLimits(copy_mb_s=1e6, staging_mb=60)
"""For some tens of steps of a wide model."""


def refuse_threads(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Threads of these names cannot be started: a limit on their number is reached."""
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name in names:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def test_a_source_whose_second_thread_cannot_start_ends_its_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the two that a source needs, only the first one started."""
    refuse_threads(monkeypatch, "tmd-mirror-in")
    with linked() as (near, _):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            Source(Script(0)).show(near)
        for thread in threading.enumerate():
            if thread.name == "tmd-mirror-out":
                thread.join(PATIENCE)

    assert "tmd-mirror-out" not in [thread.name for thread in threading.enumerate()]


def test_a_receiver_whose_thread_cannot_start_has_lost_its_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not end, and may try again."""
    refuse_threads(monkeypatch, "tmd-shadow", "tmd-shadow-last")
    with linked() as (near, far):
        shadow = ShadowReceiver(far, 1000)
        shadow.hear_out(1.0)
        shadow.end()
        with pytest.raises(LinkError):
            frames.receive(near)

    assert str(shadow.lost) == "can't start new thread"


# --- what is shown --------------------------------------------------------------------------------


def test_nothing_is_sent_before_the_joiner_begins() -> None:
    """The joiner still looks for its data position."""
    with show() as s:
        s.train(3)
        s.shown.output("0", "allreduce", [torch.ones(3)])
        s.shown.send_result("@vote", b"x")
        s.shown.drop("the test is over")
        s.ear.end()

        assert [type(frame) for frame, _ in s.ear.received] == [Dropped]


def test_all_units_arrive_before_outputs() -> None:
    """Outputs begin at a boundary from which the joiner can continue."""
    with show(trained=2) as s:
        s.shown.output("0", "allreduce", [torch.zeros(1)])
        s.arrive()
        s.shown.output("0", "allreduce", [torch.ones(3)])
        s.shown.send_result("@vote", b"x")
        s.begin()
        s.ear.first(ControlMessage)
        received = [type(frame) for frame, _ in s.ear.received if not isinstance(frame, Tail)]

        assert [unit.number for unit in s.ear.of(Unit)] == [0, 1, 2, 3]
        assert received[:5] == [*[Unit] * 4, Boundary]
        assert received.count(Output) == received.count(ControlMessage) == 1
        s.commit()


def test_a_digest_is_taken_in_one_window_without_a_pause() -> None:
    """With many units and short steps the thread must not sleep between two of them."""
    script = Script(1, build=lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(30))))
    with show(script, pace=SourcePace(idle_s=PATIENCE)) as s:
        s.arrive()
        s.begin()

        assert s.ear.first(DigestCheck).parts.keys() == {
            "parameters and optimizer state",
            "trail",
            "buffers",
            "others",
        }
        s.commit()


def test_the_first_boundary_waits_for_operations_under_way() -> None:
    """An output of an earlier step must not be taken for one of the first shadowed step, and
    training must not wait for it."""
    with show() as s:
        s.ear.say(Begin())
        for _ in range(5):
            s.shown.at_boundary(s.step, Position(0, s.step), quiet=False)
            s.shown.output("0", "allreduce", [torch.zeros(1)])
            s.window.open(s.step)
            s.shown.wake()
            s.ear.within(0.05, lambda: len(s.ear.of(Unit)) == len(s.units))
            s.commit()
        assert len(s.ear.of(Unit)) == len(s.units)
        s.shown.at_boundary(s.step, Position(0, s.step), quiet=True)
        s.ear.until(lambda: bool(s.ear.of(Boundary)))

        assert s.ear.of(Boundary)[0].step == s.step
        assert s.ear.of(Output) == []


def test_a_boundary_says_whether_outputs_may_still_come() -> None:
    """A recording that ends there would lack them."""
    with show() as s:
        s.arrive()
        for quiet in (False, True):
            s.shown.at_boundary(s.step, Position(0, s.step), quiet=quiet)
            s.window.open(s.step)
            s.commit()
        s.ear.until(lambda: s.ear.of(Boundary)[-1].step == s.step - 1)

        assert [f.quiet for f in s.ear.of(Boundary)][-2:] == [False, True]


def test_a_settled_joiner_proves_from_time_to_time_that_it_computes_the_same() -> None:
    """With DDP its state stays equal although its own gradients have come to differ."""
    with show(plan="", pace=SourcePace(check_every=3)) as s:
        s.arrive()
        early = s.shown.needs_proof
        s.ear.say(Settled())
        while not s.shown._settled:
            s.train(1)
        seen = []
        for _ in range(6):
            s.begin()
            seen.append((s.step, s.shown.proves_sums))
            s.commit()
        late = s.shown.needs_proof

    assert early
    assert not late
    assert seen == [(step, step % 3 == 0) for step, _ in seen]


def test_a_check_that_an_evaluation_cuts_off_is_made_up_for() -> None:
    """Else a hot standby of a job that evaluates at each check would never be compared."""
    with show(plan="", pace=SourcePace(check_every=3)) as s:
        s.arrive()
        s.ear.say(Settled())
        while s.step % 3 or not s.shown._settled:
            s.train(1)
        s.begin(shut=True)
        s.shown.evaluates()
        s.commit()
        seen = []
        for _ in range(2):
            s.begin()
            seen.append(s.shown.proves_sums)
            s.commit()

    assert seen == [True, False]


def test_a_settled_joiner_gets_no_more_tails() -> None:
    """Each of its steps is still compared."""
    with show() as s:
        s.arrive()
        s.ear.say(Settled())
        while s.ear.of(Boundary)[-1].rest is not None:
            s.train(1)
            s.shown.send_result("@vote", b"")
            s.ear.first(ControlMessage, len(s.ear.of(ControlMessage)) + 1)
        seen = len(s.ear.received)
        s.train(3)
        s.shown.drop("the test is over")
        s.ear.end()
        rest = [frame for frame, _ in s.ear.received[seen:]]

        assert not any(isinstance(frame, Tail) for frame in rest)
        # The joiner of a plan may get the rank at any vote.
        assert all(f.check for f in rest if isinstance(f, Boundary))


def test_a_switch_waits_a_limited_time_for_a_joiner_that_is_behind() -> None:
    """Joiners of earlier releases do not say where they are."""
    passed = 0.0
    with show(pace=SourcePace(clock=lambda: time.monotonic() + passed)) as s:
        s.arrive()
        s.ear.say(Settled())
        s.ear.until(lambda: not s.shown.needs_proof)
        unsaid = s.shown.holds(s.step)
        s.ear.say(Settled(s.step))
        s.ear.until(lambda: s.shown.holds(s.step + 1))
        in_step = s.shown.holds(s.step)
        passed = HOLD_S
        later = s.shown.holds(s.step + 2)

        assert (unsaid, in_step, later) == (False, False, False)


# --- a joiner that does not read ------------------------------------------------------------------


def blocked(s: Show) -> None:
    """From here on the joiner reads nothing, and the buffers between the two are full."""
    s.ear.may_read.clear()
    s.until_over(lambda: s.shown.output("0", "allreduce", [torch.zeros(100_000)]))


def test_outputs_pile_up_only_to_the_bound() -> None:
    """The joiner is then dropped, and gets the reason once it reads again."""
    with show(limits=NARROW, buffer=UNREAD) as s:
        s.arrive()
        s.ear.may_read.clear()
        count = s.until_over(lambda: s.shown.output("0", "allreduce", [torch.zeros(100_000)]))

        assert count * 400_000 <= 8_000_000 + 4_000_000
        s.train(2)
        s.ear.end()
        last = s.ear.received[-1][0]
        assert isinstance(last, Dropped)
        assert last.final
        assert "does not keep up" in last.reason


@pytest.mark.parametrize("what", ["send_result", "before_optimizer", "at_boundary"])
def test_no_call_of_training_waits(what: str) -> None:
    """The joiner reads nothing; every call returns, before and after the joiner is dropped."""
    with show(Script(1, build=wide), ROOMY, buffer=UNREAD) as s:
        s.arrive()
        s.ear.may_read.clear()
        acts: dict[str, Callable[[], object]] = {
            "send_result": lambda: s.shown.send_result("@vote", b"x" * 1000),
            "before_optimizer": lambda: s.train(1),
            "at_boundary": s.begin,
        }
        for _ in range(20):
            acts[what]()
        blocked(s)
        for _ in range(20):
            acts[what]()

        assert s.shown.over


def test_a_joiner_that_stops_reading_while_it_is_copied_is_dropped() -> None:
    """The tail piles up, since its gradients count as well."""
    with show(Script(1, build=wide), NARROW, buffer=UNREAD) as s:
        s.ear.may_read.clear()
        s.ear.say(Begin())
        s.until_over(lambda: s.train(1))
        s.train(1)
        s.ear.end()

        assert s.ear.of(Boundary) == []
        assert s.ear.of(Dropped)[0].final


# --- the whole copy -------------------------------------------------------------------------------


def test_the_whole_copy_waits_until_all_is_copied() -> None:
    """All units are of one boundary, and the digest comes with it, whatever the rate."""
    with show(limits=ShadowLimits(copy_mb_s=1e-6)) as s:
        s.ear.say(Begin(whole=True))
        while not s.ear.of(Unit):
            s.train(1)
        s.ear.first(DigestCheck)
        s.train(2)

        assert [type(frame) for frame, _ in s.ear.received[:6]] == [
            *[Unit] * 4,
            Boundary,
            DigestCheck,
        ]
        assert s.ear.of(Boundary)[0].rest is not None
        assert s.ear.of(Tail) == []


def test_the_whole_copy_gives_up_when_the_joiner_stops_reading() -> None:
    """Training continues; the joiner learns that it was too slow."""
    pace = SourcePace(stalled_s=0.05)
    with show(Script(1, build=wide), trained=2, buffer=UNREAD, pace=pace) as s:
        s.ear.may_read.clear()
        s.ear.say(Begin(whole=True))
        s.until_over(lambda: s.train(1))
        s.train(2)
        s.ear.end()

        assert s.window.version is None
        assert s.ear.of(Boundary) == []
        assert s.ear.of(Dropped) == [Dropped("the joiner does not take the state", final=True)]


def large() -> nn.Module:
    """Its second unit has sixteen megabytes."""
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1 << 19), nn.Linear(1 << 19, 1))


def test_the_whole_copy_of_a_large_unit_goes_on_while_its_bytes_move() -> None:
    """The clock advances with each byte that the joiner reads, so that the unit takes four times as
    long as a joiner may stand still."""
    read = 0
    pace = SourcePace(stalled_s=4.0, clock=lambda: read / 1e6)
    with linked(buffer=UNREAD) as (near, far):
        source = Source(Script(1, build=large), looks=False, pace=pace)
        shown = source.show(near, FAST)

        def join() -> None:
            nonlocal read
            frames.send(far, frames.Envelope(Begin(whole=True)))
            into = bytearray(10_000)
            while True:
                far.recv_into(into)
                read += len(into)

        def receive() -> None:
            with contextlib.suppress(LinkError):
                join()

        joiner = threading.Thread(target=receive)
        joiner.start()
        while not shown.live and not shown.over:
            source.train(1)
        over = shown.over
        shown.close()
        joiner.join(PATIENCE)

    assert not over
    assert read > 16e6


def test_the_whole_copy_ends_with_the_joiner() -> None:
    """It dies in the middle of the copy."""
    with show(Script(1, build=wide), trained=2, buffer=UNREAD) as s:
        s.ear.may_read.clear()
        s.ear.say(Begin(whole=True))

        def train() -> None:
            s.until_over(lambda: s.train(1))

        def die() -> None:
            s.ear.until(lambda: bool(s.ear.of(Unit)))
            s.ear.link.close()

        s.ear.may_read.set()
        at_once([train, die])
        s.train(2)
        assert s.shown.over

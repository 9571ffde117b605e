"""The digest of a state that will be compared, taken while a broken step runs to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.contexts import context_of
from tests.trainer.scripts import Scheduled, Script, normed
from tests.trainer.wire import Held
from tmd.core.planning.directives import Directive, Hold, HoldState, Sync, Train, Wait
from tmd.core.planning.failover import HOLDER_OFFSETS, _source
from tmd.core.values.model import Member, Membership
from tmd.trainer.state.state import Layout
from tmd.trainer.state.units import Units, whole_digest
from tmd.trainer.state_transfer import early_digest
from tmd.trainer.state_transfer.context import RankContext
from tmd.trainer.state_transfer.early_digest import EarlyDigest
from tmd.trainer.worker.recovery import Recovery
from tmd.trainer.worker.shadow_driver import ShadowDriver

pytestmark = pytest.mark.timeout(60)

STEP = 3


class Watched(Units):
    """Knows which threads have looked at units; those beside the main one do something more."""

    def __init__(self, script: Script) -> None:
        super().__init__(script.registry())
        self.looked: list[str] = []
        self.beside: Callable[[], None] = lambda: None

    def collect(self, number: int) -> tuple[Layout, list[Tensor]]:
        self.looked.append(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            self.beside()
        return super().collect(number)

    @property
    def by_main(self) -> int:
        return self.looked.count("MainThread")


def trained(script: Script) -> Watched:
    script.train(range(STEP))
    return Watched(script)


@pytest.fixture
def units() -> Iterator[Watched]:
    yield trained(Script(1))
    for thread in threading.enumerate():
        if thread.name == "tmd-early-digest":
            thread.join()


def begun(units: Watched) -> EarlyDigest:
    """As after a loss in the midst of a step."""
    early = EarlyDigest(units)
    early.stand(STEP)
    early.begin()
    return early


def held_beside(units: Watched) -> Held:
    """A thread beside the main one stays where it first looks at a unit."""
    held = Held()
    units.beside = held.stay
    return held


def test_what_was_begun_is_not_taken_again(units: Watched) -> None:
    """Nor by a second word of the loss, nor at the end of the step, nor for a second joiner."""
    early = begun(units)
    early.begin()
    early.stand(STEP)
    early.begin()
    found = [early.of(STEP)(), early.of(STEP)()]

    assert units.by_main == 0
    assert len(units.looked) == len(units)
    assert found == [whole_digest(units, STEP)] * 2


def test_what_a_broken_step_changes_and_undoes_is_looked_at_last() -> None:
    """Buffers and schedulers are as they are between two steps, not as in the midst of one."""
    script = Scheduled(1)
    units = trained(script)
    rate = units.values(0)[0]["lr"]
    units.set_values(0, [{**group, "lr": 7.0} for group in units.values(0)])
    early = begun(units)
    units.set_values(0, [{**group, "lr": rate} for group in units.values(0)])

    assert early.of(STEP)() == whole_digest(Units(script.registry()), STEP)


def test_buffers_are_those_of_the_end() -> None:
    script = Script(1, build=normed)
    units = trained(script)
    early = begun(units)
    with torch.no_grad():
        script.loss(9)

    assert early.of(STEP)() == whole_digest(units, STEP)


def test_between_two_steps_nothing_is_begun(units: Watched) -> None:
    """A script may do anything to its parameters there: look at them once it has done so."""
    early = EarlyDigest(units)
    early.begin()
    early.stand(STEP - 1)
    early.forget()
    early.begin()
    assert units.looked == []

    with torch.no_grad():
        units.params[0].add_(1)
    early.stand(STEP)
    early.begin()
    assert early.of(STEP)() == whole_digest(units, STEP)
    assert units.by_main == len(units)


def test_a_step_that_was_committed_after_all_is_looked_at_anew(units: Watched) -> None:
    early = begun(units)

    whole = whole_digest(units, STEP + 1)
    held = held_beside(units)
    later = early.of(STEP + 1)
    assert held.wait()
    held.let_go()

    assert later() == whole


def test_a_later_step_takes_the_place_of_an_earlier_one(
    units: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before the piece in hand is done."""
    held = held_beside(units)
    early = begun(units)
    assert held.wait()
    units.beside = lambda: None
    threading.Thread(target=held.let_go).start()
    early.stand(STEP + 1)
    early.begin()

    assert early.of(STEP + 1)() == whole_digest(units, STEP + 1)
    assert units.by_main == len(units)


def test_what_fails_is_taken_when_it_is_needed(units: Watched) -> None:
    def fail() -> None:
        raise RuntimeError("no memory on the device")

    units.beside = fail
    early = begun(units)

    assert early.of(STEP)() == whole_digest(units, STEP)
    assert units.by_main == 2 * len(units)


def test_no_thread_is_no_harm(units: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that hears the daemon's orders must go on."""

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    early = begun(units)

    assert early.of(STEP)() == whole_digest(units, STEP)


@pytest.mark.parametrize("end", [EarlyDigest.forget, EarlyDigest.close])
def test_nothing_is_read_any_more_once_it_is_forgotten(
    end: Callable[[EarlyDigest], None], units: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state may change from then on. Only the piece in hand is waited for."""
    held = held_beside(units)
    early = begun(units)
    assert held.wait()
    join = early_digest._Work.join

    def joined(work: early_digest._Work, seconds: float | None = None) -> None:
        held.let_go()
        join(work, seconds)

    monkeypatch.setattr(early_digest._Work, "join", joined)
    end(early)
    early.begin()

    assert len(units.looked) == 1


# --- who begins -----------------------------------------------------------------------------------


def counted() -> tuple[RankContext, list[int]]:
    """The parts of a worker, and how often its digest was begun."""
    calls: list[int] = []
    context = context_of(Script(1).registry())
    early: Any = SimpleNamespace(begin=lambda: calls.append(1), stand=lambda step: None)
    context.state.early = early
    return context, calls


def begins(directive: Directive, rank: int | None, alike: dict[int, tuple[int, ...]]) -> bool:
    """Whether a survivor with ``rank`` of four takes its digest."""
    status = SimpleNamespace(rank=rank, world_size=4, step=STEP)
    reporter: Any = SimpleNamespace(status=status, alike=lambda lost: alike.get(lost, ()))
    context, calls = counted()
    nobody: Any = None
    Recovery(reporter, nobody, context, nobody, nobody).heed(directive)
    return bool(calls)


ALL = dict.fromkeys(range(4), (0, 1, 2, 3))
PAIRS = {0: (0, 2), 2: (0, 2), 1: (1, 3), 3: (1, 3)}


@pytest.mark.parametrize(
    ("lost", "alike", "expected"),
    [
        ((1,), ALL, [2]),
        ((3,), ALL, [0]),
        ((1,), PAIRS, [3]),
        ((1, 2), ALL, [3]),
        ((0, 3), PAIRS, [1, 2]),
        ((1, 3), PAIRS, []),
        ((), ALL, []),
    ],
    ids=["next", "around", "replica", "next lives", "two", "nobody", "no hot standby"],
)
def test_it_is_who_will_be_asked(
    lost: tuple[int, ...], alike: dict[int, tuple[int, ...]], expected: list[int]
) -> None:
    """Of all that have the state the one that the leader chooses, if all have lived for a step."""
    hold = Hold("plan", 1, lost)
    left = [rank for rank in range(4) if rank not in lost]
    assert [rank for rank in left if begins(hold, rank, alike)] == expected

    status = {r: SimpleNamespace(replicas=alike[r], holds=held(r)) for r in left}
    facts: Any = SimpleNamespace(status={str(r): s for r, s in status.items()})
    owners = {r: Member(str(r), "h", "") for r in left}
    asked = [_source(r, owners, 4, facts) for r in lost]
    assert sorted({int(m.worker) for m in asked if m is not None}) == expected


def held(rank: int) -> tuple[int, ...]:
    """Ranks whose own buffers ``rank`` keeps."""
    return tuple((rank - offset) % 4 for offset in HOLDER_OFFSETS)


def test_nobody_begins_without_a_rank_or_without_need() -> None:
    others = Sync("plan", Membership(2, ()), 2, STEP, ()), Train(Membership(1, ()), 2)

    assert not begins(Hold("plan", 1, (1,)), None, ALL)
    assert not any(begins(directive, 2, ALL) for directive in others)


@pytest.mark.parametrize(
    ("directive", "has_state", "expected"),
    [
        (HoldState("plan", over=True), True, 1),
        (HoldState("plan", over=True), False, 0),
        (HoldState("plan"), True, 0),
        (Wait(), True, 0),
    ],
)
def test_a_hot_standby_begins_once_its_rank_is_lost(
    directive: HoldState | Wait, has_state: bool, expected: int
) -> None:
    """Whether it hears of it in a step, or only between two."""
    context, calls = counted()
    nobody: Any = None
    shadowing = ShadowDriver(nobody, nobody, context)
    following: Any = SimpleNamespace(
        has_state=has_state, give_way=lambda directive: None, directive=None
    )
    shadowing.cancel_unless(directive)
    assert calls == []

    shadowing.following = following
    shadowing.cancel_unless(directive)
    shadowing.heed(directive)
    assert len(calls) == 2 * expected

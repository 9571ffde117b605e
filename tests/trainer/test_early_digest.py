"""The digest of a state that will be compared, taken while a broken step runs to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.scripts import Scheduled, Script, normed
from tmd.core.duties import Duty, Hold, Sync, Train
from tmd.core.model import Membership
from tmd.trainer import early_digest
from tmd.trainer.early_digest import EarlyDigest
from tmd.trainer.recovery import Recovery
from tmd.trainer.state import Layout
from tmd.trainer.units import Units, whole_digest

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


def test_what_was_begun_is_not_taken_again(units: Watched) -> None:
    """Nor by a second begin, nor for a second joiner."""
    early = EarlyDigest(units)
    early.begin(STEP)
    early.begin(STEP)
    found = [early.of(STEP), early.of(STEP)]

    assert units.by_main == 0
    assert len(units.looked) == len(units)
    assert found == [whole_digest(units, STEP)] * 2


def test_what_a_broken_step_changes_and_undoes_is_looked_at_last() -> None:
    """Buffers and schedulers are as they are between two steps, not as in the midst of one."""
    script = Scheduled(1)
    units = trained(script)
    early = EarlyDigest(units)
    rate = units.values(0)[0]["lr"]
    units.set_values(0, [{**group, "lr": 7.0} for group in units.values(0)])
    early.begin(STEP)
    units.set_values(0, [{**group, "lr": rate} for group in units.values(0)])
    restored = early.of(STEP)

    assert restored["others"] == Units(script.registry()).digest_of_rest()["others"]


def test_buffers_are_those_of_the_end() -> None:
    script = Script(1, build=normed)
    units = trained(script)
    early = EarlyDigest(units)
    early.begin(STEP)
    with torch.no_grad():
        script.loss(9)

    assert early.of(STEP) == whole_digest(units, STEP)


def test_a_step_that_was_committed_after_all_is_looked_at_anew(units: Watched) -> None:
    early = EarlyDigest(units)
    early.begin(STEP - 1)

    assert early.of(STEP) == whole_digest(units, STEP)
    assert units.by_main == 2 * len(units)


def test_a_later_step_takes_the_place_of_an_earlier_one(units: Watched) -> None:
    held, going = threading.Event(), threading.Event()

    def hold() -> None:
        going.set()
        held.wait()

    units.beside = hold
    early = EarlyDigest(units)
    early.begin(STEP - 1)
    going.wait()
    units.beside = lambda: None
    early.begin(STEP)
    held.set()

    assert early.of(STEP) == whole_digest(units, STEP)
    assert units.by_main == len(units)


def test_what_fails_is_taken_when_it_is_needed(units: Watched) -> None:
    """An optimizer that is still at work adds to its state while that is looked through."""

    def fail() -> None:
        raise RuntimeError("dictionary changed size during iteration")

    units.beside = fail
    early = EarlyDigest(units)
    early.begin(STEP)

    assert early.of(STEP) == whole_digest(units, STEP)
    assert units.by_main == 2 * len(units)


def test_nothing_is_read_any_more_once_it_is_forgotten(
    units: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state may change from then on."""
    held, going = threading.Event(), threading.Event()

    def hold() -> None:
        going.set()
        held.wait()

    units.beside = hold
    early = EarlyDigest(units)
    early.begin(STEP)
    going.wait()
    cancel = early_digest._Work.cancel

    def cancelled(work: early_digest._Work) -> None:
        cancel(work)
        held.set()

    monkeypatch.setattr(early_digest._Work, "cancel", cancelled)
    early.forget()

    assert len(units.looked) == 1
    assert early.of(STEP) == whole_digest(units, STEP)


# --- who begins -----------------------------------------------------------------------------------


def begun(duty: Duty, rank: int | None, alike: dict[int, tuple[int, ...]]) -> list[int]:
    """Steps of which a survivor with ``rank`` of four takes the digest."""
    steps: list[int] = []
    status = SimpleNamespace(rank=rank, world_size=4, step=STEP)
    voice: Any = SimpleNamespace(status=status, alike=lambda lost: alike.get(lost, ()))
    carrier: Any = SimpleNamespace(early=SimpleNamespace(begin=steps.append))
    nobody: Any = None
    recovery = Recovery(voice, nobody, nobody, carrier, nobody, nobody)
    recovery.heed(duty)
    return steps


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
    """Of all that have the state the one that the leader will choose."""
    hold = Hold("plan", 1, lost)
    left = [rank for rank in range(4) if rank not in lost]

    assert [rank for rank in left if begun(hold, rank, alike)] == expected


def test_nobody_begins_without_a_rank_or_without_need() -> None:
    others = Sync("plan", Membership(2, ()), 2, STEP, ()), Train(Membership(1, ()), 2)

    assert begun(Hold("plan", 1, (1,)), None, ALL) == []
    assert [begun(duty, 2, ALL) for duty in others] == [[], []]

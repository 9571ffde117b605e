"""The digest of a state for a later comparison, computed while a broken step runs to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tests.trainer.scripts import Scheduled, Script, normed
from tests.trainer.tailing import pair
from tests.trainer.wire import Facts, Held
from tests.trainer.workers import worker
from tmd.core.planning.directives import Directive, Hold, HoldState, Sync, Train, Wait
from tmd.core.planning.failover import HOLDER_OFFSETS, _source
from tmd.core.planning.migration import PlanFacts
from tmd.core.values.model import Activity, ClusterView, HostStatus, Member, Membership
from tmd.testing.clients import worker_status
from tmd.trainer.state.layout import Layout
from tmd.trainer.state.replicas import Partition, all_alike, group_of
from tmd.trainer.state.units import Units, whole_digest
from tmd.trainer.state_transfer.context import RankContext
from tmd.trainer.state_transfer.early_digest import EarlyDigest
from tmd.trainer.worker.shadow_driver import ShadowDriver

pytestmark = pytest.mark.timeout(60)

STEP = 3


class Odd:
    """A registered object whose state cannot move."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it cannot arrive")


class Watched(Units):
    """Records which threads read units; background threads call ``more`` as well."""

    def __init__(self, script: Script) -> None:
        super().__init__(script.registry())
        self.script = script
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
    """The situation after a loss in the middle of a step."""
    early = EarlyDigest(units)
    early.stand(STEP)
    early.begin()
    return early


def held_beside(units: Watched) -> Held:
    """A background thread stops where it first reads a unit."""
    held = Held()
    units.beside = held.stay
    return held


def test_a_begun_digest_is_not_started_again(units: Watched) -> None:
    """Not for a second report of the loss, nor at the end of the step, nor for a second joiner."""
    early = begun(units)
    early.begin()
    early.stand(STEP)
    early.begin()
    found = [early.of(STEP)(), early.of(STEP)()]

    assert units.by_main == 0
    assert len(units.looked) == len(units)
    assert found == [whole_digest(units, STEP)] * 2


def test_values_that_a_broken_step_changes_are_read_last() -> None:
    """Buffers and schedulers have their values between two steps, not those within one."""
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


def test_a_state_that_cannot_be_compared_ends_no_healthy_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has come after the registration: a set in a registered object."""
    script = Script(1)
    script.others["odd"] = Odd()
    early = EarlyDigest(Units(script.registry()))
    for step in range(STEP):
        early.stand(step)
        early.keep_rest()

    assert caplog.text.count("cannot be compared") == 1


def test_no_digest_begins_between_two_steps(units: Watched) -> None:
    """A script may change its parameters there, so they are read afterwards."""
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


def test_a_step_that_was_committed_after_all_gets_a_new_digest(units: Watched) -> None:
    early = begun(units)

    whole = whole_digest(units, STEP + 1)
    held = held_beside(units)
    later = early.of(STEP + 1)
    assert held.wait()
    held.let_go()

    assert later() == whole


def test_a_later_step_takes_the_place_of_an_earlier_one(units: Watched) -> None:
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


def test_a_failed_digest_is_computed_on_demand(units: Watched) -> None:
    def fail() -> None:
        raise RuntimeError("no memory on the device")

    units.beside = fail
    early = begun(units)

    assert early.of(STEP)() == whole_digest(units, STEP)
    assert units.by_main == 2 * len(units)


def test_a_digest_works_without_a_thread(units: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that receives directives must continue."""

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    early = begun(units)

    assert early.of(STEP)() == whole_digest(units, STEP)


@pytest.mark.parametrize("end", [EarlyDigest.forget, EarlyDigest.close])
def test_nothing_is_read_after_forget(end: Callable[[EarlyDigest], None], units: Watched) -> None:
    """The state may change afterwards. Only the current piece is waited for."""
    held = held_beside(units)
    early = begun(units)
    work = early._work
    assert work is not None
    assert held.wait()
    ending = threading.Thread(target=end, args=(early,))
    ending.start()
    Facts().until(lambda: work.cancelled)
    held.let_go()
    ending.join()
    early.begin()

    assert len(units.looked) == 1


def test_a_digest_that_is_compared_is_finished_before_the_state_may_change(units: Watched) -> None:
    """An evaluation, repeated after a loss, may exchange the weights."""
    held = held_beside(units)
    early = begun(units)
    found, before = early.of(STEP), whole_digest(Units(units.script.registry()), STEP)
    assert held.wait()

    def begin_evaluation() -> None:
        early.finish()
        early.forget()

    beginning = threading.Thread(target=begin_evaluation)
    beginning.start()
    work = early._work
    assert not Facts().within(0.1, lambda: work is None or work.cancelled)
    held.let_go()
    beginning.join()
    with torch.no_grad():
        units.params[0].zero_()

    assert found() == before


# --- the worker that begins -----------------------------------------------------------------------


def is_begun(context: RankContext) -> bool:
    return context.state.early._work is not None


def begins(folder: Path, directive: Directive, rank: int | None, alike: Partition) -> bool:
    """Whether a survivor with ``rank`` of four takes its digest."""
    with worker(folder, activity=Activity.STUCK, rank=rank, step=STEP) as made:
        made.reporter.registered(alike, [], (), made.context.fit.roles)
        made.context.state.early.stand(STEP)
        made.parts.recovery.digest_early(directive)
        return is_begun(made.context)


ALL = all_alike(4)
PAIRS = ((0, 2), (1, 3))


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
def test_the_likely_source_begins_its_digest(
    tmp_path: Path, lost: tuple[int, ...], alike: Partition, expected: list[int]
) -> None:
    """Of all workers with the state, the one that the leader chooses if all survive a step."""
    hold = Hold("plan", 1, lost)
    left = [rank for rank in range(4) if rank not in lost]
    found = []
    for rank in left:
        (folder := tmp_path / str(rank)).mkdir()
        if begins(folder, hold, rank, alike):
            found.append(rank)
    assert found == expected

    workers = tuple(
        replace(worker_status(str(r)), replicas=group_of(alike, r), holds=held(r)) for r in left
    )
    facts = PlanFacts(ClusterView(hosts=(HostStatus("h", "i", workers=workers),)), "job")
    owners = {r: Member(str(r), "h", "") for r in left}
    asked = [_source(r, owners, 4, facts) for r in lost]
    assert sorted({int(m.worker) for m in asked if m is not None}) == expected


def held(rank: int) -> tuple[int, ...]:
    """Ranks whose buffers ``rank`` stores."""
    return tuple((rank - offset) % 4 for offset in HOLDER_OFFSETS)


def test_no_digest_begins_without_a_rank_or_a_need(tmp_path: Path) -> None:
    sync, train = Sync("plan", Membership(2, ()), 2, STEP, ()), Train(Membership(1, ()), 2)
    found = []
    cases: list[tuple[Directive, int | None]] = [
        (Hold("plan", 1, (1,)), None),
        (sync, 2),
        (train, 2),
    ]
    for number, (directive, rank) in enumerate(cases):
        (folder := tmp_path / str(number)).mkdir()
        found.append(begins(folder, directive, rank, ALL))

    assert found == [False] * 3


@pytest.mark.parametrize(
    ("directive", "has_state", "expected"),
    [
        (HoldState("plan", over=True), True, True),
        (HoldState("plan", over=True), False, False),
        (HoldState("plan"), True, False),
        (Wait(), True, False),
    ],
)
@pytest.mark.parametrize("hears", [ShadowDriver.cancel_unless, ShadowDriver.digest_early])
def test_a_hot_standby_begins_once_its_rank_is_lost(
    tmp_path: Path,
    hears: Callable[[ShadowDriver, Directive], None],
    directive: HoldState | Wait,
    has_state: bool,
    expected: bool,
) -> None:
    """Whether it hears of it in a step, or only between two."""
    with pair(Script) as p, worker(tmp_path) as made:
        driver, early = made.parts.driver, made.context.state.early
        early.stand(STEP)
        hears(driver, directive)
        before = is_begun(made.context)
        if has_state:
            p.meet()
            p.together(1)
        driver.following = p.joiner.following
        hears(driver, directive)

        assert not before
        assert p.joiner.following.has_state == has_state
        assert is_begun(made.context) == expected

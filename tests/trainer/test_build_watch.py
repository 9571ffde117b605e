"""A build beside training that stalls it is given up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from msgspec import structs

from tests.trainer.wire import Facts
from tmd.core.values.model import Activity, WorkerStatus
from tmd.core.worker.build_stall import STALL_S
from tmd.trainer.worker.build_watch import BuildWatch

pytestmark = pytest.mark.timeout(30)


class Scene(Facts):
    """Training, and a build beside it; the clock is the test's."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._status = WorkerStatus("w", "job", 1, "", 0, Activity.TRAINING, step_seconds=0.1)
        self.looks = 0
        self.outcomes: list[str] = []
        self.stalls: list[str] = []
        self.ends: Callable[[str], None] = lambda why: None
        self.watch = BuildWatch(
            self._look, self.stalls.append, look_s=0.001, clock=lambda: self._now
        )

    def begin(self) -> None:
        def start(done: Callable[[str], None]) -> None:
            self.ends = done

        self.watch.build(2, start, self._built)

    def _look(self) -> WorkerStatus:
        with self.changing():
            self.looks += 1
            return self._status

    def _built(self, why: str) -> None:
        with self.changing():
            self.outcomes.append(why)

    def seen(self) -> None:
        """Wait until the watch has looked twice at what is now."""
        looks = self.looks
        self.until(lambda: self.looks >= looks + 2)

    def step(self) -> None:
        """A step is committed."""
        with self.changing():
            self._status = structs.replace(self._status, step=self._status.step + 1)
        self.seen()

    def wait(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    made.begin()
    made.seen()
    yield made
    made.ends("the test is over")


def test_a_build_during_which_steps_are_committed_goes_on(scene: Scene) -> None:
    """However long it takes."""
    for _ in range(10):
        scene.wait(STALL_S - 1)
        scene.step()
    scene.ends("")

    assert scene.outcomes == [""]
    assert scene.stalls == []


def test_a_build_without_a_commit_is_given_up_once(scene: Scene) -> None:
    """What it reports later counts no more. The stall is reported, too: the next build is made at a
    switch."""
    scene.wait(STALL_S + 1)
    scene.until(lambda: bool(scene.outcomes))
    scene.ends("")

    assert scene.outcomes == ["no step was committed for 11 s during a build of groups"]
    assert scene.stalls == scene.outcomes


def test_the_next_build_has_a_time_of_its_own(scene: Scene) -> None:
    scene.wait(STALL_S + 1)
    scene.until(lambda: len(scene.outcomes) == 1)
    scene.begin()
    scene.seen()
    scene.wait(STALL_S - 1)
    scene.seen()
    early = len(scene.outcomes)
    scene.wait(2.0)
    scene.until(lambda: len(scene.outcomes) == 2)

    assert early == 1


def test_a_build_that_ends_as_it_is_given_up_does_not_count_as_stalled() -> None:
    """Else the next build would be made at a switch for no reason."""
    stalls: list[str] = []
    outcomes: list[str] = []
    ends: list[Callable[[str], None]] = []

    late, now = False, 0.0

    def look() -> WorkerStatus:
        if late:
            ends[0]("")
        return WorkerStatus("w", "job", 1, "", 0, Activity.TRAINING, step_seconds=0.1)

    watch = BuildWatch(look, stalls.append, look_s=0.001, clock=lambda: now)
    watch.build(2, ends.append, outcomes.append)
    late, now = True, STALL_S + 1
    Facts().until(lambda: "tmd-build-watch" not in {t.name for t in threading.enumerate()})

    assert outcomes == [""]
    assert stalls == []


def test_a_build_that_was_dropped_is_watched_no_longer(scene: Scene) -> None:
    """In a recovery no step is committed for long."""
    scene.watch.drop(2)
    scene.until(lambda: all(t.name != "tmd-build-watch" for t in threading.enumerate()))
    scene.wait(100 * STALL_S)

    assert scene.outcomes == []


def test_the_end_of_an_earlier_order_drops_no_later_build(scene: Scene) -> None:
    """Its group would never be ready."""
    scene.watch.drop(1)
    scene.ends("")

    assert scene.outcomes == [""]


def test_nothing_is_watched_if_nothing_is_built() -> None:
    """As with tmd's own algorithms."""
    scene = Scene()
    scene.watch.build(2, lambda done: done("no memory"), scene._built)

    assert scene.looks == 0
    assert scene.outcomes == ["no memory"]


def test_a_build_goes_on_if_no_thread_can_watch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that receives directives must continue."""

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    scene = Scene()
    scene.begin()
    scene.ends("")

    assert scene.outcomes == [""]

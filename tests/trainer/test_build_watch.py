"""A build beside training that stalls it is given up, and what it blocks is ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.trainer.wire import Facts
from tmd.core.worker.build_stall import BLOCK_FACTOR, STALL_S
from tmd.trainer.worker.build_watch import BuildWatch, TrainingProgress

pytestmark = pytest.mark.timeout(30)


class Scene(Facts):
    """Training, and a build beside it; the clock is the test's."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.looks = 0
        self.progress = TrainingProgress(
            epoch=1, trains=True, step=5, calls=10, quiet=True, step_s=0.1
        )
        self.building = True
        self.outcomes: list[str] = []
        self.broken: list[str] = []
        self.ends: Callable[[str], None] = lambda why: None
        self.watch = BuildWatch(
            self._read,
            lambda: self.building,
            self._note(self.broken),
            look_s=0.001,
            clock=self.read,
        )

    def begin(self) -> None:
        def start(done: Callable[[str], None]) -> None:
            self.ends = done

        self.watch.build(start, self._note(self.outcomes))

    def read(self) -> float:
        return self.now

    def _read(self) -> TrainingProgress:
        with self.changing():
            self.looks += 1
        return self.progress

    def _note(self, into: list[str]) -> Callable[[str], None]:
        def note(why: str) -> None:
            with self.changing():
                into.append(why)

        return note

    def seen(self) -> None:
        """Wait until the watch has looked twice at what is now."""
        looks = self.looks
        self.until(lambda: self.looks >= looks + 2)

    def passes(self, seconds: float, *, steps: int = 0, calls: int = 0) -> None:
        """Time passes, and training comes so far meanwhile."""
        before = self.progress
        self.progress = before._replace(step=before.step + steps, calls=before.calls + calls)
        self.now += seconds
        self.seen()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    made.begin()
    made.seen()
    yield made
    made.building = False


def test_a_build_during_which_steps_are_committed_goes_on(scene: Scene) -> None:
    """However long it takes. Its end is passed on once."""
    for _ in range(10):
        scene.passes(STALL_S - 1, steps=1)
    scene.ends("")

    assert scene.outcomes == [""]
    assert scene.broken == []


def test_a_build_without_a_commit_is_given_up_once(scene: Scene) -> None:
    """What it reports later counts no more."""
    scene.passes(STALL_S + 1)
    scene.until(lambda: bool(scene.outcomes))
    scene.passes(STALL_S + 1)
    scene.ends("")

    assert scene.outcomes == ["no step was committed for 11 s during a build of groups"]
    assert scene.broken == []


def test_operations_that_wait_on_are_ended_by_breaking_the_step(scene: Scene) -> None:
    """The job goes on with a step repeated, instead of waiting for ever."""
    scene.progress = scene.progress._replace(quiet=False)
    scene.seen()
    scene.passes(BLOCK_FACTOR * STALL_S)
    before = list(scene.broken)
    scene.passes(1.0)
    scene.until(lambda: bool(scene.broken))

    assert before == []
    assert len(scene.outcomes) == 1
    assert "being built for the next epoch block this step" in scene.broken[0]


def test_a_step_with_ever_new_operations_is_not_broken(scene: Scene) -> None:
    """It is only long."""
    scene.progress = scene.progress._replace(quiet=False)
    for _ in range(10):
        scene.passes(STALL_S, calls=1)

    assert scene.broken == []


@pytest.mark.parametrize("change", [{"trains": False}, {"epoch": 2}], ids=["halted", "next epoch"])
def test_a_recovery_is_not_judged(change: dict[str, int], scene: Scene) -> None:
    """Its operations wait for groups of their own epoch, which may take long to be built."""
    scene.progress = scene.progress._replace(quiet=False, **change)  # type: ignore[arg-type]
    looks = scene.looks
    scene.until(lambda: scene.looks >= looks + 2 or not scene.watch.active)
    scene.now += 10 * BLOCK_FACTOR * STALL_S
    if scene.watch.active:
        scene.seen()

    assert scene.outcomes == scene.broken == []


def test_the_next_build_has_a_time_of_its_own(scene: Scene) -> None:
    """An earlier one was given up, and still runs."""
    scene.passes(STALL_S + 1)
    scene.until(lambda: len(scene.outcomes) == 1)
    scene.begin()
    scene.passes(STALL_S - 1)
    early = len(scene.outcomes)
    scene.passes(2.0)
    scene.until(lambda: len(scene.outcomes) == 2)

    assert early == 1


def test_nothing_is_watched_if_nothing_is_built() -> None:
    scene = Scene()
    scene.building = False
    scene.begin()
    scene.now = 1000.0
    scene.ends("no memory")

    assert scene.looks == 0
    assert scene.outcomes == ["no memory"]


def test_a_later_build_is_watched_again(scene: Scene) -> None:
    scene.ends("")
    scene.building = False
    scene.until(lambda: not scene.watch.active)
    scene.building = True
    scene.begin()
    scene.seen()
    scene.passes(STALL_S + 1)
    scene.until(lambda: len(scene.outcomes) == 2)

    assert scene.outcomes[0] == ""
    assert "no step was committed" in scene.outcomes[1]

"""A rank and a joiner that shadows it, in one process, for the tests of the tail.

The rank trains in the main thread, the joiner in another one; neither has collectives, so both
compute a step from its number alone. Nothing depends on time: the clock that meters the copy is the
test's, and where the two must stay together, the rank waits in its open window.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from msgspec import msgpack
from torch import Tensor

from tests.fabric.circle import KEY, member
from tests.trainer.scripts import Script
from tests.trainer.wire import PATIENCE, Facts, linked
from tmd.core.planning.directives import Prepare
from tmd.core.values.errors import LinkError, StateMismatch, TmdError
from tmd.core.values.limits import ShadowLimits
from tmd.core.values.model import Membership
from tmd.fabric import Fabric, Link, Neutral
from tmd.trainer.protocol.frames import Begin, Boundary, Frame, ShadowRequest, Tail, Unit
from tmd.trainer.protocol.offers import Offer
from tmd.trainer.shadow.meter import Meter
from tmd.trainer.shadow.output_load import OutputLoad
from tmd.trainer.shadow.planned import PlannedSession
from tmd.trainer.shadow.receiver import Arrival, ShadowReceiver
from tmd.trainer.shadow.replay import ReplaySession
from tmd.trainer.shadow.session import ShadowSession
from tmd.trainer.shadow.source import ShadowSource
from tmd.trainer.shadow.source_context import SourceContext, SourcePace
from tmd.trainer.state.data import Feed, Position
from tmd.trainer.state.digests import digest_of
from tmd.trainer.state.placing import DataPlace
from tmd.trainer.state.units import Units, whole_digest
from tmd.trainer.state.window import Window

LIMITS = ShadowLimits(copy_mb_s=1e-6, lag=1e9)
"""A byte in a second: no unit is sent before the clock advances. And no lag is too large."""
LONG = 1e6
MOVE = ShadowRequest("plan", 0)

Picture = dict[str, str]


class Clock:
    """By which the source meters its copy."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now

    def let_one_out(self) -> None:
        """Allow one unit to be copied, and no second one."""
        self.now += LONG


def picture(script: Script, units: Units) -> Picture:
    """Everything that is registered: as the runtime compares it, and read in a second way."""
    layouts, tensors = script.registry().collect()
    plain = {"layouts": msgpack.encode(layouts).hex(), "tensors": digest_of(tensors)}
    return {**whole_digest(units, 0), **plain}


class Source:
    """A rank that trains, and is shadowed from :meth:`show` on. Main thread."""

    def __init__(
        self, script: Script, *, looks: bool = True, pace: SourcePace | None = None
    ) -> None:
        """``looks``: whether it keeps a picture of each step."""
        self._pace = pace
        self.script = script
        self.looks = looks
        self.units = Units(script.registry())
        self.window = Window(lambda: self.units.params)
        self.load = OutputLoad(ShadowLimits())
        self.mirror: ShadowSource | None = None
        self.step = 0
        self.call = 0
        """The ``batches()`` call that it is in."""
        self.quiet = True
        """Whether no operation outlives its step."""
        self.pictures: dict[int, Picture] = {}
        self._look()

    def show(
        self, link: Link, limits: ShadowLimits = LIMITS, request: ShadowRequest = MOVE
    ) -> ShadowSource:
        context = SourceContext(self.units, self.window, limits, Meter(), self.load)
        self.mirror = ShadowSource(link, request, context, self._pace)
        shown = self.mirror
        self.script.before = lambda number: shown.before_optimizer(self.step, number)
        return shown

    def begin(self, *, shut: bool = False) -> None:
        """A step up to its vote. The window stays open, or ``shut`` as in a short step."""
        if self.mirror is not None:
            place = Position(self.call, self.step)
            self.mirror.at_boundary(self.step, place, quiet=self.quiet)
        if not shut:
            self.window.open(self.step)
        if self.mirror is not None:
            self.mirror.wake()
        self.script.backward(self.step)

    def commit(self) -> None:
        self.window.close()
        self.script.apply()
        self.step += 1
        self._look()

    def _look(self) -> None:
        if self.looks:
            self.pictures[self.step] = picture(self.script, self.units)

    def train(self, steps: int, *, shut: bool = False) -> None:
        for _ in range(steps):
            self.begin(shut=shut)
            self.commit()


class Watched(ShadowSession):
    """Records its actions."""

    facts: Facts
    received: list[Frame]
    copied_to: list[int]
    """Steps to whose start it came otherwise than by computing the one before."""
    units = 0
    tails = 0
    """Tails whose gradients were applied."""

    @property
    def boundaries(self) -> list[Boundary]:
        return [frame for frame in self.received if isinstance(frame, Boundary)]

    def _take_in(self, arrival: Arrival, feed: Feed) -> None:
        super()._take_in(arrival, feed)
        with self.facts.changing():
            self.received.append(arrival.frame)
            self.units += isinstance(arrival.frame, Unit)

    def _stand(self, frame: Boundary, tensors: Sequence[Tensor], feed: Feed) -> None:
        before = self._at
        super()._stand(frame, tensors, feed)
        if before != frame.step:
            self.copied_to.append(frame.step)

    def _follow(self, tail: Tail, tensors: Sequence[Tensor]) -> None:
        super()._follow(tail, tensors)
        self.tails += bool(set(tail.units) - self._copied.missing)


class Moved(Watched, PlannedSession):
    """The same for a planned move."""


class Replayed(Watched, ReplaySession):
    """The same for a rehearsal."""


class Telling(ShadowReceiver):
    """Records its frames to the source, and reports arrivals."""

    def __init__(self, link: Link, facts: Facts) -> None:
        self.frames: list[Frame] = []
        self.full = False
        """Whether its memory counts as full."""
        self._facts = facts
        super().__init__(link, 1 << 30)

    @property
    def is_crowded(self) -> bool:
        return self.full or super().is_crowded

    def _sort(self, arrival: Arrival) -> None:
        super()._sort(arrival)
        with self._facts.changing():
            pass

    def send(self, frame: Frame) -> None:
        super().send(frame)
        self.frames.append(frame)


class Joiner(Facts):
    """A worker that shadows the source, in a separate thread."""

    def __init__(self, script: Script, link: Link, kind: type[Watched]) -> None:
        super().__init__()
        self.script = script
        self.units = Units(script.registry())
        self.fabric = Fabric("joiner", KEY)
        self.fabric.sandbox(Neutral(), 0, 1)
        me = member(self.fabric)
        directive = Prepare("plan", Membership(epoch=2, members=(me,)), 0, me, 0)
        offer = Offer(script.registry().collect()[0], (), (0,), Position())
        self.shadow = Telling(link, self)
        self.following = kind(directive, self.shadow, offer, self.units, self.fabric, LIMITS)
        self.following.facts, self.following.received, self.following.copied_to = self, [], []
        self.feed = Feed(range(1 << 20), 0, lambda: 0, lambda: DataPlace(0, 1))
        self.pictures: dict[int, list[Picture]] = {}
        self.at = -1
        """The step at whose start it is; -1 before the first one."""
        self.computed = 0
        """Steps that it has computed itself."""
        self.error: TmdError | None = None
        self.won, self.settled = False, False
        """Without outputs: whether it has the rank, and whether it was ever in step."""
        self.walked_on = False
        """Whether it was sent to a later ``batches()`` call."""
        self.trains = True
        """Whether its steps have an optimizer."""
        self.meanwhile: Callable[[int], None] = lambda step: None
        """Called before each check for the next step, with the number of that step."""
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._thread = threading.Thread(target=self._live, name="joiner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self.may_go_on.set()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE)
            assert not self._thread.is_alive()
        self.shadow.close()
        self.fabric.close()

    def another_unit(self, seen: int) -> None:
        self.until(lambda: self.following.units > seen)

    def proved(self, step: int) -> bool:
        """Whether it has computed ``step`` from an equal state."""
        return self.at > step and self.following.status().verified == step

    @property
    def lacks_state(self) -> bool:
        return self.following.status().copied < 1

    def _live(self) -> None:
        try:
            while True:
                assert self.may_go_on.wait(PATIENCE)
                self.meanwhile(self.at)
                if self.following.go_on(self.feed) is not None:
                    with self.changing():
                        self.walked_on = True
                    return
                if not self.following.may_run:
                    if self._followed():
                        return
                    continue
                self._stand(self.following.step)
                assert self.feed.next(self.at) == self.at
                self.script.backward(self.at)
                self.following.voted(0, trained=self.trains)
                self.script.apply()
                self.feed.commit()
                self.following.computed(self.at + 1)
                self._stand(self.at + 1, 1)
        except (LinkError, StateMismatch) as error:
            with self.changing():
                self.error = error

    def _followed(self) -> bool:
        """Record where it is, if its rank sends no outputs. Returns whether it has the rank."""
        if self.following.has_switched:
            with self.changing():
                self.won = True
            return True
        if self.following.has_state and self.following.step != self.at:
            self._stand(self.following.step)
        if self.following.in_step and not self.settled:
            self.settled = True
            self.following.settle()
        return False

    def _stand(self, step: int, computed: int = 0) -> None:
        self.pictures.setdefault(step, []).append(picture(self.script, self.units))
        with self.changing():
            self.at = step
            self.computed += computed


class Pair:
    """Both of them. ``close`` ends everything."""

    def __init__(
        self,
        make: Callable[[int], Script],
        near: Link,
        far: Link,
        clock: Clock,
        kind: type[Watched],
    ) -> None:
        self.clock = clock
        self._near = near
        pace = SourcePace(idle_s=0.002, check_every=1, clock=clock.read)
        self.source = Source(make(1), pace=pace)
        script = make(2)
        script.train(range(100, 102))
        self.joiner = Joiner(script, far, kind)

    def meet(self) -> None:
        """The joiner asks; its state arrives one unit at a time, two steps between two units."""
        source, joiner = self.source, self.joiner
        source.show(self._near)
        joiner.start()
        while joiner.following.units == 0:
            source.begin()
            joiner.within(0.05, lambda: joiner.following.units > 0)
            source.commit()
        while joiner.lacks_state:
            source.train(1)
            self.clock.let_one_out()
            seen = joiner.following.units
            source.begin()
            joiner.another_unit(seen)
            source.commit()

    def together(self, steps: int) -> None:
        """Steps in which the source waits until the joiner has computed and verified them."""
        for _ in range(steps):
            self.source.begin()
            self.prove()
            self.source.commit()

    def prove(self) -> None:
        """The source waits until the joiner has computed this step from an equal state."""
        step, joiner = self.source.step, self.joiner
        joiner.until(lambda: joiner.proved(step) or joiner.error is not None)
        if joiner.error is not None:
            raise joiner.error

    def fall_behind(self, steps: int, *, shut: bool = False) -> None:
        """The joiner sleeps after one more step; when it wakes up, it finds ``steps`` waiting.

        No digest was taken in these. The source is in the step after them, its window open if not
        ``shut``.
        """
        source, joiner = self.source, self.joiner
        joiner.may_go_on.clear()
        source.begin()
        joiner.until(lambda: joiner.at > source.step)
        source.commit()
        source.train(steps, shut=True)
        source.begin(shut=shut)
        joiner.until(lambda: joiner.shadow.newest_boundary() == source.step)
        joiner.may_go_on.set()

    def fall_back(self) -> None:
        """Steps until everything was copied while the source waited."""
        joiner = self.joiner
        whole = Begin(whole=True)  # sent last, when the joiner has dropped what it had
        while joiner.error is None and (whole not in joiner.shadow.frames or joiner.lacks_state):
            self.source.begin()
            # The joiner may have got its copy and failed before this thread looks.
            joiner.until(
                lambda: (
                    joiner.lacks_state or joiner.at > self.source.step or joiner.error is not None
                )
            )
            self.source.commit()

    def come_apart(self) -> TmdError:
        """Steps until the joiner gives up; returns the reason."""
        joiner = self.joiner
        while joiner.error is None:
            self.source.begin()
            joiner.until(lambda: joiner.proved(self.source.step) or joiner.error is not None)
            self.source.commit()
        return joiner.error

    @property
    def copied_at(self) -> int:
        """The latest step that the joiner reached without computing the previous one."""
        return self.joiner.following.copied_to[-1]

    def assert_equal(self) -> None:
        """At every step of the joiner its state equalled the source's."""
        self._assert_equal(self.joiner.pictures)

    def assert_equal_at_last(self) -> None:
        """The same, but only from :attr:`copied_at` on."""
        copied, pictures = self.copied_at, self.joiner.pictures
        later = {step: seen for step, seen in pictures.items() if step > copied}
        self._assert_equal({copied: pictures[copied][-1:], **later})

    def _assert_equal(self, pictures: dict[int, list[Picture]]) -> None:
        assert pictures
        for step, seen in pictures.items():
            for each in seen:
                assert each == self.source.pictures[step], f"at the start of step {step}"

    def close(self) -> None:
        if self.source.mirror is not None:
            self.source.mirror.drop("the test is over")
        self.joiner.end()


@contextmanager
def pair(
    make: Callable[[int], Script], *, trained: int = 3, kind: type[Watched] = Moved
) -> Iterator[Pair]:
    """``make(seed)`` builds the script; the source has ``trained`` steps behind it."""
    clock = Clock()
    with linked() as (near, far):
        made = Pair(make, near, far, clock, kind)
        try:
            made.source.train(trained)
            yield made
        finally:
            made.close()

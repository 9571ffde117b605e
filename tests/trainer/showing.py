"""A rank that is shadowed, and a reader at the joiner's end of the link: no joiner computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from tests.trainer.scripts import Script
from tests.trainer.tailing import Source
from tests.trainer.wire import Ear, linked
from tmd.core.values.limits import ShadowLimits
from tmd.fabric import Link
from tmd.trainer.protocol.frames import Begin, Boundary, ShadowRequest
from tmd.trainer.shadow.output_load import OutputLoad
from tmd.trainer.shadow.source_context import SourcePace

FAST = ShadowLimits(copy_mb_s=1e6)
UNREAD = 8 << 10
"""Bytes that the joiner's kernel buffers unread; the source's buffers about a megabyte."""


def wide() -> nn.Module:
    """Gradients of two megabytes, far more than the buffers of a link hold."""
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 65536), nn.Linear(65536, 1))


class Show(Source):
    """A rank that is shadowed, and the frames at the joiner's end."""

    def __init__(
        self,
        script: Script,
        near: Link,
        far: Link,
        limits: ShadowLimits,
        pace: SourcePace | None = None,
    ) -> None:
        super().__init__(script, looks=False, pace=pace)
        self.ear = Ear(far)
        self._near, self._limits = near, limits

    def open(self, request: ShadowRequest) -> None:
        """Let the joiner shadow the rank."""
        self.shown = self.show(self._near, self._limits, request)

    def pause(self, enough: Callable[[], bool]) -> None:
        """A step with a window that stays open briefly, or until a condition holds."""
        self.begin()
        self.ear.within(0.02, enough)
        self.commit()

    def arrive(self) -> None:
        """Wait until the joiner receives outputs."""
        self.ear.say(Begin())
        while not self.ear.of(Boundary):
            assert not self.shown.over
            self.pause(lambda: bool(self.ear.of(Boundary)))
            # On a busy machine steps would pile up before the joiner has read one.
            self.ear.until(lambda: self.shown.over or not self.shown._outbox._queue)

    def until_over(self, act: Callable[[], object]) -> int:
        """Repeat an action until the joiner is dropped; returns the number of repeats."""
        count = 0
        while not self.shown.over:
            act()
            count += 1
        return count


@contextmanager
def show(
    script: Script | None = None,
    limits: ShadowLimits = FAST,
    *,
    trained: int = 0,
    buffer: int | None = None,
    pace: SourcePace | None = None,
    load: OutputLoad | None = None,
    plan: str = "plan",
    adopted: bool = False,
) -> Iterator[Show]:
    """``load``: whether the outputs fit the link; they do if it is not given."""
    script = script or Script(1)
    script.train(range(100, 100 + trained))
    with linked(buffer=buffer) as (near, far):
        made = Show(script, near, far, limits, pace)
        made.load = load or made.load
        made.open(ShadowRequest(plan, 0, adopted))
        try:
            yield made
        finally:
            made.shown.close()
            made.ear.end()

"""Whom a rank lets in to follow it, and when."""

from __future__ import annotations

import queue
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.contexts import NoGroups, context_of
from tests.trainer.scripts import Script
from tests.trainer.showing import FAST
from tests.trainer.wire import linked
from tmd.core.values.errors import LinkError
from tmd.fabric import Link
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.frames import Dropped, Opening, ShadowRequest
from tmd.trainer.shadow.sources import ShadowSources
from tmd.trainer.state.data import Feed

pytestmark = pytest.mark.timeout(60)


class Door(NoGroups):
    """As much of a fabric as the door of a rank needs."""

    standing = "a member"
    poisoned = False
    quiet = True
    rank = 0

    def __init__(self, links: list[Link]) -> None:
        super().__init__()
        self._links: queue.SimpleQueue[Link | None] = queue.SimpleQueue()
        for link in (*links, None):
            self._links.put(link)

    def accept(self, _: str) -> Link:
        link = self._links.get()
        if link is None:
            raise LinkError("closed")
        return link


def answer(feed: Feed | None) -> object:
    """What a rank at this place in its data says to one who wants to follow it."""
    script = Script(1)
    registry = script.registry()
    with linked() as (near, far):
        context = context_of(registry, Door([near]), limits=FAST)
        context.state.feed = feed
        mirrors = ShadowSources(context)
        frames.send(far, frames.Envelope(ShadowRequest("", 0)))
        said, _ = frames.receive(far)
        mirrors.close()
    return said


def feed(*, closed: bool) -> Feed:
    made = Feed([1, 2], 0, lambda: 0, lambda: (0, 1))
    if closed:
        made.close()
    return made


def test_a_rank_in_its_loop_is_followed() -> None:
    assert isinstance(answer(feed(closed=False)), Opening)


@pytest.mark.parametrize("place", [None, feed(closed=True)], ids=["not begun", "over"])
def test_a_rank_outside_of_its_loop_is_not(place: Feed | None) -> None:
    """It may be the end: who was sent on to a next loop would run what comes after training.

    What the rank will have to give is told, so that who does not fit is found before a switch."""
    said = answer(place)

    assert isinstance(said, Dropped)
    assert said.reason == "the rank is between two batches() calls"
    assert said.offer is not None


def test_a_state_that_is_not_proved_is_shown_to_nobody() -> None:
    """The next step is."""
    registry = Script(1).registry()
    verification: Any = SimpleNamespace(pending=True)
    context = replace(context_of(registry, Door([]), limits=FAST), verification=verification)
    context.state.feed = feed(closed=False)
    window, shown = context.window, []
    mirrors = ShadowSources(context)
    mirror: Any = SimpleNamespace(
        over=False, wake=lambda: None, at_boundary=lambda step, *_, **more: shown.append(step)
    )
    mirrors._mirrors = (mirror,)
    mirrors.at_boundary(7)
    unproved = window.version
    verification.pending = False
    mirrors.at_boundary(8)

    assert unproved is None
    assert shown == [8]
    assert window.version == 8

"""How long a worker waits for others, and how long others wait for it."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
import torch

from tests.fabric.circle import at_once, circle, sync
from tmd.fabric.staging import HostCopies
from tmd.fabric.wait_timer import Waits, WaitTimer, busy_between

BEGIN = Waits(at=100.0, total_s=5.0, called_at=99.0, total_before_s=5.0, settled_at=99.5)


@pytest.mark.parametrize(
    ("end", "busy"),
    [
        (Waits(110.0, 5.0, 99.0, 5.0, 99.5), 10.0),
        (Waits(110.0, 8.0, 99.0, 5.0, 99.5), 7.0),
        (Waits(110.0, 8.0, 107.0, 5.0, 110.0), 7.0),
        (Waits(110.0, 5.0, 106.0, 5.0, 109.0), 7.0),
        (Waits(110.0, 9.0, 106.0, 6.0, 109.0), 6.0),
        (Waits(110.0, 5.0, 108.0, 5.0, 104.0), 10.0),
        (Waits(110.0, 5.0, 106.0, 5.0, 112.0), 6.0),
    ],
    ids=[
        "no operation",
        "the rest of an old one",
        "a wait that is seen",
        "a future",
        "an early wait and a future",
        "not complete yet",
        "complete a moment after the vote began",
    ],
)
def test_busy_time_is_the_step_less_the_waits(end, busy):
    assert busy_between(BEGIN, end) == pytest.approx(busy)


def test_waits_of_several_threads_count_once():
    wait_timer = WaitTimer()
    with wait_timer:
        inside = time.monotonic()
        with wait_timer:
            pass
        within = time.monotonic() - inside
    waits = wait_timer.read()

    assert within <= waits.total_s <= waits.at - inside + 1.0
    assert wait_timer.level == 0


def test_waiting_for_the_own_device_counts_as_work():
    """An operation begins when the device reaches it, not when the script called it."""
    wait_timer = WaitTimer()
    begin = wait_timer.read()
    wait_timer.called()
    with wait_timer:
        with wait_timer.computing():
            took = compute()
        waited = wait_timer.read()
        wait_timer.settled()
    end = wait_timer.read()

    assert waited.total_s < took
    assert busy_between(begin, end) >= took
    assert end.called_at - begin.at >= took


class Event:
    """What a slow device has to do first."""

    done = False

    def __bool__(self):
        return True

    def wait(self):
        self.took = compute()

    def precede(self):
        pass

    def aside(self):
        return nullcontext()


def test_staging_separates_device_time_from_waiting():
    wait_timer, event = WaitTimer(), Event()
    staged = HostCopies([torch.ones(2)], (), wait_timer)
    staged.queued = event
    begin = wait_timer.read()
    with wait_timer, staged:
        pass

    assert busy_between(begin, wait_timer.read()) >= event.took


def compute():
    """Compute for a while; returns how long it took."""
    began = time.monotonic()
    torch.linalg.qr(torch.ones(400, 400))
    return time.monotonic() - began


@pytest.mark.parametrize("by_future", [False, True], ids=["waits", "future"])
def test_only_the_late_rank_counts_as_busy(by_future):
    """However the caller waits: in the call, or for the future as DDP does."""
    with circle(2) as c:
        c.group()
        early, late = c.fabrics
        called = threading.Event()

        def reduce(fabric):
            tensor = torch.ones(4)
            group = c.of(fabric)
            if by_future:
                work = group.allreduce([tensor])
                called.set()
                work.get_future().wait()
            else:
                called.set()
                group.allreduce([tensor], sync()).wait()

        def first():
            begin = early.blocked.read()
            reduce(early)
            end = early.blocked.read()
            return end.at - begin.at, busy_between(begin, end)

        def second():
            begin = late.blocked.read()
            assert called.wait(10)
            while not early.waiting:
                time.sleep(0)
            took = compute()
            reduce(late)
            return took, busy_between(begin, late.blocked.read())

        (passed, own), (computed, busy) = at_once([first, second])

    assert passed - own >= computed
    assert busy >= computed

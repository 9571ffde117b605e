"""Who waits for long asks its neighbours whether they are there."""

from types import SimpleNamespace

import pytest

from tmd.core.values.model import Member, Membership
from tmd.fabric import PeerLost
from tmd.trainer.worker.peer_watchdog import LONG, MISSES, PeerWatchdog

HOSTS = ("h0", "h1", "h2", "h3")


class Standing:
    """The links to h1 and h3, and what became of them."""

    def __init__(self):
        self.membership = Membership(1, tuple(Member(h, h, f"{h}:1") for h in HOSTS))
        self.frozen = set()
        self.called = []
        self.blamed = []

    def member_links(self):
        return [(SimpleNamespace(worker=h), None) for h in ("h1", "h3", "h1")]

    def verify(self, member):
        self.called.append(member.worker)
        if member.worker in self.frozen:
            raise PeerLost(member.worker, "it does not answer")

    def blame(self, error):
        self.blamed.append(error.worker)


@pytest.fixture
def scene():
    scene = SimpleNamespace(standing=Standing(), waits=True)
    scene.watchdog = PeerWatchdog(lambda: scene.standing, lambda: scene.waits)
    return scene


def looks(scene, times):
    for _ in range(times):
        scene.watchdog.look()


def test_a_neighbour_that_misses_calls_in_a_row_has_lost_us(scene):
    scene.standing.frozen = {"h3"}
    looks(scene, LONG + MISSES - 2)
    before = list(scene.standing.blamed)
    looks(scene, 1)

    assert before == []
    assert scene.standing.blamed == ["h3"]
    assert set(scene.standing.called) == {"h1", "h3"}, "only neighbours are called"


def test_nobody_is_called_before_the_wait_is_long(scene):
    looks(scene, LONG - 1)
    scene.waits = False
    looks(scene, 1)
    scene.waits = True
    looks(scene, LONG - 1)

    assert scene.standing.called == []


def test_a_call_that_is_answered_ends_the_row(scene):
    for frozen in ({"h3"}, {"h3"}, set(), {"h3"}, {"h3"}):
        scene.standing.frozen = frozen
        looks(scene, LONG if not scene.standing.called else 1)

    assert len(scene.standing.called) == 10
    assert scene.standing.blamed == []


def test_between_two_epochs_there_is_nobody_to_call(scene):
    scene.standing = None
    looks(scene, LONG + MISSES)

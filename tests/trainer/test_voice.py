"""What a worker says of itself between two steps."""

from types import SimpleNamespace

import pytest

from tmd.core.values.model import Activity, Rehearsal
from tmd.testing.clients import worker_status
from tmd.trainer.state.roles import Role, Roles
from tmd.trainer.worker import status_reporter as voices
from tmd.trainer.worker.status_reporter import StatusReporter

FABRIC = SimpleNamespace(address="h1:1", waiting=True, counters=SimpleNamespace(opened=2))
AGENT = SimpleNamespace(start=lambda: None, tell=lambda: None)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(voices.time, "monotonic", lambda: clock.now)
    return clock


def test_how_long_it_stands_is_counted_from_its_latest_commit(clock):
    voice = StatusReporter(worker_status("h1/job/0.a"))
    voice.open(AGENT, FABRIC)
    voice.say(Activity.TRAINING, step=1)
    clock.now += 5.0
    stood = voice.current().stands_s
    voice.say(loss=0.5)
    unmoved = voice.current().stands_s
    voice.say(step=2)

    assert (stood, unmoved, voice.current().stands_s) == (5.0, 5.0, 0.0)


def test_a_standby_does_not_stand(clock):
    voice = StatusReporter(worker_status("h1/job/0.a"))
    voice.open(AGENT, FABRIC)
    voice.say(Activity.STANDBY)
    clock.now += 5.0

    assert voice.current().stands_s == 0.0


def test_it_says_what_the_rank_is_built_as_that_it_holds(clock):
    """And nothing of a rank that it only might be."""
    voice, roles = StatusReporter(worker_status("h1/job/0.a")), Roles(several=True)
    voice.open(AGENT, FABRIC)
    voice.registered((), [], (1,), roles)
    voice.say(Activity.TRAINING, rank=1)
    unheard = voice.status.role
    roles.known = (Role("first", (0,)), Role("last", (1,)))
    voice.say(step=1)
    held = voice.status.role
    voice.say(Activity.STANDBY, rank=None)

    assert (unheard, held, voice.status.role) == ("", "last", "")


def test_the_latest_verdict_on_each_role_is_told(clock):
    """By the roles that were heard last; on those that are no more there is none."""
    voice, roles = StatusReporter(worker_status("h1/job/0.a")), Roles(several=True)
    voice.open(AGENT, FABRIC)
    voice.registered((), [], (1,), roles)
    roles.known = (Role("first", (0,)), Role("last", (1,)))
    for step, rank in ((5, 1), (7, 0), (9, 1)):
        voice.tell_rehearsed(rank, Rehearsal(step, 1.0))
    told = [(v.role, v.ranks, v.step) for v in voice.status.rehearsed]
    voice.tell_rehearsed(1, Rehearsal(0, 0.0, "other shapes"), (roles.known[0], Role("new", (1,))))

    assert told == [("first", (0,), 7), ("last", (1,), 9)]
    assert [v.role for v in voice.status.rehearsed] == ["first", "new"]

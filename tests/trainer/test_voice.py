"""What a worker says of itself between two steps."""

from types import SimpleNamespace

import pytest

from tmd.core.model import Activity
from tmd.testing.clients import worker_status
from tmd.trainer import voice as voices
from tmd.trainer.voice import Voice

FABRIC = SimpleNamespace(address="h1:1", waiting=True, counters=SimpleNamespace(opened=2))
AGENT = SimpleNamespace(start=lambda: None, tell=lambda: None)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(voices.time, "monotonic", lambda: clock.now)
    return clock


def test_how_long_it_stands_is_counted_from_its_latest_commit(clock):
    voice = Voice(worker_status("h1/job/0.a"))
    voice.open(AGENT, FABRIC)
    voice.say(Activity.TRAINING, step=1)
    clock.now += 5.0
    stood = voice.current().stands_s
    voice.say(loss=0.5)
    unmoved = voice.current().stands_s
    voice.say(step=2)

    assert (stood, unmoved, voice.current().stands_s) == (5.0, 5.0, 0.0)


def test_a_standby_does_not_stand(clock):
    voice = Voice(worker_status("h1/job/0.a"))
    voice.open(AGENT, FABRIC)
    voice.say(Activity.STANDBY)
    clock.now += 5.0

    assert voice.current().stands_s == 0.0

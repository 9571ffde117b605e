"""Policies that compute for long, or for ever, hold nobody up."""

from __future__ import annotations

import threading
import time

import pytest

from tmd.core.values.model import ClusterView, Urgency, Verdict
from tmd.daemon.policy_calls import PolicyCalls
from tmd.plugin import Policy
from tmd.testing.clients import until

VIEW = ClusterView()
WISH = Verdict("job", "w", Urgency.DRAIN, "c", "r")
SHORT_S, PAUSE_S = 0.5, 0.5


class Waits(Policy):
    """Decides once ``go`` is set."""

    name = "waits"

    def __init__(self):
        self.go = threading.Event()
        self.calls = 0

    def decide(self, view):
        self.calls += 1
        self.go.wait()
        return [WISH]


class Another(Waits):
    name = "another"


@pytest.fixture
def policy():
    waits = Waits()
    yield waits
    waits.go.set()


def test_verdicts_and_errors_come_through(policy):
    class Fails(Policy):
        name = "fails"

        def decide(self, view):
            raise LookupError("foreign code")

    calls = PolicyCalls()
    policy.go.set()

    assert calls.ask(policy, VIEW) == [WISH]
    with pytest.raises(LookupError, match="foreign code"):
        calls.ask(Fails(), VIEW)


def test_a_policy_that_ends_its_thread_has_failed():
    class Exits(Policy):
        name = "exits"

        def decide(self, view):
            raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        PolicyCalls().ask(Exits(), VIEW)


async def test_a_slow_policy_is_asked_again_after_a_pause(policy):
    """Not while it computes, nor at once afterwards; and no other policy waits for it."""
    calls = PolicyCalls(SHORT_S, PAUSE_S)
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"longer than 0\.5 s"):
            calls.ask(policy, VIEW)
    took = policy.calls, time.monotonic()
    policy.go.set()
    with pytest.raises(TimeoutError):
        calls.ask(policy, VIEW)
    other = Another()
    other.go.set()
    swift = calls.ask(other, VIEW)

    def answers():
        try:
            return calls.ask(policy, VIEW)
        except TimeoutError:
            return None

    await until(lambda: answers() == [WISH], within_s=30)
    assert took[0] == 1
    assert policy.calls == 2
    assert swift == [WISH]
    assert time.monotonic() - took[1] >= PAUSE_S


def test_a_policy_that_was_replaced_is_asked_at_once(policy):
    """A new configuration is in force, though the former one still computes."""
    calls = PolicyCalls(SHORT_S)
    with pytest.raises(TimeoutError):
        calls.ask(policy, VIEW)
    calls.forget()
    swift = Waits()
    swift.go.set()

    assert calls.ask(swift, VIEW) == [WISH]

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
SHORT_S, PAUSE_S = 1.0, 2.0


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


def verdicts(calls, policy):
    """What ``policy`` answers when it is asked alone."""
    (answer,) = calls.ask([policy], VIEW)
    return answer()


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

    assert verdicts(calls, policy) == [WISH]
    with pytest.raises(LookupError, match="foreign code"):
        verdicts(calls, Fails())


def test_a_policy_that_ends_its_thread_has_failed():
    class Exits(Policy):
        name = "exits"

        def decide(self, view):
            raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        verdicts(PolicyCalls(), Exits())


async def test_a_slow_policy_is_asked_again_after_a_pause(policy):
    """Not while it computes, nor at once afterwards; and no other policy waits for it."""
    calls = PolicyCalls(SHORT_S, PAUSE_S)
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"longer than 1 s"):
            verdicts(calls, policy)
    took = policy.calls, time.monotonic()
    policy.go.set()
    with pytest.raises(TimeoutError):
        verdicts(calls, policy)
    other = Another()
    other.go.set()
    swift = verdicts(calls, other)

    def answers():
        try:
            return verdicts(calls, policy)
        except TimeoutError:
            return None

    await until(lambda: answers() == [WISH], within_s=30)
    assert took[0] == 1
    assert policy.calls >= 2
    assert swift == [WISH]
    assert time.monotonic() - took[1] >= PAUSE_S


def test_a_policy_that_was_replaced_is_asked_at_once(policy):
    """A new configuration is in force, though the former one still computes."""
    calls = PolicyCalls(SHORT_S)
    with pytest.raises(TimeoutError):
        verdicts(calls, policy)
    calls.forget()
    swift = Waits()
    swift.go.set()

    assert verdicts(calls, swift) == [WISH]


def test_all_policies_are_asked_at_once(policy):
    """So that none waits for another, and all together take no longer than one may."""
    meeting = threading.Barrier(2)

    class Meets(Policy):
        name = "meets"

        def decide(self, view):
            meeting.wait()
            return [WISH]

    class MeetsToo(Meets):
        name = "meets-too"

    slow, *others = PolicyCalls(2.0).ask([policy, Meets(), MeetsToo()], VIEW)

    assert [answer() for answer in others] == [[WISH]] * 2
    with pytest.raises(TimeoutError):
        slow()


def test_without_threads_policies_decide_as_before(policy, monkeypatch):
    """At a limit of the host's processes lost workers must still be replaced."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    policy.go.set()

    assert verdicts(PolicyCalls(), policy) == [WISH]

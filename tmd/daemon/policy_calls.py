"""Asks policies in threads of their own: one that computes for long, or for ever, must not cost the
leader its lease and its host its heartbeats.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import structlog

from tmd.core.values.model import ClusterView, Verdict
from tmd.core.values.reasons import in_words
from tmd.daemon.policy_runner import PolicyAnswer, verdicts_of
from tmd.plugin import Policy

log = structlog.get_logger("tmd.leader")

LONGEST_S = 1.5
"""Longest time that the leader waits for all policies together, while it does nothing else. With
the pause between two heartbeats it is less than the life of one. The policies of tmd take a tenth
of a second of a processor for ten thousand hosts."""
GRACE_S = 0.2
"""Once that is over, the remaining ones have this long together, since one of the others may have
held the interpreter."""
PAUSE_S = 10.0
"""After the end of a call that took longer its policy is not asked for this time."""


class PolicyCalls:
    """One thread per policy at most; the leader's thread calls :meth:`ask`."""

    def __init__(self, longest_s: float = LONGEST_S, pause_s: float = PAUSE_S) -> None:
        """See :data:`LONGEST_S` and :data:`PAUSE_S`."""
        self._longest_s, self._pause_s = longest_s, pause_s
        self._slow: dict[str, _Call] = {}
        """By policy, the call that took too long, or that still goes on."""

    def ask(self, policies: Sequence[Policy], view: ClusterView) -> Iterator[PolicyAnswer]:
        """What each of ``policies`` demands of ``view``, or a call that raises why there is no
        answer: ``TimeoutError`` if it takes too long, or has done so a moment ago.

        All are asked at once. One for which no thread can be had is asked here.
        """
        calls = {policy.name: self._begun(policy, view) for policy in policies}
        deadline, extended = time.monotonic() + self._longest_s, False
        for policy in policies:
            call = calls[policy.name]
            if not extended and time.monotonic() > deadline:
                deadline, extended = time.monotonic() + GRACE_S, True
            if call is None:
                yield self._too_slow
            elif call.ends_within(max(deadline - time.monotonic(), 0.0)):
                yield call.result
            else:
                self._slow[policy.name] = call
                yield self._too_slow

    def forget(self) -> None:
        """Ask all again: they may be others by now. A call that never ends keeps its thread."""
        self._slow.clear()

    def _begun(self, policy: Policy, view: ClusterView) -> _Call | None:
        """A call of ``policy``; ``None`` if it is not asked again yet."""
        slow = self._slow.get(policy.name)
        if slow is not None and slow.rests(time.monotonic(), self._pause_s):
            return None
        self._slow.pop(policy.name, None)
        return _Call(partial(verdicts_of, policy, view))

    def _too_slow(self) -> list[Verdict]:
        raise TimeoutError(
            f"it decides for longer than {self._longest_s:g} s, and is asked again after a pause"
        )


class _Call:
    """One decision in a thread; in the caller's if there can be no other."""

    def __init__(self, decide: Callable[[], list[Verdict]]) -> None:
        self._decide = decide
        self._ended: float | None = None
        self._found: list[Verdict] | Exception = []
        # A daemon thread: one that never ends must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="tmd-policy", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            log.warning("a policy decides without a thread of its own", reason=in_words(error))
            self._run()

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end; returns whether it came."""
        if self._ended is None:
            self._thread.join(seconds)
        return self._ended is not None

    def result(self) -> list[Verdict]:
        """The verdicts of a call that has ended; raises what it raised."""
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    def rests(self, now: float, pause_s: float) -> bool:
        """Whether its policy is not asked again yet."""
        return self._ended is None or now < self._ended + pause_s

    def _run(self) -> None:
        try:
            self._found = self._decide()
        except Exception as error:
            self._found = error
        self._ended = time.monotonic()

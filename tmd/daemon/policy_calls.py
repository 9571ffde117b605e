"""Asks policies in threads of their own: one that computes for long, or for ever, must not cost the
leader its lease and its host its heartbeats.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tmd.core.values.model import ClusterView, Verdict
from tmd.daemon.policy_runner import verdicts_of
from tmd.plugin import Policy

LONGEST_S = 2.0
"""Longest time that the leader waits for a policy, while it does nothing else: less than the life
of a heartbeat. The policies of tmd take a tenth of a second of a processor for ten thousand hosts.
"""
PAUSE_S = 10.0
"""After the end of a call that took longer the policy is not asked for this time."""


class PolicyCalls:
    """One thread per policy at most; the leader's thread calls :meth:`ask`."""

    def __init__(self, longest_s: float = LONGEST_S, pause_s: float = PAUSE_S) -> None:
        """See :data:`LONGEST_S` and :data:`PAUSE_S`."""
        self._longest_s, self._pause_s = longest_s, pause_s
        self._slow: dict[str, _Call] = {}
        """By policy, the call that took too long, or that still goes on."""

    def ask(self, policy: Policy, view: ClusterView) -> list[Verdict]:
        """What ``policy`` demands of ``view``.

        Raises:
            TimeoutError: it takes longer than ``longest_s``, or has done so a moment ago.
            RuntimeError: no thread can be started.
            Exception: as :func:`verdicts_of`.
        """
        slow = self._slow.get(policy.name)
        if slow is not None and slow.rests(time.monotonic(), self._pause_s):
            raise self._too_slow()
        self._slow.pop(policy.name, None)
        call = _Call(lambda: verdicts_of(policy, view))
        if not call.ends_within(self._longest_s):
            self._slow[policy.name] = call
            raise self._too_slow()
        return call.result()

    def forget(self) -> None:
        """Ask all again: they may be others by now. A call that never ends keeps its thread."""
        self._slow.clear()

    def _too_slow(self) -> TimeoutError:
        return TimeoutError(
            f"it decides for longer than {self._longest_s:g} s, and is asked again after a pause"
        )


class _Call:
    """One decision in a thread.

    Raises:
        RuntimeError: the thread cannot be started.
    """

    def __init__(self, decide: Callable[[], list[Verdict]]) -> None:
        self._decide = decide
        self._ended: float | None = None
        self._found: list[Verdict] | Exception = []
        # A daemon thread: one that never ends must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="tmd-policy", daemon=True)
        self._thread.start()

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end; returns whether it came."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

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
        except BaseException as error:  # such as SystemExit
            self._found = RuntimeError(f"decide() raised {error!r}")
        self._ended = time.monotonic()

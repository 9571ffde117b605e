"""The words in which a gate answers the session."""

from __future__ import annotations

from enum import Enum, auto


class Interrupted(BaseException):
    """The step is poisoned and will be run again. Swallowed by ``session.step()``.

    A ``BaseException`` so that ``except Exception`` in a training script cannot swallow it.
    """


class Outcome(Enum):
    """What a vote decided for this rank."""

    COMMIT = auto()
    SHADOW = auto()
    """A shadow iteration: the optimizer runs, but nothing counts."""
